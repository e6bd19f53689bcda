//! Model weights in device memory that survive the processes that use them: one copy for any number
//! of workers.
//!
//! A process loads weights into one memory ([`Weights::load`], from a [`Source`]) and hands their
//! descriptors to the [`Keeper`] of a name ([`Weights::publish`]). The keeper holds descriptors
//! alone: it opens no device and maps no memory. Workers open the weights by name
//! ([`SharedWeights`]) as read-only tensors, and hold descriptors themselves: they go on when the
//! keeper dies, and the next keeper of the name takes the newest version over from them. It offers
//! that version once a process with a device has checked the content hashes
//! ([`verify`](crate::Opener::verify)). The device computes them before the version is offered, or as
//! [`Hashing`] says. A version may share tensors with an earlier one ([`WeightsBuilder::base`]).
//!
//! ```
//! use std::time::Duration;
//! use warpipe::weights::{Keeper, SharedWeights, Weights};
//! use warpipe::{DType, Device, Domain, Layout};
//! # let folder = std::env::temp_dir().join(format!("warpipe-weights-{}", std::process::id()));
//! let (domain, device) = (Domain::at(&folder)?, Device::host());
//! let wait = Duration::from_secs(5);
//! let keeper = Keeper::builder("llama").domain(&domain).build()?; // in a process of its own
//!
//! // In a process that may end afterwards; `Weights::load` does the same with files:
//! let layout = Layout::contiguous(DType::U8, &[3])?;
//! let weights = Weights::from_bytes(&device, [("bias", layout, &b"abc"[..])])?;
//! assert_eq!(weights.publish(&domain, "llama", wait)?.version(), 1);
//! drop(weights);
//!
//! // In each worker:
//! let opener = SharedWeights::opener("llama").domain(&domain).device(&device).wait(wait);
//! let weights = opener.open()?;
//! let bias = weights.tensor("bias").expect("it was published");
//! assert_eq!(bias.memory().to_vec(wait)?, b"abc");
//! # drop((bias, weights, keeper)); std::fs::remove_dir_all(folder).ok();
//! # Ok::<(), warpipe::Error>(())
//! ```
//!
//! `docs/design/weights.md` has the protocol, its invariants and its failure cases.

mod base;
mod blocks;
mod check;
mod content;
mod contents;
mod exports;
mod fill;
mod follower;
mod held;
mod holder;
mod in_place;
mod keeper;
mod keeper_session;
mod later;
mod lease;
mod load;
mod manifest;
mod mapped;
mod named;
mod room;
mod safetensors;
mod shared;
mod source;
mod staging;
mod storage;
mod takeover;
#[cfg(test)]
mod tests;

pub use self::base::BaseVersion;
#[doc(hidden)] // For the fake driver.
pub use self::content::CONTENT_HASH;
pub use self::fill::WeightsBuilder;
pub use self::follower::Follower;
pub use self::in_place::TensorsInPlace;
pub use self::keeper::{Keeper, KeeperBuilder};
pub use self::load::{PublishedWeights, Weights};
pub use self::manifest::{ContentHash, Hashing, TensorInfo};
pub use self::named::{NamedVersion, NamedWeights};
#[doc(hidden)] // For the Python package.
pub use self::shared::HeldVersion;
pub use self::shared::{SharedTensor, SharedWeights};
pub use self::source::Source;

use crate::error::Result;
use crate::ipc::domain::EndpointName;

crate::ipc::messages!(
    held::VersionReply,
    holder::HolderRequest,
    keeper::KeeperRequest,
    keeper::KeeperReply,
    keeper::KeeperNotice,
);

/// The longest name of weights: the names of holders begin with it.
const WEIGHTS_NAME_BYTES_MAX: usize = 200;

/// Checks the name of weights.
fn weights_name(name: &str) -> Result<EndpointName> {
    let too_long = "it is longer than 200 bytes, the most for weights";
    EndpointName::of_at_most(WEIGHTS_NAME_BYTES_MAX, name, too_long)
}

/// Reads and checks a manifest's bytes, for `fuzzing`. An accepted manifest is the same when it is
/// encoded once more.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn try_manifest(bytes: &[u8]) {
    if let Ok(manifest) = manifest::Manifest::decode(bytes) {
        let again = manifest::Manifest::decode(&manifest.encode());
        assert_eq!(again.map(|again| again == manifest), Ok(true));
    }
}

/// Reads and checks a safetensors file's header, for `fuzzing`. The tensors of an accepted header
/// fill the data.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn try_header(bytes: &[u8]) {
    if let Ok(tensors) = safetensors::parse(bytes, FUZZED_DATA_BYTES) {
        let filled: u64 = tensors.iter().map(|tensor| tensor.layout.bytes()).sum();
        assert_eq!(filled, FUZZED_DATA_BYTES);
    }
}

/// The length of the data behind a header in `fuzzing`.
#[cfg(any(test, feature = "testing"))]
const FUZZED_DATA_BYTES: u64 = 28;

/// A header and a manifest, for `fuzzing`.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    use crate::tensor::{DType, Layout};
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2],
        "data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[4,28]}}"#;
    let Ok(layout) = Layout::contiguous(DType::F32, &[2, 3]) else {
        return Vec::new();
    };
    let tensor = |name: &str, offset| TensorInfo {
        name: name.into(),
        layout,
        offset,
        hash: Some([7; 16]),
    };
    let tensors = vec![tensor("a", 0), tensor("a, tied", 0), tensor("b", 512)];
    let parts = vec![manifest::Part::whole(512), manifest::Part::whole(4096)];
    let manifest = manifest::Manifest::new(1024, parts, tensors);
    let manifest = manifest.map(|manifest| manifest.with_metadata(b"{}".into()).encode());
    // Of another version and of a publisher's allocator, not row-major, without a hash.
    let Ok(layout) = Layout::strided(DType::F32, &[2, 3], &[1, 2], 0) else {
        return Vec::new();
    };
    let turned = TensorInfo {
        layout,
        hash: None,
        ..tensor("turned", 512)
    };
    let part = manifest::Part {
        pieces: 2,
        lease: 1,
        base: Some(([3; 16], 9)),
        ..manifest::Part::whole(512)
    };
    let partial = manifest::Manifest::new(1024, vec![part], vec![turned]);
    let partial = partial.map(|manifest| manifest.with_hashing(Hashing::Later).encode());
    vec![
        header.into(),
        manifest.unwrap_or_default(),
        partial.unwrap_or_default(),
    ]
}
