//! Common to subscribers, workers and servers: endpoints from which one thread at a time receives.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use warpipe::Error;

use crate::closeable::{Closeable, Named};
use crate::errors::{Fault, Outcome};
use crate::exclusive::{Closed, Exclusive};
use crate::interpreter_exit::{self, Endpoint};
use crate::process::Home;
use crate::wait::{Timeout, hand_over, in_slices, late, none_if_late};

/// An endpoint `T` of the library that receives, until it is closed. Python gets each item as an
/// `R`.
#[derive(Debug)]
pub struct Inbox<T: Send, R: Send> {
    home: Home,
    what: &'static str,
    pub name: String,
    /// The default limit of a wait.
    pub timeout: Option<Duration>,
    calls: Calls<T, R>,
    source: Arc<Source<T, R>>,
}

/// The operations that differ between endpoints.
#[derive(Debug, Clone, Copy)]
pub struct Calls<T, R> {
    /// Makes its descriptor readable.
    pub ring: fn(&T),
    /// Takes back an item that was never returned to Python.
    pub take_back: fn(Python<'_>, VecDeque<Py<R>>),
}

/// The endpoint, and items that are returned before it is asked.
#[derive(Debug)]
struct Source<T, R> {
    exclusive: Exclusive<T>,
    /// Items of interrupted waits: the next to be returned. `None` once it is closed.
    unused: Mutex<Option<VecDeque<Py<R>>>>,
    take_back: fn(Python<'_>, VecDeque<Py<R>>),
}

impl<T, R> Source<T, R> {
    fn unused(&self) -> MutexGuard<'_, Option<VecDeque<Py<R>>>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes it the next item to be returned. If the inbox is closed, the item is taken back.
    fn put_back(&self, py: Python<'_>, made: Py<R>) {
        let mut unused = self.unused();
        match &mut *unused {
            Some(unused) => unused.push_front(made),
            None => {
                drop(unused);
                (self.take_back)(py, VecDeque::from([made]));
            }
        }
    }
}

impl<T: Send, R: Send> Endpoint for Source<T, R> {
    fn end(&self, py: Python<'_>) {
        let unused = self.unused().take();
        if let Some(unused) = unused.filter(|unused| !unused.is_empty()) {
            (self.take_back)(py, unused);
        }
        py.detach(|| self.exclusive.close());
    }

    fn is_closed(&self) -> bool {
        self.exclusive.is_closed()
    }

    fn is_over(&self) -> bool {
        self.exclusive.is_over()
    }
}

/// The result of one look.
enum Found<V, R> {
    New(V),
    Unused(Py<R>),
}

impl<T: Send + 'static, R: Send + 'static> Inbox<T, R> {
    /// Wraps an open endpoint. `what` and `name` are for the error after `close`.
    pub fn new(
        what: &'static str,
        name: &str,
        timeout: Option<Duration>,
        inner: T,
        calls: Calls<T, R>,
    ) -> PyResult<Inbox<T, R>> {
        let take_back = calls.take_back;
        let source = Arc::new(Source {
            exclusive: Exclusive::new(inner),
            unused: Mutex::new(Some(VecDeque::new())),
            take_back,
        });
        interpreter_exit::close_at_exit(&source)?;
        Ok(Inbox {
            home: Home::here(),
            what,
            name: name.to_owned(),
            timeout,
            calls,
            source,
        })
    }

    /// Runs `work` when no other thread has the endpoint; `None` if that does not happen within
    /// `limit`.
    fn within<A>(&self, limit: Duration, work: impl FnOnce(&mut T) -> A) -> Outcome<Option<A>> {
        self.home.check()?;
        self.source
            .exclusive
            .with(limit, work)
            .map_err(|Closed| Fault::closed(self.what, &self.name))
    }

    /// Asks for an item that is there at once, as soon as no other thread has the endpoint.
    pub fn ask<A: Send>(
        &self,
        py: Python<'_>,
        work: impl Fn(&mut T) -> A + Send + Sync,
    ) -> PyResult<A> {
        let said = in_slices(py, None, |slice| self.within(slice, &work))?;
        Ok(said.ok_or_else(|| late("its turn".into(), None))?)
    }

