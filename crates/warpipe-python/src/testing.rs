//! Private to the tests and the benchmark of this package. **This module is marked for unsafe**: it
//! launches kernels on memory that the caller names.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

use crate::detached::call;
use crate::device::Device;
use crate::errors::Fault;
use crate::loan::Loan;
use crate::memory_owner::{DeviceMalloc, OwnedMemory};
use crate::stream::{Consumer, Stream};
use crate::view::View;
use crate::wait::{Seconds, seconds};

static SKIPPED: AtomicBool = AtomicBool::new(false);

/// Whether arrays are handed out without waiting for their data. That is wrong, and lets a test
/// show it.
pub fn waits_are_skipped() -> bool {
    SKIPPED.load(Ordering::Relaxed)
}

/// Hands out arrays without waiting for their data, or no longer does: the negative control of the
/// tests of waits.
#[pyfunction]
pub fn _skip_waits(skip: bool) {
    SKIPPED.store(skip, Ordering::Relaxed);
}

/// Enqueues on ``stream`` a kernel that waits ``delay`` seconds and then fills the loan with the
/// pattern of ``seed``.
#[pyfunction]
pub fn _slow_fill(
    py: Python<'_>,
    loan: &Bound<'_, Loan>,
    stream: &Bound<'_, Stream>,
    seed: u64,
    delay: Seconds,
) -> PyResult<()> {
    let memory = loan.get().owner.memory()?;
    let delay = seconds(delay, "delay")?;
    let (stream, words) = (stream.get().inner()?, memory.layout.bytes() / 8);
    // SAFETY: the words lie in the loan, which is this caller's to write until it is sent behind
    // this stream.
    call(py, || unsafe {
        warpipe_kernels::slow_fill(stream, memory.lowest, words, seed, delay)
    })
}

/// Word ``index`` of the pattern of ``seed``.
#[pyfunction]
pub fn _pattern(seed: u64, index: u64) -> u64 {
    warpipe_kernels::pattern(seed, index)
}

/// Loads the kernels of these tests, so that no later launch loads them behind a stream that waits.
#[pyfunction]
pub fn _preload(py: Python<'_>, stream: &Bound<'_, Stream>) -> PyResult<()> {
    let device = stream.get().inner()?.device();
    call(py, || warpipe_kernels::preload(device))
}

/// The kernel of the benchmark and of tests, on one stream: float32 ``i`` of a target becomes that
/// of a source plus ``addend``. Made once, so that a launch from Python costs little more than the
/// driver's own.
///
/// The stream is a ``Stream`` of the device, or any argument that ``Stream`` documents as one; a
/// stream that is given by its number has to outlive this. The kernels are loaded here.
///
/// Raises ``ArgumentError`` for a stream of another device, ``DriverError``.
#[pyclass(frozen, module = "warpipe", name = "_Adder")]
#[derive(Debug)]
pub struct Adder {
    consumer: Consumer,
    count: u64,
    addend: f32,
}

#[pymethods]
impl Adder {
    #[new]
    fn new(
        py: Python<'_>,
        device: Device,
        stream: &Bound<'_, PyAny>,
        count: u64,
        addend: f32,
    ) -> PyResult<Adder> {
        let consumer = Consumer::from_argument(py, &device.inner, stream)?;
        call(py, || warpipe_kernels::preload(&device.inner))?;
        Ok(Adder {
            consumer,
            count,
            addend,
        })
    }

    /// Enqueues it (``cuLaunchKernel``). Both addresses are of ``count`` float32 that the device
    /// reaches and that stay until the kernel is done; they are equal, or the two ranges do not
    /// overlap. None of that is checked.
    ///
    /// Raises ``DriverError``.
    #[pyo3(signature = (source, target, /))]
    fn launch(&self, source: u64, target: u64) -> PyResult<()> {
        let (stream, count, addend) = (&self.consumer.stream, self.count, self.addend);
        // SAFETY: that the addresses are good is the caller's promise, as the documentation asks.
        let launched = unsafe { warpipe_kernels::add(stream, target, source, count, addend) };
        Ok(launched.map_err(Fault::from)?)
    }
}

/// Memory of ``nbytes`` bytes as another allocator makes it (``cuMemAlloc``), which no descriptor
/// names.
#[pyfunction]
pub fn _allocate_plain(py: Python<'_>, nbytes: u64, device: Device) -> PyResult<Py<View>> {
    let malloc = OwnedMemory::Malloc(DeviceMalloc::allocate(&device.inner, nbytes)?);
    Py::new(py, View::of("the allocation", malloc)?)
}
