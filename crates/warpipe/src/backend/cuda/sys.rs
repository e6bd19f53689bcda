//! The CUDA driver API as its headers have it: types, constants, and a table of functions found at
//! run time.
//!
//! This module owns nothing. A function that the driver lacks is `None` in the table, so that an
//! old driver fails at the call that needs it and not at load. Each has a method of its name, which
//! calls it, and gives a [`Fault`] for a failure and for a function that is not there.

#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

use super::shutdown_gate;
use crate::fork::per_process::PerProcess;

/// The driver's status. `0` is success; see [`super::fault`] for the others.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CUresult(pub c_int);

impl CUresult {
    pub const SUCCESS: CUresult = CUresult(0);
    pub const INVALID_VALUE: CUresult = CUresult(1);
    pub const OUT_OF_MEMORY: CUresult = CUresult(2);
    pub const NOT_INITIALIZED: CUresult = CUresult(3);
    pub const DEINITIALIZED: CUresult = CUresult(4);
    pub const STUB_LIBRARY: CUresult = CUresult(34);
    pub const DEVICE_UNAVAILABLE: CUresult = CUresult(46);
    pub const NO_DEVICE: CUresult = CUresult(100);
    pub const INVALID_DEVICE: CUresult = CUresult(101);
    pub const INVALID_CONTEXT: CUresult = CUresult(201);
    pub const MAP_FAILED: CUresult = CUresult(205);
    pub const NO_BINARY_FOR_GPU: CUresult = CUresult(209);
    pub const PEER_ACCESS_UNSUPPORTED: CUresult = CUresult(217);
    pub const INVALID_PTX: CUresult = CUresult(218);
    pub const UNSUPPORTED_PTX_VERSION: CUresult = CUresult(222);
    pub const OPERATING_SYSTEM: CUresult = CUresult(304);
    pub const INVALID_HANDLE: CUresult = CUresult(400);
    pub const NOT_READY: CUresult = CUresult(600);
    pub const ILLEGAL_ADDRESS: CUresult = CUresult(700);
    pub const CONTEXT_IS_DESTROYED: CUresult = CUresult(709);
    pub const LAUNCH_FAILED: CUresult = CUresult(719);
    pub const NOT_PERMITTED: CUresult = CUresult(800);
    pub const NOT_SUPPORTED: CUresult = CUresult(801);
    pub const SYSTEM_NOT_READY: CUresult = CUresult(802);
    pub const SYSTEM_DRIVER_MISMATCH: CUresult = CUresult(803);
    pub const COMPAT_NOT_SUPPORTED_ON_DEVICE: CUresult = CUresult(804);
    pub const MPS_CONNECTION_FAILED: CUresult = CUresult(805);
    pub const MPS_RPC_FAILURE: CUresult = CUresult(806);
    pub const MPS_SERVER_NOT_READY: CUresult = CUresult(807);
    pub const MPS_MAX_CLIENTS_REACHED: CUresult = CUresult(808);
    pub const MPS_CLIENT_TERMINATED: CUresult = CUresult(810);
    pub const STREAM_CAPTURE_UNSUPPORTED: CUresult = CUresult(900);
    pub const STREAM_CAPTURE_IMPLICIT: CUresult = CUresult(906);
    pub const CAPTURED_EVENT: CUresult = CUresult(907);
    pub const STREAM_CAPTURE_WRONG_THREAD: CUresult = CUresult(908);
    pub const UNKNOWN: CUresult = CUresult(999);
}

