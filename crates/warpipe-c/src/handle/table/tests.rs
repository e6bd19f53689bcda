use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Barrier};
use std::thread;

use super::*;

impl<T> Table<T> {
    fn insert(&'static self, value: T) -> Result<u64, T> {
        match self.reserve() {
            Some(entry) => Ok(entry.fill(value)),
            None => Err(value),
        }
    }
}

fn table<T>() -> &'static Table<T> {
    Box::leak(Box::new(Table::new()))
}

#[test]
fn every_index_has_a_place_of_its_own() {
    let mut expected = (0, 0);
    for filled in 0..100_000 {
        assert_eq!(position(filled), expected);
        expected.1 += 1;
        if expected.1 == (FIRST_PAGE as usize) << expected.0 {
            expected = (expected.0 + 1, 0);
        }
    }
    assert_eq!(position(ENTRIES_MAX - 1).0, PAGES - 1);
    assert_eq!(position(ENTRIES_MAX).0, PAGES);
}

#[test]
fn a_closed_key_stays_closed_when_its_entry_is_used_again() {
    let table = table::<u32>();
    let first = table.insert(1).unwrap();
    assert!(table.close(first));
    let mut keys = std::collections::HashSet::from([first]);
    for number in 0..10_000 {
        let key = table.insert(number).unwrap();
        assert!(keys.insert(key), "{key:#x} came twice");
        assert_eq!(table.get(first).err(), Some(Refusal::Closed));
        assert!(!table.close(first));
        assert_eq!(*table.get(key).unwrap(), number);
        assert!(table.close(key));
    }
    assert_eq!(table.used.load(Relaxed), 1);
}

#[test]
fn keys_that_were_never_given_are_not_found() {
    let table = table::<u32>();
    let given = table.insert(7).unwrap();
    for key in (0..KEY_BITS).map(|bit| given ^ 1 << bit).chain([u64::MAX]) {
        assert_eq!(table.get(key).err(), Some(Refusal::Closed), "{key:#x}");
        assert!(!table.close(key), "{key:#x}");
    }
    assert_eq!(*table.get(given).unwrap(), 7);
}

#[test]
fn the_last_user_of_a_closed_object_drops_it() {
    let table = table::<Arc<()>>();
    let object = Arc::new(());
    let key = table.insert(object.clone()).unwrap();
    let (one, other) = (table.get(key).unwrap(), table.get(key).unwrap());
    assert!(table.close(key));
    assert!(!table.close(key));
    assert_eq!(table.get(key).err(), Some(Refusal::Closed));
    drop(one);
    assert_eq!(Arc::strong_count(&object), 2);
    drop(other);
    assert_eq!(Arc::strong_count(&object), 1);
}

#[test]
fn an_entry_that_was_reserved_for_nothing_is_free_again() {
    let table = table::<u32>();
    drop(table.reserve());
    let key = table.insert(1).unwrap();
    assert_eq!(*table.get(key).unwrap(), 1);
    assert_eq!(table.used.load(Relaxed), 1);
}

#[test]
fn a_locked_object_is_found_by_no_other_call() {
    let table = table::<u32>();
    let key = table.insert(1).unwrap();
    let mut locked = table.lock(key).unwrap();
    *locked += 1;
    assert_eq!(table.lock(key).err(), Some(Refusal::InUse));
    assert_eq!(table.get(key).err(), Some(Refusal::InUse));
    drop(locked);
    let found = table.get(key).unwrap();
    assert_eq!(*found, 2);
    assert_eq!(table.lock(key).err(), Some(Refusal::InUse));
    drop(found);
    assert_eq!(*table.lock(key).unwrap(), 2);
}

#[test]
fn an_object_that_is_closed_while_it_is_locked_is_dropped_when_it_is_unlocked() {
    let table = table::<Arc<()>>();
    let object = Arc::new(());
    let key = table.insert(object.clone()).unwrap();
    let locked = table.lock(key).unwrap();
    assert!(table.close(key));
    assert_eq!(table.lock(key).err(), Some(Refusal::Closed));
    assert_eq!(Arc::strong_count(&object), 2);
    drop(locked);
    assert_eq!(Arc::strong_count(&object), 1);
}

