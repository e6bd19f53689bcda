//! Delivers jobs: one thread at a time, and without the job table's lock during driver calls.
//!
//! A call that gives a stream work blocks while that stream's launch queue is full, for as long as
//! the stream waits for a peer. Every call on the queue takes the job table's lock and has a
//! timeout. So the lock is never held across such a call: the caller records first what it is about
//! to do ([`Delivery`]), and afterwards the result. Meanwhile other threads may read the table,
//! process answers and see workers end; waiting jobs are delivered when the call is over.
//!
//! The lease exists before the call, because its answer may come before the call returns. Its
//! *position* is not known until then, so until then it neither expires nor ends with its worker.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::dispatcher::Dispatcher;
use super::job_table::JobTable;
use super::loan::Loan;
use super::owner::SubmitError;
use super::wire::DeliveryTag;
use super::worker_session::JobEvent;
use crate::error::{Error, Result};
use crate::pubsub::SendError;
use crate::stream::Stream;

/// How long a thread waits for another thread's delivery, even if its own timeout is shorter. The
/// wait ends with that delivery.
const DELIVERY_WAIT: Duration = Duration::from_millis(10);

/// The job table, locked except during driver calls.
pub(super) struct JobTableGuard<'a> {
    dispatcher: &'a Dispatcher,
    table: Option<MutexGuard<'a, JobTable>>,
    /// This thread delivers a job.
    is_delivering: bool,
}

impl<'a> JobTableGuard<'a> {
    pub(super) fn new(
        dispatcher: &'a Dispatcher,
        table: MutexGuard<'a, JobTable>,
    ) -> JobTableGuard<'a> {
        JobTableGuard {
            dispatcher,
            table: Some(table),
            is_delivering: false,
        }
    }

    /// Makes a call that may take long, without the lock.
    #[inline]
    pub(super) fn unlocked<T>(&mut self, call: impl FnOnce() -> T) -> T {
        drop(self.table.take());
        let made = call();
        self.table = Some(self.dispatcher.lock_table());
        made
    }

    /// Makes the call that delivers the job with that delivery tag to `session`, if there is one. A
    /// call of [`JobTable::finish_delivery`] must follow.
    fn deliver<T>(
        &mut self,
        tag: DeliveryTag,
        session: Option<u64>,
        is_new: bool,
        call: impl FnOnce() -> T,
    ) -> T {
        debug_assert!(self.delivery.is_none());
        session
            .and_then(|id| self.session(id))
            .into_iter()
            .for_each(|session| session.lease(tag, None));
        self.delivery = Some(Delivery {
            tag,
            session,
            is_new,
            untaken: Vec::new(),
            end: None,
            is_awaited: false,
        });
        self.is_delivering = true;
        let made = self.unlocked(call);
        self.is_delivering = false;
        made
    }

    /// Sleeps until `changed`, without the lock.
    pub(super) fn sleep(&mut self, changed: &Condvar, limit: Duration) {
        if let Some(table) = self.table.take() {
            let slept = changed.wait_timeout(table, limit);
            self.table = Some(slept.unwrap_or_else(PoisonError::into_inner).0);
        }
    }
}

impl Deref for JobTableGuard<'_> {
    type Target = JobTable;

    #[inline]
    fn deref(&self) -> &JobTable {
        self.table.as_ref().expect("locked but for `unlocked`")
    }
}

impl DerefMut for JobTableGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut JobTable {
        self.table.as_mut().expect("locked but for `unlocked`")
    }
}

impl Drop for JobTableGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_delivering {
            // The driver call panicked: no worker has the job.
            let mut table = self.dispatcher.lock_table();
            let result = table
                .delivery
                .as_ref()
                .map(|delivery| (delivery.tag.job, delivery.is_new));
            table.finish_delivery(DeliveryResult::Nobody);
            match result {
                Some((job, true)) => drop(table.call_off(job)),
                Some((job, false)) => {
                    table.record_failure(job, "a panic while it was given out".into())
                }
                None => {}
            }
        }
    }
}

/// The delivery that a thread is about to make.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) tag: DeliveryTag,
    /// The session that gets the lease.
    session: Option<u64>,
    /// The job is being submitted: its outcome is not taken before the submit has finished.
    pub(super) is_new: bool,
    /// Positions that the same worker left untaken meanwhile.
    untaken: Vec<u64>,
    /// Why that worker ended meanwhile without an answer.
    end: Option<String>,
    /// Other threads found a job to deliver meanwhile and left it to this one.
    is_awaited: bool,
}

