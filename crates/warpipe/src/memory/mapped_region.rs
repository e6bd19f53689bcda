//! A region with the streams that work on it. **This module is marked for unsafe**: it makes slices
//! of its memory.

use std::sync::{Arc, Mutex};

use super::region::{Kept, Region};
use super::slice::{DeviceSlice, MappedMemory, check_range, wait_for};
use super::weak_cache::WeakCache;
use crate::backend::{Access, DeviceId, DevicePtr};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork;
use crate::mutex::LockUnpoisoned;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::wait::Wait;

/// A region that this process allocated, or has imported.
#[derive(Debug)]
pub(crate) struct MappedRegion {
    region: DropAfterFence<LeasedRegion>,
    device: Device,
    /// The device that the memory is on.
    pub(crate) owner: DeviceId,
    /// How importers may access the region.
    pub(crate) access: Access,
    /// The requested length; the region may be longer.
    pub(crate) bytes: u64,
}

/// A region, and what this owner of it keeps. Several may have one region, each with streams of its
/// own.
#[derive(Debug)]
struct LeasedRegion {
    region: Arc<Region>,
    /// Dropped when this owner's streams are past the region.
    lease: Mutex<Option<Kept>>,
}

/// The imports of this process, by publisher and device. One device may be opened through several
/// backends (wrapped, in tests), each with mappings of its own.
pub(crate) static IMPORTS: WeakCache<ImportKey, MappedRegion> = WeakCache::new();

/// What another process shares, as one device of this process sees it: a published region, or what
/// a lender lends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ImportKey {
    process: u64,
    /// The publisher's user. A generation is only the server's claim: no user must be able to pass
    /// for another one.
    uid: u32,
    generation: [u8; 16],
    /// The region's number, or the lender's kind.
    id: u64,
    device: usize,
}

impl ImportKey {
    pub(crate) fn new(uid: u32, generation: [u8; 16], id: u64, device: &Device) -> ImportKey {
        let device = Arc::as_ptr(device.backend()).cast::<()>() as usize;
        ImportKey {
            process: fork::forks(),
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
        MappedRegion::of(region, device, owner, access, bytes)
    }

    /// Takes a region with `bytes` usable bytes.
    pub(crate) fn of(
        region: Region,
        device: &Device,
        owner: DeviceId,
        access: Access,
        bytes: u64,
    ) -> Result<MappedRegion> {
        MappedRegion::leased(Arc::new(region), device, (owner, access), bytes, None)
    }

    /// A region that other owners in this process may have, too. `lease` is kept until the streams
    /// that this one records are past the region.
    pub(crate) fn leased(
        region: Arc<Region>,
        device: &Device,
        (owner, access): (DeviceId, Access),
        bytes: u64,
        lease: Option<Kept>,
    ) -> Result<MappedRegion> {
        debug_assert!(bytes <= region.bytes());
        let lease = Mutex::new(lease);
        Ok(MappedRegion {
            region: DropAfterFence::new(Arc::default(), LeasedRegion { region, lease })?,
            device: device.clone(),
            owner,
            access,
            bytes,
        })
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region.region
    }

    /// Keeps this from now on, in the place of what it kept.
    pub(crate) fn replace_lease(&self, lease: Option<Kept>) {
        let _former = std::mem::replace(&mut *self.region.lease.locked(), lease);
    }

    /// Waits for the streams that work on it.
    pub(crate) fn wait_idle(&self, wait: &Wait<'_>) -> Result<()> {
        wait_for(self.region.streams(), wait)
    }

    fn ptr(&self) -> DevicePtr {
        self.region().ptr()
    }

    /// Whether `offset..offset + bytes` lies inside.
    pub(crate) fn check(&self, name: &str, offset: u64, bytes: u64) -> Result<()> {
        check_range(name, offset, bytes, self.bytes)
    }

    /// The range at `offset`, for a handle with streams of its own.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub(crate) fn slice(
        self: &Arc<Self>,
        offset: u64,
        bytes: u64,
        access: Access,
        name: &Arc<str>,
    ) -> Result<DeviceSlice> {
        self.check(name, offset, bytes)?;
        debug_assert!(access == Access::Read || self.access == Access::ReadWrite);
        let devices = (&self.device, self.owner);
        let memory = MappedMemory::new(devices, &self.region, self.clone());
        // SAFETY: the range lies in the region, as checked above.
        Ok(unsafe { DeviceSlice::new(memory, self.ptr() + offset, bytes, access, name) })
    }
}
