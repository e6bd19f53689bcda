//! Allocations of the virtual memory functions that this library has not made: those of other
//! processes, imported piece by piece into one range, and those of other code of this process, held
//! and exported.
//!
//! PyTorch's expandable segments are made of such pieces, of 2 and 20 MiB. A handle that is held
//! keeps its value and the memory; so comparing handles says whether an address still has the
//! allocation of before.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::io::FdFlags;

use super::backend::CudaBackend;
use super::backend::memory::{
    access_to, duplicate, import_error, not_memory, refuse_plain_files, size,
};
use super::sys::Fault;
use super::sys::*;
use crate::backend::{
    Access, DeviceId, DeviceKind, DevicePtr, Imports, Ipc, PointerKind, RawRegion, Retained, Stage,
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
        let bytes = self.check_pieces(fds, piece, owner)?;
        let _current = self.enter()?;
        self.check_peer(owner)?;
        let handles = self.import_handles(fds, piece)?;
        let ptr = self.driver.address_reserve(size(bytes)?).map_err(|fault| {
            self.release_handles(&handles, piece);
            self.no_room(fault, bytes)
        })?;
        let mut region = RawRegion {
            ptr,
            bytes,
            handle: 0,
            stage: Stage::Pieces { piece, mapped: 0 },
        };
        self.held.fetch_add(bytes, Ordering::Relaxed);
        match self.map_pieces(&mut region, &handles, access, owner) {
            Ok(()) => Ok(region),
            Err(error) => {
                // The first failure is the one to report.
                // SAFETY: made here, and handed to no other code.
                if unsafe { self.release_pieces(&mut region) }.is_err() {
                    self.held.fetch_sub(bytes, Ordering::Relaxed);
                    self.owe(region);
                }
                Err(error)
            }
        }
    }

    unsafe fn import_over(
        &self,
        region: &mut RawRegion,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<()> {
        let bytes = self.check_pieces(fds, piece, owner)?;
        if bytes != region.bytes {
            return Err(not_memory(format!(
                "{bytes} bytes instead of {}",
                region.bytes
            )));
        }
        let _current = self.enter()?;
        self.check_peer(owner)?;
        let handles = self.import_handles(fds, piece)?;
        // SAFETY: the caller's promise.
        if let Err(fault) = unsafe { self.empty(region) } {
            self.release_handles(&handles, piece);
            return Err(fault.into());
        }
        region.stage = Stage::Pieces { piece, mapped: 0 };
        self.map_pieces(region, &handles, access, owner)
    }

    fn retain_mapped(&self, ptr: DevicePtr) -> Result<Retained> {
        let kind = self.locate(ptr)?.kind;
        if kind != PointerKind::Vmm {
            return Err(Error::NotExportable { ptr, kind });
        }
        let _current = self.enter()?;
        let handle = self
            .driver
            .memory_retain(ptr)
            .map_err(|fault| not_exportable(fault, ptr, PointerKind::Unknown))?;
        match self.driver.address_range(ptr) {
            Ok((base, bytes)) => Ok(Retained {
                handle,
                base,
                bytes,
            }),
            Err(fault) => {
                // SAFETY: held just now, and used by nothing.
                let _ = unsafe { self.driver.cuMemRelease(handle) };
                Err(not_exportable(fault, ptr, PointerKind::Unknown))
            }
        }
    }

    unsafe fn export_retained(&self, retained: &Retained) -> Result<OwnedFd> {
        let _current = self.enter()?;
        // SAFETY: held, by the caller's promise. One that was imported, or not made to be exported,
        // is a failure.
        let fd = unsafe { self.driver.memory_export(retained.handle) }
            .map_err(|fault| not_exportable(fault, retained.base, PointerKind::VmmPrivate))?;
        // SAFETY: the driver opened it just now; no other code has its number.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)
            .map_err(|error| Error::os("fcntl", "an exported allocation's descriptor", error))?;
        Ok(fd)
    }

    unsafe fn release_retained(&self, retained: &Retained) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.cuMemRelease(retained.handle) }?)
    }
}

