//! `warpipe sub`: receives, reports, saves.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use warpipe::{Discontinuity, EndpointName, Error, Layout, Sample, Stream, Subscriber, clock};

use crate::args::SubArgs;
use crate::attach::attach;
use crate::exit::Exit;
use crate::interrupt::{Interrupt, LOOK};
use crate::output::{Output, Style, bytes, count, duration, printable, styled};
use crate::save::SaveDirectory;
use crate::source::Origin;

#[derive(Serialize)]
struct Listening<'a> {
    event: &'static str,
    name: &'a str,
    device: String,
    why: &'a str,
}

#[derive(Serialize)]
struct Received {
    event: &'static str,
    sequence: u64,
    /// How many samples of its publisher are missing before it.
    missing: u64,
    /// Of the first sample of another publisher: the process before.
    previous_pid: Option<i32>,
    dtype: &'static str,
    shape: Vec<u64>,
    strides: Vec<i64>,
    bytes: u64,
    latency_us: Option<f64>,
    file: Option<String>,
    saved: Option<PathBuf>,
}

#[derive(Serialize)]
struct Done {
    event: &'static str,
    samples: u64,
    lost: u64,
    missing: u64,
    dropped: u64,
    interrupted: bool,
}

/// Receives until the count is reached, the publisher ends, nothing comes, or Ctrl-C.
pub fn run(args: &SubArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let interrupt = Interrupt::install()?;
    EndpointName::new(&args.name)?;
    let directory = args.save.as_deref().map(SaveDirectory::open).transpose()?;
    let chosen = args.device.open()?;
    let text = format!("{} on {} ({})", args.name, chosen.device, chosen.why);
    let device = chosen.device.to_string();
    let listening = Listening {
        event: "listening",
        name: &args.name,
        device,
        why: &chosen.why,
    };
    output.say(|| styled(Style::Bold, &text), &listening)?;
    let stream = chosen.device.stream()?;
    let attached = attach(
        &args.name,
        &chosen.device,
        args.reconnect,
        args.timeout,
        &interrupt,
    )?;
    let Some(subscriber) = attached else {
        return Ok(Exit::Interrupted);
    };
    let mut run = Run {
        args,
        output,
        interrupt,
        directory,
        subscriber,
        stream,
        samples: 0,
        lost: 0,
        missing: 0,
    };
    let ending = run.receive_all();
    run.tell_end()?;
    ending
}

struct Run<'a> {
    args: &'a SubArgs,
    output: Output,
    interrupt: Interrupt,
    directory: Option<SaveDirectory>,
    subscriber: Subscriber,
    stream: Stream,
    samples: u64,
    lost: u64,
    missing: u64,
}

