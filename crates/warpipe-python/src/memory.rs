//! The memory behind arrays, and the streams that use it: a received sample, a loan, other memory
//! of the library, or a copy on the host. **This module is marked for unsafe**: it copies from
//! memory by address.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::backend::DevicePtr;
use warpipe::{Layout, Receipt, Sample, SlotHold};
use warpipe_dlpack::Elements;

use crate::detached::{DropDetached, call, detached};
use crate::errors::{Fault, Outcome};
use crate::memory_owner::{DEFAULT_TIMEOUT, MemoryOwner, download};
use crate::process::Home;
use crate::stream::{Consumer, Consumers};
use crate::wait::awaited;
use crate::{frame, testing};

/// A tensor in memory, and the owner that keeps the memory. Cheap to clone; all clones are one
/// hold.
#[derive(Debug, Clone)]
pub struct Memory {
    pub layout: Layout,
    /// The address of the first byte of `layout.bytes()`.
    pub lowest: DevicePtr,
    pub device: warpipe::Device,
    pub read_only: bool,
    pub hold: MemoryHolder,
}

/// The owner of the memory.
#[derive(Debug, Clone)]
pub enum MemoryHolder {
    /// A received sample.
    Sample(Arc<SampleHolder>),
    /// A loan of a publisher of this process.
    Loan(Arc<LoanHolder>),
    /// Other memory of the library.
    Owned(Arc<MemoryOwner>),
    /// A copy owned by this package.
    Copy(Arc<CopiedBytes>),
}

/// Bytes that arrays write. They are accessed by address only, because memory behind a Rust
/// reference must not change.
#[derive(Debug)]
pub struct CopiedBytes(UnsafeCell<Box<[u8]>>);

// SAFETY: a program that writes the memory through an array orders that as for any array.
unsafe impl Sync for CopiedBytes {}

impl CopiedBytes {
    /// The first byte, for reading and writing.
    fn address(&self) -> DevicePtr {
        // SAFETY: the box itself does not change, and a pointer, not a reference, leaves.
        let bytes: *mut [u8] = unsafe { &raw mut **self.0.get() };
        bytes.cast::<u8>().expose_provenance() as DevicePtr
    }
}

/// A received sample, released after all its users when the last array of it is dropped. That may
/// be on any thread, and without the interpreter.
#[derive(Debug)]
pub struct SampleHolder {
    home: Home,
    /// `None` only while dropping.
    sample: Option<Sample>,
    pub consumers: Consumers,
    /// How long the CPU waits for its data.
    pub patience: Option<Duration>,
}

/// A loan's memory: mapped as long as any array of it lives, even after the loan has ended.
#[derive(Debug)]
pub struct LoanHolder {
    pub consumers: Consumers,
    #[allow(dead_code, reason = "held, not used")]
    pub hold: DropDetached<SlotHold>,
}

impl SampleHolder {
    /// The sample.
    pub fn sample(&self) -> &Sample {
        self.sample.as_ref().expect("present until dropped")
    }

    /// A stream that is after the work of all users so far.
    pub fn behind(&self, py: Python<'_>) -> Outcome<warpipe::Stream> {
        py.detach(|| self.consumers.join(self.sample().stream()))
    }

    /// Makes `consumer` wait, on the device, until the data is complete. Call without the
    /// interpreter.
    fn fence(&self, consumer: &Consumer) -> Outcome<()> {
        self.home.check()?;
        if testing::waits_are_skipped() || self.sample().is_complete()? {
            return Ok(());
        }
        self.sample().wait_on(consumer.linked())?;
        consumer.led()
    }

    /// Waits on the CPU until the data is complete.
    pub fn wait(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<()> {
        self.home.check()?;
        let sample = self.sample();
        if call(py, || sample.is_complete())? {
            return Ok(());
        }
        awaited(py, timeout, |wait| sample.wait(wait))
    }

    /// Releases the sample after all its users. Call without the interpreter.
    pub fn release(mut self) -> Outcome<Receipt> {
        self.home.check()?;
        let sample = self.sample.take().expect("present until dropped");
        let stream = self.consumers.join(sample.stream())?;
        Ok(sample.release_on(&stream)?)
    }
}

impl Drop for SampleHolder {
    fn drop(&mut self) {
        let Some(sample) = self.sample.take() else {
            return;
        };
        if !self.home.is_here() {
            // The library keeps the parent's link away from the child.
            return drop(sample);
        }
        detached(|| match self.consumers.join(sample.stream()) {
            // A release that fails closes the link; no caller is left to get the error.
            Ok(stream) => drop(sample.release_on(&stream)),
            // The device does not report when the users are done: the slot must not be written
            // again.
            Err(_) => std::mem::forget(sample),
        });
    }
}

impl MemoryHolder {
    /// Records a user, without making it wait for the data of a sample.
    pub fn note(&self, py: Python<'_>, consumer: &Consumer) -> Outcome<()> {
        match self {
            MemoryHolder::Owned(owner) => owner.admit(py, consumer)?,
            other => drop(other.consumers().map(|users| users.note(consumer))),
        }
        Ok(())
    }

