//! The content hashes of a version, compared with those of its manifest by several readers.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use xxhash_rust::xxh3::Xxh3;

use super::load::{COPY_TIMEOUT, STAGING_BYTES, in_parallel};
use super::manifest::{ContentHash, Manifest, TensorInfo};
use super::staging::Staging;
use crate::error::Result;
use crate::memory::SharedMemory;

/// The tensors with another content hash than the manifest says, in the manifest's order.
pub(super) fn damaged_tensors(memory: &SharedMemory, manifest: &Manifest) -> Result<Vec<String>> {
    let tensors = manifest.tensors();
    let check = Check {
        memory,
        tensors,
        next: AtomicUsize::new(0),
        has_failed: AtomicBool::new(false),
        damaged: Mutex::default(),
    };
    in_parallel(tensors.len(), || {
        let checked = check.run();
        check.has_failed.fetch_or(checked.is_err(), Relaxed);
        checked
    })?;
    let damaged = check.damaged.into_inner();
    let mut damaged = damaged.unwrap_or_else(PoisonError::into_inner);
    damaged.sort_unstable();
    let name = |index: usize| tensors[index].name.clone();
    Ok(damaged.into_iter().map(name).collect())
}

/// What the readers of one check share.
struct Check<'a> {
    memory: &'a SharedMemory,
    tensors: &'a [TensorInfo],
    /// The next tensor.
    next: AtomicUsize,
    has_failed: AtomicBool,
    /// Indices of tensors.
    damaged: Mutex<Vec<usize>>,
}

impl Check<'_> {
    /// Checks tensors until none is left, or a reader has failed.
    fn run(&self) -> Result<()> {
        let lengths = self.tensors.iter().map(|tensor| tensor.layout.bytes());
        let largest = lengths.max().unwrap_or(0).min(STAGING_BYTES as u64);
        let mut staging = Staging::new(self.memory.device(), largest as usize)?;
        while !self.has_failed.load(Relaxed) {
            let index = self.next.fetch_add(1, Relaxed);
            let Some(tensor) = self.tensors.get(index) else {
                break;
            };
            if self.hash(tensor, &mut staging)? != tensor.hash {
                let damaged = self.damaged.lock();
                damaged.unwrap_or_else(PoisonError::into_inner).push(index);
            }
        }
        Ok(())
    }

    /// Hashes a tensor: one part while the device copies the next one.
    fn hash(&self, tensor: &TensorInfo, staging: &mut Staging) -> Result<ContentHash> {
        let length = tensor.layout.bytes();
        let part = |index: usize| {
            let begin = index as u64 * STAGING_BYTES as u64;
            let bytes = length.saturating_sub(begin).min(STAGING_BYTES as u64);
            (begin, bytes as usize)
        };
        let fetch = |index, staging: &mut Staging| {
            let (begin, bytes) = part(index);
            match bytes {
                0 => Ok(()),
                _ => staging.copy_from(index, self.memory, tensor.offset + begin, bytes),
            }
        };
        let (mut hasher, parts) = (Xxh3::new(), length.div_ceil(STAGING_BYTES as u64));
        fetch(0, staging)?;
        for index in 0..parts as usize {
            fetch(index + 1, staging)?;
            let bytes = part(index).1;
            hasher.update(&staging.fetched(index, COPY_TIMEOUT)?[..bytes]);
        }
        Ok(hasher.digest128().to_be_bytes())
    }
}
