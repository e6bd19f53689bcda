//! A lock that is held across driver calls, which a full launch queue holds up for as long as a
//! stream waits. Any other caller waits no longer than its own limit. No thread of the library
//! takes such a lock.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};

/// How long a thread waits for another one that the driver holds up, unless its caller gives a
/// limit.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct TimedLock {
    state: Mutex<TimedLockState>,
    is_free: Condvar,
}

#[derive(Debug, Default)]
struct TimedLockState {
    is_held: bool,
    waiting: u32,
}

/// The lock, held until this is dropped.
#[derive(Debug)]
pub(crate) struct TimedGuard<'a>(&'a TimedLock);

impl TimedLock {
    /// Takes the lock within `limit`. The error says that another thread's `what` is held up.
    pub(crate) fn lock(
        &self,
        limit: Duration,
        what: impl FnOnce() -> String,
    ) -> Result<TimedGuard<'_>> {
        let mut state = self.state();
        if state.is_held {
            state.waiting += 1;
            let waited = self
                .is_free
                .wait_timeout_while(state, limit, |state| state.is_held);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
            if state.is_held {
                let what = format!("another thread's {}, which the driver holds up", what());
                return Err(Error::Timeout {
                    what,
                    waited: limit,
                });
            }
        }
        state.is_held = true;
        Ok(TimedGuard(self))
    }

    fn state(&self) -> MutexGuard<'_, TimedLockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TimedGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_held = false;
        let others_wait = state.waiting > 0;
        drop(state);
        if others_wait {
            self.0.is_free.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_waited_for_as_long_as_its_caller_says_and_comes_when_it_is_free() {
        let lock = TimedLock::default();
        let held = lock.lock(Duration::ZERO, String::new).unwrap();
        for limit in [Duration::ZERO, Duration::from_millis(5)] {
            let late = lock.lock(limit, || "call".into()).unwrap_err();
            assert!(
                matches!(late, Error::Timeout { waited, .. } if waited == limit),
                "{late}"
            );
        }
        std::thread::scope(|scope| {
            let waiting = [0; 3]
                .map(|_| scope.spawn(|| lock.lock(Duration::from_secs(60), String::new).map(drop)));
            drop(held);
            waiting
                .into_iter()
                .for_each(|waiting| waiting.join().unwrap().unwrap());
        });
        lock.lock(Duration::ZERO, String::new).unwrap();
    }
}
