//! Objects by key, without locks and without state of threads, so that any number of threads may
//! use a table, and a child that was forked during a call too. **This module is marked for
//! unsafe**: it gives references to what an entry holds by the entry's own count of users.
//!
//! An entry is free, or filled. Its `state` is its generation (32 bits), whether it is open, whether
//! one call uses it alone, and how many calls share it. A key finds an entry of its generation that
//! is open; the one that closes it, or its last user after that, empties it and raises the
//! generation. Entries stay where they are for as long as the process lives, and free ones form a
//! list.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::atomic::{AtomicPtr, AtomicU32, AtomicU64};

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
/// One call uses the entry alone.
const LOCKED: u64 = 1 << 30;
/// The system's limit of threads is far below it.
const USERS: u64 = LOCKED - 1;

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

// SAFETY: a table owns its values. It hands each out to one thread at a time by `lock`, and shared
// references by `get`, which requires `T: Sync`.
unsafe impl<T: Send> Sync for Table<T> {}

/// Why a key finds no object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It was closed, or never was one.
    Closed,
    /// Another call uses the object, and this one or that one wants it alone.
    InUse,
}

/// A place of a table.
#[derive(Debug)]
struct Entry<T: 'static> {
    table: &'static Table<T>,
    slot: &'static Slot<T>,
    index: u32,
}

/// An entry that is to be filled, or is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Reserved<T: 'static>(Entry<T>);

/// A found object, kept until this is dropped.
#[derive(Debug)]
pub(crate) struct Found<T: 'static>(Entry<T>);

/// An object that this alone uses until it is dropped. Its value may be taken out, which closes it.
#[derive(Debug)]
pub(crate) struct Locked<T: 'static> {
    entry: Entry<T>,
    is_taken: bool,
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Table<T> {
        // SAFETY: pointers that are null, and words that are 0.
        unsafe { std::mem::zeroed() }
    }

    /// An entry for one more object, unless there are [`ENTRIES_MAX`].
    #[inline]
    pub(crate) fn reserve(&'static self) -> Option<Reserved<T>> {
        let (slot, index) = self.take_free().or_else(|| self.take_new())?;
        Some(Reserved(Entry {
            table: self,
            slot,
            index,
        }))
    }

    /// The object of a key, shared with other calls.
    #[inline]
    pub(crate) fn get(&'static self, key: u64) -> Result<Found<T>, Refusal>
    where
        T: Sync,
    {
        let entry = self.entry(key)?;
        let share = |state| (state & LOCKED == 0).then_some(state + 1);
        entry.slot.change(key, share)?;
        Ok(Found(entry))
    }

    /// The object of a key, unless another call uses it: a mutex without a queue.
    #[inline]
    pub(crate) fn lock(&'static self, key: u64) -> Result<Locked<T>, Refusal> {
        let entry = self.entry(key)?;
        let lock = |state| (state & (LOCKED | USERS) == 0).then_some(state | LOCKED);
        entry.slot.change(key, lock)?;
        Ok(Locked {
            entry,
            is_taken: false,
        })
    }

    /// Ends a key, once: whether this call did. The object is dropped here, or by its last user.
    pub(crate) fn close(&'static self, key: u64) -> bool {
        let Ok(entry) = self.entry(key) else {
            return false;
        };
        let Ok(before) = entry.slot.change(key, |state| Some(state & !OPEN)) else {
            return false;
        };
        if before & (LOCKED | USERS) == 0 {
            // SAFETY: this call closed it, and nothing used it then.
            unsafe { entry.empty() };
        }
        true
    }

    #[inline]
    fn entry(&'static self, key: u64) -> Result<Entry<T>, Refusal> {
        let index = (key & ((1 << INDEX_BITS) - 1)) as u32;
        let slot = self.slot(index).ok_or(Refusal::Closed)?;
        Ok(Entry {
            table: self,
            slot,
            index,
        })
    }

    /// An entry, if its page is there.
    #[inline]
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
                .compare_exchange(head, changed(head, next), AcqRel, Acquire)
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

    /// Makes an entry free. It is the caller's alone, and holds nothing.
    #[inline]
    fn free(&'static self, slot: &'static Slot<T>, index: u32) {
        let generation = (slot.state.load(Relaxed) >> 32) as u32;
        let next = u64::from(generation.wrapping_add(1)) << 32;
        slot.state.store(next, Release);
        let mut head = self.free.load(Relaxed);
        loop {
            slot.next.store(head as u32, Relaxed);
            match self
                .free
                .compare_exchange(head, changed(head, index + 1), AcqRel, Relaxed)
            {
                Ok(_) => break,
                Err(found) => head = found,
            }
        }
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

    /// Changes the state of an open entry of the key's generation: the state before. `change` gives
    /// none where other users forbid it.
    #[inline]
    fn change(&self, key: u64, change: impl Fn(u64) -> Option<u64>) -> Result<u64, Refusal> {
        // As it is when nothing uses the entry: most often it does not.
        let mut state = (key >> INDEX_BITS) << 32 | OPEN;
        loop {
            if state >> 32 != key >> INDEX_BITS || state & OPEN == 0 {
                return Err(Refusal::Closed);
            }
            let next = change(state).ok_or(Refusal::InUse)?;
            match self.state.compare_exchange(state, next, AcqRel, Acquire) {
                Ok(before) => return Ok(before),
                Err(found) => state = found,
            }
        }
    }
}

impl<T> Entry<T> {
    /// Drops what the entry holds, and makes it free.
    ///
    /// # Safety
    /// It is closed, nothing uses it, and one call alone does this.
    unsafe fn empty(&self) {
        // SAFETY: it was filled when it was open, and the caller alone reads it.
        let value = unsafe { (*self.slot.value.get()).assume_init_read() };
        self.table.free(self.slot, self.index);
        // Last: its end may take long, and may use this table.
        drop(value);
    }

    /// Ends a use, which is `units` of the state.
    #[inline]
    fn leave(&self, units: u64) {
        let before = self.slot.state.fetch_sub(units, AcqRel);
        if before & OPEN == 0 && before & (LOCKED | USERS) == units {
            // SAFETY: closed, this was its last user, and no further one finds it.
            unsafe { self.empty() };
        }
    }
}

impl<T> Reserved<T> {
    /// Opens the entry with this object: its key.
    #[inline(always)]
    pub(crate) fn fill(self, value: T) -> u64 {
        let Entry { slot, index, .. } = self.0;
        std::mem::forget(self);
        // SAFETY: an entry that was taken is this call's alone until it is open.
        unsafe { (*slot.value.get()).write(value) };
        let state = slot.state.load(Relaxed);
        slot.state.store(state | OPEN, Release);
        (state >> 32) << INDEX_BITS | u64::from(index)
    }
}

impl<T> Drop for Reserved<T> {
    fn drop(&mut self) {
        self.0.table.free(self.0.slot, self.0.index);
    }
}

impl<T> Deref for Found<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: it was open when this was counted among its users, so that it is filled; no call
        // locks it meanwhile, and it is emptied by the last user at the earliest.
        unsafe { (*self.0.slot.value.get()).assume_init_ref() }
    }
}

