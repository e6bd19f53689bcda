//! Waits that Ctrl-C ends: slices without the interpreter, with a check for signals in between.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::PyEllipsis;
use warpipe::{Error, Wait};

use crate::errors::{Fault, Outcome};
use crate::thread_exit::prepare_exit;

/// How long a signal may go unseen.
pub const SLICE: Duration = Duration::from_millis(50);

/// An argument that may be left out, of a type that another argument decides.
pub type Given<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// A number of seconds as an argument. An integer that no float holds is infinite, which no wait takes.
#[derive(Debug, Clone, Copy)]
pub struct Seconds(pub f64);

impl<'a, 'py> FromPyObject<'a, 'py> for Seconds {
    type Error = PyErr;

    fn extract(found: Borrowed<'a, 'py, PyAny>) -> PyResult<Seconds> {
        prepare_exit();
        match found.extract::<f64>() {
            Err(error) if error.is_instance_of::<PyOverflowError>(found.py()) => {
                let sign = if found.lt(0)? { -1.0 } else { 1.0 };
                Ok(Seconds(sign * f64::INFINITY))
            }
            number => number.map(Seconds),
        }
    }
}

/// The limit of a wait as an argument, `wait` or `timeout`: seconds, or `None` for no limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LimitOf<const IS_WAIT: bool>(pub Option<Duration>);

/// The argument `timeout`.
pub type Limit = LimitOf<false>;

/// The argument `wait`.
pub type WaitLimit = LimitOf<true>;

impl<const IS_WAIT: bool> LimitOf<IS_WAIT> {
    pub const ZERO: Self = LimitOf(Some(Duration::ZERO));
    pub const TEN: Self = LimitOf(Some(Duration::from_secs(10)));
    pub const NONE: Self = LimitOf(None);
}

impl<'a, 'py, const IS_WAIT: bool> FromPyObject<'a, 'py> for LimitOf<IS_WAIT> {
    type Error = PyErr;

    fn extract(found: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let argument = if IS_WAIT { "wait" } else { "timeout" };
        Ok(LimitOf(optional(found.extract()?, argument)?))
    }
}

/// A limit as an argument, or `...` for the endpoint's own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timeout(Option<Limit>);

impl Timeout {
    /// The endpoint's own.
    pub const USUAL: Timeout = Timeout(None);

