//! Page-locked memory for copies between the device and pageable memory. **This module is marked
//! for unsafe**: it maps that memory and hands out pointers to it.
//!
//! It is registered on demand, in pieces of three sizes, and is never unregistered:
//! `cuMemHostUnregister` (and with it every call that frees page-locked memory) blocks behind any
//! stream that waits, `cuMemHostRegister` does not (both measured, see ARCHITECTURE.md). Behind
//! each copy the stream writes a word for that copy: this needs no event and no CPU callback, and
//! one load shows whether the memory is free again.

use std::ptr;
use std::sync::{Mutex, MutexGuard};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::sys::{CUdeviceptr, Driver};
use crate::backend::TimelineWord;
use crate::backend::unreclaimed::Held;
use crate::error::{Error, Result};
use crate::mutex::LockUnpoisoned;

/// The sizes of pieces, in bytes. A copy longer than the largest takes several.
const PIECES: [usize; 3] = [4 << 10, 64 << 10, LARGEST];

pub(super) const LARGEST: usize = 1 << 20;

/// The most pieces of one region, each with a word at the region's head.
const PIECES_MAX: usize = LARGEST / PIECES[0];

/// The offset of a region's pieces: behind its words, on a new page.
const HEAD: usize = (PIECES_MAX * size_of::<TimelineWord>()).next_multiple_of(4096);

/// The most bytes, counted in whole pieces, that may be queued for one device behind streams that
/// have work.
pub(super) const UPLOADS_MAX: usize = 64 << 20;

/// The most bytes, counted in whole pieces, of copies to the host that are kept where the device
/// has written them.
const KEPT_MAX: usize = 32 << 20;

/// The most regions of one device: those for uploads, those of kept copies, and some for
/// downloads, so that neither blocked streams nor kept copies delay downloads.
const REGIONS_MAX: usize = (UPLOADS_MAX + KEPT_MAX) / LARGEST + 16;

const _: () = assert!(REGIONS_MAX * LARGEST > UPLOADS_MAX + KEPT_MAX);
const _: () = assert!(HEAD >= PIECES_MAX * size_of::<TimelineWord>());

/// The purpose of a loan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Upload,
    Download,
    /// A copy to the host that its caller keeps, perhaps while it waits for another.
    Kept,
}

/// The most bytes lent at once for each [`Purpose`].
const LENT_MAX: [usize; 3] = [UPLOADS_MAX, usize::MAX, KEPT_MAX];

/// One piece of a region.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    region: usize,
    index: usize,
    /// The piece's address.
    pub(super) place: *mut u8,
    /// The same for the device.
    pub(super) place_ptr: CUdeviceptr,
}

// SAFETY: an address of memory that lives as long as the process, and that the owner of a lease of
// it alone accesses.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

/// Pieces on loan for one copy. A lease that is neither [returned](Staging::give_back) nor [left to
/// the stream](Staging::leave) is leaked, as a failure in between requires: a device may still use
/// the pieces.
#[derive(Debug)]
pub(super) struct StagingLease {
    pub(super) pieces: Vec<Piece>,
    pub(super) piece_bytes: usize,
    purpose: Purpose,
    /// It lives as long as the process.
    word: &'static TimelineWord,
    pub(super) word_ptr: CUdeviceptr,
    /// The word's value once the stream is past the pieces.
    pub(super) value: u64,
}

impl StagingLease {
    pub(super) fn is_past(&self) -> bool {
        self.word.reached(self.value)
    }

    /// The piece with the byte of this number, and the byte's place there.
    pub(super) fn piece_at(&self, byte: usize) -> (&Piece, usize) {
        (
            &self.pieces[byte / self.piece_bytes],
            byte % self.piece_bytes,
        )
    }
}

/// Page-locked memory, cut into pieces of one size. It may be cut anew when all pieces are free.
#[derive(Debug)]
struct StagingRegion {
    base: *mut u8,
    ptr: CUdeviceptr,
    class: usize,
    free: Vec<usize>,
}

