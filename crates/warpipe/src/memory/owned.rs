//! Memory that this process allocated and can share.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::mapped_region::MappedRegion;
use super::region::{Region, check_reach};
use super::shared::SharedMemory;
use super::slice::{DeviceSlice, check_range, deref_to_slice};
use crate::backend::{Access, DeviceId};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::fork::driver_files::EXPORTED;

/// An allocation that can be given to other processes (`cuMemCreate` with an exportable handle; a
/// sealed memfd on the host). Zeroed at first. Cheap to clone: all clones are one.
///
/// Two ways lead to another process: a [`Ticket`](crate::Ticket), which is a text, or the bare
/// descriptor ([`export_fd`](Memory::export_fd)) over a socket of the user's own. The memory lives
/// as long as any process has it open, whether or not its maker lives. Its methods to read and
/// write are those of [`DeviceSlice`]; `to_vec` waits for the streams of all clones.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Memory};
/// # let folder = std::env::temp_dir().join(format!("warpipe-memory-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let weights = Memory::allocate(&device, 1 << 20)?;
/// weights.write(&device.stream()?, 0, b"weights")?;
/// let published = weights.publish("weights", domain.options())?;
/// let text = published.ticket(..)?.to_string(); // a file, a pipe, an environment variable: any way will do
///
/// // In any process of this user:
/// let ticket: warpipe::Ticket = text.parse()?;
/// let memory = ticket.open(&device, Duration::ZERO)?;
/// assert_eq!(&memory.to_vec(Duration::from_secs(1))?[..7], b"weights");
/// # drop((memory, published)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Memory {
    pub(super) mapping: Arc<MappedRegion>,
    slice: Arc<DeviceSlice>,
}

deref_to_slice!(Memory);

/// The description that an importer of a bare memory descriptor needs. Send it along with the
/// descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInfo {
    /// The requested length in bytes.
    pub bytes: u64,
    /// The length of the whole allocation, rounded up to the device's unit, which the driver maps.
    pub mapped_bytes: u64,
    /// The device that the memory lies on.
    pub device: DeviceId,
}

impl Memory {
    /// Allocates `bytes` bytes, in all a multiple of the device's unit (2 MiB on CUDA as a rule, a
    /// page on the host): `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`Error::Limit`] when the device has no room; [`Error::Argument`] for 0 bytes;
    /// [`Error::Driver`], [`Error::Os`].
    pub fn allocate(device: &Device, bytes: u64) -> Result<Memory> {
        let mapping = Arc::new(MappedRegion::allocate(device, bytes)?);
        let slice = mapping.slice(0, bytes, Access::ReadWrite, &"memory".into())?;
        Ok(Memory {
            mapping,
            slice: Arc::new(slice.waiting_for_all()),
        })
    }

    /// The description that an importer of a bare descriptor needs.
    pub fn info(&self) -> MemoryInfo {
        MemoryInfo {
            bytes: self.bytes(),
            mapped_bytes: self.mapping.region().bytes(),
            device: self.mapping.owner,
        }
    }

    /// A descriptor of the memory, close-on-exec: `cuMemExportToShareableHandle`, or a duplicate of
    /// the memfd. Any process that gets it can map all of the memory, for reading or writing.
    ///
    /// # Errors
    /// [`Error::Os`]; [`Error::Driver`]; [`Error::State`].
    pub fn export_fd(&self) -> Result<OwnedFd> {
        let fd = self.private_export()?;
        // The caller owns the descriptor: a forked child may keep it, as with any descriptor.
        let copy = rustix::io::fcntl_dupfd_cloexec(&fd, 3)
            .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a memory's descriptor", e))?;
        EXPORTED.insert(copy.as_raw_fd());
        Ok(copy)
    }

    /// A descriptor of the memory that a forked child does not keep.
    pub(crate) fn private_export(&self) -> Result<CloseOnForkFd> {
        self.slice.owner_process().check()?;
        self.mapping.region().export()
    }

    /// Maps memory by a descriptor that came over the user's own socket
    /// (`cuMemImportFromShareableHandle`, or `mmap` of a sealed memfd). Checks the descriptor's
    /// type and size. The descriptor may be closed afterwards.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpipe::{Device, Memory, backend::Access};
    /// # let device = Device::host();
    /// let memory = Memory::allocate(&device, 100)?;
    /// let (fd, info) = (memory.export_fd()?, memory.info()); // over a socket, `info` beside `fd`
    /// let shared = Memory::import_fd(&device, &fd, &info, Access::Read)?;
    /// assert_eq!(shared.to_vec(Duration::from_secs(1))?, [0; 100]);
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Device`]: another descriptor, or another size; [`Error::Device`]:
    /// `device` cannot reach the memory's device; [`Error::Argument`]: more bytes than are mapped;
    /// [`Error::Limit`], [`Error::Driver`].
    pub fn import_fd(
        device: &Device,
        fd: impl AsFd,
        info: &MemoryInfo,
        access: Access,
    ) -> Result<SharedMemory> {
        check_range("an imported descriptor", 0, info.bytes, info.mapped_bytes)?;
        check_reach(device, info.device)?;
        let (bytes, owner) = (info.mapped_bytes, info.device);
        let region = Region::import(device, &[fd.as_fd()], bytes, access, owner)?;
        let mapping = MappedRegion::of(region, device, info.device, access, info.bytes)?;
        SharedMemory::whole(&Arc::new(mapping), "an imported descriptor")
    }

    /// Says in this process's statistics which generation of endpoints shares the memory, and under
    /// which number.
    pub(crate) fn identify(&self, generation: [u8; 16], number: u64) {
        self.mapping.region().identify(generation, number);
    }
}
