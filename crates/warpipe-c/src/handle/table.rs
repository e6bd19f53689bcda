//! Objects by key, without locks and without state of threads, so that any number of threads may
//! use a table, and a child that was forked during a call too. **This module is marked for
//! unsafe**: it gives references to what an entry holds by the entry's own count of users.
//!
//! An entry is free, or filled. Its `state` is its generation (32 bits), whether it is open,
//! whether one call uses it alone, and how many calls share it. A key finds an entry of its
//! generation that is open; the one that closes it, or its last user after that, empties it and
//! raises the generation. Entries stay where they are for as long as the process lives, and free
//! ones form a list.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::atomic::{AtomicPtr, AtomicU32, AtomicU64};

/// The entries of the first page; each further one has twice as many.
const FIRST_PAGE: u32 = 32;
const PAGES: usize = 17;

/// The most objects of a table at once.
pub(crate) const ENTRIES_MAX: u32 = FIRST_PAGE * ((1 << PAGES) - 1);

/// An index is a page, and a place there.
const INDEX_BITS: u32 = 26;
const PLACE_BITS: u32 = 21;
const GENERATION_BITS: u32 = 32;
const _: () = assert!(FIRST_PAGE << (PAGES - 1) <= 1 << PLACE_BITS);
const _: () = assert!(PAGES <= 1 << (INDEX_BITS - PLACE_BITS));

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
    index: u32,
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

/// A place of a table. Whole words, as in what has one: a shorter field is slow to move.
#[derive(Debug)]
struct Entry<T: 'static> {
    table: &'static Table<T>,
    slot: &'static Slot<T>,
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
    /// [`LOCKED`], or 0 once the value is taken out.
    units: u64,
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Table<T> {
        // SAFETY: pointers that are null, and words that are 0.
        unsafe { std::mem::zeroed() }
    }

    /// An entry for one more object, unless there are [`ENTRIES_MAX`].
    #[inline]
    pub(crate) fn reserve(&'static self) -> Option<Reserved<T>> {
        self.take_free().or_else(|| self.take_new()).map(Reserved)
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
        let units = LOCKED;
        Ok(Locked { entry, units })
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
        self.entry_at(index).ok_or(Refusal::Closed)
    }

    /// An entry, if its page is there.
    #[inline]
    fn entry_at(&'static self, index: u32) -> Option<Entry<T>> {
        let (page, place) = (index >> PLACE_BITS, index & ((1 << PLACE_BITS) - 1));
        let first = self.pages.get(page as usize)?.load(Acquire);
        if first.is_null() || place >= FIRST_PAGE << page {
            return None;
        }
        // SAFETY: a page has so many entries, and is never freed.
        let slot = unsafe { &*first.add(place as usize) };
        let table = self;
        Some(Entry { table, slot })
    }

    fn take_free(&'static self) -> Option<Entry<T>> {
        let mut head = self.free.load(Acquire);
        loop {
            let index = (head as u32).checked_sub(1)?;
            let entry = self.entry_at(index)?;
            // Another thread may take it now, and change this: then the head has changed, too.
            let next = entry.slot.next.load(Relaxed);
            match self
                .free
                .compare_exchange(head, changed(head, next), AcqRel, Acquire)
            {
                Ok(_) => return Some(entry),
                Err(found) => head = found,
            }
        }
    }

    #[cold]
    fn take_new(&'static self) -> Option<Entry<T>> {
        let next = |used| (used < ENTRIES_MAX).then_some(used + 1);
        let (page, place) = position(self.used.fetch_update(Relaxed, Relaxed, next).ok()?);
        if self.pages[page].load(Acquire).is_null() {
            self.add_page(page);
        }
        self.entry_at((page as u32) << PLACE_BITS | place as u32)
    }

    /// Not behind a lock: two threads may make one page, and one of them is freed.
    fn add_page(&'static self, page: usize) {
        let entries = (FIRST_PAGE as usize) << page;
        let index = |place: usize| (page << PLACE_BITS | place) as u32;
        let made: Box<[Slot<T>]> = (0..entries).map(|place| Slot::new(index(place))).collect();
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
    fn free(&'static self, slot: &'static Slot<T>) {
        let generation = (slot.state.load(Relaxed) >> 32) as u32;
        let next = u64::from(generation.wrapping_add(1)) << 32;
        slot.state.store(next, Release);
        let mut head = self.free.load(Relaxed);
        loop {
            slot.next.store(head as u32, Relaxed);
            match self
                .free
                .compare_exchange(head, changed(head, slot.index + 1), AcqRel, Relaxed)
            {
                Ok(_) => break,
                Err(found) => head = found,
            }
        }
    }
}

