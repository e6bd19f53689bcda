//! A submitter's handle of a job while it is pending, and the job's result.

use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::dispatcher::{Dispatcher, State};
use super::job_table::Outcome;
use super::wire::user_of_answer;
use super::worker_session::{Completed, Jobs};
use crate::error::{Error, Result};
use crate::pubsub::Sample;
use crate::stream::Stream;

/// How long copying or releasing complete data may take.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);

/// A job that was submitted. Dropped, the job continues, and
/// [`Queue::next_result`](super::Queue::next_result) returns its result.
#[derive(Debug, Clone)]
pub struct JobHandle {
    dispatcher: Weak<Dispatcher>,
    name: String,
    id: u64,
}

impl JobHandle {
    pub(super) fn new(dispatcher: &Arc<Dispatcher>, id: u64) -> JobHandle {
        JobHandle {
            dispatcher: Arc::downgrade(dispatcher),
            name: dispatcher.publisher.name().to_string(),
            id,
        }
    }

    /// The job's number, from 1.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Waits for the result. Its data is complete then; work on `stream` may read it at once.
    ///
    /// # Errors
    /// [`Error::Timeout`], after which it can be waited for again; [`Error::DeadLettered`];
    /// [`Error::Rejected`]; [`Error::NoSuchJob`] when the outcome was taken before;
    /// [`Error::Argument`] for a stream of another device, and the outcome stays;
    /// [`Error::QueueClosed`]; [`Error::Forked`].
    pub fn wait(&self, stream: &Stream, timeout: Duration) -> Result<JobResult> {
        let dispatcher = self
            .dispatcher
            .upgrade()
            .ok_or_else(|| Error::QueueClosed {
                name: self.name.clone(),
            })?;
        stream.check_of(dispatcher.publisher.device())?;
        let late = |state: &State| Error::Timeout {
            what: format!(
                "the result of job {} of {:?} ({})",
                self.id,
                self.name,
                state.outlook()
            ),
            waited: timeout,
        };
        let (id, outcome) =
            dispatcher.wait_until(timeout, |state| self.try_take(&mut state.table), late)?;
        into_result(&dispatcher, id, outcome, stream)
    }