/// An answer to a copy that asks for pieces.
enum Loan {
    Made(StagingLease),
    /// Too many bytes are lent for its purpose, or there are as many regions as there may be.
    Refused,
    NeedsRegion,
}

#[derive(Debug, Default)]
struct StagingState {
    regions: Vec<StagingRegion>,
    /// Regions that threads are making.
    coming: usize,
    /// Leases of streams that may not be past them yet.
    left: Vec<StagingLease>,
    /// Bytes lent for each [`Purpose`].
    lent: [usize; 3],
    last_value: u64,
}

// SAFETY: the pointers are to mappings that live as long as the process; the lock decides which
// thread may access which piece.
unsafe impl Send for StagingState {}

/// The page-locked memory of one device.
#[derive(Debug, Default)]
pub(super) struct Staging {
    state: Mutex<StagingState>,
}

impl StagingRegion {
    /// Maps and registers a region, and `owe`s one that the device cannot address: unregistering it
    /// might block. The context is current.
    fn new(driver: &Driver, owe: impl FnOnce(Held)) -> Result<StagingRegion> {
        let (bytes, access) = (HEAD + LARGEST, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping, placed by the kernel.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE)
        }
        .map_err(|e| Error::os("mmap", "memory for copies", e))?;
        // A forked child would share the pages, and the next store here would leave the device with
        // the child's.
        // SAFETY: the mapping made above.
        let kept = unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxDontFork) };
        let registered = kept
            .map_err(|e| Error::os("madvise", "memory for copies", e))
            // SAFETY: as above; it stays mapped.
            .and_then(|()| Ok(unsafe { driver.host_register(base, bytes) }?));
        if let Err(error) = registered {
            // SAFETY: mapped above, neither registered nor visible to other code.
            let _ = unsafe { rustix::mm::munmap(base, bytes) };
            return Err(error);
        }
        let ptr = driver.cuMemHostGetDevicePointer_v2(base, 0);
        let ptr = ptr.inspect_err(|_| owe(Held::Registered(base.cast(), bytes)))?;
        Ok(StagingRegion {
            base: base.cast(),
            ptr,
            class: 0,
            free: pieces_of(0),
        })
    }

    fn is_free(&self) -> bool {
        self.free.len() == LARGEST / PIECES[self.class]
    }

    fn cut(&mut self, class: usize) {
        (self.class, self.free) = (class, pieces_of(class));
    }

    fn piece(&self, region: usize, index: usize) -> Piece {
        let offset = HEAD + index * PIECES[self.class];
        // SAFETY: HEAD + LARGEST bytes are mapped, and `index` is one of the pieces that lie in
        // them.
        let place = unsafe { self.base.add(offset) };
        Piece {
            region,
            index,
            place,
            place_ptr: self.ptr + offset as u64,
        }
    }

    fn word(&self, index: usize) -> (&'static TimelineWord, CUdeviceptr) {
        let offset = index * size_of::<TimelineWord>();
        // SAFETY: the head has a word for each piece, aligned and valid from zeros on, and is never
        // unmapped; the device writes it as the word's atomics allow.
        let word = unsafe { &*self.base.add(offset).cast::<TimelineWord>() };
        (word, self.ptr + offset as u64)
    }
}

fn pieces_of(class: usize) -> Vec<usize> {
    (0..LARGEST / PIECES[class]).rev().collect()
}

/// The size of pieces for a copy of this many bytes, and their number.
fn pieces_for(bytes: usize) -> (usize, usize) {
    let class = PIECES
        .iter()
        .position(|&piece| bytes <= piece)
        .unwrap_or(PIECES.len() - 1);
    (class, bytes.div_ceil(PIECES[class]))
}

impl StagingState {
    /// Takes back the leases that streams are past.
    fn collect(&mut self) {
        let left = std::mem::take(&mut self.left);
        let (past, left) = left.into_iter().partition(StagingLease::is_past);
        self.left = left;
        past.into_iter().for_each(|lease| self.take_back(lease));
    }

