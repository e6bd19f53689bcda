//! The 64-bit timeline word that devices and processes order themselves by.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::atomic::{self, AtomicU32, AtomicU64, fence};
use crate::backoff::Backoff;

/// A 64-bit value in shared memory that only grows, and beside it the count of CPU threads parked
/// on it.
///
/// On CUDA the device reads and writes `value` through the registered mapping, and wakes no thread.
/// On the host backend a waiting stream is a thread, which parks on the word with a futex. The word
/// has 16 bytes, so that the layout of a link segment does not depend on the backend.
#[repr(C, align(16))]
#[derive(Debug, Default)]
pub struct TimelineWord {
    value: AtomicU64,
    parked: AtomicU32,
    _reserved: AtomicU32,
}

const _: () = assert!(size_of::<TimelineWord>() == 16);

/// The longest sleep of a parked thread between checks: a lost wake-up costs this, never a hang. A
/// thread that stores a word wakes those that sleep on it, unless it dies in between.
pub(super) const PARK_MAX: Duration = Duration::from_millis(100);

/// Attempts to raise a word while a peer may write any value there.
const ATTEMPTS: u32 = 64;

impl TimelineWord {
    /// The value now.
    #[inline]
    pub fn load(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }

    /// Whether `value` has been reached, compared as `cuStreamWaitValue64` does with `GEQ` (signed
    /// difference).
    #[inline]
    pub fn reached(&self, value: u64) -> bool {
        self.load().wrapping_sub(value) as i64 >= 0
    }

    /// Whether the value is exactly `value`: an honest writer stores it, and random writes hardly
    /// ever do.
    #[inline]
    pub(crate) fn is(&self, value: u64) -> bool {
        self.load() == value
    }

    /// Stores `value` with the CPU and wakes threads parked here. Device streams see the store by
    /// themselves.
    #[inline]
    pub fn store(&self, value: u64) {
        // Pairs with the fence in `park`: in the total order of this exchange and that fence,
        // either this thread sees the parked thread, or the parked thread sees the value. An
        // exchange is cheaper than a store and a fence.
        self.value.swap(value, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst) != 0 {
            self.wake();
        }
    }

    /// Stores `value` with the CPU if the word is exactly at `from`. When several processes
    /// complete a dead process's signals, none sets the word back behind a later value.
    pub(crate) fn advance(&self, from: u64, value: u64) {
        let is_done = self
            .value
            .compare_exchange(from, value, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok();
        if is_done && self.parked.load(Ordering::SeqCst) != 0 {
            self.wake();
        }
    }

    /// Stores `value` with the CPU unless the word is past it: it never sets the word back,
    /// whatever other threads and processes write.
    pub(crate) fn bring_up(&self, value: u64) {
        for _ in 0..ATTEMPTS {
            let found = self.load();
            if found.wrapping_sub(value) as i64 >= 0 {
                return;
            }
            self.advance(found, value);
        }
    }

    /// Waits on the CPU until the value is at or above `value`; false once `limit` has passed. A word
    /// that a GPU stores is polled, as that ends no sleep.
    pub fn wait(&self, value: u64, limit: Duration, is_of_gpu: bool) -> bool {
        let (start, mut backoff) = (Instant::now(), Backoff::default());
        while !self.reached(value) {
            let left = limit.saturating_sub(start.elapsed());
            match backoff.step() {
                _ if left.is_zero() => return false,
                Duration::ZERO => std::hint::spin_loop(),
                pause if is_of_gpu => self.park(value, pause.min(left)),
                _ => self.park(value, left.min(PARK_MAX)),
            }
        }
        true
    }

    #[cold]
    fn wake(&self) {
        atomic::wake(atomic::low_half(&self.value));
    }

    /// Parks this thread until the value may have changed or `limit` has passed. Wakes spuriously.
    pub fn park(&self, value: u64, limit: Duration) {
        self.parked.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let seen = self.value.load(Ordering::Acquire);
        if (seen.wrapping_sub(value) as i64) < 0 {
            atomic::wait(atomic::low_half(&self.value), seen as u32, limit);
        }
        self.parked.fetch_sub(1, Ordering::Relaxed);
    }
}
