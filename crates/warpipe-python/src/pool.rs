//! Pools and their blocks.

use std::collections::HashMap;

use pyo3::prelude::*;
use warpipe::Wait;

use crate::detached::call;
use crate::device::Device;
use crate::domain::{Domain, opened, place};
use crate::errors::Outcome;
use crate::handle::{CloseableHandle, Named};
use crate::memory_owner::OwnedMemory;
use crate::shared_memory::{Ticket, access};
use crate::tuples::{Info, pool_usage};
use crate::view::View;
use crate::wait::{Limit, WaitLimit, awaited};

/// Memory that is lent in blocks, to this process and to others.
///
/// ``Pool.create(name)`` makes one, of at most ``memory_limit`` bytes of device memory, allocated
/// as needed; ``reserve`` bytes at once. Peers open blocks by ticket (``Buffer.lend``,
/// ``LentBuffer.open``), or allocate themselves (``PoolClient``). A block is reused when its owner
/// and all its borrowers have released it and their streams are past it. ``close()`` releases the
/// name; held blocks stay valid until they are released.
///
/// ``allow_uids``, ``allow_gids``: users and groups that may connect beside this process's own user.
/// Each user gets regions of its own. ``user_quota`` is the ``Quota`` of each of them but the pool's
/// own, ``quotas`` maps single users to theirs.
#[pyclass(frozen, extends = Named, module = "warpipe")]
#[derive(Debug)]
pub struct Pool {
    handle: CloseableHandle<warpipe::Pool>,
    /// Its device.
    #[pyo3(get)]
    device: Device,
}

/// Bytes and blocks of a quota, each without a limit if None.
type QuotaArgument = (Option<u64>, Option<u32>);

fn quota_of((bytes, blocks): QuotaArgument) -> warpipe::Quota {
    warpipe::Quota {
        bytes: bytes.unwrap_or(u64::MAX),
        blocks: blocks.unwrap_or(u32::MAX),
    }
}

#[pymethods]
impl Pool {
    /// Makes a pool and takes its name.
    ///
    /// Raises ``InvalidNameError``, ``NameTakenError``, ``DomainError``, ``MemoryLimitError``,
    /// ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (name, *, domain = None, device = None, memory_limit = 4 << 30, reserve = 0, peers_max = 256,
        allow_uids = Vec::new(), allow_gids = Vec::new(), user_quota = (None, None), quotas = HashMap::new()),
        text_signature = "(name, *, domain=None, device=None, memory_limit=4294967296, reserve=0, peers_max=256, \
        allow_uids=(), allow_gids=(), user_quota=(None, None), quotas={})")]
    fn create(
        py: Python<'_>,
        name: &str,
        domain: Option<Domain>,
        device: Option<Device>,
        memory_limit: u64,
        reserve: u64,
        peers_max: u32,
        allow_uids: Vec<u32>,
        allow_gids: Vec<u32>,
        user_quota: QuotaArgument,
        quotas: HashMap<u32, QuotaArgument>,
    ) -> PyResult<Py<Pool>> {
        let (domain, device) = place(domain, device)?;
        let quotas = quotas.into_iter();
        let quotas = quotas.map(|(uid, quota)| (uid, quota_of(quota)));
        let options = warpipe::PoolOptions {
            memory_limit,
            reserve,
            peers_max,
            allow_uids,
            allow_gids,
            user_quota: quota_of(user_quota),
            quota_for: quotas.collect(),
            ..domain.on(&device)
        };
        let pool = call(py, || warpipe::Pool::new(name, options))?;
        let object = |handle| Pool { handle, device };
        CloseableHandle::object(py, "pool", name, pool, object)
    }

    /// A free block of ``nbytes`` bytes, waiting up to ``timeout`` seconds (None: no limit) for
    /// releases. With ``uid`` it lies in a region of that user, whose processes alone can open its
    /// ticket, and counts against that user's quota.
    ///
    /// Raises ``MemoryLimitError``, ``QuotaExceededError``, ``DeviceMemoryError``, ``ArgumentError`` for 0 bytes,
    /// ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (nbytes, timeout = Limit::ZERO, *, uid = None), text_signature = "($self, nbytes, timeout=0.0, *, uid=None)")]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        nbytes: u64,
        timeout: Limit,
        uid: Option<u32>,
    ) -> PyResult<Bound<'py, Buffer>> {
        let block = self.handle.wait(py, timeout.0, |pool, wait| match uid {
            Some(uid) => pool.allocate_for(uid, nbytes, wait),
            None => pool.allocate(nbytes, wait),
        })?;
        View::object(py, "the block", OwnedMemory::Block(block), Buffer)
    }

    /// The part of the pool that the user ``uid`` has, and its quota.
    ///
    /// Raises ``ClosedError``.
    fn usage<'py>(&self, py: Python<'py>, uid: u32) -> PyResult<Bound<'py, PyAny>> {
        let usage = py.detach(|| Outcome::Ok(self.handle.get()?.usage(uid)))?;
        pool_usage(py, usage)
    }

    /// The present state.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn stats(&self, py: Python<'_>) -> PyResult<Info<warpipe::PoolStats>> {
        let stats = py.detach(|| Outcome::Ok(self.handle.get()?.stats()))?;
        Ok(Info(stats))
    }
}

