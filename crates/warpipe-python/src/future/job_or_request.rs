//! The two things that have an outcome.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use warpipe::Error;

use crate::detached::DropDetached;
use crate::errors::{Fault, Outcome};
use crate::job_endpoint::JobEndpoint;
use crate::wait::none_if_late;

/// The job or the request behind a future. Its methods are called without the interpreter.
#[derive(Debug)]
pub enum Source {
    Job(DropDetached<warpipe::JobHandle>),
    Request {
        job: u64,
        deadline_ns: u64,
        /// `None` once the request is cancelled.
        pending: Mutex<Option<Arc<DropDetached<warpipe::Pending>>>>,
    },
}

impl Source {
    /// A job's handle.
    pub fn of_job(handle: warpipe::JobHandle) -> Source {
        Source::Job(DropDetached::new(handle))
    }

    /// A request.
    pub fn of_request(pending: warpipe::Pending) -> Source {
        Source::Request {
            job: pending.id(),
            deadline_ns: pending.deadline_ns(),
            pending: Mutex::new(Some(Arc::new(DropDetached::new(pending)))),
        }
    }

    /// Its number, from 1.
    pub fn job(&self) -> u64 {
        match self {
            Source::Job(handle) => handle.id(),
            Source::Request { job, .. } => *job,
        }
    }

    /// For errors.
    pub fn described(&self, endpoint: &JobEndpoint) -> String {
        let (job, name) = (self.job(), &endpoint.name);
        match self {
            Source::Job(_) => format!("the result of job {job} of {name:?}"),
            Source::Request { .. } => format!("the reply to request {job} of {name:?}"),
        }
    }

    /// Takes the outcome if it comes within `slice`.
    pub fn look(
        &self,
        endpoint: &JobEndpoint,
        slice: Duration,
    ) -> Outcome<Option<warpipe::JobResult>> {
        match self {
            Source::Job(handle) => none_if_late(handle.wait(&endpoint.stream, slice)),
            Source::Request { pending, .. } => {
                let pending = self.request(endpoint, pending)?;
                none_if_late(pending.wait(&endpoint.stream, slice))
            }
        }
    }

    /// Whether the outcome is there, or was taken.
    pub fn is_done(&self, endpoint: &JobEndpoint) -> Outcome<bool> {
        match self {
            Source::Job(handle) => Ok(handle.is_done()?),
            Source::Request { pending, .. } => Ok(self.request(endpoint, pending)?.is_done()?),
        }
    }

    /// Cancels it; false if its outcome was taken before.
    pub fn cancel(&self) -> Outcome<bool> {
        match self {
            Source::Job(handle) => Ok(handle.cancel()?),
            Source::Request { pending, .. } => {
                let taken = pending
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                Ok(taken.is_some())
            }
        }
    }

    fn request(
        &self,
        endpoint: &JobEndpoint,
        pending: &Mutex<Option<Arc<DropDetached<warpipe::Pending>>>>,
    ) -> Outcome<Arc<DropDetached<warpipe::Pending>>> {
        let here = pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        here.ok_or_else(|| {
            Fault::from(Error::NoSuchJob {
                name: endpoint.name.clone(),
                job: self.job(),
            })
        })
    }
}
