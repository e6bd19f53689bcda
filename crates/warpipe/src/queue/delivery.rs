//! Delivers jobs, by the rule of the [`TimedLock`](crate::runtime::timed_lock).
//!
//! A submit gives its own stream work, and the driver may hold that call up. So it has the lock for
//! submitting, which only users' threads take, and makes the call without the job table's lock: it
//! records first what it is about to do ([`JobTable::insert`](super::job_table::JobTable::insert)),
//! and afterwards the result. Meanwhile other threads may read the table, process answers and see
//! workers end. The lease exists before the call, because its answer may come before the call
//! returns. Its *position* is not known until then, so until then it neither expires nor ends with
//! its worker.
//!
//! A job that waited is delivered by any thread, once its data is complete: by the CPU alone.

use super::dispatcher::{Dispatcher, StateGuard};
use super::job_table::DeliveryResult;
use super::loan::Loan;
use super::owner::SubmitError;
use super::wire::DeliveryTag;
use crate::error::Result;
use crate::pubsub::{Forwarded, RetainedSlot, SendError};
use crate::stream::Stream;

/// So many jobs with incomplete data are passed over at once: each is a look under the table's
/// lock.
const NOT_YET_MAX: usize = 256;

/// Makes the call of the submit that was begun, without the lock.
fn submit_unlocked<T>(guard: &mut StateGuard<'_>, call: impl FnOnce() -> T) -> T {
    struct AbortOnPanic<'g, 'a>(&'g mut StateGuard<'a>);

    impl Drop for AbortOnPanic<'_, '_> {
        fn drop(&mut self) {
            self.0.relock();
            self.0.table.abort_submit();
        }
    }

    let abort = AbortOnPanic(guard);
    let made = abort.0.unlocked(call);
    std::mem::forget(abort);
    made
}

impl Dispatcher {
    /// Adds a job, and delivers it at once if no other job waits before it and a worker has
    /// capacity. The caller has the lock for submitting.
    pub(super) fn add_job(
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
        let posted = submit_unlocked(guard, || sample.post(to, &encoded, stream));
        if guard.table.is_closed() {
            // Not dropped here, under the lock: returning memory gives its stream work.
            let sample = posted.err().and_then(|failed| failed.sample);
            let loan = sample.map(|sample| Box::new(Loan::new(*sample)));
            return Err(SubmitError {
                error: self.gone(),
                loan,
            });
        }
        let (result, submitted) = record_post(guard, job, lease, posted);
        let now = guard.now();
        guard.table.finish_submit(result, now);
        // Jobs that waited meanwhile.
        self.dispatch(guard);
        submitted
    }

    /// Delivers waiting jobs with complete data as long as a worker has capacity, in their order: a
    /// job that has to wait for its data does not hold up those behind it, up to a limit. What a
    /// thread that submits leaves waiting, that thread delivers.
    pub(super) fn dispatch(&self, guard: &mut StateGuard<'_>) {
        guard.is_input_due = false;
        let (mut passed_over, mut not_yet, mut last) = (Vec::new(), 0, 0);
        while not_yet < NOT_YET_MAX
            && let Some(waiting) = guard.table.first_waiting_after(last)
        {
            if guard.table.is_submitting() {
                return;
            }
            let Some(id) = guard.pick_worker(&passed_over) else {
                return;
            };
            let Some((tag, job)) = guard.table.next_delivery(waiting) else {
                return;
            };
            let Some(input) = &job.input else { return };
            let forwarded = tag
                .encode(&job.metadata)
                .and_then(|metadata| input.forward(id, &metadata));
            match forwarded {
                Ok(Forwarded::At(position)) => {
                    let now = guard.now();
                    guard.table.deliver(tag, id, position, now);
                }
                Ok(Forwarded::NoRoom) => passed_over.push(id),
                Ok(Forwarded::NotYet) => {
                    guard.is_input_due = true;
                    (not_yet, last) = (not_yet + 1, waiting);
                }
                Err(error) => {
                    let reason = format!("it could not be given out: {error}");
                    guard.table.fail_delivery(tag.job, reason);
                }
            }
        }
    }
}

/// Notes in the table what became of a job's submit.
fn record_post(
    guard: &mut StateGuard<'_>,
    job: u64,
    lease: Option<DeliveryTag>,
    posted: Result<(RetainedSlot, Option<u64>), SendError>,
) -> (DeliveryResult, Result<u64, SubmitError>) {
    match posted {
        Ok((input, position)) => {
            guard.table.store_input(job, input, position.is_some());
            let result = position.map_or(DeliveryResult::NoWorker, DeliveryResult::At);
            (result, Ok(job))
        }
        Err(SendError { error, sample }) => {
            // If the worker may have seen the entry, its answer must find a lease, but no job.
            let result = if sample.is_some() {
                DeliveryResult::NoWorker
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
