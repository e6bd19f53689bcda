//! A range of device memory that this process has mapped: the view that all handles of memory
//! share. **This module is marked for unsafe**: it copies to and from device memory by address.

use std::any::Any;
use std::sync::Arc;

use crate::backend::{Access, DeviceId, DevicePtr, zeroed};
use crate::debug::opaque_debug;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::StreamSet;
use crate::stream::Stream;
use crate::wait::Wait;

/// Memory that stays mapped as long as this object, and until its streams are past it.
#[derive(Clone)]
pub(crate) struct MappedMemory {
    device: Device,
    /// The device that the memory lies on.
    owner: DeviceId,
    /// The streams that the memory stays mapped for.
    streams: Arc<StreamSet>,
    owner_process: OwnerProcess,
    _kept: Arc<dyn Any + Send + Sync>,
}

impl MappedMemory {
    /// What `memory` keeps mapped on `device`, and `kept` keeps in its place.
    pub(crate) fn new<T: Send + 'static>(
        (device, owner): (&Device, DeviceId),
        memory: &DropAfterFence<T>,
        kept: Arc<dyn Any + Send + Sync>,
    ) -> MappedMemory {
        MappedMemory {
            device: device.clone(),
            owner,
            streams: memory.streams().clone(),
            owner_process: memory.owner_process(),
            _kept: kept,
        }
    }

    /// Memory that the slice's owner itself keeps mapped until the slice's streams are past it.
    pub(crate) fn kept_by_caller((device, owner): (&Device, DeviceId)) -> MappedMemory {
        MappedMemory {
            device: device.clone(),
            owner,
            streams: Arc::default(),
            owner_process: OwnerProcess::current(),
            _kept: Arc::new(()),
        }
    }
}

/// Gives a handle of memory the methods of the slice that it has.
macro_rules! deref_to_slice {
    ($handle:ident) => {
        impl std::ops::Deref for $handle {
            type Target = $crate::memory::DeviceSlice;

            fn deref(&self) -> &$crate::memory::DeviceSlice {
                &self.slice
            }
        }
    };
}
pub(crate) use deref_to_slice;

/// A range of device memory: an address, a length, a device, and the streams that work on it.
/// [`Memory`](crate::Memory), [`SharedMemory`](crate::SharedMemory), [`Buffer`](crate::Buffer),
/// [`LentBuffer`](crate::LentBuffer) and [`LegacyMemory`](crate::LegacyMemory) dereference to it.
///
/// It cannot be cloned or kept: the handle that it is borrowed from says how long the range is this
/// user's.
pub struct DeviceSlice {
    ptr: DevicePtr,
    bytes: u64,
    /// Whether this process may write it.
    pub access: Access,
    /// The name under which it was opened, or that of its pool; for other memory, what it is.
    pub name: Arc<str>,
    /// The streams of this handle: readers wait for these alone.
    streams: Arc<StreamSet>,
    mapping: MappedMemory,
}

opaque_debug!(DeviceSlice {
    name,
    ptr,
    bytes,
    access
});

impl DeviceSlice {
    /// # Safety
    /// `ptr..ptr + bytes` lies in the memory of `mapping`, which allows `access`.
    pub(crate) unsafe fn new(
        mapping: MappedMemory,
        ptr: DevicePtr,
        bytes: u64,
        access: Access,
        name: &Arc<str>,
    ) -> DeviceSlice {
        DeviceSlice {
            ptr,
            bytes,
            access,
            name: name.clone(),
            streams: Arc::default(),
            mapping,
        }
    }

    /// Has readers wait for all streams of the mapping, whatever handle recorded them.
    pub(crate) fn waiting_for_all(self) -> DeviceSlice {
        DeviceSlice {
            streams: self.mapping.streams.clone(),
            ..self
        }
    }

