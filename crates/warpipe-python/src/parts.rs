//! Samples and loans of several tensors, each with a name.

use std::sync::Arc;

use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyMapping, PyString, PyTuple};
use warpipe::{Layout, Stream};

use crate::errors::{Fault, Outcome};
use crate::frame::Frame;
use crate::memory::Memory;
use crate::tensor::{Held, Holding};

/// One of several tensors in one message: of a received ``SampleParts``, which is read only, or of
/// a loan of ``Publisher.loan_parts``, to be filled.
///
/// It is an array of any framework, in place, as a ``Sample`` or a ``Loan`` is, and keeps the
/// memory as an array of them does.
#[pyclass(frozen, extends = Held, module = "warpipe", name = "Part")]
#[derive(Debug)]
pub struct Part;

impl Part {
    /// The part of this name, in memory of the same hold as `whole`; of a `loan`, as long as that
    /// is open.
    pub fn find(
        py: Python<'_>,
        whole: Memory,
        parts: &[warpipe::Part],
        name: &Bound<'_, PyAny>,
        loan: Option<&Arc<Holding>>,
    ) -> PyResult<Py<Part>> {
        let text = name.extract::<&str>().ok();
        let part = parts.iter().find(|part| Some(&*part.name) == text);
        let part = part.ok_or_else(|| PyKeyError::new_err(name.clone().unbind()))?;
        let memory = Memory {
            layout: part.layout,
            address: part.ptr,
            lowest: part.slot_ptr,
            ..whole
        };
        let owner = Holding::part_of(loan, memory);
        Py::new(py, Held::of(&owner).add_subclass(Part))
    }
}

/// A received ``Sample`` of several tensors: a mapping of their names to ``Part`` objects. They are
/// complete together, and go back together, when no part and no array of one is left. As a tensor
/// itself it is the bytes of its slot.
#[pyclass(frozen, mapping, extends = Frame, module = "warpipe", name = "SampleParts")]
#[derive(Debug)]
pub struct FrameParts {
    parts: Vec<warpipe::Part>,
}

impl FrameParts {
    /// A frame of a sample with these parts.
    pub fn of(
        py: Python<'_>,
        frame: PyClassInitializer<Frame>,
        parts: Vec<warpipe::Part>,
    ) -> PyResult<Py<Frame>> {
        let whole = Bound::new(py, frame.add_subclass(FrameParts { parts }))?;
        Ok(whole.into_super().unbind())
    }
}

#[pymethods]
impl FrameParts {
    fn __getitem__(slf: &Bound<'_, FrameParts>, name: &Bound<'_, PyAny>) -> PyResult<Py<Part>> {
        let memory = slf.as_super().get().memory()?;
        Part::find(slf.py(), memory, &slf.get().parts, name, None)
    }

    /// The layouts of its tensors and its device, for ``repr``.
    #[getter]
    fn _described(slf: &Bound<'_, FrameParts>) -> String {
        let parts = slf.get().parts.iter();
        let parts: Vec<String> = parts
            .map(|it| format!("{:?}: {:?}", it.name, it.layout))
            .collect();
        let tensor = slf.as_super().as_super().as_super().get();
        tensor.described_as(&format!("{{{}}}", parts.join(", ")))
    }

    fn __len__(&self) -> usize {
        self.parts.len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyTuple::new(py, self.parts.iter().map(|part| &*part.name))?.try_iter()
    }
}

/// The names and values of an argument that is a mapping of one at least.
pub fn items<'py, T: FromPyObjectOwned<'py>>(
    argument: &str,
    mapping: &Bound<'py, PyMapping>,
) -> PyResult<Vec<(String, T)>> {
    if mapping.is_empty()? {
        let allowed = "at least one named tensor";
        return Err(Fault::argument(argument, "an empty mapping", allowed).into());
    }
    let named = |pair: Bound<'py, PyAny>| {
        let (name, value) = pair.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>()?;
        match name.extract() {
            Ok(name) => Ok((name, value.extract().map_err(Into::into)?)),
            Err(error) if name.is_instance_of::<PyString>() => Err(error),
            Err(_) => {
                let (name, class) = (name.repr()?, name.get_type().qualname()?);
                let said = format!("the name {name} is a {class}; names of tensors are texts");
                Err(PyTypeError::new_err(said))
            }
        }
    };
    mapping.items()?.iter().map(named).collect()
}

/// What was found for the tensor of this name; an error notes the name.
pub fn noted<T>(py: Python<'_>, name: &str, found: PyResult<T>) -> PyResult<T> {
    found.or_else(|error| {
        error.add_note(py, format!("while processing the tensor {name:?}"))?;
        Err(error)
    })
}

/// A stream behind all of these, the last of them.
pub fn behind_all(streams: Vec<Stream>, own: &Stream) -> Outcome<Stream> {
    let mut streams = streams.into_iter().rev();
    let last = streams.next().unwrap_or_else(|| own.clone());
    streams.try_for_each(|other| last.wait_for(&other))?;
    Ok(last)
}

/// The bytes of a sample, or of one of its parts, that begin at this address.
pub fn bytes_at(sample: &warpipe::Sample, lowest: u64, layout: &Layout) -> Outcome<Vec<u8>> {
    let is_it = |part: &&warpipe::Part| part.slot_ptr == lowest && part.layout == *layout;
    Ok(match sample.parts().iter().find(is_it) {
        Some(part) => sample.part_to_vec(&part.name, crate::wait::SLICE)?,
        None => sample.to_vec(crate::wait::SLICE)?,
    })
}
