//! A lock that its holder releases for a call, and takes again. No lock is held across a call of
//! the driver that may block, or while a thread sleeps.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The state of a lock, locked except during [`unlocked`](Self::unlocked).
#[derive(Debug)]
pub(crate) struct ReleasableGuard<'a, S> {
    lock: &'a Mutex<S>,
    /// `None` while the lock is released.
    state: Option<MutexGuard<'a, S>>,
}

impl<'a, S> ReleasableGuard<'a, S> {
    #[inline]
    pub(crate) fn new(lock: &'a Mutex<S>, state: MutexGuard<'a, S>) -> ReleasableGuard<'a, S> {
        let state = Some(state);
        ReleasableGuard { lock, state }
    }

    /// Makes a call without the lock. If the call panics, the lock stays free.
    #[inline]
    pub(crate) fn unlocked<T>(&mut self, call: impl FnOnce() -> T) -> T {
        self.unlock();
        let made = call();
        self.relock();
        made
    }

    /// Releases the lock.
    #[inline]
    pub(crate) fn unlock(&mut self) {
        self.state = None;
    }

    /// Locks the state again, after a call that panicked too.
    #[inline]
    pub(crate) fn relock(&mut self) {
        if self.state.is_none() {
            self.state = Some(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Sleeps until `changed`, at most `limit`, without the lock.
    pub(crate) fn sleep(&mut self, changed: &Condvar, limit: Duration) {
        if let Some(state) = self.state.take() {
            let slept = changed.wait_timeout(state, limit);
            self.state = Some(slept.unwrap_or_else(PoisonError::into_inner).0);
        }
    }
}

impl<S> Deref for ReleasableGuard<'_, S> {
    type Target = S;

    #[inline]
    fn deref(&self) -> &S {
        self.state.as_ref().expect("locked but for `unlocked`")
    }
}

impl<S> DerefMut for ReleasableGuard<'_, S> {
    #[inline]
    fn deref_mut(&mut self) -> &mut S {
        self.state.as_mut().expect("locked but for `unlocked`")
    }
}
