//! The queue's record of one worker: the link of its answers, its leases, and how it ended.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::wire::{Answer, AnswerKind, DeliveryTag, violation};
use crate::error::Error;
use crate::pubsub::{RawSample, Subscriber};

/// After its socket closed without a graceful close, a worker counts as gone at its proven death,
/// or after this time: it can no longer answer, and it can write neither the input nor another
/// worker's result.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The most answers taken from one worker before the others are handled.
const ANSWERS_PER_TURN: usize = 64;

/// A delivered job.
#[derive(Debug)]
pub(super) struct LeaseRecord {
    pub(super) tag: DeliveryTag,
    /// The position in the worker's ring; `None` during the delivery.
    position: Option<u64>,
    /// By the queue's [clock](super::job_table::JobTable::now), as all times of leases.
    since: Duration,
    /// The lease timeout has passed: the attempt has failed, and an answer no longer counts.
    pub(super) is_late: bool,
    is_answered: bool,
}

impl LeaseRecord {
    /// Whether the lease timeout applies.
    fn can_expire(&self) -> bool {
        !self.is_late && self.position.is_some()
    }
}

/// A result with data that is not complete yet.
#[derive(Debug)]
pub(super) struct PendingResult {
    pub(super) tag: DeliveryTag,
    pub(super) arrival: RawSample,
}

#[derive(Debug)]
pub(super) struct WorkerSession {
    /// The worker's subscriber id at the queue's publisher.
    pub(super) id: u64,
    pub(super) pid: i32,
    pub(super) subscriber: Subscriber,
    pub(super) leases: Vec<LeaseRecord>,
    pub(super) pending_results: VecDeque<PendingResult>,
    /// Why no answers come any more, whether that needs no proof of death (the worker closed
    /// gracefully, or the link is broken), and since when.
    pub(super) end: Option<(String, bool, Instant)>,
    /// The worker has closed gracefully: each pending result still completes, or the worker's
    /// process is proven dead. So [`DISCONNECT_TIMEOUT`] does not apply.
    has_closed: bool,
    /// The worker takes no more jobs.
    pub(super) is_leaving: bool,
    last_answer: Option<Duration>,
}

/// The effect of an answer, or of its data, on its job.
#[derive(Debug)]
pub(super) enum JobEvent {
    Failed(u64, String),
    Returned(u64),
    Rejected(u64, String),
    Expired(u64),
    Done {
        job: u64,
        attempt: u32,
        pid: i32,
        arrival: RawSample,
    },
}

impl WorkerSession {
    pub(super) fn new(id: u64, pid: i32, subscriber: Subscriber) -> WorkerSession {
        WorkerSession {
            id,
            pid,
            subscriber,
            leases: Vec::new(),
            pending_results: VecDeque::new(),
            end: None,
            has_closed: false,
            is_leaving: false,
            last_answer: None,
        }
    }

    /// Whether the worker may be given a job. A worker that is late with another gets none before
    /// it has answered, and results that were not released occupy places, too. The last place is
    /// kept for the `oldest` job: results may be held because its result is to come first.
    pub(super) fn has_capacity(&self, prefetch: u32, oldest: bool) -> bool {
        let (depth, held) = self.subscriber.load();
        !self.is_leaving
            && self.end.is_none()
            && self.leases.len() < prefetch as usize
            && self.leases.iter().all(|lease| !lease.is_late)
            && held + self.leases.len() + usize::from(!oldest) < depth
    }

    /// Whether the worker takes jobs, now or when it has answered others.
    pub(super) fn is_open(&self) -> bool {
        !self.is_leaving && self.end.is_none()
    }

    pub(super) fn lease(&mut self, tag: DeliveryTag, position: Option<u64>) {
        let record = LeaseRecord {
            tag,
            position,
            since: Duration::ZERO,
            is_late: false,
            is_answered: false,
        };
        self.leases.push(record);
    }

    /// Records the position of a delivered lease. The lease may have been answered before.
    pub(super) fn set_position(&mut self, tag: DeliveryTag, position: u64, now: Duration) {
        if let Some(lease) = self.leases.iter_mut().find(|lease| lease.tag == tag) {
            (lease.position, lease.since) = (Some(position), now);
        }
    }

    /// Removes a lease after a failed delivery.
    pub(super) fn remove_lease(&mut self, tag: DeliveryTag) {
        self.leases.retain(|lease| lease.tag != tag);
    }

    /// Since when the oldest lease has made no progress: an answer to one lease is progress for
    /// all.
    pub(super) fn oldest_lease(&self) -> Option<Duration> {
        let oldest = self
            .leases
            .iter()
            .filter(|lease| lease.can_expire())
            .map(|lease| lease.since)
            .min()?;
        Some(self.last_answer.map_or(oldest, |answer| answer.max(oldest)))
    }

    /// Receives the answers that have come.
    pub(super) fn receive_answers(&mut self, now: Duration, events: &mut Vec<JobEvent>) {
        for _ in 0..ANSWERS_PER_TURN {
            if self.end.is_some() {
                return;
            }
            match self.subscriber.take_raw_sample() {
                Ok(None) => return,
                Ok(Some(arrival)) => {
                    if let Err(error) = self.receive_answer(arrival, now, events) {
                        self.disconnect(&error);
                    }
                }
                Err(error) => self.disconnect(&error),
            }
        }
    }

