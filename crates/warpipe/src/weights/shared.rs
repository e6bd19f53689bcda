//! Weights of another process, open in this one.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::base::BaseVersion;
use super::check::damaged_tensors;
use super::exports::PieceFd;
use super::held::{Held, Version};
use super::holder::{Holder, clear_dead};
use super::keeper::KeeperRequest;
use super::keeper_session::{KeeperSession, wait_for_number, wait_for_version};
use super::manifest::{Hashing, Manifest, TensorInfo};
use super::weights_name;
use crate::device::Device;
use crate::device_types::Access;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::ipc::domain::{Domain, EndpointName};
use crate::memory::{DeviceSlice, Memory, PiecesInfo, SharedMemory};
use crate::options::Opener;
use crate::tensor::Layout;

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

pub(super) struct SharedInner {
    pub(super) mapped: Arc<Mapped>,
    pub(super) begins: Arc<[u64]>,
    pub(super) manifest: Arc<Manifest>,
    pub(super) held: Arc<Held>,
    /// A domain of another user takes no endpoints of this process.
    pub(super) holder: Option<Arc<Holder>>,
    pub(super) domain: Domain,
    pub(super) name: EndpointName,
    pub(super) device: Device,
    pub(super) owner_process: OwnerProcess,
}

/// Where a version is mapped.
pub(super) struct Mapped {
    /// One range for each part of the manifest.
    pub(super) memory: Vec<SharedMemory>,
    /// Held while that changes.
    pub(super) lies: Mutex<Lying>,
}

/// The version that is mapped somewhere now.
pub(super) struct Lying {
    pub(super) number: u64,
    /// Not after a change that failed, and whose undoing failed, too.
    pub(super) is_whole: bool,
}

impl Mapped {
    pub(super) fn lies(&self) -> MutexGuard<'_, Lying> {
        self.lies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for SharedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedWeights")
            .field("name", &self.inner.name)
            .field("version", &self.version())
            .field("tensors", &self.tensors().len())
            .finish_non_exhaustive()
    }
}

impl Opener<SharedWeights> {
    /// Opens the version that is offered, and waits for one up to the time given with
    /// [`wait`](Opener::wait): also while there is no keeper, or the keeper is replaced.
    ///
    /// # Errors
    /// [`Error::NotFound`] when no keeper has the name; [`Error::Timeout`] when it offers no
    /// version; [`Error::PeerGone`] when it ends and no time is left to wait for the next one;
    /// [`Error::Refused`] when it has no room for another session; [`Error::OtherKind`],
    /// [`Error::Name`], [`Error::AccessDenied`], [`Error::Handshake`]; [`Error::Protocol`] when
    /// what it sends is damaged; [`Error::PeerAccess`] and [`Error::NotDeviceMemory`] when the
    /// device cannot map the memory; [`Error::DescriptorLimit`], [`Error::Driver`].
    pub fn open(&self) -> Result<SharedWeights> {
        self.open_after(0)
    }

    /// As [`open`](Opener::open), for a version after number `version`, as
    /// [`SharedWeights::newer`]: without keeping an earlier one open.
    ///
    /// # Errors
    /// As [`open`](Opener::open).
    pub fn open_after(&self, version: u64) -> Result<SharedWeights> {
        let name = weights_name(self.name())?;
        let (domain, device) = (self.chosen_domain()?, self.chosen_device());
        SharedWeights::after(&domain, &name, &device, version, self.timeout())
    }

    /// The number of the version that is offered, if it is after number `version`; waits for such a
    /// one as [`open`](Opener::open). Opens nothing and uses no device.
    ///
    /// # Errors
    /// As [`open`](Opener::open).
    pub fn version_after(&self, version: u64) -> Result<u64> {
        let name = weights_name(self.name())?;
        let (domain, wanted) = (self.chosen_domain()?, KeeperRequest::Offered);
        wait_for_number(&domain, &name, &wanted, version, self.timeout())
    }

