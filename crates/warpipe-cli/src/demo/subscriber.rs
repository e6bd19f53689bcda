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
    Domain, Error, Loss, OptionalExtension, Receipt, Sample, Stream, Subscriber, SubscriberOptions,
    clock,
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
    let child = Child::begin(args)?;
    let options = SubscriberOptions {
        reconnect: true,
        ..Domain::from_environment()?.on(&child.device)
    };
    let subscriber = Subscriber::open(ENDPOINT, options, PATIENCE)?;
    tell(json!({ "ready": 1 }))?;
    let mut subscribing = Subscribing {
        publisher: subscriber.publisher().map(|it| it.pid),
        subscriber,
        stream: child.device.stream()?,
        page: Box::leak(Box::new(RegisteredPage::new(&child.device)?)),
        turn: 0,
        checks: VecDeque::new(),
        facts: Facts::default(),
        latencies: Vec::new(),
    };
    subscribing.follow(&child.orders)?;
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
    facts: Facts,
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
            match self.receive()? {
                Some(sample) => self.enqueue_check(sample)?,
                None => self.conclude(LOOK_EVERY)?,
            }
            self.look_at_publisher();
            self.conclude(Duration::ZERO)?;
            if reported.elapsed() >= REPORT_EVERY {
                reported = Instant::now();
                tell(&self.facts)?;
            }
        }
        self.conclude(PATIENCE)?;
        tell(&self.facts)
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
        let receive = |_| self.subscriber.receive(&self.stream, PATIENCE);
        let held: Vec<Sample> = (0..HELD).map(receive).collect::<Result<_, _>>()?;
        let numbers = held.iter().map(|sample| Ok(words(sample)?[0]));
        let numbers: Vec<u64> = numbers.collect::<anyhow::Result<_>>()?;
        match busy {
            true => warpipe_kernels::spin(&self.stream, WORK)?,
            false => self.stream.synchronize(PATIENCE)?,
        }
        tell(json!({ "holds": HELD, "held": numbers }))?;
        loop {
            std::thread::park();
        }
    }

    /// Enqueues the check, behind it its word, and behind both the release.
    fn enqueue_check(&mut self, sample: Sample) -> anyhow::Result<()> {
        let [number, sent_ns] = words(&sample)?;
        self.facts.taken = number;
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
        Ok(())
    }

    /// Notes that the link has ended, or leads to the next publisher.
    fn look_at_publisher(&mut self) {
        let now = self.subscriber.publisher().map(|it| it.pid);
        if self.publisher != now && self.publisher.is_some() {
            self.facts.gone_ns = clock::now_ns();
        }
        self.publisher = now;
    }

    /// Counts the items that the device has checked; each check is waited for so long.
    fn conclude(&mut self, limit: Duration) -> anyhow::Result<()> {
        while let Some(check) = self.checks.front()
            && self.page.word(DONE).wait(check.turn, limit, true)
        {
            let at_ns = clock::now_ns();
            if let Some(check) = self.checks.pop_front() {
                self.count(check, at_ns)?;
            }
        }
        Ok(())
    }

    fn count(&mut self, check: Check, at_ns: u64) -> anyhow::Result<()> {
        let number = check.number;
        if let Some(before) = check.before {
            self.facts.begin_anew(before);
        }
        match check.receipt.wait(PATIENCE) {
            Ok(()) => {
                let wrong = self.page.word(wrong_words(check.turn)).load();
                self.measure(number, at_ns.saturating_sub(check.sent_ns));
                self.facts.verify(number, wrong, at_ns);
            }
            Err(Error::Lost(Loss::Sample { .. })) => self.facts.lose(number, at_ns),
            Err(error) => return Err(error).with_context(|| format!("item {number}")),
        }
        Ok(())
    }

    /// Takes in the latency of an item, if it is one that is measured.
    fn measure(&mut self, number: u64, latency_ns: u64) {
        if number > WARM_UP && self.latencies.len() < MEASURED as usize {
            self.latencies.push(latency_ns);
            self.latencies.sort_unstable();
            let ns = |percent| self.latencies[self.latencies.len() * percent / 100];
            (self.facts.p50_ns, self.facts.p99_ns) = (ns(50), ns(99));
        }
    }
}

/// What a publisher's item says of itself: its number, and when it was sent.
fn words(sample: &Sample) -> anyhow::Result<[u64; 2]> {
    let (words, _) = sample.metadata().as_chunks();
    let words = <[[u8; 8]; 2]>::try_from(words).context("an item came without its number")?;
    Ok(words.map(u64::from_le_bytes))
}

/// The page's word in which the check of this turn counts wrong words. No two that are under way
/// share one.
fn wrong_words(turn: u64) -> usize {
    1 + turn as usize % CHECKS_MAX
}

/// What is reported: counts over all publishers that were followed, and what was seen.
#[derive(Debug, Default, Serialize)]
struct Facts {
    verified: u64,
    wrong: u64,
    gaps: u64,
    lost: u64,
    /// The number that comes next; none before the first item of a publisher.
    #[serde(skip)]
    next: Option<u64>,
    /// The first and the last item of this publisher that were verified, and when.
    first: u64,
    first_ns: u64,
    last: u64,
    last_ns: u64,
    /// The publisher before, which has died, and the last item of it.
    before: Option<i32>,
    last_before: u64,
    /// When the publisher was seen to be gone.
    gone_ns: u64,
    /// The last item that was lost, and when.
    lost_item: u64,
    lost_ns: u64,
    /// The last item that was received; its check may wait.
    taken: u64,
    p50_ns: u64,
    p99_ns: u64,
}

impl Facts {
    /// At another publisher's first item.
    fn begin_anew(&mut self, before: i32) {
        (self.before, self.last_before) = (Some(before), self.last);
        (self.first, self.last, self.next) = (0, 0, None);
    }

    /// Takes in a complete item.
    fn verify(&mut self, number: u64, wrong: u64, at_ns: u64) {
        self.follow(number);
        if wrong > 0 {
            self.wrong += 1;
            return;
        }
        if self.first == 0 {
            (self.first, self.first_ns) = (number, at_ns);
        }
        (self.last, self.last_ns) = (number, at_ns);
        self.verified += 1;
    }

    fn lose(&mut self, number: u64, at_ns: u64) {
        self.lost += 1;
        (self.lost_item, self.lost_ns) = (number, at_ns);
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
        let mut counts = Facts::default();
        for (number, wrong, at_ns) in [(5, 0, 100), (6, 0, 200), (7, 3, 300), (9, 0, 450)] {
            counts.verify(number, wrong, at_ns);
        }
        counts.lose(10, 460);
        let all = (counts.verified, counts.wrong, counts.gaps, counts.lost);
        assert_eq!(all, (3, 1, 1, 1), "7 is wrong, 8 missing, 10 lost");
        assert_eq!(
            (counts.first, counts.first_ns, counts.last_ns),
            (5, 100, 450)
        );
        counts.begin_anew(4711);
        counts.verify(1, 0, 500);
        let anew = (
            counts.last_before,
            counts.first,
            counts.first_ns,
            counts.gaps,
        );
        assert_eq!(anew, (9, 1, 500, 1), "another publisher begins anew");
    }
}
