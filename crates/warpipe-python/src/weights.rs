//! Model weights: `warpipe.weights`.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use warpipe::weights::{self, TensorInfo};
use warpipe::{Error, HandshakeFault, OpenOptions, Wait};

use crate::detached::call;
use crate::device::{Device, is_cuda};
use crate::domain::Domain;
use crate::errors::{Fault, Outcome};
use crate::exclusive::locked;
use crate::handle::{Bare, CloseableHandle, Named};
use crate::memory::{Memory, MemoryHolder};
use crate::memory_owner::{MemoryOwner, OpenWeights, OwnedMemory, await_stream};
use crate::process::Home;
use crate::stream::{Consumer, likely};
use crate::view::View;
use crate::wait::{
    Given, Limit, WaitLimit, awaited, hand_over, in_slices, late, none_if_late, waiting,
};
use crate::weights_publish::{PhaseClock, Phases};

/// How long a thread of this package waits for a keeper, or for streams, before it looks whether it
/// is to end.
pub const LOOK: Duration = Duration::from_secs(1);

/// Whether a wait for a keeper, or for its version, goes on after this error: there is none yet, or
/// the keeper ends, or is stopped.
fn is_for_now(error: &Error) -> bool {
    matches!(
        error,
        Error::NotFound { .. }
            | Error::Timeout { .. }
            | Error::PeerGone { .. }
            | Error::Handshake {
                fault: HandshakeFault::Silent(_) | HandshakeFault::Closed,
                ..
            }
    )
}

/// The memory of a version that is open in this process, and what it was opened by.
struct Known {
    home: Home,
    domain: PathBuf,
    owner: Weak<MemoryOwner>,
}

/// The versions that are open in this process: each is mapped once on a device.
static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

fn open_weights(owner: &MemoryOwner) -> &OpenWeights {
    match owner.memory() {
        OwnedMemory::Weights(weights) => weights,
        _ => unreachable!("weights hold one"),
    }
}

/// The version that lies in the memory now.
fn weights_of(owner: &MemoryOwner) -> weights::SharedWeights {
    open_weights(owner).now()
}

/// The memory of these weights: the one that is open already, if there is one. Call without the
/// interpreter.
fn owner_of(domain: &Path, opened: weights::SharedWeights) -> Arc<MemoryOwner> {
    let is_same = |other: &weights::SharedWeights| {
        other.info().name == opened.info().name
            && other.device().info().id == opened.device().info().id
            && other.is_same(&opened)
    };
    let owned = |opened| {
        let weights = OwnedMemory::Weights(OpenWeights(Mutex::new(opened)));
        Arc::new(MemoryOwner::new(weights))
    };
    // Never blocks on the list: a forked child may find it locked for ever.
    let Ok(mut known) = KNOWN.try_lock() else {
        return owned(opened);
    };
    let found = known
        .iter()
        .filter(|one| one.home.is_here() && one.domain == domain)
        .filter_map(|one| one.owner.upgrade())
        .find(|owner| is_same(&weights_of(owner)));
    if let Some(found) = found {
        return found;
    }
    let owner = owned(opened);
    known.retain(|one| one.home.is_here() && one.owner.strong_count() > 0);
    known.push(Known {
        home: Home::here(),
        domain: domain.to_owned(),
        owner: Arc::downgrade(&owner),
    });
    owner
}

/// How weights are opened: kept to open a newer version.
#[derive(Debug, Clone)]
pub struct Place {
    pub domain: warpipe::Domain,
    pub device: warpipe::Device,
    pub name: String,
}

impl Place {
    /// Of arguments.
    pub fn of(name: &str, device: Option<Device>, domain: Option<Domain>) -> PyResult<Place> {
        Ok(Place {
            domain: Domain::or_usual(domain)?,
            device: Device::or_preferred(device),
            name: name.to_owned(),
        })
    }

    /// Options of the library.
    pub fn options(&self) -> OpenOptions {
        self.domain.on(&self.device)
    }

    /// Opens a version after number `after`, while the caller `goes_on`.
    pub fn open_after(
        &self,
        py: Python<'_>,
        after: u64,
        wait: Option<Duration>,
        goes_on: impl Fn() -> Outcome<()> + Send + Sync,
    ) -> PyResult<Result<Arc<MemoryOwner>, Error>> {
        waiting(py, wait, goes_on, |wait| {
            let opened =
                weights::SharedWeights::open_after(&self.name, after, self.options(), wait);
            Ok(opened.map(|opened| owner_of(self.domain.path(), opened)))
        })
    }

