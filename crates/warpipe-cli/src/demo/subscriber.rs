//! A subscriber of the demo: receives, and has every word of every tensor checked on the device.
//!
//! It never waits long for a check, so it sees the publisher's end at once, also while the device
//! waits for a tensor that will never be complete.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;
use serde_json::json;
use warpipe::backend::StreamOp;
use warpipe::{
    Error, Loss, OptionalExtension, Receipt, Sample, Stream, Subscriber, SubscriberOptions, clock,
};

use super::child::{Child, ChildArgs, tell};
use super::{DEPTH, ENDPOINT, HELD, MEASURED, PATIENCE, WARM_UP, WORK};
use crate::exit::Exit;
use crate::registered::RegisteredPage;

/// Checks that may be enqueued and not concluded.
const CHECKS_MAX: usize = DEPTH as usize;
/// The page's word that says how many checks the device has done.
const DONE: usize = 0;
/// How often counts are reported.
const REPORT_EVERY: Duration = Duration::from_millis(20);
/// How long an item, or a check, is waited for before a look at all else.
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// In the child.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    let Child {
        device,
        domain,
        orders,
    } = Child::begin(args)?;
    let options = SubscriberOptions {
        reconnect: true,
        ..SubscriberOptions::at(&domain, &device)
    };
    let subscriber = Subscriber::wait_for(ENDPOINT, options, PATIENCE)?;
    tell(json!({ "event": "ready" }))?;
    let mut subscribing = Subscribing {
        publisher: subscriber.publisher().map(|it| it.pid),
        subscriber,
        stream: device.stream()?,
        page: Box::leak(Box::new(RegisteredPage::new(&device)?)),
        turn: 0,
        checks: VecDeque::new(),
        counts: Counts::default(),
        latencies: Vec::new(),
    };
    subscribing.follow(&orders)?;
    Ok(Exit::Done)
}

struct Subscribing {
    subscriber: Subscriber,
    /// The process that the link leads to, as last seen.
    publisher: Option<i32>,
    stream: Stream,
    /// Never unregistered: after a fault, checks may still be running at the end.
    page: &'static RegisteredPage,
    /// Checks enqueued so far.
    turn: u64,
    /// Checks enqueued and not concluded.
    checks: VecDeque<Check>,
    counts: Counts,
    /// Of the measured items, in nanoseconds.
    latencies: Vec<u64>,
}

/// An item with its check enqueued, and after it its release.
struct Check {
    receipt: Receipt,
    number: u64,
    sent_ns: u64,
    turn: u64,
    /// For the first item of another publisher: the process before, if that one has died.
    before: Option<i32>,
}

impl Subscribing {
    /// Until the orders end.
    fn follow(&mut self, orders: &Receiver<String>) -> anyhow::Result<()> {
        let mut reported = Instant::now();
        loop {
            match orders.try_recv() {
                Ok(order) => return self.hold(order == "hold and work"),
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {}
            }
            let sample = self.receive()?;
            let limit = if sample.is_some() {
                Duration::ZERO
            } else {
                LOOK_EVERY
            };
            if let Some(sample) = sample {
                self.enqueue_check(sample)?;
            }
            self.look_at_publisher()?;
            self.conclude(limit)?;
            if reported.elapsed() >= REPORT_EVERY {
                reported = Instant::now();
                tell(&self.counts)?;
            }
        }
        self.conclude(PATIENCE)?;
        tell(&self.counts)
    }

    /// The next item, if one comes; waits for it only if there is nothing else to wait for.
    fn receive(&mut self) -> warpipe::Result<Option<Sample>> {
        let limit = match self.checks.len() {
            CHECKS_MAX => return Ok(None),
            0 => LOOK_EVERY,
            _ => Duration::ZERO,
        };
        self.subscriber.receive(&self.stream, limit).optional()
    }

    /// Takes two items, keeps them, and receives nothing more: with work on the device that does not
    /// end, or none. It is to be killed.
    fn hold(&mut self, busy: bool) -> anyhow::Result<()> {
        let (mut held, mut numbers) = (Vec::new(), Vec::new());
        while held.len() < HELD {
            let sample = self.subscriber.receive(&self.stream, PATIENCE)?;
            numbers.push(words(&sample)?[0]);
            held.push(sample);
        }
        match busy {
            true => warpipe_kernels::spin(&self.stream, WORK)?,
            false => self.stream.synchronize(PATIENCE)?,
        }
        tell(json!({ "event": "held", "numbers": numbers }))?;
        loop {
            std::thread::park();
        }
    }

    /// Enqueues the check, behind it its word, and behind both the release.
    fn enqueue_check(&mut self, sample: Sample) -> anyhow::Result<()> {
        let [number, sent_ns, is_unfinished] = words(&sample)?;
        self.turn += 1;
        let (turn, page, stream) = (self.turn, self.page, &self.stream);
        page.word(wrong_words(turn)).store(0);
        let (count, wrong) = (sample.layout().bytes() / 8, page.address(wrong_words(turn)));
        // SAFETY: the sample's slot is ours until its release, behind this kernel on the same
        // stream; the page is never unregistered, and the last check that counted in this word was
        // concluded before.
        unsafe { warpipe_kernels::check(stream, sample.ptr(), count, number, wrong) }?;
        let word = page.address(DONE);
        let done = StreamOp::Signal { word, value: turn };
        // SAFETY: the stream is live, and the page is never unregistered.
        unsafe { stream.device().backend().batch(stream.raw(), &[done]) }?;
        let previous = sample.info().discontinuity.and_then(|gap| gap.previous);
        self.checks.push_back(Check {
            receipt: sample.release()?,
            number,
            sent_ns,
            turn,
            before: previous.filter(|it| !it.graceful).map(|it| it.pid),
        });
        match is_unfinished {
            0 => Ok(()),
            _ => tell(json!({ "event": "waiting" })),
        }
    }

