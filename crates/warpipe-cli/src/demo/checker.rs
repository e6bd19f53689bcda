//! A subscriber's checker: waits for the device's check of each item, counts, and reports.

use std::collections::VecDeque;
use std::sync::mpsc::Receiver;

use anyhow::Context;
use warpipe::{Device, Error, Receipt, clock};

use super::orders::send_event;
use super::protocol::{Counts, Event, Previous};
use super::{DEPTH, ITEM_PATIENCE};
use crate::registered::RegisteredPage;

/// Checks that may be enqueued and not concluded, beside the one in each thread's hands.
pub const CHECKS_MAX: usize = DEPTH as usize;
/// The page's word that says how many checks the device has done.
pub const DONE: usize = 0;
/// Times of verified items that are remembered.
const TIMES_MAX: usize = 1 << 16;

/// The page's word in which the check of this turn counts wrong words. No two that are under way
/// share one.
pub fn wrong_words(turn: u64) -> usize {
    1 + (turn % (CHECKS_MAX as u64 + 4)) as usize
}

/// An item with its check enqueued, and after it its release.
#[derive(Debug)]
pub struct Check {
    pub receipt: Receipt,
    pub number: u64,
    /// Its turn among all checks.
    pub turn: u64,
    /// For the first item of another publisher: the process before, and whether that one had closed
    /// gracefully.
    pub before: Option<(i32, bool)>,
}

/// The checker's next job.
#[derive(Debug)]
pub enum Job {
    /// Concludes a check.
    Check(Check),
    /// Reports the counts.
    Report,
    /// Reports the held items, and the counts.
    Held { numbers: Vec<u64> },
    /// Reports the verified items, once one is at or after `until_ns`.
    Since { from_ns: u64, until_ns: u64 },
}

/// The counts of one subscriber.
pub struct Checker {
    device: Device,
    page: &'static RegisteredPage,
    book: Book,
    since: Option<(u64, u64)>,
}

impl Checker {
    /// Nothing checked yet.
    pub fn new(device: &Device, page: &'static RegisteredPage) -> Checker {
        Checker {
            device: device.clone(),
            page,
            book: Book::default(),
            since: None,
        }
    }

    /// Until there are no more jobs; then reports the counts.
    pub fn run(mut self, jobs: &Receiver<Job>) -> anyhow::Result<()> {
        for job in jobs {
            match job {
                Job::Check(check) => self.conclude(&check)?,
                Job::Report => send_event(&Event::Reached {
                    counts: self.book.counts,
                })?,
                Job::Held { numbers } => send_event(&Event::Held {
                    numbers,
                    counts: self.book.counts,
                })?,
                Job::Since { from_ns, until_ns } => self.since = Some((from_ns, until_ns)),
            }
            self.tell_since()?;
        }
        Ok(send_event(&Event::Finished {
            counts: self.book.counts,
        })?)
    }

    fn conclude(&mut self, check: &Check) -> anyhow::Result<()> {
        let (number, turn) = (check.number, check.turn);
        let done = self
            .device
            .backend()
            .wait_word(self.page.word(DONE), turn, ITEM_PATIENCE)?;
        anyhow::ensure!(
            done,
            "the device did not check item {number} within {ITEM_PATIENCE:?}"
        );
        let at_ns = clock::now_ns();
        let previous = check
            .before
            .map(|(pid, graceful)| self.book.begin_anew(pid, graceful));
        match check.receipt.wait(ITEM_PATIENCE) {
            Ok(()) => {
                let wrong = self.page.word(wrong_words(turn)).load();
                if self.book.verify(number, wrong, at_ns) {
                    send_event(&Event::First {
                        number,
                        at_ns,
                        after: previous,
                    })?;
                }
            }
            Err(Error::SampleLost { .. }) => {
                self.book.lose(number);
                send_event(&Event::Lost { number, at_ns })?;
            }
            Err(error) => return Err(error).with_context(|| format!("item {number}")),
        }
        Ok(())
    }

    fn tell_since(&mut self) -> std::io::Result<()> {
        let last = self.book.times.back().copied().unwrap_or(0);
        let Some((from_ns, _)) = self.since.take_if(|(_, until_ns)| last >= *until_ns) else {
            return Ok(());
        };
        let (verified, apart_ns) = self.book.went(from_ns);
        send_event(&Event::Went {
            verified,
            apart_ns,
            gaps: self.book.counts.gaps,
        })
    }
}

/// Counts and order.
#[derive(Debug, Default)]
struct Book {
    counts: Counts,
    /// The number that comes next; none before the first item of a publisher.
    next: Option<u64>,
    /// The last item of this publisher that was verified.
    last: u64,
    /// When the last items were seen to be verified.
    times: VecDeque<u64>,
}

impl Book {
    fn begin_anew(&mut self, pid: i32, graceful: bool) -> Previous {
        self.next = None;
        Previous {
            pid,
            graceful,
            last: std::mem::take(&mut self.last),
        }
    }

    /// Takes in a complete item. Whether it is the first of its publisher that is right.
    fn verify(&mut self, number: u64, wrong: u64, at_ns: u64) -> bool {
        let in_order = self.next.is_none_or(|next| next == number);
        let is_first = self.last == 0;
        self.next = Some(number + 1);
        self.counts.last_ns = at_ns;
        self.counts.gaps += u64::from(!in_order);
        self.counts.wrong += u64::from(wrong > 0);
        if wrong > 0 {
            return false;
        }
        self.counts.verified += 1;
        self.last = number;
        if self.times.len() == TIMES_MAX {
            self.times.pop_front();
        }
        self.times.push_back(at_ns);
        is_first
    }

    fn lose(&mut self, number: u64) {
        self.counts.lost += 1;
        self.counts.gaps += u64::from(self.next.is_some_and(|next| next != number));
        self.next = Some(number + 1);
    }

    /// How many items from `from_ns` on, and how far apart at most, the last one before included.
    fn went(&self, from_ns: u64) -> (u64, u64) {
        let first = self.times.partition_point(|&at_ns| at_ns < from_ns);
        let pairs = self
            .times
            .iter()
            .zip(self.times.iter().skip(1))
            .skip(first.saturating_sub(1));
        let apart_ns = pairs.map(|(one, next)| next - one).max().unwrap_or(0);
        ((self.times.len() - first) as u64, apart_ns)
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
        assert!(!book.verify(9, 0, 400), "8 is missing");
        book.lose(10);
        assert_eq!(
            book.counts,
            Counts {
                verified: 3,
                wrong: 1,
                gaps: 1,
                lost: 1,
                last_ns: 400
            }
        );
        assert_eq!(
            book.begin_anew(7, false),
            Previous {
                pid: 7,
                graceful: false,
                last: 9
            }
        );
        assert!(book.verify(1, 0, 500), "another publisher begins anew");
        assert_eq!(book.counts.gaps, 1);
    }

    #[test]
    fn what_was_verified_since_a_time_includes_the_step_over_it() {
        let mut book = Book::default();
        for (number, at_ns) in [(1, 100), (2, 150), (3, 900), (4, 950)] {
            book.verify(number, 0, at_ns);
        }
        assert_eq!(
            (book.went(0), book.went(160), book.went(951)),
            ((4, 750), (2, 750), (0, 0))
        );
    }
}
