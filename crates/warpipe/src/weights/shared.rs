//! Weights of another process, open in this one.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::base::BaseVersion;
use super::content::begin_to_hash;
use super::held::{Held, KnownParts, PartialVersion};
use super::holder::{self, clear_dead};
use super::keeper::KeeperRequest;
use super::keeper_session::{KeeperSession, wait_for_number, wait_for_version};
use super::manifest::{Hashing, Manifest, TensorInfo};
use super::mapped::{Mapped, known_parts, parts};
use super::weights_name;
use crate::debug::opaque_debug;
use crate::device::Device;
use crate::error::{Error, Result, WeightsFault};
use crate::fork::OwnerProcess;
use crate::ipc::IpcServer;
use crate::ipc::domain::{Domain, EndpointName};
use crate::memory::{DeviceSlice, SharedMemory};
use crate::options::{OpenOptions, chosen_domain, chosen_place};
use crate::wait::Wait;

/// All tensors of one version of weights, mapped read-only in this process
/// (`cuMemImportFromShareableHandle`, or `mmap` of a sealed memfd): nothing is copied. Cheap to
/// clone: all clones are one.
///
/// It stays valid when the keeper ends, when the publisher ends, and when another version is
/// offered. While it is open this process is one of those that the next keeper of the name takes
/// the version over from. With the last process that has a version open, its memory is free.
#[derive(Clone)]
pub struct SharedWeights {
    pub(super) inner: Arc<SharedInner>,
}

/// What [`SharedWeights::info`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WeightsInfo<'a> {
    /// The name.
    pub name: &'a str,
    /// The number of the version: larger for later ones.
    pub version: u64,
    /// The length of the memory: of all [parts](SharedWeights::parts).
    pub bytes: u64,
    /// When the publisher computes the content hashes. Those of [`Hashing::Later`] are there if the
    /// version was opened after that.
    pub hashing: Hashing,
    /// Whether each tensor has a content hash.
    pub is_hashed: bool,
    /// The JSON text that the publisher gave with the version; empty if it gave none.
    pub metadata: &'a [u8],
}

pub(super) struct SharedInner {
    pub(super) mapped: Arc<Mapped>,
    /// The number of the range that each part of the manifest is mapped in.
    pub(super) places: Vec<u32>,
    pub(super) version: HeldVersion,
}

impl Deref for SharedInner {
    type Target = HeldVersion;

    fn deref(&self) -> &HeldVersion {
        &self.version
    }
}

/// A version that this process holds for later keepers, and has mapped nowhere yet.
#[derive(Clone)]
#[doc(hidden)] // For the Python package.
pub struct HeldVersion {
    pub(super) held: Arc<Held>,
    /// A domain of another user takes no endpoints of this process.
    holder: Option<Arc<IpcServer>>,
    pub(super) domain: Domain,
    pub(super) name: EndpointName,
    pub(super) device: Device,
    pub(super) owner_process: OwnerProcess,
}

opaque_debug!(SharedWeights {; info });
opaque_debug!(HeldVersion { name; number });

/// The tensors with another content hash than the manifest says, in the manifest's order; those
/// without a hash are not read. `memory` has a slice for each part.
fn damaged_tensors(
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
    let hashes = begin_to_hash(&places)?.finish(wait)?;
    let damaged = tensors
        .iter()
        .zip(hashes)
        .filter(|(tensor, hash)| tensor.hash != Some(*hash));
    Ok(damaged.map(|(tensor, _)| tensor.name.to_string()).collect())
}

impl From<&SharedWeights> for BaseVersion {
    fn from(shared: &SharedWeights) -> BaseVersion {
        BaseVersion(shared.inner.held.clone())
    }
}

impl SharedWeights {
    /// Opens the version that is offered, and waits for one: also while there is no keeper, or the
    /// keeper is replaced.
    ///
    /// # Errors
    /// [`Error::NotFound`] when no keeper has the name; [`Error::Timeout`] when it offers no
    /// version; [`Error::PeerGone`] when it ends and no time is left to wait for the next one;
    /// [`Error::Refused`], also when it has no room for another session; [`Error::Name`],
    /// [`Error::Handshake`]; [`Error::Protocol`] when what it sends is damaged; [`Error::Device`]
    /// when the device cannot map the memory; [`Error::Os`], [`Error::Driver`].
    pub fn open<'w>(
        name: &str,
        options: OpenOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<SharedWeights> {
        SharedWeights::open_after(name, 0, options, wait)
    }

    /// As [`open`](Self::open), for a version after number `version`, as
    /// [`SharedWeights::newer`]: without keeping an earlier one open.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[doc(hidden)] // For the Python package.
    pub fn open_after<'w>(
        name: &str,
        version: u64,
        options: OpenOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<SharedWeights> {
        let name = weights_name(name)?;
        let (domain, device) = chosen_place(&options.domain, &options.device)?;
        SharedWeights::after(&domain, &name, &device, version, &wait.into())
    }

