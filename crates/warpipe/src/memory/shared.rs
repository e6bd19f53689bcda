//! Memory of another process, mapped here.

use std::sync::Arc;

use super::mapped_region::MappedRegion;
use super::slice::{DeviceSlice, deref_to_slice};
use crate::error::Result;

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
    pub(crate) mapping: Arc<MappedRegion>,
}

deref_to_slice!(SharedMemory);

impl SharedMemory {
    pub(crate) fn whole(mapping: &Arc<MappedRegion>, name: &str) -> Result<SharedMemory> {
        let slice = mapping.slice(0, mapping.bytes, mapping.access, &name.into())?;
        Ok(SharedMemory {
            slice: Arc::new(slice),
            mapping: mapping.clone(),
        })
    }

    /// The part of it at `offset`, of `bytes` bytes; without `bytes`, all that follows.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument).
    pub fn range(&self, offset: u64, bytes: impl Into<Option<u64>>) -> Result<SharedMemory> {
        let bytes = bytes.into();
        let bytes = bytes.unwrap_or(self.slice.bytes().saturating_sub(offset));
        Ok(SharedMemory {
            slice: Arc::new(self.slice.part(offset, bytes)?),
            mapping: self.mapping.clone(),
        })
    }
}
