//! The memory on loan behind a Python object: a publisher's, or a queue's.

use std::ops::Deref;

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use warpipe::backend::DevicePtr;
use warpipe::{Layout, SampleMut, Stream};

use crate::copies::Target;
use crate::detached::DropDetached;
use crate::errors::{Fault, Outcome};
use crate::metadata::{self, Metadata};

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
