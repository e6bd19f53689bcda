//! Memory that other processes open by a descriptor or a ticket. **This module is marked for
//! unsafe**: it borrows the caller's descriptors.

use std::os::fd::{BorrowedFd, IntoRawFd};
use std::path::{Path, PathBuf};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;
use warpipe::backend::{Access, DeviceId, DeviceKind};

use crate::detached::call;
use crate::device::Device;
use crate::domain::Domain;
use crate::errors::{Fault, Outcome};
use crate::handle::{CloseableHandle, Named};
use crate::memory_owner::OwnedMemory;
use crate::tuples::memory_info;
use crate::view::View;
use crate::wait::{WaitLimit, awaited};

/// The access to memory, in the library's type.
pub fn access(writable: bool) -> Access {
    if writable {
        Access::ReadWrite
    } else {
        Access::Read
    }
}

/// An allocation that can be given to other processes (``cuMemCreate`` with an exportable handle; a
/// sealed memfd on the host). Zeroed at first.
///
/// ``Memory.allocate(nbytes)`` makes one. It is a ``View`` of its bytes: ``memory.view(shape,
/// dtype)`` is a tensor of it. ``publish(name)`` gives a ticket for other processes;
/// ``export_fd()`` the bare descriptor, to be sent over a socket of the program's own. The memory
/// lives as long as any process has it open, even after its maker's death.
#[pyclass(frozen, extends = View, module = "warpipe")]
#[derive(Debug)]
pub struct Memory;

impl Memory {
    fn inner(slf: &Bound<'_, Memory>) -> Outcome<warpipe::Memory> {
        match slf.as_super().get().owner()?.memory() {
            OwnedMemory::Own(memory) => Ok(memory.clone()),
            _ => unreachable!("a Memory holds one"),
        }
    }

    fn make(py: Python<'_>, memory: warpipe::Memory) -> PyResult<Bound<'_, Memory>> {
        View::object(py, "the memory", OwnedMemory::Own(memory), Memory)
    }
}

#[pymethods]
impl Memory {
    /// Allocates ``nbytes`` bytes, rounded up to the device's unit (2 MiB on CUDA as a rule, a page
    /// on the host).
    ///
    /// Raises ``DeviceMemoryError``, ``ArgumentError`` for 0 bytes, ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (nbytes, *, device = None))]
    fn allocate<'py>(
        py: Python<'py>,
        nbytes: u64,
        device: Option<Device>,
    ) -> PyResult<Bound<'py, Memory>> {
        let device = Device::or_preferred(device);
        let memory = call(py, || warpipe::Memory::allocate(&device, nbytes))?;
        Memory::make(py, memory)
    }

    /// Publishes it under a name, for this user and those of ``allow_uids`` and ``allow_gids``;
    /// other processes may write it only if ``writable``.
    ///
    /// Raises ``InvalidNameError``, ``NameTakenError``, ``ForeignFileError``, ``DomainError``,
    /// ``ReleasedError``.
    #[pyo3(signature = (name, *, domain = None, writable = false, allow_uids = Vec::new(), allow_gids = Vec::new()),
        text_signature = "($self, name, *, domain=None, writable=False, allow_uids=(), allow_gids=())")]
    fn publish(
        slf: &Bound<'_, Memory>,
        name: &str,
        domain: Option<Domain>,
        writable: bool,
        allow_uids: Vec<u32>,
        allow_gids: Vec<u32>,
    ) -> PyResult<Py<Published>> {
        let memory = Memory::inner(slf)?;
        let options = warpipe::PublishOptions {
            access: access(writable),
            allow_uids,
            allow_gids,
            ..Domain::or_usual(domain)?.options()
        };
        let published = call(slf.py(), || memory.publish(name, options))?;
        let object = |handle| Published { handle };
        CloseableHandle::object(slf.py(), "publication", name, published, object)
    }

    /// A descriptor of it, close-on-exec; the caller closes it. A process that gets it can map all
    /// of the memory, for reading and writing.
    ///
    /// Raises ``SystemCallError``, ``ReleasedError``, ``DriverError``.
    fn export_fd(slf: &Bound<'_, Memory>) -> PyResult<i32> {
        let memory = Memory::inner(slf)?;
        Ok(call(slf.py(), || memory.export_fd())?.into_raw_fd())
    }

    /// The size and device of the memory, to be sent with the descriptor.
    ///
    /// Raises ``ReleasedError``.
    #[getter]
    fn info<'py>(slf: &Bound<'py, Memory>) -> PyResult<Bound<'py, PyAny>> {
        let memory = Memory::inner(slf)?;
        memory_info(slf.py(), slf.py().detach(|| memory.info()))
    }
}

