//! The memory behind arrays, and the streams that use it: a received sample, a loan, other memory
//! of the library, or a copy on the host. **This module is marked for unsafe**: it copies from
//! memory by address.

use std::cell::UnsafeCell;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use warpipe::backend::DevicePtr;
use warpipe::{Layout, Receipt, Sample, SlotHold};
use warpipe_dlpack::Elements;

use crate::detached::{DropDetached, call, detached};
use crate::errors::{Fault, Outcome};
use crate::memory_owner::{MemoryOwner, download};
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
    fn new(bytes: Vec<u8>) -> Arc<CopiedBytes> {
        Arc::new(CopiedBytes(UnsafeCell::new(bytes.into_boxed_slice())))
    }

    /// The first byte, for reading and writing, and the length.
    fn range(&self) -> (*mut u8, usize) {
        // SAFETY: the box itself does not change, and a pointer, not a reference, leaves.
        let bytes: *mut [u8] = unsafe { &raw mut **self.0.get() };
        (bytes.cast(), bytes.len())
    }

    fn address(&self) -> DevicePtr {
        self.range().0.expose_provenance() as DevicePtr
    }

    /// The present contents.
    fn to_vec(&self) -> Vec<u8> {
        let (first, length) = self.range();
        let mut copy = Vec::with_capacity(length);
        // SAFETY: so many bytes are there until drop, and the copy has room for them.
        unsafe {
            ptr::copy_nonoverlapping(first, copy.as_mut_ptr(), length);
            copy.set_len(length);
        }
        copy
    }

    /// As a Python object.
    pub fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let (first, length) = self.range();
        PyBytes::new_with(py, length, |bytes| {
            // SAFETY: as long as what is there, and apart from it.
            unsafe { ptr::copy_nonoverlapping(first, bytes.as_mut_ptr(), length) };
            Ok(())
        })
    }
}

/// A received sample, released after all its users when the last array of it is dropped. That may
/// be on any thread, and without the interpreter.
#[derive(Debug)]
pub struct SampleHolder {
    home: Home,
    /// `None` only while dropping.
    sample: Option<Sample>,
    consumers: Consumers,
    /// How long the CPU waits for its data.
    patience: Option<Duration>,
}

/// A loan's memory: mapped as long as any array of it lives, even after the loan has ended.
#[derive(Debug)]
pub struct LoanHolder {
    pub consumers: Consumers,
    _hold: DropDetached<SlotHold>,
}

impl LoanHolder {
    /// Wraps a loan that has no user yet.
    pub fn new(hold: SlotHold) -> LoanHolder {
        LoanHolder {
            consumers: Consumers::default(),
            _hold: DropDetached::new(hold),
        }
    }
}

impl SampleHolder {
    /// Wraps a sample.
    pub fn new(sample: Sample, patience: Option<Duration>) -> SampleHolder {
        SampleHolder {
            home: Home::here(),
            sample: Some(sample),
            consumers: Consumers::default(),
            patience,
        }
    }

    /// The sample.
    pub fn sample(&self) -> &Sample {
        self.sample.as_ref().expect("present until dropped")
    }

    /// Records a user of the memory, without making it wait for the data.
    pub fn note(&self, consumer: &Consumer) {
        self.consumers.note(consumer);
    }