    /// The part at `offset`, of `bytes` bytes. Both parts have the same streams.
    pub(crate) fn part(&self, offset: u64, bytes: u64) -> Result<DeviceSlice> {
        check_range(&self.name, offset, bytes, self.bytes)?;
        Ok(DeviceSlice {
            ptr: self.ptr + offset,
            bytes,
            access: self.access,
            name: self.name.clone(),
            streams: self.streams.clone(),
            mapping: self.mapping.clone(),
        })
    }

    /// Its device address in this process.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Its length in bytes, as it was asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device that it is mapped on.
    pub fn device(&self) -> &Device {
        &self.mapping.device
    }

    /// The device that it lies on.
    pub fn owner(&self) -> DeviceId {
        self.mapping.owner
    }

    /// Records that `stream` is given work on this memory, which is neither unmapped nor used again
    /// before the stream has done all work that it was given before the handle is dropped. Call it
    /// before the work is enqueued. Without an effect in a forked child, which has no such streams.
    pub fn used_on(&self, stream: &Stream) {
        // Another thread of the parent may have held the set's lock at the fork.
        if self.mapping.owner_process.is_current() {
            self.streams.record_use(stream);
            self.mapping.streams.record_use(stream);
        }
    }

    /// Enqueues a copy from host memory to byte `offset` (`cuMemcpyHtoDAsync`); `bytes` may be
    /// reused at once.
    ///
    /// # Errors
    /// [`Error::Argument`] for memory that was given for reading, or a stream of
    /// another device; [`Error::Timeout`] when too many copies wait behind streams that stand
    /// still; [`Error::Driver`]; [`Error::State`].
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<()> {
        check_range(&self.name, offset, bytes.len() as u64, self.bytes)?;
        if self.access == Access::Read {
            let allowed = "memory given for writing, too";
            return Err(Error::argument("memory", "given for reading", allowed));
        }
        self.mapping.owner_process.check()?;
        stream.check_of(self.device())?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.used_on(stream);
        // SAFETY: the range lies in this slice, as checked above, and the slice in memory that is
        // mapped for writing until this stream, recorded above, is past the copy (`new`).
        unsafe { stream.upload(self.ptr + offset, bytes) }
    }

