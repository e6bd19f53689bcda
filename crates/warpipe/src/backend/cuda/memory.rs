//! Regions: virtual memory management (`cuMemCreate` and its kin), exported and imported as descriptors.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{FileType, OFlags};
use rustix::io::FdFlags;

use super::backend::CudaBackend;
use super::fault::Fault;
use super::sys::*;
use crate::backend::{Access, DeviceId, DeviceKind, RawRegion};
use crate::error::{Error, Result};
use crate::os;

/// What an importer expects of a descriptor.
const WANTED: &str = "CUDA memory";

/// Codes with which the driver says that a descriptor is not what it should be.
const NOT_SUCH_MEMORY: [CUresult; 5] = [
    CUresult::INVALID_VALUE,
    CUresult::INVALID_DEVICE,
    CUresult::INVALID_HANDLE,
    CUresult::UNKNOWN,
    CUresult::OPERATING_SYSTEM,
];

/// A mapping under construction: undoes its steps, last first, unless it is finished.
struct Mapping<'a> {
    driver: &'a Driver,
    handle: CUmemGenericAllocationHandle,
    bytes: usize,
    reserved: Option<CUdeviceptr>,
    mapped: bool,
}

/// Which step of a mapping failed.
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

impl<'a> Mapping<'a> {
    /// Takes over a held handle.
    fn of(driver: &'a Driver, handle: CUmemGenericAllocationHandle, bytes: usize) -> Mapping<'a> {
        Mapping { driver, handle, bytes, reserved: None, mapped: false }
    }

    fn build(mut self, device: CUdevice, access: Access) -> Result<RawRegion, Step> {
        let address = self.driver.address_reserve(self.bytes).map_err(Step::Reserve)?;
        self.reserved = Some(address);
        // SAFETY: the range was reserved just now, the handle is held by self.
        unsafe { self.driver.memory_map(address, self.bytes, self.handle) }.map_err(Step::Map)?;
        self.mapped = true;
        let access = CUmemAccessDesc { location: on(device), flags: access_flags(access) };
        // SAFETY: mapped just now.
        unsafe { self.driver.memory_set_access(address, self.bytes, &access) }.map_err(Step::Access)?;
        let region = RawRegion { ptr: address, bytes: self.bytes as u64, handle: self.handle };
        std::mem::forget(self);
        Ok(region)
    }

    /// Undoes every step that was taken, whatever becomes of the others; the first failure is told.
    fn undo(&mut self) -> Result<(), Fault> {
        let mut outcome = Ok(());
        if let Some(address) = self.reserved.take() {
            if std::mem::take(&mut self.mapped) {
                // SAFETY: mapped, and no work uses it: it was never handed out, or its holder says so.
                outcome = outcome.and(unsafe { self.driver.memory_unmap(address, self.bytes) });
            }
            // SAFETY: reserved, unmapped above.
            outcome = outcome.and(unsafe { self.driver.address_free(address, self.bytes) });
        }
        // SAFETY: held by self, which is gone after this.
        outcome.and(unsafe { self.driver.memory_release(self.handle) })
    }
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        // The failure that led here is the one to tell.
        let _ = self.undo();
    }
}

impl CudaBackend {
    pub(super) fn allocate_region(&self, bytes: u64) -> Result<RawRegion> {
        let _current = self.enter()?;
        let size = size(bytes)?;
        let handle = self.driver.memory_create(size, &allocation(self.device)).map_err(|f| self.no_room(f, bytes))?;
        let region = Mapping::of(self.driver, handle, size)
            .build(self.device, Access::ReadWrite)
            .map_err(|step| self.no_room(step.fault(), bytes))?;
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Ok(region)
    }

    /// [`Error::DeviceMemory`] if that is what the fault says, else the fault's own error.
    pub(super) fn no_room(&self, fault: Fault, bytes: u64) -> Error {
        if !fault.is(&[CUresult::OUT_OF_MEMORY]) {
            return fault.into();
        }
        let detail = match self.driver.memory_info() {
            Ok((free, total)) => format!(" ({free} of {total} bytes are free)"),
            Err(_) => String::new(),
        };
        Error::DeviceMemory { device: self.info.name.clone(), bytes, detail }
    }

    /// # Safety
    /// The region was allocated here and is not released.
    pub(super) unsafe fn export_region(&self, region: &RawRegion) -> Result<OwnedFd> {
        let _current = self.enter()?;
        // SAFETY: a region that was allocated here holds its handle until it is released.
        let fd: c_int = unsafe { self.driver.memory_export(region.handle) }?;
        // SAFETY: the driver opened it for us just now; nobody else knows its number.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)
            .map_err(|error| Error::os("fcntl", "an exported region's descriptor", error))?;
        Ok(fd)
    }

