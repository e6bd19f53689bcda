//! The atomics of what processes share, and how a thread sleeps on one: the machine's. The lock-free parts use them from
//! here, so that `verify/` can put models of them in their place.

use std::time::Duration;

use rustix::thread::{Timespec, futex};

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, fence};

/// Sleeps as long as `word` is `seen`, at most `limit`. Wakes spuriously.
pub(crate) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = Timespec {
        tv_sec: limit.as_secs() as _,
        tv_nsec: limit.subsec_nanos() as _,
    };
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&limit));
}

/// Wakes all who sleep on `word`.
pub(crate) fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
}

/// The half of `word` that is slept on: the one that every step of a number changes.
pub(crate) fn low_half(word: &AtomicU64) -> &AtomicU32 {
    let base = std::ptr::from_ref(word).cast::<AtomicU32>();
    // SAFETY: `word` is 8 aligned bytes, so each half is a valid, aligned AtomicU32 that lives as long as it; the futex
    // only compares it, and no Rust code writes it through this type.
    unsafe { &*base.add(usize::from(cfg!(target_endian = "big"))) }
}
