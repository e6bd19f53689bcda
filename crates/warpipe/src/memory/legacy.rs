//! Legacy CUDA IPC handles, for memory that another allocator made with `cudaMalloc`.
//!
//! A handle is 64 bytes of the driver that name one allocation, and the facts that the driver does
//! not include: the tensor's place in the allocation, its exporter, its device and machine. The
//! user sends it by any means. It is no right to the memory: it becomes invalid with its exporter's
//! death, and any process of the same user that has the bytes can open it.
//!
//! # The bytes
//!
//! All numbers are little-endian. The checksum is FNV-1a over everything before it.
//!
//! | at | what |
//! | --- | --- |
//! | 0 | `WPLEGACY` |
//! | 8 | version, 16 bit; device kind, 8 bit (0 host, 1 CUDA); a zero byte; pid, 32 bit |
//! | 16 | the device's UUID |
//! | 32 | hash of the boot's id; the PID namespace; the exporter's start; the allocation's number (64 bit each) |
//! | 64 | the allocation's length; where the range begins in it; the range's length (64 bit each) |
//! | 88 | the driver's 64 bytes |
//! | 152 | checksum, 64 bit |

mod exports;
mod imports;
mod text;

pub use imports::LegacyMemory;

use crate::backend::{DeviceId, DeviceKind, DevicePtr, IpcBytes, PointerKind};
use crate::device::Device;
use crate::error::{Error, LegacyFault, Result};
use crate::ipc::Kind;
use crate::origin::{self, Liveness, ProcessOrigin};

const MAGIC: [u8; 8] = *b"WPLEGACY";
const VERSION: u16 = 1;

/// `cuIpcGetMemHandle`: names a range of memory that was allocated with `cudaMalloc`
/// (`cuMemAlloc`), by PyTorch for example, for another process of the same machine and user.
///
/// Never the default: this memory is gone when its exporter is, every reader can also write it, and
/// every importer maps the whole allocation around it. Tensors that this library allocates have
/// none of these limits.
///
/// It is plain data, and goes from process to process as text (`Display`, `FromStr`), as bytes or
/// by serde.
///
/// ```
/// use warpipe::{Device, LegacyHandle};
///
/// let device = Device::host();
/// let pointer = device.backend().allocate_plain(4096)?; // or somebody else's cudaMalloc
/// // SAFETY: the memory is there until it is freed below.
/// let handle = unsafe { LegacyHandle::export(&device, pointer + 64, 256)? };
/// let text = handle.to_string(); // goes to the other process on a pipe, a queue, a command line
///
/// let memory = text.parse::<LegacyHandle>()?.open(&device)?;
/// assert_eq!(memory.bytes(), 256);
/// # assert_eq!(memory.ptr(), pointer + 64);
/// drop(memory);
/// # unsafe { device.backend().free_plain(pointer)? };
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LegacyHandle {
    origin: ProcessOrigin,
    owner: DeviceId,
    /// The allocation's number in its process: the driver's bytes for a freed one and a later one
    /// may be the same.
    allocation: u64,
    allocation_bytes: u64,
    offset: u64,
    bytes: u64,
    raw: IpcBytes,
}

impl LegacyHandle {
    /// The length of a handle's bytes.
    pub const BYTES: usize = 160;

