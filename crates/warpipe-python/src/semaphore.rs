//! Semaphores and their permits.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use warpipe::{Error, OptionalExtension, Wait};

use crate::closeable::Named;
use crate::detached::{DropDetached, call, detached};
use crate::device::Device;
use crate::domain::{Domain, opened, place};
use crate::errors::{Fault, Outcome};
use crate::handle::CloseableHandle;
use crate::interpreter_exit::{Endpoint, close_at_exit};
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
    device: warpipe::Device,
}

/// A held permit, as ``Semaphore.acquire`` gives it: released at the end of a ``with`` block, or
/// when it is dropped.
///
/// It is released after the work of the stream that it was acquired on, or at once if it was
/// acquired on the CPU.
#[pyclass(frozen, module = "warpipe", weakref)]
#[derive(Debug)]
pub struct Permit {
    home: Home,
    device: warpipe::Device,
    /// How many permits went to others during the wait for this one.
    #[pyo3(get)]
    passed: u64,
    held: Arc<HeldPermit>,
}

/// What the end of the program releases, too, whatever holds the permit then.
#[derive(Debug)]
struct HeldPermit {
    /// The stream that it was acquired on; none for the CPU.
    consumer: Option<Consumer>,
    /// `None` once it is released.
    inner: Mutex<Option<DropDetached<warpipe::Permit>>>,
}

impl HeldPermit {
    fn lock(&self) -> MutexGuard<'_, Option<DropDetached<warpipe::Permit>>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Endpoint for HeldPermit {
    fn end(&self, py: Python<'_>) {
        let permit = self.lock().take();
        // No caller is left to get the error.
        let _ = py.detach(|| {
            permit.map_or(Ok(()), |permit| {
                Permit::give_back(permit, self.consumer.as_ref())
            })
        });
    }

    fn is_closed(&self) -> bool {
        self.lock().is_none()
    }

    fn is_over(&self) -> bool {
        self.is_closed()
    }
}

impl Semaphore {
    fn new(
        py: Python<'_>,
        name: &str,
        inner: warpipe::Semaphore,
        device: warpipe::Device,
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
        let inner = DropDetached::new(inner);
        if let Some(consumer) = &consumer {
            consumer.lead(py)?;
        }
        let passed = inner.passed;
        let inner = Mutex::new(Some(inner));
        let held = Arc::new(HeldPermit { consumer, inner });
        close_at_exit(&held)?;
        Ok(Permit {
            home: Home::here(),
            device: self.device.clone(),
            passed,
            held,
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
        let made = call(py, || {
            let options = warpipe::CreateOptions {
                allow_uids,
                allow_gids,
                ..domain.on(&device)
            };
            warpipe::Semaphore::new(name, permits, options)
        })?;
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

    /// The device of the streams that take permits.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.device)
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
        let permit = self.handle.wait(py, timeout, take)?;
        self.permit(py, permit, consumer)
    }

    /// Takes a permit if one is free and none waits for it, else gives None.
    ///
    /// Raises as ``acquire``, without the timeout.
    #[pyo3(signature = (*, stream = None))]
    fn try_acquire(&self, py: Python<'_>, stream: Given<'_, '_>) -> PyResult<Option<Permit>> {
        let (semaphore, consumer) = (
            self.handle.get()?,
            Consumer::optional(py, &self.device, stream)?,
        );
        let taken = py.detach(|| take(&semaphore, consumer.as_ref(), Duration::ZERO.into()));
        taken
            .optional()
            .map_err(Fault::from)?
            .map(|permit| self.permit(py, permit, consumer))
            .transpose()
    }
}

impl Permit {
    fn lock(&self) -> Outcome<MutexGuard<'_, Option<DropDetached<warpipe::Permit>>>> {
        self.home.check()?;
        Ok(self.held.lock())
    }

    /// Releases it after the consumer's work; a permit of the CPU at once. Call without the
    /// interpreter.
    fn give_back(
        permit: DropDetached<warpipe::Permit>,
        consumer: Option<&Consumer>,
    ) -> Outcome<()> {
        match consumer {
            // If the stream cannot be followed, the permit is dropped, which releases it after the
            // linked one.
            Some(consumer) => Ok(permit.into_inner().release(consumer.followed()?)?),
            None => {
                permit.into_inner().release_now();
                Ok(())
            }
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if !self.home.is_here() {
            return;
        }
        if let Some(permit) = self.held.lock().take() {
            // No caller is left to get the error.
            let _ = detached(|| Permit::give_back(permit, self.held.consumer.as_ref()));
        }
    }
}

#[pymethods]
impl Permit {
    /// Whether it has been released.
    #[getter]
    fn released(&self) -> PyResult<bool> {
        Ok(self.lock()?.is_none())
    }

    /// Releases it after the work on ``stream`` so far, by default the stream that it was acquired
    /// on, and returns at once. Releasing twice is no error.
    ///
    /// Raises ``ArgumentError`` for a stream of another device, ``DriverError``.
    #[pyo3(signature = (*, stream = None))]
    fn release(&self, py: Python<'_>, stream: Given<'_, '_>) -> PyResult<()> {
        let asked = Consumer::optional(py, &self.device, stream)?;
        let Some(permit) = self.lock()?.take() else {
            return Ok(());
        };
        let consumer = asked.as_ref().or(self.held.consumer.as_ref());
        Ok(py.detach(|| Permit::give_back(permit, consumer))?)
    }

    /// Releases it now: the next holder does not wait for this holder's device work. Releasing
    /// twice is no error.
    fn release_now(&self, py: Python<'_>) -> PyResult<()> {
        let permit = self.lock()?.take();
        py.detach(|| permit.map(|permit| permit.into_inner().release_now()));
        Ok(())
    }

    fn __enter__(slf: Py<Permit>) -> PyResult<Py<Permit>> {
        if slf.get().lock()?.is_none() {
            return Err(Fault::released("the permit").into());
        }
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py, None)
    }

    fn __repr__(&self) -> String {
        format!("Permit({})", self.device)
    }
}
