//! A turn: one thread at a time makes calls of the driver that belong together, and holds no lock
//! across them.
//!
//! A call that gives a stream work blocks while the stream's launch queue is full, for as long as
//! the stream waits for a peer. The reactor, which releases such a stream when that peer dies, takes
//! locks with every tick. So a lock is released for the call ([`ReleasableGuard::unlocked`]), and the turn
//! keeps other threads from changing in between what belongs to it. They wait for it no longer than
//! their own limit. No thread of the library waits for a turn.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backoff::Backoff;
use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::runtime::releasable::ReleasableGuard;

/// How long a thread waits for another one that the driver holds up, unless its caller gives a
/// limit.
pub(crate) const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether a thread has the turn: part of the state that its lock guards.
#[derive(Debug, Default)]
pub(crate) struct TurnState {
    is_taken: bool,
    waiting: u32,
}

impl TurnState {
    pub(crate) fn is_taken(&self) -> bool {
        self.is_taken
    }
}

/// State that contains a turn.
pub(crate) trait HasTurn {
    fn turn(&mut self) -> &mut TurnState;
}

impl HasTurn for TurnState {
    fn turn(&mut self) -> &mut TurnState {
        self
    }
}

/// Counts the turns that were taken and those that are over. A deferred drop waits for the turns
/// that may still signal its memory, because they may not have enqueued their signals yet.
///
/// Both are written under the lock, so neither needs a locked bus instruction.
#[derive(Debug, Default)]
pub(crate) struct TurnCounter {
    begun: AtomicU64,
    over: AtomicU64,
}

impl TurnCounter {
    /// The last turn so far. Called under the lock.
    pub(crate) fn last(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    fn begin(&self) {
        self.begun.store(self.last() + 1, Ordering::Relaxed);
    }

    fn end(&self) {
        let over = self.over.load(Ordering::Relaxed) + 1;
        self.over.store(over, Ordering::Release);
    }

    /// Whether this turn and all turns before it are over.
    pub(crate) fn is_over(&self, turn: u64) -> bool {
        self.over.load(Ordering::Acquire) >= turn
    }
}

/// State behind a lock, and its turn.
#[derive(Debug, Default)]
pub(crate) struct TurnLock<S> {
    state: Mutex<S>,
    /// Notified when a turn ends, and by [`notify`](Self::notify).
    changed: Condvar,
    counter: Arc<TurnCounter>,
}

impl<S: HasTurn> TurnLock<S> {
    pub(crate) fn new(state: S) -> TurnLock<S> {
        TurnLock {
            state: Mutex::new(state),
            changed: Condvar::new(),
            counter: Arc::default(),
        }
    }

    /// The lock alone, for whatever needs no turn.
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, S> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn counter(&self) -> &Arc<TurnCounter> {
        &self.counter
    }

    /// Takes the turn, which must be free.
    #[inline]
    pub(crate) fn begin<'a>(&'a self, mut state: MutexGuard<'a, S>) -> TurnGuard<'a, S> {
        debug_assert!(!state.turn().is_taken);
        state.turn().is_taken = true;
        self.counter.begin();
        TurnGuard {
            lock: self,
            state: ReleasableGuard::new(&self.state, state),
        }
    }

    /// Takes the turn as soon as it is free. The error says that another thread's `what` is held
    /// up.
    pub(crate) fn take(
        &self,
        wait: &mut TurnWait,
        what: impl Fn() -> String,
    ) -> Result<TurnGuard<'_, S>> {
        let mut state = self.lock();
        while state.turn().is_taken {
            state = self.wait(state, wait, &what)?;
        }
        Ok(self.begin(state))
    }

