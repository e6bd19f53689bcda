//! Objects by key, without locks and without state of threads, so that any number of threads may
//! use a table, and a child that was forked during a call too. **This module is marked for
//! unsafe**: it shares what an entry holds by the entry's own count of users.
//!
//! An entry is free, or filled. Its `state` is its generation (32 bits), whether it is open, and how
//! many calls use it. A key finds an entry of its generation that is open; the one that closes it,
//! or the last user after that, empties it and raises the generation. Entries stay where they are
//! for as long as the process lives, and free ones form a list.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

/// The entries of the first page; each further one has twice as many.
const FIRST_PAGE: u32 = 32;
const PAGES: usize = 20;

/// The most objects of a table at once.
pub(crate) const ENTRIES_MAX: u32 = FIRST_PAGE * ((1 << PAGES) - 1);

const INDEX_BITS: u32 = 26;
const GENERATION_BITS: u32 = 32;
const _: () = assert!(ENTRIES_MAX < 1 << INDEX_BITS);

/// How many of a key's low bits may be set.
pub(crate) const KEY_BITS: u32 = INDEX_BITS + GENERATION_BITS;

const OPEN: u64 = 1 << 31;
/// The system's limit of threads is far below it.
const USERS: u64 = OPEN - 1;

/// The table of one type of objects. It is never dropped.
#[derive(Debug)]
pub(crate) struct Table<T> {
    pages: [AtomicPtr<Slot<T>>; PAGES],
    /// How many entries have ever been filled.
    used: AtomicU32,
    /// The first free entry: its index plus 1, or 0, and above it how often this has changed.
    free: AtomicU64,
}

/// An entry. Aligned to a cache line, as different threads use neighbours.
#[derive(Debug)]
#[repr(align(64))]
struct Slot<T> {
    state: AtomicU64,
    /// The next free entry, as in [`Table::free`].
    next: AtomicU32,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: a table owns its values, and hands out shared references to them on any thread.
unsafe impl<T: Send + Sync> Sync for Table<T> {}

/// A found object, kept until this is dropped.
#[derive(Debug)]
pub(crate) struct Found<T: 'static> {
    table: &'static Table<T>,
    slot: &'static Slot<T>,
    index: u32,
}

// SAFETY: a shared reference to a `T`, which it may drop.
unsafe impl<T: Send + Sync> Send for Found<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Found<T> {}

impl<T> Table<T> {
    pub(crate) const fn new() -> Table<T> {
        Table {
            pages: [const { AtomicPtr::new(ptr::null_mut()) }; PAGES],
            used: AtomicU32::new(0),
            free: AtomicU64::new(0),
        }
    }

    /// Gives an object to the table: its key. It comes back when there are [`ENTRIES_MAX`].
    pub(crate) fn insert(&'static self, value: T) -> Result<u64, T> {
        let Some((slot, index)) = self.take_free().or_else(|| self.take_new()) else {
            return Err(value);
        };
        // SAFETY: an entry that was taken is this call's alone until it is open.
        unsafe { (*slot.value.get()).write(value) };
        let state = slot.state.load(Relaxed);
        slot.state.store(state | OPEN, Release);
        Ok((state >> 32) << INDEX_BITS | u64::from(index))
    }

    /// The object of a key, unless it is closed.
    pub(crate) fn get(&'static self, key: u64) -> Option<Found<T>> {
        let (slot, index) = self.slot_of(key)?;
        slot.change(key, |state| state + 1)?;
        Some(Found {
            table: self,
            slot,
            index,
        })
    }

    /// Ends a key, once: whether this call did. The object is dropped here, or by its last user.
    pub(crate) fn close(&'static self, key: u64) -> bool {
        let Some((slot, index)) = self.slot_of(key) else {
            return false;
        };
        let Some(before) = slot.change(key, |state| state & !OPEN) else {
            return false;
        };
        if before & USERS == 0 {
            // SAFETY: this call closed it, and nothing used it then.
            unsafe { self.empty(slot, index) };
        }
        true
    }

    fn slot_of(&'static self, key: u64) -> Option<(&'static Slot<T>, u32)> {
        let index = (key & ((1 << INDEX_BITS) - 1)) as u32;
        Some((self.slot(index)?, index))
    }

