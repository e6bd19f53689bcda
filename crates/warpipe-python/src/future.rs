//! The outcome of a job or a request, as a `concurrent.futures.Future` has one: the base of
//! `JobHandle` and `Pending`.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use pyo3::exceptions::PyBaseException;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::sync::OnceLockExt;
use pyo3::types::PyDict;
use warpipe::{Error, JobEnd, StateFault, Wait};

use crate::detached::detached;
use crate::errors::{Fault, Outcome};
use crate::job::{self, Watch};
use crate::job_endpoint::{JobEndpoint, Submitted};
use crate::stream::imported;
use crate::wait::{Limit, SLICE, late, waiting};

/// An outcome that Python has not been given yet.
#[derive(Debug)]
enum Settled {
    Result(warpipe::JobResult),
    Failed(Fault),
    Cancelled,
}

/// The outcome as Python has it.
#[derive(Debug)]
enum Given {
    Result(Py<job::Result>),
    Failed(Py<PyBaseException>),
    Cancelled,
}

#[derive(Debug, Default)]
struct State {
    /// The outcome is known: it is in `settled`, or given.
    is_settled: bool,
    is_cancelled: bool,
    settled: Option<Settled>,
    /// Threads in the library that may take the outcome there, or cancel it.
    working: u32,
}

impl State {
    /// Gives back an outcome that comes too late.
    fn settle(&mut self, outcome: Settled) -> Option<Settled> {
        if self.is_settled {
            return Some(outcome);
        }
        self.is_settled = true;
        self.is_cancelled = matches!(outcome, Settled::Cancelled);
        self.settled.replace(outcome)
    }
}

/// A thread that works in the library, whatever comes of that.
struct Working<'a>(&'a Future);

impl<'a> Working<'a> {
    fn begin(future: &'a Future) -> Working<'a> {
        future.state().working += 1;
        Working(future)
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.state().working -= 1;
        self.0.changed.notify_all();
    }
}

/// While a thread that [works](Working) runs the handlers of signals: it takes nothing then, and a
/// handler may wait for what that thread waits for.
struct Paused<'a>(&'a Future);

impl<'a> Paused<'a> {
    fn begin(future: &'a Future) -> Paused<'a> {
        future.state().working -= 1;
        future.changed.notify_all();
        Paused(future)
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.state().working += 1;
    }
}

/// Whether an outcome is for good. Others are the queue's state, and are asked for anew.
fn is_final(fault: &Fault) -> bool {
    matches!(fault, Fault::Library(Error::Job { end, .. }) if *end != JobEnd::Taken)
}

/// Whether no other outcome can come.
fn is_over(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::Library(Error::Job { .. } | Error::State(StateFault::QueueClosed(_)))
    )
}

/// The outcome of a job or a request, with the methods of a ``concurrent.futures.Future``: the base
/// of ``JobHandle`` and ``Pending``.
#[pyclass(frozen, subclass, module = "warpipe", name = "_Future", weakref)]
#[derive(Debug)]
pub struct Future {
    endpoint: Arc<JobEndpoint>,
    source: Submitted,
    state: Mutex<State>,
    changed: Condvar,
    given: OnceLock<Given>,
    waits: OnceLock<Py<PyDict>>,
}

