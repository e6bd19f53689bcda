//! A submitter's handle of a job while it is pending.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::dispatcher::{Dispatcher, State, StateGuard};
use super::job_result::JobResult;
use super::job_table::Outcome;
use super::worker_session::{Jobs, WorkerResult};
use crate::clock::now_ns;
use crate::error::{Error, JobEnd, Result, StateFault};
use crate::stream::Stream;
use crate::wait::Wait;

/// A job that was submitted. Dropped, the job continues, and
/// [`Queue::next_result`](super::Queue::next_result) returns its result.
#[derive(Debug, Clone)]
pub struct JobHandle {
    dispatcher: Weak<Dispatcher>,
    name: String,
    id: u64,
    /// `CLOCK_MONOTONIC` nanoseconds by which the reply to a request is wanted; 0 of a job.
    pub deadline_ns: u64,
}

impl JobHandle {
    pub(super) fn new(dispatcher: &Arc<Dispatcher>, id: u64, deadline_ns: u64) -> JobHandle {
        JobHandle {
            dispatcher: Arc::downgrade(dispatcher),
            name: dispatcher.name.clone(),
            id,
            deadline_ns,
        }
    }

    /// The job's, or the request's, number, from 1.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Takes the result, and waits for it if the job is not done; for a request's reply at most
    /// until its deadline. Its data is complete then; work on `stream` may read it at once.
    ///
    /// # Errors
    /// [`Error::Timeout`], after which it can be waited for again; [`JobEnd::DeadLettered`] when
    /// all attempts failed; [`JobEnd::Rejected`]; [`JobEnd::Expired`]; [`JobEnd::Taken`] when the
    /// outcome was taken before; [`Error::Argument`] for a stream of another device, and the
    /// outcome stays; [`Error::State`], also when the queue is shut or the client is gone.
    pub fn wait<'w>(&self, stream: &Stream, wait: impl Into<Wait<'w>>) -> Result<JobResult> {
        let dispatcher = self.dispatcher()?;
        stream.check_of(dispatcher.publisher.device())?;
        let take = |state: &mut StateGuard<'_>| self.try_take(&mut state.table);
        let (id, outcome) = self.wait_until(&dispatcher, wait.into(), take)?;
        into_result(&dispatcher, id, outcome, stream)
    }

    /// Waits as [`wait`](Self::wait), and takes nothing.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`JobEnd::Expired`]; [`Error::State`].
    #[doc(hidden)] // For the Python package.
    pub fn wait_until_done<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        let is_done =
            |state: &mut StateGuard<'_>| state.table.is_settled(self.id).then_some(Ok(()));
        self.wait_until(&self.dispatcher()?, wait.into(), is_done)
    }

    fn wait_until<T>(
        &self,
        dispatcher: &Arc<Dispatcher>,
        mut wait: Wait<'_>,
        look: impl FnMut(&mut StateGuard<'_>) -> Option<Result<T>>,
    ) -> Result<T> {
        let mut noun = "result of job";
        if self.deadline_ns != 0 {
            let left = Duration::from_nanos(self.deadline_ns.saturating_sub(now_ns()));
            (wait, noun) = (wait.no_longer_than(left), "reply to request");
        }
        let late = |state: &State| match self.is_late() {
            true => job_error(&self.name, self.id, JobEnd::Expired),
            false => wait.timed_out(|| {
                let (id, name) = (self.id, &self.name);
                format!("the {noun} {id} of {name:?} ({})", state.outlook())
            }),
        };
        dispatcher.wait_until(&wait, look, late)
    }

    /// Whether [`wait`](Self::wait) would return at once: the outcome is there, or was taken, or
    /// the deadline of a request has passed. Does not take it.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn is_done(&self) -> Result<bool> {
        let is_settled = |state: &mut State| state.table.is_settled(self.id);
        Ok(self.dispatcher()?.ask(is_settled)? || self.is_late())
    }

    /// Cancels the job: it is delivered no more, and the answer of a worker that has it is
    /// discarded. False if its outcome was taken before.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn cancel(&self) -> Result<bool> {
        // The job is dropped here, without the lock.
        let cancel = |state: &mut State| state.table.cancel(self.id);
        Ok(self.dispatcher()?.ask(cancel)?.is_some())
    }

    fn is_late(&self) -> bool {
        self.deadline_ns != 0 && self.deadline_ns <= now_ns()
    }

    fn dispatcher(&self) -> Result<Arc<Dispatcher>> {
        let closed = || Error::State(StateFault::QueueClosed(self.name.clone()));
        self.dispatcher.upgrade().ok_or_else(closed)
    }

    fn try_take(&self, jobs: &mut Jobs) -> Option<Result<(u64, Outcome<WorkerResult>)>> {
        match jobs.take_outcome(self.id) {
            Ok(outcome) => outcome.map(Ok),
            Err(()) => Some(Err(job_error(&self.name, self.id, JobEnd::Taken))),
        }
    }
}

fn job_error(name: &str, job: u64, end: JobEnd) -> Error {
    Error::Job {
        name: name.to_string(),
        job,
        end,
    }
}

/// Converts an outcome for the caller that asked for it.
pub(super) fn into_result(
    dispatcher: &Arc<Dispatcher>,
    job: u64,
    outcome: Outcome<WorkerResult>,
    stream: &Stream,
) -> Result<JobResult> {
    let fail = |end| Err(job_error(&dispatcher.name, job, end));
    match outcome {
        Outcome::Done(result) => Ok(JobResult {
            sample: result.arrival.into_sample(stream),
            job: result.tag.job,
            attempt: result.tag.attempt,
            worker_pid: result.pid,
        }),
        Outcome::DeadLettered { reasons } => fail(JobEnd::DeadLettered { reasons }),
        Outcome::Rejected { reason } => fail(JobEnd::Rejected { reason }),
        Outcome::Expired => fail(JobEnd::Expired),
    }
}
