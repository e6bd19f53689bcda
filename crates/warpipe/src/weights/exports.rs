//! The descriptors of a version's pieces. A piece that another allocator of this process made is
//! exported once, as long as a version of this process has it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};

use twox_hash::XxHash3_128;

use super::manifest::PartId;
use crate::backend::DevicePtr;
use crate::device::Device;
use crate::device_types::DeviceId;
use crate::error::Result;
use crate::fork::OwnerProcess;
use crate::fork::per_process::PerProcess;
use crate::memory::pieces::Piece;
use crate::runtime::closer::PeerFd;
use crate::runtime::reactor::{Reactor, new_generation};

/// The descriptor of a piece.
#[derive(Debug)]
pub(super) struct PieceFd {
    fd: PeerFd,
    /// The allocation, if this process exported it: as long as it is held, no other one has its
    /// handle.
    exported: Option<Exported>,
}

#[derive(Debug)]
struct Exported {
    /// `None` only while dropping.
    piece: Option<Piece>,
    /// Drawn, so that no other piece has it.
    id: [u8; 16],
    reactor: Arc<Reactor>,
    owner_process: OwnerProcess,
}

/// The pieces of this process that a version has, by their first byte. It keeps none of them.
#[derive(Default)]
struct Exports {
    pieces: BTreeMap<DevicePtr, Weak<PieceFd>>,
    /// How many of them there were, twice, when those without a version were removed.
    tidy_at: usize,
}

static EXPORTS: PerProcess<Mutex<Exports>> = PerProcess::new();

impl PieceFd {
    /// Of a piece that a peer has sent.
    pub(super) fn of_peer(fd: PeerFd) -> Arc<PieceFd> {
        Arc::new(PieceFd { fd, exported: None })
    }

    /// Of memory of this library.
    pub(super) fn own(fd: impl Into<PeerFd>) -> Arc<PieceFd> {
        let fd = fd.into();
        fd.approve();
        PieceFd::of_peer(fd)
    }

    /// Of the allocation that is mapped at `ptr`: its first byte, its length, and its descriptor.
    ///
    /// # Errors
    /// As [`Piece::at`] and [`Piece::export`].
    pub(super) fn export(
        device: &Device,
        ptr: DevicePtr,
    ) -> Result<(DevicePtr, u64, Arc<PieceFd>)> {
        if let Some(known) = EXPORTS.lock().around(device.info().id, ptr)
            && let Some(piece) = known.piece()
            && piece.is_at(ptr)?
        {
            return Ok((piece.base(), piece.bytes(), known));
        }
        let piece = Piece::at(device, ptr)?;
        let (base, bytes) = (piece.base(), piece.bytes());
        let fd = PeerFd::from(piece.export()?);
        fd.approve();
        let exported = Exported {
            piece: Some(piece),
            id: new_generation(),
            reactor: Reactor::of_process()?,
            owner_process: OwnerProcess::current(),
        };
        let made = Arc::new(PieceFd {
            fd,
            exported: Some(exported),
        });
        EXPORTS.lock().add(base, &made);
        Ok((base, bytes, made))
    }

    fn piece(&self) -> Option<&Piece> {
        self.exported.as_ref()?.piece.as_ref()
    }

    /// Under which every process knows a part of these pieces, which this process exported: the same
    /// for each version that has them in this order.
    pub(super) fn part_of(pieces: &[Arc<PieceFd>]) -> Option<PartId> {
        let mut hasher = XxHash3_128::new();
        for piece in pieces {
            hasher.write(&piece.exported.as_ref()?.id);
        }
        Some((hasher.finish_128().to_be_bytes(), 0))
    }

    /// Marks the descriptor as one that a device has mapped: its `close` does not block.
    pub(super) fn approve(&self) {
        self.fd.approve();
    }
}

impl Exports {
    /// The piece that was mapped around `ptr` when it was exported.
    fn around(&self, device: DeviceId, ptr: DevicePtr) -> Option<Arc<PieceFd>> {
        let known = self.pieces.range(..=ptr).next_back()?.1.upgrade()?;
        let piece = known.piece()?;
        let is_around = piece.device() == device && ptr - piece.base() < piece.bytes();
        is_around.then_some(known)
    }

    fn add(&mut self, base: DevicePtr, made: &Arc<PieceFd>) {
        if self.pieces.len() >= self.tidy_at {
            self.pieces.retain(|_, piece| piece.strong_count() > 0);
            self.tidy_at = 2 * self.pieces.len() + 64;
        }
        self.pieces.insert(base, Arc::downgrade(made));
    }
}

impl AsFd for PieceFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        let Some(piece) = self.piece.take() else {
            return;
        };
        if self.owner_process.is_current() {
            // The reactor may be the last owner, and the drop calls the driver.
            self.reactor.defer_drop(Box::new(piece));
        } else {
            std::mem::forget(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[test]
    fn a_piece_is_exported_once_as_long_as_a_version_has_it_and_other_memory_there_anew() {
        let device = Device::host();
        let memory = Memory::allocate(&device, 4096).unwrap();
        let export = |memory: &Memory| PieceFd::export(&device, memory.ptr() + 100).unwrap();
        let (base, bytes, first) = export(&memory);
        assert_eq!((base, bytes), (memory.ptr(), 4096));
        let (.., again) = export(&memory);
        assert!(Arc::ptr_eq(&first, &again), "the same allocation");
        let other = Memory::allocate(&device, 4096).unwrap();
        let (.., elsewhere) = export(&other);
        assert!(!Arc::ptr_eq(&first, &elsewhere));
        let part = |pieces: &[&Arc<PieceFd>]| {
            let pieces: Vec<_> = pieces.iter().map(|&piece| piece.clone()).collect();
            PieceFd::part_of(&pieces).unwrap()
        };
        assert_eq!(part(&[&first, &elsewhere]), part(&[&again, &elsewhere]));
        assert_ne!(part(&[&first, &elsewhere]), part(&[&elsewhere, &first]));
        assert_ne!(part(&[&first]), part(&[&elsewhere]));
        // As if the allocator had mapped the other one there meanwhile.
        let key = memory.ptr();
        EXPORTS
            .lock()
            .pieces
            .insert(key, Arc::downgrade(&elsewhere));
        let (.., anew) = export(&memory);
        assert!(!Arc::ptr_eq(&anew, &elsewhere), "its handle is another one");
        assert_ne!(part(&[&anew]), part(&[&first]), "exported anew");
        drop((first, again, anew));
        assert!(
            EXPORTS.lock().pieces[&key].upgrade().is_none(),
            "it keeps none"
        );
    }
}
