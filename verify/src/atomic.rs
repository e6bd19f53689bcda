//! The library's module `atomic`, with other atomics in place of the machine's. Each thread chooses one of
//! three kinds with [`set`]:
//!
//! * plain: the machine's; for Miri and for single-threaded code.
//! * in loom: the word in memory is its value until it is first used, and from then on the number
//!   of one of loom's atomics, with the highest bit set. So it is as large as the machine's, and any
//!   memory is memory of words. Loom requires a word to be made before threads are:
//!   [`touch`](AtomicU64::touch) every word that two of them use.
//! * in steps: the word holds its value, and each operation on it is a step of
//!   [`steps`](crate::verify::steps).
//!
//! Loom treats `SeqCst` as a fence only, so an operation of that ordering has such a fence before
//! or after it ([`Fences`]): the two ways in which compilers implement it. Each orders more than is
//! guaranteed, on one side; an algorithm that relies on the one fails with the other.
#![allow(dead_code, reason = "each word has all operations")]

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::atomic::Ordering::{self, Relaxed, SeqCst};
use std::time::Duration;

use crate::verify::plant::{self, Effect, Op};
use crate::verify::steps;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Plain,
    Loom,
    Steps,
}

/// Where the fences of `SeqCst` operations stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fences {
    Before,
    Behind,
}

thread_local! {
    static WAY: Cell<Way> = const { Cell::new(Way::Plain) };
    static FENCES: Cell<Fences> = const { Cell::new(Fences::Before) };
}

/// Chooses where fences stand in the models of this thread.
pub fn fences(fences: Fences) {
    FENCES.set(fences);
}

/// Chooses this thread's way.
pub fn set(way: Way) {
    WAY.set(way);
}

fn way() -> Way {
    WAY.get()
}

/// A change that reads, too.
#[derive(Clone, Copy)]
enum Change {
    Swap(u64),
    Add(u64),
    Sub(u64),
    Or(u64),
    And(u64),
    Max(u64),
    Cas(u64, u64),
}

impl Change {
    /// The new value of the word; none if it stays.
    fn of(self, old: u64) -> Option<u64> {
        Some(match self {
            Change::Swap(new) => new,
            Change::Add(by) => old.wrapping_add(by),
            Change::Sub(by) => old.wrapping_sub(by),
            Change::Or(bits) => old | bits,
            Change::And(bits) => old & bits,
            Change::Max(other) => old.max(other),
            Change::Cas(from, to) => return (old == from).then_some(to),
        })
    }
}

#[cfg(not(miri))]
mod in_loom {
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::sync::atomic::Ordering::{self, Acquire, Relaxed, SeqCst};

    use loom::sync::atomic::AtomicU64;
    use loom::sync::{Condvar, Mutex};

    use super::{Change, FENCES, Fences};

    /// The atomics of one execution of a model.
    #[derive(Default)]
    struct Made {
        words: Vec<Rc<AtomicU64>>,
        /// All that sleep, on whatever word.
        futex: Option<Rc<(Mutex<()>, Condvar)>>,
    }

    thread_local! {
        static MADE: RefCell<Made> = RefCell::default();
    }

    pub fn begin() {
        let futex = Rc::new((Mutex::new(()), Condvar::new()));
        MADE.with_borrow_mut(|made| {
            *made = Made {
                words: Vec::new(),
                futex: Some(futex),
            }
        });
    }

    pub fn make(value: u64) -> u64 {
        let word = Rc::new(AtomicU64::new(value));
        MADE.with_borrow_mut(|made| {
            made.words.push(word);
            made.words.len() as u64
        })
    }

    fn word(number: u64) -> Rc<AtomicU64> {
        MADE.with_borrow(|made| made.words[number as usize - 1].clone())
    }

    pub fn fence(order: Ordering) {
        loom::sync::atomic::fence(order);
    }

    fn ordered<T>(order: Ordering, operation: impl FnOnce() -> T) -> T {
        if order == SeqCst && FENCES.get() == Fences::Before {
            fence(SeqCst);
        }
        let result = operation();
        if order == SeqCst && FENCES.get() == Fences::Behind {
            fence(SeqCst);
        }
        result
    }

    pub fn load(number: u64, order: Ordering) -> u64 {
        ordered(order, || word(number).load(order))
    }

    pub fn store(number: u64, value: u64, order: Ordering) {
        ordered(order, || word(number).store(value, order));
    }

    pub fn change(number: u64, change: Change, order: Ordering) -> u64 {
        let word = word(number);
        ordered(order, || match change {
            Change::Swap(new) => word.swap(new, order),
            Change::Add(by) => word.fetch_add(by, order),
            Change::Sub(by) => word.fetch_sub(by, order),
            Change::Or(bits) => word.fetch_or(bits, order),
            Change::And(bits) => word.fetch_and(bits, order),
            Change::Max(other) => word.fetch_max(other, order),
            Change::Cas(from, to) => {
                let failed = if order == Relaxed { Relaxed } else { Acquire };
                word.compare_exchange(from, to, order, failed)
                    .unwrap_or_else(|found| found)
            }
        })
    }

