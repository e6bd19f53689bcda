//! One side of a ring on the CPU: the protocol of `device.cuh`, operation for operation. **This module is
//! marked for unsafe**: it uses memory by the addresses of a parameter block.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::layout::{self, block, peer};
use crate::atomic::{AtomicU64, fence};

/// How a wait ended without its item.
///
/// As a number it is the status that kernels return: `WARPIPE_RING_...` of `device.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[repr(u64)]
pub enum RingEnd {
    /// Every peer has ended, the last one gracefully.
    Closed = 1,
    /// Every peer has ended, and the process of the last one is proven dead.
    Died = 2,
    /// A peer's process has exited; a child that it forked may keep its kernels running.
    Orphaned = 3,
    /// This side stops: [`KernelRing::stop`](crate::KernelRing::stop), or its drop.
    Stopped = 4,
    /// The item did not come within the ring's limit of looks.
    SpinLimit = 5,
    /// The kernel was compiled for another version of the library.
    WrongLayout = 6,
}

impl RingEnd {
    /// The end that a kernel returned as this status. `None` for `WARPIPE_RING_OK`.
    pub fn of_status(status: u64) -> Option<RingEnd> {
        match status {
            0 => None,
            1 => Some(RingEnd::Closed),
            2 => Some(RingEnd::Died),
            3 => Some(RingEnd::Orphaned),
            4 => Some(RingEnd::Stopped),
            5 => Some(RingEnd::SpinLimit),
            _ => Some(RingEnd::WrongLayout),
        }
    }
}

/// One side of a [`KernelRing`](crate::KernelRing) in the CPU version of a kernel, which gets the
/// ring's parameter block as an argument. Its methods do what the functions of `device.cuh` do; a thread
/// of the CPU stands for a whole block of a GPU's.
#[derive(Debug, Clone, Copy)]
pub struct HostRing {
    params: u64,
}

impl HostRing {
    /// The side with this parameter block.
    ///
    /// # Safety
    /// `params` came from [`KernelRing::params`](crate::KernelRing::params) of a ring of the host
    /// backend, in this process, and the ring or the stream that it was given for is not past this
    /// use.
    pub unsafe fn new(params: u64) -> HostRing {
        HostRing { params }
    }

    /// A number of the block that no kernel writes.
    fn number(self, offset: u64) -> u64 {
        // SAFETY: an aligned word inside the block, which `new`'s caller keeps, and which is
        // written before a kernel gets it.
        unsafe { *((self.params + offset) as *const u64) }
    }

    /// A word at an address of the block, or in it.
    fn word(&self, address: u64) -> &AtomicU64 {
        // SAFETY: the block names aligned words of mapped memory, used as atomics alone, for as
        // long as `new`'s caller keeps it.
        unsafe { &*(address as *const AtomicU64) }
    }

    fn own(&self, offset: u64) -> &AtomicU64 {
        self.word(self.params + offset)
    }

    fn slot_number(self, item: u64) -> u64 {
        item & (self.number(block::DEPTH) - 1)
    }

    /// The next item of this side that no kernel has claimed.
    #[cfg(any(test, loom))]
    pub(crate) fn position(&self) -> u64 {
        self.own(block::CURSOR).load(Relaxed)
    }

    /// Claims the next item.
    pub fn claim(&self) -> u64 {
        self.own(block::CURSOR).fetch_add(1, AcqRel)
    }

    /// The slot of an item. A consumer may only read it.
    pub fn slot(&self, item: u64) -> *mut u8 {
        let offset = self.slot_number(item) * self.number(block::SLOT_BYTES);
        (self.number(block::SLOTS) + offset) as *mut u8
    }

    /// Waits until the item's slot may be used.
    ///
    /// # Errors
    /// The slot may not be used: the kernel is to return.
    pub fn wait(&self, item: u64) -> Result<(), RingEnd> {
        match RingEnd::of_status(self.wait_status(item)) {
            None => Ok(()),
            Some(end) => Err(end),
        }
    }