    /// Compares the content hashes of the version that a new keeper took over, and has the keeper
    /// offer it if they are right. Without such a candidate it compares those of the version that
    /// is offered. Waits for one of them up to the time given with [`wait`](Opener::wait): also
    /// while a new keeper still asks its holders, and for hashes that the publisher computes
    /// [later](Hashing::Later). Returns the version's number. The device reads all of the memory.
    ///
    /// # Errors
    /// [`Error::WeightsDamaged`], and [`Error::WeightsUnhashed`] for a version with tensors that have no
    /// hash to compare: a candidate is dropped then, and an older one, if there is one, takes its
    /// place, and a version that is offered stays offered; [`Error::Timeout`] when the keeper has no
    /// version; as [`open`](Opener::open).
    pub fn verify(&self) -> Result<u64> {
        let name = weights_name(self.name())?;
        let (domain, device) = (self.chosen_domain()?, self.chosen_device());
        let found = wait_for_hashes(&domain, &name, self.timeout())?;
        verify(&name, &device, found)
    }

    /// As [`verify`](Opener::verify), but without the hashes that come later there is no verdict: an
    /// [`Error::Timeout`].
    #[doc(hidden)] // For the Python package, which waits in slices.
    pub fn verify_once_hashed(&self) -> Result<u64> {
        let name = weights_name(self.name())?;
        let (domain, device) = (self.chosen_domain()?, self.chosen_device());
        let found = wait_for_hashes(&domain, &name, self.timeout())?;
        if are_hashes_due(&found.2) {
            return Err(Error::Timeout {
                what: format!("the content hashes of the weights {:?}", self.name()),
                waited: self.timeout(),
            });
        }
        verify(&name, &device, found)
    }
}

/// Compares the content hashes of a version, and tells its keeper.
fn verify(name: &EndpointName, device: &Device, found: FoundVersion) -> Result<u64> {
    let (keeper, held, manifest) = found;
    let memory = map(device, &held, &manifest)?;
    let slices: Vec<&DeviceSlice> = memory.iter().map(|memory| &**memory).collect();
    let tensors = damaged_tensors(&slices, &manifest)?;
    let (version, is_hashed) = (held.version, manifest.is_hashed());
    let checked = KeeperRequest::Checked {
        version,
        is_sound: tensors.is_empty() && is_hashed,
    };
    keeper.request(&checked, Duration::ZERO)?;
    let (name, version) = (name.to_string(), version.number);
    if !tensors.is_empty() {
        return Err(Error::WeightsDamaged {
            name,
            version,
            tensors,
        });
    }
    match is_hashed {
        true => Ok(version),
        false => Err(Error::WeightsUnhashed { name, version }),
    }
}

impl From<&SharedWeights> for BaseVersion {
    fn from(shared: &SharedWeights) -> BaseVersion {
        shared.as_base()
    }
}

impl SharedWeights {
    /// Options to open the weights of a name.
    pub fn opener(name: &str) -> Opener<SharedWeights> {
        Opener::new(name)
    }

    /// Opens the next version of the same name on the same device, and waits for it up to
    /// `timeout`. Versions in between are left out. This version stays open as long as this object.
    ///
    /// # Errors
    /// [`Error::Timeout`] when none came; [`Error::Forked`]; as [`Opener::open`].
    pub fn newer(&self, timeout: Duration) -> Result<SharedWeights> {
        let SharedInner {
            domain,
            name,
            device,
            ..
        } = &*self.inner;
        self.inner.owner_process.check()?;
        SharedWeights::after(domain, name, device, self.version(), timeout)
    }

