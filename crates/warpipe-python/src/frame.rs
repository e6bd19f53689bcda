//! `Sample`: a received tensor, or several, each with a name.

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyIterator, PyMapping, PyTuple};
use warpipe::Layout;

use crate::errors::Outcome;
use crate::memory::{Memory, MemoryHolder, SampleHolder};
use crate::tensor::{Held, Holding};
use crate::tuples::Info;
use crate::wait::{Timeout, awaited};

/// A received tensor in its publisher's memory, lent until it is released, and read in place.
///
/// Make an array of it: ``torch()``, ``cupy()``, ``jax()``, ``numpy()``, or any consumer of DLPack
/// or ``__cuda_array_interface__``. The consumer's stream waits on the GPU until the data is
/// complete; no CPU does. (The host has no streams: there the array is made once the data is
/// complete.)
///
/// The memory stays lent while this object, or any array made of it, lives. It goes back after the
/// work that the streams of those arrays have been given by then. ``release()``, ``finish()`` and
/// the end of a ``with`` block give up this object's part. The memory is read only: NumPy knows
/// that; PyTorch does not, and faults on a write.
#[pyclass(frozen, subclass, extends = Held, module = "warpipe", name = "Sample")]
#[derive(Debug)]
pub struct Frame {
    pub owner: Arc<Holding>,
    /// Whether it lies in its sender's own tensor, which was sent with ``zero_copy``.
    #[pyo3(get)]
    in_place: bool,
    /// Its number among its publisher's frames, from 1. A gap counts frames that this subscriber
    /// did not get: see ``discontinuity``.
    #[pyo3(get)]
    sequence: u64,
    /// When it was sent, in nanoseconds of ``time.monotonic_ns()``. Untrusted: the sender states
    /// it. None from a publisher without ``timestamps``.
    #[pyo3(get)]
    sent_at_ns: Option<u64>,
    /// When it was received, in nanoseconds of ``time.monotonic_ns()``. None where ``sent_at_ns`` is.
    #[pyo3(get)]
    received_at_ns: Option<u64>,
    metadata: Vec<u8>,
    /// The break before this frame: frames of its publisher are missing, or with ``reconnect`` it is
    /// the first one of another incarnation, or of the same one after the link had ended. Else None,
    /// as on the first frame that a subscriber receives.
    #[pyo3(get)]
    discontinuity: Option<Info<warpipe::Discontinuity>>,
}

impl Frame {
    /// Wraps a sample, with other metadata than the channel delivered if there is such. `patience`
    /// is how long the CPU waits for its data.
    pub fn new(
        sample: warpipe::Sample,
        metadata: Option<Vec<u8>>,
        device: &warpipe::Device,
        patience: Option<Duration>,
    ) -> PyClassInitializer<Frame> {
        let (known, sequence) = (sample.info(), sample.sequence());
        let metadata = metadata.unwrap_or_else(|| sample.metadata().to_vec());
        let memory = Memory::of_sample(sample, device, patience);
        let owner = Holding::new("sample", Some(sequence), None, memory);
        Held::of(&owner).add_subclass(Frame {
            owner,
            in_place: known.is_in_place,
            sequence,
            sent_at_ns: known.sent_at_ns,
            received_at_ns: known.received_at_ns,
            metadata,
            discontinuity: known.discontinuity.map(Info),
        })
    }

    /// What it holds.
    pub fn lent(&self) -> Outcome<Arc<SampleHolder>> {
        Ok(lent_of(self.owner.memory()?))
    }
}

fn lent_of(memory: Memory) -> Arc<SampleHolder> {
    match memory.hold {
        MemoryHolder::Sample(lent) => lent,
        _ => unreachable!("a frame is of a sample"),
    }
}

#[pymethods]
impl Frame {
    /// The dict that was sent with it (as JSON); empty if there was none.
    ///
    /// Raises ``MetadataError`` for bytes that are no JSON object: see ``metadata_bytes``.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        crate::metadata::decode(py, &self.metadata)
    }

    /// The bytes that were sent with it, at most 4,096.
    #[getter]
    fn metadata_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.metadata)
    }

    /// Waits on the CPU until the data is complete, at most ``timeout`` seconds (default: the
    /// subscriber's; None: no limit). GPU work needs no such wait: its stream waits.
    ///
    /// Raises ``SampleLostError`` when the sender died first, ``TimeoutError``, ``ReleasedError``.
    #[pyo3(signature = (timeout = Timeout::USUAL), text_signature = "($self, timeout=...)")]
    fn wait(&self, py: Python<'_>, timeout: Timeout) -> PyResult<()> {
        let lent = self.lent()?;
        lent.wait(py, timeout.or(lent.patience))
    }

    /// Releases the frame, waits on the CPU until its data was complete, and verifies that the
    /// sender lived until then. Results computed from a lost frame are to be discarded.
    ///
    /// Raises ``SampleLostError``, ``TimeoutError``, ``ReleasedError``, ``DriverError``.
    #[pyo3(signature = (timeout = Timeout::USUAL), text_signature = "($self, timeout=...)")]
    fn finish(&self, py: Python<'_>, timeout: Timeout) -> PyResult<()> {
        let lent = self.owner.let_go()?.map(lent_of);
        let lent = lent.ok_or_else(|| self.owner.released())?;
        let timeout = timeout.or(lent.patience);
        match Arc::try_unwrap(lent) {
            Ok(sole) => {
                let receipt = py.detach(|| sole.release())?;
                awaited(py, timeout, |wait| receipt.wait(wait))
            }
            // Arrays of it stay valid; the slot is released after the last of them.
            Err(shared) => shared.wait(py, timeout),
        }
    }
}

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
            lowest: part.slot_ptr,
            ..whole
        };
        let owner = Holding::new("the part", None, loan.cloned(), memory);
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
        let memory = slf.as_super().get().owner.memory()?;
        Part::find(slf.py(), memory, &slf.get().parts, name, None)
    }

    /// The layouts of its tensors, for ``repr``.
    #[getter]
    fn _layout(&self) -> String {
        let words = |it: &warpipe::Part| format!("{:?}: {:?}", it.name, it.layout);
        let parts: Vec<String> = self.parts.iter().map(words).collect();
        format!("{{{}}}", parts.join(", "))
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
    let words = mapping.py().import("warpipe._tensors")?;
    words.call_method1("items", (argument, mapping))?.extract()
}

/// What was found for the tensor of this name; an error notes the name.
pub fn noted<T>(py: Python<'_>, name: &str, found: PyResult<T>) -> PyResult<T> {
    found.or_else(|error| {
        error.add_note(py, format!("while processing the tensor {name:?}"))?;
        Err(error)
    })
}

/// The bytes of a sample, or of one of its parts, that begin at this address.
pub fn bytes_at(sample: &warpipe::Sample, lowest: u64, layout: &Layout) -> Outcome<Vec<u8>> {
    let is_it = |part: &&warpipe::Part| part.slot_ptr == lowest && part.layout == *layout;
    Ok(match sample.parts().iter().find(is_it) {
        Some(part) => sample.part_to_vec(&part.name, crate::wait::SLICE)?,
        None => sample.to_vec(crate::wait::SLICE)?,
    })
}
