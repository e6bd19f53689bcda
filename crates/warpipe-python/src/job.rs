//! Jobs on the submitter's side: `JobHandle`, `JobResult`, and the results of a queue.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyBaseException, PyStopIteration, PyTimeoutError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use warpipe::Error;

use crate::detached::DropDetached;
use crate::errors::Outcome;
use crate::frame::Frame;
use crate::future::{Future, Source};
use crate::job_endpoint::JobEndpoint;
use crate::wait::{in_slices, late, none_if_late, optional};

/// A submitted job, with the methods of a ``concurrent.futures.Future``; ``await handle`` in asyncio.
///
/// The first call that asks takes the outcome, and keeps it as long as the handle lives. If the
/// handle is dropped before, ``Queue.results()`` gives the outcome.
#[pyclass(frozen, module = "warpipe", weakref)]
#[derive(Debug)]
pub struct JobHandle {
    endpoint: Arc<JobEndpoint>,
    inner: DropDetached<warpipe::JobHandle>,
    future: Future,
    waits: Waits,
}

/// The coroutines in which tasks wait for one outcome. They let a handle be a task, too: it is a
/// coroutine to ``asyncio.create_task``.
#[derive(Debug, Default)]
pub struct Waits(Mutex<Option<Py<PyDict>>>);

impl Waits {
    fn table<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table
            .get_or_insert_with(|| PyDict::new(py).unbind())
            .bind(py)
            .clone()
    }

    /// Forwards one step of the running task: `how` is ``"send"``, ``"throw"`` or ``"close"``.
    pub fn step<'py>(
        &self,
        awaited: &Bound<'py, PyAny>,
        how: &str,
        arguments: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = awaited.py();
        py.import("warpipe._queue")?
            .call_method1("step", (self.table(py), awaited, how, arguments))
    }

    /// For the garbage collector: a coroutine references the handle that it waits for.
    pub fn traverse(&self, visit: &PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        self.0
            .try_lock()
            .map_or(Ok(()), |table| visit.call(&*table))
    }

    pub fn clear(&self) {
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(table);
    }
}

impl JobHandle {
    /// Wraps a job of this queue.
    pub fn new(endpoint: &Arc<JobEndpoint>, inner: warpipe::JobHandle) -> JobHandle {
        JobHandle {
            endpoint: endpoint.clone(),
            inner: DropDetached::new(inner),
            future: Future::default(),
            waits: Waits::default(),
        }
    }

    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = optional(timeout, "timeout")?;
        if self.future.wait(py, &self.endpoint, self, timeout)? {
            return Ok(());
        }
        let what = format!(
            "the result of job {} of {:?}",
            self.inner.id(),
            self.endpoint.name
        );
        Err(late(what, timeout).into())
    }
}

impl Source for JobHandle {
    fn job(&self) -> u64 {
        self.inner.id()
    }

    fn look(&self, slice: Duration) -> Outcome<Option<warpipe::JobResult>> {
        none_if_late(self.inner.wait(&self.endpoint.stream, slice))
    }

    fn is_done(&self) -> Outcome<bool> {
        Ok(self.inner.is_done()?)
    }

    fn call_off(&self) -> Outcome<()> {
        self.inner.call_off()?;
        Ok(())
    }
}

impl Drop for JobHandle {
    fn drop(&mut self) {
        self.future.abandon(&self.endpoint);
    }
}

#[pymethods]
impl JobHandle {
    /// The job's number, from 1.
    #[getter]
    fn job(&self) -> u64 {
        self.inner.id()
    }

