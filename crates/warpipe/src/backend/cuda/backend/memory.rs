//! Regions: virtual memory management (`cuMemCreate` and related calls), exported as descriptors;
//! and registered host memory.

use std::collections::HashSet;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use rustix::fs::{FileType, OFlags};
use rustix::io::FdFlags;

use super::super::sys::Fault;
use super::super::sys::*;
use super::super::waits;
use super::CudaBackend;
use crate::backend::{
    Access, DeviceId, DevicePtr, RawRegion, Regions, no_room, not_shareable, out_of_reach,
    unreclaimed::{self, Held},
};
use crate::error::{Error, Result};
use crate::mutex::LockUnpoisoned;
use crate::os;

/// The expected kind of a descriptor, for errors.
pub(in crate::backend::cuda) const WANTED: &str = "CUDA memory";

/// Codes with which the driver refuses a descriptor.
const NOT_SUCH_MEMORY: [CUresult; 5] = [
    CUresult::INVALID_VALUE,
    CUresult::INVALID_DEVICE,
    CUresult::INVALID_HANDLE,
    CUresult::UNKNOWN,
    CUresult::OPERATING_SYSTEM,
];

impl Regions for CudaBackend {
    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn allocate(&self, bytes: u64) -> Result<RawRegion> {
        let _current = self.enter()?;
        let prop = allocation(self.device);
        // SAFETY: the address is that of a live local.
        let handle = unsafe { self.driver.cuMemCreate(size(bytes)?, &prop, 0) }
            .map_err(|fault| self.no_room(fault, bytes))?;
        let (access, owner) = (Access::ReadWrite, self.info.id);
        self.map(&[handle], bytes, access, owner, CudaBackend::no_room)
    }

    unsafe fn export(&self, region: &RawRegion) -> Result<OwnedFd> {
        // SAFETY: a region that was allocated here holds its handle until it is released.
        unsafe { self.export_handle(region.handle, Error::from) }
    }

    unsafe fn release(&self, region: &mut RawRegion) -> Result<()> {
        // After a reset its address or handle may belong to another allocation. The memory stays,
        // and no stream of this process uses it.
        let _current = self.enter().inspect_err(|error| {
            if error.is_reset() {
                self.held.fetch_sub(region.bytes, Ordering::Relaxed);
            }
        })?;
        // SAFETY: the caller's promise.
        unsafe { self.undo(region) }?;
        self.held.fetch_sub(region.bytes, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn register(&self, ptr: *mut u8, bytes: usize) -> Result<DevicePtr> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.host_register(ptr.cast(), bytes) }?;
        let device_ptr = self
            .driver
            .cuMemHostGetDevicePointer_v2(ptr.cast(), 0)
            .inspect_err(|_| {
                // SAFETY: registered above, and nothing was enqueued.
                if unsafe { self.driver.cuMemHostUnregister(ptr.cast()) }.is_err() {
                    self.stuck().insert(ptr.addr());
                }
            })?;
        waits::registered(ptr, bytes, device_ptr);
        Ok(device_ptr)
    }

    fn is_registered(&self, ptr: *mut u8) -> bool {
        self.stuck().contains(&ptr.addr())
    }

    unsafe fn unregister(&self, ptr: *mut u8) -> Result<()> {
        let _turn = waits::unregister(ptr)?;
        if let Some(_current) = self.enter_unless_gone()? {
            // SAFETY: the caller's promise.
            unsafe { self.driver.cuMemHostUnregister(ptr.cast()) }?;
        }
        self.stuck().remove(&ptr.addr());
        Ok(())
    }

    fn bytes_held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }
}

impl CudaBackend {
    /// Maps allocations of `piece` bytes each, in their order, into one new range, and takes over
    /// their handles. `refused` makes the error of one that cannot be mapped. On a failure it undoes
    /// its steps.
    pub(in crate::backend::cuda) fn map(
        &self,
        handles: &[CUmemGenericAllocationHandle],
        piece: u64,
        access: Access,
        owner: DeviceId,
        refused: fn(&CudaBackend, Fault, u64) -> Error,
    ) -> Result<RawRegion> {
        let bytes = piece * handles.len() as u64;
        let ptr = self
            .driver
            .cuMemAddressReserve(size(bytes)?, 0, 0, 0)
            .map_err(|fault| {
                self.release_handles(handles, piece);
                self.no_room(fault, bytes)
            })?;
        let mut region = RawRegion {
            ptr,
            bytes,
            handle: 0,
            piece,
            mapped: 0,
        };
        let mapped = self.map_into(&mut region, handles, access, owner, refused);
        // The first failure is the one to report.
        // SAFETY: made here, and handed to no other code.
        if mapped.is_err() && unsafe { self.undo(&mut region) }.is_err() {
            self.owe(Held::Region(region));
        } else if mapped.is_ok() {
            self.held.fetch_add(bytes, Ordering::Relaxed);
        }
        mapped.map(|()| region)
    }

