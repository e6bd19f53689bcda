//! Compares the driver's types and signatures with another project's generated bindings.
//!
//! Compares sizes and alignments of every parameter, and the offset of every field; it cannot
//! compare meanings.

use std::mem::{align_of, offset_of, size_of};

use cudarc::driver::sys as theirs;

use super::sys::{self as ours, signature};

/// Size and alignment of each parameter, and of the result last.
type Shape = Vec<(usize, usize)>;

trait Function {
    fn shape() -> Shape;
}

macro_rules! function {
    ($($argument:ident)*) => {
        impl<$($argument,)* R> Function for unsafe fn($($argument),*) -> R {
            fn shape() -> Shape {
                vec![$((size_of::<$argument>(), align_of::<$argument>()),)* (size_of::<R>(), align_of::<R>())]
            }
        }
        impl<$($argument,)* R> Function for unsafe extern "C" fn($($argument),*) -> R {
            fn shape() -> Shape {
                vec![$((size_of::<$argument>(), align_of::<$argument>()),)* (size_of::<R>(), align_of::<R>())]
            }
        }
    };
}

function!(A);
function!(A B);
function!(A B C);
function!(A B C D);
function!(A B C D E);
function!(A B C D E F G H I J K);

fn shape_of<F: Function>(_: F) -> Shape {
    F::shape()
}

macro_rules! same_signatures {
    ($($name:ident($($argument:tt),*);)*) => {$(
        assert_eq!(
            <signature::$name as Function>::shape(),
            shape_of(theirs::$name as unsafe fn($($argument),*) -> _),
            stringify!($name),
        );
    )*};
}

#[test]
fn every_function_takes_what_the_driver_takes() {
    same_signatures! {
        cuInit(_);
        cuGetErrorName(_, _);
        cuGetErrorString(_, _);
        cuDeviceGetCount(_);
        cuDeviceGet(_, _);
        cuDeviceGetName(_, _, _);
        cuDeviceGetUuid(_, _);
        cuDeviceGetUuid_v2(_, _);
        cuDeviceTotalMem_v2(_, _);
        cuDeviceGetAttribute(_, _, _);
        cuDeviceCanAccessPeer(_, _, _);
        cuDevicePrimaryCtxRetain(_, _);
        cuDevicePrimaryCtxRelease_v2(_);
        cuDevicePrimaryCtxGetState(_, _, _);
        cuCtxGetId(_, _);
        cuCtxGetCurrent(_);
        cuCtxPushCurrent_v2(_);
        cuCtxPopCurrent_v2(_);
        cuMemGetInfo_v2(_, _);
        cuMemGetAllocationGranularity(_, _, _);
        cuMemCreate(_, _, _, _);
        cuMemRelease(_);
        cuMemAddressReserve(_, _, _, _, _);
        cuMemAddressFree(_, _);
        cuMemMap(_, _, _, _, _);
        cuMemUnmap(_, _);
        cuMemSetAccess(_, _, _, _);
        cuMemExportToShareableHandle(_, _, _, _);
        cuMemImportFromShareableHandle(_, _, _);
        cuMemHostRegister_v2(_, _, _);
        cuMemHostUnregister(_);
        cuMemHostGetDevicePointer_v2(_, _, _);
        cuPointerGetAttribute(_, _, _);
        cuMemAlloc_v2(_, _);
        cuMemFree_v2(_);
        cuMemGetAddressRange_v2(_, _, _);
        cuIpcGetMemHandle(_, _);
        cuIpcOpenMemHandle_v2(_, _, _);
        cuIpcCloseMemHandle(_);
        cuIpcGetEventHandle(_, _);
        cuIpcOpenEventHandle(_, _);
        cuMemcpyAsync(_, _, _, _);
        cuMemcpy3DAsync_v2(_, _);
        cuMemsetD8Async(_, _, _, _);
        cuMemcpyHtoDAsync_v2(_, _, _, _);
        cuMemcpyDtoHAsync_v2(_, _, _, _);
        cuStreamCreate(_, _);
        cuStreamDestroy_v2(_);
        cuStreamQuery(_);
        cuStreamIsCapturing(_, _);
        cuThreadExchangeStreamCaptureMode(_);
        cuStreamWaitEvent(_, _, _);
        cuStreamWaitValue64_v2(_, _, _, _);
        cuStreamWriteValue64_v2(_, _, _, _);
        cuStreamBatchMemOp_v2(_, _, _, _);
        cuLaunchHostFunc(_, _, _);
        cuEventCreate(_, _);
        cuEventDestroy_v2(_);
        cuEventRecord(_, _);
        cuEventQuery(_);
        cuModuleLoadDataEx(_, _, _, _, _);
        cuModuleGetFunction(_, _, _);
        cuFuncLoad(_);
        cuFuncGetAttribute(_, _, _);
        cuLaunchKernel(_, _, _, _, _, _, _, _, _, _, _);
    }
}

