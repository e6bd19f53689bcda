//! Regions: virtual memory management (`cuMemCreate` and related calls), exported and imported as
//! descriptors.

use std::collections::HashSet;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use rustix::fs::{FileType, OFlags};
use rustix::io::FdFlags;

use super::super::fault::Fault;
use super::super::sys::*;
use super::super::waits;
use super::CudaBackend;
use crate::backend::{Access, DeviceId, DeviceKind, RawRegion, Stage, unreclaimed};
use crate::error::{Error, Result};
use crate::os;
use crate::slow_path::{self, SlowPath};

/// The expected kind of a descriptor, for errors.
const WANTED: &str = "CUDA memory";

/// Codes with which the driver refuses a descriptor.
const NOT_SUCH_MEMORY: [CUresult; 5] = [
    CUresult::INVALID_VALUE,
    CUresult::INVALID_DEVICE,
    CUresult::INVALID_HANDLE,
    CUresult::UNKNOWN,
    CUresult::OPERATING_SYSTEM,
];

/// A mapping that is made or undone step by step.
struct AddressMapping<'a> {
    driver: &'a Driver,
    handle: CUmemGenericAllocationHandle,
    bytes: usize,
    reserved: Option<CUdeviceptr>,
    mapped: bool,
}

/// The failed step of a mapping.
enum Step {
    Reserve(Fault),
    Map(Fault),
    Access(Fault),
}

impl Step {
    fn fault(self) -> Fault {
        match self {
            Step::Reserve(fault) | Step::Map(fault) | Step::Access(fault) => fault,
        }
    }
}

impl<'a> AddressMapping<'a> {
    /// Takes over a handle.
    fn of(
        driver: &'a Driver,
        handle: CUmemGenericAllocationHandle,
        bytes: usize,
    ) -> AddressMapping<'a> {
        AddressMapping {
            driver,
            handle,
            bytes,
            reserved: None,
            mapped: false,
        }
    }

    /// Builds the mapping. On a failure it undoes its steps.
    fn build(mut self, backend: &CudaBackend, access: Access) -> Result<RawRegion, Step> {
        match self.take_steps(backend.device, access) {
            Ok(()) => {
                backend.held.fetch_add(self.bytes as u64, Ordering::Relaxed);
                Ok(self.region())
            }
            Err(step) => {
                // The first failure is the one to report.
                if self.undo().is_err() {
                    backend.owe(self.region());
                }
                Err(step)
            }
        }
    }

    fn take_steps(&mut self, device: CUdevice, access: Access) -> Result<(), Step> {
        let address = self
            .driver
            .address_reserve(self.bytes)
            .map_err(Step::Reserve)?;
        self.reserved = Some(address);
        // SAFETY: the range was reserved just now, the handle is held by self.
        unsafe { self.driver.memory_map(address, self.bytes, self.handle) }.map_err(Step::Map)?;
        self.mapped = true;
        let access = CUmemAccessDesc {
            location: on(device),
            flags: access_flags(access),
        };
        // SAFETY: mapped just now.
        unsafe { self.driver.memory_set_access(address, self.bytes, &access) }.map_err(Step::Access)
    }

    /// Undoes the completed steps, last first, and stops where the driver refuses: mapped memory
    /// must not be freed.
    fn undo(&mut self) -> Result<(), Fault> {
        if let Some(address) = self.reserved {
            if self.mapped {
                // SAFETY: mapped, and no work uses it: it was never handed out, or its owner
                // promises that.
                unsafe { self.driver.memory_unmap(address, self.bytes) }?;
                self.mapped = false;
            }
            // SAFETY: reserved, unmapped above.
            unsafe { self.driver.address_free(address, self.bytes) }?;
            self.reserved = None;
        }
        // SAFETY: held by self, which is gone after this.
        unsafe { self.driver.memory_release(self.handle) }
    }

    /// The part of the region that exists.
    fn region(&self) -> RawRegion {
        let stage = match (self.reserved, self.mapped) {
            (None, _) => Stage::Held,
            (Some(_), false) => Stage::Reserved,
            (Some(_), true) => Stage::Mapped,
        };
        let ptr = self.reserved.unwrap_or_default();
        RawRegion {
            ptr,
            bytes: self.bytes as u64,
            handle: self.handle,
            stage,
        }
    }
}

