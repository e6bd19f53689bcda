//! One worker as its queue sees it: the link of its answers, what it has leased, how it ended.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::wire::{Answer, Ticket, Verdict, violation};
use crate::channel::{Arrival, Subscriber};
use crate::error::Error;

/// After its socket closed without a goodbye, a worker is taken for gone at its proven death, or after this: its
/// answers cannot come any more, and it can write neither the input nor another's result.
const GONE_AFTER: Duration = Duration::from_secs(5);

/// Answers taken from one worker before the others have their turn.
const ANSWERS_AT_ONCE: usize = 64;

/// A job given out.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) ticket: Ticket,
    /// Where in the worker's ring it was put; `None` while that is under way.
    position: Option<u64>,
    /// By the queue's [clock](super::ledger::Ledger::now), as all times of leases.
    since: Duration,
    /// It took too long, and the job is somebody else's by now.
    pub(super) is_late: bool,
    is_answered: bool,
}

impl Record {
    /// Whether its time runs.
    fn can_expire(&self) -> bool {
        !self.is_late && self.position.is_some()
    }
}

/// A result whose data is not complete yet.
#[derive(Debug)]
pub(super) struct Unready {
    pub(super) ticket: Ticket,
    pub(super) arrival: Arrival,
}

#[derive(Debug)]
pub(super) struct Seat {
    /// The number that the queue's publisher knows the worker by.
    pub(super) id: u64,
    pub(super) pid: i32,
    pub(super) subscriber: Subscriber,
    pub(super) leases: Vec<Record>,
    pub(super) unready: VecDeque<Unready>,
    /// Why no answers come any more, and since when.
    pub(super) end: Option<(String, bool, Instant)>,
    /// It has said goodbye: what was under way still completes, or its process is proven dead.
    has_left: bool,
    /// It takes no more jobs.
    pub(super) is_leaving: bool,
    last_answer: Option<Duration>,
}

/// What an answer, or its data, means for its job.
#[derive(Debug)]
pub(super) enum Finding {
    Failed(u64, String),
    Returned(u64),
    Rejected(u64, String),
    Expired(u64),
    Done { job: u64, attempt: u32, pid: i32, arrival: Arrival },
}

impl Seat {
    pub(super) fn new(id: u64, pid: i32, subscriber: Subscriber) -> Seat {
        Seat {
            id,
            pid,
            subscriber,
            leases: Vec::new(),
            unready: VecDeque::new(),
            end: None,
            has_left: false,
            is_leaving: false,
            last_answer: None,
        }
    }

    /// Whether it may be given a job. One that is late with another gets none before it has answered, and results
    /// that nobody has released take their places, too. The last place is the `oldest` job's: results may be held because
    /// that one's is to come first.
    pub(super) fn has_credit(&self, credits: u32, oldest: bool) -> bool {
        let (depth, held) = self.subscriber.load();
        !self.is_leaving
            && self.end.is_none()
            && self.leases.len() < credits as usize
            && self.leases.iter().all(|lease| !lease.is_late)
            && held + self.leases.len() + usize::from(!oldest) < depth
    }

    /// Whether it takes jobs, now or when it has answered others.
    pub(super) fn is_open(&self) -> bool {
        !self.is_leaving && self.end.is_none()
    }

    pub(super) fn lease(&mut self, ticket: Ticket, position: Option<u64>) {
        let record = Record { ticket, position, since: Duration::ZERO, is_late: false, is_answered: false };
        self.leases.push(record);
    }

    /// A lease that was under way is there. It may have been answered before.
    pub(super) fn place(&mut self, ticket: Ticket, position: u64, now: Duration) {
        if let Some(lease) = self.leases.iter_mut().find(|lease| lease.ticket == ticket) {
            (lease.position, lease.since) = (Some(position), now);
        }
    }

    /// It is not.
    pub(super) fn unlease(&mut self, ticket: Ticket) {
        self.leases.retain(|lease| lease.ticket != ticket);
    }

    /// Since when the oldest lease has made no progress: an answer to one is a sign of life for all.
    pub(super) fn oldest_lease(&self) -> Option<Duration> {
        let oldest = self.leases.iter().filter(|lease| lease.can_expire()).map(|lease| lease.since).min()?;
        Some(self.last_answer.map_or(oldest, |answer| answer.max(oldest)))
    }

    /// Takes in the answers that have come.
    pub(super) fn listen(&mut self, now: Duration, findings: &mut Vec<Finding>) {
        for _ in 0..ANSWERS_AT_ONCE {
            if self.end.is_some() {
                return;
            }
            match self.subscriber.take_arrival() {
                Ok(None) => return,
                Ok(Some(arrival)) => {
                    if let Err(error) = self.hear(arrival, now, findings) {
                        self.part(&error);
                    }
                }
                Err(error) => self.part(&error),
            }
        }
    }