macro_rules! same_layout {
    ($ours:ty, $theirs:ty, $($($our_field:ident).+ = $($their_field:ident).+),*) => {
        assert_eq!(size_of::<$ours>(), size_of::<$theirs>(), stringify!($ours));
        assert_eq!(align_of::<$ours>(), align_of::<$theirs>(), stringify!($ours));
        $(assert_eq!(
            offset_of!($ours, $($our_field).+),
            offset_of!($theirs, $($their_field).+),
            concat!(stringify!($ours), $(".", stringify!($our_field)),+),
        );)*
    };
}

#[test]
fn every_structure_has_the_drivers_layout() {
    same_layout!(ours::CUuuid, theirs::CUuuid, bytes = bytes);
    same_layout!(
        ours::CUipcHandle,
        theirs::CUipcMemHandle,
        reserved = reserved
    );
    same_layout!(
        ours::CUipcHandle,
        theirs::CUipcEventHandle,
        reserved = reserved
    );
    same_layout!(
        ours::CUmemLocation,
        theirs::CUmemLocation,
        kind = type_,
        id = id
    );
    same_layout!(
        ours::CUmemAccessDesc,
        theirs::CUmemAccessDesc,
        location = location,
        flags = flags
    );
    same_layout!(
        ours::CUmemAllocationProp,
        theirs::CUmemAllocationProp,
        kind = type_,
        requested_handle_types = requestedHandleTypes,
        location = location,
        win32_handle_metadata = win32HandleMetaData,
        compression_type = allocFlags.compressionType,
        gpu_direct_rdma_capable = allocFlags.gpuDirectRDMACapable,
        usage = allocFlags.usage,
        reserved = allocFlags.reserved
    );
    same_layout!(
        ours::CUDA_MEMCPY3D,
        theirs::CUDA_MEMCPY3D,
        src.x = srcXInBytes,
        src.y = srcY,
        src.z = srcZ,
        src.lod = srcLOD,
        src.memory_type = srcMemoryType,
        src.host = srcHost,
        src.device = srcDevice,
        src.array = srcArray,
        src.reserved = reserved0,
        src.pitch = srcPitch,
        src.height = srcHeight,
        dst.x = dstXInBytes,
        dst.y = dstY,
        dst.z = dstZ,
        dst.lod = dstLOD,
        dst.memory_type = dstMemoryType,
        dst.host = dstHost,
        dst.device = dstDevice,
        dst.array = dstArray,
        dst.reserved = reserved1,
        dst.pitch = dstPitch,
        dst.height = dstHeight,
        width = WidthInBytes,
        height = Height,
        depth = Depth
    );
}

#[test]
fn a_batch_operation_has_the_layout_of_both_arms_of_the_drivers_union() {
    type Wait = theirs::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st;
    type Write = theirs::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st;
    type Ours = ours::CUstreamBatchMemOpParams;
    assert_eq!(
        size_of::<Ours>(),
        size_of::<theirs::CUstreamBatchMemOpParams>()
    );
    assert_eq!(
        align_of::<Ours>(),
        align_of::<theirs::CUstreamBatchMemOpParams>()
    );
    let places = [
        offset_of!(Ours, operation),
        offset_of!(Ours, address),
        offset_of!(Ours, value),
        offset_of!(Ours, flags),
        offset_of!(Ours, alias),
    ];
    assert_eq!(
        places,
        [
            offset_of!(Wait, operation),
            offset_of!(Wait, address),
            offset_of!(Wait, __bindgen_anon_1),
            offset_of!(Wait, flags),
            offset_of!(Wait, alias),
        ]
    );
    assert_eq!(
        places,
        [
            offset_of!(Write, operation),
            offset_of!(Write, address),
            offset_of!(Write, __bindgen_anon_1),
            offset_of!(Write, flags),
            offset_of!(Write, alias),
        ]
    );
}