    /// The version in this memory, as a Python object.
    fn object(self, py: Python<'_>, owner: Arc<MemoryOwner>) -> PyResult<Bound<'_, SharedWeights>> {
        let owner = hand_over(py, owner, drop)?;
        let weights = weights_of(&owner);
        let (opened, nbytes) = (weights.info().version, weights.info().bytes);
        let name = self.name.clone();
        let object = |handle| SharedWeights {
            handle,
            place: self,
            opened,
            nbytes,
        };
        Ok(CloseableHandle::object(py, "weights", &name, owner, object)?.into_bound(py))
    }
}

/// All tensors of one version of weights, mapped read only where they lie: nothing is copied.
///
/// ``warpipe.weights.open`` gives it. ``weights[name]`` is a ``View``: an array of any framework. The
/// memory stays mapped as long as this object, or a tensor or array of it, lives; meanwhile this
/// process is one of those that a new keeper takes the version over from. Opened again, a version
/// is the same memory.
#[pyclass(frozen, extends = Named, module = "warpipe.weights")]
#[derive(Debug)]
pub struct SharedWeights {
    handle: CloseableHandle<Arc<MemoryOwner>>,
    place: Place,
    /// The number of the version that was opened.
    opened: u64,
    /// The length of the memory that all tensors lie in, in one part or several.
    #[pyo3(get)]
    nbytes: u64,
}

impl SharedWeights {
    /// As the base of another version.
    pub fn as_base(&self) -> Outcome<weights::BaseVersion> {
        Ok(weights::BaseVersion::from(&self.now()?))
    }

    /// The version that lies in the memory now.
    fn now(&self) -> Outcome<weights::SharedWeights> {
        Ok(weights_of(&**self.handle.get()?))
    }

    fn find<R>(&self, name: &str, read: impl FnOnce(&TensorInfo) -> R) -> PyResult<R> {
        let found = self.now()?.tensor_info(name).map(read);
        found.ok_or_else(|| PyKeyError::new_err(name.to_owned()))
    }
}

#[pymethods]
impl SharedWeights {
    /// The number of the version: larger for later ones. A ``Follower`` changes it.
    #[getter]
    fn version(&self) -> u64 {
        match self.handle.get() {
            Ok(owner) => weights_of(&owner).info().version,
            // Closed: the one that was opened.
            Err(_) => self.opened,
        }
    }

    /// The device that they are mapped on.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.place.device)
    }

