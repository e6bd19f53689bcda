//! The rule for calls that a full launch queue holds up.
//!
//! A call that gives a stream work blocks while the stream's launch queue is full, for as long as
//! the stream waits for a peer. The reactor, which releases such a stream when that peer dies,
//! takes the locks of tables with every tick. So no table's lock is held across such a call; a
//! [`TimedLock`] for sending is. Only users' threads wait for it, each no longer than its own
//! limit.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use crate::atomic::{self, AtomicU32, AtomicU64};
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::wait::Wait;

/// How long a thread waits for another one that the driver holds up, unless its caller gives a
/// limit.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// A send takes microseconds unless the driver holds it up, but its thread may not be scheduled
/// just now.
const MOMENT: Duration = Duration::from_millis(10);

/// Polls before a thread sleeps: a send takes a microsecond.
const POLLS: u32 = 2_000;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and threads may sleep.
const AWAITED: u32 = 2;

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct TimedLock {
    word: AtomicU32,
    /// How often it was taken, and given back. Written by the holder alone.
    begun: AtomicU64,
    over: AtomicU64,
}

/// The lock, held until this is dropped.
#[derive(Debug)]
pub(crate) struct TimedGuard<'a>(&'a TimedLock);

impl TimedLock {
    /// Takes the lock before the wait is over. The error says that another thread's `what` is held
    /// up.
    #[inline]
    pub(crate) fn lock<'w>(
        &self,
        wait: impl Into<Wait<'w>>,
        what: impl FnOnce() -> String,
    ) -> Result<TimedGuard<'_>> {
        match self.try_lock() {
            Some(guard) => Ok(guard),
            None => {
                let wait = wait.into();
                self.within(&wait)
                    .ok_or_else(|| held_up(what(), wait.limit()))
            }
        }
    }

    /// As [`lock`](Self::lock); a shorter limit, zero too, counts as a moment.
    #[inline]
    pub(crate) fn lock_for_a_send<'w>(
        &self,
        wait: impl Into<Wait<'w>>,
        what: impl FnOnce() -> String,
    ) -> Result<TimedGuard<'_>> {
        if let Some(guard) = self.try_lock() {
            return Ok(guard);
        }
        let wait = wait.into();
        let at_least_a_moment = wait.cancellable_within(wait.time_left().max(MOMENT));
        self.within(&at_least_a_moment)
            .ok_or_else(|| held_up(what(), wait.limit()))
    }

    /// Takes the lock if it is free.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<TimedGuard<'_>> {
        let taken = self.word.compare_exchange(FREE, HELD, Acquire, Relaxed);
        taken.ok().map(|_| self.taken())
    }

    fn taken(&self) -> TimedGuard<'_> {
        self.begun.store(self.begun.load(Relaxed) + 1, Relaxed);
        TimedGuard(self)
    }

    #[cold]
    fn within(&self, wait: &Wait<'_>) -> Option<TimedGuard<'_>> {
        let mut backoff = Backoff::spinning(POLLS);
        loop {
            let is_polling = backoff.step().is_zero();
            // The cancellation is asked before the lock is taken: it may run a signal's handler,
            // which may need the same lock.
            let left = match is_polling {
                true => wait.time_left(),
                false => wait.slice(),
            };
            if left.is_zero() {
                return None;
            }
            if is_polling {
                if let Some(guard) = self.try_lock() {
                    return Some(guard);
                }
                backoff.spin(8);
            } else if self.word.swap(AWAITED, Acquire) == FREE {
                return Some(self.taken());
            } else {
                atomic::wait(&self.word, AWAITED, left);
            }
        }
    }

    /// How often the lock has been taken. A thread that takes it later sees what the caller has
    /// changed, if both take a table's lock for that.
    pub(crate) fn last(&self) -> u64 {
        self.begun.load(Relaxed)
    }

    /// Whether this holder and all before it have given the lock back.
    pub(crate) fn is_over(&self, holder: u64) -> bool {
        self.over.load(Acquire) >= holder
    }
}

impl Drop for TimedGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let lock = self.0;
        lock.over.store(lock.over.load(Relaxed) + 1, Release);
        if lock.word.swap(FREE, Release) == AWAITED {
            atomic::wake(&lock.word);
        }
    }
}

fn held_up(what: String, waited: Duration) -> Error {
    let what = format!("another thread's {what}, which the driver holds up");
    Error::timeout(what, waited)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_lock_is_waited_for_as_long_as_its_caller_says_and_comes_when_it_is_free() {
        let lock = TimedLock::default();
        let held = lock.lock(Duration::ZERO, String::new).unwrap();
        for limit in [Duration::ZERO, Duration::from_millis(5)] {
            let exact = lock.lock(limit, || "call".into()).unwrap_err();
            let send = lock.lock_for_a_send(limit, || "call".into()).unwrap_err();
            for late in [exact, send] {
                assert!(
                    matches!(late, Error::Timeout { waited, .. } if waited == limit),
                    "{late}"
                );
            }
        }
        // However long its limit was: a wait goes through several locks.
        let hour = Duration::from_secs(3600);
        let late = lock.lock_for_a_send(Wait::passed(hour), String::new);
        assert!(matches!(late, Err(Error::Timeout { waited, .. }) if waited == hour));
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

    #[test]
    fn a_wait_that_was_cancelled_when_the_lock_comes_does_not_take_it() {
        let lock = TimedLock::default();
        let held = Cell::new(lock.try_lock());
        let cancelled = || {
            drop(held.take());
            true
        };
        let wait = Wait::at_most(Duration::from_secs(60)).unless(&cancelled);
        assert!(lock.lock(wait, String::new).is_err());
        assert!(lock.try_lock().is_some(), "it is free");
    }

    #[test]
    fn a_cancellation_is_asked_while_nobody_has_the_lock() {
        let lock = TimedLock::default();
        let held = Cell::new(lock.try_lock());
        let cancelled = || {
            drop(held.take());
            // As a signal's handler that needs the same lock.
            lock.try_lock().unwrap();
            false
        };
        let wait = Wait::at_most(Duration::MAX).unless(&cancelled);
        lock.lock(wait, String::new).unwrap();
    }

    #[test]
    fn a_holder_whose_call_panics_gives_the_lock_back() {
        let lock = TimedLock::default();
        let before = lock.last();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = lock.try_lock().unwrap();
            assert!(lock.try_lock().is_none() && !lock.is_over(before + 1));
            panic!("a driver call");
        }));
        assert!(panicked.is_err() && lock.is_over(before + 1));
        lock.try_lock().unwrap();
    }
}