    /// An entry, if its page is there.
    fn slot(&'static self, index: u32) -> Option<&'static Slot<T>> {
        let (page, place) = position(index);
        let first = self.pages.get(page)?.load(Acquire);
        if first.is_null() {
            return None;
        }
        // SAFETY: a page has as many entries as `position` counts, and is never freed.
        Some(unsafe { &*first.add(place) })
    }

    fn take_free(&'static self) -> Option<(&'static Slot<T>, u32)> {
        let mut head = self.free.load(Acquire);
        loop {
            let index = (head as u32).checked_sub(1)?;
            let slot = self.slot(index)?;
            // Another thread may take it now, and change this: then the head has changed, too.
            let next = slot.next.load(Relaxed);
            match self
                .free
                .compare_exchange_weak(head, changed(head, next), AcqRel, Acquire)
            {
                Ok(_) => return Some((slot, index)),
                Err(found) => head = found,
            }
        }
    }

    #[cold]
    fn take_new(&'static self) -> Option<(&'static Slot<T>, u32)> {
        let next = |used| (used < ENTRIES_MAX).then_some(used + 1);
        let index = self.used.fetch_update(Relaxed, Relaxed, next).ok()?;
        let (page, _) = position(index);
        if self.pages[page].load(Acquire).is_null() {
            self.add_page(page);
        }
        Some((self.slot(index)?, index))
    }

    /// Not behind a lock: two threads may make one page, and one of them is freed.
    fn add_page(&'static self, page: usize) {
        let entries = (FIRST_PAGE as usize) << page;
        let made: Box<[Slot<T>]> = (0..entries).map(|_| Slot::new()).collect();
        let made = Box::into_raw(made);
        let placed =
            self.pages[page].compare_exchange(ptr::null_mut(), made.cast(), AcqRel, Acquire);
        if placed.is_err() {
            // SAFETY: from `into_raw` above, and no other thread has seen it.
            drop(unsafe { Box::from_raw(made) });
        }
    }

    /// Drops what an entry holds, and makes it free.
    ///
    /// # Safety
    /// It is closed, nothing uses it, and one call alone does this.
    unsafe fn empty(&'static self, slot: &'static Slot<T>, index: u32) {
        // SAFETY: it was filled when it was open, and the caller alone reads it.
        let value = unsafe { (*slot.value.get()).assume_init_read() };
        let generation = (slot.state.load(Relaxed) >> 32) as u32;
        let next = u64::from(generation.wrapping_add(1)) << 32;
        slot.state.store(next, Release);
        let mut head = self.free.load(Relaxed);
        loop {
            slot.next.store(head as u32, Relaxed);
            match self
                .free
                .compare_exchange_weak(head, changed(head, index + 1), AcqRel, Relaxed)
            {
                Ok(_) => break,
                Err(found) => head = found,
            }
        }
        // Last: its end may take long, and may use this table.
        drop(value);
    }
}

/// The page of an entry, and its place there.
fn position(index: u32) -> (usize, usize) {
    let page = (index / FIRST_PAGE + 1).ilog2();
    let before = FIRST_PAGE * ((1 << page) - 1);
    (page as usize, (index - before) as usize)
}

/// The list of free entries with another first one. The count above it makes every state of the
/// list differ from the earlier ones.
fn changed(head: u64, first: u32) -> u64 {
    ((head >> 32).wrapping_add(1)) << 32 | u64::from(first)
}

impl<T> Slot<T> {
    fn new() -> Slot<T> {
        Slot {
            state: AtomicU64::new(0),
            next: AtomicU32::new(0),
            value: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }

    /// Changes the state while the entry is open, and of the key's generation: the state before.
    fn change(&self, key: u64, change: impl Fn(u64) -> u64) -> Option<u64> {
        let is_found = |state: u64| state >> 32 == key >> INDEX_BITS && state & OPEN != 0;
        let next = |state| is_found(state).then(|| change(state));
        self.state.fetch_update(AcqRel, Acquire, next).ok()
    }
}

impl<T> Deref for Found<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: it was open when this was counted among its users, so that it is filled, and it
        // is emptied by the last of them at the earliest.
        unsafe { (*self.slot.value.get()).assume_init_ref() }
    }
}

impl<T> Drop for Found<T> {
    fn drop(&mut self) {
        let before = self.slot.state.fetch_sub(1, AcqRel);
        if before & OPEN == 0 && before & USERS == 1 {
            // SAFETY: closed, this was its last user, and no further one finds it.
            unsafe { self.table.empty(self.slot, self.index) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::sync::{Arc, Barrier};
    use std::thread;

    use super::*;

    fn table<T>() -> &'static Table<T> {
        Box::leak(Box::new(Table::new()))
    }

    #[test]
    fn every_index_has_a_place_of_its_own() {
        let mut expected = (0, 0);
        for index in 0..100_000 {
            assert_eq!(position(index), expected);
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
            assert!(table.get(first).is_none());
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
            assert!(table.get(key).is_none(), "{key:#x}");
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
        assert!(table.get(key).is_none());
        drop(one);
        assert_eq!(Arc::strong_count(&object), 2);
        drop(other);
        assert_eq!(Arc::strong_count(&object), 1);
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
        assert!(table.get(inner).is_none());
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
                    if let Some(found) = table.get(shared[(round + owner) % 4].load(Acquire)) {
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
}
