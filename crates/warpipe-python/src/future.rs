//! The outcome of a job or a request, as a `concurrent.futures.Future` has one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyBaseException;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::sync::OnceLockExt;
use warpipe::Error;

use crate::detached::detached;
use crate::errors::{Fault, Outcome};
use crate::job;
use crate::job_endpoint::JobEndpoint;
use crate::wait::in_slices;

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

/// The job or request behind a future. Its methods are called without the interpreter.
pub trait Source: Sync {
    /// Its number, from 1.
    fn job(&self) -> u64;
    /// Takes the outcome if it comes within `slice`.
    fn look(&self, slice: Duration) -> Outcome<Option<warpipe::JobResult>>;
    /// Whether the outcome is there.
    fn is_done(&self) -> Outcome<bool>;
    /// Cancels it.
    fn call_off(&self) -> Outcome<()>;
}

/// Takes the outcome of a [`Source`] once, and gives it any number of times.
#[derive(Debug, Default)]
pub struct Future {
    /// Held while a thread looks for the outcome, never while Python runs.
    looking: Mutex<()>,
    settled: Mutex<Option<Settled>>,
    is_settled: AtomicBool,
    given: OnceLock<Given>,
}

/// Whether an outcome is for good. Others are the queue's state, and are asked for anew.
fn is_final(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::Library(
            Error::DeadLettered { .. } | Error::Rejected { .. } | Error::DeadlinePassed { .. }
        )
    )
}

/// Whether no other outcome can come.
fn is_over(fault: &Fault) -> bool {
    is_final(fault)
        || matches!(
            fault,
            Fault::Library(Error::NoSuchJob { .. } | Error::QueueClosed { .. })
        )
}

impl Future {
    fn settled(&self) -> MutexGuard<'_, Option<Settled>> {
        self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_settled(&self) -> bool {
        self.is_settled.load(Ordering::Acquire)
    }

    fn settle(&self, outcome: Settled) {
        *self.settled() = Some(outcome);
        self.is_settled.store(true, Ordering::Release);
    }

    /// Looks for the outcome for at most `slice`. Call without the interpreter.
    fn look(
        &self,
        endpoint: &JobEndpoint,
        source: &impl Source,
        slice: Duration,
    ) -> Outcome<Option<()>> {
        endpoint.check()?;
        if self.is_settled() {
            return Ok(Some(()));
        }
        let _looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_settled() {
            return Ok(Some(()));
        }
        let outcome = match source.look(slice) {
            Ok(None) => return Ok(None),
            Ok(Some(result)) => Settled::Result(result),
            Err(Fault::Library(Error::NoSuchJob { .. }))
                if endpoint.has_cancelled(source.job()) =>
            {
                Settled::Cancelled
            }
            Err(fault) if is_final(&fault) => Settled::Failed(fault),
            Err(fault) => return Err(fault),
        };
        self.settle(outcome);
        Ok(Some(()))
    }

    /// Waits for the outcome; false after `timeout`. An interrupted wait has taken nothing.
    pub fn wait(
        &self,
        py: Python<'_>,
        endpoint: &JobEndpoint,
        source: &impl Source,
        timeout: Option<Duration>,
    ) -> PyResult<bool> {
        let found = in_slices(py, timeout, |slice| self.look(endpoint, source, slice))?;
        py.check_signals().inspect_err(|_| {
            py.detach(|| self.put_back(endpoint));
        })?;
        Ok(found.is_some())
    }

    fn put_back(&self, endpoint: &JobEndpoint) {
        let _looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        let mut settled = self.settled();
        if let Some(Settled::Result(_)) = &*settled
            && let Some(Settled::Result(result)) = settled.take()
        {
            self.is_settled.store(false, Ordering::Release);
            drop(settled);
            endpoint.put_back(result);
        }
    }

    /// The outcome of a future that is settled.
    fn given(&self, py: Python<'_>, endpoint: &JobEndpoint) -> &Given {
        self.given.get_or_init_py_attached(py, || {
            let settled = self.settled().take();
            let failed = |error: PyErr| Given::Failed(error.into_value(py));
            match settled {
                Some(Settled::Result(result)) => job::Result::new(py, result, &endpoint.device)
                    .map_or_else(failed, Given::Result),
                Some(Settled::Failed(fault)) => failed(fault.into()),
                Some(Settled::Cancelled) | None => Given::Cancelled,
            }
        })
    }

    /// The result, or its exception.
    pub fn result(&self, py: Python<'_>, endpoint: &JobEndpoint) -> PyResult<Py<job::Result>> {
        match self.given(py, endpoint) {
            Given::Result(result) => Ok(result.clone_ref(py)),
            Given::Failed(error) => Err(PyErr::from_value(error.bind(py).clone().into_any())),
            Given::Cancelled => Err(cancelled(py)),
        }
    }

    /// The exception, or None.
    pub fn exception(
        &self,
        py: Python<'_>,
        endpoint: &JobEndpoint,
    ) -> PyResult<Option<Py<PyBaseException>>> {
        match self.given(py, endpoint) {
            Given::Result(_) => Ok(None),
            Given::Failed(error) => Ok(Some(error.clone_ref(py))),
            Given::Cancelled => Err(cancelled(py)),
        }
    }

    /// Whether there is an outcome, or none can come.
    pub fn is_done(
        &self,
        py: Python<'_>,
        endpoint: &JobEndpoint,
        source: &impl Source,
    ) -> PyResult<bool> {
        endpoint.check()?;
        if self.is_settled() {
            return Ok(true);
        }
        match py.detach(|| source.is_done()) {
            Err(fault) if is_over(&fault) => Ok(true),
            found => Ok(found?),
        }
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self, endpoint: &JobEndpoint, source: &impl Source) -> PyResult<bool> {
        endpoint.check()?;
        Ok(matches!(self.given.get(), Some(Given::Cancelled))
            || matches!(&*self.settled(), Some(Settled::Cancelled))
            || (!self.is_settled() && endpoint.has_cancelled(source.job())))
    }

    /// Cancels it, if it has no outcome yet; says whether it is cancelled, and whether this call did
    /// it.
    pub fn cancel(
        &self,
        py: Python<'_>,
        endpoint: &JobEndpoint,
        source: &impl Source,
    ) -> PyResult<(bool, bool)> {
        if self.is_cancelled(endpoint, source)? {
            return Ok((true, false));
        }
        let done = py.detach(|| -> Outcome<bool> {
            let _looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
            if self.is_settled() || source.is_done()? {
                return Ok(false);
            }
            source.call_off()?;
            self.settle(Settled::Cancelled);
            Ok(true)
        });
        match done {
            Ok(done) => Ok((done, done)),
            Err(fault) if is_over(&fault) => Ok((false, false)),
            Err(fault) => Err(fault.into()),
        }
    }

    /// Gives a result that nobody asked for back to its queue.
    pub fn abandon(&self, endpoint: &JobEndpoint) {
        if endpoint.check().is_ok() {
            detached(|| self.put_back(endpoint));
        }
    }

    /// For the garbage collector: an exception references frames, and they the future.
    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.given.get() {
            Some(Given::Result(result)) => visit.call(result),
            Some(Given::Failed(error)) => visit.call(error),
            Some(Given::Cancelled) | None => Ok(()),
        }
    }
}

fn cancelled(py: Python<'_>) -> PyErr {
    let class = py
        .import("concurrent.futures")
        .and_then(|module| module.getattr("CancelledError"));
    match class.and_then(|class| class.call0()) {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}
