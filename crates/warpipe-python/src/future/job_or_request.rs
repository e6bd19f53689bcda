//! The two things that have an outcome.

use warpipe::Wait;

use crate::detached::DropDetached;
use crate::errors::Outcome;
use crate::job_endpoint::JobEndpoint;

/// The job or the request behind a future. Its methods are called without the interpreter.
#[derive(Debug)]
pub enum Source {
    Job(DropDetached<warpipe::JobHandle>),
    Request(DropDetached<warpipe::Pending>),
}

impl Source {
    /// Its number, from 1.
    pub fn job(&self) -> u64 {
        match self {
            Source::Job(handle) => handle.id(),
            Source::Request(pending) => pending.id(),
        }
    }

    /// For errors.
    pub fn described(&self, endpoint: &JobEndpoint) -> String {
        let (job, name) = (self.job(), &endpoint.name);
        match self {
            Source::Job(_) => format!("the result of job {job} of {name:?}"),
            Source::Request(_) => format!("the reply to request {job} of {name:?}"),
        }
    }

    /// Takes the outcome.
    pub fn take(&self, endpoint: &JobEndpoint, wait: Wait<'_>) -> Outcome<warpipe::JobResult> {
        Ok(match self {
            Source::Job(handle) => handle.wait(&endpoint.stream, wait),
            Source::Request(pending) => pending.wait(&endpoint.stream, wait),
        }?)
    }

    /// Whether the outcome is there, or was taken.
    pub fn is_done(&self) -> Outcome<bool> {
        Ok(match self {
            Source::Job(handle) => handle.is_done(),
            Source::Request(pending) => pending.is_done(),
        }?)
    }

    /// Cancels it; false if its outcome was taken before.
    pub fn cancel(&self) -> Outcome<bool> {
        Ok(match self {
            Source::Job(handle) => handle.cancel(),
            Source::Request(pending) => pending.cancel(),
        }?)
    }
}
