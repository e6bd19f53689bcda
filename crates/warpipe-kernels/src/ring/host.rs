//! The host versions: a thread stands for all blocks.

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::thread;

use warpipe::{HostRing, KernelLaunch, RingEnd};

use crate::host::arguments;

fn word_of(seed: u64, item: u64, index: u64) -> u64 {
    seed.wrapping_add(item)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(index)
}

/// # Safety
/// `slot` names `words` writable words.
unsafe fn write_words(slot: *mut u8, words: u64, seed: u64, item: u64) {
    for index in 0..words {
        // SAFETY: below `words`, for which the caller vouches.
        unsafe {
            slot.cast::<u64>()
                .add(index as usize)
                .write(word_of(seed, item, index))
        };
    }
}

/// # Safety
/// `slot` names `words` readable words, `errors` one that is used only atomically.
unsafe fn check_words(slot: *const u8, words: u64, seed: u64, item: u64, errors: u64) {
    // SAFETY: below `words`, for which the caller vouches.
    let read = |index| unsafe { slot.cast::<u64>().add(index as usize).read() };
    let wrong = (0..words).filter(|&index| read(index) != word_of(seed, item, index));
    // SAFETY: the caller's promise.
    unsafe { word(errors) }.fetch_add(wrong.count() as u64, AcqRel);
}

/// # Safety
/// `address` names one aligned word that is used only atomically.
unsafe fn word<'a>(address: u64) -> &'a AtomicU64 {
    // SAFETY: the caller's promise; the callers use it within their call.
    unsafe { AtomicU64::from_ptr(with_exposed_provenance_mut(address as usize)) }
}

/// # Safety
/// `statuses` names one aligned word that is used only atomically.
unsafe fn report(outcome: Result<(), RingEnd>, statuses: u64) {
    if let Err(end) = outcome {
        // SAFETY: the caller's promise.
        unsafe { word(statuses) }.fetch_max(end as u64, AcqRel);
    }
}

/// # Safety
/// As for the kernel.
pub(super) unsafe fn send(launch: KernelLaunch<'_>) {
    let [params, items, words, seed, statuses] = arguments(&launch);
    // SAFETY: the caller vouches for the ring, its slots' length and the word.
    unsafe {
        let ring = HostRing::new(params);
        let outcome = (0..items).try_for_each(|_| {
            let item = ring.claim();
            ring.wait(item)?;
            write_words(ring.slot(item), words, seed, item);
            ring.pass(item);
            Ok(())
        });
        report(outcome, statuses);
    }
}

/// # Safety
/// As for the kernel.
pub(super) unsafe fn receive(launch: KernelLaunch<'_>) {
    let [params, items, words, seed, errors, statuses] = arguments(&launch);
    // SAFETY: as in `send`.
    unsafe {
        let ring = HostRing::new(params);
        let outcome = (0..items).try_for_each(|_| {
            let item = ring.claim();
            ring.wait(item)?;
            check_words(ring.slot(item), words, seed, item, errors);
            ring.pass(item);
            Ok(())
        });
        report(outcome, statuses);
    }
}

/// # Safety
/// As for the kernel.
pub(super) unsafe fn drain(launch: KernelLaunch<'_>) {
    let [params, items, words, places, statuses] = arguments(&launch);
    // SAFETY: as in `send`; the first block's place stands for all.
    unsafe {
        let ring = HostRing::new(params);
        let outcome = (0..items).try_for_each(|_| {
            let item = ring.claim();
            ring.wait(item)?;
            let place = with_exposed_provenance_mut::<u8>(places as usize);
            std::ptr::copy_nonoverlapping(ring.slot(item), place, 8 * words as usize);
            ring.pass(item);
            Ok(())
        });
        report(outcome, statuses);
    }
}

/// # Safety
/// As for the kernel.
pub(super) unsafe fn bare_drain(launch: KernelLaunch<'_>) {
    let [from, slots, items, words, places] = arguments(&launch);
    let from: *const u64 = with_exposed_provenance(from as usize);
    let place: *mut u64 = with_exposed_provenance_mut(places as usize);
    for item in 0..items {
        let offset = (item % slots * words) as usize;
        // SAFETY: the caller vouches for all slots and the place.
        unsafe { std::ptr::copy_nonoverlapping(from.add(offset), place, words as usize) };
    }
}

/// # Safety
/// As for the kernel.
pub(super) unsafe fn ping(launch: KernelLaunch<'_>) {
    let [out, back, rounds, words, seed, errors, statuses] = arguments(&launch);
    // SAFETY: as in `send`.
    unsafe {
        let (sends, receives) = (HostRing::new(out), HostRing::new(back));
        let outcome = (0..rounds).try_for_each(|_| {
            let (item, answer) = (sends.claim(), receives.claim());
            sends.wait(item)?;
            write_words(sends.slot(item), words, seed, item);
            sends.pass(item);
            receives.wait(answer)?;
            check_words(receives.slot(answer), words, seed, item, errors);
            receives.pass(answer);
            Ok(())
        });
        report(outcome, statuses);
    }
}

/// # Safety
/// As for the kernel.
pub(super) unsafe fn echo(launch: KernelLaunch<'_>) {
    let [incoming, out, rounds, words, statuses] = arguments(&launch);
    // SAFETY: as in `send`.
    unsafe {
        let (receives, sends) = (HostRing::new(incoming), HostRing::new(out));
        let outcome = (0..rounds).try_for_each(|_| {
            let (item, answer) = (receives.claim(), sends.claim());
            receives.wait(item)?;
            sends.wait(answer)?;
            let (from, to) = (receives.slot(item), sends.slot(answer));
            std::ptr::copy_nonoverlapping(from, to, 8 * words as usize);
            sends.pass(answer);
            receives.pass(item);
            Ok(())
        });
        report(outcome, statuses);
    }
}

/// # Safety
/// `address` names one aligned word that is used only atomically.
unsafe fn await_word(address: u64, due: u64, looks: u64) -> bool {
    for look in 0..looks {
        // SAFETY: the caller's promise.
        if unsafe { word(address) }.load(Acquire) >= due {
            return true;
        }
        match look % 64 {
            0 => thread::yield_now(),
            _ => std::hint::spin_loop(),
        }
    }
    false
}

/// # Safety
/// As for the kernel.
pub(super) unsafe fn bare_ping(launch: KernelLaunch<'_>) {
    let [mine, theirs, out, back, rounds, words, errors, looks] = arguments(&launch);
    let (out, back) = (
        with_exposed_provenance_mut(out as usize),
        with_exposed_provenance::<u8>(back as usize),
    );
    for round in 1..=rounds {
        // SAFETY: the caller vouches for the slots and the words.
        unsafe {
            write_words(out, words, 0, round);
            word(theirs).store(round, Release);
            if !await_word(mine, round, looks) {
                word(errors).fetch_add(1 << 32, AcqRel);
                return;
            }
            check_words(back, words, 0, round, errors);
        }
    }
}

/// # Safety
/// As for the kernel.
pub(super) unsafe fn bare_echo(launch: KernelLaunch<'_>) {
    let [mine, theirs, from, to, rounds, words, looks] = arguments(&launch);
    let (from, to): (*const u8, *mut u8) = (
        with_exposed_provenance(from as usize),
        with_exposed_provenance_mut(to as usize),
    );
    for round in 1..=rounds {
        // SAFETY: the caller vouches for the slots and the words.
        unsafe {
            if !await_word(mine, round, looks) {
                return;
            }
            std::ptr::copy_nonoverlapping(from, to, 8 * words as usize);
            word(theirs).store(round, Release);
        }
    }
}