impl<T> Drop for Found<T> {
    #[inline]
    fn drop(&mut self) {
        self.0.leave(1);
    }
}

impl<T> Locked<T> {
    /// Takes the value out, which closes the object unless the value is [put
    /// back](Self::put_back).
    #[inline]
    pub(crate) fn take(&mut self) -> T {
        assert!(!self.is_taken, "taken twice");
        self.is_taken = true;
        // SAFETY: open when it was locked, so that it was filled, and not taken since; nothing
        // reads it again before `put_back`.
        unsafe { (*self.entry.slot.value.get()).assume_init_read() }
    }

    /// Puts back the value that was taken, or another in its place.
    pub(crate) fn put_back(&mut self, value: T) {
        assert!(self.is_taken, "nothing was taken");
        // SAFETY: locked, so that nothing else uses the place, which holds nothing.
        unsafe { (*self.entry.slot.value.get()).write(value) };
        self.is_taken = false;
    }
}

impl<T> Deref for Locked<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        assert!(!self.is_taken, "used after it was taken");
        // SAFETY: filled, as it was open when it was locked and is not taken; locked, so that `&mut`
        // is given by `deref_mut` alone, which borrows `self`.
        unsafe { (*self.entry.slot.value.get()).assume_init_ref() }
    }
}

impl<T> DerefMut for Locked<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        assert!(!self.is_taken, "used after it was taken");
        // SAFETY: as for `deref`, and `self` is borrowed exclusively.
        unsafe { (*self.entry.slot.value.get()).assume_init_mut() }
    }
}

impl<T> Drop for Locked<T> {
    #[inline]
    fn drop(&mut self) {
        let Entry { table, slot, index } = self.entry;
        if self.is_taken {
            // Another thread that closes it now has closed what was taken.
            table.free(slot, index);
        } else {
            self.entry.leave(LOCKED);
        }
    }
}

#[cfg(test)]
mod tests {
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
}