/// A block of a pool of this process: a ``View`` of its bytes. Once it is released or dropped, the
/// pool reuses it when the streams of its arrays are past it, and all borrowing peers have released
/// it, too.
#[pyclass(frozen, extends = View, module = "warpipe")]
#[derive(Debug)]
pub struct Buffer;

#[pymethods]
impl Buffer {
    /// A ticket with which peers may open this block (``LentBuffer.open``), for writing only if
    /// ``writable``. The ticket is valid until the block is released here; peers that have opened
    /// it by then keep it.
    ///
    /// Raises ``PeerGoneError`` when the pool is closed, ``ReleasedError``.
    #[pyo3(signature = (*, writable = false))]
    fn lend(slf: &Bound<'_, Buffer>, writable: bool) -> PyResult<Ticket> {
        let owner = slf.as_super().get().owner()?;
        let OwnedMemory::Block(block) = owner.memory() else {
            unreachable!("a Buffer holds a block")
        };
        let inner = call(slf.py(), || block.lend(access(writable)))?;
        Ok(Ticket { inner })
    }
}

/// A connection to a pool of another process: ``PoolClient.open(name)``. Its blocks stay valid after
/// ``close()``.
#[pyclass(frozen, extends = Named, module = "warpipe")]
#[derive(Debug)]
pub struct PoolClient {
    handle: CloseableHandle<warpipe::PoolClient>,
}

#[pymethods]
impl PoolClient {
    /// Connects to the pool of this name, waiting up to ``wait`` seconds (None: no limit) until it
    /// exists.
    ///
    /// Raises ``NotFoundError``, ``OtherKindError``, ``AccessDeniedError``, ``RefusedError``,
    /// ``InvalidNameError``.
    #[staticmethod]
    #[pyo3(signature = (name, *, domain = None, device = None, wait = WaitLimit::ZERO),
        text_signature = "(name, *, domain=None, device=None, wait=0.0)")]
    fn open(
        py: Python<'_>,
        name: &str,
        domain: Option<Domain>,
        device: Option<Device>,
        wait: WaitLimit,
    ) -> PyResult<Py<PoolClient>> {
        let open = |options, wait: Wait<'_>| warpipe::PoolClient::open(name, options, wait);
        let (client, _) = opened(py, (domain, device), wait, open)?;
        let object = |handle| PoolClient { handle };
        CloseableHandle::object(py, "visit to the pool", name, client, object)
    }

    /// Whether the owner has closed the pool, or has died. Its blocks stay valid.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn is_owner_gone(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.is_owner_gone()))?)
    }

    /// A block of ``nbytes`` bytes of the owner's memory, for reading and writing, waiting up to
    /// ``timeout`` seconds (None: no limit) for releases.
    ///
    /// Raises ``MemoryLimitError``, ``QuotaExceededError``, ``PeerGoneError``, ``RefusedError``, ``ArgumentError``,
    /// ``ClosedError``, ``DeviceError``.
    #[pyo3(signature = (nbytes, timeout = Limit::ZERO), text_signature = "($self, nbytes, timeout=0.0)")]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        nbytes: u64,
        timeout: Limit,
    ) -> PyResult<Bound<'py, LentBuffer>> {
        let handle = &self.handle;
        let block = handle.wait(py, timeout.0, |client, wait| client.allocate(nbytes, wait))?;
        LentBuffer::make(py, block)
    }
}

/// A block of another process's pool: a ``View`` of its bytes. Once it is released or dropped, the
/// owner reuses it when the streams of its arrays are past it. It stays valid when its owner closes
/// the pool, or dies.
#[pyclass(frozen, extends = View, module = "warpipe")]
#[derive(Debug)]
pub struct LentBuffer {
    /// The pool's name.
    #[pyo3(get)]
    name: String,
}

impl LentBuffer {
    fn make(py: Python<'_>, block: warpipe::LentBuffer) -> PyResult<Bound<'_, LentBuffer>> {
        let name = block.name.to_string();
        let memory = OwnedMemory::Lent(block);
        View::object(py, "the block", memory, LentBuffer { name })
    }
}

#[pymethods]
impl LentBuffer {
    /// Opens the block of a ticket of ``Buffer.lend``.
    ///
    /// Raises ``TicketExpiredError``, ``HandleError``, ``OtherKindError``, ``AccessDeniedError``,
    /// ``RefusedError``, ``PeerGoneError``, ``TimeoutError``, ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (ticket, *, device = None))]
    fn open<'py>(
        py: Python<'py>,
        ticket: &Bound<'py, PyAny>,
        device: Option<Device>,
    ) -> PyResult<Bound<'py, LentBuffer>> {
        let ticket = Ticket::from_argument(ticket)?;
        let device = Device::or_preferred(device);
        let open = |wait: Wait<'_>| warpipe::LentBuffer::open(&ticket, &device, wait);
        let block = awaited(py, None, open)?;
        LentBuffer::make(py, block)
    }
}
