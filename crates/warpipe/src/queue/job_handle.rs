//! A submitter's handle of a job while it is pending.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::dispatcher::{Dispatcher, State};
use super::job_result::JobResult;
use super::job_table::Outcome;
use super::worker_session::{Completed, Jobs};
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::wait::Wait;

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

    /// Takes the result, and waits for it if the job is not done. Its data is complete then; work on
    /// `stream` may read it at once.
    ///
    /// # Errors
    /// [`Error::Timeout`], after which it can be waited for again; [`Error::DeadLettered`];
    /// [`Error::Rejected`]; [`Error::NoSuchJob`] when the outcome was taken before;
    /// [`Error::Argument`] for a stream of another device, and the outcome stays;
    /// [`Error::QueueClosed`]; [`Error::Forked`].
    pub fn wait<'w>(&self, stream: &Stream, wait: impl Into<Wait<'w>>) -> Result<JobResult> {
        let dispatcher = self
            .dispatcher
            .upgrade()
            .ok_or_else(|| Error::QueueClosed {
                name: self.name.clone(),
            })?;
        stream.check_of(dispatcher.publisher.device())?;
        let wait = wait.into();
        let late = |state: &State| {
            let (id, name) = (self.id, &self.name);
            wait.timed_out(|| format!("the result of job {id} of {name:?} ({})", state.outlook()))
        };
        let (id, outcome) =
            dispatcher.wait_until(&wait, |state| self.try_take(&mut state.table), late)?;
        into_result(&dispatcher, id, outcome, stream)
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
        Outcome::Done(Completed {
            arrival,
            attempt,
            pid,
        }) => Ok(JobResult {
            sample: arrival.into_sample(stream, None),
            job,
            attempt,
            worker_pid: pid,
        }),
        Outcome::DeadLettered { reasons } => Err(Error::DeadLettered { name, job, reasons }),
        Outcome::Rejected { reason } => Err(Error::Rejected { name, job, reason }),
        Outcome::Expired => Err(Error::DeadlinePassed { name, job }),
    }
}
