//! The open waits of this process's streams, as far as the CPU can see them. **This module is
//! marked for unsafe**: it reads words by their device addresses.
//!
//! `cuMemHostUnregister` waits until all streams of the context have done their work. If one of
//! them waits for a word that another process stores, it waits for that process, and meanwhile
//! every `cuMemAlloc` and `cuMemHostRegister` of this process waits as well (measured on an H200,
//! driver 580.159.04: results/history/h200-recovery). So the library does not call it while a wait
//! that it enqueued itself is open, and enqueues none meanwhile: the thread that would enqueue one
//! could be the one to end it, behind an allocation. Kernels and the user's own waits are not seen:
//! for those it waits as `cuMemFree` does, and waits are enqueued again [`UNREGISTERING_MAX`] later.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

use crate::backend::{DevicePtr, StreamOp};
use crate::error::{Error, Result};
use crate::fork::per_process::PerProcess;

/// The most mappings that stay registered until no wait is open. The next one is unregistered at
/// once, whatever waits.
const POSTPONED_MAX: usize = 1024;

/// The number of earlier waits that are checked for each new one. With two, the list cannot exceed
/// the open waits by more than those recorded since its last pass.
const LOOKS: usize = 2;

/// How long waits are held back for one unregistration: many times what it takes by itself. It
/// looks at the streams when it begins.
const UNREGISTERING_MAX: Duration = Duration::from_millis(10);

static WAITS: PerProcess<Mutex<Waits>> = PerProcess::new();

/// Host memory that a device can access.
#[derive(Debug)]
struct Registered {
    host: *mut u8,
    bytes: usize,
}

// SAFETY: an address; it is read through only under the lock, while the memory is mapped.
unsafe impl Send for Registered {}

#[derive(Debug, Clone, Copy)]
struct Wait {
    context: Context,
    word: DevicePtr,
    value: u64,
}

/// The number of one opening of a device; no other opening has it.
pub(super) type Context = u64;

/// A new number.
pub(super) fn next_context() -> Context {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Relaxed) + 1
}

#[derive(Debug, Default)]
struct Waits {
    /// By device address.
    registered: BTreeMap<DevicePtr, Registered>,
    /// Waits that may be open.
    noted: VecDeque<Wait>,
    /// Host addresses of mappings with a postponed unregistration.
    postponed: BTreeSet<usize>,
    /// Host addresses of memory that is being unregistered, each with the time from which on waits
    /// are enqueued all the same.
    unregistering: BTreeMap<usize, Instant>,
}

/// Records memory that has been registered. It stays mapped until [`unregister`].
pub(super) fn registered(host: *mut u8, bytes: usize, device: DevicePtr) {
    WAITS
        .lock()
        .registered
        .insert(device, Registered { host, bytes });
}

/// Records the waits among operations that are enqueued next, once no memory is being unregistered.
#[inline]
pub(super) fn enqueueing(context: Context, ops: &[StreamOp]) {
    if ops.iter().any(|op| matches!(op, StreamOp::Wait { .. })) {
        note_in_turn(&WAITS, context, ops);
    }
}

/// The driver has refused these operations.
#[cold]
pub(super) fn refused(context: Context, ops: &[StreamOp]) {
    WAITS.lock().withdraw(context, ops);
}

fn note_in_turn(waits: &PerProcess<Mutex<Waits>>, context: Context, ops: &[StreamOp]) {
    loop {
        let mut waits = waits.lock();
        if !waits.are_held_back() {
            return waits.note(context, ops);
        }
        drop(waits);
        std::thread::yield_now();
    }
}

/// The device was reset: its streams are gone, and their waits are over.
pub(super) fn reset(context: Context) {
    WAITS.lock().end(context);
}

/// Waits are held back as long as it lives, or [`UNREGISTERING_MAX`]. It has the host address.
#[derive(Debug)]
pub(super) struct Unregistering(usize);

/// Removes memory that is unregistered next, and may be unmapped after that. Not while a wait is
/// open: then it must stay registered for now. No stream uses the memory, so no wait on its own
/// words is open.
pub(super) fn unregister(host: *mut u8) -> Result<Unregistering> {
    let mut waits = WAITS.lock();
    waits.forget(host);
    let is_postponed = waits.postponed.contains(&host.addr());
    let has_room = is_postponed || waits.postponed.len() < POSTPONED_MAX;
    if has_room && waits.is_any_open() {
        waits.postponed.insert(host.addr());
        let what = "the end of all waits for peers";
        return Err(Error::timeout(what, Duration::ZERO));
    }
    waits.postponed.remove(&host.addr());
    waits.hold_back(host);
    Ok(Unregistering(host.addr()))
}

