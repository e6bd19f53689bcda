//! The memory on loan behind a Python object: a publisher's, or a queue's.

use pyo3::prelude::*;
use warpipe::backend::DevicePtr;
use warpipe::{Layout, SampleMut, SlotHold, Stream};

use crate::detached::DropDetached;
use crate::errors::{Fault, Outcome};
use crate::metadata;

/// The owner of the slot.
#[derive(Debug)]
pub enum Slot {
    /// A publisher's, to be sent.
    Sample(DropDetached<SampleMut>),
    /// A queue's, to be submitted, or a worker's, to complete a job with.
    Work(DropDetached<warpipe::Loan>),
}

impl Slot {
    pub fn layout(&self) -> &Layout {
        match self {
            Slot::Sample(sample) => sample.layout(),
            Slot::Work(loan) => loan.layout(),
        }
    }

    /// The address of the element with all indices 0.
    pub fn ptr(&self) -> DevicePtr {
        match self {
            Slot::Sample(sample) => sample.ptr(),
            Slot::Work(loan) => loan.ptr(),
        }
    }

    /// The address of the first byte.
    pub fn slot_ptr(&self) -> DevicePtr {
        match self {
            Slot::Sample(sample) => sample.slot_ptr(),
            Slot::Work(loan) => loan.slot_ptr(),
        }
    }

    pub fn hold(&self) -> SlotHold {
        match self {
            Slot::Sample(sample) => sample.hold(),
            Slot::Work(loan) => loan.hold(),
        }
    }

    /// Sets the metadata, from a dict or bytes.
    pub fn set_metadata(&mut self, found: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let set = match self {
            Slot::Sample(sample) => {
                sample.set_metadata(&metadata::encode(found, metadata::BYTES_MAX)?)
            }
            Slot::Work(loan) => {
                loan.set_metadata(&metadata::encode(found, metadata::JOB_BYTES_MAX)?)
            }
        };
        Ok(set.map_err(Fault::from)?)
    }

    /// Copies the whole contents in, in the stream's order.
    pub fn write(&mut self, stream: &Stream, bytes: &[u8]) -> Outcome<()> {
        Ok(match self {
            Slot::Sample(sample) => sample.write(stream, bytes),
            Slot::Work(loan) => loan.write(stream, bytes),
        }?)
    }

    /// Gives it back unused, after the stream's work. Call without the interpreter.
    pub fn discard(self, stream: &Stream) -> Outcome<()> {
        Ok(match self {
            Slot::Sample(sample) => sample.into_inner().discard(stream),
            Slot::Work(loan) => loan.into_inner().discard(stream),
        }?)
    }
}
