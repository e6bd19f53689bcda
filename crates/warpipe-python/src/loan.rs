//! `Loan`: memory on loan, to be filled.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use warpipe::backend::DevicePtr;
use warpipe::{Layout, SampleMut, Stream};

use crate::copies::{CopyContext, Target};
use crate::detached::{DropDetached, detached};
use crate::errors::{Fault, Outcome};
use crate::exclusive::locked;
use crate::frame::Part;
use crate::memory::{LoanHolder, Memory, MemoryHolder};
use crate::metadata::{self, Metadata};
use crate::source::Wanted;
use crate::stream::{Consumer, Consumers};
use crate::tensor::{Holding, Tensor};
use crate::wait::Given;

/// Memory on loan that has no reader yet, to be filled in place: see ``SampleMut``, ``Queue.loan``
/// and ``Output``.
///
/// Fill it through any array made of it (``torch()``, ``cupy()``, ``numpy()`` on the host, DLPack),
/// with ``out[...] = values``, or with ``out.copy_from(tensor)``. It is handed on after the work of
/// all streams that arrays of it were made on. Its initial contents are undefined. Do not write
/// once it is handed on. If it is not handed on by the end of a ``with`` block, it goes back.
#[pyclass(frozen, subclass, extends = Tensor, module = "warpipe", name = "Loan")]
#[derive(Debug)]
pub struct Loan {
    pub owner: Arc<Holding>,
    /// `None` once it is handed on or discarded, and while it is filled: no lock is held while the
    /// interpreter is released.
    open: Mutex<Option<Open>>,
    /// Its stream is the one of a loan that no array was made of.
    pub context: CopyContext,
}

#[derive(Debug)]
struct Open {
    slot: Slot,
    lease: Arc<LoanHolder>,
}

impl Loan {
    /// Wraps a loan.
    pub fn new(slot: Slot, context: &CopyContext) -> PyClassInitializer<Loan> {
        let lease = Arc::new(LoanHolder {
            consumers: Consumers::default(),
            hold: DropDetached::new(slot.hold()),
        });
        let memory = Memory {
            layout: *slot.layout(),
            lowest: slot.slot_ptr(),
            device: context.device.clone(),
            read_only: false,
            hold: MemoryHolder::Loan(lease.clone()),
        };
        let loan = Loan {
            owner: Holding::new("the loan", None, None, memory),
            open: Mutex::new(Some(Open { slot, lease })),
            context: context.clone(),
        };
        Tensor::of(&loan.owner).add_subclass(loan)
    }

    fn open(&self) -> Outcome<MutexGuard<'_, Option<Open>>> {
        self.owner.home.check()?;
        Ok(locked(&self.open))
    }

    /// Takes the slot out, with a stream that is after all work that fills it.
    pub fn take_out(
        &self,
        py: Python<'_>,
        stream: Given<'_, '_>,
    ) -> PyResult<(Slot, warpipe::Stream)> {
        let consumer = Consumer::optional(py, &self.owner.device, stream)?;
        let open = self.take()?;
        self.owner.let_go()?;
        let stream = self.behind(py, &open.lease, consumer.as_ref())?;
        Ok((open.slot, stream))
    }

    fn take(&self) -> Outcome<Open> {
        self.open()?.take().ok_or_else(|| self.owner.released())
    }

    /// A stream after all work that fills it.
    fn behind(
        &self,
        py: Python<'_>,
        lease: &LoanHolder,
        stream: Option<&Consumer>,
    ) -> Outcome<warpipe::Stream> {
        if let Some(consumer) = stream {
            lease.consumers.note(consumer);
        }
        py.detach(|| lease.consumers.join(&self.context.stream))
    }
}

