//! The base of a partial version: a version that shares its tensors with the next one.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use super::held::{Held, KnownParts, PartialVersion};
use super::keeper::KeeperRequest;
use super::keeper_session::wait_for_version;
use super::manifest::{Manifest, Part, TensorInfo};
use super::storage::Storage;
use super::weights_name;
use crate::device_types::DeviceId;
use crate::error::{Error, Result};
use crate::ipc::domain::Domain;
use crate::wait::Wait;

/// A version that another one shares tensors of: see [`WeightsBuilder::base`].
///
/// It is made of weights of this process, of a publication or of weights that are open, and holds
/// their descriptors: it maps nothing.
///
/// [`WeightsBuilder::base`]: super::WeightsBuilder::base
#[derive(Clone)]
pub struct BaseVersion {
    held: Arc<Held>,
    manifest: Arc<Manifest>,
}

impl fmt::Debug for BaseVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BaseVersion")
            .field("version", &self.held.version.number)
            .field("tensors", &self.manifest.tensors().len())
            .finish_non_exhaustive()
    }
}

impl BaseVersion {
    pub(super) fn new(held: Arc<Held>, manifest: Arc<Manifest>) -> BaseVersion {
        BaseVersion { held, manifest }
    }

    /// Version `number` of a name, which its keeper offers. Waits for it.
    ///
    /// # Errors
    /// [`Error::Argument`] when the keeper offers a later version; as
    /// [`Opener::open`](crate::options::Opener::open).
    pub fn find<'w>(
        domain: &Domain,
        name: &str,
        number: u64,
        wait: impl Into<Wait<'w>>,
    ) -> Result<BaseVersion> {
        let name = weights_name(name)?;
        let (offered, after) = (KeeperRequest::Offered, number.saturating_sub(1));
        let known = |_: &PartialVersion| KnownParts::default();
        let wait = &wait.into();
        let (_, held, manifest) = wait_for_version(domain, &name, &offered, after, wait, &known)?;
        if held.version.number != number {
            let found = format!("version {number} of {name:?}");
            let allowed = format!(
                "version {}, which is offered; or keep the older one open, and give that",
                held.version.number
            );
            return Err(Error::argument("base", found, allowed));
        }
        Ok(BaseVersion::new(Arc::new(held), Arc::new(manifest)))
    }

    pub(super) fn is_hashed(&self) -> bool {
        self.held.is_hashed
    }

    /// The same version, with its content hashes.
    pub(super) fn hashed(&self, manifest: Arc<Manifest>) -> Result<BaseVersion> {
        let held = self.held.hashed(&manifest)?;
        Ok(BaseVersion::new(Arc::new(held), manifest))
    }

    pub(super) fn held(&self) -> &Arc<Held> {
        &self.held
    }

    pub(super) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(super) fn device(&self) -> DeviceId {
        self.held.device
    }

    /// Adds the parts of each tensor that is not `changed`, with their pieces and leases, and returns
    /// these tensors with their offsets there.
    pub(super) fn lay(
        &self,
        changed: &HashSet<Arc<str>>,
        storage: &mut Storage,
    ) -> Result<Vec<TensorInfo>> {
        let (held, manifest) = (&self.held, &self.manifest);
        let kept = |tensor: &&TensorInfo| !changed.contains(&tensor.name);
        let kept: Vec<&TensorInfo> = manifest.tensors().iter().filter(kept).collect();
        let mut is_used = vec![false; manifest.parts().count()];
        for tensor in &kept {
            is_used[manifest.part_at(tensor.offset)] = true;
        }
        // How far each part moves.
        let mut moves = vec![0; is_used.len()];
        let mut first_piece = 0;
        for (index, (begin, part)) in manifest.parts().enumerate() {
            let pieces = first_piece..first_piece + part.pieces as usize;
            first_piece = pieces.end;
            if !is_used[index] {
                continue;
            }
            let lease = match part.lease {
                0 => 0,
                number => storage.add_lease(held.leases[number as usize - 1].clone())?,
            };
            moves[index] = storage.bytes.wrapping_sub(begin);
            storage.add_part(Part {
                lease,
                base: Some(part.id(held.version.id, index as u32)),
                ..part
            });
            storage.pieces.extend_from_slice(&held.pieces[pieces]);
        }
        let moved = kept.into_iter().map(|tensor| TensorInfo {
            offset: tensor
                .offset
                .wrapping_add(moves[manifest.part_at(tensor.offset)]),
            ..tensor.clone()
        });
        Ok(moved.collect())
    }
}
