//! Allocations of other code, held by the process that shares them. **This module is marked for
//! unsafe**: it releases what it holds.

use crate::backend::unreclaimed::Held;
use crate::backend::{DevicePtr, PointerKind, Retained, unreclaimed};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;

/// The most pieces of one run.
pub(crate) const RUN_PIECES_MAX: usize = 4096;

/// One allocation, held. Its memory stays as long, also if its allocator frees it.
#[derive(Debug)]
pub(crate) struct Piece {
    device: Device,
    retained: Retained,
}

impl Piece {
    /// The allocation that is mapped at `ptr`.
    ///
    /// # Errors
    /// [`Error::Handle`] for memory of another kind.
    pub(crate) fn at(device: &Device, ptr: DevicePtr) -> Result<Piece> {
        let retained = device.backend().retain_mapped(ptr)?;
        Ok(Piece {
            device: device.clone(),
            retained,
        })
    }

    /// Where it is mapped here.
    pub(crate) fn base(&self) -> DevicePtr {
        self.retained.base
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.retained.bytes
    }

    /// Its identity, as long as it is held.
    pub(crate) fn handle(&self) -> u64 {
        self.retained.handle
    }

    /// A descriptor of it.
    ///
    /// # Errors
    /// [`Error::Handle`] if it was made without that.
    pub(crate) fn export(&self) -> Result<CloseOnForkFd> {
        // SAFETY: held until self is dropped.
        let fd = unsafe { self.device.backend().export_retained(&self.retained) }?;
        CloseOnForkFd::new(fd).map_err(|error| {
            Error::os(
                "fcntl(F_DUPFD_CLOEXEC)",
                "an allocation's descriptor",
                error,
            )
        })
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: retained once, in `at`.
        unsafe { unreclaimed::release(self.device.backend(), Held::Retained(self.retained)) };
    }
}

/// Adjacent allocations of one length. Dropped by the reaper: a drop calls the driver.
#[derive(Debug)]
pub(crate) struct Run {
    pieces: Vec<Piece>,
}

impl Run {
    /// The allocations that cover `ptr..ptr + bytes`, and the range's offset in them.
    ///
    /// # Errors
    /// [`Error::Handle`] for memory of another kind, also in a part of the range, and for
    /// allocations of several lengths.
    pub(crate) fn around(device: &Device, ptr: DevicePtr, bytes: u64) -> Result<(Run, u64)> {
        let (kind, end) = (PointerKind::Vmm, ptr.checked_add(bytes));
        let end = end.ok_or(Error::not_exportable(ptr, kind))?;
        let first = Piece::at(device, ptr)?;
        let Retained {
            base, bytes: piece, ..
        } = first.retained;
        let mut pieces = vec![first];
        let mut at = base + piece;
        while at < end {
            let next = Piece::at(device, at)?;
            let is_alike = next.retained.base == at && next.retained.bytes == piece;
            if !is_alike || pieces.len() == RUN_PIECES_MAX {
                return Err(Error::not_exportable(at, kind));
            }
            pieces.push(next);
            at += piece;
        }
        Ok((Run { pieces }, ptr - base))
    }

    /// The run's identity, as long as it is held.
    pub(crate) fn handles(&self) -> Vec<u64> {
        self.pieces.iter().map(Piece::handle).collect()
    }

    pub(crate) fn len(&self) -> u32 {
        self.pieces.len() as u32
    }

    /// The length of each piece in bytes.
    pub(crate) fn piece_bytes(&self) -> u64 {
        self.pieces.first().map_or(0, |piece| piece.retained.bytes)
    }

    /// Descriptors of up to `most` pieces, from `first` on.
    pub(crate) fn export(&self, first: u32, most: usize) -> Result<Vec<CloseOnForkFd>> {
        let chosen = self.pieces.iter().skip(first as usize).take(most);
        chosen.map(Piece::export).collect()
    }
}
