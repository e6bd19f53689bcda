//! The base of a partial version: a version that shares its tensors with the next one.

use std::collections::HashSet;
use std::sync::Arc;

use super::held::{Held, KnownParts, PartialVersion, places};
use super::keeper::KeeperRequest;
use super::keeper_session::wait_for_version;
use super::manifest::{Part, TensorInfo};
use super::storage::Storage;
use super::weights_name;
use crate::debug::opaque_debug;
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
pub struct BaseVersion(pub(super) Arc<Held>);

opaque_debug!(BaseVersion {});

impl BaseVersion {
    /// Version `number` of a name, which its keeper offers. Waits for it.
    ///
    /// # Errors
    /// [`Error::Argument`] when the keeper offers a later version; as
    /// [`SharedWeights::open`](super::SharedWeights::open).
    #[doc(hidden)] // For the Python package.
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
        let (_, held) = wait_for_version(domain, &name, &offered, after, wait, &known)?;
        if held.version.number != number {
            let found = format!("version {number} of {name:?}");
            let allowed = format!(
                "version {}, which is offered; or keep the older one open, and give that",
                held.version.number
            );
            return Err(Error::argument("base", found, allowed));
        }
        Ok(BaseVersion(Arc::new(held)))
    }

    /// Adds the parts of each tensor that is not `changed`, with their pieces and leases, and returns
    /// these tensors with their offsets there.
    pub(super) fn lay(
        &self,
        changed: &HashSet<Arc<str>>,
        storage: &mut Storage,
    ) -> Result<Vec<TensorInfo>> {
        let (held, manifest) = (&self.0, &self.0.manifest);
        let kept = |tensor: &&TensorInfo| !changed.contains(&tensor.name);
        let kept: Vec<&TensorInfo> = manifest.tensors().iter().filter(kept).collect();
        let mut is_used = vec![false; manifest.parts().count()];
        for tensor in &kept {
            is_used[manifest.part_at(tensor.offset).0] = true;
        }
        // How far each part moves.
        let mut moves = vec![0; is_used.len()];
        let used = (manifest.parts().zip(places(manifest))).zip(&is_used);
        for (((begin, _), (number, part, pieces)), _) in used.filter(|(_, is_used)| **is_used) {
            let lease = match part.lease {
                0 => 0,
                lease => storage.add_lease(held.leases[lease as usize - 1].clone())?,
            };
            moves[number as usize] = storage.bytes.wrapping_sub(begin);
            storage.add_part(Part {
                lease,
                base: Some(part.id(held.version.id, number)),
                ..part
            });
            storage.pieces.extend_from_slice(&held.pieces[pieces]);
        }
        let moved = kept.into_iter().map(|tensor| TensorInfo {
            offset: tensor
                .offset
                .wrapping_add(moves[manifest.part_at(tensor.offset).0]),
            ..tensor.clone()
        });
        Ok(moved.collect())
    }
}
