//! The results of jobs: `JobResult`, and the results of a queue.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use warpipe::OptionalExtension;

use crate::detached::DropDetached;
use crate::errors::Outcome;
use crate::exclusive::locked;
use crate::frame::Frame;
use crate::jobs::JobEndpoint;
use crate::wait::{hand_over, in_slices, late, none_if_late};

/// The descriptor of a queue for event loops.
#[pyclass(frozen, module = "warpipe", name = "_Watch")]
#[derive(Debug)]
pub struct Watch {
    endpoint: Arc<JobEndpoint>,
    inner: DropDetached<warpipe::QueueWatch>,
}

impl Watch {
    /// Of a queue, or a client.
    pub fn of(py: Python<'_>, endpoint: &Arc<JobEndpoint>) -> PyResult<Watch> {
        let inner = py.detach(|| Outcome::Ok(endpoint.handle.get()?.jobs().watch()?))?;
        Ok(Watch {
            endpoint: endpoint.clone(),
            inner: DropDetached::new(inner),
        })
    }
}

#[pymethods]
impl Watch {
    fn fileno(&self) -> PyResult<i32> {
        self.endpoint.handle.check()?;
        Ok(self.inner.as_fd().as_raw_fd())
    }

    fn quiet(&self, py: Python<'_>) -> PyResult<()> {
        self.endpoint.handle.check()?;
        py.detach(|| self.inner.quiet());
        Ok(())
    }
}

/// A job's result, or a service's reply: a tensor in its worker's memory, complete, and lent as any
/// ``Sample`` is. It outlives its worker. A job completed without an array has a result of no
/// bytes.
#[pyclass(frozen, extends = Frame, module = "warpipe", name = "JobResult")]
#[derive(Debug)]
pub struct Result {
    /// The job's number, from 1.
    #[pyo3(get)]
    job: u64,
    /// Which attempt it was, from 1.
    #[pyo3(get)]
    attempt: u32,
    /// The process id of its worker.
    #[pyo3(get)]
    worker_pid: i32,
}

impl Result {
    /// Wraps a result.
    pub fn new(
        py: Python<'_>,
        result: warpipe::JobResult,
        device: &warpipe::Device,
    ) -> PyResult<Py<Result>> {
        let ours = Result {
            job: result.job,
            attempt: result.attempt,
            worker_pid: result.worker_pid,
        };
        let metadata = result.metadata().to_vec();
        let frame = Frame::new(result.sample, Some(metadata), device, None);
        Py::new(py, frame.add_subclass(ours))
    }
}

/// The results of a queue one by one, see ``Queue.results``: for ``for``, or ``async for``.
///
/// A job that was dead-lettered or rejected raises in its place, and the iteration can go on.
#[pyclass(frozen, module = "warpipe")]
#[derive(Debug)]
pub struct Results {
    endpoint: Arc<JobEndpoint>,
    timeout: Option<Duration>,
    /// With `true` the end is the queue's shutdown, else the moment when no job is left.
    follow: bool,
}

/// The result of one look.
enum Found {
    Result(DropDetached<warpipe::JobResult>),
    End,
}

impl Results {
    /// Of a queue.
    pub fn new(endpoint: &Arc<JobEndpoint>, timeout: Option<Duration>, follow: bool) -> Results {
        Results {
            endpoint: endpoint.clone(),
            timeout,
            follow,
        }
    }

    /// An error of a wait that is late tells of the usual timeout.
    fn next_within(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<Py<Result>> {
        let mut cause = None;
        // That no job is left rings no one.
        let found = in_slices(py, timeout, |slice| {
            // Not zero: the error of a mere poll does not say the cause.
            none_if_late(self.look(slice.max(Duration::from_nanos(1))), &mut cause)
        })?;
        let what = || format!("a result of {:?}", self.endpoint.handle.name());
        match found.ok_or_else(|| late(cause.unwrap_or_else(what), self.timeout))? {
            Found::Result(result) => self.give(py, result),
            Found::End => Err(PyStopIteration::new_err(())),
        }
    }

    /// The result as Python has it. One that a signal's handler keeps from the caller is the next again.
    fn give(
        &self,
        py: Python<'_>,
        result: DropDetached<warpipe::JobResult>,
    ) -> PyResult<Py<Result>> {
        let result = hand_over(py, result, |unused| {
            // The handler may have closed the queue.
            if self.endpoint.handle.get().is_ok() {
                locked(&self.endpoint.unused).push(unused);
            }
        })?;
        Result::new(py, result.into_inner(), &self.endpoint.context.device)
    }

    fn look(&self, limit: Duration) -> Outcome<Found> {
        // Asked first: a job submitted before the shutdown is seen below.
        let may_end = !self.follow || self.endpoint.is_shut.load(Ordering::Acquire);
        let end = self.endpoint.handle.get()?;
        if let Some(unused) = locked(&self.endpoint.unused).pop() {
            return Ok(Found::Result(unused));
        }
        let (queue, stream) = (end.queue()?, &self.endpoint.context.stream);
        let found = |result| Found::Result(DropDetached::new(result));
        if may_end {
            if let Some(result) = queue.next_result(stream, Duration::ZERO).optional()? {
                return Ok(found(result));
            }
            let state = queue.state()?;
            if state.waiting + state.leased + state.finished == 0 {
                return Ok(Found::End);
            }
        }
        Ok(found(queue.next_result(stream, limit)?))
    }
}

#[pymethods]
impl Results {
    /// The next result.
    fn __next__(&self, py: Python<'_>) -> PyResult<Py<Result>> {
        self.next_within(py, self.timeout)
    }

    /// The result if it has come, None if it has not, and False at the end.
    fn _poll(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match py.detach(|| none_if_late(self.look(Duration::ZERO), &mut None))? {
            Some(Found::Result(result)) => Ok(self.give(py, result)?.into_any()),
            Some(Found::End) => Ok(false.into_pyobject(py)?.to_owned().into_any().unbind()),
            None => Ok(py.None()),
        }
    }

    /// The next result, without a wait; if there is none, the error of a wait that was late.
    fn _last(&self, py: Python<'_>) -> PyResult<Py<Result>> {
        self.next_within(py, Some(Duration::ZERO))
    }

    fn _watch(&self, py: Python<'_>) -> PyResult<Watch> {
        Watch::of(py, &self.endpoint)
    }

    #[getter]
    fn _queue(&self) -> u64 {
        self.endpoint.number
    }

    #[getter]
    fn _timeout(&self) -> Option<f64> {
        self.timeout.map(|timeout| timeout.as_secs_f64())
    }
}
