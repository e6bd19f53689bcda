//! A region with the streams that work on it. **This module is marked for unsafe**: it copies from
//! and to device memory by address.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::region::Region;
use super::weak_cache::WeakCache;
use crate::backend::{Access, DeviceId, DevicePtr};
use crate::backoff::Backoff;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::StreamSet;
use crate::stream::Stream;

/// A region that this process allocated, or has imported.
#[derive(Debug)]
pub(crate) struct MappedRegion {
    region: DropAfterFence<Region>,
    device: Device,
    /// The device that the memory is on.
    pub(crate) owner: DeviceId,
    /// How importers may access the region.
    pub(crate) access: Access,
    /// The requested length; the region may be longer.
    pub(crate) bytes: u64,
}

/// The imports of this process, by publisher and device. One device may be opened through several
/// backends (wrapped, in tests), each with mappings of its own.
pub(crate) static IMPORTS: WeakCache<ImportKey, MappedRegion> = WeakCache::new();

/// A published region, as one device of this process sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ImportKey {
    process: u64,
    /// The publisher's user. A generation is only the server's claim: no user must be able to pass
    /// for another one.
    uid: u32,
    generation: [u8; 16],
    id: u64,
    device: usize,
}

impl ImportKey {
    pub(crate) fn new(uid: u32, generation: [u8; 16], id: u64, device: &Device) -> ImportKey {
        let device = Arc::as_ptr(device.backend()).cast::<()>() as usize;
        ImportKey {
            process: fork::generation(),
            uid,
            generation,
            id,
            device,
        }
    }
}

impl MappedRegion {
    pub(crate) fn allocate(device: &Device, bytes: u64) -> Result<MappedRegion> {
        let unit = device.backend().granularity();
        let whole = bytes.checked_next_multiple_of(unit).filter(|_| bytes > 0);
        let whole = whole.ok_or_else(|| {
            Error::argument("bytes", bytes, "at least 1, and what an address can count")
        })?;
        let region = Region::allocate(device, whole)?;
        let (owner, access) = (device.info().id, Access::ReadWrite);
        Ok(MappedRegion {
            region: DropAfterFence::new(Arc::default(), region)?,
            device: device.clone(),
            owner,
            access,
            bytes,
        })
    }

    /// Takes a region with `bytes` usable bytes.
    pub(crate) fn of(
        region: Region,
        device: &Device,
        owner: DeviceId,
        access: Access,
        bytes: u64,
    ) -> Result<MappedRegion> {
        debug_assert!(bytes <= region.bytes());
        Ok(MappedRegion {
            region: DropAfterFence::new(Arc::default(), region)?,
            device: device.clone(),
            owner,
            access,
            bytes,
        })
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Records a stream that is about to be given work on the region.
    pub(crate) fn record_use(&self, stream: &Stream) {
        self.region.streams().record_use(stream);
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        self.region.ptr()
    }

    pub(crate) fn check_owner_process(&self) -> Result<()> {
        self.region.owner_process().check()
    }

    /// Whether `offset..offset + bytes` lies inside.
    pub(crate) fn check(&self, name: &str, offset: u64, bytes: u64) -> Result<()> {
        check_range(name, offset, bytes, self.bytes)
    }

    /// Enqueues a copy from host memory to `offset`; `source` may be reused at once. The range has
    /// been checked.
    pub(crate) fn write(&self, stream: &Stream, offset: u64, source: &[u8]) -> Result<()> {
        self.check_owner_process()?;
        stream.check_of(&self.device)?;
        if source.is_empty() {
            return Ok(());
        }
        debug_assert!(offset + source.len() as u64 <= self.region.bytes());
        self.record_use(stream);
        // SAFETY: the range lies inside the region (checked by the caller), which is mapped for
        // writing (as the caller has checked) until this stream, recorded above, is past the copy.
        unsafe { stream.upload(self.ptr() + offset, source) }
    }

    /// Copies to a new vector. The caller has checked the range, and has waited for its writers.
    pub(crate) fn read(&self, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        self.check_owner_process()?;
        debug_assert!(offset + bytes <= self.region.bytes());
        // SAFETY: the range lies inside the region (checked by the caller), which is mapped as long
        // as self.
        unsafe { copy_out(&self.device, self.ptr() + offset, bytes) }
    }

    /// Waits, at most `timeout`, for all streams that are recorded, and copies the region.
    pub(crate) fn read_quiet(&self, timeout: Duration) -> Result<Vec<u8>> {
        self.check_owner_process()?;
        wait_for(self.region.streams(), timeout)?;
        self.read(0, self.bytes)
    }
}

/// Copies device memory to a new vector.
///
/// # Safety
/// `ptr` is readable for `bytes` bytes.
pub(crate) unsafe fn copy_out(device: &Device, ptr: DevicePtr, bytes: u64) -> Result<Vec<u8>> {
    let mut copy = Vec::new();
    let room = usize::try_from(bytes)
        .ok()
        .and_then(|length| copy.try_reserve_exact(length).ok());
    if room.is_none() {
        return Err(Error::DeviceMemory {
            device: "this process".into(),
            bytes,
            detail: String::new(),
        });
    }
    copy.resize(bytes as usize, 0);
    if bytes > 0 {
        // Not a stream of the user's, which may be stuck behind other work.
        let stream = device.stream()?;
        // SAFETY: the stream is live and has nothing else to do; the range is the caller's promise.
        unsafe { stream.backend().download(stream.raw(), &mut copy, ptr)? };
    }
    Ok(copy)
}

/// Waits until `streams` have done what they were given so far.
pub(crate) fn wait_for(streams: &StreamSet, timeout: Duration) -> Result<()> {
    let (start, mut fence, mut backoff) =
        (Instant::now(), streams.fence_busy(), Backoff::default());
    while !fence.is_reached() {
        if start.elapsed() >= timeout {
            return Err(Error::Timeout {
                what: "the end of the streams' work on this memory".into(),
                waited: timeout,
            });
        }
        backoff.pause();
    }
    Ok(())
}

/// Whether `offset..offset + bytes` lies in `available` bytes.
pub(crate) fn check_range(name: &str, offset: u64, bytes: u64, available: u64) -> Result<()> {
    if offset
        .checked_add(bytes)
        .is_some_and(|end| end <= available)
    {
        return Ok(());
    }
    Err(Error::Range {
        name: name.to_string(),
        offset,
        bytes,
        available,
    })
}