impl Future {
    fn of(endpoint: &Arc<JobEndpoint>, source: Submitted) -> Future {
        Future {
            endpoint: endpoint.clone(),
            source,
            state: Mutex::default(),
            changed: Condvar::new(),
            given: OnceLock::new(),
            waits: OnceLock::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this object has the outcome; `None` if another thread may be about to say so. An
    /// error inside is the outcome for now, and not kept. Call without the interpreter.
    fn look(&self, wait: Wait<'_>) -> Outcome<Option<Outcome<()>>> {
        self.endpoint.check()?;
        let working = Working::begin(self);
        if self.state().is_settled {
            return Ok(Some(Ok(())));
        }
        let outcome = match self
            .source
            .wait(&self.endpoint.context.stream, wait)
            .map_err(Fault::from)
        {
            Ok(result) => Settled::Result(result),
            Err(fault) if is_final(&fault) => Settled::Failed(fault),
            Err(fault) if is_over(&fault) => {
                drop(working);
                let is_here = self.is_here();
                return Ok(is_here.map(|is_here| if is_here { Ok(()) } else { Err(fault) }));
            }
            Err(fault) => return Err(fault),
        };
        let unused = self.state().settle(outcome);
        drop(unused);
        Ok(Some(Ok(())))
    }

    /// Whether this object has the outcome of a job that the queue has no more; `None` if threads that
    /// may be about to say so do not within a slice.
    fn is_here(&self) -> Option<bool> {
        let busy = |state: &mut State| state.working > 0 && !state.is_settled;
        let waited = self.changed.wait_timeout_while(self.state(), SLICE, busy);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if busy(&mut state) {
            return None;
        }
        if !state.is_settled {
            drop(state);
            if !self.endpoint.has_cancelled(self.source.id(), SLICE)? {
                return Some(false);
            }
            let unused = self.state().settle(Settled::Cancelled);
            drop(unused);
        }
        Some(true)
    }

    /// Waits for the outcome. An interrupted wait has taken nothing. An error inside is the outcome
    /// for now.
    fn wait(&self, py: Python<'_>, timeout: Limit) -> PyResult<Outcome<&Given>> {
        let (start, mut left) = (Instant::now(), timeout.0);
        loop {
            let noun = match self.source {
                Submitted::Job(_) => "result of job",
                Submitted::Request(_) => "reply to request",
            };
            let (job, name) = (self.source.id(), &self.endpoint.name);
            let described = || format!("the {noun} {job} of {name:?}");
            let looked = waiting(
                py,
                left,
                || Ok(Paused::begin(self)),
                |wait| self.look(wait).map_err(|late| late.of(described)),
            )?;
            match looked {
                Some(outcome) => return Ok(outcome.map(|()| self.given(py))),
                None if left.is_some_and(|left| left.is_zero()) => {
                    return Err(late(described(), timeout.0).into());
                }
                None => py.check_signals()?,
            }
            left = timeout
                .0
                .map(|timeout| timeout.saturating_sub(start.elapsed()));
        }
    }

    /// The outcome that was settled.
    fn given(&self, py: Python<'_>) -> &Given {
        self.given.get_or_init_py_attached(py, || {
            let settled = self.state().settled.take();
            let failed = |error: PyErr| Given::Failed(error.into_value(py));
            match settled {
                Some(Settled::Result(result)) => {
                    job::Result::new(py, result, &self.endpoint.context.device)
                        .map_or_else(failed, Given::Result)
                }
                Some(Settled::Failed(fault)) => failed(fault.into()),
                Some(Settled::Cancelled) | None => Given::Cancelled,
            }
        })
    }

    /// Whether the outcome is there, or none can come. Call without the interpreter.
    fn is_done(&self) -> Outcome<bool> {
        self.endpoint.check()?;
        if self.state().is_settled {
            return Ok(true);
        }
        let is_over = match self.source.is_done().map_err(Fault::from) {
            Err(fault) if is_over(&fault) => true,
            found => found?,
        };
        // A thread that has taken it out of the queue is about to say what has become of it.
        Ok(is_over && self.is_here().is_some())
    }

    fn is_cancelled(&self) -> Outcome<bool> {
        Ok(self.is_done()? && self.state().is_cancelled)
    }

    /// Cancels it, if it has no outcome yet; says whether this call did it; `None` if it is
    /// not cancelled. Call without the interpreter.
    fn call_off(&self) -> Outcome<Option<bool>> {
        if self.is_cancelled()? {
            return Ok(Some(false));
        }
        let working = Working::begin(self);
        let off = match self.source.is_done() {
            Ok(false) => self.source.cancel(),
            done => done.map(|_| false),
        };
        match off.map_err(Fault::from) {
            Ok(true) => {
                let mut state = self.state();
                let unused = state.settle(Settled::Cancelled);
                let is_cancelled = state.is_cancelled;
                drop((state, unused));
                Ok(is_cancelled.then_some(true))
            }
            Err(fault) if !is_over(&fault) => Err(fault),
            // Another thread's cancellation is this one's, too.
            _ => {
                drop(working);
                self.is_here();
                Ok(self.state().is_cancelled.then_some(false))
            }
        }
    }
}

impl Drop for Future {
    fn drop(&mut self) {
        if self.endpoint.check().is_err() {
            return;
        }
        let unused = self.state().settled.take();
        detached(|| drop(unused));
    }
}

#[pymethods]
impl Future {
    /// So that `isinstance` says that it is a ``concurrent.futures.Future``, whose methods it has: its
    /// type is its own.
    #[getter(__class__)]
    fn class<'py>(slf: &Bound<'py, Future>) -> PyResult<Bound<'py, PyAny>> {
        match imported(slf.py(), "concurrent.futures._base")? {
            Some(futures) => futures.getattr("Future"),
            None => Ok(slf.get_type().into_any()),
        }
    }