#[test]
fn an_object_whose_value_is_taken_is_closed_unless_it_is_put_back() {
    let table = table::<Arc<()>>();
    let object = Arc::new(());
    let key = table.insert(object.clone()).unwrap();

    let mut locked = table.lock(key).unwrap();
    let value = locked.take();
    locked.put_back(value);
    drop(locked);
    assert_eq!(Arc::strong_count(&object), 2);

    let taken = table.lock(key).unwrap().take();
    assert_eq!(table.get(key).err(), Some(Refusal::Closed));
    assert!(!table.close(key));
    let next = table.insert(object.clone()).unwrap();
    assert_ne!(next, key);
    drop(taken);
    assert_eq!(Arc::strong_count(&object), 2);
    assert!(table.close(next));
    assert_eq!(Arc::strong_count(&object), 1);
}

#[test]
fn a_value_that_is_put_back_into_a_closed_object_is_dropped() {
    let table = table::<Arc<()>>();
    let object = Arc::new(());
    let key = table.insert(object.clone()).unwrap();
    let mut locked = table.lock(key).unwrap();
    let value = locked.take();
    assert!(table.close(key));
    locked.put_back(value);
    drop(locked);
    assert_eq!(Arc::strong_count(&object), 1);
    assert_eq!(table.used.load(Relaxed), 1);
    assert!(table.insert(object).is_ok());
    assert_eq!(table.used.load(Relaxed), 1);
}

#[test]
fn an_object_that_its_user_closes_is_dropped_once_where_it_is() {
    let table = table::<Arc<()>>();
    let object = Arc::new(());
    for is_closed_meanwhile in [false, true] {
        let key = table.insert(object.clone()).unwrap();
        let mut locked = table.lock(key).unwrap();
        assert_eq!(is_closed_meanwhile && table.close(key), is_closed_meanwhile);
        locked.close();
        assert_eq!(Arc::strong_count(&object), 1);
        drop(locked);
        assert_eq!(table.get(key).err(), Some(Refusal::Closed));
        assert!(!table.close(key));
        assert_eq!(Arc::strong_count(&object), 1);
    }
    assert_eq!(table.used.load(Relaxed), 1);
}

#[test]
fn a_panic_between_taking_and_putting_back_closes_the_object() {
    let table = table::<u32>();
    let key = table.insert(1).unwrap();
    let panicked = std::panic::catch_unwind(|| {
        let mut locked = table.lock(key).unwrap();
        let _value = locked.take();
        panic!("wanted");
    });
    assert!(panicked.is_err());
    assert_eq!(table.get(key).err(), Some(Refusal::Closed));
    assert_eq!(table.insert(2).unwrap() & 0xFFFF, key & 0xFFFF);
}

