//! A kernel: PTX for a GPU, and the same function for the CPU.

use std::ffi::CStr;

use crate::debug::opaque_debug;

/// The arguments of a kernel's CPU version: those of the whole launch, once.
#[derive(Debug, Clone, Copy)]
pub struct KernelLaunch<'a> {
    /// Blocks.
    pub grid: u32,
    /// Threads a block.
    pub block: u32,
    /// The arguments, each in 64 bits (addresses, integers, bit patterns of floats).
    pub args: &'a [u64],
}

/// The CPU version of a kernel: does the work of the whole grid.
///
/// # Safety
/// As for the kernel itself: the arguments name memory that is valid for the kernel's accesses.
pub type HostKernel = unsafe fn(KernelLaunch<'_>);

/// A module of this library, from its PTX with a NUL at the end.
pub(crate) const fn module(ptx: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(ptx.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("PTX with a NUL inside, or none at its end"),
    }
}

/// One kernel under both backends. All its parameters are 64 bits wide.
///
/// ```
/// use warpipe::{Kernel, KernelLaunch};
/// unsafe fn nothing(_: KernelLaunch<'_>) {}
/// const PTX: &std::ffi::CStr = c".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }";
/// static NOTHING: Kernel = Kernel::new(c"nothing", PTX, nothing);
/// assert_eq!(NOTHING.name.to_str(), Ok("nothing"));
/// ```
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The kernel's entry name in the PTX.
    pub name: &'static CStr,
    /// The PTX text of the module. Kernels of one module share one address, and are loaded
    /// together.
    pub ptx: &'static CStr,
    /// The CPU version.
    pub host: HostKernel,
}

impl Kernel {
    /// A kernel called `name` in the module `ptx`, and its CPU version.
    pub const fn new(name: &'static CStr, ptx: &'static CStr, host: HostKernel) -> Self {
        Kernel { name, ptx, host }
    }
}

opaque_debug!(Kernel { name });
