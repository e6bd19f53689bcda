//! What subscribers, workers and servers have in common: they give things out, to one thread at a time.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use warpipe::Error;

use crate::errors::{Fault, Outcome};
use crate::process::Home;
use crate::turn::{Closed, Turn};
use crate::wait::{Timeout, in_slices, late, none_if_late};

/// One of the library's endpoints that give things out, until it is closed.
#[derive(Debug)]
pub struct Inbox<T> {
    home: Home,
    what: &'static str,
    pub name: String,
    /// How long a wait lasts, where nobody says.
    pub timeout: Option<Duration>,
    turn: Turn<T>,
}

impl<T: Send> Inbox<T> {
    /// An open one. `what` and `name` are for the error of who comes too late.
    pub fn new(what: &'static str, name: &str, timeout: Option<Duration>, inner: T) -> Inbox<T> {
        Inbox { home: Home::here(), what, name: name.to_owned(), timeout, turn: Turn::new(inner) }
    }

    /// Runs `work` when it is our turn; nothing if that does not come within `limit`.
    fn within<R>(&self, limit: Duration, work: impl FnOnce(&mut T) -> R) -> Outcome<Option<R>> {
        self.home.check()?;
        self.turn.with(limit, work).map_err(|Closed| Fault::closed(self.what, &self.name))
    }

    /// Asks for something that is there at once, as soon as it is our turn.
    pub fn ask<R: Send>(&self, py: Python<'_>, work: impl Fn(&mut T) -> R + Send + Sync) -> PyResult<R> {
        let said = in_slices(py, None, |slice| self.within(slice, &work))?;
        Ok(said.ok_or_else(|| late("its turn".into(), None))?)
    }

    /// Waits for the next `thing`: `take` does so no longer than it is told.
    pub fn next<R: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        thing: &str,
        take: impl Fn(&mut T, Duration) -> Result<R, Error> + Send + Sync,
    ) -> PyResult<R> {
        let found = in_slices(py, timeout, |slice| {
            let start = Instant::now();
            let look = |inner: &mut T| none_if_late(take(inner, slice.saturating_sub(start.elapsed())));
            Ok(self.within(slice, look)?.transpose()?.flatten())
        })?;
        Ok(found.ok_or_else(|| late(format!("{thing} {:?}", self.name), timeout))?)
    }

    /// How many seconds a wait lasts that is asked for with this timeout.
    pub fn limit(&self, timeout: Timeout) -> Option<f64> {
        timeout.or(self.timeout).map(|timeout| timeout.as_secs_f64())
    }

    /// Whether it has been closed.
    pub fn is_closed(&self) -> Outcome<bool> {
        self.home.check()?;
        Ok(self.turn.is_closed())
    }

    /// Closes it, without the interpreter: what is dropped may have to wait a moment.
    pub fn close(&self, py: Python<'_>) -> Outcome<()> {
        self.home.check()?;
        py.detach(|| self.turn.close());
        Ok(())
    }
}