impl Drop for Unregistering {
    fn drop(&mut self) {
        WAITS.lock().unregistering.remove(&self.0);
    }
}

impl Waits {
    fn note(&mut self, context: Context, ops: &[StreamOp]) {
        for op in ops {
            let StreamOp::Wait { word, value } = *op else {
                continue;
            };
            for _ in 0..LOOKS {
                let Some(earlier) = self.noted.pop_front() else {
                    break;
                };
                if self.is_open(earlier) {
                    self.noted.push_back(earlier);
                }
            }
            self.noted.push_back(Wait {
                context,
                word,
                value,
            });
        }
    }

    /// Takes back one note of each wait: another stream may have been given the same wait.
    fn withdraw(&mut self, context: Context, ops: &[StreamOp]) {
        for op in ops {
            let is_it = |noted: &Wait| {
                let (word, value) = (noted.word, noted.value);
                noted.context == context && *op == StreamOp::Wait { word, value }
            };
            if let Some(index) = self.noted.iter().position(is_it) {
                self.noted.remove(index);
            }
        }
    }

    fn hold_back(&mut self, host: *mut u8) {
        let until = Instant::now() + UNREGISTERING_MAX;
        self.unregistering.insert(host.addr(), until);
    }

    fn are_held_back(&self) -> bool {
        let mut all = self.unregistering.values();
        all.any(|&until| Instant::now() < until)
    }

    fn end(&mut self, context: Context) {
        self.noted.retain(|wait| wait.context != context);
    }

    /// The memory is about to be unmapped: it is not read any more.
    fn forget(&mut self, host: *mut u8) {
        let noted = &mut self.noted;
        self.registered.retain(|&start, memory| {
            let is_other = memory.host != host;
            let range = start..start + memory.bytes as u64;
            noted.retain(|wait| is_other || !range.contains(&wait.word));
            is_other
        });
    }

    fn is_any_open(&mut self) -> bool {
        while let Some(&first) = self.noted.front() {
            if self.is_open(first) {
                return true;
            }
            self.noted.pop_front();
        }
        false
    }

