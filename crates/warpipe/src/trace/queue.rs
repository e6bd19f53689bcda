//! The queue of events, and the thread that empties it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use tracing::level_filters::LevelFilter;

use super::TraceEvent;
use crate::fork::per_process::PerProcess;
use crate::fork::thread::Thread;

/// The most events that wait for the subscriber.
pub(super) const WAITING_MAX: usize = 4096;

/// How long the thread waits for another event before it ends.
const IDLE_MAX: Duration = Duration::from_secs(1);

/// A forked child has a queue of its own, and no thread until its first event.
static QUEUE: PerProcess<Queue> = PerProcess::new();

#[derive(Default)]
struct Queue {
    state: Mutex<Waiting>,
    pushed: Condvar,
}

#[derive(Default)]
struct Waiting {
    events: VecDeque<TraceEvent>,
    dropped: u64,
    has_thread: bool,
}

/// Whether there is a subscriber that wants anything.
pub(super) fn is_wanted() -> bool {
    LevelFilter::current() != LevelFilter::OFF
}

pub(super) fn push(event: TraceEvent) {
    if event.level() > LevelFilter::current() {
        return;
    }
    let queue = QUEUE.get();
    let mut state = queue.state.lock().unwrap_or_else(PoisonError::into_inner);
    if state.events.len() == WAITING_MAX {
        state.dropped += 1;
        return;
    }
    state.events.push_back(event);
    if state.has_thread {
        queue.pushed.notify_one();
        return;
    }
    // If no thread can be started, the next event tries again.
    state.has_thread = Thread::start("warpipe-trace", || QUEUE.get().run()).is_ok();
}

impl Queue {
    /// Gives events to the subscriber until none has come for a while.
    fn run(&self) {
        while let Some((events, dropped)) = self.next() {
            for event in events {
                give(&event);
            }
            if dropped > 0 {
                give(&TraceEvent::EventsDropped(dropped));
            }
        }
    }

    /// All events that wait, and how many there was no room for. `None` ends the thread.
    fn next(&self) -> Option<(VecDeque<TraceEvent>, u64)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .pushed
            .wait_timeout_while(state, IDLE_MAX, |state| state.events.is_empty());
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.events.is_empty() {
            state.has_thread = false;
            return None;
        }
        let dropped = std::mem::take(&mut state.dropped);
        Some((std::mem::take(&mut state.events), dropped))
    }
}

/// A subscriber that panics loses this event alone: the panic's message has been printed.
fn give(event: &TraceEvent) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| event.give())) {
        // The payload is the subscriber's as well, and may panic when it is dropped.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(payload))).map_err(std::mem::forget);
    }
}
