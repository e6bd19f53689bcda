//! Memory as arrays of other frameworks: DLPack, the CUDA array interface, and NumPy's.

use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use warpipe_dlpack::CPU;

use crate::device::is_cuda;
use crate::dlpack;
use crate::dtype::typestr;
use crate::errors::{Fault, Outcome};
use crate::memory::{ConsumerStay, Memory, MemoryHolder};
use crate::stream::{Consumer, likely};
use crate::testing;
use crate::wait::Given;

fn refuse(reason: String) -> PyErr {
    Fault::Own("ExportError", reason).into()
}

/// A capsule, as the array API standard says.
pub fn dlpack(
    py: Python<'_>,
    memory: &Memory,
    stream: Given<'_, '_>,
    max_version: Option<(u32, u32)>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<Py<PyAny>> {
    let own = dlpack::device_of(&memory.device);
    let wanted = dl_device.unwrap_or(own);
    let to_host = wanted.0 == CPU && own.0 != CPU;
    if wanted != own && !to_host {
        return Err(refuse(format!(
            "it lies on DLPack device {own:?} and cannot be exported to {wanted:?}; copy it there"
        )));
    }
    let versioned = dlpack::is_versioned(max_version);
    if to_host || copy == Some(true) {
        if to_host && copy == Some(false) {
            return Err(refuse(
                "from a GPU to the host it must be copied, and `copy` is False".into(),
            ));
        }
        if !to_host && is_cuda(&memory.device) {
            return Err(refuse(
                "a copy on the GPU is the consumer's to make: export it with copy=None and copy that".into(),
            ));
        }
        let (layout, bytes) = memory.packed(py)?;
        let copy = Memory::of_copy(layout, bytes);
        return dlpack::export(py, &copy, None, versioned, true);
    }
    let stay = ready_for(py, memory, stream)?;
    dlpack::export(py, memory, stay, versioned, false)
}

/// Makes the consumer's stream, in DLPack's numbers, wait for the data.
fn ready_for(
    py: Python<'_>,
    memory: &Memory,
    stream: Given<'_, '_>,
) -> PyResult<Option<ConsumerStay>> {
    let number = stream.map(|stream| stream.extract::<i64>()).transpose()?;
    if !is_cuda(&memory.device) {
        return match number {
            None | Some(-1) => memory.settle(py).map(|()| None),
            Some(other) => Err(refuse(format!(
                "stream is {other}; the host has none: leave it out"
            ))),
        };
    }
    let raw = match number {
        // The consumer orders its work by itself.
        Some(-1) => return Ok(None),
        None => 1,
        Some(number) => usize::try_from(number).ok().filter(|&raw| raw != 0).ok_or_else(|| {
            refuse(format!("stream is {number}; allowed is -1, 1, 2, or a CUstream (0 is ambiguous: say 1 or 2)"))
        })?,
    };
    Ok(memory.admit(py, &Consumer::foreign(py, &memory.device, raw)?)?)
}

/// NumPy's array interface (version 3). For memory of the host; waits there until the data is
/// complete.
pub fn array_interface<'py>(py: Python<'py>, memory: &Memory) -> PyResult<Bound<'py, PyDict>> {
    if is_cuda(&memory.device) {
        return Err(PyAttributeError::new_err(
            "memory of a GPU has no __array_interface__; use .numpy(), which copies",
        ));
    }
    let typestr = letter(memory, "__array_interface__", ".numpy()")?;
    memory.settle(py)?;
    interface(py, memory, &typestr)
}

/// The CUDA array interface (version 3): the consumer's stream is to wait for the one that it
/// names.
pub fn cuda_array_interface<'py>(py: Python<'py>, memory: &Memory) -> PyResult<Bound<'py, PyDict>> {
    if !is_cuda(&memory.device) {
        return Err(PyAttributeError::new_err(
            "memory of the host has no __cuda_array_interface__; use .numpy()",
        ));
    }
    let typestr = letter(memory, "__cuda_array_interface__", "DLPack")?;
    // Nothing says which stream will use it.
    for consumer in likely(py, &memory.device)? {
        memory.hold.note(py, &consumer)?;
    }
    let dict = interface(py, memory, &typestr)?;
    dict.set_item("stream", py.detach(|| awaited(memory))?)?;
    Ok(dict)
}

fn letter(memory: &Memory, protocol: &str, next: &str) -> PyResult<String> {
    let dtype = memory.layout.dtype();
    let missing = || format!("{protocol} has no letter for {dtype}; use {next}");
    typestr(dtype).ok_or_else(|| PyAttributeError::new_err(missing()))
}

/// The stream that already waits for the data; none if there is nothing to wait for.
fn awaited(memory: &Memory) -> Outcome<Option<usize>> {
    let stream = match &memory.hold {
        MemoryHolder::Owned(owner) => owner.copying()?,
        MemoryHolder::Sample(lent) if !testing::waits_are_skipped() => {
            let sample = lent.sample();
            (!sample.is_complete()?).then(|| sample.stream())
        }
        _ => None,
    };
    Ok(stream.map(|stream| stream.raw().0 as usize))
}

fn interface<'py>(py: Python<'py>, memory: &Memory, typestr: &str) -> PyResult<Bound<'py, PyDict>> {
    let layout = &memory.layout;
    let address = match layout.elements() {
        0 => 0,
        _ => memory.address(),
    };
    let dict = PyDict::new(py);
    dict.set_item("version", 3)?;
    dict.set_item("shape", PyTuple::new(py, layout.shape())?)?;
    dict.set_item("typestr", typestr)?;
    dict.set_item("data", (address, memory.read_only))?;
    let width = layout.dtype().bytes() as i64;
    let strides = layout.strides().iter().map(|stride| stride * width);
    let strides = PyTuple::new(py, strides)?;
    dict.set_item("strides", (!layout.is_contiguous()).then_some(strides))?;
    Ok(dict)
}

/// One hold on memory that NumPy keeps behind an array.
#[pyclass(frozen, module = "warpipe")]
#[derive(Debug)]
pub struct HostView {
    memory: Memory,
    typestr: String,
}

#[pymethods]
impl HostView {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        interface(py, &self.memory, &self.typestr)
    }
}

/// The memory where NumPy reads it: in place on the host, of a GPU's a copy, once the data is
/// complete.
pub fn host_view(py: Python<'_>, memory: &Memory) -> PyResult<HostView> {
    let memory = if is_cuda(&memory.device) {
        Memory::of_copy(memory.layout, memory.copied(py)?)
    } else {
        memory.settle(py)?;
        memory.clone()
    };
    let dtype = memory.layout.dtype();
    // Where NumPy has no letter, as numbers of the same width, so that every element stays one.
    let order = if dtype.bytes() == 1 { '|' } else { '<' };
    let typestr = typestr(dtype).unwrap_or_else(|| format!("{order}u{}", dtype.bytes()));
    Ok(HostView { memory, typestr })
}