    fn disconnect(&mut self, error: &Error) {
        let is_settled = !matches!(
            error,
            Error::PeerGone {
                graceful: false,
                ..
            }
        );
        self.has_closed = matches!(error, Error::PeerGone { graceful: true, .. });
        self.end = Some((error.to_string(), is_settled, Instant::now()));
    }

    /// Receives one answer. An illegal answer ends the link.
    fn receive_answer(
        &mut self,
        arrival: RawSample,
        now: Duration,
        events: &mut Vec<JobEvent>,
    ) -> Result<(), Error> {
        let answer =
            Answer::decode(arrival.metadata()).map_err(|wrong| self.subscriber.fail(wrong))?;
        let Some(index) = self.find(answer.job, answer.number) else {
            let found = format!("job {} with ticket {}", answer.job, answer.number);
            return Err(self
                .subscriber
                .fail(violation("answer", found, "a job that it holds")));
        };
        self.last_answer = Some(now);
        if answer.kind == AnswerKind::Completed {
            self.leases[index].is_answered = true;
            self.pending_results.push_back(PendingResult {
                tag: self.leases[index].tag,
                arrival,
            });
            return Ok(());
        }
        let record = self.leases.swap_remove(index);
        if !record.is_late {
            events.push(match answer.kind {
                AnswerKind::Failed(reason) => JobEvent::Failed(answer.job, reason),
                AnswerKind::Rejected(reason) => JobEvent::Rejected(answer.job, reason),
                AnswerKind::Expired => JobEvent::Expired(answer.job),
                AnswerKind::Returned | AnswerKind::Completed => JobEvent::Returned(answer.job),
            });
        }
        Ok(())
    }

    fn find(&self, job: u64, number: u32) -> Option<usize> {
        let matches = |lease: &LeaseRecord| {
            (lease.tag.job, lease.tag.number) == (job, number) && !lease.is_answered
        };
        self.leases.iter().position(matches)
    }

    /// Checks which results are complete by now.
    pub(super) fn collect_results(&mut self, events: &mut Vec<JobEvent>) {
        let mut index = 0;
        while index < self.pending_results.len() {
            let lost = match self.pending_results[index].arrival.is_complete() {
                Ok(false) => {
                    index += 1;
                    continue;
                }
                Ok(true) => None,
                Err(error) => Some(error),
            };
            let Some(PendingResult { tag, arrival }) = self.pending_results.remove(index) else {
                return;
            };
            let Some(lease) = self.leases.iter().position(|lease| lease.tag == tag) else {
                continue;
            };
            if self.leases.swap_remove(lease).is_late {
                continue;
            }
            events.push(match lost {
                None => JobEvent::Done {
                    job: tag.job,
                    attempt: tag.attempt,
                    pid: self.pid,
                    arrival,
                },
                Some(error) => JobEvent::Failed(tag.job, format!("process {}: {error}", self.pid)),
            });
        }
    }

    /// The leases that have made no progress for `timeout`. Their later answers do not count.
    pub(super) fn expire(&mut self, timeout: Duration, now: Duration, events: &mut Vec<JobEvent>) {
        let (last, pid) = (self.last_answer, self.pid);
        for lease in self.leases.iter_mut().filter(|lease| lease.can_expire()) {
            let since = last.map_or(lease.since, |answer| answer.max(lease.since));
            if now.saturating_sub(since) >= timeout {
                lease.is_late = true;
                let reason = format!("no answer from process {pid} within {timeout:?}");
                events.push(JobEvent::Failed(lease.tag.job, reason));
            }
        }
    }

    /// Returns a job that the worker was given and had not taken, as if it had not been delivered.
    pub(super) fn undo_delivery(&mut self, position: u64, events: &mut Vec<JobEvent>) {
        let matches = |lease: &LeaseRecord| lease.position == Some(position) && !lease.is_answered;
        if let Some(index) = self.leases.iter().position(matches) {
            let record = self.leases.swap_remove(index);
            if !record.is_late {
                events.push(JobEvent::Returned(record.tag.job));
            }
        }
    }

    /// Whether no valid answer or result can come any more: the worker closed gracefully, broke its
    /// link, or is proven dead, and no result is pending; or [`DISCONNECT_TIMEOUT`] has passed.
    pub(super) fn has_ended(&self) -> bool {
        let Some((_, is_settled, since)) = &self.end else {
            return false;
        };
        let is_gone = *is_settled || self.subscriber.is_publisher_dead();
        (is_gone && self.pending_results.is_empty())
            || (!self.has_closed && since.elapsed() > DISCONNECT_TIMEOUT)
    }

    /// Ends the worker's open leases. A lease whose delivery is in progress, and that was not
    /// answered before, is left to the delivering thread, with the reason that is returned.
    pub(super) fn abandon_leases(&mut self, events: &mut Vec<JobEvent>) -> Option<String> {
        let why = self
            .end
            .as_ref()
            .map_or_else(String::new, |(why, ..)| why.clone());
        let reason = format!("process {} left it undone: {why}", self.pid);
        self.pending_results.clear();
        let is_under_way = self.leases.iter().any(|lease| lease.position.is_none());
        for lease in self
            .leases
            .drain(..)
            .filter(|lease| !lease.is_late && lease.position.is_some())
        {
            events.push(JobEvent::Failed(lease.tag.job, reason.clone()));
        }
        is_under_way.then_some(reason)
    }
}
