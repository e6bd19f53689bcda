//! The structures and constants of `dlpack.h`, under its names.

use std::ffi::c_void;
use std::mem::offset_of;

use warpipe::{Device, DeviceKind};

/// `kDLCPU`: memory of the host.
pub const CPU: i32 = 1;
/// `kDLCUDA`: memory of a GPU.
pub const CUDA: i32 = 2;
/// `kDLCUDAHost`: memory of the host that is page-locked by the driver (`cuMemHostAlloc`).
pub const CUDA_HOST: i32 = 3;
/// `kDLCUDAManaged`: managed memory (`cuMemAllocManaged`).
pub const CUDA_MANAGED: i32 = 13;

/// `DLPACK_FLAG_BITMASK_READ_ONLY`: the consumer must not write the memory.
pub const FLAG_READ_ONLY: u64 = 1;
/// `DLPACK_FLAG_BITMASK_IS_COPIED`: the memory is a copy that the producer made for the consumer.
pub const FLAG_IS_COPIED: u64 = 2;

/// The version that [`Exported`](crate::Exported) writes. [`Imported`](crate::Imported) reads every
/// version of this major number.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 1 };

/// The device of a tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DLDevice {
    /// [`CPU`], [`CUDA`], [`CUDA_HOST`], [`CUDA_MANAGED`], or another `DLDeviceType`.
    pub device_type: i32,
    /// The GPU's ordinal in this process; 0 for the host.
    pub device_id: i32,
}

impl DLDevice {
    /// A device of the library: [`CUDA`] and its ordinal, or [`CPU`] and 0.
    pub fn of(device: &Device) -> DLDevice {
        let info = device.info();
        let is_cuda = info.id.kind == DeviceKind::Cuda;
        DLDevice {
            device_type: if is_cuda { CUDA } else { CPU },
            device_id: i32::try_from(info.ordinal).unwrap_or(i32::MAX),
        }
    }
}

/// An element type: [`DType::code`](warpipe::DType::code) and [`DType::bits`](warpipe::DType::bits).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DLDataType {
    /// `DLDataTypeCode`.
    pub code: u8,
    /// The width of one lane in bits.
    pub bits: u8,
    /// The number of lanes; 1 unless the elements are vectors.
    pub lanes: u16,
}

/// A tensor that owns nothing.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLTensor {
    /// The memory; may be null for a tensor without elements.
    pub data: *mut c_void,
    /// The memory's device.
    pub device: DLDevice,
    /// The number of dimensions.
    pub ndim: i32,
    /// The element type.
    pub dtype: DLDataType,
    /// `ndim` lengths, in elements.
    pub shape: *mut i64,
    /// `ndim` strides, in elements. Null for row-major order without gaps.
    pub strides: *mut i64,
    /// From `data` to the element with all indices 0, in bytes.
    pub byte_offset: u64,
}

/// A tensor and its deleter, without a version: the capsule `dltensor` of Python.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's.
    pub manager_ctx: *mut c_void,
    /// The consumer calls it once, on any thread, when it has finished with the tensor. Null if the
    /// producer needs no call.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// A version of DLPack.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DLPackVersion {
    /// Another major version has other structures: only the first three fields of
    /// [`DLManagedTensorVersioned`] are the same.
    pub major: u32,
    /// Another minor version has the same structures, and may have more types, devices and flags.
    pub minor: u32,
}

/// A tensor, its version, flags and deleter: the capsule `dltensor_versioned` of Python.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLManagedTensorVersioned {
    /// The version that the producer wrote.
    pub version: DLPackVersion,
    /// The producer's.
    pub manager_ctx: *mut c_void,
    /// As [`DLManagedTensor::deleter`].
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// [`FLAG_READ_ONLY`], [`FLAG_IS_COPIED`], and flags of later versions.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

// The layouts of a 64-bit machine, as `dlpack.h` has them.
const _: () = assert!(size_of::<DLDevice>() == 8 && size_of::<DLDataType>() == 4);
const _: () = assert!(size_of::<DLTensor>() == 48);
const _: () = assert!(offset_of!(DLTensor, device) == 8 && offset_of!(DLTensor, ndim) == 16);
const _: () = assert!(offset_of!(DLTensor, dtype) == 20 && offset_of!(DLTensor, shape) == 24);
const _: () = assert!(offset_of!(DLTensor, byte_offset) == 40);
const _: () = assert!(size_of::<DLManagedTensor>() == 64);
const _: () = assert!(offset_of!(DLManagedTensor, manager_ctx) == 48);
const _: () = assert!(offset_of!(DLManagedTensor, deleter) == 56);
const _: () = assert!(size_of::<DLManagedTensorVersioned>() == 80);
const _: () = assert!(offset_of!(DLManagedTensorVersioned, manager_ctx) == 8);
const _: () = assert!(offset_of!(DLManagedTensorVersioned, deleter) == 16);
const _: () = assert!(offset_of!(DLManagedTensorVersioned, flags) == 24);
const _: () = assert!(offset_of!(DLManagedTensorVersioned, dl_tensor) == 32);
