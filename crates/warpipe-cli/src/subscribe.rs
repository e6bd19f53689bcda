//! `warpipe sub`: receives, reports, saves.

use std::time::Duration;

use serde_json::json;
use warpipe::{
    Device, Discontinuity, EndpointName, Error, ErrorKind, Loss, Sample, Stream, Subscriber,
    SubscriberOptions, clock,
};

use crate::args::SubArgs;
use crate::exit::Exit;
use crate::interrupt::{Interrupt, LOOK, within};
use crate::output::{Output, bytes, count, duration, printable};
use crate::save::SaveDirectory;
use crate::source::Origin;

/// Receives until the count is reached, the publisher ends, nothing comes, or Ctrl-C.
pub fn run(args: &SubArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let interrupt = Interrupt::install()?;
    EndpointName::new(&args.name)?;
    let directory = args.save.as_deref().map(SaveDirectory::open).transpose()?;
    let chosen = args.device.open()?;
    chosen.announce(&args.name, output)?;
    let stream = chosen.device.stream()?;
    let Some(subscriber) = subscribe(args, &chosen.device, &interrupt)? else {
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

/// Subscribes as soon as there is a publisher; none when interrupted before.
fn subscribe(
    args: &SubArgs,
    device: &Device,
    interrupt: &Interrupt,
) -> warpipe::Result<Option<Subscriber>> {
    let options = SubscriberOptions {
        reconnect: args.reconnect,
        handshake_timeout: args.timeout,
        ..args.domain.open()?.on(device)
    };
    match Subscriber::open(&args.name, options, within(args.timeout)) {
        Err(_) if interrupt.came() => Ok(None),
        opened => opened.map(Some),
    }
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
        let count = self.args.count;
        while count.is_none_or(|count| self.samples + self.lost < count) {
            match self.next() {
                Ok(Some(sample)) => match self.take(sample) {
                    Err(_) if self.interrupt.came() => return Ok(Exit::Interrupted),
                    taken => taken?,
                },
                Ok(None) => return Ok(Exit::Interrupted),
                Err(Error::PeerGone { graceful: true, .. }) if !self.args.reconnect => {
                    if count.is_some() {
                        return Ok(Exit::PeerGone);
                    }
                    break;
                }
                Err(error) if error.is_of_one_sample() => self.count_lost(&error),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(if self.lost > 0 {
            Exit::Failed
        } else {
            Exit::Done
        })
    }

    /// None when interrupted.
    fn next(&mut self) -> warpipe::Result<Option<Sample>> {
        if self.interrupt.came() {
            return Ok(None);
        }
        let receive = || self.subscriber.receive(&self.stream, LOOK);
        let passes = |error: &Error| {
            error.kind() == ErrorKind::Timeout || matches!(error, Error::NotFound { .. })
        };
        self.interrupt.wait(self.args.timeout, receive, passes)
    }

    fn take(&mut self, sample: Sample) -> anyhow::Result<()> {
        let gap = sample.info().discontinuity;
        let missing = gap.map_or(0, |gap| gap.missing);
        self.missing = self.missing.saturating_add(missing);
        match self.read(sample, gap) {
            Ok(()) => self.samples += 1,
            Err(error) => match error.downcast_ref() {
                Some(lost @ Error::Lost(Loss::Sample { .. })) => self.count_lost(lost),
                _ => return Err(error),
            },
        }
        Ok(())
    }

    fn count_lost(&mut self, error: &Error) {
        self.lost += 1;
        crate::note(&error.to_string());
    }

    /// Waits for the sample, saves it if that was asked for, gives it back, and reports it.
    fn read(&self, sample: Sample, gap: Option<Discontinuity>) -> anyhow::Result<()> {
        let timeout = self.args.timeout;
        let (sequence, layout) = (sample.sequence(), *sample.layout());
        // From another kind of publisher: whatever it means, it is no file.
        let origin: Option<Origin> = serde_json::from_slice(sample.metadata()).ok();
        let sent_ns = sample.info().sent_at_ns;
        sample.wait(within(timeout))?;
        let latency =
            sent_ns.map(|sent| Duration::from_nanos(clock::now_ns().saturating_sub(sent)));
        let data = match self.directory {
            Some(_) => sample.to_vec(timeout)?,
            None => Vec::new(),
        };
        sample.finish(timeout)?;
        let save = |it: &SaveDirectory| it.save(sequence, origin.as_ref(), &layout, &data);
        let saved = self.directory.as_ref().map(save).transpose()?;
        let file = origin.as_ref().map(|origin| origin.file.as_str());
        let text = || {
            let mut text = format!("  #{sequence}  {layout:?}  {}", bytes(layout.bytes()));
            text += &format!("  {}  ", latency.map_or("-".into(), duration));
            text += &file.map(printable).unwrap_or_default();
            if let Some(path) = &saved {
                text += &format!("  -> {}", path.display());
            }
            text + &gap.map(gap_text).unwrap_or_default()
        };
        let received = json!({
            "event": "received", "sequence": sequence,
            // Of its publisher, before it.
            "missing": gap.map_or(0, |gap| gap.missing),
            // Of the first sample of another publisher: the process before.
            "previous_pid": gap.and_then(|gap| gap.previous).map(|previous| previous.pid),
            "dtype": layout.dtype().name(), "shape": layout.shape(), "strides": layout.strides(),
            "bytes": layout.bytes(),
            "latency_us": latency.map(|latency| latency.as_nanos() as f64 / 1e3),
            "file": file, "saved": saved,
        });
        Ok(self.output.say(text, &received)?)
    }

    fn tell_end(&self) -> std::io::Result<()> {
        let (samples, lost, missing) = (self.samples, self.lost, self.missing);
        let dropped = self.subscriber.dropped();
        let interrupted = self.interrupt.came();
        let done = json!({
            "event": "done", "samples": samples, "lost": lost, "missing": missing,
            "dropped": dropped, "interrupted": interrupted,
        });
        let text = || {
            let note = if interrupted { ", interrupted" } else { "" };
            let [samples, lost, missing, dropped] = [samples, lost, missing, dropped].map(count);
            format!(
                "{samples} samples received, {lost} lost, {missing} missing, {dropped} dropped{note}"
            )
        };
        self.output.say(text, &done)
    }
}

fn gap_text(gap: Discontinuity) -> String {
    let missing = format!("{} missing before", count(gap.missing));
    let Some(previous) = gap.previous else {
        return format!("  ({missing})");
    };
    let before = format!("another publisher; before: process {}", previous.pid);
    match gap.missing {
        0 => format!("  ({before})"),
        _ => format!("  ({before}; {missing})"),
    }
}