/// Fails if two threads have one object locked at a time, if one takes what another has taken,
/// or if a value is dropped twice or never.
#[test]
fn threads_that_lock_take_and_close_one_object_have_it_one_at_a_time() {
    const ROUNDS: usize = if cfg!(miri) { 20 } else { 2_000 };
    const THREADS: usize = 3;
    struct Alone {
        users: AtomicUsize,
        drops: Arc<AtomicUsize>,
    }
    impl Drop for Alone {
        fn drop(&mut self) {
            self.drops.fetch_add(1, AcqRel);
        }
    }
    let table = table::<Alone>();
    let drops = Arc::new(AtomicUsize::new(0));
    for round in 0..ROUNDS {
        let alone = Alone {
            users: AtomicUsize::new(0),
            drops: drops.clone(),
        };
        let key = table.insert(alone).ok().unwrap();
        let barrier = Arc::new(Barrier::new(THREADS));
        let threads = (0..THREADS).map(|thread| {
            let barrier = barrier.clone();
            thread::spawn(move || {
                barrier.wait();
                let use_alone = |alone: &Alone| {
                    assert_eq!(alone.users.fetch_add(1, AcqRel), 0);
                    alone.users.fetch_sub(1, AcqRel);
                };
                match (thread + round) % THREADS {
                    0 => table.lock(key).map_or(0, |mut locked| {
                        let alone = locked.take();
                        use_alone(&alone);
                        if round % 2 == 0 {
                            locked.put_back(alone);
                            return 0;
                        }
                        1
                    }),
                    1 => {
                        let _ = table.lock(key).map(|locked| use_alone(&locked));
                        0
                    }
                    _ => usize::from(table.close(key)),
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        let ended: usize = threads.into_iter().map(|it| it.join().unwrap()).sum();
        // Taken and closed at once, or refused as in use and closed.
        assert!((1..=2).contains(&ended), "{ended}");
        assert_eq!(drops.load(Acquire), round + 1);
    }
    assert_eq!(table.used.load(Relaxed), 1);
}

#[test]
fn an_object_may_use_its_table_when_it_is_dropped() {
    struct Nested(&'static Table<Nested>, Option<u64>);
    impl Drop for Nested {
        fn drop(&mut self) {
            if let Some(inner) = self.1 {
                assert!(self.0.close(inner));
                let next = self.0.insert(Nested(self.0, None)).ok().unwrap();
                assert!(self.0.close(next));
            }
        }
    }
    let table = table::<Nested>();
    let inner = table.insert(Nested(table, None)).ok().unwrap();
    let outer = table.insert(Nested(table, Some(inner))).ok().unwrap();
    assert!(table.close(outer));
    assert!(table.get(inner).is_err());
}

/// Fails if two threads are given one entry, if one sees an object that was dropped, or if an
/// object is dropped twice or never.
#[test]
fn threads_share_a_table_and_every_object_is_dropped_once() {
    const ROUNDS: usize = if cfg!(miri) { 20 } else { 5_000 };
    static DROPS: AtomicUsize = AtomicUsize::new(0);
    struct Counted {
        owner: usize,
        is_dropped: AtomicBool,
    }
    impl Drop for Counted {
        fn drop(&mut self) {
            assert!(!self.is_dropped.swap(true, AcqRel));
            DROPS.fetch_add(1, AcqRel);
        }
    }
    let table = table::<Counted>();
    let shared: &'static [AtomicU64] =
        Vec::leak((0..4).map(|_| AtomicU64::new(u64::MAX)).collect());
    let threads = (0..4).map(|owner| {
        thread::spawn(move || {
            let mut closed = 0;
            for round in 0..ROUNDS {
                let counted = Counted {
                    owner,
                    is_dropped: AtomicBool::new(false),
                };
                let key = table.insert(counted).ok().unwrap();
                // Nothing else knows the key yet.
                assert_eq!(table.get(key).unwrap().owner, owner);
                // It takes another thread's place there, which any of them may close.
                let other = shared[round % 4].swap(key, AcqRel);
                if let Ok(found) = table.get(shared[(round + owner) % 4].load(Acquire)) {
                    assert!(!found.is_dropped.load(Acquire));
                }
                closed += usize::from(table.close(other));
            }
            closed
        })
    });
    let threads: Vec<_> = threads.collect();
    let closed: usize = threads.into_iter().map(|it| it.join().unwrap()).sum();
    let left = shared.iter().filter(|key| table.close(key.load(Acquire)));
    assert_eq!(closed + left.count(), 4 * ROUNDS);
    assert_eq!(DROPS.load(Acquire), 4 * ROUNDS);
}

#[test]
fn of_threads_that_close_one_object_one_succeeds() {
    const THREADS: usize = 4;
    let table = table::<u32>();
    for _ in 0..if cfg!(miri) { 5 } else { 200 } {
        let key = table.insert(1).unwrap();
        let barrier = Arc::new(Barrier::new(THREADS));
        let threads = (0..THREADS).map(|_| {
            let barrier = barrier.clone();
            thread::spawn(move || {
                barrier.wait();
                table.close(key)
            })
        });
        let threads: Vec<_> = threads.collect();
        let closed = threads.into_iter().filter_map(|it| it.join().ok());
        assert_eq!(closed.filter(|&closed| closed).count(), 1);
    }
}
