//! Legacy CUDA IPC handles, for memory that another allocator made with `cudaMalloc`.
//!
//! A handle is 64 bytes of the driver that name one allocation, and the facts that the driver does
//! not include: the tensor's place in the allocation, its exporter, its device and machine. The
//! user sends it by any means. It is no right to the memory: it becomes invalid with its exporter's
//! death, and any process of the same user that has the bytes can open it.

mod exports;
mod imports;

pub use imports::LegacyMemory;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use self::imports::Import;
use crate::backend::{DeviceId, DevicePtr, PointerInfo, PointerKind};
use crate::device::Device;
use crate::error::{Error, HandleFault, Result};
use crate::ipc::Kind;
use crate::ipc::handle::{self, DriverHandle, HandleKind, Payload, text_form};
use crate::origin::{Liveness, ProcessOrigin};

/// `cuIpcGetMemHandle`: names a range of memory that was allocated with `cudaMalloc`
/// (`cuMemAlloc`), by PyTorch for example, for another process of the same machine and user.
///
/// Never the default: this memory is gone when its exporter is, every reader can also write it, and
/// every importer maps the whole allocation around it. Tensors that this library allocates have
/// none of these limits.
///
/// It is plain data, and goes from process to process as text (`Display`, `FromStr`; serde writes
/// the same) or as bytes.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LegacyHandle {
    #[serde(with = "handle::text")]
    fields: LegacyFields,
}

/// What [`LegacyHandle::info`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LegacyInfo {
    /// The range's length in bytes.
    pub bytes: u64,
    /// Where the range begins, in bytes from its allocation's first.
    pub offset: u64,
    /// The length in bytes of the allocation: all of it is open to a process that opens the handle.
    pub allocation_bytes: u64,
    /// The device that owns the memory.
    pub device: DeviceId,
    /// The exporter's process id, in its own PID namespace.
    pub pid: i32,
    /// The `CUipcMemHandle` itself, of the allocation's base.
    pub raw: [u8; 64],
}

/// The payload of a legacy handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct LegacyFields {
    origin: ProcessOrigin,
    owner: DeviceId,
    /// The allocation's number in its process: the driver's bytes for a freed one and a later one
    /// may be the same.
    allocation: u64,
    allocation_bytes: u64,
    offset: u64,
    bytes: u64,
    raw: DriverHandle,
}

impl LegacyHandle {
    /// `cuPointerGetAttribute` + `cuIpcGetMemHandle`: a handle for `bytes` bytes at `ptr`, which
    /// may lie anywhere in their allocation.
    ///
    /// # Errors
    /// [`Error::Handle`] for memory that is not from `cudaMalloc` (null, host, pinned,
    /// managed, pooled, mapped by the virtual memory functions, freed); [`Error::Handle`] for
    /// a range longer than its allocation, or memory of another device than `device`;
    /// [`Error::State`], [`Error::Driver`].
    ///
    /// # Safety
    /// The allocation stays for as long as another process uses it: the driver does not document
    /// its behaviour for memory that is freed while another process has it open. The address itself
    /// is looked up and not trusted.
    pub unsafe fn export(device: &Device, ptr: DevicePtr, bytes: u64) -> Result<LegacyHandle> {
        // SAFETY: the caller's promise.
        unsafe { LegacyHandle::of_located(device, device.backend().locate(ptr)?, ptr, bytes) }
    }

    /// The same of an address that was just looked up.
    ///
    /// # Safety
    /// As for [`export`](Self::export).
    pub(crate) unsafe fn of_located(
        device: &Device,
        found: PointerInfo,
        ptr: DevicePtr,
        bytes: u64,
    ) -> Result<LegacyHandle> {
        if found.kind != PointerKind::Device {
            return Err(Error::not_exportable(ptr, found.kind));
        }
        if found.owner != device.info().id {
            return Err(other_device(found.owner, device));
        }
        let offset = ptr.wrapping_sub(found.base);
        let (origin, owner) = (ProcessOrigin::here()?, found.owner);
        check_range(offset, bytes, found.bytes)?;
        // The driver's handle of one allocation is always the same.
        let raw = match exports::known(&found) {
            Some(raw) => raw,
            None => {
                // SAFETY: the base of an allocation of the right kind, as was just looked up; it is
                // live by the caller's promise.
                let raw = unsafe { device.backend().export_legacy(found.base) }?;
                exports::remember(&found, raw, device)?
            }
        };
        let fields = LegacyFields {
            origin,
            owner,
            allocation: found.allocation,
            allocation_bytes: found.bytes,
            offset,
            bytes,
            raw: DriverHandle(raw),
        };
        Ok(LegacyHandle { fields })
    }

    /// `cuIpcOpenMemHandle`: maps the memory here. Opening memory that is open already, or was
    /// exported by this very process, makes no driver call and gives the same address.
    ///
    /// Does not wait: missing memory is an error. `device` may be another GPU than the owner if the
    /// two have peer access.
    ///
    /// # Errors
    /// [`Error::PeerGone`] when the exporter is dead; [`Error::Handle`] when it has freed
    /// the memory, or for a handle of another machine or backend; [`Error::Device`] for a GPU that
    /// this process cannot reach or see; [`Error::Os`], [`Error::Driver`].
    pub fn open(&self, device: &Device) -> Result<LegacyMemory> {
        let (ptr, import) = self.import(device)?;
        let (devices, range) = ((device, self.fields.owner), (ptr, self.fields.bytes));
        // SAFETY: the handle's range of the allocation, which is open.
        Ok(unsafe { LegacyMemory::new(devices, range, import) })
    }

