//! Members of a domain, and the monitor that follows them.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyStopIteration;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use warpipe::{Error, Wait};

use crate::detached::call;
use crate::domain::Domain;
use crate::errors::{Fault, Outcome};
use crate::exclusive::locked;
use crate::handle::{Closeable, CloseableHandle, Named};
use crate::interpreter_exit::{self, Callback};
use crate::tuples::Info;
use crate::wait::{Limit, SLICE};

/// This process as a member of a domain, visible to its monitors until it is closed or dropped.
///
/// ``Member.join(name)``: ``name`` is 1 to 72 bytes, as an endpoint's; ``role`` says what the
/// process does, in up to 64 bytes.
#[pyclass(frozen, extends = Named, module = "warpipe")]
#[derive(Debug)]
pub struct Member {
    /// Until it is closed, or dropped.
    _handle: CloseableHandle<warpipe::Member>,
    /// The role that it states.
    #[pyo3(get)]
    role: String,
    generation: [u8; 16],
}

#[pymethods]
impl Member {
    /// Joins the domain under a name. ``allow_uids``, ``allow_gids``: users and groups that see this
    /// member in their watches beside this process's own user.
    ///
    /// Raises ``NameTakenError``, ``InvalidNameError``, ``ArgumentError``, ``ForeignFileError``,
    /// ``DomainError``.
    #[staticmethod]
    #[pyo3(signature = (name, role = "", *, domain = None, allow_uids = Vec::new(), allow_gids = Vec::new()),
        text_signature = "(name, role=\"\", *, domain=None, allow_uids=(), allow_gids=())")]
    fn join(
        py: Python<'_>,
        name: &str,
        role: &str,
        domain: Option<Domain>,
        allow_uids: Vec<u32>,
        allow_gids: Vec<u32>,
    ) -> PyResult<Py<Member>> {
        let domain = Domain::or_usual(domain)?;
        let joined = call(py, || {
            let options = warpipe::MemberOptions {
                role: role.into(),
                allow_uids,
                allow_gids,
                ..domain.options()
            };
            warpipe::Member::new(name, options)
        })?;
        let generation = joined.generation;
        let role = role.to_owned();
        CloseableHandle::object(py, "membership", name, joined, |_handle| Member {
            _handle,
            role,
            generation,
        })
    }

    /// This incarnation, as ``MemberInfo.generation`` shows it.
    #[getter]
    fn generation<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.generation)
    }
}

/// The members of a domain, followed until this is closed: ``for change in Members.watch():``,
/// ``async for``, or with callbacks.
///
/// A watch is no member, and invisible to members.
#[pyclass(frozen, extends = Closeable, module = "warpipe")]
#[derive(Debug)]
pub struct Members {
    handle: CloseableHandle<warpipe::Members>,
    /// Callbacks for changes and deaths, visible to the garbage collector.
    callbacks: Mutex<Vec<Arc<Callback>>>,
}

impl Members {
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        if interpreter_exit::is_callback_stuck() {
            // A stuck callback blocks the thread that the close would wait for.
            std::mem::forget(self.handle.take()?);
            return Ok(());
        }
        self.handle.close(py)
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        // The end of a watch waits for its thread, which may want the interpreter.
        let _ = Python::try_attach(|py| drop(self.end(py)));
    }
}

/// Sleeps until there is a change, and leaves it there; gives one that has come before the sleep.
fn sleep_once(
    members: &warpipe::Members,
    limit: Duration,
) -> Result<Option<warpipe::Change>, Error> {
    let has_slept = Cell::new(false);
    let cancelled = || has_slept.replace(true);
    members.changes(Wait::from(limit).unless(&cancelled))
}

