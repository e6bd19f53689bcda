//! Weights of another process, open in this one.

use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use super::check::damaged_tensors;
use super::held::{Held, MEMORY_NUMBER, Version};
use super::holder::{Holder, clear_dead};
use super::keeper::KeeperRequest;
use super::keeper_session::{KeeperSession, wait_for_version};
use super::manifest::{Manifest, TensorInfo};
use super::weights_name;
use crate::device::Device;
use crate::device_types::Access;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::ipc::domain::{Domain, EndpointName};
use crate::memory::{Memory, SharedMemory};
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
    inner: Arc<SharedInner>,
}

struct SharedInner {
    memory: SharedMemory,
    manifest: Manifest,
    held: Arc<Held>,
    /// A domain of another user takes no endpoints of this process.
    _holder: Option<Holder>,
    domain: Domain,
    name: EndpointName,
    device: Device,
    owner_process: OwnerProcess,
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
        let (_, held, _) = wait_for_version(&domain, &name, &wanted, version, self.timeout())?;
        Ok(held.version.number)
    }

    /// Compares the content hashes of the version that a new keeper took over, and has the keeper
    /// offer it if they are right. Without such a candidate it compares those of the version that
    /// is offered. Waits for one of them up to the time given with [`wait`](Opener::wait): also
    /// while a new keeper still asks its holders. Returns the version's number. It reads all of
    /// the memory, with several readers that have 8 MiB of page-locked memory each.
    ///
    /// # Errors
    /// [`Error::WeightsDamaged`]: a candidate is dropped then, and an older one, if there is one,
    /// takes its place, and a damaged version that is offered stays offered; [`Error::Timeout`]
    /// when the keeper has no version; as
    /// [`open`](Opener::open).
    pub fn verify(&self) -> Result<u64> {
        let name = weights_name(self.name())?;
        let (domain, device) = (self.chosen_domain()?, self.chosen_device());
        let wanted = KeeperRequest::Candidate;
        let (keeper, held, manifest) =
            wait_for_version(&domain, &name, &wanted, 0, self.timeout())?;
        let memory = map(&device, &held)?;
        let tensors = damaged_tensors(&memory, &manifest)?;
        let version = held.version;
        let checked = KeeperRequest::Checked {
            version,
            is_sound: tensors.is_empty(),
        };
        keeper.request(&checked, Duration::ZERO)?;
        if tensors.is_empty() {
            return Ok(version.number);
        }
        Err(Error::WeightsDamaged {
            name: name.to_string(),
            version: version.number,
            tensors,
        })
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
        let memory = map(device, &held)?;
        let held = Arc::new(held);
        let is_own = domain.owner() == rustix::process::geteuid().as_raw();
        let holder = if is_own {
            clear_dead(domain, name.as_str());
            let holder = Holder::serve(domain, name.as_str(), held.clone())?;
            tell_keepers(domain, name, &keeper, held.version.number);
            Some(holder)
        } else {
            None
        };
        Ok(SharedWeights {
            inner: Arc::new(SharedInner {
                memory,
                manifest,
                held,
                _holder: holder,
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

    /// The length of the memory.
    pub fn bytes(&self) -> u64 {
        self.inner.manifest.bytes()
    }

    /// The memory of all tensors, for reading alone; [`TensorInfo::offset`] counts from its first
    /// byte.
    pub fn memory(&self) -> &SharedMemory {
        &self.inner.memory
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
        let range = self.inner.memory.range(info.offset, info.layout.bytes());
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
    /// The element type and the shape; row-major, without gaps.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The tensor's bytes, for reading alone. Empty for a tensor without elements.
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

fn map(device: &Device, held: &Held) -> Result<SharedMemory> {
    let identity = (held.version.id, MEMORY_NUMBER);
    let (fd, info) = (held.memory.as_fd(), &held.info);
    let memory = Memory::import_shared(device, fd, info, Access::Read, identity)?;
    // The device has mapped it: its `close` does not block.
    held.memory.approve();
    Ok(memory)
}