    /// Waits for the recorded streams ([`used_on`](Self::used_on), [`write`](Self::write)), and
    /// copies all of it to host memory (`cuMemcpyDtoHAsync`).
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Limit`] when the host has no room; [`Error::Driver`];
    /// [`Error::State`].
    pub fn to_vec<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Vec<u8>> {
        self.mapping.owner_process.check()?;
        wait_for(&self.streams, &wait.into())?;
        let mut copy = zeroed(self.bytes)?;
        // SAFETY: the slice lies in memory that is mapped as long as `mapping` (`new`).
        unsafe { self.download(self.ptr, &mut copy) }?;
        Ok(copy)
    }

    /// As [`to_vec`](Self::to_vec), for the bytes from byte `offset` on that fill `bytes`.
    ///
    /// # Errors
    /// [`Error::Argument`]; as [`to_vec`](Self::to_vec).
    pub fn copy_to<'w>(
        &self,
        offset: u64,
        bytes: &mut [u8],
        wait: impl Into<Wait<'w>>,
    ) -> Result<()> {
        check_range(&self.name, offset, bytes.len() as u64, self.bytes)?;
        self.mapping.owner_process.check()?;
        wait_for(&self.streams, &wait.into())?;
        // SAFETY: the range lies in this slice, as checked above, and the slice in memory that is
        // mapped as long as `mapping` (`new`).
        unsafe { self.download(self.ptr + offset, bytes) }
    }

    /// Copies device memory to memory of the host, on a stream of its own: a user's may be stuck
    /// behind other work.
    ///
    /// # Safety
    /// `ptr` is readable for as many bytes, in memory of the mapping.
    unsafe fn download(&self, ptr: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let stream = self.device().stream()?;
        // SAFETY: the stream is live and has nothing else to do; the range is the caller's promise.
        let copied = unsafe { stream.backend().download(stream.raw(), bytes, ptr) };
        if copied.is_err() {
            // A copy that was not done in time may still run: the memory stays mapped until then.
            self.mapping.streams.record_use(&stream);
        }
        copied
    }

    /// The streams of this handle.
    pub(crate) fn streams(&self) -> &StreamSet {
        &self.streams
    }

    pub(crate) fn owner_process(&self) -> OwnerProcess {
        self.mapping.owner_process
    }

    /// Has `stream` wait for all work of this handle, as the last stream that works on it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a stream of another device; [`Error::Driver`]; [`Error::State`].
    pub(crate) fn gather_on(&self, stream: &Stream) -> Result<()> {
        self.mapping.owner_process.check()?;
        stream.check_of(self.device())?;
        self.used_on(stream);
        self.streams.join(stream)
    }
}

/// Copies device memory to a new vector.
///
/// # Safety
/// `ptr` is readable for `bytes` bytes.
#[cfg(test)]
pub(crate) unsafe fn copy_out(device: &Device, ptr: DevicePtr, bytes: u64) -> Result<Vec<u8>> {
    let mut copy = zeroed(bytes)?;
    let stream = device.stream()?;
    // SAFETY: the stream is live and has nothing else to do; the range is the caller's promise.
    unsafe { stream.backend().download(stream.raw(), &mut copy, ptr) }?;
    Ok(copy)
}

/// Waits until `streams` have done what they were given so far.
pub(crate) fn wait_for(streams: &StreamSet, wait: &Wait<'_>) -> Result<()> {
    let mut fence = streams.fence_busy();
    let what = "the end of the streams' work on this memory";
    wait.poll(|| what.into(), || Ok(fence.is_reached()))
}

/// Whether `offset..offset + bytes` lies in `available` bytes.
pub(crate) fn check_range(name: &str, offset: u64, bytes: u64, available: u64) -> Result<()> {
    if offset
        .checked_add(bytes)
        .is_some_and(|end| end <= available)
    {
        return Ok(());
    }
    let end = u128::from(offset) + u128::from(bytes);
    let allowed = format!("0..{available} of {name:?}");
    let found = format!("{offset}..{end}");
    Err(Error::argument("range", found, allowed))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::StateFault;
    use crate::hostile::in_a_forked_child;
    use crate::memory::Memory;

    #[test]
    fn a_part_is_copied_to_the_host_and_no_byte_beyond_the_memory() {
        let device = Device::host();
        let stream = device.stream().unwrap();
        let memory = Memory::allocate(&device, 8).unwrap();
        memory.write(&stream, 0, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        let (mut part, timeout) = ([9; 3], Duration::from_secs(5));
        memory.copy_to(5, &mut part, timeout).unwrap();
        assert_eq!(part, [5, 6, 7]);
        for offset in [6, 9, u64::MAX] {
            let refused = memory.copy_to(offset, &mut part, timeout).unwrap_err();
            assert!(
                matches!(
                    refused,
                    Error::Argument {
                        argument: "range",
                        ..
                    }
                ),
                "{refused}"
            );
        }
        assert_eq!(part, [5, 6, 7]);
        memory.copy_to(8, &mut [], timeout).unwrap();
    }

    #[test]
    fn a_child_forked_while_a_thread_records_a_stream_neither_hangs_nor_reads() {
        let device = Device::host();
        let stream = device.stream().unwrap();
        let memory = Memory::allocate(&device, 8).unwrap();
        let is_forked =
            |result: Result<()>| matches!(result, Err(Error::State(StateFault::Forked)));
        let in_child = || {
            memory.used_on(&stream);
            is_forked(memory.write(&stream, 0, &[1; 8]))
                && is_forked(memory.to_vec(Duration::from_secs(1)).map(drop))
                && is_forked(memory.copy_to(0, &mut [0; 8], Duration::from_secs(1)))
        };
        memory
            .streams()
            .while_locked(|| in_a_forked_child(in_child));
        memory.write(&stream, 0, &[2; 8]).unwrap();
        assert_eq!(memory.to_vec(Duration::from_secs(5)).unwrap(), [2; 8]);
    }
}
