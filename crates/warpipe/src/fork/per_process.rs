//! Statics across `fork`. **This module is marked for unsafe**: it shares what it never frees.
//!
//! A lock that another thread holds while this one forks is held for ever in the child, whose thread it is not. So a
//! static of this library that has a lock, or that another thread may be making just then, is one of two:
//!
//! * [`PerProcess`]: each process has its own, and a forked child begins with a fresh one. It never touches its parent's, nor
//!   drops it: what that refers to is the parent's.
//! * [`InheritedOnFork`]: a forked child goes on with its parent's. Its lock is taken in a [`NoForkSection`] alone, which `fork` waits
//!   for; so nothing under it may wait for anybody.
//!
//! An atomic that is inherited as it is, or a table that is written in a [`NoForkSection`] alone, needs neither.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use super::gate::Pause;
use super::{NoForkSection, OwnerProcess};

/// A value of each process. What is made for one is never freed.
pub(crate) struct PerProcess<T>(AtomicPtr<PerProcessValue<T>>);

struct PerProcessValue<T> {
    owner_process: OwnerProcess,
    value: T,
}

impl<T: Default + Send + Sync> PerProcess<T> {
    pub(crate) const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(ptr::null_mut()))
    }

    /// This process's. Takes no lock.
    pub(crate) fn get(&self) -> &T {
        let owner_process = OwnerProcess::current();
        let mut known = self.0.load(Acquire);
        loop {
            // SAFETY: what has been published is never freed, and never written through.
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
                    // SAFETY: made above, and nobody else knows of it.
                    drop(unsafe { Box::from_raw(made) });
                    known = other;
                }
            }
        }
    }
}

impl<T: Default + Send> PerProcess<Mutex<T>> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.get().lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Own")
    }
}

/// A value that a forked child goes on with.
#[derive(Debug, Default)]
pub(crate) struct InheritedOnFork<T>(Mutex<T>);

/// While it lives, no thread forks.
pub(crate) struct InheritedGuard<'a, T> {
    /// Declared first: let go before the section ends.
    guard: MutexGuard<'a, T>,
    _section: NoForkSection,
}

impl<T> InheritedOnFork<T> {
    pub(crate) const fn new(value: T) -> InheritedOnFork<T> {
        InheritedOnFork(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> InheritedGuard<'_, T> {
        let (_section, guard) = enter_with(|| &self.0);
        InheritedGuard { guard, _section }
    }
}

/// Enters a section and takes a lock that is taken in sections alone. Who waits for it is in none: a
/// signal's handler may interrupt who has it, and fork.
pub(super) fn enter_with<'a, T>(
    lock: impl Fn() -> &'a Mutex<T>,
) -> (NoForkSection, MutexGuard<'a, T>) {
    let mut pause = Pause::default();
    loop {
        let section = NoForkSection::enter();
        match lock().try_lock() {
            Ok(guard) => return (section, guard),
            Err(TryLockError::Poisoned(poison)) => return (section, poison.into_inner()),
            Err(TryLockError::WouldBlock) => drop(section),
        }
        pause.step();
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
    fn a_child_has_a_value_of_its_own_whoever_holds_its_parents_lock() {
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
