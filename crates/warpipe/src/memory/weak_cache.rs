//! A table of the values that this process has open, so that opening one again finds it. The table
//! keeps no value alive.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::Result;
use crate::fork::per_process::PerProcess;

type Cell<V> = Arc<Mutex<Weak<V>>>;

/// Values by key, as long as another owner holds them.
#[derive(Debug)]
pub(crate) struct WeakCache<K, V> {
    cells: PerProcess<Mutex<Cells<K, V>>>,
}

#[derive(Debug)]
struct Cells<K, V> {
    by_key: BTreeMap<K, Cell<V>>,
    /// How many of them there were, twice, when those without a value were removed.
    tidy_at: usize,
}

impl<K, V> Default for Cells<K, V> {
    fn default() -> Cells<K, V> {
        Cells {
            by_key: BTreeMap::new(),
            tidy_at: 0,
        }
    }
}

impl<K: Ord + Clone + Send, V: Send + Sync> WeakCache<K, V> {
    pub(crate) const fn new() -> WeakCache<K, V> {
        WeakCache {
            cells: PerProcess::new(),
        }
    }

    /// The value of `key`, made if it is not open, or not valid any more. Concurrent callers wait
    /// for it if they need the same key.
    pub(crate) fn get_or(
        &self,
        key: &K,
        is_good: impl FnOnce(&V) -> bool,
        make: impl FnOnce() -> Result<Arc<V>>,
    ) -> Result<Arc<V>> {
        let cell = self.cell(key);
        let mut place = lock(&cell);
        if let Some(value) = place.upgrade().filter(|value| is_good(value)) {
            return Ok(value);
        }
        let value = make()?;
        *place = Arc::downgrade(&value);
        Ok(value)
    }

    /// The value of `key`, if it is open.
    pub(crate) fn get(&self, key: &K) -> Option<Arc<V>> {
        let cell = self.lock().by_key.get(key)?.clone();
        lock(&cell).upgrade()
    }

    /// Adds a value that is open.
    pub(crate) fn put(&self, key: &K, value: &Arc<V>) {
        *lock(&self.cell(key)) = Arc::downgrade(value);
    }

    fn cell(&self, key: &K) -> Cell<V> {
        let mut cells = self.lock();
        if let Some(cell) = cells.by_key.get(key) {
            return cell.clone();
        }
        // Values without an owner are removed: the table is at most twice as long as the number of
        // open values, and a few.
        if cells.by_key.len() >= cells.tidy_at {
            let is_open =
                |cell: &Cell<V>| Arc::strong_count(cell) > 1 || lock(cell).strong_count() > 0;
            cells.by_key.retain(|_, cell| is_open(cell));
            cells.tidy_at = 2 * cells.by_key.len() + 2;
        }
        let cell = cells.by_key.entry(key.clone());
        cell.or_insert_with(|| Arc::new(Mutex::new(Weak::new())))
            .clone()
    }

    fn lock(&self) -> MutexGuard<'_, Cells<K, V>> {
        self.cells.lock()
    }
}

fn lock<V>(cell: &Mutex<Weak<V>>) -> MutexGuard<'_, Weak<V>> {
    cell.lock().unwrap_or_else(PoisonError::into_inner)
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
        assert!(shelf.lock().by_key.len() <= 4);
        assert!(Arc::ptr_eq(
            &shelf.get_or(&0, good, || panic!("it is open")).unwrap(),
            &kept
        ));
    }

    #[test]
    fn an_error_leaves_the_place_free() {
        let shelf = WeakCache::<u8, u8>::new();
        assert!(
            shelf
                .get_or(&1, good, || Err(crate::Error::Forked))
                .is_err()
        );
        assert!(shelf.get_or(&1, good, || Ok(Arc::new(1))).is_ok());
    }
}