    fn after(
        domain: &Domain,
        name: &EndpointName,
        device: &Device,
        after: u64,
        timeout: Duration,
    ) -> Result<SharedWeights> {
        let wanted = KeeperRequest::Offered;
        let (keeper, held, manifest) = wait_for_version(domain, name, &wanted, after, timeout)?;
        let mapped = Arc::new(Mapped {
            memory: map(device, &held, &manifest)?,
            lies: Mutex::new(Lying {
                number: held.version.number,
                is_whole: true,
            }),
        });
        let held = Arc::new(held);
        let is_own = domain.owner() == rustix::process::geteuid().as_raw();
        let holder = if is_own {
            clear_dead(domain, name.as_str());
            let holder = Holder::serve(domain, name.as_str(), held.clone())?;
            tell_keepers(domain, name, &keeper, held.version.number);
            Some(Arc::new(holder))
        } else {
            None
        };
        Ok(SharedWeights {
            inner: Arc::new(SharedInner {
                mapped,
                begins: manifest.parts().map(|(begin, _)| begin).collect(),
                manifest: Arc::new(manifest),
                held,
                holder,
                domain: domain.clone(),
                name: name.clone(),
                device: device.clone(),
                owner_process: OwnerProcess::current(),
            }),
        })
    }

    /// The name.
    pub fn name(&self) -> &str {
        self.inner.name.as_str()
    }

    /// The number of the version: larger for later ones.
    pub fn version(&self) -> u64 {
        let Version { number, .. } = self.inner.held.version;
        number
    }

    /// The device that it is mapped on.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The length of the memory: of all [parts](Self::parts).
    pub fn bytes(&self) -> u64 {
        self.inner.manifest.bytes()
    }

    /// The parts of the memory, for reading alone, with the [offset](TensorInfo::offset) at which
    /// each begins. Each tensor lies in one of them. Weights that were loaded or copied have one
    /// part; those that were published [in place](super::TensorsInPlace) have as many as their
    /// publisher's allocator had.
    pub fn parts(&self) -> impl Iterator<Item = (u64, &SharedMemory)> {
        let begins = self.inner.begins.iter().copied();
        begins.zip(&self.inner.mapped.memory)
    }

    /// When the publisher computes the content hashes. Those of [`Hashing::Later`] are there if the
    /// version was opened after that.
    pub fn hashing(&self) -> Hashing {
        self.inner.manifest.hashing()
    }

    /// Whether each tensor has a content hash.
    pub fn is_hashed(&self) -> bool {
        self.inner.held.is_hashed
    }

    /// The JSON text that the publisher gave with the version; empty if it gave none.
    pub fn metadata(&self) -> &[u8] {
        self.inner.manifest.metadata()
    }

    /// Whether both are one version, and know the same of it.
    pub fn is_same(&self, other: &SharedWeights) -> bool {
        let known = |weights: &SharedWeights| (weights.inner.held.version, weights.is_hashed());
        known(self) == known(other)
    }

    pub(super) fn as_base(&self) -> BaseVersion {
        BaseVersion::new(self.inner.held.clone(), self.inner.manifest.clone())
    }

    /// Whether a version's memory lies at the addresses: not after a follower's change that failed,
    /// and whose undoing failed, too.
    #[doc(hidden)] // For the Python package.
    pub fn is_whole(&self) -> bool {
        self.inner.mapped.lies().is_whole
    }

    /// The tensors, in the order of their offsets.
    pub fn tensors(&self) -> &[TensorInfo] {
        self.inner.manifest.tensors()
    }

    /// The description of the tensor of this name.
    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        self.inner.manifest.tensor(name)
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<SharedTensor> {
        let info = self.inner.manifest.tensor(name)?;
        let part = self.inner.manifest.part_at(info.offset);
        let begin = info.offset - self.inner.begins[part];
        let range = self.inner.mapped.memory[part].range(begin, info.layout.bytes());
        Some(SharedTensor {
            layout: info.layout,
            // The manifest has been checked: every tensor lies in the memory.
            memory: range.ok()?,
        })
    }
}

/// A tensor of shared weights. Cheap to clone, and valid on its own.
#[derive(Debug, Clone)]
pub struct SharedTensor {
    layout: Layout,
    memory: SharedMemory,
}

