//! Memory: virtual memory management, registered host memory, pointers, and legacy handles.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use super::DriverAnswer;
use crate::backend::cuda::fault::Fault;
use crate::backend::cuda::shutdown_gate;
use crate::backend::cuda::sys::*;

impl Driver {
    pub fn allocation_granularity(&self, prop: &CUmemAllocationProp) -> DriverAnswer<u64> {
        let mut granularity = 0;
        // SAFETY: both pointers are live for the call.
        unsafe {
            call!(
                self,
                cuMemGetAllocationGranularity(
                    &mut granularity,
                    prop,
                    MEM_ALLOC_GRANULARITY_MINIMUM
                )
            )
        }?;
        Ok(granularity as u64)
    }

    pub fn memory_create(
        &self,
        bytes: usize,
        prop: &CUmemAllocationProp,
    ) -> DriverAnswer<CUmemGenericAllocationHandle> {
        let mut handle = 0;
        // SAFETY: both pointers are live for the call.
        unsafe { call!(self, cuMemCreate(&mut handle, bytes, prop, 0)) }?;
        Ok(handle)
    }

    /// # Safety
    /// The handle is held, and released once.
    pub unsafe fn memory_release(&self, handle: CUmemGenericAllocationHandle) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemRelease(handle)) }
    }

    pub fn address_reserve(&self, bytes: usize) -> DriverAnswer<CUdeviceptr> {
        let mut address = 0;
        // SAFETY: the out pointer is a live local; zeros leave alignment and place to the driver.
        unsafe { call!(self, cuMemAddressReserve(&mut address, bytes, 0, 0, 0)) }?;
        Ok(address)
    }

    /// # Safety
    /// The range was reserved, has nothing mapped, and is freed once.
    pub unsafe fn address_free(&self, address: CUdeviceptr, bytes: usize) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemAddressFree(address, bytes)) }
    }

    /// # Safety
    /// The range is reserved and empty, the handle is held.
    pub unsafe fn memory_map(
        &self,
        address: CUdeviceptr,
        bytes: usize,
        handle: CUmemGenericAllocationHandle,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemMap(address, bytes, 0, handle, 0)) }
    }

    /// # Safety
    /// The range is mapped and no enqueued work uses it.
    pub unsafe fn memory_unmap(&self, address: CUdeviceptr, bytes: usize) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemUnmap(address, bytes)) }
    }

    /// # Safety
    /// The range is mapped.
    pub unsafe fn memory_set_access(
        &self,
        address: CUdeviceptr,
        bytes: usize,
        access: &CUmemAccessDesc,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise; the descriptor is one live value.
        unsafe { call!(self, cuMemSetAccess(address, bytes, access, 1)) }
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
            call!(
                self,
                cuMemExportToShareableHandle(
                    shareable,
                    handle,
                    MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                    0
                )
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
        unsafe { call!(self, cuMemRetainAllocationHandle(&mut handle, address)) }?;
        Ok(handle)
    }

    /// Accepts any open descriptor: one that is not device memory is a failure.
    pub fn memory_import(&self, fd: c_int) -> DriverAnswer<CUmemGenericAllocationHandle> {
        let mut handle = 0;
        let shareable = ptr::without_provenance_mut::<c_void>(fd as usize);
        // SAFETY: for this handle type the "pointer" is the descriptor's number, which the driver
        // checks.
        unsafe {
            call!(
                self,
                cuMemImportFromShareableHandle(
                    &mut handle,
                    shareable,
                    MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                )
            )
        }?;
        Ok(handle)
    }

    /// # Safety
    /// The range is mapped host memory and stays so until it is unregistered.
    pub unsafe fn host_register(&self, pointer: *mut c_void, bytes: usize) -> DriverAnswer {
        let flags = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemHostRegister_v2(pointer, bytes, flags)) }
    }

    /// # Safety
    /// No enqueued work uses the memory.
    pub unsafe fn host_unregister(&self, pointer: *mut c_void) -> DriverAnswer {
        // SAFETY: the caller's promise; a pointer that is not registered is a failure.
        unsafe { call!(self, cuMemHostUnregister(pointer)) }
    }

    pub fn host_device_pointer(&self, pointer: *mut c_void) -> DriverAnswer<CUdeviceptr> {
        let mut address = 0;
        // SAFETY: the out pointer is a live local; a pointer that is not registered is a failure.
        unsafe { call!(self, cuMemHostGetDevicePointer_v2(&mut address, pointer, 0)) }?;
        Ok(address)
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
        match unsafe { call!(self, cuPointerGetAttribute(data, attribute, pointer)) } {
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
        unsafe {
            call!(
                self,
                cuMemGetAddressRange_v2(&mut base, &mut bytes, pointer)
            )
        }?;
        Ok((base, bytes as u64))
    }

    pub fn memory_alloc(&self, bytes: usize) -> DriverAnswer<CUdeviceptr> {
        let mut address = 0;
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self, cuMemAlloc_v2(&mut address, bytes)) }?;
        Ok(address)
    }

    /// # Safety
    /// The memory came from `memory_alloc`, is freed once, and no enqueued work uses it.
    pub unsafe fn memory_free(&self, address: CUdeviceptr) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemFree_v2(address)) }
    }

    pub fn ipc_export_memory(&self, base: CUdeviceptr) -> DriverAnswer<[u8; 64]> {
        let mut handle = CUipcHandle { reserved: [0; 64] };
        // SAFETY: the out pointer is a live local; an address that cannot be exported is a failure.
        unsafe { call!(self, cuIpcGetMemHandle(&mut handle, base)) }?;
        Ok(handle.reserved)
    }

    /// Accepts any bytes: an invalid handle is a failure.
    pub fn ipc_open_memory(&self, handle: &[u8; 64]) -> DriverAnswer<CUdeviceptr> {
        let (mut address, handle) = (0, CUipcHandle { reserved: *handle });
        // SAFETY: the out pointer is a live local; the driver checks the bytes.
        unsafe {
            call!(
                self,
                cuIpcOpenMemHandle_v2(&mut address, handle, IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
            )
        }?;
        Ok(address)
    }

    /// # Safety
    /// No enqueued work uses the memory, unless it is open more than once.
    pub unsafe fn ipc_close_memory(&self, address: CUdeviceptr) -> DriverAnswer {
        // SAFETY: the caller's promise; memory that is not open is a failure.
        unsafe { call!(self, cuIpcCloseMemHandle(address)) }
    }
}