    /// The result, if the job is done.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), without the timeout.
    pub fn try_wait(&self, stream: &Stream) -> Result<Option<JobResult>> {
        match self.wait(stream, Duration::ZERO) {
            Ok(result) => Ok(Some(result)),
            Err(Error::Timeout { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether [`wait`](Self::wait) would return at once: the outcome is there, or was taken. Does
    /// not take it.
    ///
    /// # Errors
    /// [`Error::QueueClosed`]; [`Error::Forked`].
    pub fn is_done(&self) -> Result<bool> {
        let dispatcher = self
            .dispatcher
            .upgrade()
            .ok_or_else(|| Error::QueueClosed {
                name: self.name.clone(),
            })?;
        dispatcher.wait_until(
            Duration::ZERO,
            |state| Some(Ok(state.table.is_settled(self.id))),
            |_| dispatcher.gone(),
        )
    }

    /// Cancels the job: it is delivered no more, and the answer of a worker that has it is
    /// discarded. False if its outcome was taken before.
    ///
    /// # Errors
    /// [`Error::QueueClosed`]; [`Error::Forked`].
    pub fn cancel(&self) -> Result<bool> {
        let dispatcher = self
            .dispatcher
            .upgrade()
            .ok_or_else(|| Error::QueueClosed {
                name: self.name.clone(),
            })?;
        // Dropped here, without the lock.
        let job = dispatcher.wait_until(
            Duration::ZERO,
            |state| Some(Ok(state.table.cancel(self.id))),
            |_| dispatcher.gone(),
        )?;
        Ok(job.is_some())
    }

    fn try_take(&self, jobs: &mut Jobs) -> Option<Result<(u64, Outcome<Completed>)>> {
        match jobs.take_outcome(self.id) {
            Ok(outcome) => outcome.map(Ok),
            Err(()) => Some(Err(Error::NoSuchJob {
                name: self.name.clone(),
                job: self.id,
            })),
        }
    }
}

/// Converts an outcome for the caller that asked for it.
pub(super) fn into_result(
    dispatcher: &Arc<Dispatcher>,
    job: u64,
    outcome: Outcome<Completed>,
    stream: &Stream,
) -> Result<JobResult> {
    let name = dispatcher.publisher.name().to_string();
    match outcome {
        Outcome::Done(Completed::Received {
            arrival,
            attempt,
            pid,
        }) => Ok(JobResult {
            dispatcher: Arc::downgrade(dispatcher),
            sample: arrival.into_sample(stream),
            job,
            attempt,
            worker_pid: pid,
        }),
        Outcome::Done(Completed::PutBack(result)) => Ok(result.received_on(stream)),
        Outcome::DeadLettered { reasons } => Err(Error::DeadLettered { name, job, reasons }),
        Outcome::Rejected { reason } => Err(Error::Rejected { name, job, reason }),
        Outcome::Expired => Err(Error::DeadlinePassed { name, job }),
    }
}

/// A job's result: a tensor in its worker's memory, complete, and lent until it is dropped. It
/// outlives the worker.
///
/// Its address, its layout (no bytes if the worker completed without an output) and its stream are
/// those of the [`Sample`] that it dereferences to.
#[derive(Debug)]
#[must_use = "a result that is dropped is released"]
pub struct JobResult {
    /// Its queue's: a job's number alone does not tell one queue's results from another's.
    dispatcher: Weak<Dispatcher>,
    sample: Sample,
    job: u64,
    attempt: u32,
    worker_pid: i32,
}

impl Deref for JobResult {
    type Target = Sample;

    fn deref(&self) -> &Sample {
        &self.sample
    }
}

impl JobResult {
    /// The metadata bytes that the worker sent along.
    pub fn metadata(&self) -> &[u8] {
        user_of_answer(self.sample.metadata())
    }

    /// The job's number, from 1.
    pub fn job(&self) -> u64 {
        self.job
    }

    /// The number of the attempt that gave this result, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The process id of the worker.
    pub fn worker_pid(&self) -> i32 {
        self.worker_pid
    }

    /// Whether the job is one of this dispatcher's.
    pub(super) fn is_of(&self, dispatcher: &Dispatcher) -> bool {
        std::ptr::eq(self.dispatcher.as_ptr(), dispatcher)
    }

    /// This result, released behind another stream's work: its data is complete.
    fn received_on(self, stream: &Stream) -> JobResult {
        JobResult {
            sample: self.sample.received_on(stream),
            ..self
        }
    }

    /// The result as a sample, which can be released behind other streams. The first bytes of its
    /// [`metadata`](Sample::metadata) belong to the queue: call [`metadata`](Self::metadata)
    /// before.
    pub fn into_sample(self) -> Sample {
        self.sample
    }

    /// Copies all of it to host memory.
    ///
    /// # Errors
    /// Those of [`Sample::to_vec`].
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        self.sample.to_vec(COPY_TIMEOUT)
    }

    /// Copies all of it to `bytes`.
    ///
    /// # Errors
    /// Those of [`Sample::copy_to`].
    pub fn copy_to(&self, bytes: &mut [u8]) -> Result<()> {
        self.sample.copy_to(bytes, COPY_TIMEOUT)
    }

    /// Releases the result behind the work of its stream, as dropping it does, and reports whether
    /// the release could be enqueued.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Forked`].
    pub fn finish(self) -> Result<()> {
        self.sample.finish(COPY_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{QueueFixture, SOON};
    use super::*;
    use crate::queue::Queue;

    fn first_result(fixture: &QueueFixture, queue: &Queue) -> JobResult {
        let mut worker = fixture.worker();
        let job = queue.submit_bytes(&[7], &fixture.stream).unwrap();
        let lease = worker.lease(&fixture.stream).unwrap();
        lease.complete(&fixture.stream).unwrap();
        job.wait(&fixture.stream, SOON).unwrap()
    }

    #[test]
    fn a_result_of_another_queue_is_not_put_back() {
        let fixtures = ["own", "other"].map(QueueFixture::new);
        let queues = fixtures.each_ref().map(QueueFixture::queue);
        let own = first_result(&fixtures[0], &queues[0]);
        let other = first_result(&fixtures[1], &queues[1]);
        assert_eq!((own.job(), other.job()), (1, 1));
        assert!(matches!(
            queues[0].put_back(other),
            Err(Error::NoSuchJob { job: 1, .. })
        ));
        assert_eq!(queues[0].state().unwrap().finished, 0);
        queues[0].put_back(own).unwrap();
        // Also after it was put back and taken again.
        let own = queues[0].next_result(&fixtures[0].stream, SOON).unwrap();
        queues[0].put_back(own).unwrap();
        assert_eq!(queues[0].state().unwrap().finished, 1);
    }
}
