//! Interprocess events and their handles.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use warpipe::{OpenOptions, Wait};

use crate::detached::call;
use crate::device::Device;
use crate::domain::{Domain, creation, place};
use crate::errors::Outcome;
use crate::handle::{Closeable, CloseableHandle};
use crate::legacy::parsed;
use crate::stream::Consumer;
use crate::wait::{HELD_UP, Limit, awaited};

/// An interprocess event (``cuEventCreate`` with ``CU_EVENT_INTERPROCESS``). It distinguishes never
/// recorded, and lost with its recorder, from complete.
///
/// ``Event.create()`` makes one; its ``handle()`` opens it in other processes, which may record it,
/// too.
#[pyclass(frozen, extends = Closeable, module = "warpipe")]
#[derive(Debug)]
pub struct Event {
    handle: CloseableHandle<warpipe::Event>,
    /// The device it was made or opened with.
    #[pyo3(get)]
    device: Device,
}

/// One recording of an event, for ``Event.check``.
#[pyclass(frozen, module = "warpipe", eq, hash, str = "Recording({inner})")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Recording {
    inner: warpipe::Recording,
}

/// Names an event to other processes. It goes as text (``str(handle)``), as bytes, or pickled.
///
/// ``EventHandle(text_or_bytes)`` raises ``HandleError`` if the argument is no handle.
#[pyclass(frozen, module = "warpipe", eq, str = "{inner}")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventHandle {
    inner: warpipe::EventHandle,
}

impl EventHandle {
    fn from_argument(found: &Bound<'_, PyAny>) -> PyResult<warpipe::EventHandle> {
        match found.cast::<EventHandle>() {
            Ok(handle) => Ok(handle.get().inner.clone()),
            Err(_) => parsed(found, "EventHandle", warpipe::EventHandle::from_bytes),
        }
    }
}

#[pymethods]
impl EventHandle {
    #[new]
    fn new(handle: &Bound<'_, PyAny>) -> PyResult<EventHandle> {
        let inner = EventHandle::from_argument(handle)?;
        Ok(EventHandle { inner })
    }

    /// As bytes, of no fixed length.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.to_bytes())
    }

    /// The 64 bytes of ``cuIpcGetEventHandle``, to open the event without this library; None on the
    /// host.
    #[getter]
    fn ipc_bytes<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.inner.ipc_bytes().map(|bytes| PyBytes::new(py, &bytes))
    }
}

impl Event {
    fn new(py: Python<'_>, inner: warpipe::Event) -> PyResult<Py<Event>> {
        let device = Device::of(inner.device());
        let handle = CloseableHandle::new("event", "", inner)?;
        let base = handle.base();
        Py::new(py, base.add_subclass(Event { handle, device }))
    }
}

#[pymethods]
impl Event {
    /// Makes an event. ``allow_uids``, ``allow_gids``: users and groups that may open and record it
    /// beside this process's own user.
    ///
    /// Raises ``EventLimitError``, ``DomainError``, ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (*, domain = None, device = None, allow_uids = Vec::new(), allow_gids = Vec::new()),
        text_signature = "(*, domain=None, device=None, allow_uids=(), allow_gids=())")]
    fn create(
        py: Python<'_>,
        domain: Option<Domain>,
        device: Option<Device>,
        allow_uids: Vec<u32>,
        allow_gids: Vec<u32>,
    ) -> PyResult<Py<Event>> {
        let (domain, device) = place(domain, device)?;
        let options = creation((&domain, &device), allow_uids, allow_gids);
        Event::new(py, call(py, || warpipe::Event::new(options))?)
    }

    /// Opens an event by its handle (an ``EventHandle``, its text, or its bytes), also in the
    /// process that made it. ``domain`` is for where the maker's domain lies at another path.
    ///
    /// Raises ``HandleError``, ``NotFoundError``, ``PeerGoneError``, ``TimeoutError``,
    /// ``DomainError``, ``ConnectionError``, ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (handle, *, device = None, domain = None))]
    fn open(
        py: Python<'_>,
        handle: &Bound<'_, PyAny>,
        device: Option<Device>,
        domain: Option<Domain>,
    ) -> PyResult<Py<Event>> {
        let handle = EventHandle::from_argument(handle)?;
        let device = Device::or_preferred(device);
        let (domain, device) = (domain.map(|domain| domain.inner), Some(device));
        let options = OpenOptions { domain, device };
        let open = |wait: Wait<'_>| warpipe::Event::open(&handle, options, wait);
        Event::new(py, awaited(py, None, open)?)
    }

    /// The handle that names the event to other processes.
    ///
    /// Raises ``ClosedError``, ``DriverError``.
    fn handle(&self, py: Python<'_>) -> PyResult<EventHandle> {
        let inner = py.detach(|| Outcome::Ok(self.handle.get()?.handle()?))?;
        Ok(EventHandle { inner })
    }

    /// CUDA's own event, for calls that take one, or None. A wait for it has CUDA's semantics: it
    /// does not wait for an event that was never recorded, or that a dead process recorded.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn ptr(&self) -> PyResult<Option<usize>> {
        Ok(self.handle.get()?.raw().map(|raw| raw.0 as usize))
    }

    /// Records the work on ``stream`` so far (``cuEventRecord``), and returns at once. The last
    /// recording is what others wait for. The first one of an opened event asks its maker, which
    /// may take a moment.
    ///
    /// Raises ``PeerGoneError``, ``RefusedError`` when seven others record it, ``TimeoutError``
    /// after 10 s behind another thread's recording, ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (*, stream))]
    fn record(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<Recording> {
        self.handle.get()?;
        let consumer = Consumer::from_argument(py, &self.device, stream)?;
        let inner = self.handle.wait(py, Some(HELD_UP), |event, wait| {
            Outcome::Ok(event.record(consumer.followed()?, wait)?)
        })?;
        Ok(Recording { inner })
    }

    /// Has ``stream`` wait for the last recording (``cuStreamWaitEvent``), and returns that
    /// recording at once. Work of the stream after the wait is valid once ``check`` returns True
    /// for the recording.
    ///
    /// Raises ``EventNotRecordedError``, ``EventLostError``, ``ClosedError``, ``DriverError``.
    #[pyo3(signature = (*, stream))]
    fn wait(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<Recording> {
        let event = self.handle.get()?;
        let consumer = Consumer::from_argument(py, &self.device, stream)?;
        let inner = call(py, || event.wait(consumer.linked()))?;
        consumer.lead(py)?;
        Ok(Recording { inner })
    }

    /// Whether the last recording is complete (``cuEventQuery``).
    ///
    /// Raises ``EventNotRecordedError``, ``EventLostError``, ``ClosedError``.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.query()?))?)
    }

    /// Waits on the CPU until the last recording is complete, at most ``timeout`` seconds (None: no
    /// limit).
    ///
    /// Raises ``TimeoutError``, ``EventNotRecordedError``, ``EventLostError``, ``ClosedError``.
    #[pyo3(signature = (timeout = Limit::TEN), text_signature = "($self, timeout=10.0)")]
    fn synchronize(&self, py: Python<'_>, timeout: Limit) -> PyResult<()> {
        self.handle
            .wait(py, timeout.0, |event, wait| event.synchronize(wait))
    }

    /// Whether this recording is complete; False if it may still be.
    ///
    /// Raises ``EventLostError`` if it never will be; ``ClosedError``.
    fn check(&self, py: Python<'_>, recording: &Recording) -> PyResult<bool> {
        Ok(py.detach(|| Outcome::Ok(self.handle.get()?.check(recording.inner)?))?)
    }
}