    /// The address of the range here, and the open allocation, unless it is of this process.
    pub(crate) fn import(&self, device: &Device) -> Result<(DevicePtr, Option<Arc<Import>>)> {
        let here = ProcessOrigin::here()?;
        if self.fields.origin.host != here.host {
            return Err(Error::legacy(HandleFault::ForeignHost));
        }
        if self.fields.owner.kind != device.info().id.kind {
            return Err(other_device(self.fields.owner, device));
        }
        if self.fields.origin == here {
            let base = exports::find(self, device)?;
            return Ok((base + self.fields.offset, None));
        }
        let opened = imports::open(self, device);
        let (base, import) = opened.map_err(|error| self.explain(error, &here))?;
        Ok((base + self.fields.offset, Some(import)))
    }

    /// Why the device refused: that is nothing that a driver tells.
    fn explain(&self, error: Error, here: &ProcessOrigin) -> Error {
        let Error::Handle {
            fault: HandleFault::Refused(reason),
            ..
        } = error
        else {
            return error;
        };
        let pid = self.fields.origin.pid;
        match self.fields.origin.life(here) {
            Liveness::Gone => Error::peer_gone(Kind::LegacyMemory, "", pid, false),
            Liveness::Alive => Error::legacy(HandleFault::Stale { pid, reason }),
            Liveness::Unknown => Error::legacy(HandleFault::Refused(reason)),
        }
    }

    /// What the handle says.
    pub fn info(&self) -> LegacyInfo {
        let fields = &self.fields;
        LegacyInfo {
            bytes: fields.bytes,
            offset: fields.offset,
            allocation_bytes: fields.allocation_bytes,
            device: fields.owner,
            pid: fields.origin.pid,
            raw: fields.raw.0,
        }
    }

    /// The handle as bytes, of variable length.
    #[doc(hidden)] // For the Python package.
    pub fn to_bytes(&self) -> Vec<u8> {
        handle::to_bytes(HandleKind::Legacy, &self.fields)
    }

    /// The handle that [`to_bytes`](Self::to_bytes) made. The bytes are not trusted.
    ///
    /// # Errors
    /// [`Error::Handle`] for anything else.
    #[doc(hidden)] // For the Python package.
    pub fn from_bytes(bytes: &[u8]) -> Result<LegacyHandle> {
        let fields = LegacyFields::checked(handle::from_bytes(HandleKind::Legacy, bytes))?;
        Ok(LegacyHandle { fields })
    }

    /// A handle that this process takes for another one's.
    #[cfg(test)]
    pub(crate) fn of_another_process(mut self) -> LegacyHandle {
        self.fields.origin.started += 1;
        self
    }
}

text_form!(LegacyHandle, fields: LegacyFields);

impl Payload for LegacyFields {
    const KIND: HandleKind = HandleKind::Legacy;

    fn checked(payload: Result<LegacyFields, HandleFault>) -> Result<LegacyFields> {
        let fields = payload.map_err(Error::legacy)?;
        if fields.origin.pid <= 0 {
            return Err(Error::legacy(HandleFault::Damaged("it names no process")));
        }
        check_range(fields.offset, fields.bytes, fields.allocation_bytes)?;
        Ok(fields)
    }
}

/// For [`fuzzing`](crate::fuzzing) and hostile tests: handles with a valid checksum.
#[cfg(any(test, feature = "testing"))]
pub(crate) mod forged {
    use super::*;
    use crate::backend::DeviceKind;

    /// A handle around any contents.
    pub(crate) fn handle(payload: &[u8]) -> Vec<u8> {
        handle::seal(HandleKind::Legacy, payload)
    }

    /// The contents of a valid handle.
    pub(crate) fn body() -> Vec<u8> {
        let fields = LegacyFields {
            origin: ProcessOrigin {
                host: u64::MAX,
                namespace: 4_026_531_836,
                started: 1 << 20,
                pid: 4711,
            },
            owner: DeviceId {
                kind: DeviceKind::Cuda,
                uuid: [3; 16],
            },
            allocation: 7,
            allocation_bytes: 1 << 20,
            offset: 64,
            bytes: 256,
            raw: DriverHandle([5; 64]),
        };
        postcard::to_stdvec(&fields).unwrap_or_default()
    }

    /// The handle that says another allocation and offset.
    #[cfg(test)]
    pub(crate) fn with_range(handle: &LegacyHandle, allocation: u64, offset: u64) -> LegacyHandle {
        let mut forged = *handle;
        (forged.fields.allocation_bytes, forged.fields.offset) = (allocation, offset);
        forged
    }
}

pub(crate) fn check_range(offset: u64, bytes: u64, allocation: u64) -> Result<()> {
    match offset.checked_add(bytes) {
        Some(end) if end <= allocation && bytes > 0 => Ok(()),
        _ => Err(Error::legacy(HandleFault::Range {
            offset,
            bytes,
            allocation,
        })),
    }
}

fn other_device(owner: DeviceId, device: &Device) -> Error {
    let (owner, device) = (owner.to_string(), device.info().id.to_string());
    Error::legacy(HandleFault::Device { owner, device })
}

#[cfg(test)]
mod tests;