#[test]
fn constants_have_the_drivers_values() {
    use theirs::CUdevice_attribute_enum as attribute;
    let pairs = [
        (
            ours::DEVICE_ATTRIBUTE_MPS_ENABLED,
            attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED as u32,
        ),
        (
            ours::MEM_LOCATION_TYPE_DEVICE,
            theirs::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32,
        ),
        (
            ours::MEM_ALLOCATION_TYPE_PINNED,
            theirs::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32,
        ),
        (
            ours::STREAM_MEM_OP_WAIT_VALUE_64,
            theirs::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_64 as u32,
        ),
        (
            ours::STREAM_MEM_OP_WRITE_VALUE_64,
            theirs::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64 as u32,
        ),
        (
            ours::STREAM_WAIT_VALUE_GEQ,
            theirs::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32,
        ),
        (
            ours::STREAM_WRITE_VALUE_DEFAULT,
            theirs::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32,
        ),
        (
            ours::STREAM_NON_BLOCKING,
            theirs::CUstream_flags::CU_STREAM_NON_BLOCKING as u32,
        ),
        (
            ours::EVENT_DISABLE_TIMING,
            theirs::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32,
        ),
        (
            ours::MEMHOSTREGISTER_PORTABLE,
            theirs::CU_MEMHOSTREGISTER_PORTABLE,
        ),
        (
            ours::MEMHOSTREGISTER_DEVICEMAP,
            theirs::CU_MEMHOSTREGISTER_DEVICEMAP,
        ),
        (
            ours::PointerAttribute::MemoryType as u32,
            theirs::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32,
        ),
        (
            ours::PointerAttribute::BufferId as u32,
            theirs::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as u32,
        ),
        (
            ours::PointerAttribute::IsManaged as u32,
            theirs::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED as u32,
        ),
        (
            ours::PointerAttribute::DeviceOrdinal as u32,
            theirs::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as u32,
        ),
        (
            ours::PointerAttribute::IsLegacyIpcCapable as u32,
            theirs::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as u32,
        ),
        (
            ours::PointerAttribute::MempoolHandle as u32,
            theirs::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as u32,
        ),
        (
            ours::EVENT_INTERPROCESS,
            theirs::CUevent_flags::CU_EVENT_INTERPROCESS as u32,
        ),
        (
            ours::IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
            theirs::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32,
        ),
        (
            ours::MEMORYTYPE_HOST,
            theirs::CUmemorytype::CU_MEMORYTYPE_HOST as u32,
        ),
        (
            ours::MEMORYTYPE_UNIFIED,
            theirs::CUmemorytype::CU_MEMORYTYPE_UNIFIED as u32,
        ),
        (
            ours::FUNC_ATTRIBUTE_NUM_REGS,
            theirs::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS as u32,
        ),
        (
            ours::JIT_ERROR_LOG_BUFFER,
            theirs::CUjit_option::CU_JIT_ERROR_LOG_BUFFER as u32,
        ),
        (
            ours::JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            theirs::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as u32,
        ),
        (
            ours::DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED as u32,
        ),
        (
            ours::DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as u32,
        ),
        (
            ours::DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
            attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS as u32,
        ),
    ];
    for (index, (ours, theirs)) in pairs.into_iter().enumerate() {
        assert_eq!(ours, theirs, "pair {index}");
    }
}

#[test]
fn the_broadcast_kernel_signals_at_system_scope() {
    let ptx = include_str!("backend/broadcast.ptx");
    assert!(ptx.contains("st.release.sys.global.u64"));
    for line in ptx.lines() {
        let atomic = line.contains("atom.") || line.contains("red.");
        assert!(
            !atomic || line.contains(".sys"),
            "not at system scope: {line}"
        );
    }
}
