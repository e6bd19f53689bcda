//! The job table of a queue: its jobs, how often each was tried, which worker holds it, and how it
//! ended. Pure: no lock, no clock (time is an argument), no link and no stream; inputs `I` and
//! results `R` are kept and given back. After every call:
//!
//! - an open job waits, or one worker that is not late holds it, or it is being submitted: once;
//! - a job gets one outcome, which is taken once; `unfinished` counts those without;
//! - a job has fewer failed attempts than `max_attempts`, or is dead-lettered with that many;
//! - an answer counts if its worker holds that lease, has not answered it, and is not late;
//! - at most one job is being submitted, and its lease has no position until that is over.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::wire::{AnswerKind, DeliveryTag, cut};
use super::worker_leases::WorkerLeases;

/// A job without an outcome, or with one that was not taken yet.
#[derive(Debug)]
pub(super) struct Job<I, R> {
    /// `None` while the job is being submitted, and once it has an outcome.
    pub(super) input: Option<I>,
    pub(super) metadata: Vec<u8>,
    deadline_ns: u64,
    /// How often it has been delivered.
    deliveries: u32,
    /// One reason for each attempt that failed.
    reasons: Vec<String>,
    /// With its place in [`JobTable::finished`].
    outcome: Option<(u64, Outcome<R>)>,
}

/// How a job ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome<R> {
    Done(R),
    DeadLettered {
        reasons: Vec<String>,
    },
    /// Its worker rejected the job: no worker tries it again.
    Rejected {
        reason: String,
    },
    /// Its worker saw that the deadline had passed.
    Expired,
}

/// In which order [`Queue::next_result`](crate::Queue::next_result) gives results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResultOrder {
    /// In the order of submission.
    Submission,
    /// In the order of completion.
    Completion,
}

/// The rules of a queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueRules {
    pub(super) prefetch: u32,
    pub(super) max_attempts: u32,
    pub(super) lease_timeout: Option<Duration>,
    pub(super) order: ResultOrder,
    /// The most jobs in the table.
    pub(super) limit: usize,
}

/// How far a queue has come to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Open,
    /// No job can be submitted any more.
    Shut,
    /// All jobs are done after the shutdown. A thread releases the name and notifies the workers.
    Draining,
    Drained,
    /// The queue is gone.
    Closed,
}

/// The submit that a thread makes. The job's outcome is not taken before that has finished.
#[derive(Debug)]
struct Submit {
    tag: DeliveryTag,
    /// The worker that gets the lease.
    worker: Option<u64>,
    /// Positions that the same worker left untaken meanwhile.
    untaken: Vec<u64>,
    /// Why that worker ended meanwhile without an answer.
    end: Option<String>,
}

/// What became of a submit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeliveryResult {
    /// The worker has the job, at this position.
    At(u64),
    /// The worker may have been given an entry without a valid job: its answer is discarded.
    Unconfirmed,
    NoWorker,
}

#[derive(Debug)]
pub(super) struct JobTable<I, R> {
    pub(super) rules: QueueRules,
    pub(super) stage: Stage,
    jobs: BTreeMap<u64, Job<I, R>>,
    /// Jobs to be delivered. The oldest goes first, in whatever order jobs were returned: in
    /// [`ResultOrder::Submission`] all results wait for its own.
    pub(super) waiting: BTreeSet<u64>,
    /// Jobs with an outcome, by the revision that it made.
    pub(super) finished: BTreeMap<u64, u64>,
    unfinished: usize,
    next_job: u64,
    pub(super) workers: Vec<WorkerLeases>,
    submit: Option<Submit>,
    /// Counts the changes that a wait for jobs or workers may be waiting for.
    pub(super) revision: u64,
}

impl<I, R> JobTable<I, R> {
    pub(super) fn new(rules: QueueRules) -> JobTable<I, R> {
        JobTable {
            rules,
            stage: Stage::Open,
            jobs: BTreeMap::new(),
            waiting: BTreeSet::new(),
            finished: BTreeMap::new(),
            unfinished: 0,
            next_job: 1,
            workers: Vec::new(),
            submit: None,
            revision: 0,
        }
    }

    pub(super) fn is_shut(&self) -> bool {
        self.stage >= Stage::Shut
    }

    /// Takes no more jobs.
    pub(super) fn shut(&mut self) {
        self.stage = self.stage.max(Stage::Shut);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.stage == Stage::Closed
    }

