//! Three stages, each a process; the middle one is killed and started again while the others
//! continue.
//!
//! ```text
//! source --numbers--> filter --doubled--> sink
//! ```
//!
//! The source makes frames of 4096 floats, the filter doubles each of them on the device, the sink
//! verifies every one. After a quarter of the frames the sink kills the filter (`SIGKILL`) and
//! starts another. A death costs at most the frames that the dead process had been given and not
//! sent on: the 8 frames that fit its ring, and the one that was being sent. All are counted by
//! their numbers, which are sent as metadata.
//!
//! **This module is marked for unsafe**: it launches kernels on device memory.
//!
//! ```text
//! cargo run -p warpipe --example pipeline
//! cargo run -p warpipe --example pipeline -- --role sink    # or: one terminal each, in any order; kill -9 the filter,
//! cargo run -p warpipe --example pipeline -- --role filter  # and start it again, whenever you like
//! cargo run -p warpipe --example pipeline -- --role source
//! ```
//!
//! It ends with `ok: 400 frames: N verified, none wrong; L lost with 1 killed filters (9 each at
//! most)`.

mod stage;

use std::process::ExitCode;

use stage::{Actor, Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{
    DType, Layout, Policy, Publisher, PublisherOptions, Result, Sample, Subscriber,
    SubscriberOptions,
};

const FRAMES: u64 = 400;
const FLOATS: u64 = 4096;
const DEPTH: u32 = 8;
/// The frames in the killed filter's ring, and one more: a send that waits for room continues when
/// the reader is gone.
const LOST_MAX: u64 = DEPTH as u64 + 1;

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "source" => source(stage),
        "filter" => filter(stage),
        "sink" => sink(stage, &mut Vec::new()),
        _ => {
            let source = stage.start("source")?;
            let line = sink(stage, &mut vec![stage.start("filter")?])?;
            source.finish()?;
            Ok(line)
        }
    })
}

fn publisher(stage: &Stage, name: &str) -> Result<Publisher> {
    let policy = Policy::Block { timeout: PATIENCE };
    Publisher::new(
        name,
        PublisherOptions {
            depth: DEPTH,
            policy,
            ..stage.domain.on(&stage.device)
        },
    )
}

fn subscriber(stage: &Stage, name: &str, reconnect: bool) -> Result<Subscriber> {
    Subscriber::open(
        name,
        SubscriberOptions {
            reconnect,
            ..stage.domain.on(&stage.device)
        },
        PATIENCE,
    )
}

/// Frame `number` is filled with its number.
fn source(stage: &Stage) -> Outcome<String> {
    let publisher = publisher(stage, "numbers")?;
    let stream = stage.device.stream()?;
    for number in 0..FRAMES {
        let mut frame = publisher.loan(&Layout::contiguous(DType::F32, &[FLOATS])?)?;
        frame.set_metadata(&number.to_ne_bytes())?;
        frame.write(
            &stream,
            &(number as f32).to_ne_bytes().repeat(FLOATS as usize),
        )?;
        // While the filter is being started again there is no subscriber.
        publisher.wait_for_subscribers(1, PATIENCE)?;
        frame.send(&stream)?;
    }
    stream.synchronize(PATIENCE)?;
    Ok(format!("made {FRAMES} frames"))
}

fn filter(stage: &Stage) -> Outcome<String> {
    let mut numbers = subscriber(stage, "numbers", false)?;
    let doubled = publisher(stage, "doubled")?;
    doubled.wait_for_subscribers(1, PATIENCE)?;
    let stream = stage.device.stream()?;
    let mut frames = 0;
    for input in numbers.samples(&stream, PATIENCE) {
        let input = input?;
        let mut output = doubled.loan(input.layout())?;
        output.set_metadata(input.metadata())?;
        // SAFETY: the input was checked to have its layout's bytes, the loan has as many, and this
        // process owns both until this stream has passed the kernel: they are sent and released
        // behind it.
        unsafe {
            warpipe_kernels::scale(
                &stream,
                output.ptr(),
                input.ptr(),
                input.layout().elements(),
                2.0,
            )?
        };
        // The input is released after the output is sent, so that a death in between loses neither.
        output.send(&stream)?;
        drop(input);
        frames += 1;
    }
    stream.synchronize(PATIENCE)?;
    Ok(format!(
        "doubled {frames} frames (process {})",
        std::process::id()
    ))
}

/// Verifies every frame. With a filter of its own, kills that filter half-way and starts the next.
fn sink(stage: &Stage, filters: &mut Vec<Actor>) -> Outcome<String> {
    // It follows the next filter by itself, because that one publishes the same name.
    let mut doubled = subscriber(stage, "doubled", true)?;
    let stream = stage.device.stream()?;
    let (mut next, mut verified, mut lost, mut restarts) = (0, 0, 0, 0);
    while next < FRAMES {
        let frame = doubled.receive(&stream, PATIENCE)?;
        if let Some(previous) = frame.info().discontinuity.and_then(|gap| gap.previous) {
            println!(
                "the filter is another one now; the one before was process {}",
                previous.pid
            );
            restarts += 1;
        }
        let Some(number) = verify(frame)? else {
            continue;
        };
        ensure(number >= next, || {
            format!("frame {number} came a second time")
        })?;
        lost += number - next;
        next = number + 1;
        verified += 1;
        if number == FRAMES / 4
            && let Some(filter) = filters.pop()
        {
            println!(
                "killing the filter, process {}, at frame {number}",
                filter.pid()
            );
            filter.kill()?;
            filters.push(stage.start("filter")?);
        }
    }
    ensure(lost <= restarts * LOST_MAX, || {
        format!("{lost} frames were lost, in {restarts} deaths")
    })?;
    filters.drain(..).try_for_each(|filter| {
        ensure(restarts == 1, || {
            format!("the filter was killed once, and {restarts} deaths were seen")
        })?;
        filter.finish()
    })?;
    Ok(format!(
        "{FRAMES} frames: {verified} verified, none wrong; {lost} lost with {restarts} killed filters ({LOST_MAX} each at most)"
    ))
}

/// The frame's number; `None` when its filter died before the frame was complete, so that it counts
/// as lost.
fn verify(frame: Sample) -> Outcome<Option<u64>> {
    let number = u64::from_ne_bytes(frame.metadata().try_into()?);
    let bytes = match frame.to_vec(PATIENCE) {
        Err(warpipe::Error::Lost(warpipe::Loss::Sample { .. })) => return Ok(None),
        bytes => bytes?,
    };
    let right = (number as f32 * 2.0).to_ne_bytes();
    ensure(bytes.chunks_exact(4).all(|float| float == right), || {
        format!("frame {number} is wrong")
    })?;
    Ok(Some(number))
}