    /// The number of the version that is offered, if it is after number `version`; waits for such a
    /// one as [`open`](Self::open). Opens nothing and uses no device.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[doc(hidden)] // For the Python package.
    pub fn version_after<'w>(
        name: &str,
        version: u64,
        options: OpenOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<u64> {
        let name = weights_name(name)?;
        let (domain, wanted) = (chosen_domain(&options.domain)?, KeeperRequest::Offered);
        wait_for_number(&domain, &name, &wanted, version, &wait.into())
    }

    /// Compares the content hashes of the version that a new keeper took over, and has the keeper
    /// offer it if they are right. Without such a candidate it compares those of the version that
    /// is offered. Waits for one of them: also while a new keeper still asks its holders, and for
    /// hashes that the publisher computes [later](Hashing::Later). Returns the version's number.
    /// The device reads all of the memory.
    ///
    /// # Errors
    /// [`Error::Weights`], also for a version with tensors that have no hash to compare: a
    /// candidate is dropped then, and an older one, if there is one, takes its place, and a version
    /// that is offered stays offered; [`Error::Timeout`] when the keeper has no version; as
    /// [`open`](Self::open).
    pub fn verify<'w>(name: &str, options: OpenOptions, wait: impl Into<Wait<'w>>) -> Result<u64> {
        let name = weights_name(name)?;
        let (domain, device) = chosen_place(&options.domain, &options.device)?;
        let wait = &wait.into();
        let (keeper, held) = wait_for_hashes(&domain, &name, wait)?;
        // Of the descriptors that the keeper has, and not of what may be mapped here already.
        let memory = parts(&held).map(|part| part.map_alone(&device));
        let memory = memory.collect::<Result<Vec<SharedMemory>>>()?;
        let slices: Vec<&DeviceSlice> = memory.iter().map(|memory| &**memory).collect();
        let tensors = damaged_tensors(&slices, &held.manifest, wait)?;
        let (version, is_hashed) = (held.version, held.is_hashed());
        let checked = KeeperRequest::Checked {
            version,
            is_sound: tensors.is_empty() && is_hashed,
        };
        keeper.request(&checked, &Duration::ZERO.into())?;
        let (name, version) = (name.to_string(), version.number);
        match is_hashed && tensors.is_empty() {
            true => Ok(version),
            false => Err(Error::Weights(WeightsFault::Unverified {
                name,
                version,
                tensors,
            })),
        }
    }

    /// Opens the next version of the same name on the same device, and waits for it. Versions in
    /// between are left out. This version stays open as long as this object.
    ///
    /// # Errors
    /// [`Error::Timeout`] when none came; [`Error::State`]; as [`open`](Self::open).
    pub fn newer<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<SharedWeights> {
        let HeldVersion {
            domain,
            name,
            device,
            ..
        } = &self.inner.version;
        self.inner.owner_process.check()?;
        SharedWeights::after(domain, name, device, self.info().version, &wait.into())
    }

    fn after(
        domain: &Domain,
        name: &EndpointName,
        device: &Device,
        after: u64,
        wait: &Wait<'_>,
    ) -> Result<SharedWeights> {
        let publisher = domain.owner();
        let known = |found: &PartialVersion| known_parts(publisher, device, found);
        let (keeper, mut version) = HeldVersion::after(domain, name, device, after, wait, &known)?;
        let mapped = Mapped::of(device, publisher, &version.held)?;
        version.hold(&keeper, wait)?;
        let places = (0..mapped.memory.len() as u32).collect();
        Ok(SharedWeights::of(Arc::new(mapped), places, version))
    }

    pub(super) fn of(mapped: Arc<Mapped>, places: Vec<u32>, version: HeldVersion) -> SharedWeights {
        SharedWeights {
            inner: Arc::new(SharedInner {
                mapped,
                places,
                version,
            }),
        }
    }

    /// The device that it is mapped on.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The parts of the memory, for reading alone, with the [offset](TensorInfo::offset) at which
    /// each begins. Each tensor lies in one of them. Weights that were loaded or copied have one
    /// part; those that were published [in place](super::TensorsInPlace) have as many as their
    /// publisher's allocator had.
    pub fn parts(&self) -> impl Iterator<Item = (u64, &SharedMemory)> {
        let begins = self.inner.held.manifest.parts().map(|(begin, _)| begin);
        let memory = self.inner.mapped.expose();
        let places = self.inner.places.iter();
        begins.zip(places.map(|&place| &memory[place as usize]))
    }

    /// What the publisher and the manifest say of it.
    pub fn info(&self) -> WeightsInfo<'_> {
        let manifest = &self.inner.held.manifest;
        WeightsInfo {
            name: self.inner.name.as_str(),
            version: self.inner.held.version.number,
            bytes: manifest.bytes(),
            hashing: manifest.hashing(),
            is_hashed: self.inner.held.is_hashed(),
            metadata: manifest.metadata(),
        }
    }

    /// Whether both are one version, and know the same of it.
    #[doc(hidden)] // For the Python package.
    pub fn is_same(&self, other: &SharedWeights) -> bool {
        let known =
            |weights: &SharedWeights| (weights.inner.held.version, weights.inner.held.is_hashed());
        known(self) == known(other)
    }

    /// Whether a version's memory lies at the addresses: not after a follower's change that failed,
    /// and whose undoing failed, too.
    #[doc(hidden)] // For the Python package.
    pub fn is_whole(&self) -> bool {
        self.inner.mapped.is_whole()
    }

    /// The tensors, in the order of their offsets.
    pub fn tensors(&self) -> &[TensorInfo] {
        self.inner.held.manifest.tensors()
    }

    /// The description of the tensor of this name: unlike the tensor, it keeps no address in use.
    #[doc(hidden)] // For the Python package.
    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        self.inner.held.manifest.tensor(name)
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<SharedTensor> {
        let manifest = &self.inner.held.manifest;
        let info = manifest.tensor(name)?;
        let (part, offset) = manifest.part_at(info.offset);
        let memory = &self.inner.mapped.expose()[self.inner.places[part] as usize];
        // One without elements may lie behind the end of the range.
        let range = match info.layout.bytes() {
            0 => memory.range(0, 0),
            bytes => memory.range(offset, bytes),
        };
        Some(SharedTensor {
            info: info.clone(),
            // The manifest has been checked: every tensor lies in the memory.
            memory: range.ok()?,
        })
    }
}