/// A driver call that failed. Small and without a heap allocation, so that a caller can match the
/// code and choose the fitting [`Error`]; `?` makes the general one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The driver has no such function.
    Symbol(&'static str),
    /// The function returned a status other than success.
    Call { call: &'static str, code: CUresult },
}

pub(super) type CUdevice = c_int;
pub(super) type CUdeviceptr = u64;
pub(super) type CUstream = *mut c_void;
pub(super) type CUevent = *mut c_void;
pub(super) type CUmemGenericAllocationHandle = u64;
pub(super) type CUhostFn = unsafe extern "C" fn(*mut c_void);

/// Handles that live as long as the process, and that the driver accepts from any thread.
macro_rules! lasting_handle {
    ($($name:ident),*) => {$(
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) struct $name(pub *mut c_void);

        // SAFETY: an opaque token of the driver, never dereferenced here; the driver API is
        // thread-safe.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

lasting_handle!(CUcontext, CUmodule, CUfunction);

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CUuuid {
    pub bytes: [u8; 16],
}

/// `CUipcMemHandle` and `CUipcEventHandle`, which are passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct CUipcHandle {
    pub reserved: [u8; 64],
}

pub(super) const IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CUmemLocation {
    pub kind: c_uint,
    pub id: c_int,
}

pub(super) const MEM_LOCATION_TYPE_DEVICE: c_uint = 1;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CUmemAllocationProp {
    pub kind: c_uint,
    pub requested_handle_types: c_uint,
    pub location: CUmemLocation,
    pub win32_handle_metadata: usize,
    pub compression_type: u8,
    pub gpu_direct_rdma_capable: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

pub(super) const MEM_ALLOCATION_TYPE_PINNED: c_uint = 1;
pub(super) const MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_uint = 1;
pub(super) const MEM_ALLOC_GRANULARITY_MINIMUM: c_uint = 0;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct CUmemAccessDesc {
    pub location: CUmemLocation,
    pub flags: c_uint,
}

pub(super) const MEM_ACCESS_READ: c_uint = 1;
pub(super) const MEM_ACCESS_READWRITE: c_uint = 3;

/// `CUstreamBatchMemOpParams`: the wait and the write arm of the union have the same fields at the
/// same places.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct CUstreamBatchMemOpParams {
    pub operation: c_uint,
    pub address: CUdeviceptr,
    pub value: u64,
    pub flags: c_uint,
    pub alias: CUdeviceptr,
    pub pad: u64,
}

pub(super) const STREAM_MEM_OP_WAIT_VALUE_64: c_uint = 4;
pub(super) const STREAM_MEM_OP_WRITE_VALUE_64: c_uint = 5;
pub(super) const STREAM_WAIT_VALUE_GEQ: c_uint = 0;
pub(super) const STREAM_WRITE_VALUE_DEFAULT: c_uint = 0;

/// One side of a [`CUDA_MEMCPY3D`], used only for boxes in linear memory: the fields for arrays and
/// offsets stay 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CopySide {
    pub x: usize,
    pub y: usize,
    pub z: usize,
    pub lod: usize,
    pub memory_type: c_uint,
    pub host: usize,
    pub device: CUdeviceptr,
    pub array: usize,
    pub reserved: usize,
    pub pitch: usize,
    pub height: usize,
}

impl CopySide {
    /// A box of linear memory: its address, the distance of its rows, and the number of rows in a
    /// slice.
    pub fn linear(device: CUdeviceptr, pitch: usize, height: usize) -> CopySide {
        CopySide {
            memory_type: MEMORYTYPE_UNIFIED,
            device,
            pitch,
            height,
            ..CopySide::default()
        }
    }
}

/// `CUDA_MEMCPY3D`; its two sides have the same fields. The extent is a row's bytes, rows, and
/// slices.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct CUDA_MEMCPY3D {
    pub src: CopySide,
    pub dst: CopySide,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

/// `CUpointer_attribute`: those that are numbers of at most 64 bits, or handles.
#[repr(u32)]
#[derive(Debug, Clone, Copy)]
pub(super) enum PointerAttribute {
    MemoryType = 2,
    BufferId = 7,
    IsManaged = 8,
    DeviceOrdinal = 9,
    IsLegacyIpcCapable = 10,
    RangeStart = 11,
    RangeSize = 12,
    MempoolHandle = 17,
}

pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const STREAM_CAPTURE_STATUS_NONE: c_uint = 0;
pub(super) const STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(super) const EVENT_INTERPROCESS: c_uint = 4;
pub(super) const MEMHOSTREGISTER_PORTABLE: c_uint = 1;
pub(super) const MEMHOSTREGISTER_DEVICEMAP: c_uint = 2;
pub(super) const MEMORYTYPE_HOST: c_uint = 1;
pub(super) const MEMORYTYPE_UNIFIED: c_uint = 4;
pub(super) const FUNC_ATTRIBUTE_NUM_REGS: c_uint = 4;
pub(super) const JIT_ERROR_LOG_BUFFER: c_uint = 5;
pub(super) const JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_uint = 6;
pub(super) const DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_uint = 102;
pub(super) const DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: c_uint = 103;
pub(super) const DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: c_uint = 122;
pub(super) const DEVICE_ATTRIBUTE_MPS_ENABLED: c_uint = 133;

/// Declares the table: a type for each function's pointer, a field for it, the lookup by its name,
/// and the checked call. A function stores its results at addresses that are its first parameters
/// in C (`->`), or its last ones (`=>`). Only one that is `[safe]` may be called with any arguments:
/// it gets plain values, and numbers and handles that the driver looks up.
macro_rules! functions {
    ($($([$safety:tt])? fn $name:ident($($argument:ident: $type:ty),* $(,)?)
        $(-> $($first:ident: $first_type:ty),+)? $(=> $($last:ident: $last_type:ty),+)?;)*) => {
        /// The types of the functions, under the functions' names.
        #[allow(non_camel_case_types)]
        pub(super) mod signature {
            use super::*;
            $(pub(in super::super) type $name = unsafe extern "C" fn(
                $($(*mut $first_type,)+)? $($type,)* $($(*mut $last_type),+)?) -> CUresult;)*
        }

        /// The functions of the loaded driver; `None` where it lacks one.
        #[derive(Debug)]
        pub(super) struct Driver {
            $(pub $name: Option<signature::$name>,)*
            /// Keeps the code in memory for as long as the pointers above.
            _library: Library,
        }

        impl Driver {
            fn from_library(library: Library) -> Driver {
                $(
                    // SAFETY: the driver exports this name with this C signature (checked against
                    // the bindings of another project in `tests`), and the library is kept in the
                    // table beside the pointer.
                    let $name = unsafe { library.get::<signature::$name>(concat!(stringify!($name), "\0")) }
                        .ok()
                        .map(|symbol| *symbol);
                )*
                Driver { $($name,)* _library: library }
            }

            $(method! { $([$safety])? $name($($argument: $type),*)
                [$($($first: $first_type),+)?] [$($($last: $last_type),+)?] })*
        }
    };
}

/// The checked call of a function.
macro_rules! method {
    ([safe] $name:ident($($argument:ident: $type:ty),*) $first:tt $last:tt) => {
        #[allow(unused_parens, reason = "a call with one result gives no tuple")]
        #[inline]
        pub(super) fn $name(&self, $($argument: $type),*) -> Result<results!($first $last), Fault> {
            // SAFETY: the driver checks what it is given.
            unsafe { checked!(self, $name, [$($argument),*] $first $last) }
        }
    };
    ($name:ident($($argument:ident: $type:ty),*) $first:tt $last:tt) => {
        /// # Safety
        /// As the driver's manual says of the function: handles are live, addresses valid.
        #[allow(clippy::too_many_arguments, reason = "the driver's own")]
        #[allow(unused_parens, reason = "a call with one result gives no tuple")]
        #[inline]
        pub(super) unsafe fn $name(&self, $($argument: $type),*)
            -> Result<results!($first $last), Fault> {
            // SAFETY: the caller's promise.
            unsafe { checked!(self, $name, [$($argument),*] $first $last) }
        }
    };
}

macro_rules! results {
    ([$($first:ident: $first_type:ty),*] [$($last:ident: $last_type:ty),*]) => {
        ($($first_type),* $($last_type),*)
    };
}

/// The call, under the promise of the block that it is expanded in.
macro_rules! checked {
    ($driver:ident, $name:ident, [$($argument:expr),*]
        [$($first:ident: $first_type:ty),*] [$($last:ident: $last_type:ty),*]) => {{
        debug_assert!(shutdown_gate::is_inside(), "{} outside the gate", stringify!($name));
        // Numbers, handles and addresses: zeros are valid.
        $(let mut $first: $first_type = std::mem::zeroed();)*
        $(let mut $last: $last_type = std::mem::zeroed();)*
        match $driver.$name {
            None => Err(Fault::Symbol(stringify!($name))),
            Some(function) => match function($(&mut $first,)* $($argument,)* $(&mut $last),*) {
                CUresult::SUCCESS => Ok(($($first),* $($last),*)),
                code => Err(Fault::Call { call: stringify!($name), code }),
            },
        }
    }};
}

functions! {
    [safe] fn cuInit(flags: c_uint);
    [safe] fn cuGetErrorName(error: CUresult) => text: *const c_char;
    [safe] fn cuGetErrorString(error: CUresult) => text: *const c_char;
    [safe] fn cuDeviceGetCount() -> count: c_int;
    [safe] fn cuDeviceGet(ordinal: c_int) -> device: CUdevice;
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice);
    [safe] fn cuDeviceGetUuid(device: CUdevice) -> uuid: CUuuid;
    [safe] fn cuDeviceGetUuid_v2(device: CUdevice) -> uuid: CUuuid;
    [safe] fn cuDeviceTotalMem_v2(device: CUdevice) -> bytes: usize;
    [safe] fn cuDeviceGetAttribute(attribute: c_uint, device: CUdevice) -> value: c_int;
    [safe] fn cuDeviceCanAccessPeer(device: CUdevice, peer: CUdevice) -> can: c_int;
    [safe] fn cuDevicePrimaryCtxRetain(device: CUdevice) -> context: CUcontext;
    [safe] fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    [safe] fn cuDevicePrimaryCtxGetState(device: CUdevice) => flags: c_uint, active: c_int;
    fn cuCtxGetId(context: CUcontext) => id: u64;
    [safe] fn cuCtxGetCurrent() -> context: CUcontext;
    fn cuCtxPushCurrent_v2(context: CUcontext);
    [safe] fn cuCtxPopCurrent_v2() -> context: CUcontext;
    [safe] fn cuMemGetInfo_v2() -> free: usize, total: usize;
    fn cuMemGetAllocationGranularity(prop: *const CUmemAllocationProp, option: c_uint) -> bytes: usize;
    fn cuMemCreate(size: usize, prop: *const CUmemAllocationProp, flags: u64) -> handle: CUmemGenericAllocationHandle;
    fn cuMemRelease(handle: CUmemGenericAllocationHandle);
    [safe] fn cuMemAddressReserve(size: usize, alignment: usize, hint: CUdeviceptr, flags: u64) -> address: CUdeviceptr;
    fn cuMemAddressFree(address: CUdeviceptr, size: usize);
    fn cuMemMap(address: CUdeviceptr, size: usize, offset: usize,
        handle: CUmemGenericAllocationHandle, flags: u64);
    fn cuMemUnmap(address: CUdeviceptr, size: usize);
    fn cuMemSetAccess(address: CUdeviceptr, size: usize, access: *const CUmemAccessDesc, count: usize);
    fn cuMemExportToShareableHandle(handle: CUmemGenericAllocationHandle, kind: c_uint, flags: u64) -> fd: c_int;
    [safe] fn cuMemRetainAllocationHandle(address: *mut c_void) -> handle: CUmemGenericAllocationHandle;
    fn cuMemImportFromShareableHandle(shareable: *mut c_void, kind: c_uint) -> handle: CUmemGenericAllocationHandle;
    fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(pointer: *mut c_void);
    [safe] fn cuMemHostGetDevicePointer_v2(pointer: *mut c_void, flags: c_uint) -> address: CUdeviceptr;
    fn cuPointerGetAttribute(data: *mut c_void, attribute: PointerAttribute, pointer: CUdeviceptr);
    [safe] fn cuMemAlloc_v2(bytes: usize) -> address: CUdeviceptr;
    fn cuMemFree_v2(address: CUdeviceptr);
    [safe] fn cuMemGetAddressRange_v2(address: CUdeviceptr) -> base: CUdeviceptr, bytes: usize;
    [safe] fn cuIpcGetMemHandle(address: CUdeviceptr) -> handle: CUipcHandle;
    [safe] fn cuIpcOpenMemHandle_v2(handle: CUipcHandle, flags: c_uint) -> address: CUdeviceptr;
    fn cuIpcCloseMemHandle(address: CUdeviceptr);
    fn cuIpcGetEventHandle(event: CUevent) -> handle: CUipcHandle;
    [safe] fn cuIpcOpenEventHandle(handle: CUipcHandle) -> event: CUevent;
    fn cuMemcpyAsync(destination: CUdeviceptr, source: CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuMemcpy3DAsync_v2(rows: *const CUDA_MEMCPY3D, stream: CUstream);
    fn cuMemsetD8Async(destination: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream);
    fn cuMemcpyHtoDAsync_v2(destination: CUdeviceptr, source: *const c_void, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoHAsync_v2(destination: *mut c_void, source: CUdeviceptr, bytes: usize, stream: CUstream);
    [safe] fn cuStreamCreate(flags: c_uint) -> stream: CUstream;
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamQuery(stream: CUstream);
    fn cuStreamIsCapturing(stream: CUstream) => status: c_uint;
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    fn cuStreamWaitValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint);
    fn cuStreamWriteValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint);
    fn cuStreamBatchMemOp_v2(stream: CUstream, count: c_uint,
        operations: *mut CUstreamBatchMemOpParams, flags: c_uint);
    fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, argument: *mut c_void);
    [safe] fn cuEventCreate(flags: c_uint) -> event: CUevent;
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventQuery(event: CUevent);
    fn cuModuleLoadDataEx(image: *const c_void, count: c_uint, options: *mut c_uint,
        values: *mut *mut c_void) -> module: CUmodule;
    fn cuModuleGetFunction(module: CUmodule, name: *const c_char) -> function: CUfunction;
    fn cuFuncLoad(function: CUfunction);
    fn cuFuncGetAttribute(attribute: c_uint, function: CUfunction) -> value: c_int;
    fn cuLaunchKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: CUstream,
        parameters: *mut *mut c_void, extra: *mut *mut c_void);
}

/// The names of the driver's library, in search order.
pub(super) const LIBRARY_NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// A child that is forked while another thread loads the driver loads it again.
static DRIVER: PerProcess<OnceLock<Result<Driver, String>>> = PerProcess::new();

/// The driver's functions, loaded by the first call; or the loader's message for the first name.
pub(super) fn driver() -> Result<&'static Driver, &'static str> {
    DRIVER
        .get()
        .get_or_init(load)
        .as_ref()
        .map_err(String::as_str)
}

fn load() -> Result<Driver, String> {
    let mut reason = None;
    for name in LIBRARY_NAMES {
        // SAFETY: loading runs the library's initialisers; a library of this name is the CUDA
        // driver (or its fake driver); these may run in any process and on any thread.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(Driver::from_library(library)),
            Err(error) => reason = reason.or(Some(loader_words(&error))),
        }
    }
    Err(reason.unwrap_or_default())
}

/// The message of `dlopen`: libloading keeps it as the source of an error that itself says only
/// "dlopen failed".
fn loader_words(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}