/// The memory that a tensor is handed on in, and the stream that completes it: a loan itself, or
/// memory that `borrow` gives, with a copy.
pub fn slot_of(
    py: Python<'_>,
    context: &CopyContext,
    tensor: &Bound<'_, PyAny>,
    metadata: Option<Metadata>,
    stream: Given<'_, '_>,
    borrow: impl FnOnce(&Layout, Option<Metadata>) -> PyResult<Slot>,
) -> PyResult<(Slot, warpipe::Stream)> {
    if let Ok(loan) = tensor.cast::<Loan>() {
        metadata.map_or(Ok(()), |it| loan.get().set_metadata(it))?;
        return loan.get().take_out(py, stream);
    }
    let stream = Consumer::optional(py, &context.device, stream)?;
    let source = context.wanted(stream.as_ref()).find(tensor)?;
    let mut slot = borrow(&source.layout, metadata)?;
    let filled_on = context.fill(py, &mut slot.target(None)?, source)?;
    Ok((slot, filled_on))
}

impl Drop for Loan {
    fn drop(&mut self) {
        let open = self.open.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(Open { slot, lease }) = open.take() else {
            return;
        };
        if self.owner.home.check().is_ok() {
            detached(|| match lease.consumers.join(&self.context.stream) {
                // If it cannot be enqueued, the slot goes back all the same.
                Ok(stream) => drop(slot.discard(&stream)),
                // The device does not report when the work is done: the slot must not be used
                // again.
                Err(_) => std::mem::forget(slot),
            });
        }
    }
}

#[pymethods]
impl Loan {
    /// Sets the metadata: a dict (as JSON), or any buffer; at most 4,096 bytes for a frame, less
    /// what describes its parts, 200 for a job.
    ///
    /// Raises ``MetadataError``, ``ReleasedError``.
    pub fn set_metadata(&self, metadata: Metadata) -> PyResult<()> {
        let mut open = self.open()?;
        let open = open.as_mut().ok_or_else(|| self.owner.released())?;
        Ok(open.slot.set_metadata(Some(metadata))?)
    }

    /// Gives the slot back unused, after the work of all streams that arrays of it were made on,
    /// and of ``stream``. Discarding twice, or after it was handed on, is no error.
    ///
    /// Raises ``DriverError``.
    #[pyo3(signature = (*, stream = None))]
    pub fn discard(&self, py: Python<'_>, stream: Given<'_, '_>) -> PyResult<()> {
        let consumer = Consumer::optional(py, &self.owner.device, stream)?;
        let Some(open) = self.open()?.take() else {
            return Ok(());
        };
        self.owner.let_go()?;
        let Open { slot, lease } = open;
        let stream = self.behind(py, &lease, consumer.as_ref())?;
        Ok(py.detach(|| slot.discard(&stream))?)
    }

    /// Copies a tensor of the same shape and element type in, as ``Publisher.send`` would.
    ///
    /// Raises ``LayoutError``, ``DTypeError``, ``WrongDeviceError``, ``ReleasedError``.
    fn copy_from(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        self._fill(py, None, tensor)
    }

    /// ``loan[name]``.
    fn _part(&self, py: Python<'_>, name: &Bound<'_, PyAny>) -> PyResult<Py<Part>> {
        let memory = self.owner.memory()?;
        let parts = match &*self.open()? {
            Some(open) => open.slot.parts().to_vec(),
            None => Vec::new(),
        };
        Part::find(py, memory, &parts, name, Some(&self.owner))
    }

    /// Copies a tensor to the part of this name, or to the whole.
    fn _fill(&self, py: Python<'_>, name: Option<&str>, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let wanted = Wanted {
            packed: true,
            ..self.context.wanted(None)
        };
        let source = wanted.find(tensor)?;
        // May have been taken meanwhile: no lock is held while the interpreter is released.
        let mut open = self.take()?;
        let fill = |slot: &mut Slot| {
            let mut target = slot.target(name)?;
            if source.layout != target.layout {
                let said = format!("{:?} does not fit {:?}", source.layout, target.layout);
                return Err(Fault::layout(said).into());
            }
            self.context.fill(py, &mut target, source)
        };
        let filled = fill(&mut open.slot);
        if let Ok(stream) = &filled {
            open.lease.consumers.note(&Consumer::own(stream));
        }
        *self.open()? = Some(open);
        filled.map(drop)
    }
}

