//! A demo's subscriber: checks every word of every tensor on the device.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::Context;
use warpipe::{Device, Domain, Error, Sample, Stream, Subscriber, clock};

use super::event::{Event, Received};
use super::{ChildArgs, DEPTH, ENDPOINT, ITEM_PATIENCE, START_PATIENCE, TELL_EVERY};
use crate::exit::Exit;
use crate::interrupt::{Interrupt, LOOK};
use crate::output::Output;
use crate::process;
use crate::registered::RegisteredPage;
use crate::statistics::Histogram;

/// Checks that may be under way at once.
const UNDER_WAY_MAX: usize = DEPTH as usize;

/// In the child.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    process::follow_parent(args.parent)?;
    let interrupt = Interrupt::install()?;
    let device = args.device.open()?.device;
    warpipe_kernels::preload(&device)?;
    let Some(subscriber) = attach(&device, &interrupt)? else {
        return Ok(Exit::Done);
    };
    let mut checker = Checker::new(&device, subscriber)?;
    let ending = checker.run();
    // Told even after a fault: what was seen until then was seen.
    checker.tell_end()?;
    ending?;
    Ok(Exit::Done)
}

fn attach(device: &Device, interrupt: &Interrupt) -> anyhow::Result<Option<Subscriber>> {
    let domain = Domain::from_environment()?;
    let deadline = Instant::now() + START_PATIENCE;
    loop {
        let builder = Subscriber::builder(ENDPOINT).domain(&domain).device(device);
        match builder.wait_for_publisher(Some(LOOK)).build() {
            Ok(subscriber) => return Ok(Some(subscriber)),
            Err(Error::Timeout { .. } | Error::NoPublisher { .. }) if interrupt.came() => return Ok(None),
            Err(Error::Timeout { .. } | Error::NoPublisher { .. }) if Instant::now() < deadline => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A sample whose check has been enqueued.
struct UnderWay {
    sample: Sample,
    word: usize,
    number: u64,
}

struct Checker {
    under_way: VecDeque<UnderWay>,
    subscriber: Subscriber,
    stream: Stream,
    /// Never unregistered: after a fault, checks may still be running when this is dropped.
    page: &'static RegisteredPage,
    counts: Received,
    latency: Histogram,
    enqueued: u64,
    told: Instant,
}

impl Checker {
    fn new(device: &Device, subscriber: Subscriber) -> anyhow::Result<Checker> {
        Ok(Checker {
            under_way: VecDeque::new(),
            subscriber,
            stream: device.stream()?,
            page: Box::leak(Box::new(RegisteredPage::new(device)?)),
            counts: Received::default(),
            latency: Histogram::default(),
            enqueued: 0,
            told: Instant::now(),
        })
    }

    /// Until the publisher has said goodbye and everything it sent is checked.
    fn run(&mut self) -> anyhow::Result<()> {
        let mut quiet = Instant::now();
        loop {
            let open = self.take_in()?;
            if let Some(oldest) = self.under_way.pop_front() {
                self.conclude(oldest)?;
                quiet = Instant::now();
            } else if !open {
                return Ok(());
            } else if quiet.elapsed() > ITEM_PATIENCE {
                anyhow::bail!("no item came within {ITEM_PATIENCE:?}");
            }
        }
    }

    /// Enqueues checks for what is there; false once the publisher has closed and nothing is left.
    fn take_in(&mut self) -> anyhow::Result<bool> {
        while self.under_way.len() < UNDER_WAY_MAX {
            let received = if self.under_way.is_empty() {
                self.subscriber.receive_timeout(&self.stream, LOOK).map(Some)
            } else {
                self.subscriber.try_receive(&self.stream)
            };
            match received {
                Ok(Some(sample)) => self.enqueue(sample)?,
                Ok(None) | Err(Error::Timeout { .. }) => return Ok(true),
                Err(Error::PublisherGone { graceful: true, .. }) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    fn enqueue(&mut self, sample: Sample) -> anyhow::Result<()> {
        let number = sample.metadata().try_into().map(u64::from_le_bytes).context("an item came without its number")?;
        self.enqueued += 1;
        let word = (self.enqueued as usize) % (UNDER_WAY_MAX + 1);
        self.page.word(word).store(0);
        let (words, count) = (sample.ptr(), sample.layout().bytes() / 8);
        // SAFETY: the sample's slot is ours until it is finished, behind this kernel on the same stream; the page
        // is never unregistered, and this word's last check was concluded before.
        unsafe { warpipe_kernels::check(&self.stream, words, count, number, self.page.address(word)) }?;
        self.under_way.push_back(UnderWay { sample, word, number });
        Ok(())
    }

    fn conclude(&mut self, under_way: UnderWay) -> anyhow::Result<()> {
        let sent_ns = under_way.sample.sent_at_ns();
        under_way.sample.finish(ITEM_PATIENCE)?;
        let now_ns = clock::now_ns();
        let in_order = under_way.number == self.counts.verified + self.counts.wrong + 1;
        if in_order && self.page.word(under_way.word).load() == 0 {
            self.counts.verified += 1;
        } else {
            self.counts.wrong += 1;
        }
        self.counts.last_ns = now_ns;
        self.counts.dropped = self.subscriber.dropped();
        self.latency.record(Duration::from_nanos(now_ns.saturating_sub(sent_ns)));
        if self.told.elapsed() >= TELL_EVERY {
            self.told = Instant::now();
            Output::new(true).say(String::new, &Event::Received(self.counts))?;
        }
        Ok(())
    }

    fn tell_end(&mut self) -> std::io::Result<()> {
        let latency = std::mem::take(&mut self.latency);
        Output::new(true).say(String::new, &Event::Finished { counts: self.counts, latency })
    }
}
