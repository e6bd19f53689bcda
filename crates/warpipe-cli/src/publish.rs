//! `warpipe pub`: files as samples.

use std::time::{Duration, Instant};

use serde_json::json;
use warpipe::{EndpointName, Error, Layout, Policy, Publisher, PublisherOptions, Stream};

use crate::args::{PolicyName, PubArgs};
use crate::device_arg::ChosenDevice;
use crate::exit::Exit;
use crate::interrupt::{Interrupt, within};
use crate::output::{Output, bytes, count};
use crate::source::Source;

/// The library's default memory limit.
const MEMORY_LIMIT_LEAST: u64 = 4 << 30;

/// Publishes the files.
pub fn run(args: &PubArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let interrupt = Interrupt::install()?;
    EndpointName::new(&args.name)?;
    // Every file, or the first fault: nothing is published beside a damaged file.
    let files = args.files.iter();
    let sources: Vec<_> = files
        .map(|file| Source::new(file, args.raw, args.void_as))
        .collect();
    let layouts = sources.iter().map(Source::check);
    let layouts: Vec<Layout> = layouts.collect::<Result<_, _>>()?;
    let chosen = args.device.open()?;
    let stream = chosen.device.stream()?;
    let publisher = build(args, &chosen, &layouts)?;
    chosen.announce(&args.name, output)?;
    let mut run = Run {
        args,
        output,
        interrupt,
        publisher,
        stream,
        samples: 0,
    };
    if run.wait_for_subscribers()? {
        match run.send_all(&sources) {
            Err(_) if run.interrupt.came() => {}
            sent => sent?,
        }
        // Complete is what every subscriber can still read when this process has gone: its memory
        // lives on with them.
        run.stream.synchronize(args.timeout)?;
    }
    run.end()
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
    Ok(Publisher::new(
        &args.name,
        PublisherOptions {
            depth: args.depth,
            timestamps: true,
            memory_limit: MEMORY_LIMIT_LEAST.max(largest.saturating_mul(4)),
            policy,
            ..args.domain.open()?.on(&chosen.device)
        },
    )?)
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
    fn wait_for_subscribers(&self) -> warpipe::Result<bool> {
        let wanted = self.args.wait_subscribers as usize;
        let came = self
            .publisher
            .wait_for_subscribers(wanted, within(self.args.timeout));
        match came {
            Err(_) if self.interrupt.came() => Ok(false),
            came => came.map(|()| true),
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
        self.interrupt.sleep(due.saturating_sub(started.elapsed()))
    }

    fn send(&mut self, source: &Source) -> anyhow::Result<()> {
        let item = source.load()?;
        let wait = || within(self.args.timeout);
        let mut sample = self.publisher.loan_within(&item.layout, wait())?;
        sample.write(&self.stream, &item.data)?;
        sample.set_metadata(&source.metadata())?;
        let sent = sample.send_within(&self.stream, wait());
        let sequence = sent.map_err(Error::from)?;
        self.samples += 1;
        let (layout, file) = (item.layout, source.path().display().to_string());
        let size = bytes(layout.bytes());
        let text = || format!("  #{sequence}  {layout:?}  {size}  {file}");
        let sent = json!({
            "event": "sent", "sequence": sequence, "file": file,
            "dtype": layout.dtype().name(), "shape": layout.shape(), "bytes": layout.bytes(),
        });
        Ok(self.output.say(text, &sent)?)
    }

    fn end(self) -> anyhow::Result<Exit> {
        let interrupted = self.interrupt.came();
        let subscribers = self.publisher.subscribers();
        let dropped: u64 = subscribers.iter().map(|it| it.dropped).sum();
        let done = json!({
            "event": "done", "samples": self.samples, "dropped": dropped, "interrupted": interrupted,
        });
        let text = || {
            let note = if interrupted { ", interrupted" } else { "" };
            let (samples, dropped) = (count(self.samples), count(dropped));
            format!("{samples} samples published, {dropped} dropped{note}")
        };
        self.output.say(text, &done)?;
        Ok(self.interrupt.exit())
    }
}
