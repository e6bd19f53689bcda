//! A subscriber of the demo: receives, and has every word of every tensor checked on the device.
//!
//! This thread receives; the checker's waits for the device. So the end of the publisher is seen at
//! once, also while the device waits for a tensor that will never be complete.

use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::event::{PollFd, PollFlags};
use serde_json::{Value, json};
use warpipe::backend::StreamOp;
use warpipe::{
    Device, Error, Loss, OptionalExtension, Receipt, Sample, Stream, Subscriber, SubscriberOptions,
    clock,
};

use super::child::{Child, ChildArgs, tell};
use super::{DEPTH, ENDPOINT, HELD, PATIENCE, WORK, latency};
use crate::exit::Exit;
use crate::poll::poll;
use crate::registered::RegisteredPage;

/// Checks that may be enqueued and not concluded, beside the one in each thread's hands.
const CHECKS_MAX: usize = DEPTH as usize;
/// The page's word that says how many checks the device has done.
const DONE: usize = 0;
/// How often counts are reported, and how soon an order is seen.
const REPORT_EVERY: Duration = Duration::from_millis(20);

/// In the child.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    let child = Child::begin(args)?;
    // Never unregistered: after a fault, checks may still be running at the end.
    let page: &'static RegisteredPage = Box::leak(Box::new(RegisteredPage::new(&child.device)?));
    let options = SubscriberOptions {
        reconnect: true,
        ..SubscriberOptions::at(&child.domain, &child.device)
    };
    let subscriber = Subscriber::wait_for(ENDPOINT, options, PATIENCE)?;
    let (checks, queue) = sync_channel(CHECKS_MAX);
    let device = child.device.clone();
    let checker = std::thread::spawn(move || check_all(&queue, &device, page));
    tell(json!({ "event": "ready" }))?;
    let mut receiving = Receiving {
        publisher: subscriber.publisher().map(|it| it.pid),
        subscriber,
        stream: child.device.stream()?,
        page,
        checks,
        turn: 0,
        held: Vec::new(),
    };
    let ended = receiving.run(&child);
    drop(receiving);
    checker
        .join()
        .map_err(|_| anyhow::anyhow!("the checker's thread has panicked"))??;
    ended?;
    child.tell_leftovers()?;
    Ok(Exit::Done)
}

struct Receiving {
    subscriber: Subscriber,
    /// The process that the link leads to, as last seen.
    publisher: Option<i32>,
    stream: Stream,
    page: &'static RegisteredPage,
    checks: SyncSender<Check>,
    /// Checks enqueued so far.
    turn: u64,
    /// Samples that are kept, as ordered.
    held: Vec<Sample>,
}

impl Receiving {
    /// Until the orders end.
    fn run(&mut self, child: &Child) -> anyhow::Result<()> {
        loop {
            match child.orders.try_recv() {
                Ok(order) if order == "answer" => latency::answer(child)?,
                Ok(order) => self.hold(order == "hold and work")?,
                Err(TryRecvError::Disconnected) => return Ok(()),
                Err(TryRecvError::Empty) => {}
            }
            let received = self.subscriber.receive(&self.stream, Duration::ZERO);
            match received.optional()? {
                Some(sample) => self.enqueue_check(sample)?,
                None => self.wait()?,
            }
            self.look_at_publisher()?;
        }
    }

    /// At most until the next look at the orders.
    fn wait(&self) -> anyhow::Result<()> {
        let readable = PollFd::from_borrowed_fd(self.subscriber.as_fd(), PollFlags::IN);
        poll(&mut [readable], Some(REPORT_EVERY))?;
        Ok(())
    }

