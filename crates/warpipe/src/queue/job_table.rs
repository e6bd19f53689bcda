//! The job table of a queue: its jobs, their outcomes, and which worker gets the next job. No
//! shared memory, no driver.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::delivery::Delivery;
use super::job_handle::JobResult;
use super::owner::Order;
use super::wire::DeliveryTag;
use super::worker_session::{JobEvent, WorkerSession};
use crate::ipc::message::text;
use crate::pubsub::{CompletionWait, RawSample, RetainedSlot};
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::TICK;

/// The interval of polls without a ring.
const IDLE_INTERVAL: Duration = Duration::from_secs(10);

/// A job without an outcome, or with one that was not taken yet.
#[derive(Debug)]
pub(super) struct Job {
    /// The input; `None` once it has an outcome.
    pub(super) parcel: Option<Arc<RetainedSlot>>,
    pub(super) metadata: Vec<u8>,
    pub(super) deadline_ns: u64,
    /// How often it has been delivered.
    deliveries: u32,
    /// One reason for each attempt that failed.
    reasons: Vec<String>,
    outcome: Option<Outcome>,
}

/// How a job ended.
#[derive(Debug)]
pub(super) enum Outcome {
    Done {
        arrival: RawSample,
        attempt: u32,
        pid: i32,
    },
    DeadLettered {
        reasons: Vec<String>,
    },
    /// Its worker rejected the job: no worker tries it again.
    Rejected {
        reason: String,
    },
    /// Its worker saw that the deadline had passed.
    Expired,
    /// The result was taken and put back.
    Unused(Box<JobResult>),
}

/// The rules of a queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueRules {
    pub(super) prefetch: u32,
    pub(super) max_attempts: u32,
    pub(super) lease_timeout: Option<Duration>,
    pub(super) order: Order,
}

#[derive(Debug)]
pub(super) struct JobTable {
    pub(super) rules: QueueRules,
    /// The clock of leases.
    pub(super) uptime: Uptime,
    jobs: BTreeMap<u64, Job>,
    /// A thread is delivering a job, without the lock.
    pub(super) delivery: Option<Delivery>,
    /// The number of threads that wait for that delivery, to submit.
    pub(super) submit_waiters: u32,
    /// Jobs to be delivered, in order.
    pub(super) waiting: VecDeque<u64>,
    /// Jobs with an outcome, in order of completion. Jobs that were taken by their handle are
    /// skipped.
    pub(super) finished: VecDeque<u64>,
    unfinished: usize,
    next_job: u64,
    pub(super) sessions: Vec<WorkerSession>,
    /// Subscribers that have a session, are about to get one, or have been refused.
    pub(super) known: HashSet<u64>,
    /// The number of users' threads that poll.
    pub(super) pollers: u32,
    /// The number of users' threads that sleep until a change.
    pub(super) sleepers: u32,
    /// A user's thread sleeps on the descriptors.
    pub(super) has_leader: bool,
    /// The queue's own thread leaves the descriptors to the leader.
    pub(super) is_parked: bool,
    /// The queue's own thread sleeps for a slice or more.
    pub(super) sleeps_long: bool,
    /// The queue's own thread sleeps until it is rung, and polls nothing meanwhile.
    pub(super) sleeps_idle: bool,
    /// Counts the changes that may end a wait.
    pub(super) changes: u64,
    /// Rung at every change: event loops sleep on them.
    pub(super) watches: Vec<Weak<LocalDoorbell>>,
    /// No job can be submitted any more.
    pub(super) is_shut: bool,
    /// All jobs are done after the shutdown, and the workers were notified.
    pub(super) is_drained: bool,
    /// The queue is gone.
    pub(super) is_closed: bool,
}

