//! Semaphores and their permits.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use warpipe::{Error, OptionalExtension, Wait};

use crate::detached::{DropDetached, call};
use crate::device::Device;
use crate::domain::{Domain, creation, opened, place};
use crate::errors::{Fault, Outcome};
use crate::handle::{CloseableHandle, Named};
use crate::process::Home;
use crate::stream::Consumer;
use crate::wait::{Given, Limit, WaitLimit};

/// A limit of concurrent holders, across processes, on streams and on the CPU.
///
/// ``Semaphore.create(name, permits)`` makes one, ``Semaphore.open(name)`` opens it in any process.
/// ``with sem.acquire(stream=stream):`` holds a permit for the work that the block gives to ``stream``:
/// the next holder's stream waits for that work on the device. Permits are granted in order of
/// arrival. A holder's permit comes back when it dies. ``close()`` of its creator ends it, once the
/// permits of this process are back.
#[pyclass(frozen, extends = Named, module = "warpipe")]
#[derive(Debug)]
pub struct Semaphore {
    handle: CloseableHandle<warpipe::Semaphore>,
    /// The device of the streams that take permits.
    #[pyo3(get)]
    device: Device,
}

/// A held permit, as ``Semaphore.acquire`` gives it: released at the end of a ``with`` block, or
/// when it is dropped.
///
/// It is released after the work of the stream that it was acquired on, or at once if it was
/// acquired on the CPU.
#[pyclass(frozen, module = "warpipe", weakref)]
#[derive(Debug)]
pub struct Permit {
    device: Device,
    /// How many permits went to others during the wait for this one.
    #[pyo3(get)]
    passed: u64,
    /// Closed once it is released, also by the end of the program.
    handle: CloseableHandle<HeldPermit>,
}

/// A permit until it is released, after the work of its consumer; one of the CPU has none, and is
/// released at once.
#[derive(Debug)]
struct HeldPermit {
    home: Home,
    consumer: Option<Consumer>,
    /// `None` once it is released.
    permit: Option<warpipe::Permit>,
}

impl HeldPermit {
    fn give_back(&mut self) -> Outcome<()> {
        match (self.permit.take(), &self.consumer) {
            // If the stream cannot be followed, the permit is dropped, which releases it after the
            // linked one.
            (Some(permit), Some(consumer)) => permit.release(consumer.followed()?)?,
            (Some(permit), None) => permit.release_now(),
            (None, _) => {}
        }
        Ok(())
    }
}

impl Drop for HeldPermit {
    fn drop(&mut self) {
        if self.home.is_here() {
            // No caller is left to get the error.
            let _ = self.give_back();
        }
    }
}

impl Semaphore {
    fn new(
        py: Python<'_>,
        name: &str,
        inner: warpipe::Semaphore,
        device: Device,
    ) -> PyResult<Py<Semaphore>> {
        let object = |handle| Semaphore { handle, device };
        CloseableHandle::object(py, "semaphore", name, inner, object)
    }

    fn permit(
        &self,
        py: Python<'_>,
        inner: warpipe::Permit,
        consumer: Option<Consumer>,
    ) -> PyResult<Permit> {
        let passed = inner.passed;
        let held = DropDetached::new(HeldPermit {
            home: Home::here(),
            consumer,
            permit: Some(inner),
        });
        if let Some(consumer) = &held.consumer {
            consumer.lead(py)?;
        }
        Ok(Permit {
            device: self.device.clone(),
            passed,
            handle: CloseableHandle::new("permit", "", held.into_inner())?,
        })
    }
}

fn take(
    semaphore: &warpipe::Semaphore,
    consumer: Option<&Consumer>,
    wait: Wait<'_>,
) -> Result<warpipe::Permit, Error> {
    match consumer {
        Some(consumer) => semaphore.acquire(consumer.linked(), wait),
        None => semaphore.acquire_host(wait),
    }
}