    pub(super) fn import_region(
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
            return Err(not_memory(format!("said to be {bytes} bytes, not a multiple of {}", self.granularity)));
        }
        refuse_plain_files(fd)?;
        let _current = self.enter()?;
        self.check_peer(owner)?;
        let size = size(bytes)?;
        // The driver takes the descriptor's number for a pointer, and number 0 for none.
        let moved = if fd.as_raw_fd() == 0 { Some(duplicate(fd)?) } else { None };
        let number = moved.as_ref().map_or(fd.as_raw_fd(), AsRawFd::as_raw_fd);
        let handle = self.driver.memory_import(number).map_err(import_error)?;
        let region = Mapping::of(self.driver, handle, size)
            .build(self.device, access)
            .map_err(|step| self.map_error(step, bytes, owner))?;
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Ok(region)
    }

    /// If the owner is visible here, the driver knows in advance whether its memory can be reached.
    pub(super) fn check_peer(&self, owner: DeviceId) -> Result<()> {
        if owner == self.info.id {
            return Ok(());
        }
        for ordinal in 0..self.driver.device_count()? {
            let peer = self.driver.device(ordinal)?;
            if self.driver.device_uuid(peer)? == owner.uuid && !self.driver.can_access_peer(self.device, peer)? {
                return Err(self.peer_error(owner, "cuDeviceCanAccessPeer says no".into()));
            }
        }
        Ok(())
    }

    pub(super) fn peer_error(&self, owner: DeviceId, reason: String) -> Error {
        Error::PeerAccess { reader: format!("{} ({})", self.info.name, self.info.id), owner: owner.to_string(), reason }
    }

    fn map_error(&self, step: Step, bytes: u64, owner: DeviceId) -> Error {
        match step {
            Step::Map(fault) if fault.is(&[CUresult::INVALID_VALUE, CUresult::NOT_SUPPORTED]) => {
                not_memory(format!("said to be {bytes} bytes, which is not its size ({})", fault.words()))
            }
            Step::Access(fault) if owner != self.info.id => self.peer_error(owner, fault.words()),
            step => self.no_room(step.fault(), bytes),
        }
    }

    /// # Safety
    /// As for [`crate::backend::Backend::release`].
    pub(super) unsafe fn release_region(&self, region: RawRegion) -> Result<()> {
        // After a reset its address or handle may be another's. The memory stays, and no stream of this process uses it.
        let _current = self.enter().inspect_err(|_| {
            self.held.fetch_sub(region.bytes, Ordering::Relaxed);
        })?;
        let mut mapping = std::mem::ManuallyDrop::new(Mapping {
            driver: self.driver,
            handle: region.handle,
            bytes: size(region.bytes)?,
            reserved: Some(region.ptr),
            mapped: true,
        });
        let undone = mapping.undo();
        self.held.fetch_sub(region.bytes, Ordering::Relaxed);
        Ok(undone?)
    }

    /// # Safety
    /// As for [`crate::backend::Backend::register`].
    pub(super) unsafe fn register_host(&self, ptr: *mut u8, bytes: usize) -> Result<CUdeviceptr> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.host_register(ptr.cast(), bytes) }?;
        self.driver.host_device_pointer(ptr.cast()).map_err(|fault| {
            // SAFETY: registered above, and nothing was enqueued.
            let _ = unsafe { self.driver.host_unregister(ptr.cast()) };
            fault.into()
        })
    }
}

/// The properties of every region: on this device, exportable as a descriptor.
pub(super) fn allocation(device: CUdevice) -> CUmemAllocationProp {
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

fn on(device: CUdevice) -> CUmemLocation {
    CUmemLocation { kind: MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn access_flags(access: Access) -> u32 {
    match access {
        Access::Read => MEM_ACCESS_READ,
        Access::ReadWrite => MEM_ACCESS_READWRITE,
    }
}

fn size(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::argument("bytes", bytes, "what an address can count"))
}

fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a received descriptor", e))
}

fn not_memory(found: String) -> Error {
    Error::NotDeviceMemory { wanted: WANTED, found }
}

fn import_error(fault: Fault) -> Error {
    if fault.is(&NOT_SUCH_MEMORY) { not_memory(fault.words()) } else { fault.into() }
}

/// What is no memory of a driver never reaches it, who would have to make sense of a peer's pipe, or ask a file system.
/// The driver exports a device file; its test double a memfd, which is known by its seals.
fn refuse_plain_files(fd: BorrowedFd<'_>) -> Result<()> {
    let kind = os::kind_of(fd).map_err(|error| Error::os("statx", "a received descriptor", error))?;
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
