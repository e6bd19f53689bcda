//! The end of the program: it closes open endpoints and waits for callbacks.
//! **This module is marked for unsafe**: it asks for the interpreter's number.
//!
//! Once the program ends (`atexit`), open endpoints close gracefully, no callback begins any more,
//! and running callbacks are waited for. Threads elsewhere in a call go on until they want the
//! interpreter: see `thread_exit`.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::errors;
use crate::exclusive::locked;
use crate::process::{self, Home};
use crate::thread_exit;
use crate::wait::{SLICE, until};

/// How long the end of the program waits for callbacks.
const PATIENCE: Duration = Duration::from_secs(10);

/// The number of callbacks that run.
static RUNNING_CALLBACKS: AtomicU32 = AtomicU32::new(0);
/// Whether this process ends.
static EXITING: AtomicBool = AtomicBool::new(false);

/// In a forked child, which has none of its parent's threads.
pub fn begin_anew() {
    RUNNING_CALLBACKS.store(0, Ordering::SeqCst);
    EXITING.store(false, Ordering::SeqCst);
}

/// A callback that runs.
#[derive(Debug)]
struct RunningCallback(u32);

impl RunningCallback {
    fn start() -> RunningCallback {
        RUNNING_CALLBACKS.fetch_add(1, Ordering::SeqCst);
        RunningCallback(process::own())
    }
}