    fn futex() -> Rc<(Mutex<()>, Condvar)> {
        MADE.with_borrow(|made| made.futex.clone())
            .expect("a model runs")
    }

    /// Without a limit: a sleeper that is not woken hangs, and loom reports it.
    pub fn wait(number: u64, seen: u32) {
        let futex = futex();
        let Ok(guard) = futex.0.lock() else { return };
        if load(number, Relaxed) as u32 == seen {
            drop(futex.1.wait(guard));
        }
    }

    pub fn wake() {
        let futex = futex();
        let _guard = futex.0.lock();
        futex.1.notify_all();
    }
}

#[cfg(miri)]
mod in_loom {
    use std::sync::atomic::Ordering;

    use super::Change;

    pub fn make(_: u64) -> u64 {
        unreachable!("no loom under Miri")
    }
    pub fn fence(_: Ordering) {}
    pub fn load(_: u64, _: Ordering) -> u64 {
        0
    }
    pub fn store(_: u64, _: u64, _: Ordering) {}
    pub fn change(_: u64, _: Change, _: Ordering) -> u64 {
        0
    }
    pub fn wait(_: u64, _: u32) {}
    pub fn wake() {}
}

/// Begins an execution of a loom model. To be called by its first thread.
#[cfg(not(miri))]
pub fn begin() {
    set(Way::Loom);
    in_loom::begin();
}

/// A value as bits.
trait Value: Copy {
    fn bits(self) -> u64;
    fn of(bits: u64) -> Self;
}

macro_rules! values {
    ($($value:ty)*) => {
        $(impl Value for $value {
            fn bits(self) -> u64 {
                self.into()
            }
            fn of(bits: u64) -> $value {
                bits as $value
            }
        })*
    };
}

values!(u8 u32 u64);

impl Value for bool {
    fn bits(self) -> u64 {
        self.into()
    }
    fn of(bits: u64) -> bool {
        bits != 0
    }
}