    /// `cuMemGetAddressRange` + `cuIpcGetMemHandle`: a handle for `bytes` bytes at `ptr`, which may
    /// lie anywhere in their allocation.
    ///
    /// # Errors
    /// [`Error::NotExportable`] for memory that is not from `cudaMalloc` (null, host, pinned,
    /// managed, pooled, mapped by the virtual memory functions, freed); [`Error::LegacyHandle`] for
    /// a range longer than its allocation, or memory of another device than `device`;
    /// [`Error::Forked`], [`Error::Driver`].
    ///
    /// # Safety
    /// The allocation stays for as long as another process uses it: the driver does not document
    /// its behaviour for memory that is freed while another process has it open. The address itself
    /// is looked up and not trusted.
    pub unsafe fn export(device: &Device, ptr: DevicePtr, bytes: u64) -> Result<LegacyHandle> {
        let found = device.backend().locate(ptr)?;
        if found.kind != PointerKind::Device {
            return Err(Error::NotExportable {
                ptr,
                kind: found.kind,
            });
        }
        if found.owner != device.info().id {
            return Err(other_device(found.owner, device));
        }
        let offset = ptr.wrapping_sub(found.base);
        let (origin, owner) = (ProcessOrigin::here()?, found.owner);
        check_range(offset, bytes, found.bytes)?;
        // SAFETY: the base of an allocation of the right kind, as was just looked up; it is live by
        // the caller's promise.
        let raw = unsafe { device.backend().export_legacy(found.base) }?;
        let (allocation, allocation_bytes) = (found.allocation, found.bytes);
        let handle = LegacyHandle {
            origin,
            owner,
            allocation,
            allocation_bytes,
            offset,
            bytes,
            raw,
        };
        exports::remember(&handle, found.base)?;
        Ok(handle)
    }

    /// `cuIpcOpenMemHandle`: maps the memory here. Opening memory that is open already, or was
    /// exported by this very process, makes no driver call and gives the same address.
    ///
    /// Does not wait: missing memory is an error. `device` may be another GPU than the owner if the
    /// two have peer access.
    ///
    /// # Errors
    /// [`Error::PeerGone`] when the exporter is dead; [`Error::LegacyHandle`] when it has freed
    /// the memory, or for a handle of another machine or backend; [`Error::PeerAccess`],
    /// [`Error::NoSuchDevice`] for a GPU that this process cannot reach or see;
    /// [`Error::DescriptorLimit`], [`Error::Driver`].
    pub fn open(&self, device: &Device) -> Result<LegacyMemory> {
        let here = ProcessOrigin::here()?;
        if self.origin.host != here.host {
            return Err(Error::legacy(LegacyFault::ForeignHost));
        }
        if self.owner.kind != device.info().id.kind {
            return Err(other_device(self.owner, device));
        }
        if self.origin == here {
            let base = exports::find(self, device)?;
            return Ok(LegacyMemory::own(device, base + self.offset, self.bytes));
        }
        imports::open(self, device).map_err(|error| self.explain(error, &here))
    }

    /// Why the device refused: that is nothing that a driver tells.
    fn explain(&self, error: Error, here: &ProcessOrigin) -> Error {
        let Error::LegacyHandle {
            fault: LegacyFault::Refused(reason),
        } = error
        else {
            return error;
        };
        let pid = self.origin.pid;
        match self.origin.life(here) {
            Liveness::Gone => Error::peer_gone(Kind::LegacyMemory, "", pid, false),
            Liveness::Alive => Error::legacy(LegacyFault::Stale { pid, reason }),
            Liveness::Unknown => Error::legacy(LegacyFault::Refused(reason)),
        }
    }

    /// The range's length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where the range begins, in bytes from its allocation's first.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The length in bytes of the allocation: all of it is open to a process that opens the handle.
    pub fn allocation_bytes(&self) -> u64 {
        self.allocation_bytes
    }

    /// The device that owns the memory.
    pub fn device(&self) -> DeviceId {
        self.owner
    }

    /// The exporter's process id, in its own PID namespace.
    pub fn pid(&self) -> i32 {
        self.origin.pid
    }

    /// The `CUipcMemHandle` itself, of the allocation's base.
    pub fn raw(&self) -> &[u8; 64] {
        &self.raw
    }

