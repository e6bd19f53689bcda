//! `warpipe pub`: files as samples.

use std::time::{Duration, Instant};

use serde::Serialize;
use warpipe::{Domain, EndpointName, Error, Layout, Policy, Publisher, Stream};

use crate::args::{PolicyName, PubArgs};
use crate::device_arg::ChosenDevice;
use crate::exit::Exit;
use crate::interrupt::{Interrupt, LOOK};
use crate::output::{Output, Style, bytes, count, styled};
use crate::source::Source;

/// The library's default memory limit.
const MEMORY_LIMIT_LEAST: u64 = 4 << 30;

#[derive(Serialize)]
struct Listening<'a> {
    event: &'static str,
    name: &'a str,
    device: String,
    why: &'a str,
}

#[derive(Serialize)]
struct Sent {
    event: &'static str,
    sequence: u64,
    file: String,
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: u64,
}

#[derive(Serialize)]
struct Done {
    event: &'static str,
    samples: u64,
    dropped: u64,
    interrupted: bool,
}

/// Publishes the files.
pub fn run(args: &PubArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let interrupt = Interrupt::install()?;
    EndpointName::new(&args.name)?;
    let (sources, layouts) = check(args)?;
    let chosen = args.device.open()?;
    let stream = chosen.device.stream()?;
    let publisher = build(args, &chosen, &layouts)?;
    announce(args, &chosen, output)?;
    let mut run = Run {
        args,
        output,
        interrupt,
        publisher,
        stream,
        samples: 0,
    };
    if !run.wait_for_subscribers()? {
        return run.end();
    }
    run.send_all(&sources)?;
    // Complete is what every subscriber can still read when this process has gone: its memory lives
    // on with them.
    run.stream.synchronize(args.timeout)?;
    run.end()
}

/// Every file, or the first fault: nothing is published beside a damaged file.
fn check(args: &PubArgs) -> anyhow::Result<(Vec<Source>, Vec<Layout>)> {
    let sources: Vec<Source> = args
        .files
        .iter()
        .map(|file| Source::new(file, args.raw, args.void_as))
        .collect();
    let layouts = sources
        .iter()
        .map(Source::check)
        .collect::<Result<_, _>>()?;
    Ok((sources, layouts))
}

fn build(args: &PubArgs, chosen: &ChosenDevice, layouts: &[Layout]) -> anyhow::Result<Publisher> {
    let policy = match args.policy {
        PolicyName::Block => Policy::Block {
            timeout: args.timeout,
        },
        PolicyName::DropOldest => Policy::DropOldest,
        PolicyName::DropNewest => Policy::DropNewest,
        PolicyName::Fail => Policy::Fail,
    };
    let largest = layouts.iter().map(Layout::bytes).max().unwrap_or(0);
    let builder = Publisher::builder(&args.name)
        .domain(&Domain::from_environment()?)
        .device(&chosen.device)
        .depth(args.depth)
        .timestamps(true)
        .memory_limit(MEMORY_LIMIT_LEAST.max(largest.saturating_mul(4)))
        .loan_timeout(args.timeout)
        .policy(policy);
    Ok(builder.build()?)
}

fn announce(args: &PubArgs, chosen: &ChosenDevice, output: Output) -> std::io::Result<()> {
    let (device, why) = (chosen.device.to_string(), chosen.why.as_str());
    let text = format!("{} on {device} ({why})", args.name);
    output.say(
        || styled(Style::Bold, &text),
        &Listening {
            event: "listening",
            name: &args.name,
            device,
            why,
        },
    )
}

struct Run<'a> {
    args: &'a PubArgs,
    output: Output,
    interrupt: Interrupt,
    publisher: Publisher,
    stream: Stream,
    samples: u64,
}

impl Run<'_> {
    /// False when interrupted.
    fn wait_for_subscribers(&self) -> anyhow::Result<bool> {
        let wanted = self.args.wait_subscribers as usize;
        let deadline = Instant::now() + self.args.timeout;
        loop {
            match self.publisher.wait_for_subscribers(wanted, LOOK) {
                Ok(()) => return Ok(true),
                Err(Error::Timeout { .. }) if self.interrupt.came() => return Ok(false),
                Err(Error::Timeout { .. }) if Instant::now() < deadline => {}
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

    fn send_all(&mut self, sources: &[Source]) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            for source in sources {
                if !self.wait_for_turn(started) {
                    return Ok(());
                }
                self.send(source)?;
            }
            if !self.args.repeat {
                return Ok(());
            }
        }
    }

    /// Keeps to the rate; false when interrupted.
    fn wait_for_turn(&self, started: Instant) -> bool {
        let due = self.args.rate.map_or(Duration::ZERO, |rate| {
            Duration::from_secs_f64(self.samples as f64 / rate)
        });
        loop {
            let left = due.saturating_sub(started.elapsed());
            if self.interrupt.came() || left.is_zero() {
                return !self.interrupt.came();
            }
            std::thread::sleep(left.min(LOOK));
        }
    }

    fn send(&mut self, source: &Source) -> anyhow::Result<()> {
        let item = source.load()?;
        let mut sample = self.publisher.loan(&item.layout)?;
        sample.write(&self.stream, &item.data)?;
        sample.set_metadata(&source.metadata())?;
        let sequence = sample.send(&self.stream).map_err(Error::from)?;
        self.samples += 1;
        let (layout, file) = (item.layout, source.path().display().to_string());
        let text = || {
            format!(
                "  #{sequence}  {layout:?}  {}  {file}",
                bytes(layout.bytes())
            )
        };
        let (dtype, shape) = (layout.dtype().name(), layout.shape().to_vec());
        let sent = Sent {
            event: "sent",
            sequence,
            file: file.clone(),
            dtype,
            shape,
            bytes: layout.bytes(),
        };
        Ok(self.output.say(text, &sent)?)
    }

    fn end(self) -> anyhow::Result<Exit> {
        let interrupted = self.interrupt.came();
        let dropped = self
            .publisher
            .subscribers()
            .iter()
            .map(|subscriber| subscriber.dropped)
            .sum();
        let done = Done {
            event: "done",
            samples: self.samples,
            dropped,
            interrupted,
        };
        let text = || {
            let note = if interrupted { ", interrupted" } else { "" };
            format!(
                "{} samples published, {} dropped{note}",
                count(self.samples),
                count(dropped)
            )
        };
        self.output.say(text, &done)?;
        Ok(if interrupted {
            Exit::Interrupted
        } else {
            Exit::Done
        })
    }
}
