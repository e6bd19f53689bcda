//! The leases of one worker, as the job table counts them. No clock, no link: time is an argument.

use std::time::Duration;

use super::wire::DeliveryTag;

/// A job that was given to a worker.
#[derive(Debug)]
pub(super) struct LeaseRecord {
    pub(super) tag: DeliveryTag,
    /// The position in the worker's ring; `None` during the submit.
    position: Option<u64>,
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

#[derive(Debug)]
pub(super) struct WorkerLeases {
    pub(super) worker: u64,
    pub(super) pid: i32,
    pub(super) leases: Vec<LeaseRecord>,
    last_answer: Option<Duration>,
}

impl WorkerLeases {
    pub(super) fn new(worker: u64, pid: i32) -> WorkerLeases {
        WorkerLeases {
            worker,
            pid,
            leases: Vec::new(),
            last_answer: None,
        }
    }

    /// Whether the worker may hold one more job. A worker that is late with another gets none
    /// before it has answered.
    pub(super) fn has_capacity(&self, prefetch: u32) -> bool {
        self.leases.len() < prefetch as usize && self.leases.iter().all(|lease| !lease.is_late)
    }

    pub(super) fn add(&mut self, tag: DeliveryTag) {
        self.leases.push(LeaseRecord {
            tag,
            position: None,
            since: Duration::ZERO,
            is_late: false,
            is_answered: false,
        });
    }

    /// Records the position of a delivered lease. The lease may have been answered before.
    pub(super) fn set_position(&mut self, tag: DeliveryTag, position: u64, now: Duration) {
        if let Some(lease) = self.leases.iter_mut().find(|lease| lease.tag == tag) {
            (lease.position, lease.since) = (Some(position), now);
        }
    }

    /// Removes a lease. True if an answer to it still counts.
    pub(super) fn remove(&mut self, tag: DeliveryTag) -> bool {
        let index = self.leases.iter().position(|lease| lease.tag == tag);
        index.is_some_and(|index| !self.leases.swap_remove(index).is_late)
    }

    /// The lease of that job and number, unless the worker has answered it.
    pub(super) fn unanswered(&mut self, job: u64, number: u32) -> Option<&mut LeaseRecord> {
        self.leases
            .iter_mut()
            .find(|lease| (lease.tag.job, lease.tag.number) == (job, number) && !lease.is_answered)
    }

    /// Records an answer at `now`. It is progress for all leases of the worker.
    pub(super) fn answer(&mut self, job: u64, number: u32, now: Duration) -> Option<DeliveryTag> {
        let lease = self.unanswered(job, number)?;
        lease.is_answered = true;
        let tag = lease.tag;
        self.last_answer = Some(now);
        Some(tag)
    }

    /// Since when the oldest lease has made no progress.
    pub(super) fn oldest(&self) -> Option<Duration> {
        let since = self
            .leases
            .iter()
            .filter(|lease| lease.can_expire())
            .map(|lease| lease.since);
        let oldest = since.min()?;
        Some(self.last_answer.map_or(oldest, |answer| answer.max(oldest)))
    }

    /// Marks the leases late that have made no progress for `timeout`. Returns their jobs.
    pub(super) fn expire(&mut self, timeout: Duration, now: Duration) -> Vec<u64> {
        let last = self.last_answer;
        let is_over = |lease: &LeaseRecord| {
            let since = last.map_or(lease.since, |answer| answer.max(lease.since));
            lease.can_expire() && now.saturating_sub(since) >= timeout
        };
        self.leases
            .iter_mut()
            .filter(|lease| is_over(lease))
            .map(|lease| {
                lease.is_late = true;
                lease.tag.job
            })
            .collect()
    }

    /// Removes the lease at that position of the ring, which the worker had not taken. Returns its
    /// job if it is not late.
    pub(super) fn remove_untaken(&mut self, position: u64) -> Option<u64> {
        let matches = |lease: &LeaseRecord| lease.position == Some(position) && !lease.is_answered;
        let index = self.leases.iter().position(matches)?;
        let lease = self.leases.swap_remove(index);
        (!lease.is_late).then_some(lease.tag.job)
    }

    /// The jobs that the worker leaves undone when it goes. A lease that is being submitted, and
    /// was not answered before, is left to the submitting thread: the flag says so.
    pub(super) fn left_undone(&self) -> (Vec<u64>, bool) {
        let jobs = self.leases.iter().filter(|lease| lease.can_expire());
        (
            jobs.map(|lease| lease.tag.job).collect(),
            self.leases.iter().any(|lease| lease.position.is_none()),
        )
    }
}