    fn part(&mut self, error: &Error) {
        let is_settled = !matches!(error, Error::PublisherGone { graceful: false, .. });
        self.has_left = matches!(error, Error::PublisherGone { graceful: true, .. });
        self.end = Some((error.to_string(), is_settled, Instant::now()));
    }

    /// Takes in one answer. What its worker had no right to say ends the link.
    fn hear(&mut self, arrival: Arrival, now: Duration, findings: &mut Vec<Finding>) -> Result<(), Error> {
        let answer = Answer::decode(arrival.metadata()).map_err(|wrong| self.subscriber.fail(wrong))?;
        let Some(index) = self.find(answer.job, answer.number) else {
            let found = format!("job {} with ticket {}", answer.job, answer.number);
            return Err(self.subscriber.fail(violation("answer", found, "a job that it holds")));
        };
        self.last_answer = Some(now);
        if answer.verdict == Verdict::Completed {
            self.leases[index].is_answered = true;
            self.unready.push_back(Unready { ticket: self.leases[index].ticket, arrival });
            return Ok(());
        }
        let record = self.leases.swap_remove(index);
        if !record.is_late {
            findings.push(match answer.verdict {
                Verdict::Failed(reason) => Finding::Failed(answer.job, reason),
                Verdict::Rejected(reason) => Finding::Rejected(answer.job, reason),
                Verdict::Expired => Finding::Expired(answer.job),
                Verdict::Returned | Verdict::Completed => Finding::Returned(answer.job),
            });
        }
        Ok(())
    }

    fn find(&self, job: u64, number: u32) -> Option<usize> {
        let is_it = |lease: &Record| (lease.ticket.job, lease.ticket.number) == (job, number) && !lease.is_answered;
        self.leases.iter().position(is_it)
    }

    /// Looks which results are complete by now.
    pub(super) fn settle(&mut self, findings: &mut Vec<Finding>) {
        let mut index = 0;
        while index < self.unready.len() {
            let lost = match self.unready[index].arrival.is_complete() {
                Ok(false) => {
                    index += 1;
                    continue;
                }
                Ok(true) => None,
                Err(error) => Some(error),
            };
            let Some(Unready { ticket, arrival }) = self.unready.remove(index) else { return };
            let Some(lease) = self.leases.iter().position(|lease| lease.ticket == ticket) else { continue };
            if self.leases.swap_remove(lease).is_late {
                continue;
            }
            findings.push(match lost {
                None => Finding::Done { job: ticket.job, attempt: ticket.attempt, pid: self.pid, arrival },
                Some(error) => Finding::Failed(ticket.job, format!("process {}: {error}", self.pid)),
            });
        }
    }

    /// The leases that have made no progress for `timeout`: from now on their answers do not count.
    pub(super) fn expire(&mut self, timeout: Duration, now: Duration, findings: &mut Vec<Finding>) {
        let (last, pid) = (self.last_answer, self.pid);
        for lease in self.leases.iter_mut().filter(|lease| lease.can_expire()) {
            let since = last.map_or(lease.since, |answer| answer.max(lease.since));
            if now.saturating_sub(since) >= timeout {
                lease.is_late = true;
                let reason = format!("no answer from process {pid} within {timeout:?}");
                findings.push(Finding::Failed(lease.ticket.job, reason));
            }
        }
    }

    /// What it had been given and not taken comes back as if it had not been given.
    pub(super) fn untake(&mut self, position: u64, findings: &mut Vec<Finding>) {
        let is_it = |lease: &Record| lease.position == Some(position) && !lease.is_answered;
        if let Some(index) = self.leases.iter().position(is_it) {
            let record = self.leases.swap_remove(index);
            if !record.is_late {
                findings.push(Finding::Returned(record.ticket.job));
            }
        }
    }

    /// Whether nothing that counts can come any more: it said goodbye, or broke its link, or is proven dead.
    pub(super) fn is_over(&self) -> bool {
        let Some((_, is_settled, since)) = &self.end else { return false };
        let is_gone = *is_settled || self.subscriber.is_publisher_dead();
        (is_gone && self.unready.is_empty()) || (!self.has_left && since.elapsed() > GONE_AFTER)
    }

    /// What it leaves undone. What is under way just now, and was not answered before, is for who gives it: for the reason
    /// that is returned.
    pub(super) fn leave(&mut self, findings: &mut Vec<Finding>) -> Option<String> {
        let why = self.end.as_ref().map_or_else(String::new, |(why, ..)| why.clone());
        let reason = format!("process {} left it undone: {why}", self.pid);
        self.unready.clear();
        let is_under_way = self.leases.iter().any(|lease| lease.position.is_none());
        for lease in self.leases.drain(..).filter(|lease| !lease.is_late && lease.position.is_some()) {
            findings.push(Finding::Failed(lease.ticket.job, reason.clone()));
        }
        is_under_way.then_some(reason)
    }
}