    /// The names of the tensors, in the order of their places in the memory.
    ///
    /// Raises ``ClosedError``.
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let weights = self.now()?;
        PyList::new(py, weights.tensors().iter().map(|tensor| &*tensor.name))
    }

    /// Where a tensor begins in the memory: a multiple of 512. The memory may have parts that are not
    /// mapped side by side. Two names of one tensor, as tied weights have them, begin at the same
    /// byte.
    ///
    /// Raises ``KeyError``, ``ClosedError``.
    fn offset(&self, name: &str) -> PyResult<u64> {
        self.find(name, |tensor| tensor.offset)
    }

    /// The hash of a tensor's bytes: 128 bits of XXH3. None if it has not been computed.
    ///
    /// Raises ``KeyError``, ``ClosedError``.
    fn content_hash<'py>(
        &self,
        py: Python<'py>,
        name: &str,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let hash = self.find(name, |tensor| tensor.hash)?;
        Ok(hash.map(|hash| PyBytes::new(py, &hash)))
    }

    /// When the publisher computes the content hashes: ``"device"``, ``"later"`` or ``"none"``.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn hash(&self) -> PyResult<&'static str> {
        Ok(self.now()?.info().hashing.name())
    }

    /// Whether each tensor had a content hash when these weights were opened.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn is_hashed(&self) -> PyResult<bool> {
        Ok(self.now()?.info().is_hashed)
    }

    /// What the publisher gave with the version, as JSON; empty if it gave nothing.
    fn _metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, self.now()?.info().metadata))
    }

    fn __getitem__(&self, py: Python<'_>, name: &str) -> PyResult<Py<View>> {
        let open = self.handle.get()?;
        let owner: Arc<MemoryOwner> = (**open).clone();
        let tensor = weights_of(&owner).tensor(name);
        let tensor = tensor.ok_or_else(|| PyKeyError::new_err(name.to_owned()))?;
        let memory = Memory {
            layout: tensor.info.layout,
            lowest: tensor.memory.ptr(),
            device: owner.memory().device(),
            read_only: true,
            hold: MemoryHolder::Owned(owner),
        };
        Py::new(py, View::over("the tensor", memory))
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> PyResult<bool> {
        let owner = self.handle.get()?;
        let Ok(name) = name.extract::<String>() else {
            return Ok(false);
        };
        Ok(weights_of(&owner).tensor_info(&name).is_some())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.now()?.tensors().len())
    }

    /// Opens the next version of the same name on the same device, waiting for it up to ``timeout``
    /// seconds (None: no limit), also while the keeper is replaced. Versions in between are left
    /// out. This version stays open as long as this object.
    ///
    /// Raises ``TimeoutError`` when none came, ``NotFoundError`` when there is no keeper, and as
    /// ``open``.
    #[pyo3(signature = (timeout = Limit::TEN), text_signature = "($self, timeout=10.0)")]
    fn newer<'py>(&self, py: Python<'py>, timeout: Limit) -> PyResult<Bound<'py, SharedWeights>> {
        let goes_on = || self.handle.get().map(drop);
        goes_on()?;
        let place = self.place.clone();
        let opened = place.open_after(py, self.version(), timeout.0, goes_on)?;
        place.object(py, opened.map_err(Fault::from)?)
    }

    /// Later versions come in at the addresses of this one: see ``Follower``.
    fn _follow(&self, py: Python<'_>) -> PyResult<()> {
        let owner: Arc<MemoryOwner> = (**self.handle.get()?).clone();
        py.detach(|| locked(&open_weights(&owner).0).claim());
        Ok(())
    }

    /// What ``update`` gives, and the seconds of each step.
    #[pyo3(signature = (stream = None, timeout = Limit::TEN), text_signature = "($self, stream=None, timeout=10.0)")]
    fn _update(
        &self,
        py: Python<'_>,
        stream: Given<'_, '_>,
        timeout: Limit,
    ) -> PyResult<(Option<u64>, Phases)> {
        let mut clock = PhaseClock::new();
        let owner: Arc<MemoryOwner> = (**self.handle.get()?).clone();
        let device = &self.place.device;
        let consumers = match stream {
            Some(stream) => vec![Consumer::from_argument(py, device, stream)?],
            None if is_cuda(device) => likely(py, device)?,
            None => Vec::new(),
        };
        let goes_on = || self.handle.get().map(drop);
        let open = open_weights(&owner);
        let now = open.now();
        let next = waiting(py, None, goes_on, |wait| Ok(now.hold_newer(&wait)))?;
        let next = match next {
            Err(error) if is_for_now(&error) => None,
            next => Some(next.map_err(Fault::from)?),
        };
        clock.end("ask");
        if next.is_none() && open.now().is_whole() {
            return Ok((None, clock.phases));
        }
        let start = Instant::now();
        let timeout = timeout.0;
        let left = || timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
        for consumer in &consumers {
            await_stream(py, &consumer.stream, left())?;
        }
        owner.settle(py, left())?;
        clock.end("streams");
        let own = call(py, || device.stream())?;
        let stream = consumers.first().map_or(&own, |it| &*it.stream);
        let mut cause = None;
        let taken = in_slices(py, left(), |slice| {
            let taken = open.take(next.as_ref(), stream, slice);
            none_if_late(taken.map_err(Fault::from), &mut cause)
        });
        clock.end("map");
        py.detach(|| drop(next));
        clock.end("close");
        let what = || "the former version".into();
        let taken = taken?.ok_or_else(|| late(cause.unwrap_or_else(what), timeout))?;
        Ok((taken, clock.phases))
    }
}

/// The versions of a name, offered to every process that asks: descriptors alone, without a device.
///
/// ``warpipe.weights.keep`` makes it. Closing it releases the name; processes that have the weights
/// open keep them, and the next keeper takes over what they have.
#[pyclass(frozen, extends = Named, module = "warpipe.weights")]
#[derive(Debug)]
pub struct Keeper {
    handle: CloseableHandle<weights::Keeper>,
    /// How many processes held a version when this keeper began, and did not answer it.
    #[pyo3(get)]
    unanswered: usize,
}

#[pymethods]
impl Keeper {
    /// The version that is offered; None before one is published.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn version(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.state()?.version))?)
    }

    /// The version that was taken over from another process. It is offered once ``verify`` has
    /// compared its content hashes; None if there is none.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn candidate(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.state()?.candidate))?)
    }
}

