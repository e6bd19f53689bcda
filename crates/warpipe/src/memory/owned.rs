//! Memory of this process that others may be given.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::mapped_region::MappedRegion;
use super::published::{Publication, Published};
use super::region::Region;
use super::shared::SharedMemory;
use crate::backend::{Access, DeviceId, DevicePtr};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::driver_files::EXPORTED;
use crate::ipc::domain::Domain;
use crate::stream::Stream;

/// An allocation that can be given to other processes (`cuMemCreate` with an exportable handle; a sealed memfd on the
/// host). Zeroed at first. Cheap to clone: all clones are one.
///
/// Two ways lead to another process: a [`Ticket`](crate::Ticket), which is a text, or the bare descriptor
/// ([`export_fd`](Memory::export_fd)), for those who have a socket of their own. The memory lives as long as anybody has it
/// open, whatever becomes of its maker.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Memory};
/// # let folder = std::env::temp_dir().join(format!("warpipe-memory-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let weights = Memory::allocate(&device, 1 << 20)?;
/// weights.write(&device.stream()?, 0, b"weights")?;
/// let published = weights.publish(&domain, "weights")?;
/// let text = published.ticket()?.to_string(); // a file, a pipe, an environment variable: any way will do
///
/// // In any process of this user:
/// let ticket: warpipe::Ticket = text.parse()?;
/// let memory = ticket.open(&device)?;
/// assert_eq!(&memory.to_vec(Duration::from_secs(1))?[..7], b"weights");
/// # drop((memory, published)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Memory {
    pub(super) mapping: Arc<MappedRegion>,
}

/// What must be known of a descriptor of memory to import it: to be sent along with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInfo {
    /// The bytes that were allocated for.
    pub bytes: u64,
    /// The whole allocation, rounded up to the device's unit: what the driver maps.
    pub mapped_bytes: u64,
    /// The device that it lies on.
    pub device: DeviceId,
}

/// A descriptor of memory, and what must be known of it.
#[derive(Debug)]
pub struct Export {
    /// The right to the memory.
    pub fd: OwnedFd,
    /// To be sent along.
    pub info: MemoryInfo,
}

impl Memory {
    /// Allocates `bytes` bytes, in all a multiple of the device's unit (2 MiB on CUDA as a rule, a page on the host):
    /// `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when the device has no room; [`Error::Argument`] for 0 bytes; [`Error::Driver`],
    /// [`Error::Os`].
    pub fn allocate(device: &Device, bytes: u64) -> Result<Memory> {
        Ok(Memory {
            mapping: Arc::new(MappedRegion::allocate(device, bytes)?),
        })
    }

    /// Its device address.
    pub fn ptr(&self) -> DevicePtr {
        self.mapping.ptr()
    }

    /// What was allocated for, in bytes.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        self.mapping.device()
    }

    /// What an importer of a bare descriptor must know.
    pub fn info(&self) -> MemoryInfo {
        MemoryInfo {
            bytes: self.bytes(),
            mapped_bytes: self.mapping.region().bytes(),
            device: self.mapping.owner,
        }
    }

    /// Says that `stream` is given work on this memory: it is not unmapped before that stream has done what it was given
    /// until the last handle is dropped. To be called before the work is enqueued.
    pub fn used_on(&self, stream: &Stream) {
        self.mapping.record_use(stream);
    }

    /// Enqueues a copy from host memory to byte `offset` (`cuMemcpyHtoDAsync`); `bytes` may be reused at once.
    ///
    /// # Errors
    /// [`Error::Range`]; [`Error::Argument`] for a stream of another device; [`Error::Driver`]; [`Error::Forked`];
    /// [`Error::Timeout`] when too much is on its way behind streams that stand still.
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<()> {
        self.mapping.check("memory", offset, bytes.len() as u64)?;
        self.mapping.write(stream, offset, bytes)
    }

    /// Waits for the streams that were named ([`used_on`](Self::used_on), [`write`](Self::write)) and copies all of it to
    /// host memory (`cuMemcpyDtoHAsync`).
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::DeviceMemory`] when the host has no room; [`Error::Driver`]; [`Error::Forked`].
    pub fn to_vec(&self, timeout: Duration) -> Result<Vec<u8>> {
        self.mapping.read_quiet(timeout)
    }

    /// A descriptor of it, close-on-exec: `cuMemExportToShareableHandle`, or a duplicate of the memfd. Whoever gets it
    /// can map all of the memory, for reading or writing as it likes.
    ///
    /// # Errors
    /// [`Error::DescriptorLimit`]; [`Error::Driver`]; [`Error::Forked`].
    pub fn export_fd(&self) -> Result<OwnedFd> {
        self.mapping.check_owner_process()?;
        let fd = self.mapping.region().export()?;
        // The caller's own: a forked child may keep it, as with any descriptor.
        let copy = rustix::io::fcntl_dupfd_cloexec(&fd, 3)
            .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a memory's descriptor", e))?;
        EXPORTED.set(copy.as_raw_fd());
        Ok(copy)
    }

    /// [`export_fd`](Self::export_fd) with what must be known of it.
    ///
    /// # Errors
    /// As [`export_fd`](Self::export_fd).
    pub fn export(&self) -> Result<Export> {
        Ok(Export {
            fd: self.export_fd()?,
            info: self.info(),
        })
    }

    /// Maps memory by a descriptor that came over the user's own socket (`cuMemImportFromShareableHandle`, or `mmap` of
    /// a memfd that is sealed). The descriptor may be closed afterwards. What it is, and its size, is checked.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpipe::{Device, Memory, backend::Access};
    /// # let device = Device::host();
    /// let memory = Memory::allocate(&device, 100)?;
    /// let export = memory.export()?; // its `fd` goes over a socket, its `info` beside it
    /// let shared = Memory::import_fd(&device, &export.fd, &export.info, Access::Read)?;
    /// assert_eq!(shared.to_vec(Duration::from_secs(1))?, [0; 100]);
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NotDeviceMemory`]: another descriptor, or another size; [`Error::PeerAccess`]: `device` cannot reach the
    /// memory's device; [`Error::Range`]: more bytes than are mapped; [`Error::DeviceMemory`], [`Error::Driver`].
    pub fn import_fd(
        device: &Device,
        fd: impl AsFd,
        info: &MemoryInfo,
        access: Access,
    ) -> Result<SharedMemory> {
        super::mapped_region::check_range(
            "an imported descriptor",
            0,
            info.bytes,
            info.mapped_bytes,
        )?;
        super::shared::check_reach(device, info.device)?;
        let region = Region::import(device, fd.as_fd(), info.mapped_bytes, access, info.device)?;
        let mapping = MappedRegion::of(region, device, info.device, access, info.bytes)?;
        Ok(SharedMemory::whole(
            Arc::new(mapping),
            "an imported descriptor",
        ))
    }

    /// Publishes it under a name, read-only, for this user: see [`publication`](Self::publication) for more.
    ///
    /// # Errors
    /// As [`Publication::build`].
    pub fn publish(&self, domain: &Domain, name: &str) -> Result<Published> {
        self.publication(name).domain(domain).build()
    }

    /// A way to publish it under a name, to be built.
    pub fn publication(&self, name: &str) -> Publication {
        Publication::new(self, name)
    }
}