    /// The wait itself, with `usual` for the endpoint's own. `None` is no limit.
    pub fn or(self, usual: Option<Duration>) -> Option<Duration> {
        self.0.map_or(usual, |limit| limit.0)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Timeout {
    type Error = PyErr;

    fn extract(found: Borrowed<'a, 'py, PyAny>) -> PyResult<Timeout> {
        let is_usual = found.is_instance_of::<PyEllipsis>();
        let limit = (!is_usual).then(|| found.extract());
        limit.transpose().map(Timeout)
    }
}

/// The seconds of an argument as a duration.
pub fn seconds(Seconds(value): Seconds, argument: &str) -> PyResult<Duration> {
    let allowed = "a number of seconds from 0, or None to wait as long as it takes";
    // As Python formats it: not three hundred digits of a value that is far too large.
    Duration::try_from_secs_f64(value)
        .map_err(|_| Fault::argument(argument, format!("{value:?}"), allowed).into())
}

/// The same of an argument that may be `None`.
pub fn optional(value: Option<Seconds>, argument: &str) -> PyResult<Option<Duration>> {
    value.map(|value| seconds(value, argument)).transpose()
}

/// The limit of a wait as a float; an error unless it is one.
#[pyfunction]
pub fn _seconds(timeout: Limit) -> Option<f64> {
    timeout.0.map(|timeout| timeout.as_secs_f64())
}

/// Repeats `look`, which waits no longer than its argument, until it gives something or `timeout`
/// has passed; then `None`. The interpreter is released meanwhile, and signals are handled.
pub fn in_slices<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut look: impl FnMut(Duration) -> Outcome<Option<T>> + Send,
) -> PyResult<Option<T>> {
    let start = Instant::now();
    loop {
        let left = timeout.map_or(SLICE, |timeout| timeout.saturating_sub(start.elapsed()));
        if let Some(found) = py.detach(|| look(left.min(SLICE)))? {
            return Ok(Some(found));
        }
        py.check_signals()?;
        if timeout.is_some_and(|timeout| start.elapsed() >= timeout) {
            return Ok(None);
        }
    }
}

/// Looks every millisecond whether something is so, at most `timeout`.
pub fn until(
    py: Python<'_>,
    timeout: Option<Duration>,
    is_so: impl Fn() -> Outcome<bool> + Send + Sync,
) -> PyResult<()> {
    let look = |slice: Duration| {
        let is_so = is_so()?;
        if !is_so {
            std::thread::park_timeout(slice.min(Duration::from_millis(1)));
        }
        Ok(is_so.then_some(()))
    };
    in_slices(py, timeout, look).map(drop)
}

/// A library call that waits at most `limit` (None: no limit). A signal's handler that raises, or
/// an error of `goes_on`, cancels it and is the result then. What `goes_on` gives is kept while
/// handlers run.
pub fn waiting<T: Send, Held>(
    py: Python<'_>,
    limit: Option<Duration>,
    goes_on: impl Fn() -> Outcome<Held> + Send + Sync,
    call: impl FnOnce(Wait<'_>) -> Outcome<T> + Send,
) -> PyResult<T> {
    let (done, end) = py.detach(|| {
        let end = RefCell::new(None);
        let cancelled = || {
            if end.borrow().is_none() {
                // None once the interpreter ends: it runs no handler, and takes no thread back.
                let raised = |_held| Python::try_attach(|py| py.check_signals())?.err().map(Ok);
                *end.borrow_mut() = goes_on().map_or_else(|fault| Some(Err(fault)), raised);
            }
            end.borrow().is_some()
        };
        let wait = Wait::from(limit.unwrap_or(Duration::MAX)).unless(&cancelled);
        let done = call(wait);
        match end.take() {
            // What has come after the cancellation is dropped.
            Some(end) => (done.map(drop).map(|()| None), Some(end)),
            None => (done.map(Some), None),
        }
    });
    match end {
        Some(end) => Err(end.unwrap_or_else(PyErr::from)),
        None => Ok(done?.expect("a call that was not cancelled gives something")),
    }
}

/// The same of a call that a signal's handler alone ends before its limit.
pub fn awaited<T: Send>(
    py: Python<'_>,
    limit: Option<Duration>,
    call: impl FnOnce(Wait<'_>) -> Result<T, Error> + Send,
) -> PyResult<T> {
    waiting(py, limit, || Ok(()), |wait| Ok(call(wait)?))
}

/// How long a call waits for another thread of this process that the driver blocks.
pub const HELD_UP: Duration = Duration::from_secs(10);

/// The last step of a wait that takes something: a signal that arrived meanwhile is handled before
/// the caller has `found`, and if its handler raises, `put_back` makes it the next one to be taken.
///
/// The interpreter checks signals again once the caller has it, as after any call.
pub fn hand_over<T>(py: Python<'_>, found: T, put_back: impl FnOnce(T)) -> PyResult<T> {
    match py.check_signals() {
        Ok(()) => Ok(found),
        Err(interrupt) => {
            put_back(found);
            Err(interrupt)
        }
    }
}

/// Converts a call's own timeout to `None`, and keeps in `cause` what it waited for, in the library's
/// words.
pub fn none_if_late<T>(result: Outcome<T>, cause: &mut Option<String>) -> Outcome<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(Fault::Library(Error::Timeout { what, .. })) => {
            // A look without a wait does not say.
            if !what.is_empty() {
                *cause = Some(what);
            }
            Ok(None)
        }
        Err(fault) => Err(fault),
    }
}

/// The error of a wait that ran out.
pub fn late(what: String, waited: Option<Duration>) -> Fault {
    Fault::Library(Error::Timeout {
        what,
        waited: waited.unwrap_or_default(),
    })
}
