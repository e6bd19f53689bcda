//! Driver calls that give something back, as functions with Rust's types. Calls that only do
//! something are made by their own names.
//!
//! Functions are `unsafe` where the driver would follow a handle or pointer that the caller must
//! vouch for.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;

use super::sys::Fault;
use super::sys::*;

type DriverAnswer<T = ()> = Result<T, Fault>;

/// What a call stores at the address of `zero`.
#[inline]
fn stored<T>(zero: T, call: impl FnOnce(&mut T) -> DriverAnswer) -> DriverAnswer<T> {
    let mut value = zero;
    call(&mut value)?;
    Ok(value)
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
    pub fn init(&self) -> DriverAnswer {
        // SAFETY: plain values.
        unsafe { self.cuInit(0) }
    }

    pub fn device_count(&self) -> DriverAnswer<u32> {
        let mut count = 0;
        // SAFETY: the out pointer is a live local.
        unsafe { self.cuDeviceGetCount(&mut count) }?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    pub fn device(&self, ordinal: u32) -> DriverAnswer<CUdevice> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the out pointer is a live local; the driver checks the ordinal.
        unsafe { self.cuDeviceGet(&mut device, ordinal) }?;
        Ok(device)
    }

    pub fn device_name(&self, device: CUdevice) -> DriverAnswer<String> {
        let mut name = [0u8; 128];
        // SAFETY: the buffer has the length given, less one that keeps it terminated whatever is
        // written.
        unsafe { self.cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int - 1, device) }?;
        let end = name
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    pub fn device_uuid(&self, device: CUdevice) -> DriverAnswer<[u8; 16]> {
        let mut uuid = CUuuid::default();
        // `_v2` tells the parts of a partitioned GPU (MIG) apart, the older one does not.
        if self.cuDeviceGetUuid_v2.is_some() {
            // SAFETY: the out pointer is a live local.
            unsafe { self.cuDeviceGetUuid_v2(&mut uuid, device) }?;
        } else {
            // SAFETY: as above.
            unsafe { self.cuDeviceGetUuid(&mut uuid, device) }?;
        }
        Ok(uuid.bytes)
    }

    pub fn device_memory(&self, device: CUdevice) -> DriverAnswer<u64> {
        // SAFETY: the out pointer is a live local.
        let bytes = stored(0, |bytes| unsafe {
            self.cuDeviceTotalMem_v2(bytes, device)
        })?;
        Ok(bytes as u64)
    }

    pub fn device_attribute(&self, device: CUdevice, attribute: c_uint) -> DriverAnswer<i32> {
        // SAFETY: the out pointer is a live local.
        stored(0, |value| unsafe {
            self.cuDeviceGetAttribute(value, attribute, device)
        })
    }

    pub fn can_access_peer(&self, device: CUdevice, peer: CUdevice) -> DriverAnswer<bool> {
        // SAFETY: the out pointer is a live local.
        let can = stored(0, |can| unsafe {
            self.cuDeviceCanAccessPeer(can, device, peer)
        })?;
        Ok(can != 0)
    }

    pub fn primary_context_retain(&self, device: CUdevice) -> DriverAnswer<CUcontext> {
        // SAFETY: the out pointer is a live local.
        stored(CUcontext(ptr::null_mut()), |context| unsafe {
            self.cuDevicePrimaryCtxRetain(context, device)
        })
    }

    pub fn primary_context_release(&self, device: CUdevice) -> DriverAnswer {
        // SAFETY: plain values; the driver counts the holds.
        unsafe { self.cuDevicePrimaryCtxRelease_v2(device) }
    }

    /// Whether a device's primary context exists, and has not been reset since.
    pub fn primary_context_is_active(&self, device: CUdevice) -> DriverAnswer<bool> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the out pointers are live locals.
        unsafe { self.cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) }?;
        Ok(active != 0)
    }

    /// A number that no other context in the process's life has.
    ///
    /// # Safety
    /// The context is live.
    pub unsafe fn context_id(&self, context: CUcontext) -> DriverAnswer<u64> {
        // SAFETY: the out pointer is a live local; the context is the caller's promise.
        stored(0, |id| unsafe { self.cuCtxGetId(context, id) })
    }

    #[inline]
    pub fn context_current(&self) -> DriverAnswer<CUcontext> {
        // SAFETY: the out pointer is a live local.
        stored(CUcontext(ptr::null_mut()), |context| unsafe {
            self.cuCtxGetCurrent(context)
        })
    }

    pub fn context_pop(&self) -> DriverAnswer {
        let mut context = CUcontext(ptr::null_mut());
        // SAFETY: the out pointer is a live local; an empty stack is an error, not a fault.
        unsafe { self.cuCtxPopCurrent_v2(&mut context) }
    }

    /// Free and total bytes of the current context's device.
    pub fn memory_info(&self) -> DriverAnswer<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out pointers are live locals.
        unsafe { self.cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok((free as u64, total as u64))
    }
}

