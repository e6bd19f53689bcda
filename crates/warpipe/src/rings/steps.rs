//! The two steps of a ring on a stream, `steps.cu`.

use std::ffi::CStr;

use super::host_ring::HostRing;
use crate::kernel::{Kernel, KernelLaunch};

/// A static, so that it has one address, and the module is loaded once.
static PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("steps.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("steps.ptx has a NUL inside"),
    };

/// Waits for the next item.
pub(crate) static WAIT: Kernel = Kernel::new(c"warpipe_ring_wait_step", PTX, wait);
/// Passes on the item that was waited for.
pub(crate) static PASS: Kernel = Kernel::new(c"warpipe_ring_pass_step", PTX, pass);

/// # Safety
/// As for [`HostRing::new`], of the one argument.
unsafe fn wait(launch: KernelLaunch<'_>) {
    // SAFETY: the caller's promise.
    unsafe { HostRing::new(launch.args[0]) }.wait_step();
}

/// # Safety
/// As for [`HostRing::new`], of the one argument.
unsafe fn pass(launch: KernelLaunch<'_>) {
    // SAFETY: the caller's promise.
    unsafe { HostRing::new(launch.args[0]) }.pass_step();
}

/// Both kernels.
pub static RING_STEPS: &[Kernel] = &[
    Kernel::new(c"warpipe_ring_wait_step", PTX, wait),
    Kernel::new(c"warpipe_ring_pass_step", PTX, pass),
];