impl Run<'_> {
    fn receive_all(&mut self) -> anyhow::Result<Exit> {
        while self
            .args
            .count
            .is_none_or(|count| self.samples + self.lost < count)
        {
            match self.next()? {
                Next::Sample(sample) => self.take(*sample)?,
                Next::Interrupted => return Ok(Exit::Interrupted),
                Next::Closed if self.args.count.is_some() => return Ok(Exit::PeerGone),
                Next::Closed => break,
            }
        }
        Ok(if self.lost > 0 {
            Exit::Failed
        } else {
            Exit::Done
        })
    }

    fn next(&mut self) -> anyhow::Result<Next> {
        let deadline = Instant::now() + self.args.timeout;
        loop {
            if self.interrupt.came() {
                return Ok(Next::Interrupted);
            }
            match self.subscriber.receive(&self.stream, LOOK) {
                Ok(sample) => return Ok(Next::Sample(Box::new(sample))),
                Err(Error::PeerGone { graceful: true, .. }) if !self.args.reconnect => {
                    return Ok(Next::Closed);
                }
                Err(Error::Timeout { .. } | Error::NotFound { .. })
                    if Instant::now() < deadline => {}
                Err(Error::Timeout { what, .. }) => {
                    return Err(Error::Timeout {
                        what,
                        waited: self.args.timeout,
                    }
                    .into());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn take(&mut self, sample: Sample) -> anyhow::Result<()> {
        let missing = sample.discontinuity().map_or(0, |gap| gap.missing);
        self.missing = self.missing.saturating_add(missing);
        match Item::read(sample, self.directory.is_some(), self.args.timeout) {
            Ok(item) => {
                self.samples += 1;
                self.keep(item)
            }
            Err(error @ Error::SampleLost { .. }) => {
                self.lost += 1;
                crate::note(&error.to_string());
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn keep(&self, item: Item) -> anyhow::Result<()> {
        let Item {
            sequence,
            gap,
            layout,
            latency,
            origin,
            data,
        } = item;
        let save = |directory: &SaveDirectory| {
            directory.save(
                sequence,
                origin.as_ref(),
                &layout,
                data.as_deref().unwrap_or_default(),
            )
        };
        let saved = self.directory.as_ref().map(save).transpose()?;
        let file = origin.map(|origin| origin.file);
        let text = || {
            let name = file.as_deref().map(printable).unwrap_or_default();
            let kept = saved
                .as_ref()
                .map(|path| format!("  -> {}", path.display()))
                .unwrap_or_default();
            format!(
                "  #{sequence}  {layout:?}  {}  {}  {name}{kept}{}",
                bytes(layout.bytes()),
                latency.map_or("-".into(), duration),
                gap.map(gap_text).unwrap_or_default()
            )
        };
        let received = Received {
            event: "received",
            sequence,
            missing: gap.map_or(0, |gap| gap.missing),
            previous_pid: gap
                .and_then(|gap| gap.previous)
                .map(|previous| previous.pid),
            dtype: layout.dtype().name(),
            shape: layout.shape().to_vec(),
            strides: layout.strides().to_vec(),
            bytes: layout.bytes(),
            latency_us: latency.map(|latency| latency.as_nanos() as f64 / 1e3),
            file: file.clone(),
            saved: saved.clone(),
        };
        Ok(self.output.say(text, &received)?)
    }

    fn tell_end(&self) -> std::io::Result<()> {
        let (samples, lost, missing) = (self.samples, self.lost, self.missing);
        let dropped = self.subscriber.dropped();
        let interrupted = self.interrupt.came();
        let done = Done {
            event: "done",
            samples,
            lost,
            missing,
            dropped,
            interrupted,
        };
        let text = || {
            let note = if interrupted { ", interrupted" } else { "" };
            format!(
                "{} samples received, {} lost, {} missing, {} dropped{note}",
                count(samples),
                count(lost),
                count(missing),
                count(dropped)
            )
        };
        self.output.say(text, &done)
    }
}

fn gap_text(gap: Discontinuity) -> String {
    let missing = format!("{} missing before", count(gap.missing));
    match gap.previous {
        Some(previous) if gap.missing > 0 => {
            format!(
                "  (another publisher; before: process {}; {missing})",
                previous.pid
            )
        }
        Some(previous) => format!("  (another publisher; before: process {})", previous.pid),
        None => format!("  ({missing})"),
    }
}

enum Next {
    Sample(Box<Sample>),
    Interrupted,
    Closed,
}

/// A sample, read and given back.
struct Item {
    sequence: u64,
    gap: Option<Discontinuity>,
    layout: Layout,
    /// `None` from a publisher without timestamps.
    latency: Option<Duration>,
    origin: Option<Origin>,
    data: Option<Vec<u8>>,
}

impl Item {
    fn read(sample: Sample, with_data: bool, timeout: Duration) -> warpipe::Result<Item> {
        let (sequence, layout, sent_ns) =
            (sample.sequence(), *sample.layout(), sample.sent_at_ns());
        let gap = sample.discontinuity();
        // From another kind of publisher: whatever it means, it is no file.
        let origin = serde_json::from_slice(sample.metadata()).ok();
        sample.wait(timeout)?;
        let latency =
            sent_ns.map(|sent| Duration::from_nanos(clock::now_ns().saturating_sub(sent)));
        let data = with_data.then(|| sample.to_vec(timeout)).transpose()?;
        sample.finish(timeout)?;
        Ok(Item {
            sequence,
            gap,
            layout,
            latency,
            origin,
            data,
        })
    }
}
