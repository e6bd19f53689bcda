//! The content hashes of a version, compared with those of its manifest.

use super::content::hash_memory;
use super::manifest::{Manifest, TensorInfo};
use crate::error::Result;
use crate::memory::DeviceSlice;
use crate::wait::Wait;

/// The tensors with another content hash than the manifest says, in the manifest's order; those
/// without a hash are not read. `memory` has a slice for each part.
pub(super) fn damaged_tensors(
    memory: &[&DeviceSlice],
    manifest: &Manifest,
    wait: &Wait<'_>,
) -> Result<Vec<String>> {
    let tensors = manifest.tensors().iter();
    let tensors: Vec<&TensorInfo> = tensors.filter(|tensor| tensor.hash.is_some()).collect();
    let place = |tensor: &TensorInfo| {
        let (part, offset) = manifest.part_at(tensor.offset);
        (memory[part], offset, tensor.layout.bytes())
    };
    let places: Vec<_> = tensors.iter().copied().map(place).collect();
    let hashes = hash_memory(&places, wait)?;
    let damaged = tensors
        .iter()
        .zip(hashes)
        .filter(|(tensor, hash)| tensor.hash != Some(*hash));
    Ok(damaged.map(|(tensor, _)| tensor.name.to_string()).collect())
}
