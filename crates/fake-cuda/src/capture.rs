//! Stream capture: work of a capturing stream is recorded, and calls that are illegal meanwhile
//! invalidate the capture.
//!
//! As measured on an H100, driver 580.159: stream writes, waits, batches, copies and launches on a
//! capturing stream are recorded and succeed. While a capture in global mode is under way,
//! `cuStreamQuery`, `cuEventQuery`, `cuMemHostRegister` and `cuMemHostUnregister` on any other
//! thread fail *and invalidate the capture*, unless that thread's mode is relaxed
//! (`cuThreadExchangeStreamCaptureMode`). Asking for the state of the capturing stream itself, or
//! of an event that was recorded in it, does so in every mode.
//!
//! A graph is the recorded work in the order of its recording, which is one of its valid orders.
//! Streams join a capture by waiting for an event of it. Dependencies of several streams that were
//! not joined again are not checked.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::ThreadId;

use crate::status::*;
use crate::stream;
use crate::work::Work;

const GLOBAL: c_uint = 0;
const THREAD_LOCAL: c_uint = 1;
const RELAXED: c_uint = 2;

thread_local! {
    static MODE: Cell<c_uint> = const { Cell::new(GLOBAL) };
}

/// One capture, shared by its streams and events.
pub struct Capture {
    mode: c_uint,
    thread: ThreadId,
    /// The handle of the stream that it began on.
    origin: usize,
    /// Whether that stream is ordered with the legacy default stream.
    is_blocking: bool,
    device: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_invalid: bool,
    is_over: bool,
    work: Vec<Work>,
}

/// The captures under way.
static ACTIVE: Mutex<Vec<Weak<Capture>>> = Mutex::new(Vec::new());

