//! `Sample`: a received tensor.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::Outcome;
use crate::memory::{Memory, MemoryHolder, SampleHolder};
use crate::tensor::{Held, Holding};
use crate::tuples::Info;
use crate::wait::{Timeout, waiting};

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
    owner: Arc<Holding>,
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
    patience: Option<Duration>,
}

impl Frame {
    /// Wraps a sample. `patience` is how long the CPU waits for its data.
    pub fn new(
        sample: warpipe::Sample,
        device: &warpipe::Device,
        patience: Option<Duration>,
    ) -> Frame {
        let metadata = sample.metadata().to_vec();
        Frame::with_metadata(sample, metadata, device, patience)
    }

    /// Replaces the metadata that the channel delivered.
    pub fn with_metadata(
        sample: warpipe::Sample,
        metadata: Vec<u8>,
        device: &warpipe::Device,
        patience: Option<Duration>,
    ) -> Frame {
        let (known, sequence) = (sample.info(), sample.sequence());
        let (sent_at_ns, received_at_ns) = (known.sent_at_ns, known.received_at_ns);
        let discontinuity = known.discontinuity.map(Info);
        let memory = Memory::of_sample(&Arc::new(SampleHolder::new(sample, patience)), device);
        let owner = Holding::new("sample", Some(sequence), memory);
        Frame {
            owner,
            in_place: known.is_in_place,
            sequence,
            sent_at_ns,
            received_at_ns,
            metadata,
            discontinuity,
            patience,
        }
    }

    /// The object together with its base class.
    pub fn whole(self) -> PyClassInitializer<Frame> {
        Held::of(&self.owner).add_subclass(self)
    }

    /// Its memory, while it is held.
    pub fn memory(&self) -> Outcome<Memory> {
        self.owner.memory()
    }

    /// What it holds.
    pub fn lent(&self) -> Outcome<Arc<SampleHolder>> {
        Ok(lent_of(self.owner.memory()?))
    }

    /// Gives up this object's part of the memory.
    pub fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.owner.release(py, None)
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
        self.lent()?.wait(py, timeout.or(self.patience))
    }

    /// Releases the frame, waits on the CPU until its data was complete, and verifies that the
    /// sender lived until then. Results computed from a lost frame are to be discarded.
    ///
    /// Raises ``SampleLostError``, ``TimeoutError``, ``ReleasedError``, ``DriverError``.
    #[pyo3(signature = (timeout = Timeout::USUAL), text_signature = "($self, timeout=...)")]
    fn finish(&self, py: Python<'_>, timeout: Timeout) -> PyResult<()> {
        let timeout = timeout.or(self.patience);
        let lent = self.owner.let_go()?.map(lent_of);
        let lent = lent.ok_or_else(|| self.owner.released())?;
        match Arc::try_unwrap(lent) {
            Ok(sole) => {
                let receipt = py.detach(|| sole.release())?;
                waiting(py, timeout, || Ok(()), |wait| Ok(receipt.wait(wait)?))
            }
            // Arrays of it stay valid; the slot is released after the last of them.
            Err(shared) => shared.wait(py, timeout),
        }
    }
}
