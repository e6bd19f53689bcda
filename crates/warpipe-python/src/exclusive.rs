//! A value for one thread at a time, without a lock that another thread sleeps under.
//!
//! A subscriber belongs to one thread at a time, and its waits are long. A thread that waits here
//! has a limit, does not hold the interpreter, and can be interrupted. Closing does not wait for a
//! receive in progress.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The value of a lock, also behind a panic: no state here is left between two steps.
pub fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value that one thread at a time may use.
#[derive(Debug)]
pub struct Exclusive<T> {
    state: Mutex<ExclusiveState<T>>,
    returned: Condvar,
}

#[derive(Debug)]
struct ExclusiveState<T> {
    /// `None` while a thread has the value.
    /// On the heap, so that it is not copied at each use.
    value: Option<Box<T>>,
    /// A thread has the value.
    is_borrowed: bool,
    closed: bool,
    waiting: u32,
}

/// The value is gone for good.
#[derive(Debug, PartialEq, Eq)]
pub struct Closed;

impl<T> Exclusive<T> {
    /// State shared by all threads.
    pub fn new(value: T) -> Exclusive<T> {
        Exclusive {
            state: Mutex::new(ExclusiveState {
                value: Some(Box::new(value)),
                is_borrowed: false,
                closed: false,
                waiting: 0,
            }),
            returned: Condvar::new(),
        }
    }

    /// Runs `work` on the value when no other thread has it; `None` if that does not happen within
    /// `limit`.
    pub fn with<R>(
        &self,
        limit: Duration,
        work: impl FnOnce(&mut T) -> R,
    ) -> Result<Option<R>, Closed> {
        let mut state = locked(&self.state);
        let busy = |state: &mut ExclusiveState<T>| state.value.is_none() && !state.closed;
        if busy(&mut state) {
            state.waiting += 1;
            (state, _) = self
                .returned
                .wait_timeout_while(state, limit, busy)
                .unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        if state.closed {
            return Err(Closed);
        }
        let Some(mut value) = state.value.take() else {
            return Ok(None);
        };
        state.is_borrowed = true;
        drop(state);
        let result = work(&mut value);
        self.put_back(value);
        Ok(Some(result))
    }

    fn put_back(&self, value: Box<T>) {
        let mut state = locked(&self.state);
        if state.closed {
            drop(state);
            drop(value);
            locked(&self.state).is_borrowed = false;
            return;
        }
        (state.value, state.is_borrowed) = (Some(value), false);
        let others = state.waiting > 0;
        drop(state);
        // A system call, also where no thread waits.
        if others {
            self.returned.notify_one();
            // Otherwise this thread, in a loop, would take it again before the woken thread runs.
            std::thread::yield_now();
        }
    }

    /// Ends it: at once if no thread has it, else when it is put back.
    pub fn close(&self) {
        let mut state = locked(&self.state);
        state.closed = true;
        let value = state.value.take();
        drop(state);
        self.returned.notify_all();
        drop(value);
    }

    /// Whether it has ended, and no thread has it any more.
    pub fn is_over(&self) -> bool {
        let state = locked(&self.state);
        state.closed && !state.is_borrowed
    }

    /// Whether it has ended.
    pub fn is_closed(&self) -> bool {
        locked(&self.state).closed
    }
}