impl CudaBackend {
    /// The length of all pieces.
    fn check_pieces(&self, fds: &[BorrowedFd<'_>], piece: u64, owner: DeviceId) -> Result<u64> {
        if owner.kind != DeviceKind::Cuda {
            return Err(not_memory(format!("memory of device {owner}")));
        }
        let bytes = piece
            .checked_mul(fds.len() as u64)
            .filter(|&bytes| bytes > 0);
        let bytes = bytes
            .filter(|_| piece.is_multiple_of(self.granularity))
            .ok_or_else(|| {
                let count = fds.len();
                not_memory(format!(
                    "said to be {count} pieces of {piece} bytes, each not a multiple of {}",
                    self.granularity
                ))
            })?;
        for &fd in fds {
            refuse_plain_files(fd)?;
        }
        Ok(bytes)
    }

    /// A handle of each descriptor.
    fn import_handles(
        &self,
        fds: &[BorrowedFd<'_>],
        piece: u64,
    ) -> Result<Vec<CUmemGenericAllocationHandle>> {
        let mut handles = Vec::with_capacity(fds.len());
        for &fd in fds {
            // The driver takes the descriptor's number as a pointer, and number 0 as null.
            let moved = (fd.as_raw_fd() == 0).then(|| duplicate(fd)).transpose();
            let imported = moved.and_then(|moved| {
                let number = moved.as_ref().map_or(fd.as_raw_fd(), AsRawFd::as_raw_fd);
                self.driver.memory_import(number).map_err(import_error)
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

    /// Gives up the handles of pieces of so many bytes. One that the driver does not release now is
    /// released later.
    fn release_handles(&self, handles: &[CUmemGenericAllocationHandle], piece: u64) {
        for &handle in handles {
            // SAFETY: imported here, and released once. A mapping holds the allocation.
            if unsafe { self.driver.cuMemRelease(handle) }.is_err() {
                self.owe(RawRegion {
                    ptr: 0,
                    bytes: piece,
                    handle,
                    stage: Stage::Held,
                });
            }
        }
    }

    /// Maps the pieces behind those that are mapped, gives up the handles, and makes all
    /// accessible.
    fn map_pieces(
        &self,
        region: &mut RawRegion,
        handles: &[CUmemGenericAllocationHandle],
        access: Access,
        owner: DeviceId,
    ) -> Result<()> {
        let Stage::Pieces { piece, mapped } = &mut region.stage else {
            unreachable!("a region of pieces")
        };
        for (index, &handle) in handles.iter().enumerate() {
            // SAFETY: the range is reserved, and empty behind `mapped`; the handle is held.
            let made = unsafe {
                self.driver
                    .cuMemMap(region.ptr + *mapped, size(*piece)?, 0, handle, 0)
            };
            if let Err(fault) = made {
                self.release_handles(&handles[index..], *piece);
                return Err(self.not_a_piece(fault, *piece));
            }
            *mapped += *piece;
            match handles {
                // Kept for the region's end: the driver may hold up its release, and this is called
                // where a peer waits for an answer.
                [only] => region.handle = *only,
                // The mapping holds the allocation.
                _ => self.release_handles(&[handle], *piece),
            }
        }
        let access = access_to(self.device, access);
        // SAFETY: all of the range is mapped.
        unsafe {
            self.driver
                .cuMemSetAccess(region.ptr, size(region.bytes)?, &access, 1)
        }
        .map_err(|fault| match owner == self.info.id {
            true => self.no_room(fault, region.bytes),
            false => self.peer_error(owner, fault.words()),
        })
    }

    /// Leaves a region its addresses alone. After an error `region` records what is left.
    ///
    /// # Safety
    /// As for [`crate::backend::Regions::release`].
    unsafe fn empty(&self, region: &mut RawRegion) -> Result<(), Fault> {
        let ptr = region.ptr;
        if let Stage::Pieces { piece, mapped } = &mut region.stage {
            while *mapped > 0 {
                let last = *mapped - *piece;
                // SAFETY: mapped as one piece, and no work uses it by the caller's promise.
                unsafe { self.driver.cuMemUnmap(ptr + last, *piece as usize) }?;
                *mapped = last;
            }
        }
        if region.handle != 0 {
            // SAFETY: held since the only piece was imported, and given up here.
            unsafe { self.driver.cuMemRelease(region.handle) }?;
            region.handle = 0;
        }
        Ok(())
    }

    /// Undoes the completed steps, last first. After an error `region` records what is left.
    ///
    /// # Safety
    /// As for [`crate::backend::Regions::release`], of a region in the stage `Pieces`.
    pub(super) unsafe fn release_pieces(&self, region: &mut RawRegion) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.empty(region) }?;
        // SAFETY: reserved in `import`, unmapped above.
        unsafe {
            self.driver
                .cuMemAddressFree(region.ptr, size(region.bytes)?)
        }?;
        self.held.fetch_sub(region.bytes, Ordering::Relaxed);
        Ok(())
    }

    fn not_a_piece(&self, fault: Fault, piece: u64) -> Error {
        if fault.is(&[CUresult::INVALID_VALUE, CUresult::NOT_SUPPORTED]) {
            not_memory(format!(
                "said to be {piece} bytes, which is not its size ({})",
                fault.words()
            ))
        } else {
            self.no_room(fault, piece)
        }
    }
}

fn not_exportable(fault: Fault, ptr: DevicePtr, kind: PointerKind) -> Error {
    if fault.is(&NO_SUCH_ALLOCATION) {
        Error::NotExportable { ptr, kind }
    } else {
        fault.into()
    }
}