    /// Waits for the result, at most ``timeout`` seconds (None: no limit). Its data is complete.
    /// Each call gives the same object.
    ///
    /// Raises ``TimeoutError``, after which it may be called again; ``DeadLetteredError`` when all
    /// attempts failed, ``RejectedError``; ``concurrent.futures.CancelledError``;
    /// ``NoSuchJobError`` when ``Queue.results`` gave the outcome, ``QueueClosedError``.
    #[pyo3(signature = (timeout = None))]
    fn result(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<Result>> {
        self.wait(py, timeout)?;
        self.future.result(py, &self.endpoint)
    }

    /// Waits as ``result``, and gives the exception that it raises; None if there is a result.
    ///
    /// Raises ``TimeoutError``, ``concurrent.futures.CancelledError``.
    #[pyo3(signature = (timeout = None))]
    fn exception(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Py<PyBaseException>>> {
        match self.wait(py, timeout) {
            Ok(()) => self.future.exception(py, &self.endpoint),
            // Of a queue that is closed, or an outcome that ``Queue.results`` gave.
            Err(error) if self.done(py)? && !error.is_instance_of::<PyTimeoutError>(py) => {
                Ok(Some(error.into_value(py)))
            }
            Err(error) => Err(error),
        }
    }

    /// Whether ``result()`` would return, or raise, at once.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.future.is_done(py, &self.endpoint, self)
    }

    /// Whether it was cancelled.
    fn cancelled(&self) -> PyResult<bool> {
        self.future.is_cancelled(&self.endpoint, self)
    }

    /// Calls ``fn(self)`` once it is done, in the order in which callbacks were added: on the
    /// package's thread ``warpipe-callbacks``, or on the thread that cancels it, or, if it is done
    /// already, at once on this thread. An exception of a callback is logged (logger ``warpipe``)
    /// and stops no other. The object is kept until then.
    #[pyo3(signature = (r#fn, /), text_signature = "($self, fn, /)")]
    fn add_done_callback(slf: &Bound<'_, Self>, r#fn: &Bound<'_, PyAny>) -> PyResult<()> {
        slf.get().endpoint.check()?;
        let module = slf.py().import("warpipe._futures")?;
        module.call_method1("add", (slf, r#fn)).map(drop)
    }

    /// Cancels it: no worker gets it any more, and the answer of one that has it is discarded.
    /// Returns whether it is cancelled: False if it was done before.
    fn cancel(slf: &Bound<'_, Self>) -> PyResult<bool> {
        let (py, this) = (slf.py(), slf.get());
        let (is_cancelled, by_this) = this.future.cancel(py, &this.endpoint, this)?;
        if by_this {
            py.import("warpipe._futures")?.call_method1("run", (slf,))?;
        }
        Ok(is_cancelled)
    }

    /// The result if it has come, else None.
    fn _poll(&self, py: Python<'_>) -> PyResult<Option<Py<Result>>> {
        let come = self
            .future
            .wait(py, &self.endpoint, self, Some(Duration::ZERO))?;
        come.then(|| self.future.result(py, &self.endpoint))
            .transpose()
    }

    /// The descriptor that an event loop polls, and the number of its queue.
    fn _watch(&self, py: Python<'_>) -> PyResult<Watch> {
        Watch::of(py, &self.endpoint)
    }

    #[getter]
    fn _queue(&self) -> u64 {
        self.endpoint.number
    }

    fn __await__<'py>(slf: &Bound<'py, JobHandle>) -> PyResult<Bound<'py, PyAny>> {
        outcome_of(slf.as_any())
    }

    /// One step of the asyncio task that wraps this handle: see ``asyncio.create_task``.
    #[pyo3(signature = (value, /))]
    fn send<'py>(slf: &Bound<'py, Self>, value: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        slf.get()
            .waits
            .step(slf.as_any(), "send", &PyTuple::new(slf.py(), [value])?)
    }

    /// Ends a step of that task with an error, as a cancellation does.
    #[pyo3(signature = (*error), text_signature = "($self, *error)")]
    fn throw<'py>(
        slf: &Bound<'py, Self>,
        error: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.get().waits.step(slf.as_any(), "throw", error)
    }

    /// Ends the wait of that task; the job itself goes on.
    fn close<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get()
            .waits
            .step(slf.as_any(), "close", &PyTuple::empty(slf.py()))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        self.future.traverse(&visit)?;
        self.waits.traverse(&visit)
    }

    fn __clear__(&self) {
        self.waits.clear();
    }

    fn __repr__(&self) -> String {
        format!(
            "JobHandle({:?}, job={})",
            self.endpoint.name,
            self.inner.id()
        )
    }
}