    /// Takes two items, keeps them, and receives nothing more: with work on the device that does not
    /// end, or none. It is to be killed.
    fn hold(&mut self, busy: bool) -> anyhow::Result<()> {
        let mut numbers = Vec::new();
        while self.held.len() < HELD {
            let sample = self.subscriber.receive(&self.stream, PATIENCE)?;
            numbers.push(number_of(&sample)?.0);
            self.held.push(sample);
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
        let (number, is_last) = number_of(&sample)?;
        self.turn += 1;
        let (turn, page) = (self.turn, self.page);
        page.word(wrong_words(turn)).store(0);
        let (words, count) = (sample.ptr(), sample.layout().bytes() / 8);
        let wrong = page.address(wrong_words(turn));
        // SAFETY: the sample's slot is ours until its release, behind this kernel on the same
        // stream; the page is never unregistered, and the last check that counted in this word was
        // concluded before.
        unsafe { warpipe_kernels::check(&self.stream, words, count, number, wrong) }?;
        let done = StreamOp::Signal {
            word: page.address(DONE),
            value: turn,
        };
        let backend = self.stream.device().backend();
        // SAFETY: the stream is live, and the page is never unregistered.
        unsafe { backend.batch(self.stream.raw(), &[done]) }?;
        let previous = sample.info().discontinuity.and_then(|gap| gap.previous);
        let before = previous.map(|before| (before.pid, before.graceful));
        let check = Check {
            receipt: sample.release()?,
            number,
            turn,
            before,
        };
        self.checks
            .send(check)
            .ok()
            .context("the checker has ended")?;
        match is_last {
            true => tell(json!({ "event": "waiting" })),
            false => Ok(()),
        }
    }

    /// Whether the link has ended, or leads to the next publisher.
    fn look_at_publisher(&mut self) -> anyhow::Result<()> {
        let now = self.subscriber.publisher().map(|it| it.pid);
        if self.publisher != now && self.publisher.is_some() {
            tell(json!({ "event": "gone", "at_ns": clock::now_ns() }))?;
        }
        self.publisher = now;
        Ok(())
    }
}

/// An item's number, and whether it is one that the publisher will not complete.
fn number_of(sample: &Sample) -> anyhow::Result<(u64, bool)> {
    let (number, rest) = sample
        .metadata()
        .split_first_chunk()
        .context("an item came without its number")?;
    Ok((u64::from_le_bytes(*number), rest == [1]))
}

/// The page's word in which the check of this turn counts wrong words. No two that are under way
/// share one.
fn wrong_words(turn: u64) -> usize {
    1 + (turn % (CHECKS_MAX as u64 + 4)) as usize
}

/// An item with its check enqueued, and after it its release.
struct Check {
    receipt: Receipt,
    number: u64,
    turn: u64,
    /// For the first item of another publisher: the process before, and whether that one had closed
    /// gracefully.
    before: Option<(i32, bool)>,
}

/// Waits for the device's check of each item, counts, and reports, until the queue ends.
fn check_all(
    queue: &Receiver<Check>,
    device: &Device,
    page: &RegisteredPage,
) -> anyhow::Result<()> {
    let mut book = Book::default();
    let mut reported = Instant::now();
    for check in queue {
        let (number, turn, before) = (check.number, check.turn, check.before);
        let done = page.word(DONE);
        let is_done = device.backend().wait_word(done, turn, PATIENCE)?;
        ensure!(
            is_done,
            "the device did not check item {number} within {PATIENCE:?}"
        );
        let at_ns = clock::now_ns();
        let last = before.map(|_| book.begin_anew());
        match check.receipt.wait(PATIENCE) {
            Ok(()) => {
                let wrong = page.word(wrong_words(turn)).load();
                if book.verify(number, wrong, at_ns) {
                    tell(json!({
                        "event": "first", "number": number, "at_ns": at_ns, "before": before, "last": last,
                    }))?;
                }
            }
            Err(Error::Lost(Loss::Sample { .. })) => {
                book.lose(number);
                tell(json!({ "event": "lost", "number": number, "at_ns": at_ns }))?;
            }
            Err(error) => return Err(error).with_context(|| format!("item {number}")),
        }
        if reported.elapsed() >= REPORT_EVERY {
            reported = Instant::now();
            tell(book.report())?;
        }
    }
    tell(book.report())
}

/// Counts over all publishers that were followed, and order.
#[derive(Debug, Default, PartialEq, Eq)]
struct Book {
    verified: u64,
    wrong: u64,
    gaps: u64,
    lost: u64,
    /// The number that comes next; none before the first item of a publisher.
    next: Option<u64>,
    /// The last item of this publisher that was verified, and when.
    last: u64,
    last_ns: u64,
    /// The longest time between two items since the last report.
    apart_ns: u64,
}

impl Book {
    /// At another publisher's first item. The last item of the one before.
    fn begin_anew(&mut self) -> u64 {
        self.next = None;
        std::mem::take(&mut self.last)
    }

    /// Takes in a complete item. Whether it is the first of its publisher that is right.
    fn verify(&mut self, number: u64, wrong: u64, at_ns: u64) -> bool {
        self.count(number);
        self.wrong += u64::from(wrong > 0);
        if wrong > 0 {
            return false;
        }
        self.verified += 1;
        if self.last_ns > 0 {
            self.apart_ns = self.apart_ns.max(at_ns - self.last_ns);
        }
        self.last_ns = at_ns;
        std::mem::replace(&mut self.last, number) == 0
    }

    fn lose(&mut self, number: u64) {
        self.lost += 1;
        self.count(number);
    }

    fn count(&mut self, number: u64) {
        self.gaps += u64::from(self.next.is_some_and(|next| next != number));
        self.next = Some(number + 1);
    }

    fn report(&mut self) -> Value {
        let apart_ns = std::mem::take(&mut self.apart_ns);
        json!({
            "event": "counts", "verified": self.verified, "wrong": self.wrong, "gaps": self.gaps,
            "lost": self.lost, "last": self.last, "last_ns": self.last_ns, "apart_ns": apart_ns,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_that_are_wrong_missing_or_lost_are_told_apart() {
        let mut book = Book::default();
        assert!(
            book.verify(5, 0, 100) && !book.verify(6, 0, 200),
            "the first is reported once"
        );
        assert!(!book.verify(7, 3, 300), "three words are wrong");
        assert!(!book.verify(9, 0, 450), "8 is missing");
        book.lose(10);
        let counted = (
            book.verified,
            book.wrong,
            book.gaps,
            book.lost,
            book.apart_ns,
        );
        assert_eq!(counted, (3, 1, 1, 1, 250));
        assert_eq!(book.begin_anew(), 9);
        assert!(book.verify(1, 0, 500), "another publisher begins anew");
        assert_eq!(book.gaps, 1);
    }
}
