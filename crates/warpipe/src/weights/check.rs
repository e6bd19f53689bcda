//! The content hashes of a version, compared with those of its manifest.

use super::blocks::hash_memory;
use super::manifest::Manifest;
use crate::error::Result;
use crate::memory::SharedMemory;

/// The tensors with another content hash than the manifest says, in the manifest's order.
pub(super) fn damaged_tensors(memory: &SharedMemory, manifest: &Manifest) -> Result<Vec<String>> {
    let tensors = manifest.tensors();
    let offsets: Vec<u64> = tensors.iter().map(|tensor| tensor.offset).collect();
    let lengths: Vec<u64> = tensors.iter().map(|tensor| tensor.layout.bytes()).collect();
    let hashes = hash_memory(memory, &offsets, &lengths)?;
    let damaged = tensors
        .iter()
        .zip(hashes)
        .filter(|(tensor, hash)| tensor.hash != *hash);
    Ok(damaged.map(|(tensor, _)| tensor.name.clone()).collect())
}