    /// The number of the job, or the request, from 1.
    #[getter]
    fn job(&self) -> u64 {
        self.source.id()
    }

    /// Waits for the outcome: the result, the exception, or None if it is cancelled.
    fn _outcome(&self, py: Python<'_>, timeout: Limit) -> PyResult<Py<PyAny>> {
        Ok(match self.wait(py, timeout)? {
            Ok(Given::Result(result)) => result.clone_ref(py).into_any(),
            Ok(Given::Failed(error)) => error.clone_ref(py).into_any(),
            Ok(Given::Cancelled) => py.None(),
            Err(fault) => PyErr::from(fault).into_value(py).into_any(),
        })
    }

    /// Whether ``result()`` would return, or raise, at once.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| self.is_done())?)
    }

    /// Whether it was cancelled.
    fn cancelled(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| self.is_cancelled())?)
    }

    /// False: until it is done it can be cancelled, also while a worker, or a server, has it.
    fn running(&self) -> PyResult<bool> {
        self.endpoint.check()?;
        Ok(false)
    }

    /// Cancels it: whether this call did it; None if it is not cancelled.
    fn _call_off(&self, py: Python<'_>) -> PyResult<Option<bool>> {
        Ok(py.detach(|| self.call_off())?)
    }

    /// The waits of tasks that were made of it.
    #[getter]
    fn _waits(&self, py: Python<'_>) -> Py<PyDict> {
        let waits = self.waits.get_or_init(|| PyDict::new(py).unbind());
        waits.clone_ref(py)
    }

    /// The descriptor that an event loop polls, and the number of its queue.
    fn _watch(&self, py: Python<'_>) -> PyResult<Watch> {
        Watch::of(py, &self.endpoint)
    }

    #[getter]
    fn _name(&self) -> &str {
        &self.endpoint.name
    }

    #[getter]
    fn _queue(&self) -> u64 {
        self.endpoint.number
    }

    /// An exception references frames, and they the future; so does a coroutine that waits.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.given.get() {
            Some(Given::Result(result)) => visit.call(result)?,
            Some(Given::Failed(error)) => visit.call(error)?,
            Some(Given::Cancelled) | None => {}
        }
        visit.call(self.waits.get())
    }

    fn __clear__(&self) {
        if let Some(waits) = self.waits.get() {
            Python::attach(|py| waits.bind(py).clear());
        }
    }
}

/// A submitted job, with the methods of a ``concurrent.futures.Future``; ``await handle`` in asyncio.
///
/// The first call that asks takes the outcome, and keeps it as long as the handle lives. If the
/// handle is dropped before, ``Queue.results()`` gives the outcome.
#[pyclass(frozen, extends = Future, module = "warpipe")]
#[derive(Debug)]
pub struct JobHandle;

/// A request, with the methods of a ``concurrent.futures.Future``; ``await pending`` in asyncio.
/// Dropping or cancelling it cancels the request. It keeps the reply as long as it lives.
#[pyclass(frozen, extends = Future, module = "warpipe")]
#[derive(Debug)]
pub struct Pending;

/// The future of a job, a ``JobHandle``, or of a request, a ``Pending``.
pub fn of(
    py: Python<'_>,
    endpoint: &Arc<JobEndpoint>,
    submitted: Submitted,
) -> PyResult<Py<PyAny>> {
    let is_job = matches!(submitted, Submitted::Job(_));
    let future = PyClassInitializer::from(Future::of(endpoint, submitted));
    Ok(if is_job {
        Py::new(py, future.add_subclass(JobHandle))?.into_any()
    } else {
        Py::new(py, future.add_subclass(Pending))?.into_any()
    })
}

#[pymethods]
impl Pending {
    /// The deadline of the reply, in nanoseconds of ``time.monotonic_ns()``.
    #[getter]
    fn deadline_ns(slf: &Bound<'_, Self>) -> PyResult<u64> {
        let future = slf.as_super().get();
        future.endpoint.check()?;
        match &future.source {
            Submitted::Request(pending) => Ok(pending.deadline_ns),
            Submitted::Job(_) => unreachable!("a request has a deadline"),
        }
    }
}
