//! Modules and functions, loaded once: the driver compiles the PTX of a [`Kernel`] when it is first
//! needed.

use std::collections::HashMap;
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

impl Kernels {
    /// The function, if it is loaded.
    fn known(&self, kernel: &Kernel) -> Option<CUfunction> {
        self.functions
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&key(kernel))
            .copied()
    }

    /// Loads the function, unless another thread has. The context is current.
    fn load(&self, driver: &Driver, kernel: &Kernel) -> Result<CUfunction> {
        if let Some(function) = self.known(kernel) {
            return Ok(function);
        }
        let module = self.module(driver, kernel.ptx)?;
        let function = load_function(driver, module, kernel.name)?;
        self.functions
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key(kernel), function);
        Ok(function)
    }

    fn module(&self, driver: &Driver, ptx: &'static CStr) -> Result<CUmodule> {
        let mut modules = self.modules.locked();
        if let Some(module) = modules.get(&address(ptx)) {
            return Ok(*module);
        }
        let module = load_module(driver, ptx)?;
        modules.insert(address(ptx), module);
        Ok(module)
    }
}

fn key(kernel: &Kernel) -> (usize, usize) {
    (address(kernel.ptx), address(kernel.name))
}

fn address(text: &'static CStr) -> usize {
    text.as_ptr().addr()
}

fn load_module(driver: &Driver, ptx: &CStr) -> Result<CUmodule> {
    driver
        .module_load(ptx)
        .map_err(|(fault, log)| fault.with_detail(&log))
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
        let module = load_module(driver, ptx)?;
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
        (blocks, threads): (u32, u32),
        mut parameter: P,
    ) -> Result<(), Fault> {
        let mut parameters = [ptr::from_mut(&mut parameter).cast::<c_void>()];
        // SAFETY: the caller's promise.
        unsafe { driver.launch(self.0, blocks, threads, stream, &mut parameters) }
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
            return Err(Error::argument(
                "kernel arguments",
                args.len(),
                format!("at most {ARGUMENTS_MAX}"),
            ));
        }
        let function = self.function(kernel)?;
        let _current = self.enter_to_enqueue()?;
        let mut parameters = [ptr::null_mut::<c_void>(); ARGUMENTS_MAX];
        for (parameter, argument) in parameters.iter_mut().zip(args) {
            *parameter = ptr::from_ref(argument).cast_mut().cast();
        }
        // SAFETY: all parameters of a kernel are 64 bits wide, each pointer is to such a value, and
        // the driver only reads them; the caller promises that they are the kernel's parameters.
        unsafe {
            self.driver
                .launch(function, grid, block, stream.0, &mut parameters)
        }
        .map_err(|fault| self.explain(fault.into()))
    }

    fn preload(&self, kernel: &Kernel) -> Result<()> {
        self.function(kernel).map(drop)
    }
}

impl CudaBackend {
    fn function(&self, kernel: &Kernel) -> Result<CUfunction> {
        match self.kernels.known(kernel) {
            Some(function) => Ok(function),
            None => {
                let _current = self.enter()?;
                self.kernels.load(self.driver, kernel)
            }
        }
    }
}