    fn wait_status(&self, item: u64) -> u64 {
        if self.number(block::LAYOUT) != layout::LAYOUT {
            return RingEnd::WrongLayout as u64;
        }
        if item % layout::STOP_LOOK == layout::STOP_LOOK - 1 && self.is_stopped() {
            return RingEnd::Stopped as u64;
        }
        if self.number(block::ROLE) == layout::CONSUMER {
            return self.wait_for(block::PEER, item, item + 1);
        }
        let (depth, peers) = (self.number(block::DEPTH), self.number(block::PEERS));
        if item < depth {
            return 0;
        }
        if peers == 1 {
            // Nothing to remember: the end of the one consumer is the ring's.
            return self.wait_for(block::PEER, item, item - depth + 1);
        }
        let (mut last, mut lost) = (0, 0);
        for peer in (0..peers).map(|index| block::PEER + index * peer::BYTES) {
            let mut seen = self.own(peer + peer::LOST).load(Relaxed);
            if seen == 0 {
                seen = self.wait_for(peer, item, item - depth + 1);
                match RingEnd::of_status(seen) {
                    None => {}
                    Some(RingEnd::Closed | RingEnd::Died) => {
                        self.own(peer + peer::LOST).store(seen, Relaxed)
                    }
                    Some(_) => return seen,
                }
            }
            if seen != 0 {
                (last, lost) = (seen, lost + 1);
            }
        }
        if lost == peers { last } else { 0 }
    }

    /// Waits until one peer's word of the item is at `due`.
    fn wait_for(&self, peer: u64, item: u64, due: u64) -> u64 {
        let base = self.number(peer + peer::MINE);
        let word = self.word(base + self.slot_number(item) * layout::WORD_STRIDE);
        let spins_max = self.number(block::SPINS_MAX);
        let look_every = self.number(block::LOOK_EVERY);
        let mut spins = 0;
        while word.load(Acquire) < due {
            spins += 1;
            if spins % look_every == 0 {
                if self.is_stopped() {
                    return RingEnd::Stopped as u64;
                }
                let gone = self.word(self.number(peer + peer::GONE)).load(Acquire);
                if gone != 0 {
                    // The word may have come before the end did.
                    return if word.load(Acquire) < due { gone } else { 0 };
                }
            }
            if spins >= spins_max {
                return RingEnd::SpinLimit as u64;
            }
            // A look then takes about as long as a GPU's, so one limit of looks serves both.
            match spins {
                ..64 => std::hint::spin_loop(),
                _ => std::thread::yield_now(),
            }
        }
        0
    }

    fn is_stopped(&self) -> bool {
        self.word(self.number(block::STOP)).load(Relaxed) != 0
    }

    /// Passes the item's slot on: a producer to its consumers, a consumer back.
    pub fn pass(&self, item: u64) {
        let offset = self.slot_number(item) * layout::WORD_STRIDE;
        fence(AcqRel);
        for index in 0..self.number(block::PEERS) {
            let theirs = self.number(block::PEER + index * peer::BYTES + peer::THEIRS);
            self.word(theirs + offset).store(item + 1, Relaxed);
        }
    }

    /// One of `blocks` threads that share the item has finished its part; the last one passes it
    /// on.
    pub fn arrive(&self, item: u64, blocks: u64) {
        if blocks > 1 {
            let arrivals = self.own(block::ARRIVALS + self.slot_number(item) * 8);
            if arrivals.fetch_add(1, AcqRel) + 1 < blocks {
                return;
            }
            arrivals.store(0, Relaxed);
        }
        self.pass(item);
        self.own(block::CURSOR).store(item + 1, Relaxed);
    }

    /// The step of a stream that waits for the next item.
    pub(crate) fn wait_step(&self) {
        if self.own(block::FAILED).load(Relaxed) != 0 {
            return;
        }
        let item = self.own(block::CURSOR).load(Relaxed);
        let status = self.wait_status(item);
        if status == 0 {
            return self.own(block::GRANTED).store(item + 1, Relaxed);
        }
        self.own(block::FAILED).store(status, Relaxed);
        self.word(self.number(block::STATUS)).store(status, Release);
    }

    /// The step of a stream that passes on the item that the step before it was given, if any.
    pub(crate) fn pass_step(&self) {
        let item = self.own(block::CURSOR).load(Relaxed);
        if self.own(block::GRANTED).load(Relaxed) != item + 1 {
            return;
        }
        self.pass(item);
        self.own(block::CURSOR).store(item + 1, Relaxed);
    }
}