impl Drop for RunningCallback {
    fn drop(&mut self) {
        if self.0 == process::own() {
            RUNNING_CALLBACKS.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

fn is_callback_running() -> bool {
    RUNNING_CALLBACKS.load(Ordering::SeqCst) > 0
}

/// Whether the program has begun to end: no new call enters the interpreter.
pub fn has_begun() -> bool {
    EXITING.load(Ordering::SeqCst)
}

/// Whether a callback runs that will not return any more.
pub fn is_callback_stuck() -> bool {
    has_begun() && is_callback_running()
}

/// A Python function that a thread of the library calls. Its owner shows it to the garbage
/// collector, which may clear it. So the library's thread holds this object and not the function.
#[derive(Debug)]
pub struct Callback(Mutex<Option<Py<PyAny>>>);

impl Callback {
    /// Wraps a function.
    pub fn new(function: Py<PyAny>) -> Arc<Callback> {
        Arc::new(Callback(Mutex::new(Some(function))))
    }

    /// For the owner's `__traverse__`, which must not wait.
    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let function = self.0.try_lock();
        function.map_or(Ok(()), |function| visit.call(&*function))
    }

    /// Takes the function away; it is not called any more.
    pub fn clear(&self) {
        let function = locked(&self.0).take();
        drop(function);
    }

    /// Whether it may still be called.
    pub fn is_live(&self) -> bool {
        locked(&self.0).is_some()
    }

    /// Calls it, unless the program ends. An exception goes to ``sys.unraisablehook``.
    pub fn call<T: for<'py> IntoPyObject<'py> + Send>(&self, argument: T) {
        // Counted before the check: the end of the program checks in the other order.
        let _running = RunningCallback::start();
        if has_begun() {
            return;
        }
        thread_exit::prepare_exit();
        let _ = Python::try_attach(|py| {
            // Held for the call: the owner may be dropped meanwhile.
            let Some(callback) = locked(&self.0)
                .as_ref()
                .map(|callback| callback.clone_ref(py))
            else {
                return;
            };
            let callback = callback.bind(py);
            if let Err(error) = callback.call1((argument,)) {
                error.write_unraisable(py, Some(callback));
            }
        });
    }

    /// Calls it for the only time.
    pub fn call_once<T: for<'py> IntoPyObject<'py> + Send>(&self, argument: T) {
        self.call(argument);
        let _ = Python::try_attach(|_| self.clear());
    }
}

/// A Python object, or what holds one, that the library holds, and drops on any of its threads. Once
/// the program ends it is left where it is.
#[derive(Debug)]
pub struct LibraryHeld<T = Py<PyAny>>(Option<T>);

impl<T> LibraryHeld<T> {
    /// Wraps an object.
    pub fn new(object: T) -> LibraryHeld<T> {
        LibraryHeld(Some(object))
    }
}

impl<T> Drop for LibraryHeld<T> {
    fn drop(&mut self) {
        let mut object = self.0.take();
        // Counted before the check, as in `Callback::call`.
        let _running = RunningCallback::start();
        if !has_begun() {
            thread_exit::prepare_exit();
            let _ = Python::try_attach(|_| drop(object.take()));
        }
        std::mem::forget(object);
    }
}

/// An endpoint that notifies its peers of a graceful end of this process.
pub trait Endpoint: Send + Sync {
    /// Closes it as its own `close` does, without a wait for other threads.
    fn end(&self, py: Python<'_>);

    /// Whether it has been closed.
    fn is_closed(&self) -> bool;

    /// Whether no thread uses it any more.
    fn is_over(&self) -> bool;
}

/// An endpoint, and the process that opened it. A forked child inherits its parent's endpoints and
/// must not touch their locks.
type Listed = (Home, Weak<dyn Endpoint>);

/// The endpoints that are open in this process.
static OPEN: Mutex<Vec<Listed>> = Mutex::new(Vec::new());

/// Has an endpoint closed when the program ends, even if it is still referenced then.
///
/// It may run Python, where a signal's handler runs, too: an error is what that raised. Then the
/// caller was interrupted, and drops the endpoint.
pub fn close_at_exit<E: Endpoint + 'static>(endpoint: &Arc<E>) -> PyResult<()> {
    Python::attach(|py| {
        py.import("warpipe._exit")?
            .call_method0("prepare")
            .map(drop)
    })?;
    let endpoint: Weak<dyn Endpoint> = Arc::downgrade(endpoint) as Weak<dyn Endpoint>;
    // Never blocks on the list: a forked child may find it locked for ever. An endpoint that is not
    // in it ends when its last reference is dropped.
    if let Ok(mut open) = OPEN.try_lock() {
        if open.len() == open.capacity() {
            open.retain(|(home, known)| home.is_here() && known.strong_count() > 0);
        }
        open.push((Home::here(), endpoint));
    }
    Ok(())
}

/// Whether an endpoint is open in this process.
#[pyfunction]
pub fn _has_open() -> bool {
    let is_ours = |(home, known): &Listed| home.is_here() && known.strong_count() > 0;
    OPEN.try_lock().is_ok_and(|open| open.iter().any(is_ours))
}

/// Closes all open endpoints, and waits a moment for threads that use them: each leaves its wait
/// within a slice.
fn close_all(py: Python<'_>) {
    let open = OPEN.try_lock();
    let mut open = open.map_or_else(|_| Vec::new(), |mut open| std::mem::take(&mut *open));
    open.retain(|(home, _)| home.is_here());
    open.iter()
        .filter_map(|(_, known)| known.upgrade())
        .for_each(|endpoint| endpoint.end(py));
    let is_over = |(_, known): &Listed| known.upgrade().is_none_or(|endpoint| endpoint.is_over());
    py.detach(|| {
        let start = Instant::now();
        while start.elapsed() < 4 * SLICE && !open.iter().all(is_over) {
            std::thread::park_timeout(Duration::from_millis(1));
        }
    });
}

/// Calls a function for the library, and the end of the program waits for it; what it gives, or
/// None once the program ends: then no callback begins.
#[pyfunction]
pub fn _run<'py>(function: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    thread_exit::prepare_exit();
    // Counted before the check, as in `Callback::call`.
    let _running = RunningCallback::start();
    (!has_begun()).then(|| function.call0()).transpose()
}

/// Calls a function, unless the program ends. An exception goes to ``sys.unraisablehook``.
#[pyfunction]
pub fn _call(function: Py<PyAny>, argument: Py<PyAny>) {
    Callback::new(function).call(argument);
}

/// ``atexit`` calls this: closes all open endpoints, and waits for running callbacks.
#[pyfunction]
pub fn _end(py: Python<'_>) -> PyResult<()> {
    EXITING.store(true, Ordering::SeqCst);
    if let Some(hook) = errors::classes(py)?.bind(py).get_item("_end_quietly")? {
        hook.call0()?;
    }
    close_all(py);
    until(py, Some(PATIENCE), || Ok(!is_callback_running()))
}

/// Prepares for the end of the interpreter that imports the package. It must be the main
/// interpreter: streams, reactors and what they hold belong to the process.
pub fn prepare(py: Python<'_>) -> PyResult<()> {
    // SAFETY: this thread has the interpreter that it asks about.
    if unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) } != 0 {
        let said = "warpipe works in the main interpreter only; import it there, or use processes";
        return Err(PyImportError::new_err(said));
    }
    // Follows forks from now on.
    process::own();
    errors::classes(py).map(drop)
}