/// The owner of the slot.
#[derive(Debug)]
pub enum Slot {
    /// A publisher's, to be sent.
    Sample(DropDetached<SampleMut>),
    /// A queue's, to be submitted, or a worker's, to complete a job with.
    Work(DropDetached<warpipe::Loan>),
}

impl Slot {
    /// A queue's, or a worker's, with its metadata.
    pub fn of_work(loan: warpipe::Loan, metadata: Option<Metadata>) -> Outcome<Slot> {
        let mut slot = Slot::Work(DropDetached::new(loan));
        slot.set_metadata(metadata)?;
        Ok(slot)
    }

    /// The loan of a queue, or a worker; `owner` is for the error.
    pub fn into_work(self, owner: &str) -> Outcome<warpipe::Loan> {
        match self {
            Slot::Work(loan) => Ok(loan.into_inner()),
            Slot::Sample(_) => Err(Fault::argument("the loan", "a publisher's", owner)),
        }
    }

    /// Sets the metadata, if there is any.
    pub fn set_metadata(&mut self, metadata: Option<Metadata>) -> Outcome<()> {
        let Some(Metadata(bytes)) = metadata else {
            return Ok(());
        };
        let set = match self {
            Slot::Sample(sample) => sample.set_metadata(&bytes),
            Slot::Work(loan) => loan.set_metadata(&bytes),
        };
        set.map_err(metadata::refused)
    }

    /// The whole of it, or the part of this name, as the target of a copy.
    pub fn target<'s>(&'s mut self, name: Option<&'s str>) -> PyResult<SlotTarget<'s>> {
        let (lowest, layout) = match (&*self, name) {
            (_, None) => (self.slot_ptr(), *self.layout()),
            (Slot::Sample(sample), Some(name)) => {
                let part = sample.part(name).map_err(Fault::from)?;
                (part.slot_ptr, part.layout)
            }
            (Slot::Work(_), Some(name)) => return Err(PyKeyError::new_err(name.to_owned())),
        };
        Ok(SlotTarget {
            slot: self,
            name,
            lowest,
            layout,
        })
    }

    /// Gives it back unused, after the stream's work. Call without the interpreter.
    pub fn discard(self, stream: &Stream) -> Outcome<()> {
        Ok(match self {
            Slot::Sample(sample) => sample.into_inner().discard(stream),
            Slot::Work(loan) => loan.into_inner().discard(stream),
        }?)
    }
}

impl Deref for Slot {
    type Target = SampleMut;

    fn deref(&self) -> &SampleMut {
        match self {
            Slot::Sample(sample) => sample,
            Slot::Work(loan) => loan,
        }
    }
}

/// A slot, or a part of it, that nothing else writes.
pub struct SlotTarget<'s> {
    slot: &'s mut Slot,
    name: Option<&'s str>,
    lowest: DevicePtr,
    pub layout: Layout,
}

impl Target for SlotTarget<'_> {
    fn lowest(&self) -> u64 {
        self.lowest
    }

    fn bytes(&self) -> u64 {
        self.layout.bytes()
    }

    fn is_private(&self) -> bool {
        true
    }

    fn write(&mut self, stream: &Stream, bytes: &[u8]) -> Outcome<()> {
        Ok(match (&mut *self.slot, self.name) {
            (Slot::Sample(sample), Some(name)) => sample.write_part(stream, name, bytes),
            (Slot::Sample(sample), None) => sample.write(stream, bytes),
            (Slot::Work(loan), _) => loan.write(stream, bytes),
        }?)
    }

    fn stay_behind(&mut self, stream: &Stream) {
        match &mut *self.slot {
            Slot::Sample(sample) => sample.stay_behind(stream),
            Slot::Work(loan) => loan.stay_behind(stream),
        }
    }
}
