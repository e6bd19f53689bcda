//! Delivers jobs: one thread at a time, and without the job table's lock during driver calls.
//!
//! A call that gives a stream work blocks while that stream's launch queue is full, for as long as
//! the stream waits for a peer. Every call on the queue takes the job table's lock and has a
//! timeout. So the lock is never held across such a call: the caller records first what it is about
//! to do ([`JobTable::start_delivery`](super::job_table::JobTable::start_delivery)), and afterwards the result. Meanwhile other threads may read the table,
//! process answers and see workers end; waiting jobs are delivered when the call is over.
//!
//! The call itself is made by a thread that may wait for it: a submitter's, for its own job and
//! stream, and the [delivery thread](super::dispatcher) for a job that waited and has
//! data that is not complete. Any other thread delivers only what the CPU alone can make ready.
//!
//! The lease exists before the call, because its answer may come before the call returns. Its
//! *position* is not known until then, so until then it neither expires nor ends with its worker.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::dispatcher::{Dispatcher, State, StateGuard};
use super::job_table::DeliveryResult;
use super::loan::Loan;
use super::owner::SubmitError;
use super::wire::DeliveryTag;
use crate::error::{Error, Result};
use crate::pubsub::{RetainedSlot, SendError};
use crate::stream::Stream;

/// How long a thread waits for another thread's delivery, even if its own timeout is shorter. The
/// wait ends with that delivery.
const DELIVERY_WAIT: Duration = Duration::from_millis(10);

/// Makes the call of the delivery that was started, without the lock.
fn deliver<T>(guard: &mut StateGuard<'_>, call: impl FnOnce() -> T) -> T {
    struct AbortOnPanic<'g, 'a>(&'g mut StateGuard<'a>);

    impl Drop for AbortOnPanic<'_, '_> {
        fn drop(&mut self) {
            self.0.relock();
            self.0.table.abort_delivery();
        }
    }

    let abort = AbortOnPanic(guard);
    let made = abort.0.unlocked(call);
    std::mem::forget(abort);
    made
}

/// A thread's wait for another thread that delivers a job.
struct DeliveryWait<'a> {
    dispatcher: &'a Dispatcher,
    is_awaited: bool,
}

impl DeliveryWait<'_> {
    /// Whether no thread delivers a job. If one does, or is about to, waits a moment, because a
    /// delivery usually takes microseconds.
    fn is_free(&mut self, guard: &mut StateGuard<'_>) -> bool {
        if guard.is_delivery_due() && !std::mem::replace(&mut self.is_awaited, true) {
            guard.waiters.submitting += 1;
            let start = Instant::now();
            while guard.is_delivery_due() && start.elapsed() < DELIVERY_WAIT {
                self.dispatcher.wait_for_change(guard, DELIVERY_WAIT);
            }
        }
        !guard.table.is_delivering()
    }
}

impl Drop for DeliveryWait<'_> {
    fn drop(&mut self) {
        if self.is_awaited {
            let mut state = self.dispatcher.lock();
            state.waiters.submitting = state.waiters.submitting.saturating_sub(1);
        }
    }
}