    /// Reports that the link has ended, or leads to the next publisher.
    fn look_at_publisher(&mut self) -> anyhow::Result<()> {
        let now = self.subscriber.publisher().map(|it| it.pid);
        if self.publisher != now && self.publisher.is_some() {
            tell(json!({ "event": "gone", "at_ns": clock::now_ns() }))?;
        }
        self.publisher = now;
        Ok(())
    }

    /// Counts the items that the device has checked; each check is waited for so long.
    fn conclude(&mut self, limit: Duration) -> anyhow::Result<()> {
        while let Some(check) = self.checks.front() {
            let (backend, done) = (self.stream.device().backend(), self.page.word(DONE));
            if !backend.wait_word(done, check.turn, limit)? {
                break;
            }
            let at_ns = clock::now_ns();
            if let Some(check) = self.checks.pop_front() {
                self.count(check, at_ns)?;
            }
        }
        Ok(())
    }

    fn count(&mut self, check: Check, at_ns: u64) -> anyhow::Result<()> {
        let Check { number, before, .. } = check;
        let last = before.map(|_| self.counts.begin_anew());
        match check.receipt.wait(PATIENCE) {
            Ok(()) => {
                let wrong = self.page.word(wrong_words(check.turn)).load();
                if self.counts.verify(number, wrong, at_ns) {
                    tell(json!({
                        "event": "first", "number": number, "at_ns": at_ns, "before": before,
                        "last": last,
                    }))?;
                }
                self.measure(number, at_ns.saturating_sub(check.sent_ns))
            }
            Err(Error::Lost(Loss::Sample { .. })) => {
                self.counts.lose(number);
                tell(json!({ "event": "lost", "number": number, "at_ns": at_ns }))
            }
            Err(error) => Err(error).with_context(|| format!("item {number}")),
        }
    }

    /// Takes in the latency of an item, and reports all after the last that is measured.
    fn measure(&mut self, number: u64, latency_ns: u64) -> anyhow::Result<()> {
        if self.latencies.len() == MEASURED as usize {
            return Ok(());
        }
        self.latencies
            .extend((number > WARM_UP).then_some(latency_ns));
        if number < WARM_UP + MEASURED {
            return Ok(());
        }
        self.latencies.sort_unstable();
        let us = |percent| self.latencies[self.latencies.len() * percent / 100] as f64 / 1e3;
        tell(json!({ "event": "latency", "p50_us": us(50), "p99_us": us(99) }))
    }
}

/// What a publisher's item says of itself: its number, when it was sent, and whether it is one that
/// the publisher will not complete.
fn words(sample: &Sample) -> anyhow::Result<[u64; 3]> {
    let (words, _) = sample.metadata().as_chunks();
    let words = <[[u8; 8]; 3]>::try_from(words).context("an item came without its number")?;
    Ok(words.map(u64::from_le_bytes))
}

/// The page's word in which the check of this turn counts wrong words. No two that are under way
/// share one.
fn wrong_words(turn: u64) -> usize {
    1 + turn as usize % CHECKS_MAX
}

/// Counts over all publishers that were followed, and order.
#[derive(Debug, Default, Serialize)]
#[serde(tag = "event", rename = "counts")]
struct Counts {
    verified: u64,
    wrong: u64,
    gaps: u64,
    lost: u64,
    /// The number that comes next; none before the first item of a publisher.
    #[serde(skip)]
    next: Option<u64>,
    /// The last item of this publisher that was verified, and when.
    last: u64,
    last_ns: u64,
}

impl Counts {
    /// At another publisher's first item. The last item of the one before.
    fn begin_anew(&mut self) -> u64 {
        self.next = None;
        std::mem::take(&mut self.last)
    }

    /// Takes in a complete item. Whether it is the first of its publisher that is right.
    fn verify(&mut self, number: u64, wrong: u64, at_ns: u64) -> bool {
        self.follow(number);
        if wrong > 0 {
            self.wrong += 1;
            return false;
        }
        self.verified += 1;
        self.last_ns = at_ns;
        std::mem::replace(&mut self.last, number) == 0
    }

    fn lose(&mut self, number: u64) {
        self.lost += 1;
        self.follow(number);
    }

    fn follow(&mut self, number: u64) {
        self.gaps += u64::from(self.next.is_some_and(|next| next != number));
        self.next = Some(number + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_that_are_wrong_missing_or_lost_are_told_apart() {
        let mut counts = Counts::default();
        assert!(counts.verify(5, 0, 100), "the first of its publisher");
        assert!(!counts.verify(6, 0, 200), "the first is reported once");
        assert!(!counts.verify(7, 3, 300), "three words are wrong");
        assert!(!counts.verify(9, 0, 450), "8 is missing");
        counts.lose(10);
        let Counts {
            verified,
            wrong,
            gaps,
            lost,
            last_ns,
            ..
        } = counts;
        assert_eq!((verified, wrong, gaps, lost, last_ns), (3, 1, 1, 1, 450));
        assert_eq!(counts.begin_anew(), 9);
        assert!(counts.verify(1, 0, 500), "another publisher begins anew");
        assert_eq!(counts.gaps, 1);
    }
}
