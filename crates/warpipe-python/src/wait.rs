//! Waits that Ctrl-C ends: in slices, without the interpreter, a look at the signals in between.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyEllipsis;
use warpipe::Error;

use crate::errors::{Fault, Outcome};

/// How long a signal may go unseen.
pub const SLICE: Duration = Duration::from_millis(50);

/// A timeout as an argument: seconds, `None` for as long as it takes, `...` for the endpoint's own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Timeout {
    /// The endpoint's own.
    Usual,
    /// `None`.
    Forever,
    /// Seconds.
    Within(Duration),
}

impl Timeout {
    /// The wait itself, with `usual` for the endpoint's own. `None` is for ever.
    pub fn or(self, usual: Option<Duration>) -> Option<Duration> {
        match self {
            Timeout::Usual => usual,
            Timeout::Forever => None,
            Timeout::Within(duration) => Some(duration),
        }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Timeout {
    type Error = PyErr;

    fn extract(found: Borrowed<'a, 'py, PyAny>) -> PyResult<Timeout> {
        if found.is_none() {
            return Ok(Timeout::Forever);
        }
        if found.is_instance_of::<PyEllipsis>() {
            return Ok(Timeout::Usual);
        }
        Ok(Timeout::Within(seconds(found.extract()?, "timeout")?))
    }
}

/// `value` seconds as a duration.
pub fn seconds(value: f64, argument: &str) -> PyResult<Duration> {
    let allowed = "a number of seconds from 0, or None to wait as long as it takes";
    // As Python writes it: not three hundred digits of one that is far too large.
    Duration::try_from_secs_f64(value).map_err(|_| Fault::argument(argument, format!("{value:?}"), allowed).into())
}

/// The same of an argument that may be `None`.
pub fn optional(value: Option<f64>, argument: &str) -> PyResult<Option<Duration>> {
    value.map(|value| seconds(value, argument)).transpose()
}

/// Repeats `look`, which waits no longer than it is told, until it gives something or `timeout` has passed; then
/// `None`. The interpreter is free meanwhile, and signals are seen.
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

/// The last step of a wait that takes something: a signal that arrived meanwhile is seen before the caller has `found`,
/// and if its handler raises, `put_back` makes it the next one to be taken.
///
/// The interpreter looks at signals again once the caller has it, as after any call.
pub fn hand_over<T>(py: Python<'_>, found: T, put_back: impl FnOnce(T)) -> PyResult<T> {
    match py.check_signals() {
        Ok(()) => Ok(found),
        Err(interrupt) => {
            put_back(found);
            Err(interrupt)
        }
    }
}

/// Repeats a step that cannot be undone until it is done or `timeout` has passed; then `None`. `wait_for_room` waits, no
/// longer than it is told, until the step need not wait, and says whether that is so; `step` does not wait. Signals are
/// seen before each step and never after the one that succeeds: an interrupted wait has done nothing.
pub fn once<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut wait_for_room: impl FnMut(Duration) -> bool + Send,
    mut step: impl FnMut() -> Outcome<Option<T>> + Send,
) -> PyResult<Option<T>> {
    let (start, mut has_room) = (Instant::now(), true);
    loop {
        py.check_signals()?;
        if has_room && let Some(done) = py.detach(&mut step)? {
            return Ok(Some(done));
        }
        let left = timeout.map_or(SLICE, |timeout| timeout.saturating_sub(start.elapsed()));
        if left.is_zero() {
            return Ok(None);
        }
        has_room = py.detach(|| wait_for_room(left.min(SLICE)));
    }
}

/// A call's own timeout as nothing found yet.
pub fn none_if_late<T>(result: Result<T, Error>) -> Outcome<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(Error::Timeout { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The error of a wait that ran out.
pub fn late(what: String, waited: Option<Duration>) -> Fault {
    Fault::Library(Error::Timeout { what, waited: waited.unwrap_or_default() })
}
