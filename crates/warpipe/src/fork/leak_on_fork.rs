//! Handles across `fork`. **This module is marked for unsafe**: it decides whether a value is
//! dropped.
//!
//! A forked child has a copy of each handle of its parent, and neither the threads nor the
//! descriptors that the handle works with. Its locks may be held by threads that the child does not
//! have. So the part of a handle that has something to close lies in a [`LeakOnFork`].

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use super::OwnerProcess;
use crate::error::Result;

/// A value of the process that made it. A forked child does not drop it, nor anything that it owns;
/// so the value's own `Drop` runs in its process only, and has no fork to think of.
#[derive(Clone)]
pub(crate) struct LeakOnFork<T> {
    value: ManuallyDrop<T>,
    owner_process: OwnerProcess,
}

impl<T> LeakOnFork<T> {
    pub(crate) fn new(value: T) -> LeakOnFork<T> {
        LeakOnFork {
            value: ManuallyDrop::new(value),
            owner_process: OwnerProcess::current(),
        }
    }

    /// The value, for an operation that a forked child may not do.
    ///
    /// # Errors
    /// [`StateFault::Forked`](crate::StateFault::Forked).
    #[inline]
    pub(crate) fn get(&self) -> Result<&T> {
        self.owner_process.check()?;
        Ok(&self.value)
    }
}

/// Also in a forked child: for fields that are only read, such as a name.
impl<T> Deref for LeakOnFork<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for LeakOnFork<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for LeakOnFork<T> {
    fn drop(&mut self) {
        if self.owner_process.is_current() {
            // SAFETY: dropped here only, and `self` is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for LeakOnFork<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::error::{Error, StateFault};
    use crate::hostile::in_a_forked_child;

    #[test]
    fn a_child_neither_uses_nor_drops_the_value_of_its_parent() {
        let value = Arc::new(7);
        let mut handle = Some(LeakOnFork::new(value.clone()));
        in_a_forked_child(|| {
            // The child's copy of the handle.
            let copy = handle.take().unwrap();
            let is_refused =
                matches!(copy.get(), Err(Error::State(StateFault::Forked))) && **copy == 7;
            drop(copy);
            is_refused && Arc::strong_count(&value) == 2
        });
        assert_eq!(
            handle.as_ref().map(|handle| handle.get().is_ok()),
            Some(true)
        );
        drop(handle);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
