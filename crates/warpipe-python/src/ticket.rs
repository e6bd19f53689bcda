//! Tickets, and the description of a memory descriptor.

use std::path::PathBuf;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};
use warpipe::Wait;
use warpipe::backend::{DeviceId, DeviceKind};

use crate::device::Device;
use crate::domain::Domain;
use crate::errors::Fault;
use crate::shared_memory::SharedMemory;
use crate::wait::{WaitLimit, waiting};

/// Names memory of a process on this machine: a text that can be sent through a file, a pipe, an
/// environment variable, or pickled. It is no secret and grants no access: the owner checks each
/// process that opens it.
///
/// ``Ticket(text)`` raises ``HandleError`` if the text is no ticket. ``Ticket.to(name)`` names the
/// memory that is or will be published under a name.
#[pyclass(frozen, module = "warpipe", eq, hash)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub inner: warpipe::Ticket,
}

impl Ticket {
    /// The ticket of an argument: a ticket, or its text.
    pub fn from_argument(found: &Bound<'_, PyAny>) -> PyResult<warpipe::Ticket> {
        if let Ok(ticket) = found.cast::<Ticket>() {
            return Ok(ticket.get().inner.clone());
        }
        let Ok(text) = found.cast::<PyString>() else {
            let said = format!(
                "a ticket is a Ticket or its text, and not {}",
                found.repr()?
            );
            return Err(PyTypeError::new_err(said));
        };
        Ok(text
            .to_str()?
            .parse::<warpipe::Ticket>()
            .map_err(Fault::from)?)
    }
}

#[pymethods]
impl Ticket {
    #[new]
    fn new(ticket: &Bound<'_, PyAny>) -> PyResult<Ticket> {
        Ok(Ticket {
            inner: Ticket::from_argument(ticket)?,
        })
    }

    /// A ticket for the memory published under ``name``, now or later.
    ///
    /// Raises ``InvalidNameError``, ``DomainError``.
    #[staticmethod]
    #[pyo3(signature = (name, *, domain = None))]
    fn to(name: &str, domain: Option<Domain>) -> PyResult<Ticket> {
        let domain = Domain::or_usual(domain)?;
        Ok(Ticket {
            inner: warpipe::Ticket::to(&domain, name).map_err(Fault::from)?,
        })
    }

    /// Reads a ticket from a file, waiting up to ``wait`` seconds (None: no limit) until the file
    /// exists.
    ///
    /// Raises ``SystemCallError``, ``TimeoutError``, ``HandleError``.
    #[staticmethod]
    #[pyo3(signature = (path, *, wait = WaitLimit::ZERO), text_signature = "(path, *, wait=0.0)")]
    fn read_file(py: Python<'_>, path: PathBuf, wait: WaitLimit) -> PyResult<Ticket> {
        let inner = waiting(
            py,
            wait.0,
            || Ok(()),
            |wait| Ok(warpipe::Ticket::read_file(&path, wait)?),
        )?;
        Ok(Ticket { inner })
    }

    /// Writes it to a file, whole or not at all (``rename(2)``).
    ///
    /// Raises ``SystemCallError``.
    fn write_file(&self, path: PathBuf) -> PyResult<()> {
        Ok(self.inner.write_file(path).map_err(Fault::from)?)
    }

    /// The domain's directory.
    #[getter]
    fn domain(&self) -> PathBuf {
        self.inner.info().domain.to_owned()
    }

    /// The endpoint's name.
    #[getter]
    fn name(&self) -> &str {
        self.inner.info().name
    }

    /// The kind of the endpoint: ``"memory"`` or ``"pool"``.
    #[getter]
    fn kind(&self) -> String {
        self.inner.info().kind.to_string()
    }

    /// The device that the memory is on (its ``Device.uuid``), or None if unknown.
    #[getter]
    fn device(&self) -> Option<String> {
        self.inner.info().device.map(|device| device.to_string())
    }

    /// Its length, or None if unknown.
    #[getter]
    fn nbytes(&self) -> Option<u64> {
        self.inner.info().bytes
    }

    /// Fetches the memory from its owner and maps it, waiting up to ``wait`` seconds (None: no
    /// limit) for an owner that has not published yet. A pool's ticket is for ``LentBuffer.open``.
    ///
    /// Raises ``NotFoundError``, ``TicketExpiredError``, ``HandleError``, ``OtherKindError``,
    /// ``AccessDeniedError``, ``ArgumentError``, ``DeviceError``.
    #[pyo3(signature = (*, device = None, wait = WaitLimit::ZERO), text_signature = "($self, *, device=None, wait=0.0)")]
    fn open<'py>(
        &self,
        py: Python<'py>,
        device: Option<Device>,
        wait: WaitLimit,
    ) -> PyResult<Bound<'py, SharedMemory>> {
        let device = Device::or_preferred(device);
        let open = |wait: Wait<'_>| Ok(self.inner.open(&device, wait)?);
        let memory = waiting(py, wait.0, || Ok(()), open)?;
        SharedMemory::make(py, memory)
    }

    fn __str__(&self) -> String {
        self.inner.to_string()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, (String,)) {
        (py.get_type::<Ticket>(), (self.inner.to_string(),))
    }

    fn __repr__(&self) -> String {
        format!("Ticket('{}')", self.inner)
    }
}

/// The identity that a text denotes.
pub fn device_id(text: &str) -> Option<DeviceId> {
    if text == "host" {
        return Some(warpipe::Device::host().info().id);
    }
    let digits: String = text
        .strip_prefix("GPU-")?
        .chars()
        .filter(|&letter| letter != '-')
        .collect();
    let number = u128::from_str_radix(&digits, 16)
        .ok()
        .filter(|_| digits.len() == 32)?;
    Some(DeviceId {
        kind: DeviceKind::Cuda,
        uuid: number.to_be_bytes(),
    })
}