    /// The users that are asked before it is released.
    fn consumers(&self) -> Option<&Consumers> {
        match self {
            MemoryHolder::Sample(lent) => Some(&lent.consumers),
            MemoryHolder::Loan(lease) => Some(&lease.consumers),
            MemoryHolder::Owned(owner) => Some(&owner.consumers),
            MemoryHolder::Copy(_) => None,
        }
    }
}

/// An array on a stream that may end when the array is dropped: before that the memory's release is
/// ordered after the stream's work.
#[derive(Debug)]
pub struct ConsumerStay {
    home: Home,
    hold: MemoryHolder,
    consumer: Consumer,
}

impl Drop for ConsumerStay {
    fn drop(&mut self) {
        if let Some(consumers) = self.hold.consumers().filter(|_| self.home.is_here()) {
            detached(|| consumers.leave(&self.consumer));
        }
    }
}

impl Memory {
    /// Wraps a received sample. `patience` is how long the CPU waits for its data.
    pub fn of_sample(
        sample: Sample,
        device: &warpipe::Device,
        patience: Option<Duration>,
    ) -> Memory {
        Memory {
            layout: *sample.layout(),
            lowest: sample.slot_ptr(),
            device: device.clone(),
            read_only: true,
            hold: MemoryHolder::Sample(Arc::new(SampleHolder {
                home: Home::here(),
                sample: Some(sample),
                consumers: Consumers::default(),
                patience,
            })),
        }
    }

    /// A copy on the host.
    pub fn of_copy(layout: Layout, bytes: Vec<u8>) -> Memory {
        let bytes = CopiedBytes(UnsafeCell::new(bytes.into_boxed_slice()));
        Memory {
            layout,
            lowest: bytes.address(),
            device: warpipe::Device::host(),
            read_only: false,
            hold: MemoryHolder::Copy(Arc::new(bytes)),
        }
    }

    /// The address of the element with all indices 0.
    pub fn address(&self) -> DevicePtr {
        self.lowest + self.layout.offset()
    }

    /// Prepares it for an array on a stream of its device. The stream may end once the array is
    /// dropped; dropping the result reports that.
    pub fn admit(&self, py: Python<'_>, consumer: &Consumer) -> Outcome<Option<ConsumerStay>> {
        match &self.hold {
            MemoryHolder::Sample(lent) => py.detach(|| lent.fence(consumer))?,
            MemoryHolder::Owned(owner) => py.detach(|| owner.fence(consumer))?,
            MemoryHolder::Loan(_) | MemoryHolder::Copy(_) => {}
        }
        let Some(consumers) = self.hold.consumers() else {
            return Ok(None);
        };
        // Also if the device refused the wait: then nothing was enqueued, and no array is made.
        if !consumer.may_end() {
            consumers.note(consumer);
            return Ok(None);
        }
        consumers.enter(consumer);
        Ok(Some(ConsumerStay {
            home: Home::here(),
            hold: self.hold.clone(),
            consumer: consumer.clone(),
        }))
    }

    /// Prepares it for the CPU, which waits if necessary.
    pub fn settle(&self, py: Python<'_>) -> PyResult<()> {
        match &self.hold {
            MemoryHolder::Sample(lent) if !testing::waits_are_skipped() => {
                lent.wait(py, lent.patience)
            }
            MemoryHolder::Owned(owner) => owner.settle(py, Some(DEFAULT_TIMEOUT)),
            _ => Ok(()),
        }
    }

    /// Its elements on the host in row-major order and without gaps, once the data is complete.
    pub fn packed(&self, py: Python<'_>) -> PyResult<(Layout, Vec<u8>)> {
        let bytes = self.copied(py)?;
        if self.layout.is_contiguous() {
            return Ok((self.layout, bytes));
        }
        let lowest = bytes.as_ptr().expose_provenance() as DevicePtr;
        let elements = Elements::new(self.layout, lowest);
        let layout = elements.packed().map_err(Fault::from)?;
        // SAFETY: the bytes stay for the call, and their layout was checked against their length.
        let packed = py.detach(|| unsafe { elements.bytes() }.map_err(Fault::from))?;
        Ok((layout, packed.into_owned()))
    }

    /// Its bytes on the host, once the data is complete.
    pub fn copied(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        self.settle(py)?;
        match &self.hold {
            MemoryHolder::Sample(lent) => {
                let (sample, lowest) = (lent.sample(), self.lowest);
                Ok(py.detach(|| frame::bytes_at(sample, lowest, &self.layout))?)
            }
            MemoryHolder::Owned(owner) => {
                let (device, lowest, bytes) = (&self.device, self.lowest, self.layout.bytes());
                let used_on =
                    |stream: &warpipe::Stream| owner.consumers.note(&Consumer::own(stream));
                // SAFETY: the hold keeps the memory mapped, also for what it notes, and the layout
                // was checked against its length.
                Ok(py.detach(|| unsafe { download(device, lowest, bytes, used_on) })?)
            }
            MemoryHolder::Loan(_) => {
                let next = "a loan is there to be written; receive it to read it, or use a framework's array of it";
                Err(Fault::Own("ExportError", format!("no copy of a loan: {next}")).into())
            }
            MemoryHolder::Copy(_) => unreachable!("a copy is handed out as it is"),
        }
    }
}
