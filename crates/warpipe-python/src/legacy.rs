//! Legacy CUDA IPC handles. **This module is marked for unsafe**: it exports memory that other
//! allocators own.

use std::str::FromStr;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use warpipe::Error;

use crate::detached::{OwnStream, call};
use crate::device::Device;
use crate::errors::Fault;
use crate::memory_owner::OwnedMemory;
use crate::source::Wanted;
use crate::view::View;

/// The handle of an argument: its text, or its bytes.
pub fn parsed<T: FromStr<Err = Error>>(
    found: &Bound<'_, PyAny>,
    class: &str,
    from_bytes: fn(&[u8]) -> warpipe::Result<T>,
) -> PyResult<T> {
    let parsed = if let Ok(text) = found.cast::<PyString>() {
        text.to_str()?.parse()
    } else if let Ok(bytes) = found.cast::<PyBytes>() {
        from_bytes(bytes.as_bytes())
    } else {
        let allowed = format!("a {class}, its text, or its bytes");
        return Err(Fault::argument("handle", found, allowed).into());
    };
    Ok(parsed.map_err(Fault::from)?)
}

/// ``cuIpcGetMemHandle``: names a tensor in memory of ``cudaMalloc``, for example PyTorch's, for
/// another process of the same machine and user. It is sent as text (``str(handle)``), as bytes, or
/// pickled.
///
/// Use a channel's ``send`` where the memory may be chosen: a handle orders no work, dies with its
/// exporter, and opens the *whole* allocation for reading and writing.
/// ``LegacyHandle(text_or_bytes)`` raises ``HandleError`` if the argument is no handle.
#[pyclass(frozen, module = "warpipe", eq, hash, str = "{inner}")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LegacyHandle {
    inner: warpipe::LegacyHandle,
}

#[pymethods]
impl LegacyHandle {
    #[new]
    fn new(handle: &Bound<'_, PyAny>) -> PyResult<LegacyHandle> {
        if let Ok(handle) = handle.cast::<LegacyHandle>() {
            return Ok(handle.get().clone());
        }
        let inner = parsed(handle, "LegacyHandle", warpipe::LegacyHandle::from_bytes)?;
        Ok(LegacyHandle { inner })
    }

    /// A handle for the memory of a tensor without gaps (anything with ``__dlpack__`` or an array
    /// interface). The tensor must stay alive as long as another process uses it, and writes to it
    /// must be agreed with the reader.
    ///
    /// Raises ``NotExportableError`` for memory that is not of ``cudaMalloc`` (host, pinned,
    /// managed, pooled, PyTorch's ``expandable_segments``), ``WrongDeviceError``, ``LayoutError``,
    /// ``DriverError``.
    #[staticmethod]
    #[pyo3(signature = (tensor, *, device = None))]
    fn export(
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        device: Option<Device>,
    ) -> PyResult<LegacyHandle> {
        let device = Device::or_preferred(device);
        let own = OwnStream::new(py, &device)?;
        let wanted = Wanted {
            packed: true,
            lasting: true,
            ..Wanted::on(&device, &own)
        };
        let source = wanted.find(tensor)?;
        let address = source.address().ok_or_else(|| {
            Fault::layout("it has gaps; export what it is a part of, or make it contiguous first")
        })?;
        // SAFETY: the caller's promise, as the text above says; the address is looked up and not
        // trusted.
        let inner = call(py, || unsafe {
            warpipe::LegacyHandle::export(&device, address, source.layout.bytes())
        })?;
        Ok(LegacyHandle { inner })
    }

    /// ``cuIpcOpenMemHandle``: maps the memory here. An allocation that is open already, or that
    /// this process exported, has the same address again.
    ///
    /// Raises ``PeerGoneError``, ``HandleError``, ``DeviceError``.
    #[pyo3(signature = (*, device = None))]
    fn open<'py>(
        &self,
        py: Python<'py>,
        device: Option<Device>,
    ) -> PyResult<Bound<'py, LegacyMemory>> {
        let device = Device::or_preferred(device);
        let memory = call(py, || self.inner.open(&device))?;
        View::object(py, "the memory", OwnedMemory::Legacy(memory), LegacyMemory)
    }

    /// The values of ``_FACTS`` of `_objects.py`.
    #[getter]
    fn _facts(&self) -> (u64, u64, u64, String, i32) {
        let info = self.inner.info();
        let device = info.device.to_string();
        (
            info.bytes,
            info.offset,
            info.allocation_bytes,
            device,
            info.pid,
        )
    }

    /// The ``CUipcMemHandle`` itself, of the allocation's base.
    #[getter]
    fn raw<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.info().raw)
    }

    /// The handle as bytes, of variable length.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.to_bytes())
    }
}

/// An open range of another process's memory, as ``LegacyHandle.open`` gives it: a ``View`` of its
/// bytes. It stays mapped until the last one of its allocation, and every array of it, is dropped,
/// and their streams are past their work.
#[pyclass(frozen, extends = View, module = "warpipe")]
#[derive(Debug)]
pub struct LegacyMemory;
