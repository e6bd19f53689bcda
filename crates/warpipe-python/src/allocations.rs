//! Memory of other libraries, shared with other processes: what `warpipe.torch` is made of.
//! **This module is marked for unsafe**: it shares memory by address.

use std::collections::BTreeMap;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple};
use warpipe::{Access, Wait};

use crate::detached::call;
use crate::device::Device;
use crate::domain::{Domain, opened, place};
use crate::errors::Outcome;
use crate::handle::{Closeable, CloseableHandle, Named};
use crate::interpreter_exit::LibraryHeld;
use crate::memory_owner::{MemoryOwner, OwnedMemory};
use crate::process::Home;
use crate::stream::Consumer;
use crate::torch_allocator;
use crate::view::View;
use crate::wait::{Given, Limit, WaitLimit, hand_over};

/// Shares memory that other libraries allocate in this process, for ``warpipe.torch``.
#[pyclass(frozen, extends = Named, module = "warpipe._warpipe", name = "_AllocationServer")]
#[derive(Debug)]
pub struct AllocationServer {
    handle: CloseableHandle<warpipe::AllocationServer>,
}

#[pymethods]
impl AllocationServer {
    #[new]
    fn new(
        py: Python<'_>,
        name: &str,
        device: Device,
        domain: Option<Domain>,
    ) -> PyResult<PyClassInitializer<AllocationServer>> {
        let (domain, device) = place(domain, Some(device))?;
        let build = || warpipe::AllocationServer::new(name, domain.on(&device));
        let server = call(py, build)?;
        let handle = CloseableHandle::new("server of allocations", name, server)?;
        let base = handle.named();
        Ok(base.add_subclass(AllocationServer { handle }))
    }

    /// Shares ``nbytes`` bytes at ``address``, complete behind the work of ``stream`` so far, and
    /// returns the number that one other process opens: for reading alone, if the memory is of
    /// ``warpipe.torch.pool()``. ``owner`` keeps the memory allocated: it is referenced until the
    /// share is over.
    ///
    /// Raises ``NotExportableError``, ``ArgumentError``, ``HandleError``, ``CapturingError``,
    /// ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (address, nbytes, owner, *, stream))]
    fn share(
        &self,
        py: Python<'_>,
        address: u64,
        nbytes: u64,
        owner: Py<PyAny>,
        stream: Given<'_, '_>,
    ) -> PyResult<u64> {
        let server = self.handle.get()?;
        let stream = match stream {
            Some(stream) => {
                let consumer = Consumer::from_argument(py, server.device(), stream)?;
                Some(consumer.follow(py)?.clone())
            }
            None => None,
        };
        let owner = Box::new(LibraryHeld::new(owner));
        let share = || -> Outcome<u64> {
            let stream = match stream {
                Some(stream) => stream,
                None => server.device().stream()?,
            };
            let access = match torch_allocator::has(address) {
                true => Access::Read,
                false => Access::ReadWrite,
            };
            // SAFETY: the caller of this private class passes the object that keeps the memory.
            Ok(unsafe { server.share(&stream, address, nbytes, access, owner) }?)
        };
        let number = py.detach(share)?;
        hand_over(py, number, |unused| {
            let _ = py.detach(|| server.withdraw(unused));
        })
    }

    /// Takes back a share that no process has opened. False if it was opened or withdrawn.
    ///
    /// Raises ``ClosedError``.
    fn withdraw(&self, py: Python<'_>, number: u64) -> PyResult<bool> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.withdraw(number)?))?)
    }

    /// Whether a process has opened the share: False while it waits for one, or the process for its
    /// contents, None once it is over.
    ///
    /// Raises ``ClosedError``.
    fn is_opened(&self, py: Python<'_>, number: u64) -> PyResult<Option<bool>> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.is_opened(number)?))?)
    }

    /// The present numbers, by their names in the Rust library's ``AllocationStats``.
    ///
    /// Raises ``ClosedError``.
    fn stats(&self, py: Python<'_>) -> PyResult<BTreeMap<&'static str, u64>> {
        let stats = py.detach(|| Outcome::Ok(self.handle.get()?.stats()))?;
        Ok(BTreeMap::from([
            ("unclaimed", stats.unclaimed as u64),
            ("claimed", stats.claimed as u64),
            ("bytes", stats.bytes),
            ("runs", stats.runs as u64),
            ("clients", stats.clients as u64),
        ]))
    }
}

/// Opens what an ``_AllocationServer`` of another process shares.
#[pyclass(frozen, extends = Closeable, module = "warpipe._warpipe", name = "_AllocationClient")]
#[derive(Debug)]
pub struct AllocationClient {
    handle: CloseableHandle<warpipe::AllocationClient>,
}

#[pymethods]
impl AllocationClient {
    #[new]
    fn new(
        py: Python<'_>,
        name: &str,
        device: Device,
        domain: Option<Domain>,
    ) -> PyResult<PyClassInitializer<AllocationClient>> {
        let open = |options, wait: Wait<'_>| warpipe::AllocationClient::open(name, options, wait);
        let (client, _) = opened(py, (domain, Some(device)), WaitLimit::ZERO, open)?;
        let handle = CloseableHandle::new("client of allocations", name, client)?;
        let base = handle.base();
        Ok(base.add_subclass(AllocationClient { handle }))
    }

    /// Whether the server has closed, or its process has died.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn is_owner_gone(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.is_owner_gone()))?)
    }

    /// Opens a share, once its contents are complete, waiting at most ``timeout`` seconds.
    ///
    /// Raises ``NotFoundError``, ``TimeoutError``, ``PeerGoneError``, ``ArgumentError``,
    /// ``DeviceError``, ``HandleError``, ``SystemCallError``, ``DriverError``.
    fn open<'py>(
        &self,
        py: Python<'py>,
        number: u64,
        timeout: Limit,
    ) -> PyResult<Bound<'py, OpenAllocation>> {
        let handle = &self.handle;
        let opened = handle.wait(py, timeout.0, |client, wait| {
            client.open_share(number, wait)
        })?;
        let memory = OwnedMemory::Lent(opened);
        View::object(py, "the allocation", memory, OpenAllocation)
    }
}

/// Memory of another process's library: a ``View`` of its bytes, released there when the last array
/// of it is dropped and their streams are past their work.
#[pyclass(frozen, extends = View, module = "warpipe._warpipe", name = "_OpenAllocation")]
#[derive(Debug)]
pub struct OpenAllocation;

#[pymethods]
impl OpenAllocation {
    /// A check of this memory, which does not hold it: raises ``PeerGoneError`` if the memory went
    /// with its owner.
    fn watch<'py>(slf: &Bound<'py, OpenAllocation>) -> PyResult<Bound<'py, PyCFunction>> {
        let (home, owner) = (Home::here(), slf.as_super().get().owner()?);
        let owner = Arc::downgrade(&owner);
        let check = move |arguments: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
            home.check()?;
            call(arguments.py(), || {
                match owner.upgrade().as_deref().map(MemoryOwner::memory) {
                    Some(OwnedMemory::Lent(memory)) => memory.check(),
                    _ => Ok(()),
                }
            })
        };
        PyCFunction::new_closure(slf.py(), None, None, check)
    }
}
