//! The fence words of a publisher's slots: each says when the work on its slot is done.
//!
//! A word only grows, and each value is given out once. So a value that the word has reached says
//! that the work in front of that value's signal is done, and no earlier user of the slot can
//! reach it. The CPU stores a value only after the driver has refused its signal.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::StreamOp;
use crate::device::Device;
use crate::error::Result;
use crate::fork::CloseOnForkFd;
use crate::memory::arena::{SLOTS_MAX, SlotId};
use crate::shm::fence_words::FenceWords;

pub(super) struct SlotFences {
    words: FenceWords,
    /// The words' memory, for subscribers of a history.
    published: Option<CloseOnForkFd>,
    /// The last value given out: no word has reached a later one.
    last: AtomicU64,
}

impl SlotFences {
    /// One word for each slot, which subscribers can map if `is_published`.
    pub(super) fn new(device: &Device, is_published: bool) -> Result<SlotFences> {
        let (words, published) = if is_published {
            let (words, fd) = FenceWords::published(device, SLOTS_MAX)?;
            (words, Some(fd))
        } else {
            (FenceWords::new(device, SLOTS_MAX)?, None)
        };
        Ok(SlotFences {
            words,
            published,
            last: AtomicU64::new(0),
        })
    }

    /// The words' length in bytes and descriptor, if they are published.
    pub(super) fn published(&self) -> Option<(u64, BorrowedFd<'_>)> {
        let fd = self.published.as_ref()?;
        Some((self.words.bytes(), fd.as_fd()))
    }

    /// A new value, and the operation that signals it.
    #[inline]
    pub(super) fn next(&self, slot: SlotId) -> (u64, StreamOp) {
        let value = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let word = self.words.device_word(slot as usize);
        (value, StreamOp::Signal { word, value })
    }

    /// The operation that waits for a value.
    pub(super) fn wait(&self, slot: SlotId, value: u64) -> StreamOp {
        let word = self.words.device_word(slot as usize);
        StreamOp::Wait { word, value }
    }

    #[inline]
    pub(super) fn is_reached(&self, slot: SlotId, value: u64) -> bool {
        self.words.word(slot as usize).reached(value)
    }

    /// Stores a value that no stream is going to signal.
    pub(super) fn store(&self, slot: SlotId, value: u64) {
        self.words.word(slot as usize).store(value);
    }
}