    /// [`map`](Self::map) into a region that has its addresses alone.
    pub(in crate::backend::cuda) fn map_into(
        &self,
        region: &mut RawRegion,
        handles: &[CUmemGenericAllocationHandle],
        access: Access,
        owner: DeviceId,
        refused: fn(&CudaBackend, Fault, u64) -> Error,
    ) -> Result<()> {
        let (piece, length) = (region.piece, size(region.piece)?);
        for (index, &handle) in handles.iter().enumerate() {
            let place = region.ptr + region.mapped;
            // SAFETY: the range is reserved, and empty behind `mapped`; the handle is held.
            if let Err(fault) = unsafe { self.driver.cuMemMap(place, length, 0, handle, 0) } {
                self.release_handles(&handles[index..], piece);
                return Err(refused(self, fault, piece));
            }
            region.mapped += piece;
            match handles {
                // Kept for the region's end: it is exported by it, and the driver may hold up its
                // release, where a peer waits for an answer.
                [only] => region.handle = *only,
                // The mapping holds the allocation.
                _ => self.release_handles(&[handle], piece),
            }
        }
        let access = access_to(self.device, access);
        let bytes = size(region.bytes)?;
        // SAFETY: all of the range is mapped.
        unsafe { self.driver.cuMemSetAccess(region.ptr, bytes, &access, 1) }.map_err(|fault| {
            match owner == self.info.id {
                true => self.no_room(fault, region.bytes),
                false => self.peer_error(owner, fault.words()),
            }
        })
    }

    /// Leaves a region its addresses alone. After an error `region` records what is left.
    ///
    /// # Safety
    /// As for [`Regions::release`].
    pub(in crate::backend::cuda) unsafe fn empty(
        &self,
        region: &mut RawRegion,
    ) -> Result<(), Fault> {
        while region.mapped > 0 {
            let (last, piece) = (region.mapped - region.piece, region.piece as usize);
            // SAFETY: mapped as one piece, and no work uses it by the caller's promise.
            unsafe { self.driver.cuMemUnmap(region.ptr + last, piece) }?;
            region.mapped = last;
        }
        if region.handle != 0 {
            // SAFETY: held since the only piece was mapped, and given up here.
            unsafe { self.driver.cuMemRelease(region.handle) }?;
            region.handle = 0;
        }
        Ok(())
    }