impl Capture {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records one piece of work in the graph.
    pub fn record(&self, work: Work) -> Outcome {
        let mut state = self.state();
        if state.is_invalid {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        state.work.push(work);
        Ok(())
    }

    pub fn invalidate(&self) {
        self.state().is_invalid = true;
    }

    pub fn is_over(&self) -> bool {
        self.state().is_over
    }

    fn is_of_this_thread(&self) -> bool {
        self.thread == std::thread::current().id()
    }

    /// Whether this thread, in its mode, must not make unsafe calls while this one is under way.
    fn forbids(&self, mode: c_uint) -> bool {
        match mode {
            RELAXED => false,
            _ if self.is_of_this_thread() => self.mode != RELAXED,
            GLOBAL => self.mode == GLOBAL,
            _ => false,
        }
    }
}

fn active() -> Vec<Arc<Capture>> {
    let mut list = ACTIVE.lock().unwrap_or_else(PoisonError::into_inner);
    list.retain(|capture| capture.upgrade().is_some_and(|capture| !capture.is_over()));
    list.iter().filter_map(Weak::upgrade).collect()
}

/// Every call that is unsafe while a stream captures begins with this: it fails, and ends the
/// captures that forbid it.
pub fn check_unsafe_call() -> Outcome {
    let mode = MODE.get();
    let forbidding: Vec<_> = active()
        .into_iter()
        .filter(|capture| capture.forbids(mode))
        .collect();
    forbidding.iter().for_each(|capture| capture.invalidate());
    if forbidding.is_empty() {
        Ok(())
    } else {
        Err(STREAM_CAPTURE_UNSUPPORTED)
    }
}

/// The capture that blocks the legacy default stream of `device`.
pub fn of_blocking_streams(device: usize) -> Option<Arc<Capture>> {
    active()
        .into_iter()
        .find(|capture| capture.is_blocking && capture.device == device)
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_uint) -> c_int {
    answer("cuStreamBeginCapture_v2", Needs::Context, || {
        if mode > RELAXED {
            return Err(INVALID_VALUE);
        }
        let found = stream::find(stream)?;
        if stream::is_legacy(stream) {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        let capture = Arc::new(Capture {
            mode,
            thread: std::thread::current().id(),
            origin: stream.addr(),
            is_blocking: found.is_blocking,
            device: found.device,
            state: Mutex::default(),
        });
        found.begin(&capture)?;
        ACTIVE
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::downgrade(&capture));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> c_int {
    answer("cuStreamEndCapture", Needs::Context, || {
        let capture = stream::find(stream)?.capture().ok_or(ILLEGAL_STATE)?;
        if capture.origin != stream.addr() {
            return Err(STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && !capture.is_of_this_thread() {
            return Err(STREAM_CAPTURE_WRONG_THREAD);
        }
        let mut state = capture.state();
        state.is_over = true;
        if state.is_invalid {
            // SAFETY: the caller's out pointer.
            unsafe { give(graph, ptr::null_mut()) }?;
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        let made = keep(std::mem::take(&mut state.work));
        // SAFETY: as above.
        unsafe { give(graph, made) }
    })
}

/// `CU_STREAM_CAPTURE_STATUS_...`: 0 none, 1 active, 2 invalidated.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_uint) -> c_int {
    answer("cuStreamIsCapturing", Needs::Context, || {
        let found = stream::find(stream)?;
        if stream::is_legacy(stream) && of_blocking_streams(found.device).is_some() {
            // This query does not invalidate the capture.
            return Err(STREAM_CAPTURE_IMPLICIT);
        }
        let answer = found
            .capture()
            .map_or(0, |capture| if capture.state().is_invalid { 2 } else { 1 });
        // SAFETY: the caller's out pointer.
        unsafe { give(status, answer) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> c_int {
    answer("cuThreadExchangeStreamCaptureMode", Needs::Init, || {
        if mode.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, so the caller's live value.
        let wanted = unsafe { mode.read() };
        if ![GLOBAL, THREAD_LOCAL, RELAXED].contains(&wanted) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: as above.
        unsafe { mode.write(MODE.replace(wanted)) };
        Ok(())
    })
}

/// Graphs and executable graphs, by handle.
static GRAPHS: Mutex<Option<HashMap<usize, Arc<Vec<Work>>>>> = Mutex::new(None);

fn graphs<T>(body: impl FnOnce(&mut HashMap<usize, Arc<Vec<Work>>>) -> T) -> T {
    body(
        GRAPHS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_default(),
    )
}

fn keep(work: Vec<Work>) -> *mut c_void {
    let graph = Arc::new(work);
    let handle = Arc::as_ptr(&graph).addr();
    graphs(|graphs| graphs.insert(handle, graph));
    ptr::without_provenance_mut(handle)
}

fn find(graph: *mut c_void) -> Outcome<Arc<Vec<Work>>> {
    graphs(|graphs| graphs.get(&graph.addr()).cloned()).ok_or(INVALID_HANDLE)
}

fn forget(graph: *mut c_void) -> Outcome {
    graphs(|graphs| graphs.remove(&graph.addr()))
        .map(drop)
        .ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphInstantiateWithFlags(
    out: *mut *mut c_void,
    graph: *mut c_void,
    flags: u64,
) -> c_int {
    answer("cuGraphInstantiateWithFlags", Needs::Context, || {
        if flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        let made = keep(find(graph)?.to_vec());
        // SAFETY: the caller's out pointer.
        unsafe { give(out, made) }
    })
}

/// Each launch does the recorded work once more, with the values of its recording.
#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(graph: *mut c_void, stream: *mut c_void) -> c_int {
    answer("cuGraphLaunch", Needs::Context, || {
        let (graph, stream) = (find(graph)?, stream::find(stream)?);
        graph.iter().try_for_each(|work| stream.push(work.clone()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: *mut c_void) -> c_int {
    answer("cuGraphDestroy", Needs::Init, || forget(graph))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(graph: *mut c_void) -> c_int {
    answer("cuGraphExecDestroy", Needs::Init, || forget(graph))
}
