//! The result of a job.

use std::ops::Deref;

use super::wire::user_of_answer;
use crate::pubsub::Sample;

/// A job's result: a tensor in its worker's memory, complete, and lent until it is dropped. It
/// outlives the worker.
///
/// Its address, its layout (no bytes if the worker completed without an output) and its stream are
/// those of the [`Sample`] that it dereferences to.
#[derive(Debug)]
#[must_use = "a result that is dropped is released"]
pub struct JobResult {
    /// The result as a sample, which can be released behind other streams. The first bytes of its
    /// [`metadata`](Sample::metadata) belong to the queue: call [`metadata`](Self::metadata)
    /// instead.
    pub sample: Sample,
    /// The job's number, from 1.
    pub job: u64,
    /// The number of the attempt that gave this result, from 1.
    pub attempt: u32,
    /// The process id of the worker.
    pub worker_pid: i32,
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
}
