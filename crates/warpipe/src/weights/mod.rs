//! Model weights in device memory that survive the processes that use them: one copy for any number
//! of workers.
//!
//! A process loads weights into one memory ([`Weights::load`], from a [`Source`]) and hands their
//! descriptors to the [`Keeper`] of a name ([`Weights::publish`]). The keeper holds descriptors
//! alone: it opens no device and maps no memory. Workers open the weights by name
//! ([`SharedWeights`]) as read-only tensors, and hold descriptors themselves: they go on when the
//! keeper dies, and the next keeper of the name takes the newest version over from them. It offers
//! that version once a process with a device has checked the content hashes
//! ([`verify`](SharedWeights::verify)). The device computes them before the version is offered, or as
//! [`Hashing`] says. A version may share tensors with an earlier one ([`WeightsBuilder::base`]).
//!
//! ```
//! use std::time::Duration;
//! use warpipe::weights::{Keeper, SharedWeights, Weights};
//! use warpipe::{DType, Device, Domain, Layout};
//! # let folder = std::env::temp_dir().join(format!("warpipe-weights-{}", std::process::id()));
//! let (domain, device) = (Domain::at(&folder)?, Device::host());
//! let wait = Duration::from_secs(5);
//! let keeper = Keeper::new("llama", domain.options())?; // in a process of its own
//!
//! // In a process that may end afterwards; `Weights::load` does the same with files:
//! let layout = Layout::contiguous(DType::U8, &[3])?;
//! let weights = Weights::from_bytes(&device, [("bias", layout, &b"abc"[..])])?;
//! assert_eq!(weights.publish(&domain, "llama", wait)?.version, 1);
//! drop(weights);
//!
//! // In each worker:
//! let weights = SharedWeights::open("llama", domain.on(&device), wait)?;
//! let bias = weights.tensor("bias").expect("it was published");
//! assert_eq!(bias.memory.to_vec(wait)?, b"abc");
//! # drop((bias, weights, keeper)); std::fs::remove_dir_all(folder).ok();
//! # Ok::<(), warpipe::Error>(())
//! ```
//!
//! `docs/design/weights.md` has the protocol, its invariants and its failure cases.

mod base;
mod blocks;
mod content;
mod contents;
mod exports;
mod fill;
mod follower;
#[cfg(any(test, feature = "testing"))]
mod fuzzed;
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
#[cfg(any(test, feature = "testing"))]
pub(crate) use self::fuzzed::{seeds, try_header, try_manifest};
pub use self::in_place::TensorsInPlace;
pub use self::keeper::{Keeper, KeeperOptions, KeeperStatus};
pub use self::load::{PublishedWeights, Weights};
pub use self::manifest::{ContentHash, Hashing, TensorInfo};
pub use self::named::{NamedVersion, NamedWeights};
#[doc(hidden)] // For the Python package.
pub use self::shared::HeldVersion;
pub use self::shared::{SharedTensor, SharedWeights, WeightsInfo};
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