    /// Undoes the completed steps of a region. After an error `region` records what is left.
    ///
    /// # Safety
    /// As for [`Regions::release`].
    unsafe fn undo(&self, region: &mut RawRegion) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { self.empty(region) }?;
        if region.ptr != 0 {
            let bytes = region.bytes as usize;
            // SAFETY: reserved, and unmapped above.
            unsafe { self.driver.cuMemAddressFree(region.ptr, bytes) }?;
            region.ptr = 0;
        }
        Ok(())
    }

    /// Gives up the handles of pieces of so many bytes. One that the driver does not release now is
    /// released later.
    pub(in crate::backend::cuda) fn release_handles(
        &self,
        handles: &[CUmemGenericAllocationHandle],
        piece: u64,
    ) {
        for &handle in handles {
            // SAFETY: made or imported by this backend, and released once. A mapping holds the
            // allocation.
            if unsafe { self.driver.cuMemRelease(handle) }.is_err() {
                self.owe(Held::Region(RawRegion {
                    ptr: 0,
                    bytes: piece,
                    handle,
                    piece,
                    mapped: 0,
                }));
            }
        }
    }

    /// A new descriptor of the allocation with this handle.
    ///
    /// # Safety
    /// The handle is held.
    pub(in crate::backend::cuda) unsafe fn export_handle(
        &self,
        handle: CUmemGenericAllocationHandle,
        refused: impl FnOnce(Fault) -> Error,
    ) -> Result<OwnedFd> {
        let _current = self.enter()?;
        let kind = MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this type of handles the driver stores an int; the rest is the caller's
        // promise. One that was not made to be exported is a failure.
        let exported = unsafe { self.driver.cuMemExportToShareableHandle(handle, kind, 0) };
        // SAFETY: the driver opened it just now; no other code has its number.
        let fd = unsafe { OwnedFd::from_raw_fd(exported.map_err(refused)?) };
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)
            .map_err(|error| Error::os("fcntl", "an exported descriptor", error))?;
        Ok(fd)
    }

    /// [`Error::Limit`] if the fault is of that kind, else the fault's general error.
    pub(in crate::backend::cuda) fn no_room(&self, fault: Fault, bytes: u64) -> Error {
        fault.typed(&[CUresult::OUT_OF_MEMORY], |_| {
            let detail = match self.driver.cuMemGetInfo_v2() {
                Ok((free, total)) => format!(" ({free} of {total} bytes are free)"),
                Err(_) => String::new(),
            };
            no_room(&self.info.name, bytes, detail)
        })
    }

    /// If the owner device is visible here, the driver tells in advance whether its memory can be
    /// reached.
    pub(in crate::backend::cuda) fn check_peer(&self, owner: DeviceId) -> Result<()> {
        if owner == self.info.id {
            return Ok(());
        }
        if let Some(peer) = self.visible(owner)?
            && self.driver.cuDeviceCanAccessPeer(self.device, peer)? == 0
        {
            return Err(self.peer_error(owner, "cuDeviceCanAccessPeer says no".into()));
        }
        Ok(())
    }

    pub(in crate::backend::cuda) fn peer_error(&self, owner: DeviceId, reason: String) -> Error {
        out_of_reach(&self.info, owner, &reason)
    }

    /// Has the reaper release what is not to be released here.
    pub(in crate::backend::cuda) fn owe(&self, of: Held) {
        if let Held::Region(region) = &of {
            // Counted until it is released, like any region.
            self.held.fetch_add(region.bytes, Ordering::Relaxed);
        }
        if let Some(backend) = self.me.upgrade() {
            unreclaimed::retry(backend, of);
        }
    }

    /// Memory that is registered although it has no device address.
    fn stuck(&self) -> MutexGuard<'_, HashSet<usize>> {
        self.stuck.locked()
    }
}

/// The properties of every region: on this device, exportable as a descriptor.
pub(in crate::backend::cuda) fn allocation(device: CUdevice) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: on(device),
        ..CUmemAllocationProp::default()
    }
}

fn on(device: CUdevice) -> CUmemLocation {
    CUmemLocation {
        kind: MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

pub(in crate::backend::cuda) fn access_to(device: CUdevice, access: Access) -> CUmemAccessDesc {
    CUmemAccessDesc {
        location: on(device),
        flags: match access {
            Access::Read => MEM_ACCESS_READ,
            Access::ReadWrite => MEM_ACCESS_READWRITE,
        },
    }
}

pub(in crate::backend::cuda) fn size(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::argument("bytes", bytes, "what an address can count"))
}

pub(in crate::backend::cuda) fn import_error(fault: Fault) -> Error {
    fault.typed(&NOT_SUCH_MEMORY, |fault| {
        not_shareable(WANTED, fault.words())
    })
}

/// Keeps files that are not driver memory from the driver, which would have to deal with a peer's
/// pipe, or query a file system. The driver exports a device file; the fake driver a memfd, which
/// is recognized by its seals.
pub(in crate::backend::cuda) fn refuse_plain_files(fd: BorrowedFd<'_>) -> Result<()> {
    let kind =
        os::kind_of(fd).map_err(|error| Error::os("statx", "a received descriptor", error))?;
    let found = match kind.file {
        _ if kind.flags.contains(OFlags::PATH) => "a descriptor that was not opened",
        FileType::CharacterDevice => return Ok(()),
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        FileType::Directory => "a directory",
        FileType::BlockDevice => "a block device",
        _ if rustix::fs::fcntl_get_seals(fd).is_ok() => return Ok(()),
        _ => "a file",
    };
    Err(not_shareable(WANTED, found))
}
