//! The regions of this process by address, for code that knows an address alone, as
//! `cuMemRetainAllocationHandle` gives it the allocation. **This module is marked for unsafe**: it
//! borrows the descriptors of regions.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::backend::{DevicePtr, PointerKind, RawRegion, Retained};
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::fork::per_process::InheritedOnFork;

#[derive(Debug, Default)]
pub(super) struct Regions {
    mapped: InheritedOnFork<BTreeMap<DevicePtr, RawRegion>>,
    /// By the inode of its memfd: the descriptor, and how often it is held.
    retained: InheritedOnFork<HashMap<u64, (CloseOnForkFd, u32)>>,
}

impl Regions {
    pub(super) fn add(&self, region: &RawRegion) {
        self.mapped.lock().insert(region.ptr, *region);
    }

    pub(super) fn remove(&self, region: &RawRegion) {
        self.mapped.lock().remove(&region.ptr);
    }

    /// Holds the region at `ptr`.
    pub(super) fn retain(&self, ptr: DevicePtr) -> Result<Option<Retained>> {
        let mapped = self.mapped.lock();
        let found = mapped.range(..=ptr).next_back().map(|(_, region)| *region);
        let Some(region) = found.filter(|region| ptr - region.ptr < region.bytes) else {
            return Ok(None);
        };
        // SAFETY: a region in the table is not released, as the lock is held: its handle is its
        // open descriptor.
        let fd = unsafe { BorrowedFd::borrow_raw(region.handle as i32) };
        let failed = |e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a held region", e);
        let copy = CloseOnForkFd::duplicate(fd).map_err(failed)?;
        drop(mapped);
        let stat = rustix::fs::fstat(&copy).map_err(|e| Error::os("fstat", "a held region", e))?;
        let mut retained = self.retained.lock();
        let (_, times) = retained.entry(stat.st_ino).or_insert((copy, 0));
        *times += 1;
        Ok(Some(Retained {
            handle: stat.st_ino,
            base: region.ptr,
            bytes: region.bytes,
        }))
    }

    pub(super) fn export(&self, held: &Retained) -> Result<OwnedFd> {
        let retained = self.retained.lock();
        let Some((fd, _)) = retained.get(&held.handle) else {
            let (ptr, kind) = (held.base, PointerKind::Unknown);
            return Err(Error::not_exportable(ptr, kind));
        };
        rustix::io::fcntl_dupfd_cloexec(fd, 3)
            .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a region's descriptor", e))
    }

    pub(super) fn release(&self, held: &Retained) {
        let mut retained = self.retained.lock();
        if let Some((_, times)) = retained.get_mut(&held.handle) {
            *times -= 1;
            if *times == 0 {
                retained.remove(&held.handle);
            }
        }
    }
}
