//! A table of the values that this process has open, so that opening one again finds it. The table
//! keeps no value alive.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, Weak};

use crate::error::Result;
use crate::fork::per_process::PerProcess;

/// Values by key, as long as another owner holds them.
#[derive(Debug)]
pub(crate) struct WeakCache<K, V> {
    /// Never held while a value is made or dropped: both may call the driver.
    entries: PerProcess<Mutex<Entries<K, V>>>,
}

#[derive(Debug)]
struct Entries<K, V> {
    by_key: HashMap<K, Weak<V>>,
    /// How many of them there were, twice, when those without a value were removed.
    tidy_at: usize,
}

impl<K, V> Default for Entries<K, V> {
    fn default() -> Entries<K, V> {
        Entries {
            by_key: HashMap::new(),
            tidy_at: 0,
        }
    }
}

impl<K: Hash + Eq + Clone + Send, V: Send + Sync> WeakCache<K, V> {
    pub(crate) const fn new() -> WeakCache<K, V> {
        WeakCache {
            entries: PerProcess::new(),
        }
    }

    /// The value of `key`, made if it is not open, or not valid any more. Of two callers that make
    /// it at the same time, the later one gets the other's value, and drops its own.
    pub(crate) fn get_or(
        &self,
        key: &K,
        is_good: impl Fn(&V) -> bool,
        make: impl FnOnce() -> Result<Arc<V>>,
    ) -> Result<Arc<V>> {
        let known = self.get(key);
        if let Some(value) = known.as_ref().filter(|value| is_good(value)) {
            return Ok(value.clone());
        }
        let made = make()?;
        let mut entries = self.entries.lock();
        let present = entries.by_key.get(key).and_then(Weak::upgrade);
        let is_new = |it: &Arc<V>| !known.as_ref().is_some_and(|known| Arc::ptr_eq(it, known));
        let other = present.filter(is_new);
        if other.is_none() {
            entries.insert(key, &made);
        }
        drop(entries);
        Ok(other.filter(|other| is_good(other)).unwrap_or(made))
    }

    /// The value of `key`, if it is open.
    pub(crate) fn get(&self, key: &K) -> Option<Arc<V>> {
        self.entries.lock().by_key.get(key)?.upgrade()
    }

    /// Adds a value that is open.
    pub(crate) fn put(&self, key: &K, value: &Arc<V>) {
        self.entries.lock().insert(key, value);
    }
}

impl<K: Hash + Eq + Clone, V> Entries<K, V> {
    fn insert(&mut self, key: &K, value: &Arc<V>) {
        // Values without an owner are removed: the table is at most twice as long as the number of
        // open values, and a few.
        if self.by_key.len() >= self.tidy_at {
            self.by_key.retain(|_, value| value.strong_count() > 0);
            self.tidy_at = 2 * self.by_key.len() + 2;
        }
        self.by_key.insert(key.clone(), Arc::downgrade(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good<V>(_: &V) -> bool {
        true
    }

    #[test]
    fn an_open_value_is_found_and_made_once() {
        let shelf = WeakCache::<u8, u64>::new();
        let first = shelf.get_or(&1, good, || Ok(Arc::new(7))).unwrap();
        let second = shelf.get_or(&1, good, || panic!("it is open")).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        assert!(shelf.get(&1).is_some_and(|it| Arc::ptr_eq(&first, &it)));
        assert!(shelf.get(&2).is_none());
        drop((first, second));
        assert!(shelf.get(&1).is_none());
        // The cache keeps no value alive.
        assert_eq!(*shelf.get_or(&1, good, || Ok(Arc::new(8))).unwrap(), 8);
    }

    #[test]
    fn a_value_that_is_not_valid_any_more_is_made_anew() {
        let shelf = WeakCache::<u8, u64>::new();
        let first = shelf.get_or(&1, good, || Ok(Arc::new(7))).unwrap();
        let second = shelf
            .get_or(&1, |value| *value != 7, || Ok(Arc::new(8)))
            .unwrap();
        assert_eq!(
            (
                *first,
                *second,
                *shelf.get_or(&1, good, || panic!("it is open")).unwrap()
            ),
            (7, 8, 8)
        );
    }

    #[test]
    fn the_table_forgets_values_without_an_owner() {
        let shelf = WeakCache::<u32, u32>::new();
        let kept = shelf.get_or(&0, good, || Ok(Arc::new(0))).unwrap();
        (1..100).for_each(|key| drop(shelf.get_or(&key, good, || Ok(Arc::new(key)))));
        assert!(shelf.entries.lock().by_key.len() <= 4);
        assert!(Arc::ptr_eq(
            &shelf.get_or(&0, good, || panic!("it is open")).unwrap(),
            &kept
        ));
    }

    #[test]
    fn a_value_that_is_being_made_holds_no_caller_up_and_the_first_one_is_shared() {
        let shelf = WeakCache::<u8, u64>::new();
        let mut first = None;
        let second = shelf.get_or(&1, good, || {
            // As another thread, while this one is in the driver.
            first = Some(shelf.get_or(&1, good, || Ok(Arc::new(7))).unwrap());
            Ok(Arc::new(8))
        });
        assert!(Arc::ptr_eq(&second.unwrap(), &first.unwrap()));
        // One that is not valid for the later caller stays the other's.
        let kept = shelf.get_or(&2, good, || Ok(Arc::new(7))).unwrap();
        let own = shelf.get_or(&2, |value| *value == 8, || Ok(Arc::new(8)));
        assert_eq!((*kept, *own.unwrap()), (7, 8));
    }

    #[test]
    fn an_error_leaves_the_place_free() {
        let shelf = WeakCache::<u8, u8>::new();
        assert!(
            shelf
                .get_or(&1, good, || Err(crate::Error::State(
                    crate::error::StateFault::Forked
                )))
                .is_err()
        );
        assert!(shelf.get_or(&1, good, || Ok(Arc::new(1))).is_ok());
    }
}