    /// Whether a word is below a value, as `CU_STREAM_WAIT_VALUE_GEQ` compares. Words outside
    /// registered memory count as reached.
    fn is_open(&self, Wait { word, value, .. }: Wait) -> bool {
        let Some((start, memory)) = self.registered.range(..=word).next_back() else {
            return false;
        };
        let offset = (word - start) as usize;
        if offset + size_of::<u64>() > memory.bytes || !offset.is_multiple_of(align_of::<u64>()) {
            return false;
        }
        // SAFETY: inside memory that is mapped as long as it is listed, and aligned, since mappings
        // begin on a page; words are only used atomically.
        let now = unsafe { AtomicU64::from_ptr(memory.host.add(offset).cast()) }.load(Acquire);
        (now.wrapping_sub(value) as i64) < 0
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Release;

    use super::*;

    /// A page of words, with another address for the device.
    struct Page {
        words: Box<[AtomicU64; 512]>,
        device: DevicePtr,
    }

    impl Page {
        fn new(waits: &mut Waits, device: DevicePtr) -> Page {
            let words = Box::new([const { AtomicU64::new(0) }; 512]);
            let host = words.as_ptr().cast_mut().cast();
            waits
                .registered
                .insert(device, Registered { host, bytes: 4096 });
            Page { words, device }
        }

        fn wait(&self, index: usize, value: u64) -> StreamOp {
            StreamOp::Wait {
                word: self.device + 8 * index as u64,
                value,
            }
        }
    }

    #[test]
    fn a_wait_is_open_until_its_word_has_reached_the_value() {
        let mut waits = Waits::default();
        let page = Page::new(&mut waits, 1 << 40);
        waits.note(
            1,
            &[
                page.wait(511, 2),
                StreamOp::Signal {
                    word: page.device,
                    value: 9,
                },
            ],
        );
        assert!(waits.is_any_open());
        page.words[511].store(1, Release);
        assert!(waits.is_any_open());
        page.words[511].store(3, Release);
        assert!(!waits.is_any_open());
        assert!(waits.noted.is_empty());
    }

    #[test]
    fn a_wait_that_is_open_is_found_behind_those_that_are_over() {
        let mut waits = Waits::default();
        let page = Page::new(&mut waits, 1 << 40);
        for value in 0..1_000 {
            waits.note(1, &[page.wait(1, value), page.wait(2, 1)]);
            page.words[1].store(value, Release);
        }
        assert!(waits.is_any_open());
        page.words[2].store(1, Release);
        assert!(!waits.is_any_open());
    }

    #[test]
    fn waits_that_are_over_are_forgotten_while_one_stays_open() {
        let mut waits = Waits::default();
        let page = Page::new(&mut waits, 1 << 40);
        waits.note(1, &[page.wait(2, 1)]);
        for _ in 0..10_000 {
            waits.note(1, &[page.wait(1, 0)]);
        }
        assert!(waits.noted.len() < 8, "{} are kept", waits.noted.len());
        assert!(waits.is_any_open());
    }

    #[test]
    fn memory_that_is_given_up_is_not_read_any_more() {
        let mut waits = Waits::default();
        let page = Page::new(&mut waits, 1 << 40);
        let other = Page::new(&mut waits, 2 << 40);
        waits.note(1, &[page.wait(0, 1), other.wait(0, 1)]);
        waits.forget(page.words.as_ptr().cast_mut().cast());
        drop(page);
        assert!(waits.is_any_open(), "the other one's");
        other.words[0].store(1, Release);
        assert!(!waits.is_any_open());
        assert_eq!(waits.registered.len(), 1);
    }

    #[test]
    fn a_wait_that_the_driver_refused_is_not_open() {
        let mut waits = Waits::default();
        let page = Page::new(&mut waits, 1 << 40);
        waits.note(1, &[page.wait(1, 1)]);
        waits.note(1, &[page.wait(2, 1), page.wait(3, 1)]);
        waits.withdraw(1, &[page.wait(2, 1), page.wait(3, 1)]);
        assert!(waits.is_any_open(), "the first one");
        page.words[1].store(1, Release);
        assert!(!waits.is_any_open());
    }

    #[test]
    fn a_refused_wait_leaves_the_same_wait_of_another_stream_open() {
        let mut waits = Waits::default();
        let page = Page::new(&mut waits, 1 << 40);
        waits.note(1, &[page.wait(1, 1)]);
        waits.note(1, &[page.wait(1, 1)]);
        waits.withdraw(1, &[page.wait(1, 1)]);
        assert!(waits.is_any_open(), "the one that was enqueued");
        waits.withdraw(1, &[page.wait(1, 1)]);
        assert!(!waits.is_any_open());
    }

    #[test]
    fn a_wait_is_enqueued_behind_an_unregistration_that_is_under_way_but_not_for_ever() {
        let waits = PerProcess::<Mutex<Waits>>::new();
        let page = Page::new(&mut waits.lock(), 1 << 40);
        let until = Instant::now() + Duration::from_secs(600);
        waits.lock().unregistering.insert(1, until);
        let begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let noted = scope.spawn(|| {
                begun.store(true, Release);
                note_in_turn(&waits, 1, &[page.wait(1, 1)]);
                waits.lock().are_held_back()
            });
            while !begun.load(Acquire) {
                std::thread::yield_now();
            }
            for _ in 0..1_000 {
                std::thread::yield_now();
                assert!(waits.lock().noted.is_empty());
            }
            waits.lock().unregistering.clear();
            assert!(!noted.join().unwrap());
        });
        assert!(waits.lock().is_any_open());
        waits.lock().hold_back(ptr::without_provenance_mut(1));
        note_in_turn(&waits, 1, &[page.wait(2, 1)]);
        assert_eq!(waits.lock().noted.len(), 2);
    }

    #[test]
    fn waits_are_held_back_until_every_unregistration_is_over() {
        let unregistering = |at| unregister(ptr::without_provenance_mut(at)).unwrap();
        let is_held = |host: usize| WAITS.lock().unregistering.contains_key(&host);
        for (first, last) in [(1, 2), (2, 1)] {
            let mut both = BTreeMap::from([(1, unregistering(1)), (2, unregistering(2))]);
            both.remove(&first);
            assert!(!is_held(first) && is_held(last));
            drop(both);
            assert!(!is_held(last));
        }
    }

    #[test]
    fn no_wait_of_a_device_that_was_reset_is_open() {
        let mut waits = Waits::default();
        let page = Page::new(&mut waits, 1 << 40);
        waits.note(1, &[page.wait(1, 1)]);
        waits.note(2, &[page.wait(2, 1)]);
        waits.end(1);
        assert!(waits.is_any_open(), "another device's");
        page.words[2].store(1, Release);
        assert!(!waits.is_any_open());
    }
}
