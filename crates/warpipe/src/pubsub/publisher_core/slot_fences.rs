//! The fence words of a publisher's slots: each says when the work on its slot is done.
//!
//! A word only grows, and each value is given out once. So a value that the word has reached says
//! that the work in front of that value's signal is done, and no earlier user of the slot can
//! reach it. The CPU stores a value only after the driver has refused its signal.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{StreamOp, TimelineWord};
use crate::device::Device;
use crate::error::Result;
use crate::fork::CloseOnForkFd;
use crate::memory::arena::{SLOTS_MAX, SlotId};
use crate::shm::page::{SharedPage, words_bytes};

/// The most pieces of [`SLOTS_MAX`] words. A publisher with a history has one: its subscribers map
/// the words once.
const PIECES_MAX: usize = 64;

pub(in crate::pubsub) struct SlotFences {
    /// Each of [`SLOTS_MAX`] words, made when the slots before are all in use.
    pieces: [OnceLock<SharedPage>; PIECES_MAX],
    device: Device,
    /// The words' memory, for subscribers of a history.
    published: Option<CloseOnForkFd>,
    /// The last value given out: no word has reached a later one.
    last: AtomicU64,
}

impl SlotFences {
    /// One word for each slot, which subscribers can map if `is_published`.
    pub(super) fn new(device: &Device, is_published: bool) -> Result<SlotFences> {
        let (words, published) = if is_published {
            let (words, fd) = SharedPage::publish(Some(device), words_bytes(SLOTS_MAX))?;
            (words, Some(fd))
        } else {
            (SharedPage::private(device, words_bytes(SLOTS_MAX))?, None)
        };
        let pieces = std::array::from_fn(|_| OnceLock::new());
        let _ = pieces[0].set(words);
        Ok(SlotFences {
            pieces,
            device: device.clone(),
            published,
            last: AtomicU64::new(0),
        })
    }

    /// The words' length in bytes and descriptor, if they are published.
    pub(super) fn published(&self) -> Option<(u64, BorrowedFd<'_>)> {
        let fd = self.published.as_ref()?;
        Some((self.pieces[0].get()?.bytes() as u64, fd.as_fd()))
    }

    /// Makes the words of more slots, which calls the driver. Returns how many slots have one; no
    /// more than before if there can be no more.
    pub(super) fn extend(&self) -> Result<usize> {
        let made = || self.pieces.iter().take_while(|piece| piece.get().is_some());
        if self.published.is_none()
            && let Some(next) = self.pieces.get(made().count())
        {
            // Another thread may have made it meanwhile.
            let _ = next.set(SharedPage::private(&self.device, words_bytes(SLOTS_MAX))?);
        }
        Ok(made().count() * SLOTS_MAX)
    }

    /// The words that a slot's is one of, and its number there. An arena hands out no slot without.
    #[inline]
    fn words_of(&self, slot: SlotId) -> (&SharedPage, usize) {
        let (piece, number) = (slot as usize / SLOTS_MAX, slot as usize % SLOTS_MAX);
        let words = self.pieces[piece].get();
        (words.expect("made before its slots are allowed"), number)
    }

    #[inline]
    fn word(&self, slot: SlotId) -> &TimelineWord {
        let (words, number) = self.words_of(slot);
        words.word(number)
    }

    /// A new value, and the operation that signals it.
    #[inline]
    pub(super) fn next(&self, slot: SlotId) -> (u64, StreamOp) {
        let value = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (words, number) = self.words_of(slot);
        (value, words.signal(number, value))
    }

    #[inline]
    pub(in crate::pubsub) fn is_reached(&self, slot: SlotId, value: u64) -> bool {
        self.word(slot).reached(value)
    }

    /// Stores a value that no stream is going to signal.
    pub(super) fn store(&self, slot: SlotId, value: u64) {
        self.word(slot).store(value);
    }
}
