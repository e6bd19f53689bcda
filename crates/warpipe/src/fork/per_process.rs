//! Statics across `fork`. **This module is marked for unsafe**: it shares values that it never
//! frees.
//!
//! A lock that another thread holds during a fork stays locked in the child, which does not have
//! that thread. So a static that has a lock, or that another thread may be making during a fork, is
//! a [`PerProcess`] or an [`InheritedOnFork`]. An atomic that is inherited as it is, or a table
//! that is written only in a [`NoForkSection`], needs neither.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Mutex, MutexGuard};

use super::{NoForkSection, OwnerProcess};
use crate::mutex::LockUnpoisoned;

/// A value of each process: a forked child begins with a fresh one, and never touches or drops its
/// parent's. A value, once made, is never freed.
pub struct PerProcess<T>(AtomicPtr<PerProcessValue<T>>);

struct PerProcessValue<T> {
    owner_process: OwnerProcess,
    value: T,
}

impl<T: Default + Send + Sync> PerProcess<T> {
    /// Without a value yet.
    #[expect(clippy::new_without_default, reason = "for statics alone")]
    pub const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(ptr::null_mut()))
    }

    /// This process's value. Takes no lock.
    pub fn get(&self) -> &T {
        let owner_process = OwnerProcess::current();
        let mut known = self.0.load(Acquire);
        loop {
            // SAFETY: a published value is never freed, and never written through.
            if let Some(made) = unsafe { known.as_ref() }
                && made.owner_process.is_current()
            {
                return &made.value;
            }
            let made = Box::into_raw(Box::new(PerProcessValue {
                owner_process,
                value: T::default(),
            }));
            match self.0.compare_exchange(known, made, AcqRel, Acquire) {
                // SAFETY: published just now, and never freed.
                Ok(_) => return unsafe { &(*made).value },
                Err(other) => {
                    // SAFETY: made above, and no other thread has its address.
                    drop(unsafe { Box::from_raw(made) });
                    known = other;
                }
            }
        }
    }
}

impl<T: Default + Send> PerProcess<Mutex<T>> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.get().locked()
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PerProcess")
    }
}

/// A value that a forked child goes on with.
#[derive(Debug, Default)]
pub(crate) struct InheritedOnFork<T>(Mutex<T>);

/// While it lives, no thread forks.
pub(crate) struct InheritedGuard<'a, T> {
    /// Declared first: released before the section ends.
    guard: MutexGuard<'a, T>,
    _section: NoForkSection,
}

impl<T> InheritedOnFork<T> {
    pub(crate) const fn new(value: T) -> InheritedOnFork<T> {
        InheritedOnFork(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> InheritedGuard<'_, T> {
        let section = NoForkSection::enter();
        InheritedGuard {
            guard: self.0.locked(),
            _section: section,
        }
    }
}

impl<T> Deref for InheritedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for InheritedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::hostile::{in_a_forked_child, while_locked};

    #[test]
    fn a_child_has_a_value_of_its_own_even_if_its_parents_lock_is_held() {
        static OWN: PerProcess<Mutex<u32>> = PerProcess::new();
        *OWN.lock() = 7;
        while_locked(&OWN, || {
            in_a_forked_child(|| *OWN.lock() == 0 && OWN.try_set(8))
        });
        assert_eq!(*OWN.lock(), 7);
    }

    impl PerProcess<Mutex<u32>> {
        fn try_set(&self, value: u32) -> bool {
            *self.lock() = value;
            *self.lock() == value
        }
    }

    #[test]
    fn a_child_goes_on_with_what_is_common_and_finds_no_lock_held() {
        static COMMON: InheritedOnFork<u32> = InheritedOnFork::new(0);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        *COMMON.lock() += 1;
                    }
                });
            }
            let forks = std::panic::catch_unwind(|| {
                for _ in 0..50 {
                    let least = *COMMON.lock();
                    in_a_forked_child(|| *COMMON.lock() >= least);
                }
            });
            is_over.store(true, Ordering::Relaxed);
            forks.unwrap();
        });
    }
}