macro_rules! atomics {
    ($($name:ident: $value:ty => $cell:ident, $raw:ty;)*) => {
        $(
            #[derive(Default)]
            #[repr(transparent)]
            pub struct $name(std::sync::atomic::$cell);

            impl $name {
                /// That a word is loom's.
                const MADE: $raw = 1 << (<$raw>::BITS - 1);

                pub const fn new(value: $value) -> $name {
                    $name(std::sync::atomic::$cell::new(value as $raw))
                }

                /// Makes the word, if it is a model's, before other threads use it.
                pub fn touch(&self) {
                    if way() == Way::Loom {
                        self.number();
                    }
                }

                /// Its number in loom.
                fn number(&self) -> u64 {
                    let mut raw = self.0.load(Relaxed);
                    if raw & Self::MADE == 0 {
                        let number = in_loom::make(raw.into());
                        assert!(number < Self::MADE.into(), "too many words for so small a one");
                        raw = number as $raw | Self::MADE;
                        self.0.store(raw, Relaxed);
                    }
                    (raw & !Self::MADE).into()
                }

                fn address(&self) -> usize {
                    std::ptr::from_ref(self) as usize
                }

                #[track_caller]
                pub fn load(&self, order: Ordering) -> $value {
                    <$value>::of(match plant::effect(Location::caller(), Op::Load) {
                        Some(Effect::Says(bits)) => bits,
                        Some(Effect::Order(order)) => self.look(order),
                        _ => self.look(order),
                    })
                }

                fn look(&self, order: Ordering) -> u64 {
                    match way() {
                        Way::Plain => self.0.load(order).into(),
                        Way::Loom => in_loom::load(self.number(), order),
                        Way::Steps => steps::load(self.address(), || self.0.load(SeqCst).into()),
                    }
                }

                #[track_caller]
                pub fn store(&self, value: $value, order: Ordering) {
                    match plant::effect(Location::caller(), Op::Store) {
                        Some(Effect::Omitted) => {}
                        Some(Effect::Order(order)) => self.put(value.bits(), order),
                        _ => self.put(value.bits(), order),
                    }
                }

                fn put(&self, bits: u64, order: Ordering) {
                    match way() {
                        Way::Plain => self.0.store(bits as $raw, order),
                        Way::Loom => in_loom::store(self.number(), bits, order),
                        Way::Steps => {
                            steps::change(self.address(), size_of::<$name>(), || {
                                self.0.swap(bits as $raw, SeqCst).into()
                            });
                        }
                    }
                }

                #[track_caller]
                fn change(&self, change: Change, order: Ordering) -> u64 {
                    match plant::effect(Location::caller(), Op::Rmw) {
                        Some(Effect::Omitted) => self.look(Relaxed),
                        Some(Effect::Says(bits)) => bits,
                        Some(Effect::Order(order)) => self.change_as(change, order),
                        Some(Effect::Split) => {
                            let old = self.look(SeqCst);
                            if let Some(new) = change.of(old) {
                                self.put(new, SeqCst);
                            }
                            old
                        }
                        None => self.change_as(change, order),
                    }
                }

                fn change_as(&self, change: Change, order: Ordering) -> u64 {
                    let here = |order, failed| {
                        let changed = self.0.fetch_update(order, failed, |old| {
                            change.of(old.into()).map(|new| new as $raw)
                        });
                        changed.unwrap_or_else(|found| found).into()
                    };
                    match way() {
                        Way::Plain => here(order, Relaxed),
                        Way::Loom => in_loom::change(self.number(), change, order),
                        Way::Steps => {
                            steps::change(self.address(), size_of::<$name>(), || here(SeqCst, SeqCst))
                        }
                    }
                }

                #[track_caller]
                pub fn swap(&self, value: $value, order: Ordering) -> $value {
                    <$value>::of(self.change(Change::Swap(value.bits()), order))
                }

                #[track_caller]
                pub fn compare_exchange(
                    &self,
                    from: $value,
                    to: $value,
                    order: Ordering,
                    _: Ordering,
                ) -> Result<$value, $value> {
                    let found = <$value>::of(self.change(Change::Cas(from.bits(), to.bits()), order));
                    if found == from { Ok(found) } else { Err(found) }
                }

                /// Changes the word unless `change` gives none for what it is.
                #[track_caller]
                pub fn fetch_update(
                    &self,
                    order: Ordering,
                    failed: Ordering,
                    change: impl Fn($value) -> Option<$value>,
                ) -> Result<$value, $value> {
                    let mut found = self.load(failed);
                    while let Some(next) = change(found) {
                        match self.compare_exchange(found, next, order, failed) {
                            Ok(before) => return Ok(before),
                            Err(now) => found = now,
                        }
                    }
                    Err(found)
                }

                #[track_caller]
                pub fn fetch_or(&self, value: $value, order: Ordering) -> $value {
                    <$value>::of(self.change(Change::Or(value.bits()), order))
                }

                #[track_caller]
                pub fn fetch_and(&self, value: $value, order: Ordering) -> $value {
                    <$value>::of(self.change(Change::And(value.bits()), order))
                }

                #[track_caller]
                pub fn fetch_max(&self, value: $value, order: Ordering) -> $value {
                    <$value>::of(self.change(Change::Max(value.bits()), order))
                }

                #[track_caller]
                pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                    <$value>::of(self.change(Change::Add(value.bits()), order))
                }

                #[track_caller]
                pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                    <$value>::of(self.change(Change::Sub(value.bits()), order))
                }
            }

            impl fmt::Debug for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str(stringify!($name))
                }
            }

            impl Word for $name {
                fn sleep(&self, seen: u32) {
                    match way() {
                        Way::Plain => std::thread::yield_now(),
                        Way::Loom => in_loom::wait(self.number(), seen),
                        Way::Steps => steps::wait(|| u64::from(self.0.load(SeqCst)) as u32 == seen),
                    }
                }
            }
        )*
    };
}

atomics! {
    AtomicBool: bool => AtomicU8, u8;
    AtomicU32: u32 => AtomicU32, u32;
    AtomicU64: u64 => AtomicU64, u64;
}

/// A pointer as a word.
#[derive(Debug)]
pub struct AtomicPtr<T>(AtomicU64, PhantomData<*mut T>);

// SAFETY: a word.
unsafe impl<T> Sync for AtomicPtr<T> {}

impl<T> AtomicPtr<T> {
    #[track_caller]
    pub fn load(&self, order: Ordering) -> *mut T {
        self.0.load(order) as *mut T
    }

    #[track_caller]
    pub fn compare_exchange(
        &self,
        from: *mut T,
        to: *mut T,
        order: Ordering,
        failed: Ordering,
    ) -> Result<*mut T, *mut T> {
        let changed = self
            .0
            .compare_exchange(from as u64, to as u64, order, failed);
        changed
            .map(|found| found as *mut T)
            .map_err(|found| found as *mut T)
    }
}

/// An object to sleep on.
pub trait Word {
    fn sleep(&self, seen: u32);
}

#[track_caller]
pub fn fence(order: Ordering) {
    if plant::effect(Location::caller(), Op::Fence).is_some() {
        return;
    }
    match way() {
        Way::Plain => std::sync::atomic::fence(order),
        Way::Loom => in_loom::fence(order),
        Way::Steps => {}
    }
}

/// As the kernel's, in the model without an end.
pub fn wait(word: &impl Word, seen: u32, _: Duration) {
    word.sleep(seen);
}

#[track_caller]
pub fn wake(_: &impl Word) {
    if plant::effect(Location::caller(), Op::Wake).is_some() {
        return;
    }
    if way() == Way::Loom {
        in_loom::wake();
    }
}

/// In the model both halves are one.
pub fn low_half(word: &AtomicU64) -> &AtomicU64 {
    word
}
