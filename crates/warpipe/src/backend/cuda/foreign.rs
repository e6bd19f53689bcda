//! Allocations of the virtual memory functions that this library has not made: those of other
//! processes, imported piece by piece into one range, and those of other code of this process, held
//! and exported.
//!
//! PyTorch's expandable segments are made of such pieces, of 2 and 20 MiB. A handle that is held
//! keeps its value and the memory; so comparing handles says whether an address still has the
//! allocation of before.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use super::backend::CudaBackend;
use super::backend::memory::{WANTED, import_error, refuse_plain_files};
use super::sys::Fault;
use super::sys::*;
use crate::backend::{
    Access, DeviceId, DeviceKind, DevicePtr, Imports, Ipc, PointerKind, RawRegion, Retained,
    duplicate, length_of_pieces, not_shareable,
};
use crate::error::{Error, Result};

/// Codes with which the driver says that an address has no allocation of this kind, or that an
/// allocation was imported, or made without a descriptor.
const NO_SUCH_ALLOCATION: [CUresult; 4] = [
    CUresult::INVALID_VALUE,
    CUresult::INVALID_HANDLE,
    CUresult::NOT_SUPPORTED,
    CUresult::NOT_PERMITTED,
];

impl Imports for CudaBackend {
    fn import(
        &self,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<RawRegion> {
        self.check_pieces(fds, piece, owner)?;
        let _current = self.enter()?;
        let handles = self.import_handles(fds, piece, owner)?;
        self.map(&handles, piece, access, owner, CudaBackend::not_a_piece)
    }

    unsafe fn import_over(
        &self,
        region: &mut RawRegion,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<()> {
        self.check_pieces(fds, piece, owner)?;
        let _current = self.enter()?;
        let handles = self.import_handles(fds, piece, owner)?;
        // SAFETY: the caller's promise.
        if let Err(fault) = unsafe { self.empty(region) } {
            self.release_handles(&handles, piece);
            return Err(fault.into());
        }
        region.piece = piece;
        self.map_into(region, &handles, access, owner, CudaBackend::not_a_piece)
    }

    fn retain_mapped(&self, ptr: DevicePtr) -> Result<Retained> {
        let kind = self.locate(ptr)?.kind;
        if kind != PointerKind::Vmm {
            return Err(Error::not_exportable(ptr, kind));
        }
        let _current = self.enter()?;
        let address = std::ptr::without_provenance_mut(ptr as usize);
        let handle = self
            .driver
            .cuMemRetainAllocationHandle(address)
            .map_err(|fault| not_exportable(fault, ptr, PointerKind::Unknown))?;
        match self.driver.cuMemGetAddressRange_v2(ptr) {
            Ok((base, bytes)) => Ok(Retained {
                handle,
                base,
                bytes: bytes as u64,
            }),
            Err(fault) => {
                self.release_handles(&[handle], 0);
                Err(not_exportable(fault, ptr, PointerKind::Unknown))
            }
        }
    }

    unsafe fn export_retained(&self, retained: &Retained) -> Result<OwnedFd> {
        let refused = |fault| not_exportable(fault, retained.base, PointerKind::VmmPrivate);
        // SAFETY: held, by the caller's promise.
        unsafe { self.export_handle(retained.handle, refused) }
    }

    unsafe fn release_retained(&self, retained: &Retained) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.cuMemRelease(retained.handle) }?)
    }
}

impl CudaBackend {
    fn check_pieces(&self, fds: &[BorrowedFd<'_>], piece: u64, owner: DeviceId) -> Result<()> {
        if owner.kind != DeviceKind::Cuda {
            return Err(not_shareable(WANTED, format!("memory of device {owner}")));
        }
        length_of_pieces(fds, piece, self.granularity, WANTED)?;
        fds.iter().try_for_each(|&fd| refuse_plain_files(fd))
    }

    /// A handle of each descriptor.
    fn import_handles(
        &self,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        owner: DeviceId,
    ) -> Result<Vec<CUmemGenericAllocationHandle>> {
        self.check_peer(owner)?;
        let mut handles = Vec::with_capacity(fds.len());
        for &fd in fds {
            // The driver takes the descriptor's number as a pointer, and number 0 as null.
            let moved = (fd.as_raw_fd() == 0).then(|| duplicate(fd)).transpose();
            let imported = moved.and_then(|moved| {
                let number = moved.as_ref().map_or(fd.as_raw_fd(), AsRawFd::as_raw_fd);
                let shareable = std::ptr::without_provenance_mut(number as usize);
                let kind = MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
                // SAFETY: for this type of handles the "pointer" is the descriptor's number; one
                // that is not of device memory is a failure.
                unsafe { self.driver.cuMemImportFromShareableHandle(shareable, kind) }
                    .map_err(import_error)
            });
            match imported {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    self.release_handles(&handles, piece);
                    return Err(error);
                }
            }
        }
        Ok(handles)
    }

    fn not_a_piece(&self, fault: Fault, piece: u64) -> Error {
        if fault.is(&[CUresult::INVALID_VALUE, CUresult::NOT_SUPPORTED]) {
            let words = fault.words();
            let found = format!("said to be {piece} bytes, which is not its size ({words})");
            not_shareable(WANTED, found)
        } else {
            self.no_room(fault, piece)
        }
    }
}

fn not_exportable(fault: Fault, ptr: DevicePtr, kind: PointerKind) -> Error {
    fault.typed(&NO_SUCH_ALLOCATION, |_| Error::not_exportable(ptr, kind))
}