/// The result of a delivery.
enum DeliveryResult {
    /// The worker has the job, at this position.
    At(u64),
    /// The worker may have been given an entry without a valid job: its answer is discarded.
    Unconfirmed,
    Nobody,
}

impl JobTable {
    /// Records the result for the lease. True if other threads have left a job to deliver.
    fn finish_delivery(&mut self, result: DeliveryResult) -> bool {
        let Some(Delivery {
            tag,
            session: id,
            untaken,
            end,
            is_awaited,
            ..
        }) = self.delivery.take()
        else {
            return false;
        };
        let (mut events, now) = (Vec::new(), self.now());
        if let Some(session) = id.and_then(|id| self.session(id)) {
            match result {
                DeliveryResult::At(position) => {
                    session.set_position(tag, position, now);
                    untaken
                        .into_iter()
                        .for_each(|position| session.undo_delivery(position, &mut events));
                }
                // No sample has position 0.
                DeliveryResult::Unconfirmed => session.set_position(tag, 0, now),
                DeliveryResult::Nobody => session.remove_lease(tag),
            }
        } else if let (DeliveryResult::At(position), Some(reason)) = (result, end) {
            // The worker is gone and has not answered.
            events.push(match untaken.contains(&position) {
                true => JobEvent::Returned(tag.job),
                false => JobEvent::Failed(tag.job, reason),
            });
        }
        events.into_iter().for_each(|event| self.apply(event));
        is_awaited
    }

    /// Records that a worker has gone and left a job untaken, whose position only the delivering
    /// thread knows yet.
    pub(super) fn record_untaken(&mut self, id: u64, position: u64) {
        if let Some(delivery) = self
            .delivery
            .as_mut()
            .filter(|delivery| delivery.session == Some(id))
        {
            delivery.untaken.push(position);
        }
    }

    /// Records that a worker has gone and left a lease unanswered, whose position only the
    /// delivering thread knows yet.
    pub(super) fn record_worker_end(&mut self, id: u64, reason: String) {
        if let Some(delivery) = self
            .delivery
            .as_mut()
            .filter(|delivery| delivery.session == Some(id))
        {
            delivery.end = Some(reason);
        }
    }
}

/// A thread's wait for another thread that delivers a job.
struct DeliveryWait<'a> {
    dispatcher: &'a Dispatcher,
    is_awaited: bool,
}

impl DeliveryWait<'_> {
    /// Whether no thread delivers a job. If one does, waits a moment, because a delivery usually
    /// takes microseconds.
    fn is_free(&mut self, guard: &mut JobTableGuard<'_>) -> bool {
        if guard.delivery.is_some() && !std::mem::replace(&mut self.is_awaited, true) {
            guard.submit_waiters += 1;
            let start = Instant::now();
            while guard.delivery.is_some() && start.elapsed() < DELIVERY_WAIT {
                self.dispatcher.wait_for_change(guard, DELIVERY_WAIT);
            }
        }
        guard.delivery.is_none()
    }
}

impl Drop for DeliveryWait<'_> {
    fn drop(&mut self) {
        if self.is_awaited {
            let mut table = self.dispatcher.lock_table();
            table.submit_waiters = table.submit_waiters.saturating_sub(1);
        }
    }
}

impl Dispatcher {
    /// Does the queue's work until a job can be entered, or no longer can because the queue is
    /// shut. Then calls `enter`.
    pub(super) fn wait_to_submit<T>(
        self: &Arc<Self>,
        timeout: Duration,
        mut enter: impl FnMut(&mut JobTableGuard<'_>) -> Option<T>,
    ) -> Result<T> {
        let (limit, name) = (self.options.limit, self.publisher.name());
        let (mut delivery_wait, is_full) = (
            DeliveryWait {
                dispatcher: self,
                is_awaited: false,
            },
            Cell::new(false),
        );
        let look = |guard: &mut JobTableGuard<'_>| {
            let is_free = delivery_wait.is_free(guard);
            is_full.set(guard.len() >= limit);
            if guard.is_shut || (is_free && !is_full.get()) {
                enter(guard).map(Ok)
            } else {
                None
            }
        };
        let late = || match is_full.get() {
            true => Error::QueueFull {
                name: name.to_string(),
                limit,
                waited: timeout,
            },
            false => {
                let what =
                    format!("another thread's submit to {name:?}, which the driver holds up");
                Error::Timeout {
                    what,
                    waited: timeout,
                }
            }
        };
        self.wait_until(timeout, look, late)
    }

