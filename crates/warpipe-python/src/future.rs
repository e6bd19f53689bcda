//! The outcome of a job or a request, as a `concurrent.futures.Future` has one: the base of
//! `JobHandle` and `Pending`.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyBaseException;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use warpipe::{Error, JobEnd, StateFault, Wait};

use crate::errors::{Fault, Outcome};
use crate::exclusive::{Exclusive, locked};
use crate::job::{self, Watch};
use crate::jobs::{JobEndpoint, Submitted};
use crate::stream::imported;
use crate::wait::{Limit, SLICE, in_slices, late, waiting};

/// An outcome.
#[derive(Debug)]
enum Given {
    Result(Py<job::Result>),
    Failed(Py<PyBaseException>),
    Cancelled,
}

impl Given {
    fn failed(py: Python<'_>, error: PyErr) -> Given {
        Given::Failed(error.into_value(py))
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
    /// One thread at a time takes the outcome out of the queue, or cancels.
    turn: Exclusive<()>,
    given: OnceLock<Given>,
    waits: OnceLock<Py<PyDict>>,
}

impl Future {
    fn of(endpoint: &Arc<JobEndpoint>, source: Submitted) -> Future {
        Future {
            endpoint: endpoint.clone(),
            source,
            turn: Exclusive::new(()),
            given: OnceLock::new(),
            waits: OnceLock::new(),
        }
    }

    /// Takes the outcome of a job that is done; `None` if other threads have the turn for so long. An
    /// error inside is the outcome for now, and not kept. Call without the interpreter.
    fn take(&self, limit: Duration) -> Outcome<Option<Outcome<()>>> {
        let take = |_: &mut ()| {
            if self.given.get().is_some() {
                return Ok(());
            }
            let context = &self.endpoint.context;
            let outcome = self.source.wait(&context.stream, Duration::ZERO);
            let given = match outcome.map_err(Fault::from) {
                Ok(result) => Python::attach(|py| {
                    job::Result::new(py, result, &context.device)
                        .map_or_else(|error| Given::failed(py, error), Given::Result)
                }),
                Err(fault) if is_final(&fault) => {
                    Python::attach(|py| Given::failed(py, fault.into()))
                }
                Err(fault) if is_over(&fault) && self.is_cancelled() => Given::Cancelled,
                Err(fault) => return Err(fault),
            };
            let _ = self.given.set(given);
            Ok(())
        };
        match self.turn.with(limit, take) {
            Some(Err(fault)) if !is_over(&fault) => Err(fault),
            taken => Ok(taken),
        }
    }

    /// Waits for the outcome. An interrupted wait has taken nothing. An error inside is the outcome
    /// for now.
    fn wait(&self, py: Python<'_>, timeout: Limit) -> PyResult<Outcome<&Given>> {
        self.endpoint.handle.check()?;
        if self.given.get().is_none() {
            let start = Instant::now();
            let noun = match self.source {
                Submitted::Job(_) => "result of job",
                Submitted::Request(_) => "reply to request",
            };
            let (job, name) = (self.source.id(), self.endpoint.handle.name());
            let described = || format!("the {noun} {job} of {name:?}");
            let done = |wait: Wait<'_>| match self.source.wait_until_done(wait).map_err(Fault::from)
            {
                Err(fault) if !is_over(&fault) => Err(fault.of(described)),
                _ => Ok(()),
            };
            waiting(py, timeout.0, || Ok(()), done)?;
            // It is done, and another thread that takes it now is soon over: no limit is too short.
            let left = timeout.0;
            let left = left.map(|timeout| timeout.saturating_sub(start.elapsed()).max(SLICE));
            match in_slices(py, left, |slice| self.take(slice))? {
                Some(Ok(())) => {}
                Some(Err(fault)) => return Ok(Err(fault)),
                None => return Err(late(described(), timeout.0).into()),
            }
        }
        Ok(Ok(self.given.get().expect("it was taken")))
    }

    /// Whether the outcome is there, or none can come. Call without the interpreter.
    fn is_done(&self) -> Outcome<bool> {
        self.endpoint.handle.check()?;
        match self.source.is_done().map_err(Fault::from) {
            Err(fault) if is_over(&fault) => Ok(true),
            found => found,
        }
    }

    /// Whether it was cancelled, here or by a shutdown.
    fn is_cancelled(&self) -> bool {
        match self.given.get() {
            Some(given) => matches!(given, Given::Cancelled),
            None => locked(&self.endpoint.cancelled).contains(&self.source.id()),
        }
    }

    /// Cancels it, if it has no outcome yet; says whether this call did it; `None` if it is not
    /// cancelled. An outer `None` if other threads have the turn for so long. Call without the
    /// interpreter.
    fn call_off(&self, limit: Duration) -> Outcome<Option<Option<bool>>> {
        self.endpoint.handle.check()?;
        let call_off = |_: &mut ()| {
            if self.is_cancelled() {
                return Ok(Some(false));
            }
            let off = match self.source.is_done() {
                Ok(false) => self.source.cancel(),
                done => done.map(|_| false),
            };
            match off.map_err(Fault::from) {
                Ok(true) => {
                    let _ = self.given.set(Given::Cancelled);
                    Ok(Some(true))
                }
                Err(fault) if !is_over(&fault) => Err(fault),
                _ => Ok(self.is_cancelled().then_some(false)),
            }
        };
        self.turn.with(limit, call_off).transpose()
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
        let look = |slice| {
            if !self.is_done()? {
                return Ok(Some(false));
            }
            // Not before a thread that cancels has said so.
            Ok(self.turn.with(slice, |()| self.is_cancelled()))
        };
        Ok(in_slices(py, None, look)?.unwrap_or(false))
    }

    /// False: until it is done it can be cancelled, also while a worker, or a server, has it.
    fn running(&self) -> PyResult<bool> {
        self.endpoint.handle.check()?;
        Ok(false)
    }

    /// Cancels it: whether this call did it; None if it is not cancelled.
    fn _call_off(&self, py: Python<'_>) -> PyResult<Option<bool>> {
        let off = in_slices(py, None, |slice| self.call_off(slice))?;
        Ok(off.flatten())
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
        self.endpoint.handle.name()
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
pub struct Pending {
    /// The deadline of the reply, in nanoseconds of ``time.monotonic_ns()``.
    #[pyo3(get)]
    deadline_ns: u64,
}

/// The future of a job, a ``JobHandle``, or of a request, a ``Pending``.
pub fn of(
    py: Python<'_>,
    endpoint: &Arc<JobEndpoint>,
    submitted: Submitted,
) -> PyResult<Py<PyAny>> {
    let deadline_ns = match &submitted {
        Submitted::Request(pending) => Some(pending.deadline_ns),
        Submitted::Job(_) => None,
    };
    let future = PyClassInitializer::from(Future::of(endpoint, submitted));
    Ok(
        match deadline_ns.map(|deadline_ns| Pending { deadline_ns }) {
            Some(pending) => Py::new(py, future.add_subclass(pending))?.into_any(),
            None => Py::new(py, future.add_subclass(JobHandle))?.into_any(),
        },
    )
}
