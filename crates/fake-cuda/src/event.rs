//! Events: how often recorded, and how many of those records a stream has reached.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::capture::{self, Capture};
use crate::status::*;
use crate::stream;
use crate::work::Work;

#[derive(Default)]
pub struct Event {
    turns: Mutex<Turns>,
    changed: Condvar,
    is_interprocess: bool,
    /// The capture in which it was recorded last, if it was in one.
    capture: Mutex<Option<Arc<Capture>>>,
}

/// The driver's limit, for a process.
const INTERPROCESS_MAX: usize = 4096;

#[derive(Default)]
struct Turns {
    recorded: u64,
    complete: u64,
}

impl Event {
    fn record(&self) -> u64 {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.recorded += 1;
        turns.recorded
    }

    fn capture(&self) -> Option<Arc<Capture>> {
        self.capture
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn last_recorded(&self) -> u64 {
        self.turns
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .recorded
    }

    fn is_complete(&self) -> bool {
        let turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.complete >= turns.recorded
    }

    pub fn complete(&self, turn: u64) {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.complete = turns.complete.max(turn);
        self.changed.notify_all();
    }

    pub fn wait(&self, turn: u64) {
        let turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        drop(
            self.changed
                .wait_while(turns, |turns| turns.complete < turn),
        );
    }
}

static EVENTS: Mutex<Option<HashMap<usize, Arc<Event>>>> = Mutex::new(None);

fn with<T>(body: impl FnOnce(&mut HashMap<usize, Arc<Event>>) -> T) -> T {
    body(
        EVENTS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_default(),
    )
}

/// Destroys all of them, even with waits pending.
pub fn end_all() {
    let ended = with(std::mem::take);
    ended.values().for_each(|event| event.complete(u64::MAX));
}

fn find(event: *mut c_void) -> Outcome<Arc<Event>> {
    with(|events| events.get(&event.addr()).cloned()).ok_or(INVALID_HANDLE)
}

/// A new event; it is interprocess if asked for and the driver's limit allows it.
pub fn create(is_interprocess: bool) -> Outcome<*mut c_void> {
    let event = Arc::new(Event {
        is_interprocess,
        ..Event::default()
    });
    let handle = Arc::as_ptr(&event).addr();
    with(|events| {
        let is_full = || {
            events
                .values()
                .filter(|event| event.is_interprocess)
                .count()
                >= INTERPROCESS_MAX
        };
        if is_interprocess && is_full() {
            return Err(OUT_OF_MEMORY);
        }
        events.insert(handle, event);
        Ok(ptr::without_provenance_mut(handle))
    })
}

pub fn is_interprocess(event: *mut c_void) -> Outcome<bool> {
    Ok(find(event)?.is_interprocess)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(out: *mut *mut c_void, flags: u32) -> c_int {
    answer("cuEventCreate", Needs::Context, || {
        const DISABLE_TIMING: u32 = 2;
        const INTERPROCESS: u32 = 4;
        let is_interprocess = flags & INTERPROCESS != 0;
        if is_interprocess && flags & DISABLE_TIMING == 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's out pointer.
        unsafe { give(out, create(is_interprocess)?) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> c_int {
    answer("cuEventDestroy_v2", Needs::Context, || {
        with(|events| events.remove(&event.addr()))
            .map(drop)
            .ok_or(INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> c_int {
    answer("cuEventRecord", Needs::Context, || {
        let (event, stream) = (find(event)?, stream::find_for_work(stream)?);
        let capture = stream.capture();
        event
            .capture
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(&capture);
        match capture {
            // A captured event needs no work: it marks a place in the graph.
            Some(_) => Ok(()),
            None => {
                let turn = event.record();
                stream.push(Work::Record { event, turn })
            }
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: *mut c_void) -> c_int {
    answer("cuEventQuery", Needs::Context, || {
        stream::check_fault()?;
        let event = find(event)?;
        if let Some(capture) = event.capture() {
            capture.invalidate();
            return Err(CAPTURED_EVENT);
        }
        capture::check_unsafe_call()?;
        if event.is_complete() {
            Ok(())
        } else {
            Err(NOT_READY)
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: u32) -> c_int {
    answer("cuStreamWaitEvent", Needs::Context, || {
        let (event, stream) = (find(event)?, stream::find_for_work(stream)?);
        match (event.capture(), stream.capture()) {
            // The stream joins the event's capture. A capture's work is one sequence, so the stream
            // is after the event already.
            (Some(of_event), None) => stream.begin(&of_event),
            (Some(of_event), Some(of_stream)) if Arc::ptr_eq(&of_event, &of_stream) => Ok(()),
            (_, Some(capture)) => {
                capture.invalidate();
                Err(STREAM_CAPTURE_ISOLATION)
            }
            (None, None) => {
                let turn = event.last_recorded();
                stream.push(Work::Await { event, turn })
            }
        }
    })
}