impl HeldVersion {
    /// Waits for a version after number `after`: the pieces that are `known` here are
    /// not asked for.
    pub(super) fn after(
        domain: &Domain,
        name: &EndpointName,
        device: &Device,
        after: u64,
        wait: &Wait<'_>,
        known: &dyn Fn(&PartialVersion) -> KnownParts,
    ) -> Result<(KeeperSession, HeldVersion)> {
        let wanted = KeeperRequest::Offered;
        let (keeper, held) = wait_for_version(domain, name, &wanted, after, wait, known)?;
        let version = HeldVersion {
            held: Arc::new(held),
            holder: None,
            domain: domain.clone(),
            name: name.clone(),
            device: device.clone(),
            owner_process: OwnerProcess::current(),
        };
        Ok((keeper, version))
    }

    /// Holds it for keepers that begin later.
    pub(super) fn hold(&mut self, keeper: &KeeperSession, wait: &Wait<'_>) -> Result<()> {
        let (domain, name) = (&self.domain, &self.name);
        let is_own = domain.owner() == rustix::process::geteuid().as_raw();
        if is_own {
            clear_dead(domain, name.as_str());
            let holder = holder::serve(domain, name.as_str(), self.held.clone())?;
            // A keeper that has begun meanwhile may have asked the holders before this one was
            // there: it must not give the number to another version. The weights are valid in any
            // case, and a keeper that begins later finds the holder.
            let (number, now) = (self.number(), &wait.cancellable_within(Duration::ZERO));
            if keeper.tell_holding(number, now).is_err() {
                let next = KeeperSession::open(domain, name, now);
                let _ = next.and_then(|next| next.tell_holding(number, now));
            }
            self.holder = Some(Arc::new(holder));
        }
        Ok(())
    }
}

/// A tensor of shared weights. Cheap to clone, and valid on its own.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SharedTensor {
    /// What the manifest says of it.
    pub info: TensorInfo,
    /// The tensor's bytes, as its elements lie, for reading alone. Empty for a tensor without elements.
    pub memory: SharedMemory,
}

/// The version to be checked, and the keeper that has it. Waits for it, and for its hashes if they
/// come later.
fn wait_for_hashes(
    domain: &Domain,
    name: &EndpointName,
    wait: &Wait<'_>,
) -> Result<(KeeperSession, Held)> {
    loop {
        let known = |_: &PartialVersion| KnownParts::default();
        let found = wait_for_version(domain, name, &KeeperRequest::Candidate, 0, wait, &known)?;
        let (keeper, Held { manifest, .. }) = &found;
        let are_due = !manifest.is_hashed() && manifest.hashing() == Hashing::Later;
        if are_due && wait.is_cancelled() {
            // Without a verdict, which would give the version up.
            return Err(wait.timed_out(|| format!("the content hashes of the weights {name:?}")));
        }
        if !are_due || wait.is_over() {
            return Ok(found);
        }
        keeper.wait_for_news(wait);
    }
}
