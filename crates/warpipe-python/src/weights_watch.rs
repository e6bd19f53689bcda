//! New versions of weights, as they are offered.
//!
//! A thread of the watch waits for the keeper's notices, for those that poll its descriptor. It learns a
//! version's number and maps nothing, so a watch holds no memory: the version is opened when it is given
//! out. With a callback the thread opens it. The thread's waits are short, so that it ends soon after
//! the watch.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pyo3::exceptions::PyStopIteration;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::closeable::Named;
use crate::device::Device;
use crate::domain::Domain;
use crate::errors::{Fault, Outcome};
use crate::handle::CloseableHandle;
use crate::interpreter_exit::Callback;
use crate::process::Home;
use crate::wait::{Limit, hand_over};
use crate::weights::{LOOK, Place, SharedWeights, Version, is_for_now};

/// What the thread and the watch share.
#[derive(Debug)]
struct Board {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The newest number that the keeper has told, or [`FAILED`].
    told: u64,
    /// The last number that was given out.
    given: u64,
    is_closed: bool,
    /// A byte is in the pipe while there is something to take.
    reader: PipeReader,
    writer: PipeWriter,
    is_rung: bool,
}

/// The thread cannot wait for a version, and the next look for one says why.
const FAILED: u64 = u64::MAX;

impl State {
    /// Makes the descriptor readable exactly while there is something to take.
    fn ring(&mut self) {
        let has_news = self.told > self.given;
        // One byte at most is in the pipe, so neither call waits.
        if has_news && !self.is_rung {
            self.is_rung = self.writer.write_all(&[1]).is_ok();
        } else if !has_news && self.is_rung {
            self.is_rung = self.reader.read_exact(&mut [0]).is_err();
        }
    }
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        state.ring();
        drop(state);
        self.changed.notify_all();
    }
}

/// A watch until it is closed. Its thread ends within a look.
#[derive(Debug)]
struct Watching {
    home: Home,
    board: Arc<Board>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever, and there is no thread.
        if self.home.is_here() {
            self.board.change(|state| state.is_closed = true);
        }
    }
}

/// The thread of a watch without a callback.
fn follow(board: &Board, place: &Place) {
    loop {
        let has_failed = |state: &mut State| !state.is_closed && state.told == FAILED;
        let waited = board.changed.wait_while(board.lock(), has_failed);
        let state = waited.unwrap_or_else(PoisonError::into_inner);
        if state.is_closed {
            return;
        }
        let after = state.told.max(state.given);
        drop(state);
        match warpipe::weights::SharedWeights::version_after(
            &place.name,
            after,
            place.options(),
            LOOK,
        ) {
            // Not if the number was taken back meanwhile: then the version is looked for again.
            Ok(number) => board.change(|state| state.told = state.told.max(number)),
            Err(error) if is_for_now(&error) => {}
            Err(_) => board.change(|state| state.told = FAILED),
        }
    }
}

/// A new version on its way to a callback.
struct Arrived(Version);

impl<'py> IntoPyObject<'py> for Arrived {
    type Target = SharedWeights;
    type Output = Bound<'py, SharedWeights>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, SharedWeights>> {
        self.0.into_python(py)
    }
}

/// The thread of a watch with a callback.
fn call(board: &Board, place: &Place, callback: &Callback) {
    let mut after = board.lock().given;
    while !board.lock().is_closed && callback.is_live() {
        match warpipe::weights::SharedWeights::open_after(&place.name, after, place.options(), LOOK)
        {
            Ok(opened) if !board.lock().is_closed => {
                let version = Version::of(place.clone(), opened);
                after = version.number();
                callback.call(Arrived(version));
            }
            Ok(_) => {}
            Err(error) if is_for_now(&error) => {}
            Err(error) => {
                // No caller would get it.
                let raised = PyErr::from(Fault::from(error));
                let _ = Python::try_attach(|py| raised.write_unraisable(py, None));
                return;
            }
        }
    }
}

