//! The descriptors of a version's pieces. A piece that another allocator of this process made is
//! exported once, as long as a version of this process has it.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::backend::DevicePtr;
use crate::device::Device;
use crate::device_types::DeviceId;
use crate::error::Result;
use crate::fork::OwnerProcess;
use crate::fork::per_process::PerProcess;
use crate::memory::pieces::Piece;
use crate::runtime::closer::PeerFd;
use crate::runtime::reactor::Reactor;

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
    reactor: Arc<Reactor>,
    owner_process: OwnerProcess,
}

/// The pieces of this process that a version has, by their first byte. It keeps none of them.
#[derive(Default)]
struct Exports {
    pieces: HashMap<(DeviceId, DevicePtr), Weak<PieceFd>>,
    /// How many of them there were, twice, when those without a version were removed.
    tidy_at: usize,
}

static EXPORTS: PerProcess<Mutex<Exports>> = PerProcess::new();

fn exports() -> MutexGuard<'static, Exports> {
    EXPORTS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

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
        let key = (device.info().id, base);
        let known = exports().pieces.get(&key).and_then(Weak::upgrade);
        if let Some(known) = known.filter(|known| known.is(&piece)) {
            return Ok((base, bytes, known));
        }
        let fd = PeerFd::from(piece.export()?);
        fd.approve();
        let exported = Exported {
            piece: Some(piece),
            reactor: Reactor::of_process()?,
            owner_process: OwnerProcess::current(),
        };
        let made = Arc::new(PieceFd {
            fd,
            exported: Some(exported),
        });
        exports().add(key, &made);
        Ok((base, bytes, made))
    }

    fn is(&self, piece: &Piece) -> bool {
        let exported = self.exported.as_ref();
        let exported = exported.and_then(|exported| exported.piece.as_ref());
        exported.is_some_and(|exported| exported.is_same(piece))
    }

    /// Marks the descriptor as one that a device has mapped: its `close` does not block.
    pub(super) fn approve(&self) {
        self.fd.approve();
    }
}

impl Exports {
    fn add(&mut self, key: (DeviceId, DevicePtr), made: &Arc<PieceFd>) {
        if self.pieces.len() >= self.tidy_at {
            self.pieces.retain(|_, piece| piece.strong_count() > 0);
            self.tidy_at = 2 * self.pieces.len() + 64;
        }
        self.pieces.insert(key, Arc::downgrade(made));
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
        assert!(!first.is(elsewhere.exported.as_ref().unwrap().piece.as_ref().unwrap()));
        // As if the allocator had mapped the other one there meanwhile.
        let key = (device.info().id, memory.ptr());
        exports().pieces.insert(key, Arc::downgrade(&elsewhere));
        let (.., anew) = export(&memory);
        assert!(!Arc::ptr_eq(&anew, &elsewhere), "its handle is another one");
        drop((first, again, anew));
        assert!(exports().pieces[&key].upgrade().is_none(), "it keeps none");
    }
}
