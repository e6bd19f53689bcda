//! Mutexes that a panic does not poison.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A panic under a lock (a policy is the user's code) ends the call that it comes from. What other
/// threads do under the same lock goes on.
pub(crate) trait LockUnpoisoned<T> {
    /// Locks, also after another thread has panicked under the lock.
    fn locked(&self) -> MutexGuard<'_, T>;
}

impl<T> LockUnpoisoned<T> for Mutex<T> {
    #[inline]
    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