    fn take_back(&mut self, lease: StagingLease) {
        self.lent[lease.purpose as usize] -= lease.pieces.len() * lease.piece_bytes;
        self.free(&lease.pieces);
    }

    fn free(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            self.regions[piece.region].free.push(piece.index);
        }
    }

    fn find(&mut self, class: usize) -> Option<Piece> {
        let of_class = |region: &StagingRegion| region.class == class && !region.free.is_empty();
        let position = self
            .regions
            .iter()
            .position(of_class)
            .or_else(|| self.regions.iter().position(StagingRegion::is_free));
        let region = &mut self.regions[position?];
        if region.class != class {
            region.cut(class);
        }
        let index = region.free.pop()?;
        Some(region.piece(position?, index))
    }

    fn take(&mut self, class: usize) -> Option<Piece> {
        self.find(class).or_else(|| {
            self.collect();
            self.find(class)
        })
    }

    /// Lends all pieces that a copy needs, or none.
    fn lend(&mut self, bytes: usize, purpose: Purpose) -> Loan {
        let (class, count) = pieces_for(bytes);
        let total = count * PIECES[class];
        // Streams mostly pass their leases in order; checking all of them each time would be
        // expensive.
        if self.left.first().is_some_and(StagingLease::is_past) {
            self.collect();
        }
        let most = LENT_MAX[purpose as usize].saturating_sub(total);
        let is_too_much = |state: &StagingState| state.lent[purpose as usize] > most;
        if is_too_much(self) {
            self.collect();
            if is_too_much(self) {
                return Loan::Refused;
            }
        }
        let mut pieces: Vec<Piece> = Vec::with_capacity(count);
        while pieces.len() < count {
            let Some(piece) = self.take(class) else {
                self.free(&pieces);
                return if self.regions.len() + self.coming < REGIONS_MAX {
                    Loan::NeedsRegion
                } else {
                    Loan::Refused
                };
            };
            pieces.push(piece);
        }
        self.lent[purpose as usize] += total;
        self.last_value += 1;
        let (word, word_ptr) = self.regions[pieces[0].region].word(pieces[0].index);
        Loan::Made(StagingLease {
            pieces,
            piece_bytes: PIECES[class],
            purpose,
            word,
            word_ptr,
            value: self.last_value,
        })
    }
}

impl Staging {
    fn lock(&self) -> MutexGuard<'_, StagingState> {
        self.state.locked()
    }

    /// The context is current.
    pub(super) fn lend(
        &self,
        driver: &Driver,
        bytes: usize,
        purpose: Purpose,
        owe: impl Fn(Held),
    ) -> Result<Option<StagingLease>> {
        let mut state = self.lock();
        loop {
            match state.lend(bytes, purpose) {
                Loan::Made(lease) => return Ok(Some(lease)),
                Loan::Refused => return Ok(None),
                Loan::NeedsRegion => {}
            }
            // Without the lock: the driver may take long, and copies that have room go on.
            state.coming += 1;
            drop(state);
            let made = StagingRegion::new(driver, &owe);
            state = self.lock();
            state.coming -= 1;
            state.regions.push(made?);
        }
    }

    /// Returns pieces that no device uses.
    pub(super) fn give_back(&self, lease: StagingLease) {
        self.lock().take_back(lease);
    }

    /// Leaves pieces that are free once the lease's word is at its value.
    pub(super) fn leave(&self, lease: StagingLease) {
        self.lock().left.push(lease);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_takes_the_smallest_pieces_that_it_fits_in_and_else_the_largest() {
        let taken: Vec<_> = [1, 4096, 4097, 65_536, 65_537, LARGEST, LARGEST + 1]
            .map(pieces_for)
            .into();
        assert_eq!(
            taken,
            [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1), (2, 2)]
        );
    }
}
