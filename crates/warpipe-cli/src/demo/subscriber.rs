//! A demo's subscriber: checks every word of every tensor on the device.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::Context;
use warpipe::backend::StreamOp;
use warpipe::{Device, Error, Receipt, Sample, Stream, Subscriber, clock};

use super::event::{Event, Received};
use super::{ChildArgs, DEPTH, ENDPOINT, ITEM_PATIENCE, START_PATIENCE, TELL_EVERY};
use crate::attach::attach;
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
    let Some(subscriber) = attach(ENDPOINT, &device, false, START_PATIENCE, &interrupt)? else {
        return Ok(Exit::Done);
    };
    let mut checker = Checker::new(&device, subscriber)?;
    let ending = checker.run();
    // Told even after a fault: what was seen until then was seen.
    checker.tell_end()?;
    ending?;
    Ok(Exit::Done)
}

/// A sample whose check has been enqueued, and behind it its release.
struct UnderWay {
    receipt: Receipt,
    sent_ns: u64,
    number: u64,
    /// Its turn among all checks, which chooses its word of the page.
    turn: u64,
}

/// The page's word that says how many checks the device has done.
const DONE: usize = 0;

/// The page's word in which the check of this turn counts wrong words. None that is under way shares it.
fn errors_word(turn: u64) -> usize {
    1 + (turn % UNDER_WAY_MAX as u64) as usize
}

struct Checker {
    under_way: VecDeque<UnderWay>,
    subscriber: Subscriber,
    stream: Stream,
    /// Never unregistered: after a fault, checks may still be running when this is dropped.
    page: &'static RegisteredPage,
    counts: Received,
    latency: Histogram,
    turns: u64,
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
            turns: 0,
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
        self.turns += 1;
        let (turn, page) = (self.turns, self.page);
        page.word(errors_word(turn)).store(0);
        let (words, count) = (sample.ptr(), sample.layout().bytes() / 8);
        // SAFETY: the sample's slot is ours until its release, behind this kernel on the same stream; the page is
        // never unregistered, and the last check that counted in this word was concluded before.
        unsafe { warpipe_kernels::check(&self.stream, words, count, number, page.address(errors_word(turn))) }?;
        let done = [StreamOp::Signal { word: page.address(DONE), value: turn }];
        // SAFETY: the stream is live, and the page is never unregistered.
        unsafe { self.stream.device().backend().batch(self.stream.raw(), &done) }?;
        let sent_ns = sample.sent_at_ns();
        self.under_way.push_back(UnderWay { receipt: sample.release()?, sent_ns, number, turn });
        Ok(())
    }

    fn conclude(&mut self, under_way: UnderWay) -> anyhow::Result<()> {
        let UnderWay { receipt, sent_ns, number, turn } = under_way;
        let backend = self.stream.device().backend();
        anyhow::ensure!(
            backend.wait_word(self.page.word(DONE), turn, ITEM_PATIENCE)?,
            "the device did not check item {number} within {ITEM_PATIENCE:?}"
        );
        let now_ns = clock::now_ns();
        receipt.wait(ITEM_PATIENCE)?;
        let in_order = number == self.counts.verified + self.counts.wrong + 1;
        if in_order && self.page.word(errors_word(turn)).load() == 0 {
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
