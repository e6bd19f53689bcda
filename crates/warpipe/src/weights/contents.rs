//! The tensors that a publisher has: memory of this library that they were copied to, and those that
//! lie where another allocator put them.

use super::blocks::COPY_TIMEOUT;
use super::content::{PendingHashes, begin_to_hash};
use super::in_place::LaidTensor;
use super::manifest::{ContentHash, TensorInfo};
use crate::error::Result;
use crate::memory::{DeviceSlice, Memory};

/// Tensors in memory of this process, complete.
#[derive(Default)]
pub(super) struct Contents {
    /// The first part, if it is of this library.
    pub(super) memory: Option<Memory>,
    /// In the order of their offsets, behind the first part.
    pub(super) lying: Vec<LaidTensor>,
}

impl Contents {
    /// Has the device hash each of these tensors that lies here and has no hash. They are in the order
    /// of their offsets; those of a base lie elsewhere.
    pub(super) fn begin_to_hash(&self, tensors: &[TensorInfo]) -> Result<ContentHashes> {
        let (mut places, mut hashed) = (Vec::new(), Vec::new());
        let mut last = None;
        for (number, tensor) in tensors.iter().enumerate() {
            if tensor.hash.is_some() {
                continue;
            }
            // Tied weights follow each other.
            let is_same = last == Some((tensor.offset, tensor.layout));
            if is_same {
                hashed.push((number, places.len() - 1));
            } else if let Some((memory, begin)) = self.place(tensor) {
                last = Some((tensor.offset, tensor.layout));
                hashed.push((number, places.len()));
                places.push((memory, begin, tensor.layout.bytes()));
            }
        }
        Ok(ContentHashes {
            pending: begin_to_hash(&places)?,
            hashed,
        })
    }

    fn place(&self, tensor: &TensorInfo) -> Option<(&DeviceSlice, u64)> {
        let TensorInfo { layout, offset, .. } = tensor;
        // What lies elsewhere begins behind the memory.
        let is_in = |memory: &&Memory| offset + layout.bytes() <= memory.bytes();
        if let Some(memory) = self.memory.as_ref().filter(is_in) {
            return Some((memory, *offset));
        }
        let found = self.lying.binary_search_by_key(offset, |it| it.offset);
        Some((&self.lying[found.ok()?].slice, 0))
    }
}

/// The hashes of a version's tensors, which the device computes.
pub(super) struct ContentHashes {
    pending: PendingHashes,
    /// The number of each tensor, and of its hash.
    hashed: Vec<(usize, usize)>,
}

impl ContentHashes {
    /// Waits for them: each with the number of its tensor.
    ///
    /// # Errors
    /// As [`PendingHashes::finish`].
    pub(super) fn finish(self) -> Result<Vec<(usize, ContentHash)>> {
        let hashes = self.pending.finish(&COPY_TIMEOUT.into())?;
        let of_tensor = |(number, at): (usize, usize)| (number, hashes[at]);
        Ok(self.hashed.into_iter().map(of_tensor).collect())
    }
}
