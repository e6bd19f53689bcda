//! Delivers jobs.
//!
//! A submit gives its own stream work, and the driver may hold that call up. So it has the lock for
//! submitting (a [`TimedLock`](crate::runtime::timed_lock)), which only users' threads take, and
//! makes the call without the job table's lock: it records first what it is about to do
//! ([`JobTable::insert`](super::job_table::JobTable::insert)), and afterwards the result. Meanwhile
//! other threads may read the table, process answers and see workers end. The lease exists before
//! the call, because its answer may come before the call returns. Its *position* is not known until
//! then, so until then it neither expires nor ends with its worker.
//!
//! A job that waited is delivered by any thread, once its data is complete: by the CPU alone.

use super::dispatcher::{Dispatcher, State, StateGuard};
use super::job_table::DeliveryResult;
use super::loan::Loan;
use super::owner::SubmitError;
use super::wire::DeliveryTag;
use crate::error::Result;
use crate::pubsub::entry::Metadata;
use crate::pubsub::{Forwarded, ReplyLink, RetainedSlot, SendError};
use crate::stream::Stream;

/// So many jobs with incomplete data are passed over at once: each is a look under the table's
/// lock.
const NOT_YET_MAX: usize = 256;

/// A job's input, kept until its outcome: a [`RetainedSlot`]; a model has another.
pub(super) trait Input {
    fn forward(&self, worker: u64, metadata: &Metadata) -> Result<Forwarded>;
}

impl Input for RetainedSlot {
    fn forward(&self, worker: u64, metadata: &Metadata) -> Result<Forwarded> {
        RetainedSlot::forward(self, worker, metadata)
    }
}

/// Makes the call of the submit that was begun, without the lock.
fn submit_unlocked<A: ReplyLink, I, T>(
    guard: &mut StateGuard<'_, A, I>,
    call: impl FnOnce() -> T,
) -> T {
    struct AbortOnPanic<'g, 'a, A: ReplyLink, I>(&'g mut StateGuard<'a, A, I>);

    impl<A: ReplyLink, I> Drop for AbortOnPanic<'_, '_, A, I> {
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

/// What became of a job.
pub(super) enum AddOutcome<E> {
    Added,
    /// The queue was closed meanwhile.
    Closed(Option<E>),
    /// The call failed. With the job's metadata.
    Failed(E, Vec<u8>),
}

/// Adds a job, and posts its input: to a worker if no other job waits before it and a worker has
/// capacity. The caller has the lock for submitting.
pub(super) fn add<A: ReplyLink, I: Input, E>(
    guard: &mut StateGuard<'_, A, I>,
    tag: DeliveryTag,
    metadata: Vec<u8>,
    post: impl FnOnce(Option<u64>) -> Result<(I, Option<u64>), E>,
    is_unseen: impl FnOnce(&E) -> bool,
) -> AddOutcome<E> {
    let (job, is_next) = guard.table.next_job();
    let to = is_next.then(|| guard.pick_worker(&[])).flatten();
    guard.table.insert(tag, to, metadata);
    let posted = submit_unlocked(guard, || post(to));
    if guard.table.is_closed() {
        return AddOutcome::Closed(posted.err());
    }
    let (result, added) = match posted {
        Ok((input, position)) => {
            guard.table.store_input(job, input, position.is_some());
            let result = position.map_or(DeliveryResult::NoWorker, DeliveryResult::At);
            (result, AddOutcome::Added)
        }
        Err(error) => {
            // If the worker may have seen the entry, its answer must find a lease, but no job.
            let is_unseen = is_unseen(&error);
            let result = if is_unseen {
                DeliveryResult::NoWorker
            } else {
                DeliveryResult::Unconfirmed
            };
            let metadata = guard.table.undo_insert(job, is_unseen);
            (result, AddOutcome::Failed(error, metadata))
        }
    };
    let now = guard.now();
    guard.table.finish_submit(result, now);
    // Jobs that waited meanwhile.
    guard.dispatch();
    added
}

impl Dispatcher {
    /// [Adds](add) a job.
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
        let loan = |sample, metadata| {
            Box::new(Loan {
                sample,
                metadata,
                lease,
            })
        };
        let (job, _) = guard.table.next_job();
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
                    returned: Some(loan(sample, metadata)),
                });
            }
        };
        let post = |to| sample.post(to, &encoded, stream);
        match add(guard, tag, metadata, post, |failed| {
            failed.returned.is_some()
        }) {
            AddOutcome::Added => Ok(job),
            // Not dropped here, under the lock: returning memory gives its stream work.
            AddOutcome::Closed(failed) => Err(SubmitError {
                error: self.gone(),
                returned: failed
                    .and_then(|failed| failed.returned)
                    .map(|sample| Box::new(Loan::new(*sample))),
            }),
            AddOutcome::Failed(SendError { error, returned }, metadata) => Err(SubmitError {
                error,
                returned: returned.map(|sample| loan(*sample, metadata)),
            }),
        }
    }
}

impl<A: ReplyLink, I: Input> State<A, I> {
    /// Delivers waiting jobs with complete data as long as a worker has capacity, in their order: a
    /// job that has to wait for its data does not hold up those behind it, up to a limit. What a
    /// thread that submits leaves waiting, that thread delivers.
    pub(super) fn dispatch(&mut self) {
        self.is_input_due = false;
        let (mut passed_over, mut not_yet, mut last) = (Vec::new(), 0, 0);
        while not_yet < NOT_YET_MAX
            && let Some(waiting) = self.table.first_waiting_after(last)
        {
            if self.table.is_submitting() {
                return;
            }
            let Some(id) = self.pick_worker(&passed_over) else {
                return;
            };
            let Some((tag, job)) = self.table.next_delivery(waiting) else {
                return;
            };
            let Some(input) = &job.input else { return };
            let forwarded = tag
                .encode(&job.metadata)
                .and_then(|metadata| input.forward(id, &metadata));
            match forwarded {
                Ok(Forwarded::At(position)) => {
                    let now = self.now();
                    self.table.deliver(tag, id, position, now);
                }
                Ok(Forwarded::NoRoom) => passed_over.push(id),
                Ok(Forwarded::NotYet) => {
                    self.is_input_due = true;
                    (not_yet, last) = (not_yet + 1, waiting);
                }
                Err(error) => {
                    let reason = format!("it could not be given out: {error}");
                    self.table.fail_delivery(tag.job, reason);
                }
            }
        }
    }
}
