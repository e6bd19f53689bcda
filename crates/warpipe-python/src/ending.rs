//! The end of the interpreter, and threads that are inside of it then.
//! **This module is marked for unsafe**: it calls Python in a way that its end cannot unwind, and asks for the interpreter's
//! number.
//!
//! A thread that wants the interpreter back while that ends is ended by it; before CPython 3.14 by unwinding its stack
//! (`pthread_exit`), and what Rust holds there is dropped without the interpreter: a crash. PyO3 parks threads that were
//! in `detach`. It cannot know of Python that runs below us, a tensor's `__dlpack__` for example. So who calls Python
//! from here says so ([`enter`]); once the program ends (`atexit`), no other thread than the one that ends it gets in, and
//! that one waits for those who are.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::wait::in_slices;

/// How long the end of the program waits for those who are inside.
const PATIENCE: Duration = Duration::from_secs(10);

/// The process in the upper half, how many are inside in the lower: of a parent's threads none goes on in a child.
static INSIDE: AtomicU64 = AtomicU64::new(0);
/// The process that ends; 0 for none.
static ENDING: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static ENDS_IT: Cell<bool> = const { Cell::new(false) };
    /// How often this thread is inside: Python that we call may call us.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// One call of Python that may take long enough for the interpreter to end meanwhile.
#[derive(Debug)]
pub struct Inside(u32);

impl Inside {
    fn begin() -> Inside {
        let own = std::process::id();
        let more = |inside: u64| Some(if of(inside) == own { inside + 1 } else { u64::from(own) << 32 | 1 });
        let _ = INSIDE.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        DEPTH.set(DEPTH.get() + 1);
        Inside(own)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let less = |inside: u64| (of(inside) == self.0).then(|| inside.saturating_sub(1));
        let _ = INSIDE.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        DEPTH.set(DEPTH.get() - 1);
    }
}

fn of(inside: u64) -> u32 {
    (inside >> 32) as u32
}

fn is_anybody_inside() -> bool {
    let inside = INSIDE.load(Ordering::SeqCst);
    of(inside) == std::process::id() && inside as u32 > 0
}

/// Whether this thread, which has just been counted, came too late.
fn is_over() -> bool {
    has_begun() && !ENDS_IT.get() && DEPTH.get() == 1
}

/// To be held while Python runs below. A thread that comes when the program ends stays here: it is one that the program
/// does not wait for.
pub fn enter(py: Python<'_>) -> Inside {
    // Counted before the look: who ends the program looks in the other order.
    let inside = Inside::begin();
    if !is_over() {
        return inside;
    }
    drop(inside);
    py.detach(|| park())
}

fn park() -> ! {
    loop {
        std::thread::park();
    }
}

/// Whether the program has begun to end: nothing new is asked of the interpreter.
pub fn has_begun() -> bool {
    ENDING.load(Ordering::SeqCst) == std::process::id()
}

/// Whether somebody is inside who does not come out any more.
pub fn is_anybody_stuck() -> bool {
    has_begun() && is_anybody_inside()
}

/// Calls Python from a thread of the library's, unless the program ends. What it raises goes to ``sys.unraisablehook``.
pub fn call<T: for<'py> IntoPyObject<'py> + Send>(callback: &Py<PyAny>, argument: T) {
    let _inside = Inside::begin();
    if is_over() {
        return;
    }
    let _ = Python::try_attach(|py| {
        let arguments = (argument,).into_pyobject(py);
        if let Err(error) = arguments.and_then(|arguments| call_or_park(callback.bind(py), &arguments)) {
            error.write_unraisable(py, Some(callback.bind(py)));
        }
    });
}

type Call = unsafe extern "C" fn(*mut ffi::PyObject, *mut ffi::PyObject, *mut ffi::PyObject) -> *mut ffi::PyObject;
type UnwindingCall =
    unsafe extern "C-unwind" fn(*mut ffi::PyObject, *mut ffi::PyObject, *mut ffi::PyObject) -> *mut ffi::PyObject;

/// A callback is somebody else's, and may never return: its thread is parked when it is unwound.
fn call_or_park<'py>(callback: &Bound<'py, PyAny>, arguments: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the same function; what it unwinds with is caught below.
    let call: UnwindingCall = unsafe { std::mem::transmute::<Call, UnwindingCall>(ffi::PyObject_Call) };
    let park = Park;
    // SAFETY: a live object, a tuple, no keywords; the result is a new reference, or null with an exception set.
    let result = unsafe { call(callback.as_ptr(), arguments.as_ptr(), std::ptr::null_mut()) };
    std::mem::forget(park);
    // SAFETY: as above.
    unsafe { Bound::from_owned_ptr_or_err(callback.py(), result) }
}

/// Dropped only when the stack is unwound by the end of the interpreter: nothing above may be dropped then.
struct Park;

impl Drop for Park {
    fn drop(&mut self) {
        park();
    }
}

/// What ``atexit`` calls: waits for those who are inside.
#[pyfunction]
fn _end(py: Python<'_>) -> PyResult<()> {
    ENDS_IT.set(true);
    ENDING.store(std::process::id(), Ordering::SeqCst);
    let look = |slice: Duration| {
        let inside = is_anybody_inside();
        if inside {
            std::thread::park_timeout(slice.min(Duration::from_millis(1)));
        }
        Ok((!inside).then_some(()))
    };
    in_slices(py, Some(PATIENCE), look).map(drop)
}

/// Prepares for the end of the interpreter that imports the package, which must be the main one: streams, watchers and
/// what they keep are the process's.
pub fn prepare(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // SAFETY: this thread has the interpreter that it asks about.
    if unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) } != 0 {
        let said = "warpipe works in the main interpreter only; import it there, or use processes";
        return Err(PyImportError::new_err(said));
    }
    let end = wrap_pyfunction!(_end, module)?;
    module.py().import("atexit")?.call_method1("register", (end,)).map(drop)
}