    /// Waits for a while for the turn, which another thread has.
    #[cold]
    pub(crate) fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, S>,
        wait: &mut TurnWait,
        what: impl FnOnce() -> String,
    ) -> Result<MutexGuard<'a, S>> {
        let turn = self.counter.last();
        if wait.limit.is_none() && wait.turn != turn {
            wait.turn = turn;
            wait.clock = Stopwatch::default();
            wait.backoff = Backoff::spinning(wait.polls);
        }
        if wait.polls > 0 && wait.backoff.step().is_zero() {
            drop(state);
            wait.backoff.spin(8);
            return Ok(self.lock());
        }
        let limit = wait.limit.unwrap_or(TURN_TIMEOUT);
        let left = limit.max(wait.least).saturating_sub(wait.clock.elapsed());
        if left.is_zero() {
            return Err(Error::Timeout {
                what: format!("another thread's {}, which the driver holds up", what()),
                waited: limit,
            });
        }
        Ok(self.wait_for_change(state, left))
    }

    /// Sleeps at most `limit`, until a turn ends or another thread calls [`notify`](Self::notify).
    pub(crate) fn wait_for_change<'a>(
        &'a self,
        mut state: MutexGuard<'a, S>,
        limit: Duration,
    ) -> MutexGuard<'a, S> {
        state.turn().waiting += 1;
        let waited = self.changed.wait_timeout(state, limit);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.turn().waiting -= 1;
        state
    }

    /// Wakes the threads that wait for a turn or a change.
    pub(crate) fn notify(&self, state: &mut S) {
        if state.turn().waiting > 0 {
            self.changed.notify_all();
        }
    }
}

/// One thread's wait for a turn.
pub(crate) struct TurnWait {
    limit: Option<Duration>,
    least: Duration,
    polls: u32,
    turn: u64,
    clock: Stopwatch,
    backoff: Backoff,
}

impl TurnWait {
    /// Waits at most `limit` in all; without a limit, [`TURN_TIMEOUT`] for each turn of another
    /// thread.
    pub(crate) fn within(limit: Option<Duration>) -> TurnWait {
        TurnWait {
            limit,
            least: Duration::ZERO,
            polls: 0,
            turn: 0,
            clock: Stopwatch::default(),
            backoff: Backoff::spinning(0),
        }
    }

    /// Polls so many times before the thread sleeps, and counts a shorter limit, zero too, as
    /// `least`: for turns that take microseconds unless the driver holds them up, on a thread that
    /// may not be scheduled just now.
    pub(crate) fn polling(self, polls: u32, least: Duration) -> TurnWait {
        TurnWait {
            polls,
            least,
            backoff: Backoff::spinning(polls),
            ..self
        }
    }
}

/// The turn, until this is dropped. The state is locked except during driver calls.
#[derive(Debug)]
pub(crate) struct TurnGuard<'a, S: HasTurn> {
    lock: &'a TurnLock<S>,
    state: ReleasableGuard<'a, S>,
}

impl<'a, S: HasTurn> Deref for TurnGuard<'a, S> {
    type Target = ReleasableGuard<'a, S>;

    #[inline]
    fn deref(&self) -> &ReleasableGuard<'a, S> {
        &self.state
    }
}

impl<'a, S: HasTurn> DerefMut for TurnGuard<'a, S> {
    #[inline]
    fn deref_mut(&mut self) -> &mut ReleasableGuard<'a, S> {
        &mut self.state
    }
}

impl<S: HasTurn> Drop for TurnGuard<'_, S> {
    #[inline]
    fn drop(&mut self) {
        self.relock();
        let lock = self.lock;
        let turn = self.turn();
        turn.is_taken = false;
        let others_wait = turn.waiting > 0;
        lock.counter.end();
        self.unlock();
        if others_wait {
            lock.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_whose_call_panics_is_over_and_the_next_thread_has_it() {
        let lock = TurnLock::new(TurnState::default());
        let wait = || TurnWait::within(Some(Duration::ZERO));
        let before = lock.counter().last();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut turn = lock.take(&mut wait(), String::new).unwrap();
            turn.unlocked(|| {
                assert!(lock.lock().is_taken(), "the lock is free, the turn is not");
                assert!(!lock.counter().is_over(before + 1));
                panic!("a driver call");
            });
        }));
        assert!(panicked.is_err());
        assert!(lock.counter().is_over(before + 1));
        lock.take(&mut wait(), String::new).unwrap();
    }
}
