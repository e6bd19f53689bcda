//! Modules, functions, and launches.

use std::ffi::{CStr, c_uint, c_void};
use std::ptr;

use super::DriverAnswer;
use crate::backend::cuda::fault::Fault;
use crate::backend::cuda::shutdown_gate;
use crate::backend::cuda::sys::*;

impl Driver {
    /// Compiles and loads PTX; a failure comes with the compiler's log.
    pub fn module_load(&self, ptx: &CStr) -> Result<CUmodule, (Fault, String)> {
        let mut module = CUmodule(ptr::null_mut());
        let mut log = [0u8; 4096];
        let mut options = [JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [
            log.as_mut_ptr().cast::<c_void>(),
            ptr::without_provenance_mut(log.len() - 1),
        ];
        // SAFETY: the image is NUL-terminated text; options and values are of one length, and the
        // log has the size stated, less one that keeps it terminated.
        let loaded = unsafe {
            call!(
                self,
                cuModuleLoadDataEx(
                    &mut module,
                    ptx.as_ptr().cast(),
                    options.len() as c_uint,
                    options.as_mut_ptr(),
                    values.as_mut_ptr(),
                )
            )
        };
        loaded.map(|()| module).map_err(|fault| {
            let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
            (
                fault,
                String::from_utf8_lossy(&log[..end]).trim().to_owned(),
            )
        })
    }

    /// # Safety
    /// The module is loaded.
    pub unsafe fn module_function(
        &self,
        module: CUmodule,
        name: &CStr,
    ) -> DriverAnswer<CUfunction> {
        let mut function = CUfunction(ptr::null_mut());
        // SAFETY: the name is NUL-terminated; the module is the caller's promise.
        unsafe {
            call!(
                self,
                cuModuleGetFunction(&mut function, module, name.as_ptr())
            )
        }?;
        Ok(function)
    }

    /// Makes a lazily loaded function resident: `cuFuncLoad` (CUDA 12.4), on older drivers by the
    /// query of an attribute.
    ///
    /// # Safety
    /// The function's module is loaded.
    pub unsafe fn function_load(&self, function: CUfunction) -> DriverAnswer {
        if self.cuFuncLoad.is_some() {
            // SAFETY: the caller's promise.
            return unsafe { call!(self, cuFuncLoad(function)) };
        }
        let mut registers = 0;
        // SAFETY: the out pointer is a live local; the function is the caller's promise.
        unsafe {
            call!(
                self,
                cuFuncGetAttribute(&mut registers, FUNC_ATTRIBUTE_NUM_REGS, function)
            )
        }
    }

    /// # Safety
    /// `parameters` has a pointer for every parameter of the function, each to a value of the
    /// parameter's size; the memory that the values name is valid until the kernel is done; the
    /// stream is live.
    pub unsafe fn launch(
        &self,
        function: CUfunction,
        grid: u32,
        block: u32,
        stream: CUstream,
        parameters: &mut [*mut c_void],
    ) -> DriverAnswer {
        let parameters = parameters.as_mut_ptr();
        // SAFETY: the driver copies the parameters before it returns; the rest is the caller's
        // promise.
        unsafe {
            call!(
                self,
                cuLaunchKernel(
                    function,
                    grid,
                    1,
                    1,
                    block,
                    1,
                    1,
                    0,
                    stream,
                    parameters,
                    ptr::null_mut()
                )
            )
        }
    }
}
