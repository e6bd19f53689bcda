//! The atomics for memory that processes share, and the futex calls to sleep on one. Lock-free code
//! imports them from here: `verify/` has models in their place.

use std::time::Duration;

use rustix::thread::{Timespec, futex};

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};

/// The longest sleep: the kernel refuses times beyond its clock, and callers look again anyway.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// Sleeps while `word` is `seen`, at most `limit`. Wakes spuriously.
pub(crate) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = limit.min(SLEEP_MAX);
    let limit = Timespec {
        tv_sec: limit.as_secs() as _,
        tv_nsec: limit.subsec_nanos() as _,
    };
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&limit));
}

/// Wakes every thread that sleeps on `word`.
pub(crate) fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
}

/// The half of `word` that threads sleep on: the half that every step of a number changes.
pub(crate) fn low_half(word: &AtomicU64) -> &AtomicU32 {
    let base = std::ptr::from_ref(word).cast::<AtomicU32>();
    // SAFETY: `word` is 8 aligned bytes, so each half is a valid, aligned AtomicU32 that lives as
    // long as it; the futex only compares it, and no Rust code writes it through this type.
    unsafe { &*base.add(usize::from(cfg!(target_endian = "big"))) }
}