impl CudaBackend {
    pub(in crate::backend::cuda) fn allocate_region(&self, bytes: u64) -> Result<RawRegion> {
        let _current = self.enter()?;
        let size = size(bytes)?;
        let handle = self
            .driver
            .memory_create(size, &allocation(self.device))
            .map_err(|f| self.no_room(f, bytes))?;
        let region = AddressMapping::of(self.driver, handle, size)
            .build(self, Access::ReadWrite)
            .map_err(|step| self.no_room(step.fault(), bytes))?;
        Ok(region)
    }

    /// [`Error::DeviceMemory`] if the fault is of that kind, else the fault's general error.
    pub(in crate::backend::cuda) fn no_room(&self, fault: Fault, bytes: u64) -> Error {
        if !fault.is(&[CUresult::OUT_OF_MEMORY]) {
            return fault.into();
        }
        let detail = match self.driver.memory_info() {
            Ok((free, total)) => format!(" ({free} of {total} bytes are free)"),
            Err(_) => String::new(),
        };
        Error::DeviceMemory {
            device: self.info.name.clone(),
            bytes,
            detail,
        }
    }

    /// # Safety
    /// The region was allocated here and is not released.
    pub(in crate::backend::cuda) unsafe fn export_region(
        &self,
        region: &RawRegion,
    ) -> Result<OwnedFd> {
        let _current = self.enter()?;
        // SAFETY: a region that was allocated here holds its handle until it is released.
        let fd: c_int = unsafe { self.driver.memory_export(region.handle) }?;
        // SAFETY: the driver opened it just now; no other code has its number.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)
            .map_err(|error| Error::os("fcntl", "an exported region's descriptor", error))?;
        Ok(fd)
    }

