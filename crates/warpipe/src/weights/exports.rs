//! The descriptors of a version's pieces. A piece that another allocator of this process made is
//! exported once, as long as a version of this process has it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use twox_hash::XxHash3_128;

use super::manifest::PartId;
use crate::backend::DevicePtr;
use crate::device::Device;
use crate::device_types::DeviceId;
use crate::error::Result;
use crate::memory::pieces::Piece;
use crate::memory::weak_cache::WeakCache;
use crate::runtime::closer::PeerFd;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::reactor::new_generation;

/// The descriptor of a piece.
#[derive(Debug)]
pub(super) struct PieceFd {
    fd: PeerFd,
    /// If this process exported it.
    exported: Option<Exported>,
}

#[derive(Debug)]
struct Exported {
    /// As long as it is held, no other allocation has its handle.
    _piece: DropAfterFence<Piece>,
    /// Drawn, so that no other piece has it.
    id: [u8; 16],
}

/// The pieces of this process that a version has, by device, handle and first byte.
static EXPORTS: WeakCache<(DeviceId, u64, DevicePtr), PieceFd> = WeakCache::new();

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
        let piece = Piece::at(device, ptr)?;
        let (base, bytes) = (piece.base(), piece.bytes());
        let key = (device.info().id, piece.handle(), base);
        let export = || {
            let fd = PeerFd::from(piece.export()?);
            fd.approve();
            let exported = Exported {
                _piece: DropAfterFence::new(Arc::default(), piece)?,
                id: new_generation(),
            };
            let exported = Some(exported);
            Ok(Arc::new(PieceFd { fd, exported }))
        };
        let fd = EXPORTS.get_or(&key, |_| true, export)?;
        Ok((base, bytes, fd))
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

impl AsFd for PieceFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::backend::testing::{Counting, Wrapped};
    use crate::memory::Memory;

    #[test]
    fn a_piece_is_exported_once_as_long_as_a_version_has_it() {
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
        drop((first, again, elsewhere));
        let keys = [&memory, &other].map(|memory| {
            let piece = Piece::at(&device, memory.ptr()).unwrap();
            (device.info().id, piece.handle(), memory.ptr())
        });
        for key in keys {
            assert!(EXPORTS.get(&key).is_none(), "it keeps none");
        }
    }

    #[test]
    fn other_memory_at_the_address_of_a_piece_that_a_version_has_is_exported_anew() {
        let counting = Wrapped::new(Device::host().backend().clone(), Counting::default());
        let device = Device::from_backend(counting.clone());
        let memory = Memory::allocate(&device, 4096).unwrap();
        let (base, _, first) = PieceFd::export(&device, memory.ptr()).unwrap();
        drop(memory);
        let start = Instant::now();
        while !counting.hook().calls().contains_key("release") {
            assert!(start.elapsed() < Duration::from_secs(10), "it is unmapped");
            thread::yield_now();
        }
        // The system maps it where there is room, once the release that was begun is done.
        let mut others = vec![Memory::allocate(&device, 4096).unwrap()];
        while others.last().unwrap().ptr() != base {
            assert!(others.len() < 200, "another place each time");
            others.push(Memory::allocate(&device, 4096).unwrap());
        }
        let (.., anew) = PieceFd::export(&device, base).unwrap();
        assert!(!Arc::ptr_eq(&anew, &first), "its handle is another one");
        let part = |piece: &Arc<PieceFd>| PieceFd::part_of(std::slice::from_ref(piece)).unwrap();
        assert_ne!(part(&anew), part(&first));
    }
}