impl Dispatcher {
    /// Does the queue's work until a job can be entered, or no longer can because the queue is
    /// shut. Then calls `enter`.
    pub(super) fn wait_to_submit<T>(
        self: &Arc<Self>,
        timeout: Duration,
        mut enter: impl FnMut(&mut StateGuard<'_>) -> Option<T>,
    ) -> Result<T> {
        let (limit, name) = (self.options.limit, self.publisher.name());
        let (mut delivery_wait, is_full) = (
            DeliveryWait {
                dispatcher: self,
                is_awaited: false,
            },
            Cell::new(false),
        );
        let look = |guard: &mut StateGuard<'_>| {
            let is_free = delivery_wait.is_free(guard);
            is_full.set(guard.table.len() >= limit);
            if guard.table.is_shut() || (is_free && !is_full.get()) {
                enter(guard).map(Ok)
            } else {
                None
            }
        };
        let late = |_: &State| match is_full.get() {
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
    pub(super) fn catch_up(self: &Arc<Self>, guard: &mut StateGuard<'_>) {
        self.process_events(guard);
        let mut delivery_wait = DeliveryWait {
            dispatcher: self,
            is_awaited: false,
        };
        let is_free = guard.is_delivery_due() && delivery_wait.is_free(guard);
        // Before the call below, which may panic: its drop takes the lock.
        if std::mem::take(&mut delivery_wait.is_awaited) {
            guard.waiters.submitting = guard.waiters.submitting.saturating_sub(1);
        }
        if is_free {
            self.process_events(guard);
        }
    }

    /// Adds a job, and delivers it at once if no other job waits before it and a worker has
    /// capacity. Called only while no other thread delivers a job.
    pub(super) fn enter(
        &self,
        guard: &mut StateGuard<'_>,
        input: Loan,
        stream: &Stream,
        deadline_ns: u64,
    ) -> Result<u64, SubmitError> {
        let Loan {
            sample,
            metadata,
            lease,
        } = input;
        let (job, is_next) = guard.table.next_job();
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
        let to = is_next.then(|| guard.pick_worker(&[])).flatten();
        guard.table.insert(tag, to, metadata);
        let posted = deliver(guard, || sample.post(to, &encoded, stream));
        if guard.table.is_closed() {
            // Not dropped here, under the lock: returning memory gives its stream work.
            let sample = posted.err().and_then(|failed| failed.sample);
            let loan = sample.map(|sample| Box::new(Loan::new(*sample)));
            return Err(SubmitError {
                error: self.gone(),
                loan,
            });
        }
        let (result, entered) = entered(guard, job, lease, posted);
        self.finish_delivery(guard, result);
        entered
    }

    /// Records the result of this thread's delivery, and wakes the threads that waited for it.
    fn finish_delivery(&self, guard: &mut StateGuard<'_>, result: DeliveryResult) {
        let now = guard.now();
        guard.table.finish_delivery(result, now);
        if guard.waiters.delivery_is_over() {
            self.notify_submitters(&mut guard.waiters);
        }
    }

    /// Delivers waiting jobs as long as a worker has capacity, unless another thread delivers. A job
    /// with data that is not complete is left to the [delivery thread](super::dispatcher),
    /// unless this thread `may_block`; returns whether there is such a job.
    #[must_use]
    pub(super) fn dispatch(&self, guard: &mut StateGuard<'_>, may_block: bool) -> bool {
        let mut passed_over = Vec::new();
        while let Some(waiting) = guard.table.first_waiting() {
            if guard.table.is_delivering() {
                guard.waiters.is_delivery_awaited = true;
                return false;
            }
            let Some(id) = guard.pick_worker(&passed_over) else {
                return false;
            };
            let Some((tag, job)) = guard.table.next_delivery(waiting) else {
                return false;
            };
            let metadata = tag.encode(&job.metadata);
            let Some(input) = job.input.clone() else {
                return false;
            };
            if !may_block && !input.is_filled() {
                return true;
            }
            guard.table.start_delivery(tag, id);
            let forward = || metadata.and_then(|metadata| input.forward(id, &metadata));
            let forwarded = deliver(guard, forward);
            if guard.table.is_closed() {
                return false;
            }
            let result = match forwarded {
                Ok(Some(position)) => DeliveryResult::At(position),
                Ok(None) => {
                    passed_over.push(id);
                    guard.table.undo_delivery_start(tag);
                    DeliveryResult::Nobody
                }
                Err(error) => {
                    let reason = format!("it could not be given out: {error}");
                    guard.table.record_failure(tag.job, reason);
                    DeliveryResult::Nobody
                }
            };
            // This loop delivers them.
            guard.waiters.is_delivery_awaited = false;
            self.finish_delivery(guard, result);
        }
        false
    }
}

/// Notes in the table what became of a job's first delivery.
fn entered(
    guard: &mut StateGuard<'_>,
    job: u64,
    lease: Option<DeliveryTag>,
    posted: Result<(RetainedSlot, Option<u64>), SendError>,
) -> (DeliveryResult, Result<u64, SubmitError>) {
    match posted {
        Ok((input, position)) => {
            let (input, is_held) = (Arc::new(input), position.is_some());
            guard.table.store_input(job, input, is_held);
            let result = position.map_or(DeliveryResult::Nobody, DeliveryResult::At);
            (result, Ok(job))
        }
        Err(SendError { error, sample }) => {
            // If the worker may have seen the entry, its answer must find a lease, but no job.
            let result = if sample.is_some() {
                DeliveryResult::Nobody
            } else {
                DeliveryResult::Unconfirmed
            };
            let metadata = guard.table.undo_insert(job, sample.is_some());
            let loan = sample.map(|sample| {
                Box::new(Loan {
                    sample: *sample,
                    metadata,
                    lease,
                })
            });
            (result, Err(SubmitError { error, loan }))
        }
    }
}