/// Waits in the running event loop, as `await` asks.
pub fn outcome_of<'py>(awaited: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let module = awaited.py().import("warpipe._queue")?;
    module
        .call_method1("outcome_of", (awaited,))?
        .call_method0("__await__")
}

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
        let inner = py.detach(|| endpoint.watch())?;
        Ok(Watch {
            endpoint: endpoint.clone(),
            inner: DropDetached::new(inner),
        })
    }
}

#[pymethods]
impl Watch {
    fn fileno(&self) -> PyResult<i32> {
        self.endpoint.check()?;
        Ok(self.inner.as_fd().as_raw_fd())
    }

    fn quiet(&self, py: Python<'_>) -> PyResult<()> {
        self.endpoint.check()?;
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
    job: u64,
    attempt: u32,
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
            job: result.job(),
            attempt: result.attempt(),
            worker_pid: result.worker_pid(),
        };
        let metadata = result.metadata().to_vec();
        let frame = Frame::with_metadata(result.into_sample(), metadata, device, None);
        Py::new(py, frame.whole().add_subclass(ours))
    }
}

#[pymethods]
impl Result {
    /// The job's number, from 1.
    #[getter]
    fn job(&self) -> u64 {
        self.job
    }

    /// Which attempt it was, from 1.
    #[getter]
    fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The process id of its worker.
    #[getter]
    fn worker_pid(&self) -> i32 {
        self.worker_pid
    }

    fn __repr__(slf: &Bound<'_, Result>) -> String {
        let Result {
            job,
            attempt,
            worker_pid,
        } = slf.get();
        let frame = slf.as_super().get().described();
        format!("JobResult({frame}, job={job}, attempt={attempt}, worker_pid={worker_pid})")
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
    Result(warpipe::JobResult),
    QueueOrClient,
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

    fn look(&self, slice: Duration) -> Outcome<Option<Found>> {
        // Asked first: a job submitted before the shutdown is seen below.
        let may_end = !self.follow || self.endpoint.is_shut();
        let end = self.endpoint.end()?;
        let queue = end.queue();
        match queue.next_result(
            &self.endpoint.stream,
            if may_end { Duration::ZERO } else { slice },
        ) {
            Ok(result) => return Ok(Some(Found::Result(result))),
            Err(Error::Timeout { .. }) if !may_end => return Ok(None),
            Err(Error::Timeout { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        if self.endpoint.is_empty()? {
            return Ok(Some(Found::QueueOrClient));
        }
        Ok(none_if_late(queue.next_result(&self.endpoint.stream, slice))?.map(Found::Result))
    }
}

#[pymethods]
impl Results {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The next result.
    fn __next__(&self, py: Python<'_>) -> PyResult<Py<Result>> {
        match in_slices(py, self.timeout, |slice| self.look(slice))? {
            Some(Found::Result(result)) => self.endpoint.give(py, result),
            Some(Found::QueueOrClient) => Err(PyStopIteration::new_err(())),
            None => Err(late(
                format!("a result of {:?}", self.endpoint.name),
                self.timeout,
            )
            .into()),
        }
    }

    fn __aiter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The next result, in the running event loop.
    fn __anext__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py()
            .import("warpipe._queue")?
            .call_method1("next_result", (slf,))
    }

    /// The result if it has come, None if it has not, and False at the end.
    fn _poll(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match py.detach(|| self.look(Duration::ZERO))? {
            Some(Found::Result(result)) => Ok(self.endpoint.give(py, result)?.into_any()),
            Some(Found::QueueOrClient) => {
                Ok(false.into_pyobject(py)?.to_owned().into_any().unbind())
            }
            None => Ok(py.None()),
        }
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