/// Memory under a name, as ``Memory.publish`` gives it. Closing or dropping it releases the name:
/// no further process can open the memory, and processes that have it open keep it.
#[pyclass(frozen, extends = Named, module = "warpipe")]
#[derive(Debug)]
pub struct Published {
    handle: CloseableHandle<warpipe::Published>,
}

#[pymethods]
impl Published {
    /// The memory, with one more reference.
    ///
    /// Raises ``ClosedError``.
    #[getter]
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, Memory>> {
        Memory::make(py, self.handle.get()?.memory().clone())
    }

    /// A text that names ``nbytes`` bytes (None: up to the end) from byte ``offset`` on.
    ///
    /// Raises ``ArgumentError``, ``ClosedError``.
    #[pyo3(signature = (offset = 0, nbytes = None))]
    fn ticket(&self, py: Python<'_>, offset: u64, nbytes: Option<u64>) -> PyResult<Ticket> {
        let published = self.handle.get()?;
        let inner = call(py, || match nbytes {
            Some(nbytes) => published.ticket(offset..offset.saturating_add(nbytes)),
            None => published.ticket(offset..),
        })?;
        Ok(Ticket { inner })
    }
}

/// Another process's memory, or a range of it, mapped here, as ``Ticket.open`` gives it. It stays
/// valid when its owner closes it or dies.
#[pyclass(frozen, extends = View, module = "warpipe")]
#[derive(Debug)]
pub struct SharedMemory;

impl SharedMemory {
    fn inner(slf: &Bound<'_, SharedMemory>) -> Outcome<warpipe::SharedMemory> {
        match slf.as_super().get().owner()?.memory() {
            OwnedMemory::Shared(memory) => Ok(memory.clone()),
            _ => unreachable!("a SharedMemory holds one"),
        }
    }

    /// Wraps opened memory.
    pub fn make(
        py: Python<'_>,
        memory: warpipe::SharedMemory,
    ) -> PyResult<Bound<'_, SharedMemory>> {
        View::object(py, "the memory", OwnedMemory::Shared(memory), SharedMemory)
    }
}

/// A `MemoryInfo` of `_tuples.py`.
#[derive(FromPyObject)]
struct InfoArgument {
    nbytes: u64,
    mapped_nbytes: u64,
    device: String,
}

#[pymethods]
impl SharedMemory {
    /// Maps memory by a descriptor that was received over the program's own socket, and its
    /// ``Memory.info``. The descriptor may be closed afterwards. Its kind and size are checked.
    ///
    /// Raises ``DeviceError``, ``ArgumentError``,
    /// ``DeviceError``.
    #[staticmethod]
    #[pyo3(signature = (fd, info, *, device = None, writable = false))]
    fn import_fd<'py>(
        py: Python<'py>,
        fd: i32,
        info: InfoArgument,
        device: Option<Device>,
        writable: bool,
    ) -> PyResult<Bound<'py, SharedMemory>> {
        let device = Device::or_preferred(device);
        let wrong = || Fault::argument("device", format!("{:?}", info.device), "a Device's uuid");
        let info = warpipe::MemoryInfo {
            bytes: info.nbytes,
            mapped_bytes: info.mapped_nbytes,
            device: device_id(&info.device).ok_or_else(wrong)?,
        };
        if fd < 0 {
            return Err(Fault::argument("fd", fd, "an open descriptor").into());
        }
        // SAFETY: not -1, and the system call refuses a descriptor that is not open.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let import = || warpipe::Memory::import_fd(&device, fd, &info, access(writable));
        SharedMemory::make(py, call(py, import)?)
    }

    /// Part of it; the part keeps all of it mapped.
    ///
    /// Raises ``ArgumentError``, ``ReleasedError``.
    #[pyo3(signature = (offset, nbytes = None))]
    fn range<'py>(
        slf: &Bound<'py, SharedMemory>,
        offset: u64,
        nbytes: Option<u64>,
    ) -> PyResult<Bound<'py, SharedMemory>> {
        let memory = SharedMemory::inner(slf)?;
        let part = call(slf.py(), || memory.range(offset, nbytes))?;
        SharedMemory::make(slf.py(), part)
    }

    /// The device that the memory is on: its ``Device.uuid``.
    ///
    /// Raises ``ReleasedError``.
    #[getter]
    fn owner(slf: &Bound<'_, SharedMemory>) -> PyResult<String> {
        Ok(SharedMemory::inner(slf)?.owner().to_string())
    }

    /// The name that it was published under.
    ///
    /// Raises ``ReleasedError``.
    #[getter]
    fn name(slf: &Bound<'_, SharedMemory>) -> PyResult<String> {
        Ok(SharedMemory::inner(slf)?.name.to_string())
    }
}