impl JobTable {
    pub(super) fn new(rules: QueueRules) -> JobTable {
        JobTable {
            rules,
            uptime: Uptime::default(),
            jobs: BTreeMap::new(),
            delivery: None,
            submit_waiters: 0,
            waiting: VecDeque::new(),
            finished: VecDeque::new(),
            unfinished: 0,
            next_job: 1,
            sessions: Vec::new(),
            known: HashSet::new(),
            pollers: 0,
            sleepers: 0,
            has_leader: false,
            is_parked: false,
            sleeps_long: false,
            sleeps_idle: false,
            changes: 0,
            watches: Vec::new(),
            is_shut: false,
            is_drained: false,
            is_closed: false,
        }
    }

    /// The current time of the lease clock; zero where leases have no limit, since it is not used
    /// there.
    pub(super) fn now(&self) -> Duration {
        if self.rules.lease_timeout.is_some() {
            self.uptime.ran()
        } else {
            Duration::ZERO
        }
    }

    /// Jobs without an outcome, or with one that was not taken.
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Jobs that are not done yet.
    pub(super) fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Jobs that no worker has leased.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
            .iter()
            .filter(|id| self.jobs.contains_key(id))
            .count()
    }

    /// The number of the next job, and whether no other job waits to be delivered before it.
    pub(super) fn next_job(&mut self) -> (u64, bool) {
        (self.next_job, self.first_waiting().is_none())
    }

    /// Adds the next job. Its input must then be [kept](Self::store_input), or the job
    /// [withdrawn](Self::undo_insert).
    pub(super) fn insert(&mut self, metadata: Vec<u8>, deadline_ns: u64) {
        let (parcel, deliveries, reasons, outcome) = (None, 1, Vec::new(), None);
        self.jobs.insert(
            self.next_job,
            Job {
                parcel,
                metadata,
                deadline_ns,
                deliveries,
                reasons,
                outcome,
            },
        );
        self.next_job += 1;
        self.unfinished += 1;
    }

    /// Keeps the input of a job that was entered, until it has an outcome. The job was delivered
    /// already, or waits.
    pub(super) fn store_input(&mut self, id: u64, parcel: RetainedSlot, is_out: bool) {
        let Some(job) = self.unfinished_job(id) else {
            return;
        };
        job.parcel = Some(Arc::new(parcel));
        if !is_out {
            job.deliveries = 0;
            self.enqueue(id);
        }
    }

    /// Removes the job that was entered last. If no worker has seen it, the next job gets its
    /// number. Returns its metadata.
    pub(super) fn undo_insert(&mut self, id: u64, is_untold: bool) -> Vec<u8> {
        if is_untold {
            self.next_job = id;
        }
        self.call_off(id).map_or_else(Vec::new, |job| job.metadata)
    }

    /// The first job that waits.
    pub(super) fn first_waiting(&mut self) -> Option<u64> {
        // A cancelled job leaves its number in the list.
        while self
            .waiting
            .front()
            .is_some_and(|id| !self.jobs.contains_key(id))
        {
            self.waiting.pop_front();
        }
        self.waiting.front().copied()
    }

    /// A waiting job, with the delivery tag that it would get.
    pub(super) fn next_delivery(&self, id: u64) -> Option<(DeliveryTag, &Job)> {
        let job = self.jobs.get(&id)?;
        let attempt = job.reasons.len() as u32 + 1;
        Some((
            DeliveryTag {
                job: id,
                number: job.deliveries.wrapping_add(1).max(1),
                attempt,
                deadline_ns: job.deadline_ns,
            },
            job,
        ))
    }

    /// The first job that waits is about to be delivered.
    pub(super) fn start_delivery(&mut self, tag: DeliveryTag) {
        self.waiting.pop_front();
        if let Some(job) = self.jobs.get_mut(&tag.job) {
            job.deliveries = tag.number;
        }
    }

    /// Undoes [`start_delivery`](Self::start_delivery): the job waits as before.
    pub(super) fn undo_delivery_start(&mut self, tag: DeliveryTag) {
        if let Some(job) = self.unfinished_job(tag.job) {
            job.deliveries = tag.number - 1;
            self.enqueue(tag.job);
        }
    }

    /// The session that gets this job: of those with capacity the one with the fewest leases.
    pub(super) fn pick_worker(&self, job: u64, but: &[u64]) -> Option<u64> {
        let (prefetch, oldest) = (
            self.rules.prefetch,
            self.jobs.keys().next().is_none_or(|&first| job <= first),
        );
        let able = self
            .sessions
            .iter()
            .filter(|session| session.has_capacity(prefetch, oldest) && !but.contains(&session.id));
        able.min_by_key(|session| session.leases.len())
            .map(|session| session.id)
    }

    pub(super) fn session(&mut self, id: u64) -> Option<&mut WorkerSession> {
        self.sessions.iter_mut().find(|session| session.id == id)
    }

    /// Applies an answer, or the end of a worker, to its job.
    pub(super) fn apply(&mut self, event: JobEvent) {
        match event {
            JobEvent::Failed(job, reason) => self.record_failure(job, reason),
            JobEvent::Returned(job) => self.requeue(job),
            JobEvent::Rejected(job, reason) => self.finish(job, Outcome::Rejected { reason }),
            JobEvent::Expired(job) => self.finish(job, Outcome::Expired),
            JobEvent::Done {
                job,
                attempt,
                pid,
                arrival,
            } => self.finish(
                job,
                Outcome::Done {
                    arrival,
                    attempt,
                    pid,
                },
            ),
        }
    }

    /// Records a failed attempt: the job is tried again, or dead-lettered.
    pub(super) fn record_failure(&mut self, id: u64, reason: String) {
        let limit = self.rules.max_attempts as usize;
        let Some(job) = self.unfinished_job(id) else {
            return;
        };
        job.reasons.push(text(reason));
        if job.reasons.len() < limit {
            self.enqueue(id);
        } else {
            let reasons = std::mem::take(&mut job.reasons);
            self.finish(id, Outcome::DeadLettered { reasons });
        }
    }

    /// A lease was returned, at no cost of an attempt.
    pub(super) fn requeue(&mut self, id: u64) {
        if self.unfinished_job(id).is_some() {
            self.enqueue(id);
        }
    }

    /// The oldest job goes first, in whatever order jobs were returned: in [`Order::Submission`]
    /// all results wait for its own.
    fn enqueue(&mut self, id: u64) {
        let index = self.waiting.partition_point(|&other| other < id);
        self.waiting.insert(index, id);
        self.changes += 1;
    }

    /// Ends a job, once.
    pub(super) fn finish(&mut self, id: u64, outcome: Outcome) {
        if let Some(job) = self.unfinished_job(id) {
            (job.outcome, job.parcel) = (Some(outcome), None);
            self.unfinished -= 1;
            self.finished.push_back(id);
            self.changes += 1;
        }
    }

    fn unfinished_job(&mut self, id: u64) -> Option<&mut Job> {
        self.jobs.get_mut(&id).filter(|job| job.outcome.is_none())
    }

    /// Removes a job, whatever its state: a later answer is discarded. `None` if there is no such
    /// job. Drop the returned job without the lock: a result that was put back gives its stream
    /// work.
    pub(super) fn call_off(&mut self, id: u64) -> Option<Job> {
        let job = self.jobs.remove(&id)?;
        self.unfinished -= usize::from(job.outcome.is_none());
        self.changes += 1;
        self.prune();
        Some(job)
    }

    /// Removes the jobs that no worker holds, with their numbers. Drop them without the lock.
    pub(super) fn call_off_waiting(&mut self) -> Vec<(u64, Job)> {
        let waiting = std::mem::take(&mut self.waiting);
        let removed = waiting
            .into_iter()
            .filter_map(|id| self.call_off(id).map(|job| (id, job)));
        removed.collect()
    }

    /// Whether the job has an outcome, or is no longer there.
    pub(super) fn is_settled(&self, id: u64) -> bool {
        self.jobs.get(&id).is_none_or(|job| job.outcome.is_some())
    }

    /// Rings all watches, and removes those that were dropped.
    pub(super) fn notify_watches(&mut self) {
        self.watches.retain(|watch| {
            watch
                .upgrade()
                .inspect(|doorbell| doorbell.ring())
                .is_some()
        });
    }

    /// The outcome of one job, if it is there; an error if there is no such job.
    pub(super) fn take_outcome(&mut self, id: u64) -> Result<Option<(u64, Outcome)>, ()> {
        let job = self.jobs.get(&id).ok_or(())?;
        if job.outcome.is_none() || self.is_being_submitted(id) {
            return Ok(None);
        }
        // A thread may wait for the room.
        self.changes += 1;
        self.prune();
        Ok(self
            .jobs
            .remove(&id)
            .and_then(|job| job.outcome)
            .map(|outcome| (id, outcome)))
    }

    /// Whether the job is being submitted: it may still be withdrawn.
    fn is_being_submitted(&self, id: u64) -> bool {
        self.delivery
            .as_ref()
            .is_some_and(|delivery| delivery.is_new && delivery.tag.job == id)
    }

    /// Puts back a result that was taken and not used. The result is returned if its job is there
    /// again already, or the queue is gone: drop it without the lock.
    pub(super) fn put_back(&mut self, result: JobResult) -> Result<(), JobResult> {
        let id = result.job();
        if self.is_closed || id == 0 || id >= self.next_job || self.jobs.contains_key(&id) {
            return Err(result);
        }
        let job = Job {
            parcel: None,
            metadata: Vec::new(),
            deadline_ns: 0,
            deliveries: 0,
            reasons: Vec::new(),
            outcome: Some(Outcome::Unused(Box::new(result))),
        };
        self.jobs.insert(id, job);
        self.finished.push_front(id);
        self.changes += 1;
        Ok(())
    }

    /// Removes the numbers of jobs that no longer exist, when they are the most.
    fn prune(&mut self) {
        let (jobs, limit) = (&self.jobs, 2 * self.jobs.len() + 16);
        for numbers in [&mut self.waiting, &mut self.finished] {
            if numbers.len() > limit {
                numbers.retain(|id| jobs.contains_key(id));
            }
        }
    }

    /// The next outcome in the queue's order, if it is there.
    pub(super) fn take_next(&mut self) -> Option<(u64, Outcome)> {
        let id = match self.rules.order {
            Order::Submission => *self.jobs.keys().next()?,
            Order::Completion => {
                while self
                    .finished
                    .front()
                    .is_some_and(|id| !self.jobs.contains_key(id))
                {
                    self.finished.pop_front();
                }
                let index = self
                    .finished
                    .iter()
                    .position(|&id| !self.is_being_submitted(id))?;
                self.finished.remove(index)?
            }
        };
        self.take_outcome(id).ok().flatten()
    }

    /// The data of the only result that was announced and is not complete.
    pub(super) fn only_pending_result(&self) -> Option<CompletionWait> {
        let mut pending_results = self
            .sessions
            .iter()
            .flat_map(|session| &session.pending_results);
        let first = pending_results.next()?;
        pending_results
            .next()
            .is_none()
            .then(|| first.arrival.completion_wait())
    }

    /// The interval at which to poll although nothing rings: a device that completes a result
    /// cannot ring.
    pub(super) fn poll_interval(&self) -> Duration {
        let pending_results = self
            .sessions
            .iter()
            .any(|session| !session.pending_results.is_empty());
        let parting = self.sessions.iter().any(|session| session.end.is_some());
        let limit = match (pending_results, parting || !self.waiting.is_empty()) {
            (true, _) => Duration::from_micros(250),
            (false, true) => Duration::from_millis(50),
            (false, false) => IDLE_INTERVAL,
        };
        let expiry = self.rules.lease_timeout.and_then(|timeout| {
            let oldest = self
                .sessions
                .iter()
                .filter_map(WorkerSession::oldest_lease)
                .min()?;
            // The timeout may have any value, even one beyond the clock's range; such a lease is
            // checked with every tick.
            let left = timeout.saturating_sub(self.now().saturating_sub(oldest));
            Some(left.saturating_add(Duration::from_millis(1)).min(TICK))
        });
        limit.min(expiry.unwrap_or(limit))
    }
}
