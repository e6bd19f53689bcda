//! Modules and functions, loaded once: the driver compiles the PTX of a [`Kernel`] when it is first
//! needed.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError, RwLock};

use super::super::sys::Fault;
use super::super::sys::{CUfunction, CUmodule, CUstream, Driver, STREAM_NON_BLOCKING};
use super::CudaBackend;
use crate::backend::RawStream;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::mutex::LockUnpoisoned;

/// The most arguments of a kernel: their addresses are in an array on the launching thread's stack.
const ARGUMENTS_MAX: usize = 32;

/// The functions loaded into a context. Texts and names are `'static`, so their addresses are their
/// identity and no launch compares a string.
#[derive(Debug, Default)]
pub(in crate::backend::cuda) struct Kernels {
    functions: RwLock<HashMap<(usize, usize), CUfunction>>,
    /// Held while a module is compiled, so that two threads do not compile one text twice.
    modules: Mutex<HashMap<usize, CUmodule>>,
}

fn address(text: &'static CStr) -> usize {
    text.as_ptr().addr()
}

/// Looks up a function and makes it resident: under lazy loading its first launch would otherwise
/// load it, and loading can wait for a stream that itself waits.
fn load_function(driver: &Driver, module: CUmodule, name: &CStr) -> Result<CUfunction> {
    // SAFETY: the module is loaded, and modules are never unloaded.
    let function = unsafe { driver.cuModuleGetFunction(module, name.as_ptr()) }
        .map_err(|fault| fault.with_detail(&format!("kernel {}", name.to_string_lossy())))?;
    // SAFETY: as above.
    unsafe { driver.function_load(function) }?;
    Ok(function)
}

/// A kernel of this library, with one parameter by value.
#[derive(Debug)]
pub(in crate::backend::cuda) struct ResidentKernel(CUfunction);

impl ResidentKernel {
    /// Loads the kernel and launches it once, so that no later launch loads code. The launch uses
    /// its own stream, since the default stream would wait for other work of the program. The
    /// context is current.
    ///
    /// # Safety
    /// The kernel takes such a parameter, and does nothing with `nothing`.
    pub unsafe fn load<P>(driver: &Driver, ptx: &CStr, name: &CStr, nothing: P) -> Result<Self> {
        let module = driver.module_load(ptx)?;
        let kernel = ResidentKernel(load_function(driver, module, name)?);
        let stream = driver.cuStreamCreate(STREAM_NON_BLOCKING)?;
        // SAFETY: the caller's promise; the stream is live.
        let launched = unsafe { kernel.launch(driver, stream, (1, 1), nothing) };
        // SAFETY: created above, used for the last time.
        let destroyed = unsafe { driver.cuStreamDestroy_v2(stream) };
        launched.and(destroyed)?;
        Ok(kernel)
    }

    /// Launches it over so many blocks of so many threads.
    ///
    /// # Safety
    /// The kernel takes such a parameter; what that names is valid until the kernel is done; the
    /// stream is live.
    pub unsafe fn launch<P>(
        &self,
        driver: &Driver,
        stream: CUstream,
        shape: (u32, u32),
        mut parameter: P,
    ) -> Result<(), Fault> {
        let mut parameters = [ptr::from_mut(&mut parameter).cast::<c_void>()];
        // SAFETY: the caller's promise.
        unsafe { driver.launch(self.0, shape, stream, &mut parameters) }
    }
}

impl crate::backend::Kernels for CudaBackend {
    unsafe fn launch(
        &self,
        stream: RawStream,
        kernel: &Kernel,
        grid: u32,
        block: u32,
        args: &[u64],
    ) -> Result<()> {
        if args.len() > ARGUMENTS_MAX {
            let allowed = format!("at most {ARGUMENTS_MAX}");
            return Err(Error::argument("kernel arguments", args.len(), allowed));
        }
        let (function, shape) = (self.function(kernel)?, (grid, block));
        let mut values = [ptr::null_mut::<c_void>(); ARGUMENTS_MAX];
        for (value, argument) in values.iter_mut().zip(args) {
            *value = ptr::from_ref(argument).cast_mut().cast();
        }
        // SAFETY: all parameters of a kernel are 64 bits wide, each pointer is to such a value, and
        // the driver only reads them; the caller promises that they are the kernel's parameters.
        self.enqueued(|driver| unsafe { driver.launch(function, shape, stream.0, &mut values) })
    }

    fn preload(&self, kernel: &Kernel) -> Result<()> {
        self.function(kernel).map(drop)
    }
}

impl CudaBackend {
    /// The function, loaded if it is not.
    fn function(&self, kernel: &Kernel) -> Result<CUfunction> {
        let (text, functions) = (address(kernel.ptx), &self.kernels.functions);
        let key = (text, address(kernel.name));
        let read = functions.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(&function) = read.get(&key) {
            return Ok(function);
        }
        drop(read);
        let _current = self.enter()?;
        let module = match self.kernels.modules.locked().entry(text) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => *new.insert(self.driver.module_load(kernel.ptx)?),
        };
        let function = load_function(self.driver, module, kernel.name)?;
        let mut written = functions.write().unwrap_or_else(PoisonError::into_inner);
        Ok(*written.entry(key).or_insert(function))
    }
}