/// Names memory of a process on this machine: a text that can be sent through a file, a pipe, an
/// environment variable, or pickled. It is no secret and grants no access: the owner checks each
/// process that opens it.
///
/// ``Ticket(text)`` raises ``HandleError`` if the text is no ticket. ``Ticket.to(name)`` names the
/// memory that is or will be published under a name.
#[pyclass(frozen, module = "warpipe", eq, hash, str = "{inner}")]
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
            let found = found.repr()?;
            let said = format!("a ticket is a Ticket or its text, and not {found}");
            return Err(PyTypeError::new_err(said));
        };
        let parsed = text.to_str()?.parse::<warpipe::Ticket>();
        Ok(parsed.map_err(Fault::from)?)
    }
}

#[pymethods]
impl Ticket {
    #[new]
    fn new(ticket: &Bound<'_, PyAny>) -> PyResult<Ticket> {
        let inner = Ticket::from_argument(ticket)?;
        Ok(Ticket { inner })
    }

    /// A ticket for the memory published under ``name``, now or later.
    ///
    /// Raises ``InvalidNameError``, ``DomainError``.
    #[staticmethod]
    #[pyo3(signature = (name, *, domain = None))]
    fn to(name: &str, domain: Option<Domain>) -> PyResult<Ticket> {
        let inner = warpipe::Ticket::to(&Domain::or_usual(domain)?, name);
        Ok(Ticket {
            inner: inner.map_err(Fault::from)?,
        })
    }

    /// Reads a ticket from a file, waiting up to ``wait`` seconds (None: no limit) until the file
    /// exists.
    ///
    /// Raises ``SystemCallError``, ``TimeoutError``, ``HandleError``.
    #[staticmethod]
    #[pyo3(signature = (path, *, wait = WaitLimit::ZERO), text_signature = "(path, *, wait=0.0)")]
    fn read_file(py: Python<'_>, path: PathBuf, wait: WaitLimit) -> PyResult<Ticket> {
        let inner = awaited(py, wait.0, |wait| warpipe::Ticket::read_file(&path, wait))?;
        Ok(Ticket { inner })
    }

    /// Writes it to a file, whole or not at all (``rename(2)``).
    ///
    /// Raises ``SystemCallError``.
    fn write_file(&self, path: PathBuf) -> PyResult<()> {
        Ok(self.inner.write_file(path).map_err(Fault::from)?)
    }

    /// The values of ``_FACTS`` of `_objects.py`.
    #[getter]
    fn _facts(&self) -> (&Path, &str, String, Option<String>, Option<u64>) {
        let info = self.inner.info();
        let device = info.device.map(|device| device.to_string());
        (
            info.domain,
            info.name,
            info.kind.to_string(),
            device,
            info.bytes,
        )
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
        let memory = awaited(py, wait.0, |wait| self.inner.open(&device, wait))?;
        SharedMemory::make(py, memory)
    }
}

/// The identity that a text denotes.
pub fn device_id(text: &str) -> Option<DeviceId> {
    if text == "host" {
        return Some(warpipe::Device::host().info().id);
    }
    let digits = text.strip_prefix("GPU-")?.replace('-', "");
    let number = u128::from_str_radix(&digits, 16).ok();
    let number = number.filter(|_| digits.len() == 32)?;
    Some(DeviceId {
        kind: DeviceKind::Cuda,
        uuid: number.to_be_bytes(),
    })
}