/// The page of the entry that so many were filled before, and its place there.
fn position(filled: u32) -> (usize, usize) {
    let page = (filled / FIRST_PAGE + 1).ilog2();
    let before = FIRST_PAGE * ((1 << page) - 1);
    (page as usize, (filled - before) as usize)
}

/// The list of free entries with another first one. The count above it makes every state of the
/// list differ from the earlier ones.
fn changed(head: u64, first: u32) -> u64 {
    ((head >> 32).wrapping_add(1)) << 32 | u64::from(first)
}

impl<T> Slot<T> {
    fn new(index: u32) -> Slot<T> {
        Slot {
            state: AtomicU64::new(0),
            next: AtomicU32::new(0),
            index,
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
        self.table.free(self.slot);
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
        let slot = self.0.slot;
        std::mem::forget(self);
        // SAFETY: an entry that was taken is this call's alone until it is open.
        unsafe { (*slot.value.get()).write(value) };
        let state = slot.state.load(Relaxed);
        slot.state.store(state | OPEN, Release);
        (state >> 32) << INDEX_BITS | u64::from(slot.index)
    }
}

impl<T> Drop for Reserved<T> {
    fn drop(&mut self) {
        self.0.table.free(self.0.slot);
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
        assert!(self.units != 0, "taken twice");
        self.units = 0;
        // SAFETY: open when it was locked, so that it was filled, and not taken since; nothing
        // reads it again before `put_back`.
        unsafe { (*self.entry.slot.value.get()).assume_init_read() }
    }

    /// Drops the value where it is, which closes the object.
    pub(crate) fn close(&mut self) {
        assert!(self.units != 0, "taken twice");
        self.units = 0;
        // SAFETY: as for `take`.
        unsafe { (*self.entry.slot.value.get()).assume_init_drop() }
    }

    /// Puts back the value that was taken, or another in its place.
    pub(crate) fn put_back(&mut self, value: T) {
        assert!(self.units == 0, "nothing was taken");
        // SAFETY: locked, so that nothing else uses the place, which holds nothing.
        unsafe { (*self.entry.slot.value.get()).write(value) };
        self.units = LOCKED;
    }
}

impl<T> Deref for Locked<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        assert!(self.units != 0, "used after it was taken");
        // SAFETY: filled, as it was open when it was locked and is not taken; locked, so that
        // `&mut` is given by `deref_mut` alone, which borrows `self`.
        unsafe { (*self.entry.slot.value.get()).assume_init_ref() }
    }
}

impl<T> DerefMut for Locked<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        assert!(self.units != 0, "used after it was taken");
        // SAFETY: as for `deref`, and `self` is borrowed exclusively.
        unsafe { (*self.entry.slot.value.get()).assume_init_mut() }
    }
}

impl<T> Drop for Locked<T> {
    #[inline]
    fn drop(&mut self) {
        let Entry { table, slot } = self.entry;
        if self.units == 0 {
            // Another thread that closes it now has closed what was taken.
            table.free(slot);
        } else {
            self.entry.leave(LOCKED);
        }
    }
}

// The path holds also where another package includes this file by path.
#[cfg(test)]
#[path = "table/tests.rs"]
mod tests;