    /// Whether a thread submits a job.
    pub(super) fn is_submitting(&self) -> bool {
        self.submit.is_some()
    }

    /// Jobs without an outcome, or with one that was not taken.
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether the limit allows one more job.
    pub(super) fn has_room(&self) -> bool {
        self.len() < self.rules.limit
    }

    /// Jobs that are not done yet.
    pub(super) fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Jobs that no worker has leased.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The number of the next job, and whether no other job waits to be delivered before it.
    pub(super) fn next_job(&self) -> (u64, bool) {
        (self.next_job, self.waiting.is_empty())
    }

    /// Adds the next job, which is being submitted and delivered to `worker`, if there is one. A
    /// call of [`store_input`](Self::store_input) or [`undo_insert`](Self::undo_insert) must
    /// follow, and then one of [`finish_submit`](Self::finish_submit).
    pub(super) fn insert(&mut self, tag: DeliveryTag, worker: Option<u64>, metadata: Vec<u8>) {
        let job = Job {
            input: None,
            metadata,
            deadline_ns: tag.deadline_ns,
            deliveries: 1,
            reasons: Vec::new(),
            outcome: None,
        };
        self.jobs.insert(self.next_job, job);
        self.next_job += 1;
        self.unfinished += 1;
        debug_assert!(self.submit.is_none());
        if let Some(leases) = worker.and_then(|id| self.worker(id)) {
            leases.add(tag);
        }
        self.submit = Some(Submit {
            tag,
            worker,
            untaken: Vec::new(),
            end: None,
        });
    }

    /// Keeps the input of a job that was inserted, until it has an outcome. The job was delivered
    /// already, or waits.
    pub(super) fn store_input(&mut self, id: u64, input: I, is_out: bool) {
        let Some(job) = self.unfinished_job(id) else {
            return;
        };
        job.input = Some(input);
        if !is_out {
            job.deliveries = 0;
            self.enqueue(id);
        }
    }

    /// Removes the job that was inserted last. If no worker has seen it, the next job gets its
    /// number. Returns its metadata.
    pub(super) fn undo_insert(&mut self, id: u64, is_unseen: bool) -> Vec<u8> {
        if is_unseen {
            self.next_job = id;
        }
        self.cancel(id).map_or_else(Vec::new, |job| job.metadata)
    }

    /// The first job that waits and has a higher number.
    pub(super) fn first_waiting_after(&self, id: u64) -> Option<u64> {
        self.waiting.range(id + 1..).next().copied()
    }