impl SharedTensor {
    /// The element type, the shape and the strides: without gaps, the dimensions in any order.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The tensor's bytes, as its elements lie, for reading alone. Empty for a tensor without elements.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }
}

/// Tells the keeper of a version that this process serves a holder of it. A keeper that has begun
/// meanwhile may have asked the holders before this one was there: it must not give the number to
/// another version. The weights are valid in any case, and a keeper that begins later finds the
/// holder.
fn tell_keepers(domain: &Domain, name: &EndpointName, keeper: &KeeperSession, number: u64) {
    if keeper.tell_holding(number).is_err() {
        let next = KeeperSession::open(domain, name, Duration::ZERO);
        let _ = next.and_then(|next| next.tell_holding(number));
    }
}

/// A version, and the keeper that has it.
type FoundVersion = (KeeperSession, Held, Manifest);

/// Whether the publisher of a version still computes its hashes.
fn are_hashes_due(manifest: &Manifest) -> bool {
    !manifest.is_hashed() && manifest.hashing() == Hashing::Later
}

/// The version to be checked. Waits up to `timeout` for it, and for its hashes if they come later.
fn wait_for_hashes(
    domain: &Domain,
    name: &EndpointName,
    timeout: Duration,
) -> Result<FoundVersion> {
    let clock = Instant::now();
    loop {
        let left = timeout.saturating_sub(clock.elapsed());
        let found = wait_for_version(domain, name, &KeeperRequest::Candidate, 0, left)?;
        let (keeper, _, manifest) = &found;
        let left = timeout.saturating_sub(clock.elapsed());
        if !are_hashes_due(manifest) || left.is_zero() {
            return Ok(found);
        }
        keeper.wait_for_news(left);
    }
}

/// Maps each part into one range.
fn map(device: &Device, held: &Held, manifest: &Manifest) -> Result<Vec<SharedMemory>> {
    let map_part = |part: HeldPart<'_>| {
        let HeldPart {
            fds,
            shape,
            identity,
            lease,
        } = part;
        Memory::import_shared(device, &fds, &shape, Access::Read, identity, lease)
    };
    let memory: Result<_> = parts(held, manifest).map(map_part).collect();
    let memory = memory?;
    // The device has mapped them: their `close` does not block.
    held.pieces.iter().for_each(|piece| PieceFd::approve(piece));
    Ok(memory)
}

/// A part of a version's memory, to be mapped.
pub(super) struct HeldPart<'a> {
    pub(super) fds: Vec<BorrowedFd<'a>>,
    pub(super) shape: PiecesInfo,
    /// For the statistics: the version, and the part's number.
    pub(super) identity: ([u8; 16], u64),
    /// Mapped memory is in use, whatever has become of the object that mapped it.
    pub(super) lease: Option<Arc<dyn Any + Send + Sync>>,
}

/// The parts of a version's memory.
pub(super) fn parts<'a>(
    held: &'a Held,
    manifest: &'a Manifest,
) -> impl Iterator<Item = HeldPart<'a>> {
    let mut pieces = &held.pieces[..];
    (0..)
        .zip(manifest.parts())
        .map(move |(number, (begin, part))| {
            let (of_it, rest) = pieces.split_at(part.pieces as usize);
            pieces = rest;
            let lease = (part.lease as usize).checked_sub(1);
            HeldPart {
                fds: of_it.iter().map(|piece| piece.as_fd()).collect(),
                shape: PiecesInfo {
                    piece_bytes: part.piece_bytes,
                    bytes: part.bytes().min(manifest.bytes() - begin),
                    device: held.device,
                },
                identity: part.base.map_or((held.version.id, number), |(id, number)| {
                    (id, number.into())
                }),
                lease: lease.map(|lease| held.leases[lease].clone() as Arc<_>),
            }
        })
}