    /// The bytes of the sample, or of a part of it, complete already.
    fn to_bytes(&self, lowest: DevicePtr, layout: &Layout) -> Outcome<Vec<u8>> {
        frame::bytes_at(self.sample(), lowest, layout)
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

impl SampleHolder {
    fn let_go(&mut self, sample: Sample) {
        match self.consumers.join(sample.stream()) {
            // A release that fails closes the link; no caller is left to get the error.
            Ok(stream) => drop(sample.release_on(&stream)),
            // The device does not report when the users are done: the slot must not be written
            // again.
            Err(_) => std::mem::forget(sample),
        }
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
        detached(|| self.let_go(sample));
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
            MemoryHolder::Owned(owner) => Some(owner.consumers()),
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

impl ConsumerStay {
    fn of(hold: &MemoryHolder, consumer: &Consumer) -> ConsumerStay {
        if let Some(consumers) = hold.consumers() {
            consumers.enter(consumer);
        }
        ConsumerStay {
            home: Home::here(),
            hold: hold.clone(),
            consumer: consumer.clone(),
        }
    }
}

impl Drop for ConsumerStay {
    fn drop(&mut self) {
        if let Some(consumers) = self.hold.consumers().filter(|_| self.home.is_here()) {
            detached(|| consumers.leave(&self.consumer));
        }
    }
}

impl Memory {
    /// Wraps a received sample.
    pub fn of_sample(lent: &Arc<SampleHolder>, device: &warpipe::Device) -> Memory {
        let (layout, lowest) = (*lent.sample().layout(), lent.sample().slot_ptr());
        Memory {
            layout,
            lowest,
            device: device.clone(),
            read_only: true,
            hold: MemoryHolder::Sample(lent.clone()),
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
            MemoryHolder::Loan(_) => {}
            MemoryHolder::Owned(owner) => py.detach(|| owner.fence(consumer))?,
            MemoryHolder::Copy(_) => return Ok(None),
        }
        // Also if the device refused the wait: then nothing was enqueued, and no array is made.
        if consumer.may_end() {
            return Ok(Some(ConsumerStay::of(&self.hold, consumer)));
        }
        if let Some(consumers) = self.hold.consumers() {
            consumers.note(consumer);
        }
        Ok(None)
    }

    /// Prepares it for the CPU, which waits if necessary.
    pub fn settle(&self, py: Python<'_>) -> PyResult<()> {
        match &self.hold {
            MemoryHolder::Sample(lent) if !testing::waits_are_skipped() => {
                lent.wait(py, lent.patience)
            }
            MemoryHolder::Owned(owner) => owner.settle_soon(py),
            _ => Ok(()),
        }
    }

    /// A copy on the host in row-major order and without gaps, once the data is complete.
    pub fn packed(&self, py: Python<'_>) -> PyResult<Memory> {
        let copied = self.copied(py)?;
        if copied.layout.is_contiguous() {
            return Ok(copied);
        }
        let elements = Elements::new(copied.layout, copied.lowest);
        let layout = elements.packed().map_err(Fault::from)?;
        // SAFETY: a copy's bytes stay as long as its hold, and its layout was checked against their
        // length.
        let packed = py.detach(|| unsafe { elements.bytes() }.map_err(Fault::from))?;
        let bytes = CopiedBytes::new(packed.into_owned());
        let lowest = bytes.address();
        Ok(Memory {
            layout,
            lowest,
            hold: MemoryHolder::Copy(bytes),
            ..copied
        })
    }

    /// A copy on the host, once the data is complete.
    pub fn copied(&self, py: Python<'_>) -> PyResult<Memory> {
        self.settle(py)?;
        let bytes = match &self.hold {
            MemoryHolder::Copy(bytes) => bytes.to_vec(),
            MemoryHolder::Sample(lent) => py.detach(|| lent.to_bytes(self.lowest, &self.layout))?,
            MemoryHolder::Owned(owner) => {
                let (device, lowest, bytes) = (&self.device, self.lowest, self.layout.bytes());
                let used_on =
                    |stream: &warpipe::Stream| owner.consumers().note(&Consumer::own(stream));
                // SAFETY: the hold keeps the memory mapped, also for what it notes, and the layout
                // was checked against its length.
                py.detach(|| unsafe { download(device, lowest, bytes, used_on) })?
            }
            MemoryHolder::Loan(_) => {
                let next = "a loan is there to be written; receive it to read it, or use a framework's array of it";
                return Err(Fault::Own("ExportError", format!("no copy of a loan: {next}")).into());
            }
        };
        let bytes = CopiedBytes::new(bytes);
        Ok(Memory {
            layout: self.layout,
            lowest: bytes.address(),
            device: warpipe::Device::host(),
            read_only: false,
            hold: MemoryHolder::Copy(bytes),
        })
    }
}
