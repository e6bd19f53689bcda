//! Memory of another process, mapped here.

use std::sync::Arc;
use std::time::Duration;

use super::mapped_region::{MappedRegion, check_range, wait_for};
use crate::backend::{Access, DeviceId, DevicePtr};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::runtime::fence::StreamSet;
use crate::stream::Stream;

/// Another process's memory, or a range of it, mapped here (`cuMemMap` of an imported handle, or
/// `mmap`). Cheap to clone: all clones, and all other handles that this process opens of it, are
/// one mapping.
///
/// It stays valid when its owner closes it or dies. With its last handle it is unmapped, once the
/// streams recorded by [`used_on`](SharedMemory::used_on) have done their work. Its users order
/// their writes, with a timeline for example.
#[derive(Debug, Clone)]
pub struct SharedMemory {
    mapping: Arc<MappedRegion>,
    /// The streams of this handle and its clones.
    streams: Arc<StreamSet>,
    name: Arc<str>,
    offset: u64,
    bytes: u64,
}

impl SharedMemory {
    pub(super) fn whole(mapping: Arc<MappedRegion>, name: &str) -> SharedMemory {
        let bytes = mapping.bytes;
        SharedMemory {
            mapping,
            streams: Arc::default(),
            name: name.into(),
            offset: 0,
            bytes,
        }
    }

    /// The part of it at `offset`, of `bytes` bytes; without `bytes`, all that follows.
    ///
    /// # Errors
    /// [`Error::Range`].
    pub fn range(&self, offset: u64, bytes: impl Into<Option<u64>>) -> Result<SharedMemory> {
        let bytes = bytes.into().unwrap_or(self.bytes.saturating_sub(offset));
        check_range(&self.name, offset, bytes, self.bytes)?;
        Ok(SharedMemory {
            offset: self.offset + offset,
            bytes,
            ..self.clone()
        })
    }

    /// Its device address in this process.
    pub fn ptr(&self) -> DevicePtr {
        self.mapping.ptr() + self.offset
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The access that the owner grants this process.
    pub fn access(&self) -> Access {
        self.mapping.access
    }

    /// The device that it is mapped on.
    pub fn device(&self) -> &Device {
        self.mapping.device()
    }

    /// The device that it lies on.
    pub fn owner(&self) -> DeviceId {
        self.mapping.owner
    }

    /// The name under which it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Records that `stream` is given work on this memory, which is not unmapped before the stream
    /// has done it. Call it before the work is enqueued.
    pub fn used_on(&self, stream: &Stream) {
        self.streams.record_use(stream);
        self.mapping.record_use(stream);
    }

    /// Enqueues a copy from host memory to byte `offset` (`cuMemcpyHtoDAsync`); `bytes` may be
    /// reused at once.
    ///
    /// # Errors
    /// [`Error::Range`]; [`Error::Argument`] for memory that was given for reading, or a stream of
    /// another device; [`Error::Timeout`] when too many copies wait behind streams that stand
    /// still; [`Error::Driver`]; [`Error::Forked`].
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<()> {
        check_range(&self.name, offset, bytes.len() as u64, self.bytes)?;
        if self.access() == Access::Read {
            return Err(Error::argument(
                "memory",
                "given for reading",
                "memory given for writing, too",
            ));
        }
        self.streams.record_use(stream);
        self.mapping.write(stream, self.offset + offset, bytes)
    }

    /// Waits for the recorded streams, at most `timeout`, and copies all of the memory to host
    /// memory (`cuMemcpyDtoHAsync`).
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::DeviceMemory`] when the host has no room; [`Error::Driver`];
    /// [`Error::Forked`].
    pub fn to_vec(&self, timeout: Duration) -> Result<Vec<u8>> {
        wait_for(&self.streams, timeout)?;
        self.mapping.read(self.offset, self.bytes)
    }
}

/// Whether `device` can at all map memory of `owner`: a GPU no memfd, and the host no GPU's memory.
pub(crate) fn check_reach(device: &Device, owner: DeviceId) -> Result<()> {
    let info = device.info();
    if info.id.kind == owner.kind {
        return Ok(());
    }
    let reason = "one is a GPU, the other the host: they have no memory in common".to_string();
    Err(Error::PeerAccess {
        reader: format!("{} ({})", info.name, info.id),
        owner: owner.to_string(),
        reason,
    })
}
