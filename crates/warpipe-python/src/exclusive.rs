//! A value for one thread at a time, without a lock that another thread sleeps under.
//!
//! A subscriber belongs to one thread at a time, and its waits are long. A thread that waits here
//! has a limit, does not hold the interpreter, and can be interrupted.

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
    waiting: u32,
}

impl<T> Exclusive<T> {
    /// State shared by all threads.
    pub fn new(value: T) -> Exclusive<T> {
        Exclusive {
            state: Mutex::new(ExclusiveState {
                value: Some(Box::new(value)),
                waiting: 0,
            }),
            returned: Condvar::new(),
        }
    }

    /// Runs `work` on the value when no other thread has it; `None` if that does not happen within
    /// `limit`.
    pub fn with<R>(&self, limit: Duration, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut state = locked(&self.state);
        if state.value.is_none() {
            state.waiting += 1;
            (state, _) = self
                .returned
                .wait_timeout_while(state, limit, |state| state.value.is_none())
                .unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        let mut value = state.value.take()?;
        drop(state);
        let result = work(&mut value);
        let mut state = locked(&self.state);
        state.value = Some(value);
        let others = state.waiting > 0;
        drop(state);
        // A system call, also where no thread waits.
        if others {
            self.returned.notify_one();
            // Otherwise this thread, in a loop, would take it again before the woken thread runs.
            std::thread::yield_now();
        }
        Some(result)
    }
}