    /// A waiting job, with the delivery tag that it would get.
    pub(super) fn next_delivery(&self, id: u64) -> Option<(DeliveryTag, &Job<I, R>)> {
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

    /// A job that waits has been delivered to `worker`.
    pub(super) fn deliver(&mut self, tag: DeliveryTag, worker: u64, position: u64, now: Duration) {
        self.waiting.remove(&tag.job);
        if let Some(job) = self.jobs.get_mut(&tag.job) {
            job.deliveries = tag.number;
        }
        if let Some(leases) = self.worker(worker) {
            leases.add(tag);
            leases.set_position(tag, position, now);
        }
    }

    /// A job that waits cannot be delivered: an attempt has failed.
    pub(super) fn fail_delivery(&mut self, id: u64, reason: String) {
        self.waiting.remove(&id);
        self.record_failure(id, reason);
    }

    /// Records the result of the submit for its lease.
    pub(super) fn finish_submit(&mut self, result: DeliveryResult, now: Duration) {
        let Some(submit) = self.submit.take() else {
            return;
        };
        let tag = submit.tag;
        if let Some(leases) = submit.worker.and_then(|id| self.worker(id)) {
            match result {
                DeliveryResult::At(position) => {
                    leases.set_position(tag, position, now);
                    for position in submit.untaken {
                        self.return_untaken(submit.worker.unwrap_or(0), position);
                    }
                }
                // No sample has position 0.
                DeliveryResult::Unconfirmed => leases.set_position(tag, 0, now),
                DeliveryResult::NoWorker => _ = leases.remove(tag),
            }
        } else if let (DeliveryResult::At(position), Some(reason)) = (result, submit.end) {
            // The worker is gone and has not answered.
            match submit.untaken.contains(&position) {
                true => self.requeue(tag.job),
                false => self.record_failure(tag.job, reason),
            }
        }
    }

    /// The call that submits has panicked: no worker has the job.
    pub(super) fn abort_submit(&mut self) {
        if let Some(job) = self.submit.as_ref().map(|submit| submit.tag.job) {
            self.finish_submit(DeliveryResult::NoWorker, Duration::ZERO);
            self.cancel(job);
        }
    }

    /// The worker that gets the next job: of those that are `open` and have capacity the one with
    /// the fewest leases.
    pub(super) fn pick_worker(&self, open: impl Iterator<Item = u64>) -> Option<u64> {
        let able = open.filter_map(|id| {
            let leases = self.workers.iter().find(|leases| leases.worker == id)?;
            let has_capacity = leases.has_capacity(self.rules.prefetch);
            has_capacity.then_some((id, leases.leases.len()))
        });
        able.min_by_key(|&(_, held)| held).map(|(id, _)| id)
    }

    pub(super) fn add_worker(&mut self, id: u64, pid: i32) {
        self.workers.push(WorkerLeases::new(id, pid));
        self.revision += 1;
    }

    fn worker(&mut self, id: u64) -> Option<&mut WorkerLeases> {
        self.workers.iter_mut().find(|leases| leases.worker == id)
    }

    /// Removes a worker. Returns the jobs that it leaves undone, for
    /// [`record_failure`](Self::record_failure), and whether one is being submitted to it, for
    /// [`record_worker_end`](Self::record_worker_end).
    pub(super) fn remove_worker(&mut self, id: u64) -> (Vec<u64>, bool) {
        let Some(index) = self.workers.iter().position(|leases| leases.worker == id) else {
            return (Vec::new(), false);
        };
        self.workers.swap_remove(index).left_undone()
    }

    /// Jobs that workers hold.
    pub(super) fn leased(&self) -> usize {
        self.workers.iter().map(|leases| leases.leases.len()).sum()
    }

    /// Applies a worker's answer. With a result it returns the lease, for
    /// [`complete`](Self::complete) or [`lose`](Self::lose); an error if the worker holds none of
    /// that number which it has not answered.
    pub(super) fn answer(
        &mut self,
        worker: u64,
        (job, number): (u64, u32),
        kind: AnswerKind,
        now: Duration,
    ) -> Result<Option<DeliveryTag>, ()> {
        let leases = self.worker(worker).ok_or(())?;
        let tag = leases.answer(job, number, now).ok_or(())?;
        if kind == AnswerKind::Completed {
            return Ok(Some(tag));
        }
        if leases.remove(tag) {
            match kind {
                AnswerKind::Failed(reason) => self.record_failure(job, reason),
                AnswerKind::Rejected(reason) => self.finish(job, Outcome::Rejected { reason }),
                AnswerKind::Expired => self.finish(job, Outcome::Expired),
                AnswerKind::Returned | AnswerKind::Completed => self.requeue(job),
            }
        }
        Ok(None)
    }

    /// The result that answered a lease is complete.
    pub(super) fn complete(&mut self, worker: u64, tag: DeliveryTag, result: R) {
        if self.worker(worker).is_some_and(|leases| leases.remove(tag)) {
            self.finish(tag.job, Outcome::Done(result));
        }
    }

    /// The result that answered a lease was lost.
    pub(super) fn lose(&mut self, worker: u64, tag: DeliveryTag, reason: String) {
        if self.worker(worker).is_some_and(|leases| leases.remove(tag)) {
            self.record_failure(tag.job, reason);
        }
    }

    /// Fails the attempts of the leases that have made no progress for the lease timeout.
    pub(super) fn expire(&mut self, now: Duration) {
        let Some(timeout) = self.rules.lease_timeout else {
            return;
        };
        let mut late = Vec::new();
        for leases in &mut self.workers {
            let pid = leases.pid;
            late.extend(
                leases
                    .expire(timeout, now)
                    .into_iter()
                    .map(|job| (job, pid)),
            );
        }
        for (job, pid) in late {
            let reason = format!("no answer from process {pid} within {timeout:?}");
            self.record_failure(job, reason);
        }
    }

    /// The time until the next lease expires.
    pub(super) fn next_expiry(&self, now: Duration) -> Option<Duration> {
        let timeout = self.rules.lease_timeout?;
        let oldest = self.workers.iter().filter_map(WorkerLeases::oldest).min()?;
        // The timeout may have any value, even one beyond the clock's range.
        Some(timeout.saturating_sub(now.saturating_sub(oldest)))
    }

    /// Returns a job that the worker was given and had not taken, as if it had not been delivered.
    pub(super) fn return_untaken(&mut self, worker: u64, position: u64) {
        if let Some(job) = self
            .worker(worker)
            .and_then(|leases| leases.remove_untaken(position))
        {
            self.requeue(job);
        }
    }

    /// Records that a worker has gone and left a job untaken. Only the submitting thread knows
    /// its position yet.
    pub(super) fn record_untaken(&mut self, worker: u64, position: u64) {
        if let Some(submit) = self.submit_to(worker) {
            submit.untaken.push(position);
        }
    }

    /// Records that a worker has gone and left a lease unanswered. Only the submitting thread
    /// knows its position yet.
    pub(super) fn record_worker_end(&mut self, worker: u64, reason: String) {
        if let Some(submit) = self.submit_to(worker) {
            submit.end = Some(reason);
        }
    }

    fn submit_to(&mut self, worker: u64) -> Option<&mut Submit> {
        let submit = self.submit.as_mut()?;
        (submit.worker == Some(worker)).then_some(submit)
    }

    /// Records a failed attempt: the job is tried again, or dead-lettered.
    pub(super) fn record_failure(&mut self, id: u64, reason: String) {
        let limit = self.rules.max_attempts as usize;
        let Some(job) = self.unfinished_job(id) else {
            return;
        };
        job.reasons.push(cut(&reason).to_string());
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

    /// A job that a worker returned before it was given waits already.
    fn enqueue(&mut self, id: u64) {
        self.waiting.insert(id);
        self.revision += 1;
    }

    /// Ends a job, once.
    pub(super) fn finish(&mut self, id: u64, outcome: Outcome<R>) {
        let revision = self.revision + 1;
        if let Some(job) = self.unfinished_job(id) {
            (job.outcome, job.input) = (Some((revision, outcome)), None);
            self.unfinished -= 1;
            self.finished.insert(revision, id);
            self.revision = revision;
        }
    }

    fn unfinished_job(&mut self, id: u64) -> Option<&mut Job<I, R>> {
        self.jobs.get_mut(&id).filter(|job| job.outcome.is_none())
    }

    /// Removes a job, whatever its state: a later answer is discarded. `None` if there is no such
    /// job. Drop the returned job without the lock.
    pub(super) fn cancel(&mut self, id: u64) -> Option<Job<I, R>> {
        let job = self.jobs.remove(&id)?;
        self.waiting.remove(&id);
        match &job.outcome {
            Some((revision, _)) => _ = self.finished.remove(revision),
            None => self.unfinished -= 1,
        }
        self.revision += 1;
        Some(job)
    }

    /// Removes the jobs that no worker holds, with their numbers. Drop them without the lock.
    pub(super) fn cancel_waiting(&mut self) -> Vec<(u64, Job<I, R>)> {
        let waiting = std::mem::take(&mut self.waiting);
        let removed = waiting
            .into_iter()
            .filter_map(|id| self.cancel(id).map(|job| (id, job)));
        removed.collect()
    }

    /// Whether the job has an outcome, or is no longer there.
    pub(super) fn is_settled(&self, id: u64) -> bool {
        self.jobs.get(&id).is_none_or(|job| job.outcome.is_some())
    }

    /// The outcome of one job, if it is there; an error if there is no such job.
    pub(super) fn take_outcome(&mut self, id: u64) -> Result<Option<(u64, Outcome<R>)>, ()> {
        let job = self.jobs.get(&id).ok_or(())?;
        if job.outcome.is_none() || self.is_being_submitted(id) {
            return Ok(None);
        }
        // This is a change: a thread may wait for the room.
        let taken = self.cancel(id).and_then(|job| job.outcome);
        Ok(taken.map(|(_, outcome)| (id, outcome)))
    }

    /// Whether the job is being submitted: it may still be withdrawn.
    fn is_being_submitted(&self, id: u64) -> bool {
        self.submit
            .as_ref()
            .is_some_and(|submit| submit.tag.job == id)
    }

    /// The next outcome in the queue's order, if it is there.
    pub(super) fn take_next(&mut self) -> Option<(u64, Outcome<R>)> {
        let id = match self.rules.order {
            ResultOrder::Submission => *self.jobs.keys().next()?,
            ResultOrder::Completion => {
                let mut finished = self.finished.values();
                *finished.find(|&&id| !self.is_being_submitted(id))?
            }
        };
        self.take_outcome(id).ok().flatten()
    }
}
