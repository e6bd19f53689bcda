//! The queue's side of one worker: the receiver of its answers, results that are not complete yet,
//! and how it ended. Its leases are in the [job table](super::job_table).

use std::collections::VecDeque;
use std::time::Duration;

use super::job_table::JobTable;
use super::wire::{Answer, DeliveryTag};
use crate::error::{Error, Result};
use crate::pubsub::entry::violation;
use crate::pubsub::{LinkReceiver, RawSample, Reply, ReplyLink, RetainedSlot};
use crate::runtime::heartbeat::Uptime;

/// After its socket closed without a graceful close, a worker counts as gone at its proven death,
/// or after this time, in which this process ran: it can no longer answer, and it can write neither
/// the input nor another worker's result.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The most answers taken from one worker before the others are handled.
const ANSWERS_PER_TURN: usize = 64;

/// The job table of a queue. Its inputs are slots of the owner; a model has others.
pub(super) type Jobs<A = LinkReceiver, I = RetainedSlot> =
    JobTable<I, WorkerResult<<A as ReplyLink>::Reply>>;

/// A result that a worker sent. In the job table its data is complete.
#[derive(Debug)]
pub(super) struct WorkerResult<R = RawSample> {
    pub(super) tag: DeliveryTag,
    pub(super) pid: i32,
    pub(super) arrival: R,
}

/// The end of a worker's answers.
#[derive(Debug)]
pub(super) struct SessionEnd {
    pub(super) reason: String,
    /// No proof of death is needed: the worker closed gracefully, or the link is broken.
    pub(super) is_settled: bool,
    /// The time since then.
    pub(super) clock: Uptime,
}

#[derive(Debug)]
pub(super) struct WorkerSession<A: ReplyLink = LinkReceiver> {
    /// The worker's subscriber id at the queue's publisher.
    pub(super) id: u64,
    pub(super) pid: i32,
    pub(super) answers: A,
    /// Those with data that is not complete yet.
    pub(super) pending_results: VecDeque<WorkerResult<A::Reply>>,
    /// Set once no answers come any more.
    pub(super) end: Option<SessionEnd>,
    /// The worker has closed gracefully: each pending result still completes, or the worker's
    /// process is proven dead. So [`DISCONNECT_TIMEOUT`] does not apply.
    has_closed: bool,
    /// The worker takes no more jobs.
    pub(super) is_leaving: bool,
}

impl<A: ReplyLink> WorkerSession<A> {
    pub(super) fn new(id: u64, pid: i32, answers: A) -> WorkerSession<A> {
        WorkerSession {
            id,
            pid,
            answers,
            pending_results: VecDeque::new(),
            end: None,
            has_closed: false,
            is_leaving: false,
        }
    }

    /// Whether the worker takes jobs, now or when it has answered others.
    pub(super) fn is_open(&self) -> bool {
        !self.is_leaving && self.end.is_none()
    }

    /// Whether answers may have come.
    pub(super) fn has_news(&self) -> bool {
        self.end.is_none() && self.answers.may_have_news()
    }

    /// Receives the answers that have come.
    pub(super) fn receive_answers<I>(&mut self, jobs: &mut Jobs<A, I>, now: Duration) {
        for _ in 0..ANSWERS_PER_TURN {
            if self.end.is_some() {
                return;
            }
            match self.answers.take() {
                Ok(None) => return,
                Ok(Some(arrival)) => {
                    if let Err(error) = self.receive_answer(arrival, jobs, now) {
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
        // The error calls a worker the publisher of its answers.
        let reason = match (self.has_closed, is_settled) {
            (true, _) => "it has closed".to_string(),
            (_, false) => "it has died".to_string(),
            _ => error.to_string(),
        };
        self.end = Some(SessionEnd {
            reason,
            is_settled,
            clock: Uptime::default(),
        });
    }

    /// Receives one answer. An illegal answer ends the link.
    fn receive_answer<I>(
        &mut self,
        arrival: A::Reply,
        jobs: &mut Jobs<A, I>,
        now: Duration,
    ) -> Result<()> {
        let answer =
            Answer::decode(arrival.metadata()).map_err(|wrong| self.answers.fail(wrong))?;
        let lease = (answer.job, answer.number);
        match jobs.answer(self.id, lease, answer.kind, now) {
            Ok(Some(tag)) => {
                let pid = self.pid;
                self.pending_results
                    .push_back(WorkerResult { tag, pid, arrival });
            }
            Ok(None) => {}
            Err(()) => {
                let found = format!("delivery {} of job {}", answer.number, answer.job);
                return Err(self
                    .answers
                    .fail(violation("answer", found, "a job that it holds")));
            }
        }
        Ok(())
    }

    /// Checks which results are complete by now.
    pub(super) fn collect_results<I>(&mut self, jobs: &mut Jobs<A, I>) {
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
            let Some(mut result) = self.pending_results.remove(index) else {
                return;
            };
            match lost {
                None => {
                    // However long it is kept, the worker sends more.
                    result.arrival.make_room();
                    jobs.complete(self.id, result.tag, result);
                }
                Some(error) => {
                    let reason = format!("process {}: {error}", self.pid);
                    jobs.lose(self.id, result.tag, reason);
                }
            }
        }
    }

    /// Whether no valid answer or result can come any more: the worker closed gracefully, broke its
    /// link, or is proven dead, and no result is pending; or [`DISCONNECT_TIMEOUT`] has passed.
    pub(super) fn has_ended(&self) -> bool {
        let Some(end) = &self.end else {
            return false;
        };
        let is_gone = end.is_settled || self.answers.is_sender_dead();
        (is_gone && self.pending_results.is_empty())
            || (!self.has_closed && end.clock.ran() > DISCONNECT_TIMEOUT)
    }

    /// Why the worker leaves its leases undone.
    pub(super) fn end_reason(&self) -> String {
        let reason = self.end.as_ref().map_or("", |end| &end.reason);
        format!("process {} left it undone: {reason}", self.pid)
    }
}
