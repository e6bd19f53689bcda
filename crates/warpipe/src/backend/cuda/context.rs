//! The current context of a thread, and its capture mode, for the duration of driver calls.

use std::ffi::c_uint;

use super::shutdown_gate::{self, DriverGuard};
use super::sys::{self, CUcontext, Driver};
use crate::error::Result;

/// Attempts to restore the caller's context.
const POP_TRIES: u32 = 3;

/// While it lives, this thread's calls disturb no stream capture
/// (`cuThreadExchangeStreamCaptureMode`).
///
/// In the default mode of a thread, a call that the driver counts as unsafe (`cuEventQuery`,
/// `cuMemHostRegister`, an allocation) fails while any thread captures in global mode, *and
/// invalidates that capture*. The library makes such calls at times that no user chooses, on its
/// own threads and inside calls like `Subscriber::open`. They concern no stream that is captured,
/// so the relaxed mode is right for them.
#[derive(Debug)]
pub(super) struct Relaxed {
    driver: &'static Driver,
    /// `None` if there is nothing to restore: it was the user's mode already, or the driver has no
    /// captures.
    previous: Option<c_uint>,
}

impl Relaxed {
    pub(super) fn new(driver: &'static Driver) -> Relaxed {
        let relaxed = sys::STREAM_CAPTURE_MODE_RELAXED;
        let previous = driver.exchange_capture_mode(relaxed).ok();
        Relaxed {
            driver,
            previous: previous.filter(|&mode| mode != relaxed),
        }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if let Some(mode) = self.previous {
            let _ = self.driver.exchange_capture_mode(mode);
        }
    }
}

/// While it lives, a context is current on this thread; its drop restores the caller's.
#[derive(Debug)]
pub(super) struct Current {
    driver: &'static Driver,
    pub(super) pushed: bool,
    /// Dropped after the context has been restored, and before this thread leaves the gate.
    relaxed: Option<Relaxed>,
    _guard: DriverGuard,
}

pub(super) fn enter(driver: &'static Driver, context: CUcontext) -> Result<Current> {
    let mut current = make_current(driver, context)?;
    current.relaxed = Some(Relaxed::new(driver));
    Ok(current)
}

#[inline]
pub(super) fn make_current(driver: &'static Driver, context: CUcontext) -> Result<Current> {
    let guard = shutdown_gate::enter();
    // Mostly the context is current already, and the query is far cheaper than a push and a pop.
    let pushed = driver.cuCtxGetCurrent()? != context;
    if pushed {
        // SAFETY: the context is retained for the life of the process.
        unsafe { driver.cuCtxPushCurrent_v2(context) }?;
    }
    Ok(Current {
        driver,
        pushed,
        relaxed: None,
        _guard: guard,
    })
}

impl Drop for Current {
    #[inline]
    fn drop(&mut self) {
        // A failed pop must not leave the caller with another context than before.
        let _ = self.pushed && (0..POP_TRIES).any(|_| self.driver.cuCtxPopCurrent_v2().is_ok());
    }
}