// Streams, events, copies, and memory operations on words.
impl Driver {
    pub fn ipc_event_create(&self) -> DriverAnswer<CUevent> {
        // SAFETY: the out pointer is a live local.
        stored(ptr::null_mut(), |event| unsafe {
            self.cuEventCreate(event, EVENT_INTERPROCESS | EVENT_DISABLE_TIMING)
        })
    }

    /// # Safety
    /// The event is live and was created for other processes.
    pub unsafe fn ipc_export_event(&self, event: CUevent) -> DriverAnswer<[u8; 64]> {
        let mut handle = CUipcHandle { reserved: [0; 64] };
        // SAFETY: the out pointer is a live local; the event is the caller's promise.
        unsafe { self.cuIpcGetEventHandle(&mut handle, event) }?;
        Ok(handle.reserved)
    }

    /// Accepts any bytes: an invalid handle is a failure.
    pub fn ipc_open_event(&self, handle: &[u8; 64]) -> DriverAnswer<CUevent> {
        let (mut event, handle) = (ptr::null_mut(), CUipcHandle { reserved: *handle });
        // SAFETY: the out pointer is a live local; the driver checks the bytes.
        unsafe { self.cuIpcOpenEventHandle(&mut event, handle) }?;
        Ok(event)
    }

    pub fn stream_create(&self) -> DriverAnswer<CUstream> {
        // SAFETY: the out pointer is a live local.
        stored(ptr::null_mut(), |stream| unsafe {
            self.cuStreamCreate(stream, STREAM_NON_BLOCKING)
        })
    }

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
        let mut status = STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the out pointer is a live local; the stream is the caller's promise.
        match unsafe { self.cuStreamIsCapturing(stream, &mut status) } {
            Ok(()) => Ok(status != STREAM_CAPTURE_STATUS_NONE),
            Err(fault) if fault.is(&[CUresult::STREAM_CAPTURE_IMPLICIT]) => Ok(true),
            Err(fault) => Err(fault),
        }
    }

    /// Sets this thread's mode, and returns the one before.
    pub fn exchange_capture_mode(&self, mode: c_uint) -> DriverAnswer<c_uint> {
        // SAFETY: the pointer is to a live local, which the driver reads and writes.
        stored(mode, |mode| unsafe {
            self.cuThreadExchangeStreamCaptureMode(mode)
        })
    }

    /// # Safety
    /// The stream is live; the word is device-accessible until the operation is done.
    #[inline]
    pub unsafe fn stream_wait_value(
        &self,
        stream: CUstream,
        word: CUdeviceptr,
        value: u64,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { self.cuStreamWaitValue64_v2(stream, word, value, STREAM_WAIT_VALUE_GEQ) }
    }

    /// # Safety
    /// The stream is live; the word is device-accessible until the operation is done.
    #[inline]
    pub unsafe fn stream_write_value(
        &self,
        stream: CUstream,
        word: CUdeviceptr,
        value: u64,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { self.cuStreamWriteValue64_v2(stream, word, value, STREAM_WRITE_VALUE_DEFAULT) }
    }

    /// At most 256 operations.
    ///
    /// # Safety
    /// The stream is live; every word is device-accessible until its operation is done.
    #[inline]
    pub unsafe fn stream_batch(
        &self,
        stream: CUstream,
        operations: &mut [CUstreamBatchMemOpParams],
    ) -> DriverAnswer {
        let count = operations.len() as c_uint;
        // SAFETY: the pointer and count are those of one slice; the rest is the caller's promise.
        unsafe { self.cuStreamBatchMemOp_v2(stream, count, operations.as_mut_ptr(), 0) }
    }

    pub fn event_create(&self) -> DriverAnswer<CUevent> {
        // SAFETY: the out pointer is a live local.
        stored(ptr::null_mut(), |event| unsafe {
            self.cuEventCreate(event, EVENT_DISABLE_TIMING)
        })
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
    pub fn allocation_granularity(&self, prop: &CUmemAllocationProp) -> DriverAnswer<u64> {
        // SAFETY: both pointers are live for the call.
        let granularity = stored(0, |granularity| unsafe {
            self.cuMemGetAllocationGranularity(granularity, prop, MEM_ALLOC_GRANULARITY_MINIMUM)
        })?;
        Ok(granularity as u64)
    }

    pub fn memory_create(
        &self,
        bytes: usize,
        prop: &CUmemAllocationProp,
    ) -> DriverAnswer<CUmemGenericAllocationHandle> {
        // SAFETY: both pointers are live for the call.
        stored(0, |handle| unsafe {
            self.cuMemCreate(handle, bytes, prop, 0)
        })
    }

    pub fn address_reserve(&self, bytes: usize) -> DriverAnswer<CUdeviceptr> {
        // SAFETY: the out pointer is a live local; zeros leave alignment and place to the driver.
        stored(0, |address| unsafe {
            self.cuMemAddressReserve(address, bytes, 0, 0, 0)
        })
    }

    /// The descriptor is new and open in this process.
    ///
    /// # Safety
    /// The handle is held and was created exportable.
    pub unsafe fn memory_export(
        &self,
        handle: CUmemGenericAllocationHandle,
    ) -> DriverAnswer<c_int> {
        let mut fd: c_int = -1;
        let shareable = ptr::from_mut(&mut fd).cast::<c_void>();
        // SAFETY: for this handle type the driver stores an int; the handle is the caller's
        // promise.
        unsafe {
            self.cuMemExportToShareableHandle(
                shareable,
                handle,
                MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                0,
            )
        }?;
        Ok(fd)
    }

    /// The handle of the allocation that is mapped at an address, held once more. Every hold of an
    /// allocation has the same value. An address without one is a failure.
    pub fn memory_retain(
        &self,
        address: CUdeviceptr,
    ) -> DriverAnswer<CUmemGenericAllocationHandle> {
        let mut handle = 0;
        let address = ptr::without_provenance_mut::<c_void>(address as usize);
        // SAFETY: the out pointer is a live local; the address is only looked up.
        unsafe { self.cuMemRetainAllocationHandle(&mut handle, address) }?;
        Ok(handle)
    }

    /// Accepts any open descriptor: one that is not device memory is a failure.
    pub fn memory_import(&self, fd: c_int) -> DriverAnswer<CUmemGenericAllocationHandle> {
        let mut handle = 0;
        let shareable = ptr::without_provenance_mut::<c_void>(fd as usize);
        // SAFETY: for this handle type the "pointer" is the descriptor's number, which the driver
        // checks.
        unsafe {
            self.cuMemImportFromShareableHandle(
                &mut handle,
                shareable,
                MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            )
        }?;
        Ok(handle)
    }

    /// # Safety
    /// The range is mapped host memory and stays so until it is unregistered.
    pub unsafe fn host_register(&self, pointer: *mut c_void, bytes: usize) -> DriverAnswer {
        let flags = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's promise.
        unsafe { self.cuMemHostRegister_v2(pointer, bytes, flags) }
    }

    pub fn host_device_pointer(&self, pointer: *mut c_void) -> DriverAnswer<CUdeviceptr> {
        // SAFETY: the out pointer is a live local; a pointer that is not registered is a failure.
        stored(0, |address| unsafe {
            self.cuMemHostGetDevicePointer_v2(address, pointer, 0)
        })
    }

    /// One attribute of a pointer; `None` if the driver knows neither the pointer nor the
    /// attribute.
    ///
    /// # Safety
    /// The attribute is of type `T`.
    unsafe fn pointer_attribute<T>(
        &self,
        attribute: c_uint,
        pointer: CUdeviceptr,
        zero: T,
    ) -> DriverAnswer<Option<T>> {
        let mut value = zero;
        let data = ptr::from_mut(&mut value).cast::<c_void>();
        // SAFETY: the driver stores a value of the attribute's type (the caller's promise) in a
        // live local; the address is only looked up.
        match unsafe { self.cuPointerGetAttribute(data, attribute, pointer) } {
            Ok(()) => Ok(Some(value)),
            Err(fault) if fault.is(&[CUresult::INVALID_VALUE]) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// `CU_MEMORYTYPE_...`; `None` for a pointer that the driver does not know.
    pub fn pointer_memory_type(&self, pointer: CUdeviceptr) -> DriverAnswer<Option<c_uint>> {
        // SAFETY: this attribute is an unsigned int.
        unsafe { self.pointer_attribute(POINTER_ATTRIBUTE_MEMORY_TYPE, pointer, 0) }
    }

    pub fn pointer_is_managed(&self, pointer: CUdeviceptr) -> DriverAnswer<bool> {
        // SAFETY: this attribute is an unsigned int, or on some systems a bool, which fits in it.
        let managed =
            unsafe { self.pointer_attribute::<c_uint>(POINTER_ATTRIBUTE_IS_MANAGED, pointer, 0) }?;
        Ok(managed.is_some_and(|managed| managed != 0))
    }

    /// Whether the memory came from a pool. Drivers older than the attribute say no.
    pub fn pointer_is_pooled(&self, pointer: CUdeviceptr) -> DriverAnswer<bool> {
        // SAFETY: this attribute is a pointer-sized handle.
        let pool = unsafe {
            self.pointer_attribute::<usize>(POINTER_ATTRIBUTE_MEMPOOL_HANDLE, pointer, 0)
        }?;
        Ok(pool.is_some_and(|pool| pool != 0))
    }

    /// Whether a legacy handle can name the memory; `None` where the driver is older than the
    /// attribute.
    pub fn pointer_is_legacy_capable(&self, pointer: CUdeviceptr) -> DriverAnswer<Option<bool>> {
        // SAFETY: this attribute is a bool or an unsigned int; both fit.
        let capable = unsafe {
            self.pointer_attribute::<c_uint>(
                POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                pointer,
                0,
            )
        }?;
        Ok(capable.map(|capable| capable != 0))
    }

    pub fn pointer_ordinal(&self, pointer: CUdeviceptr) -> DriverAnswer<Option<c_int>> {
        // SAFETY: this attribute is an int.
        unsafe { self.pointer_attribute(POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer, 0) }
    }

    /// A number that no other allocation in the process's life has; 0 if the driver has none.
    pub fn pointer_buffer(&self, pointer: CUdeviceptr) -> DriverAnswer<u64> {
        // SAFETY: this attribute is an unsigned long long.
        Ok(
            unsafe { self.pointer_attribute(POINTER_ATTRIBUTE_BUFFER_ID, pointer, 0) }?
                .unwrap_or(0),
        )
    }

    /// Whether the driver knows `pointer` as page-locked host memory.
    pub fn is_registered_host(&self, pointer: *const u8) -> DriverAnswer<bool> {
        Ok(self.pointer_memory_type(pointer as u64)? == Some(MEMORYTYPE_HOST))
    }

    /// Base and length of the allocation in which `pointer` lies.
    pub fn address_range(&self, pointer: CUdeviceptr) -> DriverAnswer<(CUdeviceptr, u64)> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the out pointers are live locals; the address is only looked up.
        unsafe { self.cuMemGetAddressRange_v2(&mut base, &mut bytes, pointer) }?;
        Ok((base, bytes as u64))
    }

    pub fn memory_alloc(&self, bytes: usize) -> DriverAnswer<CUdeviceptr> {
        // SAFETY: the out pointer is a live local.
        stored(0, |address| unsafe { self.cuMemAlloc_v2(address, bytes) })
    }

    pub fn ipc_export_memory(&self, base: CUdeviceptr) -> DriverAnswer<[u8; 64]> {
        let mut handle = CUipcHandle { reserved: [0; 64] };
        // SAFETY: the out pointer is a live local; an address that cannot be exported is a failure.
        unsafe { self.cuIpcGetMemHandle(&mut handle, base) }?;
        Ok(handle.reserved)
    }

    /// Accepts any bytes: an invalid handle is a failure.
    pub fn ipc_open_memory(&self, handle: &[u8; 64]) -> DriverAnswer<CUdeviceptr> {
        let (mut address, handle) = (0, CUipcHandle { reserved: *handle });
        // SAFETY: the out pointer is a live local; the driver checks the bytes.
        unsafe {
            self.cuIpcOpenMemHandle_v2(&mut address, handle, IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        }?;
        Ok(address)
    }
}

// Modules, functions, and launches.
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
            self.cuModuleLoadDataEx(
                &mut module,
                ptx.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
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
        // SAFETY: the name is NUL-terminated; the module is the caller's promise.
        stored(CUfunction(ptr::null_mut()), |function| unsafe {
            self.cuModuleGetFunction(function, module, name.as_ptr())
        })
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
        let mut registers = 0;
        // SAFETY: the out pointer is a live local; the function is the caller's promise.
        unsafe { self.cuFuncGetAttribute(&mut registers, FUNC_ATTRIBUTE_NUM_REGS, function) }
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
            self.cuLaunchKernel(
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
                ptr::null_mut(),
            )
        }
    }
}