    /// Does all pending work, including deliveries left to a thread that delivers a job: waits a
    /// moment for that thread.
    pub(super) fn catch_up(self: &Arc<Self>, guard: &mut JobTableGuard<'_>) {
        self.process_events(guard);
        let mut delivery_wait = DeliveryWait {
            dispatcher: self,
            is_awaited: false,
        };
        if guard.delivery.is_some() && delivery_wait.is_free(guard) {
            self.process_events(guard);
        }
        if std::mem::take(&mut delivery_wait.is_awaited) {
            guard.submit_waiters = guard.submit_waiters.saturating_sub(1);
        }
    }

    /// Adds a job, and delivers it at once if no other job waits before it and a worker has
    /// capacity. Called only while no other thread delivers a job.
    pub(super) fn enter(
        &self,
        guard: &mut JobTableGuard<'_>,
        input: Loan,
        stream: &Stream,
        deadline_ns: u64,
    ) -> Result<u64, SubmitError> {
        let Loan {
            sample,
            metadata,
            lease,
        } = input;
        let (job, is_next) = guard.next_job();
        let tag = DeliveryTag {
            job,
            number: 1,
            attempt: 1,
            deadline_ns,
        };
        let encoded = match tag.encode(&metadata) {
            Ok(encoded) => encoded,
            Err(error) => {
                return Err(SubmitError {
                    error,
                    loan: Some(Box::new(Loan {
                        sample,
                        metadata,
                        lease,
                    })),
                });
            }
        };
        let to = if is_next {
            guard.pick_worker(job, &[])
        } else {
            None
        };
        guard.insert(metadata, deadline_ns);
        let posted = guard.deliver(tag, to, true, || sample.post(to, &encoded, stream));
        if guard.is_closed {
            // Not dropped here, under the lock: returning memory gives its stream work.
            let sample = posted.err().and_then(|failed| failed.sample);
            let loan = sample.map(|sample| Box::new(Loan::new(*sample)));
            return Err(SubmitError {
                error: self.gone(),
                loan,
            });
        }
        let (result, entered) = match posted {
            Ok((parcel, position)) => {
                guard.store_input(job, parcel, position.is_some());
                (
                    position.map_or(DeliveryResult::Nobody, DeliveryResult::At),
                    Ok(job),
                )
            }
            Err(SendError { error, sample }) => {
                // If the worker may have seen the entry, its answer must find a lease, but no job.
                let result = if sample.is_some() {
                    DeliveryResult::Nobody
                } else {
                    DeliveryResult::Unconfirmed
                };
                let metadata = guard.undo_insert(job, sample.is_some());
                let loan = sample.map(|sample| {
                    Box::new(Loan {
                        sample: *sample,
                        metadata,
                        lease,
                    })
                });
                (result, Err(SubmitError { error, loan }))
            }
        };
        if guard.finish_delivery(result) || guard.submit_waiters > 0 {
            self.notify_submitters(guard);
        }
        self.schedule_dispatch(guard);
        entered
    }

    /// Delivers waiting jobs as long as a worker has capacity, unless another thread delivers.
    pub(super) fn dispatch(&self, guard: &mut JobTableGuard<'_>) {
        let mut passed_over = Vec::new();
        while let Some(waiting) = guard.first_waiting() {
            if let Some(delivery) = &mut guard.delivery {
                delivery.is_awaited = true;
                return;
            }
            let Some(id) = guard.pick_worker(waiting, &passed_over) else {
                return;
            };
            let Some((tag, job)) = guard.next_delivery(waiting) else {
                return;
            };
            let metadata = tag.encode(&job.metadata);
            let Some(parcel) = job.parcel.clone() else {
                return;
            };
            guard.start_delivery(tag);
            let forward = || metadata.and_then(|metadata| parcel.forward(id, &metadata));
            let forwarded = guard.deliver(tag, Some(id), false, forward);
            if guard.is_closed {
                return;
            }
            let result = match forwarded {
                Ok(Some(position)) => DeliveryResult::At(position),
                Ok(None) => {
                    passed_over.push(id);
                    guard.undo_delivery_start(tag);
                    DeliveryResult::Nobody
                }
                Err(error) => {
                    guard.record_failure(tag.job, format!("it could not be given out: {error}"));
                    DeliveryResult::Nobody
                }
            };
            guard.finish_delivery(result);
            if guard.submit_waiters > 0 {
                self.notify_submitters(guard);
            }
        }
    }
}
