//! Memory of another process, mapped here.

use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::mapped_region::MappedRegion;
use super::region::{Kept, Region};
use super::slice::DeviceSlice;
use crate::backend::{Access, DeviceId};
use crate::device::Device;
use crate::error::Result;
use crate::wait::Wait;

/// Another process's memory, or a range of it, mapped here (`cuMemMap` of an imported handle, or
/// `mmap`). Cheap to clone: all clones, and all other handles that this process opens of it, are
/// one mapping. Its methods to read and write are those of [`DeviceSlice`].
///
/// It stays valid when its owner closes it or dies. With its last handle it is unmapped, once the
/// streams recorded by [`used_on`](DeviceSlice::used_on) have done their work. Its users order
/// their writes, with a timeline for example.
#[derive(Debug, Clone)]
pub struct SharedMemory {
    /// The streams are those of this handle, its clones and ranges.
    slice: Arc<DeviceSlice>,
    mapping: Arc<MappedRegion>,
}

impl Deref for SharedMemory {
    type Target = DeviceSlice;

    fn deref(&self) -> &DeviceSlice {
        &self.slice
    }
}

impl SharedMemory {
    pub(super) fn whole(mapping: &Arc<MappedRegion>, name: &str) -> Result<SharedMemory> {
        let slice = mapping.slice(0, mapping.bytes, mapping.access, &name.into())?;
        Ok(SharedMemory {
            slice: Arc::new(slice),
            mapping: mapping.clone(),
        })
    }

    /// Waits until the recorded streams are past their work on any part of it.
    pub(crate) fn wait_idle(&self, wait: &Wait<'_>) -> Result<()> {
        self.mapping.wait_idle(wait)
    }

    /// All of a region that this process has imported, which others of it may have, too. `lease` is
    /// kept until the streams that this one and its ranges record are past it.
    pub(crate) fn of_region(
        region: Arc<Region>,
        device: &Device,
        pieces: &PiecesInfo,
        lease: Option<Kept>,
    ) -> Result<SharedMemory> {
        let of = (pieces.device, Access::Read);
        let mapping = MappedRegion::leased(region, device, of, pieces.bytes, lease)?;
        SharedMemory::whole(&Arc::new(mapping), "an imported descriptor")
    }

    /// Has this alone replace what lies there: see [`Region::claim`].
    pub(crate) fn claim(&self) -> bool {
        self.mapping.region().claim()
    }

    /// Keeps this from now on, in the place of what it kept.
    pub(crate) fn replace_lease(&self, lease: Option<Kept>) {
        self.mapping.replace_lease(lease);
    }

    /// Maps other memory at the address of all of this, of a region that was imported as pieces: see
    /// [`Region::replace`].
    ///
    /// # Safety
    /// It has been [claimed](Self::claim), and no enqueued work uses any part of it.
    pub(crate) unsafe fn replace(
        &self,
        fds: &[BorrowedFd<'_>],
        pieces: &PiecesInfo,
        (generation, number): ([u8; 16], u64),
        held: Kept,
    ) -> Result<()> {
        let (region, access) = (self.mapping.region(), self.mapping.access);
        // SAFETY: the caller's promise.
        unsafe { region.replace(fds, pieces.piece_bytes, access, pieces.device, Some(held)) }?;
        region.identify(generation, number);
        Ok(())
    }

    /// The part of it at `offset`, of `bytes` bytes; without `bytes`, all that follows.
    ///
    /// # Errors
    /// [`Error::Range`].
    pub fn range(&self, offset: u64, bytes: impl Into<Option<u64>>) -> Result<SharedMemory> {
        let bytes = bytes.into();
        let bytes = bytes.unwrap_or(self.slice.bytes().saturating_sub(offset));
        Ok(SharedMemory {
            slice: Arc::new(self.slice.part(offset, bytes)?),
            mapping: self.mapping.clone(),
        })
    }

    /// The name under which it was opened.
    pub fn name(&self) -> &str {
        self.slice.name()
    }
}

/// Memory that comes as descriptors of pieces of one length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PiecesInfo {
    pub(crate) piece_bytes: u64,
    /// The length of all that is used.
    pub(crate) bytes: u64,
    pub(crate) device: DeviceId,
}
