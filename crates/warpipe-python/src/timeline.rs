//! Timelines.

use pyo3::prelude::*;
use warpipe::Wait;

use crate::detached::call;
use crate::device::Device;
use crate::domain::{Domain, creation, opened, place};
use crate::errors::Outcome;
use crate::handle::{CloseableHandle, Named};
use crate::stream::Consumer;
use crate::wait::{Given, HELD_UP, Limit, WaitLimit};

/// A named number that only grows: one process's streams signal it, other processes' streams wait
/// for it (``cuStreamWriteValue64``, ``cuStreamWaitValue64``), without a CPU wait.
///
/// ``Timeline.create(name)`` makes one at 0, ``Timeline.open(name)`` opens it in any process. When
/// its owner dies, streams that wait for a value that will never come are released, and ``check``
/// raises: call it before a result is used. ``close()`` of its owner also releases the name.
#[pyclass(frozen, extends = Named, module = "warpipe")]
#[derive(Debug)]
pub struct Timeline {
    handle: CloseableHandle<warpipe::Timeline>,
    /// The device of the streams that signal and wait.
    #[pyo3(get)]
    device: Device,
    /// Whether this handle may signal.
    #[pyo3(get)]
    is_owner: bool,
}

impl Timeline {
    fn new(
        py: Python<'_>,
        name: &str,
        device: Device,
        inner: warpipe::Timeline,
        is_owner: bool,
    ) -> PyResult<Py<Timeline>> {
        CloseableHandle::object(py, "timeline", name, inner, |handle| Timeline {
            handle,
            device,
            is_owner,
        })
    }
}

#[pymethods]
impl Timeline {
    /// The largest value that can be signalled or waited for.
    #[classattr]
    const VALUE_MAX: u64 = warpipe::Timeline::VALUE_MAX;

    /// Makes a timeline at 0 and takes its name. ``allow_uids``, ``allow_gids``: users and groups that
    /// may open it beside this process's own user.
    ///
    /// Raises ``InvalidNameError``, ``NameTakenError``, ``DomainError``, ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (name, *, domain = None, device = None, allow_uids = Vec::new(), allow_gids = Vec::new()),
        text_signature = "(name, *, domain=None, device=None, allow_uids=(), allow_gids=())")]
    fn create(
        py: Python<'_>,
        name: &str,
        domain: Option<Domain>,
        device: Option<Device>,
        allow_uids: Vec<u32>,
        allow_gids: Vec<u32>,
    ) -> PyResult<Py<Timeline>> {
        let (domain, device) = place(domain, device)?;
        let options = creation((&domain, &device), allow_uids, allow_gids);
        let made = call(py, || warpipe::Timeline::new(name, options))?;
        Timeline::new(py, name, device, made, true)
    }

    /// Opens a timeline up to ``wait`` seconds (None: no limit) until it exists.
    ///
    /// Raises ``NotFoundError``, ``OtherKindError``, ``AccessDeniedError``, ``HandshakeError``,
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
    ) -> PyResult<Py<Timeline>> {
        let open = |options, wait: Wait<'_>| warpipe::Timeline::open(name, options, wait);
        let (timeline, device) = opened(py, (domain, device), wait, open)?;
        Timeline::new(py, name, device, timeline, false)
    }

    /// The value now; the last one, when the owner is gone.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn value(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.value()))?)
    }

    /// Signals ``value`` after the work on ``stream`` so far, and returns at once; without a stream
    /// now, from the CPU.
    ///
    /// Raises ``RefusedError`` to all but the owner, ``ArgumentError`` (from the CPU also while a
    /// stream has yet to signal), ``TimeoutError`` after 10 s behind another thread's signal,
    /// ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (value, *, stream = None))]
    fn signal(&self, py: Python<'_>, value: u64, stream: Given<'_, '_>) -> PyResult<()> {
        self.handle.get()?;
        let consumer = Consumer::optional(py, &self.device, stream)?;
        self.handle.wait(py, Some(HELD_UP), |timeline, wait| {
            Outcome::Ok(match &consumer {
                Some(consumer) => timeline.signal(consumer.followed()?, value, wait),
                None => timeline.signal_now(value, wait),
            }?)
        })
    }

    /// Has ``stream`` wait for ``value``, and returns at once; without a stream the CPU waits, at
    /// most ``timeout`` seconds (None: no limit). Work of a stream after its wait is valid once
    /// ``check`` returns True.
    ///
    /// Raises ``PeerGoneError``, ``TimeoutError``, ``ArgumentError``, ``ClosedError``,
    /// ``DriverError``.
    #[pyo3(signature = (value, *, stream = None, timeout = Limit::TEN),
        text_signature = "($self, value, *, stream=None, timeout=10.0)")]
    fn wait(
        &self,
        py: Python<'_>,
        value: u64,
        stream: Given<'_, '_>,
        timeout: Limit,
    ) -> PyResult<()> {
        let timeline = self.handle.get()?;
        if let Some(stream) = stream {
            let consumer = Consumer::from_argument(py, &self.device, stream)?;
            call(py, || timeline.wait(consumer.linked(), value))?;
            return Ok(consumer.lead(py)?);
        }
        self.handle.wait(py, timeout.0, |timeline, wait| {
            timeline.wait_host(value, wait)
        })
    }

    /// Whether ``value`` has been reached; False if it may still be.
    ///
    /// Raises ``PeerGoneError`` if it never will be; ``ClosedError``.
    fn check(&self, py: Python<'_>, value: u64) -> PyResult<bool> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.check(value)?))?)
    }
}