    /// The handle as bytes.
    pub fn to_bytes(&self) -> [u8; LegacyHandle::BYTES] {
        let mut bytes = [0; LegacyHandle::BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&[kind_code(self.owner.kind), 0]);
        put(&self.origin.pid.to_le_bytes());
        put(&self.owner.uuid);
        let ProcessOrigin {
            host,
            namespace,
            started,
            ..
        } = self.origin;
        for number in [
            host,
            namespace,
            started,
            self.allocation,
            self.allocation_bytes,
            self.offset,
            self.bytes,
        ] {
            put(&number.to_le_bytes());
        }
        put(&self.raw);
        let sum = origin::hash(&bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The handle that [`to_bytes`](Self::to_bytes) made. The bytes are not trusted.
    ///
    /// # Errors
    /// [`Error::LegacyHandle`] for anything else.
    pub fn from_bytes(bytes: &[u8]) -> Result<LegacyHandle> {
        parse(bytes).map_err(Error::legacy)
    }
}

/// The bytes that the checksum covers.
const CHECKED: usize = LegacyHandle::BYTES - 8;

/// The bytes of a handle with the checksum that fits them.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn forged(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if bytes.len() >= LegacyHandle::BYTES {
        bytes.truncate(LegacyHandle::BYTES);
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        bytes[MAGIC.len()..][..2].copy_from_slice(&VERSION.to_le_bytes());
        let sum = origin::hash(&bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(&sum.to_le_bytes());
    }
    bytes
}

fn parse(bytes: &[u8]) -> Result<LegacyHandle, LegacyFault> {
    let wrong = LegacyFault::Length {
        found: bytes.len(),
        wanted: LegacyHandle::BYTES,
    };
    let mut reader = Reader(bytes.try_into().map_err(|_| wrong)?, 0);
    if reader.take() != MAGIC {
        return Err(LegacyFault::Garbled(
            "it does not begin with the magic bytes",
        ));
    }
    let version = u16::from_le_bytes(reader.take());
    if version != VERSION {
        return Err(LegacyFault::Version {
            theirs: version,
            ours: VERSION,
        });
    }
    if origin::hash(&bytes[..CHECKED]).to_le_bytes() != bytes[CHECKED..] {
        return Err(LegacyFault::Garbled("its checksum is wrong"));
    }
    let [kind, zero] = reader.take();
    let kind = match (kind, zero) {
        (0, 0) => DeviceKind::Host,
        (1, 0) => DeviceKind::Cuda,
        _ => return Err(LegacyFault::Garbled("it names no kind of device")),
    };
    let pid = i32::from_le_bytes(reader.take());
    let owner = DeviceId {
        kind,
        uuid: reader.take(),
    };
    let [
        host,
        namespace,
        started,
        allocation,
        allocation_bytes,
        offset,
        length,
    ] = std::array::from_fn(|_| u64::from_le_bytes(reader.take()));
    if pid <= 0 {
        return Err(LegacyFault::Garbled("it names no process"));
    }
    fits(offset, length, allocation_bytes)?;
    let origin = ProcessOrigin {
        host,
        namespace,
        started,
        pid,
    };
    Ok(LegacyHandle {
        origin,
        owner,
        allocation,
        allocation_bytes,
        offset,
        bytes: length,
        raw: reader.take(),
    })
}

/// Takes fields of fixed length, one after the other. Their sum is below the whole length.
struct Reader<'a>(&'a [u8; LegacyHandle::BYTES], usize);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let field = std::array::from_fn(|index| self.0[self.1 + index]);
        self.1 += N;
        field
    }
}

fn kind_code(kind: DeviceKind) -> u8 {
    match kind {
        DeviceKind::Host => 0,
        DeviceKind::Cuda => 1,
    }
}

fn fits(offset: u64, bytes: u64, allocation: u64) -> Result<(), LegacyFault> {
    match offset.checked_add(bytes) {
        Some(end) if end <= allocation && bytes > 0 => Ok(()),
        _ => Err(LegacyFault::Range {
            offset,
            bytes,
            allocation,
        }),
    }
}

fn check_range(offset: u64, bytes: u64, allocation: u64) -> Result<()> {
    fits(offset, bytes, allocation).map_err(Error::legacy)
}

fn other_device(owner: DeviceId, device: &Device) -> Error {
    let (owner, device) = (owner.to_string(), device.info().id.to_string());
    Error::legacy(LegacyFault::Device { owner, device })
}

#[cfg(test)]
mod tests;
