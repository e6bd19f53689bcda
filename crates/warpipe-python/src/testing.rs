//! What the tests of this package need and nobody else should use. **This module is marked for unsafe**: it launches
//! kernels on memory that the caller names.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

use crate::device::Device;
use crate::errors::Fault;
use crate::held::{Place, Plain};
use crate::loan::Loan;
use crate::stream::Stream;
use crate::view::View;
use crate::wait::seconds;

static SKIPPED: AtomicBool = AtomicBool::new(false);

/// Whether arrays are handed out without waiting for their data, which is wrong, so that a test can show it.
pub fn waits_are_skipped() -> bool {
    SKIPPED.load(Ordering::Relaxed)
}

/// Hands out arrays without waiting for their data, or no longer does: the negative control of the tests of waits.
#[pyfunction]
fn _skip_waits(skip: bool) {
    SKIPPED.store(skip, Ordering::Relaxed);
}

/// Enqueues on ``stream`` a kernel that waits ``delay`` seconds and then fills the loan with the pattern of ``seed``.
#[pyfunction]
fn _slow_fill(loan: &Bound<'_, Loan>, stream: &Bound<'_, Stream>, seed: u64, delay: f64) -> PyResult<()> {
    let memory = loan.get().memory()?;
    let delay = seconds(delay, "delay")?;
    // SAFETY: the words lie in the loan, which is this caller's to write until it is sent behind this stream.
    let filled = unsafe {
        warpipe_kernels::slow_fill(stream.get().inner()?, memory.lowest, memory.layout.bytes() / 8, seed, delay)
    };
    Ok(filled.map_err(Fault::from)?)
}

/// Word ``index`` of the pattern of ``seed``.
#[pyfunction]
fn _pattern(seed: u64, index: u64) -> u64 {
    warpipe_kernels::pattern(seed, index)
}

/// Loads the kernels of these tests, so that no later launch loads them behind a stream that waits.
#[pyfunction]
fn _preload(stream: &Bound<'_, Stream>) -> PyResult<()> {
    Ok(warpipe_kernels::preload(stream.get().inner()?.device()).map_err(Fault::from)?)
}

/// Memory of ``nbytes`` bytes as another allocator makes it (``cuMemAlloc``), which no descriptor names.
#[pyfunction]
fn _allocate_plain(nbytes: u64, device: &Bound<'_, PyAny>) -> PyResult<View> {
    let device = Device::from_argument(Some(device))?.inner;
    Ok(View::of("the allocation", Place::Plain(Plain::allocate(&device, nbytes)?))?)
}

/// Adds the functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(_skip_waits, module)?)?;
    module.add_function(wrap_pyfunction!(_slow_fill, module)?)?;
    module.add_function(wrap_pyfunction!(_allocate_plain, module)?)?;
    module.add_function(wrap_pyfunction!(_pattern, module)?)?;
    module.add_function(wrap_pyfunction!(_preload, module)?)
}