/// New versions of weights, as they are offered: ``for weights in watch(name):``, ``async for``, or
/// with a callback.
///
/// ``warpipe.weights.watch`` makes it. Each version is given out as ``SharedWeights``: all of it. If
/// several were published meanwhile, the newest one is, and the others are left out. A watch holds no
/// memory.
#[pyclass(frozen, extends = Named, module = "warpipe.weights")]
#[derive(Debug)]
pub struct Watch {
    handle: CloseableHandle<Watching>,
    place: Place,
    /// Visible to the garbage collector.
    callback: Option<Arc<Callback>>,
}

impl Watch {
    fn board(&self) -> Outcome<Arc<Board>> {
        Ok(self.handle.get()?.board.clone())
    }
}

#[pymethods]
impl Watch {
    /// ``name``, and which version came last: see ``warpipe.weights.watch``.
    #[new]
    #[pyo3(signature = (name, *, device = None, domain = None, after = 0, on = None))]
    fn new(
        name: &str,
        device: Option<Device>,
        domain: Option<Domain>,
        after: u64,
        on: Option<Py<PyAny>>,
    ) -> PyResult<PyClassInitializer<Watch>> {
        let place = Place::of(name, device, domain)?;
        let (reader, writer) = std::io::pipe()?;
        let board = Arc::new(Board {
            state: Mutex::new(State {
                told: after,
                given: after,
                is_closed: false,
                reader,
                writer,
                is_rung: false,
            }),
            changed: Condvar::new(),
        });
        let callback = on.map(Callback::new);
        let thread = {
            let (board, place, callback) = (board.clone(), place.clone(), callback.clone());
            move || match &callback {
                Some(callback) => call(&board, &place, callback),
                None => follow(&board, &place),
            }
        };
        std::thread::Builder::new()
            .name("warpipe-watch".into())
            .spawn(thread)?;
        let home = Home::here();
        let handle = CloseableHandle::new("watch", name, Watching { home, board })?;
        Ok(handle.named().add_subclass(Watch {
            handle,
            place,
            callback,
        }))
    }

    /// The next version, waited for at most ``timeout`` seconds (None: no limit), also while there is
    /// no keeper; None if there was none. An interrupted wait loses no version.
    ///
    /// Raises ``ArgumentError`` if this watch has a callback, which gets the versions;
    /// ``ClosedError``, and as ``open``.
    #[pyo3(signature = (timeout = Limit::TEN), text_signature = "($self, timeout=10.0)")]
    fn changes<'py>(
        &self,
        py: Python<'py>,
        timeout: Limit,
    ) -> PyResult<Option<Bound<'py, SharedWeights>>> {
        let start = Instant::now();
        if self.callback.is_some() {
            let next = "a watch without `on`";
            return Err(Fault::argument("on", "a callback, which gets the versions", next).into());
        }
        loop {
            let left = timeout
                .0
                .map(|timeout| timeout.saturating_sub(start.elapsed()));
            let (board, goes_on) = (self.board()?, || self.handle.get().map(drop));
            let given = board.lock().given;
            let version = match self.place.open_after(py, given, left, goes_on)? {
                Ok(version) => hand_over(py, version, drop)?,
                Err(error) => {
                    board.change(|state| state.told = state.given);
                    match is_for_now(&error) {
                        true if left.is_some_and(|left| left.is_zero()) => return Ok(None),
                        true => continue,
                        false => return Err(Fault::from(error).into()),
                    }
                }
            };
            let number = version.number();
            let weights = version.into_python(py)?;
            let mut is_next = false;
            board.change(|state| {
                is_next = number > state.given;
                state.given = state.given.max(number);
                // A later one is told again.
                state.told = state.given;
            });
            // Another thread may have taken it.
            if is_next {
                return Ok(Some(weights));
            }
        }
    }

    /// A descriptor that is readable while ``changes`` has a version. Only poll it.
    ///
    /// Raises ``ClosedError``.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.board()?.lock().reader.as_raw_fd())
    }

    fn __iter__(slf: Py<Watch>) -> Py<Watch> {
        slf
    }

    /// The next version, without a limit; the iteration ends when the watch is closed.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, SharedWeights>>> {
        match self.changes(py, Limit::NONE) {
            Err(_) if self.handle.is_closed()? => Err(PyStopIteration::new_err(())),
            other => other,
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.callback
            .iter()
            .try_for_each(|callback| callback.traverse(&visit))
    }

    fn __clear__(&self) {
        self.callback.iter().for_each(|callback| callback.clear());
    }
}