/// Weights that a keeper has taken: see ``warpipe.weights.publish``.
///
/// While it is open this process is one of those that a new keeper takes the version over from.
/// Closing it takes nothing back.
#[pyclass(frozen, extends = Named, module = "warpipe.weights")]
#[derive(Debug)]
pub struct PublishedWeights {
    handle: CloseableHandle<weights::PublishedWeights>,
    /// The number of the version.
    #[pyo3(get)]
    version: u64,
    /// The length of the memory that the tensors lie in.
    #[pyo3(get)]
    nbytes: u64,
    /// The bytes of the tensors that were copied: 0 if all were published where they lie.
    #[pyo3(get)]
    copied: u64,
}

impl PublishedWeights {
    /// A publication of these bytes, of which so many were copied.
    pub fn of(
        py: Python<'_>,
        name: &str,
        published: weights::PublishedWeights,
        nbytes: u64,
        copied: u64,
    ) -> PyResult<Py<PublishedWeights>> {
        let version = published.version;
        let object = |handle| PublishedWeights {
            handle,
            version,
            nbytes,
            copied,
        };
        CloseableHandle::object(py, "publication", name, published, object)
    }

    /// As the base of another version.
    pub fn as_base(&self) -> Outcome<weights::BaseVersion> {
        let published = self.handle.get()?;
        Ok(weights::BaseVersion::from(&**published))
    }
}

#[pymethods]
impl PublishedWeights {
    /// Whether each tensor has a content hash. Waits up to ``timeout`` seconds (None: no limit) for
    /// those that are computed later, until the keeper has them, too.
    ///
    /// Raises ``TimeoutError``; once, the error for which there will be none; ``ClosedError``.
    #[pyo3(signature = (timeout = Limit::TEN), text_signature = "($self, timeout=10.0)")]
    fn wait_for_hashes(&self, py: Python<'_>, timeout: Limit) -> PyResult<bool> {
        self.handle.wait(py, timeout.0, |published, wait| {
            published.wait_for_hashes(wait)
        })
    }
}

/// Opens a version after number ``after``, for a ``watch`` while that is open; with ``or_none`` None
/// if there is none for now.
#[pyfunction]
#[pyo3(signature = (name, device, domain, wait, after = 0, watch = None, or_none = false))]
pub fn _open_weights<'py>(
    py: Python<'py>,
    name: &str,
    device: Option<Device>,
    domain: Option<Domain>,
    wait: WaitLimit,
    after: u64,
    watch: Option<Py<Bare>>,
    or_none: bool,
) -> PyResult<Option<Bound<'py, SharedWeights>>> {
    let place = Place::of(name, device, domain)?;
    let goes_on = || watch.as_ref().map_or(Ok(()), |watch| watch.get().check());
    match place.open_after(py, after, wait.0, goes_on)? {
        Err(error) if or_none && is_for_now(&error) => Ok(None),
        opened => place.object(py, opened.map_err(Fault::from)?).map(Some),
    }
}

/// The number of a version after ``after``, waited for ``LOOK`` at most; None if there is none for now.
#[pyfunction]
pub fn _version_after(
    py: Python<'_>,
    name: &str,
    device: Option<Device>,
    domain: Option<Domain>,
    after: u64,
) -> PyResult<Option<u64>> {
    let place = Place::of(name, device, domain)?;
    let options = place.options();
    let found = py.detach(|| weights::SharedWeights::version_after(name, after, options, LOOK));
    match found {
        Err(error) if is_for_now(&error) => Ok(None),
        found => Ok(Some(found.map_err(Fault::from)?)),
    }
}

/// Claims a name, and asks the processes that hold a version of it.
#[pyfunction]
pub fn _keep_weights(
    py: Python<'_>,
    name: &str,
    domain: Option<Domain>,
    allow_uids: Vec<u32>,
    allow_gids: Vec<u32>,
) -> PyResult<Py<Keeper>> {
    let domain = Domain::or_usual(domain)?;
    let options = weights::KeeperOptions {
        allow_uids,
        allow_gids,
        ..domain.options()
    };
    let keeper = call(py, || weights::Keeper::new(name, options))?;
    let unanswered = keeper.state().map_err(Fault::from)?.unanswered;
    let object = |handle| Keeper { handle, unanswered };
    CloseableHandle::object(py, "keeper", name, keeper, object)
}

/// Compares the hashes of the version that a new keeper took over.
#[pyfunction]
pub fn _verify_weights(
    py: Python<'_>,
    name: &str,
    device: Option<Device>,
    domain: Option<Domain>,
    wait: WaitLimit,
) -> PyResult<u64> {
    let place = Place::of(name, device, domain)?;
    let options = place.options();
    let verify = |wait: Wait<'_>| weights::SharedWeights::verify(name, options, wait);
    awaited(py, wait.0, verify)
}