#[pymethods]
impl Members {
    /// Begins to watch, and waits until all present members have answered: see `_members.py`.
    #[staticmethod]
    fn _watch(
        py: Python<'_>,
        domain: Option<Domain>,
        on: Option<Py<PyAny>>,
        clean: bool,
    ) -> PyResult<Py<Members>> {
        let domain = Domain::or_usual(domain)?;
        let options = warpipe::MembersOptions {
            keep_files: !clean,
            ..domain.options()
        };
        let callbacks: Vec<Arc<Callback>> = on.into_iter().map(Callback::new).collect();
        let callback = callbacks.first().cloned();
        let started = call(py, || match callback {
            None => warpipe::Members::new(options),
            Some(callback) => warpipe::Members::with_callback(options, move |change| {
                callback.call(Info(change.clone()));
            }),
        })?;
        let handle =
            CloseableHandle::unlisted("watch", domain.path().display().to_string(), started);
        let base = handle.base();
        let callbacks = Mutex::new(callbacks);
        Py::new(py, base.add_subclass(Members { handle, callbacks }))
    }

    /// All present members, sorted by name, with the endpoints of each one's process.
    ///
    /// Raises ``SystemCallError``, ``ClosedError``.
    fn list(&self, py: Python<'_>) -> PyResult<Vec<Info<warpipe::MemberInfo>>> {
        let members = self.handle.get()?;
        let list = call(py, || members.list())?;
        Ok(list.into_iter().map(Info).collect())
    }

    /// The next change, or None.
    fn _changes(&self, py: Python<'_>, timeout: Limit) -> PyResult<Option<Info<warpipe::Change>>> {
        let start = Instant::now();
        loop {
            // Taken with the interpreter, so that no signal's handler comes before the caller has it.
            py.check_signals()?;
            let members = self.handle.get()?;
            let found = members.changes(Duration::ZERO).map_err(Fault::from)?;
            let left = |timeout: Duration| timeout.saturating_sub(start.elapsed());
            let left = timeout.0.map_or(SLICE, left);
            if found.is_some() || left.is_zero() {
                return Ok(found.map(Info));
            }
            let slept = py.detach(|| sleep_once(&members, left.min(SLICE)));
            if let Some(come) = slept.map_err(Fault::from)? {
                return Ok(Some(Info(come)));
            }
        }
    }

    /// Calls ``cleanup`` once with the ``MemberInfo`` of a member of this name when it has died
    /// (not when it leaves): the present member, or the next that dies.
    ///
    /// Raises ``InvalidNameError``, ``ArgumentError`` beyond 4096 at a time, ``ClosedError``.
    fn on_death_of(&self, py: Python<'_>, name: &str, cleanup: Py<PyAny>) -> PyResult<()> {
        let members = self.handle.get()?;
        let cleanup = Callback::new(cleanup);
        let called = cleanup.clone();
        let called = move |member: &warpipe::MemberInfo| called.call_once(Info(member.clone()));
        call(py, || members.on_death_of(name, called))?;
        let mut callbacks = locked(&self.callbacks);
        callbacks.retain(|known| known.is_live());
        callbacks.push(cleanup);
        Ok(())
    }

    /// How many changes were dropped because more than 4096 were pending.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn merged(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.merged()))?)
    }

    /// How many members' names could not be followed at the last scan of the directory.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn overlooked(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.overlooked()))?)
    }

    /// A descriptor that is readable while ``changes`` has a change. Only poll it.
    ///
    /// Raises ``ClosedError``.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.handle.get()?.as_fd().as_raw_fd())
    }

    /// Ends the watch. Closing twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // The holder of the lock has the interpreter, too, so the collector comes again.
        let Ok(callbacks) = self.callbacks.try_lock() else {
            return Ok(());
        };
        let mut all = callbacks.iter();
        all.try_for_each(|callback| callback.traverse(&visit))
    }

    fn __clear__(&self) {
        let callbacks = std::mem::take(&mut *locked(&self.callbacks));
        callbacks.iter().for_each(|callback| callback.clear());
    }

    /// The next change, without a limit; the iteration ends when the watch is closed.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Info<warpipe::Change>>> {
        match self._changes(py, Limit::NONE) {
            Err(_) if self.handle.is_closed()? => Err(PyStopIteration::new_err(())),
            other => other,
        }
    }

    fn __repr__(&self) -> String {
        format!("Members({:?})", self.handle.name())
    }
}