#[pymethods]
impl Semaphore {
    /// Makes a semaphore of ``permits`` permits (1 to 1024), all free, and takes its name.
    /// ``allow_uids``, ``allow_gids``: users and groups that may open it beside this process's own
    /// user. Every member can write its counters, so admit users whose use of it you trust.
    ///
    /// Raises ``ArgumentError``, ``InvalidNameError``, ``NameTakenError``, ``DomainError``,
    /// ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (name, permits = 1, *, domain = None, device = None, allow_uids = Vec::new(), allow_gids = Vec::new()),
        text_signature = "(name, permits=1, *, domain=None, device=None, allow_uids=(), allow_gids=())")]
    fn create(
        py: Python<'_>,
        name: &str,
        permits: u32,
        domain: Option<Domain>,
        device: Option<Device>,
        allow_uids: Vec<u32>,
        allow_gids: Vec<u32>,
    ) -> PyResult<Py<Semaphore>> {
        let (domain, device) = place(domain, device)?;
        let options = creation((&domain, &device), allow_uids, allow_gids);
        let made = call(py, || warpipe::Semaphore::new(name, permits, options))?;
        Semaphore::new(py, name, made, device)
    }

    /// Opens the semaphore of this name, waiting up to ``wait`` seconds (None: no limit) until it
    /// exists.
    ///
    /// Raises ``NotFoundError``, ``OtherKindError``, ``AccessDeniedError``, ``RefusedError``,
    /// ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (name, *, domain = None, device = None, wait = WaitLimit::ZERO),
        text_signature = "(name, *, domain=None, device=None, wait=0.0)")]
    fn open(
        py: Python<'_>,
        name: &str,
        domain: Option<Domain>,
        device: Option<Device>,
        wait: WaitLimit,
    ) -> PyResult<Py<Semaphore>> {
        let open = |options, wait: Wait<'_>| warpipe::Semaphore::open(name, options, wait);
        let (inner, device) = opened(py, (domain, device), wait, open)?;
        Semaphore::new(py, name, inner, device)
    }

    /// How many permits there are.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn permits(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.state().permits))?)
    }

    /// How many are free at this moment, for display only.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn available(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.state().available))?)
    }

    /// How many wait at this moment, for display only.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn waiting(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.state().waiting))?)
    }

    /// Waits up to ``timeout`` seconds (None: no limit) for a permit. With ``stream``, that stream
    /// waits on the device for the last holder's work; without, the CPU does.
    ///
    /// Raises ``TimeoutError``, ``PeerGoneError``, ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (timeout = Limit::TEN, *, stream = None), text_signature = "($self, timeout=10.0, *, stream=None)")]
    fn acquire(&self, py: Python<'_>, timeout: Limit, stream: Given<'_, '_>) -> PyResult<Permit> {
        let consumer = Consumer::optional(py, &self.device, stream)?;
        let take = |semaphore: &_, wait: Wait<'_>| take(semaphore, consumer.as_ref(), wait);
        let permit = self.handle.wait(py, timeout.0, take)?;
        self.permit(py, permit, consumer)
    }

    /// Takes a permit if one is free and none waits for it, else gives None.
    ///
    /// Raises as ``acquire``, without the timeout.
    #[pyo3(signature = (*, stream = None))]
    fn try_acquire(&self, py: Python<'_>, stream: Given<'_, '_>) -> PyResult<Option<Permit>> {
        let semaphore = self.handle.get()?;
        let consumer = Consumer::optional(py, &self.device, stream)?;
        let look = || take(&semaphore, consumer.as_ref(), Duration::ZERO.into()).optional();
        let taken = call(py, look)?;
        let permit = taken.map(|permit| self.permit(py, permit, consumer));
        permit.transpose()
    }
}

impl Permit {
    /// Releases it, after the work of the consumer that is chosen; nothing if it has been released.
    fn end(
        &self,
        py: Python<'_>,
        choose: impl FnOnce(Option<Consumer>) -> Option<Consumer> + Send,
    ) -> PyResult<()> {
        // No call has it longer than this one.
        let Some(held) = self.handle.take()?.and_then(Arc::into_inner) else {
            return Ok(());
        };
        Ok(py.detach(|| {
            let mut held = held.into_inner();
            held.consumer = choose(held.consumer.take());
            held.give_back()
        })?)
    }
}

#[pymethods]
impl Permit {
    /// Whether it has been released.
    #[getter]
    fn released(&self) -> PyResult<bool> {
        Ok(self.handle.is_closed()?)
    }

    /// Releases it after the work on ``stream`` so far, by default the stream that it was acquired
    /// on, and returns at once. Releasing twice is no error.
    ///
    /// Raises ``ArgumentError`` for a stream of another device, ``DriverError``.
    #[pyo3(signature = (*, stream = None))]
    fn release(&self, py: Python<'_>, stream: Given<'_, '_>) -> PyResult<()> {
        let asked = Consumer::optional(py, &self.device, stream)?;
        self.end(py, |own| asked.or(own))
    }

    /// Releases it now: the next holder does not wait for this holder's device work. Releasing
    /// twice is no error.
    fn release_now(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py, |_| None)
    }

    fn __enter__(slf: Py<Permit>) -> PyResult<Py<Permit>> {
        if slf.get().handle.is_closed()? {
            return Err(Fault::released("the permit").into());
        }
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py, None)
    }

    fn __repr__(&self) -> String {
        format!("Permit({})", *self.device)
    }
}