    pub(in crate::backend::cuda) fn import_region(
        &self,
        fd: BorrowedFd<'_>,
        bytes: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<RawRegion> {
        if owner.kind != DeviceKind::Cuda {
            return Err(not_memory(format!("memory of device {owner}")));
        }
        if bytes == 0 || !bytes.is_multiple_of(self.granularity) {
            return Err(not_memory(format!(
                "said to be {bytes} bytes, not a multiple of {}",
                self.granularity
            )));
        }
        refuse_plain_files(fd)?;
        let _current = self.enter()?;
        self.check_peer(owner)?;
        let size = size(bytes)?;
        // The driver takes the descriptor's number as a pointer, and number 0 as null.
        let moved = if fd.as_raw_fd() == 0 {
            Some(duplicate(fd)?)
        } else {
            None
        };
        let number = moved.as_ref().map_or(fd.as_raw_fd(), AsRawFd::as_raw_fd);
        let handle = self.driver.memory_import(number).map_err(import_error)?;
        let region = AddressMapping::of(self.driver, handle, size)
            .build(self, access)
            .map_err(|step| self.map_error(step, bytes, owner))?;
        Ok(region)
    }

    /// If the owner device is visible here, the driver tells in advance whether its memory can be
    /// reached.
    pub(in crate::backend::cuda) fn check_peer(&self, owner: DeviceId) -> Result<()> {
        if owner == self.info.id {
            return Ok(());
        }
        for ordinal in 0..self.driver.device_count()? {
            let peer = self.driver.device(ordinal)?;
            if self.driver.device_uuid(peer)? == owner.uuid
                && !self.driver.can_access_peer(self.device, peer)?
            {
                return Err(self.peer_error(owner, "cuDeviceCanAccessPeer says no".into()));
            }
        }
        Ok(())
    }

    pub(in crate::backend::cuda) fn peer_error(&self, owner: DeviceId, reason: String) -> Error {
        slow_path::count(SlowPath::NoPeerAccess, 0);
        Error::PeerAccess {
            reader: format!("{} ({})", self.info.name, self.info.id),
            owner: owner.to_string(),
            reason,
        }
    }

    fn map_error(&self, step: Step, bytes: u64, owner: DeviceId) -> Error {
        match step {
            Step::Map(fault) if fault.is(&[CUresult::INVALID_VALUE, CUresult::NOT_SUPPORTED]) => {
                not_memory(format!(
                    "said to be {bytes} bytes, which is not its size ({})",
                    fault.words()
                ))
            }
            Step::Access(fault) if owner != self.info.id => self.peer_error(owner, fault.words()),
            step => self.no_room(step.fault(), bytes),
        }
    }

    /// # Safety
    /// As for [`crate::backend::Backend::release`].
    pub(in crate::backend::cuda) unsafe fn release_region(
        &self,
        region: &mut RawRegion,
    ) -> Result<()> {
        // After a reset its address or handle may belong to another allocation. The memory stays,
        // and no stream of this process uses it.
        let _current = self.enter().inspect_err(|error| {
            if matches!(error, Error::DeviceReset { .. }) {
                self.held.fetch_sub(region.bytes, Ordering::Relaxed);
            }
        })?;
        if let Stage::Pieces { .. } = region.stage {
            // SAFETY: the caller's promise.
            return unsafe { self.release_pieces(region) };
        }
        let mut mapping = AddressMapping {
            driver: self.driver,
            handle: region.handle,
            bytes: size(region.bytes)?,
            reserved: (region.stage != Stage::Held).then_some(region.ptr),
            mapped: region.stage == Stage::Mapped,
        };
        let undone = mapping.undo();
        *region = mapping.region();
        undone?;
        self.held.fetch_sub(region.bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Queues the remaining part of an unfinished region for another attempt.
    pub(in crate::backend::cuda) fn owe(&self, region: RawRegion) {
        // Counted until it is released, like any region.
        self.held.fetch_add(region.bytes, Ordering::Relaxed);
        if let Some(backend) = self.me.upgrade() {
            unreclaimed::retry_region(backend, region);
        }
    }

    /// # Safety
    /// As for [`crate::backend::Backend::register`].
    pub(in crate::backend::cuda) unsafe fn register_host(
        &self,
        ptr: *mut u8,
        bytes: usize,
    ) -> Result<CUdeviceptr> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.host_register(ptr.cast(), bytes) }?;
        let device_ptr = self
            .driver
            .host_device_pointer(ptr.cast())
            .inspect_err(|_| {
                // SAFETY: registered above, and nothing was enqueued.
                if unsafe { self.driver.host_unregister(ptr.cast()) }.is_err() {
                    self.stuck().insert(ptr.addr());
                }
            })?;
        waits::registered(ptr, bytes, device_ptr);
        Ok(device_ptr)
    }

    /// # Safety
    /// As for [`crate::backend::Backend::unregister`].
    pub(in crate::backend::cuda) unsafe fn unregister_host(&self, ptr: *mut u8) -> Result<()> {
        waits::give_up(ptr);
        if let Some(_current) = self.enter_unless_gone()? {
            // SAFETY: the caller's promise.
            unsafe { self.driver.host_unregister(ptr.cast()) }?;
        }
        self.stuck().remove(&ptr.addr());
        Ok(())
    }

    /// Memory that is registered although it has no device address.
    pub(in crate::backend::cuda) fn stuck(&self) -> MutexGuard<'_, HashSet<usize>> {
        self.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The properties of every region: on this device, exportable as a descriptor.
pub(in crate::backend::cuda) fn allocation(device: CUdevice) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: on(device),
        win32_handle_metadata: std::ptr::null_mut(),
        compression_type: 0,
        gpu_direct_rdma_capable: 0,
        usage: 0,
        reserved: [0; 4],
    }
}

pub(in crate::backend::cuda) fn on(device: CUdevice) -> CUmemLocation {
    CUmemLocation {
        kind: MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

pub(in crate::backend::cuda) fn access_flags(access: Access) -> u32 {
    match access {
        Access::Read => MEM_ACCESS_READ,
        Access::ReadWrite => MEM_ACCESS_READWRITE,
    }
}

pub(in crate::backend::cuda) fn size(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::argument("bytes", bytes, "what an address can count"))
}

pub(in crate::backend::cuda) fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, 3)
        .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a received descriptor", e))
}

pub(in crate::backend::cuda) fn not_memory(found: String) -> Error {
    Error::NotDeviceMemory {
        wanted: WANTED,
        found,
    }
}

pub(in crate::backend::cuda) fn import_error(fault: Fault) -> Error {
    if fault.is(&NOT_SUCH_MEMORY) {
        not_memory(fault.words())
    } else {
        fault.into()
    }
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
    Err(not_memory(found.into()))
}
