//! The third process: takes every frame to the host, verifies, and writes files.

use std::path::{Path, PathBuf};
use std::time::Instant;

use warpipe::{Sample, Subscriber};

use crate::picture::{self, Picture, REFERENCE_FRAME};
use crate::stage::{Actor, Outcome, PATIENCE, Stage, ensure};
use crate::{DEPTH, HEIGHT, TURN, WIDTH, frames, subscriber};

/// One frame in this many of the first turn is kept.
const KEPT_EVERY: u64 = 5;
/// The frames in a killed renderer's ring, and one more: a send that waits for room continues when
/// the reader is gone.
const LOST_MAX: u64 = DEPTH as u64 + 1;

/// Runs the encoder. With a renderer of its own, and `--kill`, kills that renderer half way and
/// starts the next.
pub fn run(stage: &Stage, renderers: &mut Vec<Actor>) -> Outcome<String> {
    let reference = picture::reference(stage.option("--reference").map(Path::new))?;
    let total = frames(stage)?;
    let mut subscriber = subscriber(stage, "frames", true)?;
    let mut tally = Tally::default();
    let received = receive(stage, &mut subscriber, renderers, total, &mut tally)?;
    renderers.drain(..).try_for_each(Actor::finish)?;
    ensure(tally.lost <= tally.deaths * LOST_MAX, || {
        format!("{} frames lost in {} deaths", tally.lost, tally.deaths)
    })?;

    let out = PathBuf::from(stage.option("--out").unwrap_or("render-out"));
    write(&out, &tally.kept)?;
    let (_, frame) = tally
        .kept
        .iter()
        .find(|(number, _)| *number == REFERENCE_FRAME)
        .ok_or("its reference is lost")?;
    let small = frame.reduced();
    small.write_png(&out.join("small.png"))?;
    picture::compare(&small, &reference)?;
    Ok(format!(
        "{received} of {total} frames, {} lost, {:.0} frames/s, as in the reference",
        tally.lost,
        tally.rate()
    ))
}

/// The frames received so far.
#[derive(Default)]
struct Tally {
    /// The next frame number.
    next: u64,
    lost: u64,
    deaths: u64,
    started: Option<Instant>,
    seconds: f64,
    frames: u64,
    kept: Vec<(u64, Picture)>,
}

impl Tally {
    fn rate(&self) -> f64 {
        // The clock starts when the first frame arrives.
        (self.frames - 1) as f64 / self.seconds
    }
}

fn receive(
    stage: &Stage,
    subscriber: &mut Subscriber,
    renderers: &mut Vec<Actor>,
    total: u64,
    tally: &mut Tally,
) -> Outcome<u64> {
    let stream = stage.device.stream()?;
    let mut buffer = Picture::new(WIDTH, HEIGHT);
    while tally.next < total {
        let frame = subscriber.receive(&stream, PATIENCE)?;
        let previous = frame.info().discontinuity.and_then(|gap| gap.previous);
        tally.deaths += u64::from(previous.is_some());
        let Some(number) = copy(frame, &mut buffer)? else {
            continue;
        };
        ensure(number >= tally.next, || {
            format!("frame {number} came a second time")
        })?;
        tally.lost += number - tally.next;
        tally.next = number + 1;
        tally.frames += 1;
        tally.seconds = tally
            .started
            .get_or_insert_with(Instant::now)
            .elapsed()
            .as_secs_f64();
        if number < TURN && number % KEPT_EVERY == 0 {
            tally.kept.push((number, buffer.clone()));
        }
        let half_way = number == total / 2 && stage.option("--kill").is_some();
        if let Some(renderer) = renderers.pop_if(|_| half_way) {
            println!(
                "killing the renderer, process {}, at frame {number}",
                renderer.pid()
            );
            renderer.kill()?;
            renderers.push(stage.start("renderer")?);
        }
    }
    Ok(tally.frames)
}

/// The frame's number, once its pixels are copied; `None` if its renderer died before they were
/// complete.
fn copy(frame: Sample, picture: &mut Picture) -> Outcome<Option<u64>> {
    let number = u64::from_ne_bytes(frame.metadata().try_into()?);
    match frame.copy_to(&mut picture.pixels, PATIENCE) {
        Err(warpipe::Error::Lost(warpipe::Loss::Sample { .. })) => Ok(None),
        copied => Ok(copied.map(|()| Some(number))?),
    }
}

fn write(out: &Path, kept: &[(u64, Picture)]) -> Outcome {
    std::fs::create_dir_all(out)?;
    for (number, picture) in kept {
        picture.write_png(&out.join(format!("frame-{number:04}.png")))?;
    }
    let small: Vec<Picture> = kept.iter().map(|(_, picture)| picture.reduced()).collect();
    picture::write_gif(&out.join("turn.gif"), &small)?;
    println!(
        "{} pictures and turn.gif written to {}",
        kept.len(),
        out.display()
    );
    Ok(())
}
