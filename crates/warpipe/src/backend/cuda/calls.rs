//! The driver calls that take or give other types than a caller wants, or statuses that are no
//! errors to it, as functions with Rust's types. All others are made by their own names.
//!
//! Functions are `unsafe` where the driver would follow a handle or pointer that the caller must
//! vouch for.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;

use super::sys::Fault;
use super::sys::*;
use crate::error::Error;

type DriverAnswer<T = ()> = Result<T, Fault>;

/// The text in a buffer of C.
fn text(buffer: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(buffer).unwrap_or_default();
    text.to_string_lossy().trim().to_owned()
}

/// A status in which "not ready" is an answer, not a failure.
fn ready(answer: DriverAnswer) -> DriverAnswer<bool> {
    match answer {
        Ok(()) => Ok(true),
        Err(fault) if fault.is(&[CUresult::NOT_READY]) => Ok(false),
        Err(fault) => Err(fault),
    }
}

impl Driver {
    pub fn device_name(&self, device: CUdevice) -> DriverAnswer<String> {
        let mut name = [0u8; 128];
        // SAFETY: the buffer has the length given, less one that keeps it terminated whatever is
        // written.
        unsafe { self.cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int - 1, device) }?;
        Ok(text(&name))
    }

    pub fn device_uuid(&self, device: CUdevice) -> DriverAnswer<[u8; 16]> {
        // `_v2` tells the parts of a partitioned GPU (MIG) apart, the older one does not.
        let uuid = match self.cuDeviceGetUuid_v2 {
            Some(_) => self.cuDeviceGetUuid_v2(device),
            None => self.cuDeviceGetUuid(device),
        };
        Ok(uuid?.bytes)
    }
}

// Streams, events, copies, and memory operations on words.
impl Driver {
    /// # Safety
    /// The stream is live.
    pub unsafe fn stream_query(&self, stream: CUstream) -> DriverAnswer<bool> {
        // SAFETY: the caller's promise.
        ready(unsafe { self.cuStreamQuery(stream) })
    }

    /// Whether work on the stream is recorded into a graph. The legacy default stream counts as
    /// capturing while a stream that is ordered with it captures. The query disturbs no capture.
    ///
    /// # Safety
    /// The stream is live.
    #[inline]
    pub unsafe fn stream_is_capturing(&self, stream: CUstream) -> DriverAnswer<bool> {
        // SAFETY: the caller's promise.
        match unsafe { self.cuStreamIsCapturing(stream) } {
            Ok(status) => Ok(status != STREAM_CAPTURE_STATUS_NONE),
            Err(fault) if fault.is(&[CUresult::STREAM_CAPTURE_IMPLICIT]) => Ok(true),
            // A driver without stream capture.
            Err(Fault::Symbol(_)) => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    /// Sets this thread's mode, and returns the one before.
    pub fn exchange_capture_mode(&self, mut mode: c_uint) -> DriverAnswer<c_uint> {
        // SAFETY: the pointer is to a live local, which the driver reads and writes.
        unsafe { self.cuThreadExchangeStreamCaptureMode(&mut mode) }?;
        Ok(mode)
    }

    /// # Safety
    /// The event is live.
    pub unsafe fn event_query(&self, event: CUevent) -> DriverAnswer<bool> {
        // SAFETY: the caller's promise.
        ready(unsafe { self.cuEventQuery(event) })
    }
}

// Memory: virtual memory management, registered host memory, pointers, and legacy handles.
impl Driver {
    /// # Safety
    /// The range is mapped host memory and stays so until it is unregistered.
    pub unsafe fn host_register(&self, pointer: *mut c_void, bytes: usize) -> DriverAnswer {
        let flags = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's promise.
        unsafe { self.cuMemHostRegister_v2(pointer, bytes, flags) }
    }

    /// One attribute of a pointer; `None` if the driver knows neither the pointer nor the
    /// attribute.
    pub fn pointer_attribute(
        &self,
        attribute: PointerAttribute,
        pointer: CUdeviceptr,
    ) -> DriverAnswer<Option<u64>> {
        // A shorter one fills the first bytes, which are the low ones on every machine with a GPU.
        let mut value = 0u64;
        let data = ptr::from_mut(&mut value).cast::<c_void>();
        // SAFETY: the driver stores the attribute in a live local with room for it; the address is
        // only looked up.
        match unsafe { self.cuPointerGetAttribute(data, attribute, pointer) } {
            Ok(()) => Ok(Some(value)),
            Err(fault) if fault.is(&[CUresult::INVALID_VALUE]) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Whether the driver knows `pointer` as page-locked host memory.
    pub fn is_registered_host(&self, pointer: *const u8) -> DriverAnswer<bool> {
        let found = self.pointer_attribute(PointerAttribute::MemoryType, pointer as u64)?;
        Ok(found == Some(u64::from(MEMORYTYPE_HOST)))
    }
}

// Modules, functions, and launches.
impl Driver {
    /// Compiles and loads PTX; a failure comes with the compiler's log.
    pub fn module_load(&self, ptx: &CStr) -> Result<CUmodule, Error> {
        let mut log = [0u8; 4096];
        let mut options = [JIT_ERROR_LOG_BUFFER, JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let room = ptr::without_provenance_mut(log.len() - 1);
        let mut values = [log.as_mut_ptr().cast::<c_void>(), room];
        let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
        // SAFETY: the image is NUL-terminated text; there are two options and values, and the log
        // has the size stated, less one that keeps it terminated.
        unsafe { self.cuModuleLoadDataEx(ptx.as_ptr().cast(), 2, options, values) }
            .map_err(|fault| fault.with_detail(&text(&log)))
    }

    /// Makes a lazily loaded function resident: `cuFuncLoad` (CUDA 12.4), on older drivers by the
    /// query of an attribute.
    ///
    /// # Safety
    /// The function's module is loaded.
    pub unsafe fn function_load(&self, function: CUfunction) -> DriverAnswer {
        if self.cuFuncLoad.is_some() {
            // SAFETY: the caller's promise.
            return unsafe { self.cuFuncLoad(function) };
        }
        // SAFETY: as above.
        unsafe { self.cuFuncGetAttribute(FUNC_ATTRIBUTE_NUM_REGS, function) }.map(drop)
    }

    /// # Safety
    /// `parameters` has a pointer for every parameter of the function, each to a value of the
    /// parameter's size; the memory that the values name is valid until the kernel is done; the
    /// stream is live.
    pub unsafe fn launch(
        &self,
        kernel: CUfunction,
        (grid, block): (u32, u32),
        stream: CUstream,
        parameters: &mut [*mut c_void],
    ) -> DriverAnswer {
        let (values, none) = (parameters.as_mut_ptr(), ptr::null_mut());
        // SAFETY: the driver copies the parameters before it returns; the rest is the caller's
        // promise.
        unsafe { self.cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, 0, stream, values, none) }
    }
}