    /// Waits for the next `thing`: `take` waits no longer than its argument, and `make` converts
    /// the item for Python. An interrupted wait has taken nothing. The error of one that is late
    /// says that it was waited for as long as `waited`.
    pub fn next<V: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        waited: Option<Duration>,
        thing: &str,
        take: impl Fn(&mut T, Duration) -> Result<V, Error> + Send + Sync,
        make: impl FnOnce(V) -> PyResult<Py<R>>,
    ) -> PyResult<Py<R>> {
        let mut cause = None;
        let found = in_slices(py, timeout, |slice| {
            let start = Instant::now();
            let look = |inner: &mut T| {
                // Not zero: the error of a mere poll does not say the cause.
                let left = slice
                    .saturating_sub(start.elapsed())
                    .max(Duration::from_nanos(1));
                none_if_late(take(inner, left).map_err(Fault::from), &mut cause)
            };
            Ok(self
                .within(slice, |inner| self.unused_or(inner, look))?
                .transpose()?
                .flatten())
        })?;
        let what = || format!("{thing} {:?}", self.name);
        let found = found.ok_or_else(|| late(cause.unwrap_or_else(what), waited))?;
        self.give(py, found, make)
    }

    /// The next item if there is one.
    pub fn try_next<V: Send>(
        &self,
        py: Python<'_>,
        take: impl Fn(&mut T) -> Result<Option<V>, Error> + Send + Sync,
        make: impl FnOnce(V) -> PyResult<Py<R>>,
    ) -> PyResult<Option<Py<R>>> {
        let look = |inner: &mut T| Ok(take(inner)?);
        let found = self.ask(py, |inner| self.unused_or(inner, look))??;
        found.map(|found| self.give(py, found, make)).transpose()
    }

    fn unused_or<V>(
        &self,
        inner: &mut T,
        look: impl FnOnce(&mut T) -> Outcome<Option<V>>,
    ) -> Outcome<Option<Found<V, R>>> {
        let unused = self.source.unused().as_mut().and_then(VecDeque::pop_front);
        unused.map_or_else(
            || Ok(look(inner)?.map(Found::New)),
            |unused| Ok(Some(Found::Unused(unused))),
        )
    }

    fn give<V>(
        &self,
        py: Python<'_>,
        found: Found<V, R>,
        make: impl FnOnce(V) -> PyResult<Py<R>>,
    ) -> PyResult<Py<R>> {
        let made = match found {
            Found::New(value) => make(value)?,
            Found::Unused(made) => made,
        };
        hand_over(py, made, |made| {
            self.source.put_back(py, made);
            // Wakes pollers of the descriptor. A thread that waits in this endpoint needs no
            // wake-up: it looks within a slice.
            let _ = py.detach(|| self.within(Duration::ZERO, |inner| (self.calls.ring)(inner)));
        })
    }

    /// How many seconds a wait with this timeout lasts.
    pub fn limit(&self, timeout: Timeout) -> Option<f64> {
        timeout
            .or(self.timeout)
            .map(|timeout| timeout.as_secs_f64())
    }

    /// The base of the class that holds it.
    pub fn base(&self) -> PyClassInitializer<Closeable> {
        Closeable::of(&self.source)
    }

    /// The same with its name.
    pub fn named(&self) -> PyClassInitializer<Named> {
        Named::of(&self.source, &self.name)
    }

    /// Closes it, without the interpreter: the drop may have to wait a moment.
    pub fn close(&self, py: Python<'_>) -> Outcome<()> {
        self.home.check()?;
        self.source.end(py);
        Ok(())
    }
}

impl<T: Send, R: Send> Drop for Inbox<T, R> {
    fn drop(&mut self) {
        if self.home.is_here() {
            // Without the interpreter, as `close` does it.
            let _ = Python::try_attach(|py| self.source.end(py));
        }
    }
}
