//! The structures of DLPack 1.x, made for arrays of ours and read from those of others. **This
//! module is marked for unsafe**: it hands out and takes in structures by their address.
//!
//! Source: the DLPack specification and the array API standard. What comes in is copied once,
//! checked, and the copy used.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use warpipe::{DType, RANK_MAX};

use crate::device::is_cuda;
use crate::errors::Fault;
use crate::memory::{ConsumerStay, Memory};

pub const CPU: i32 = 1;
pub const CUDA: i32 = 2;
pub const CUDA_HOST: i32 = 3;
pub const CUDA_MANAGED: i32 = 13;

/// The version that is written, and the newest that may be asked for.
pub const VERSION: (u32, u32) = (1, 1);

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

const LEGACY: &CStr = c"dltensor";
const LEGACY_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DLDevice {
    device_type: i32,
    device_id: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DLTensor {
    data: *mut c_void,
    device: DLDevice,
    ndim: i32,
    dtype: DLDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DLManagedTensor {
    dl_tensor: DLTensor,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DLPackVersion {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct DLManagedTensorVersioned {
    version: DLPackVersion,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    flags: u64,
    dl_tensor: DLTensor,
}

// The layouts of a 64-bit machine, as `dlpack.h` has them.
const _: () = assert!(size_of::<DLTensor>() == 48 && std::mem::offset_of!(DLTensor, shape) == 24);
const _: () = assert!(size_of::<DLManagedTensor>() == 64);
const _: () = assert!(size_of::<DLManagedTensorVersioned>() == 80);
const _: () = assert!(std::mem::offset_of!(DLManagedTensorVersioned, dl_tensor) == 32);

/// What an exported tensor points into, behind its `manager_ctx`.
struct Exported {
    shape: [i64; RANK_MAX],
    strides: [i64; RANK_MAX],
    /// Before the memory: what the array's stream still has to do comes before the memory's end.
    _stay: Option<ConsumerStay>,
    _memory: Memory,
}

/// A device in DLPack's words.
pub fn device_of(device: &warpipe::Device) -> (i32, i32) {
    let kind = if is_cuda(device) { CUDA } else { CPU };
    (
        kind,
        i32::try_from(device.info().ordinal).unwrap_or(i32::MAX),
    )
}

/// Which of the two capsules is meant by a consumer's newest version.
pub fn is_versioned(max_version: Option<(u32, u32)>) -> bool {
    max_version.is_some_and(|(major, _)| major >= VERSION.0)
}

/// A capsule that holds `memory`, and the stay of its array there, until its consumer calls the
/// deleter, or nobody has taken it.
pub fn export(
    py: Python<'_>,
    memory: &Memory,
    stay: Option<ConsumerStay>,
    versioned: bool,
    copied: bool,
) -> PyResult<Py<PyAny>> {
    let layout = &memory.layout;
    if layout
        .shape()
        .iter()
        .zip(layout.strides())
        .any(|(&length, &stride)| length > 1 && stride < 0)
    {
        // Allowed by the protocol, but PyTorch 2.6 ends the process that imports one.
        let said = format!(
            "it runs backwards (strides {:?}), which DLPack's consumers do not take",
            layout.strides()
        );
        let next = "use .numpy(), or have its sender make it contiguous first";
        return Err(Fault::Own("ExportError", format!("{said}; {next}")).into());
    }
    let (shape, strides) = ([0; RANK_MAX], [0; RANK_MAX]);
    let mut exported = Box::new(Exported {
        shape,
        strides,
        _stay: stay,
        _memory: memory.clone(),
    });
    for (to, &from) in exported.shape.iter_mut().zip(layout.shape()) {
        *to = i64::try_from(from).map_err(|_| Fault::layout(format!("a dimension of {from}")))?;
    }
    exported.strides[..layout.strides().len()].copy_from_slice(layout.strides());
    let (device_type, device_id) = device_of(&memory.device);
    let dtype = layout.dtype();
    // From here on by its address alone: a `Box` that is moved ends what points into it.
    let exported = Box::into_raw(exported);
    // SAFETY: just made, and live until the deleter is called.
    let (shape, strides) = unsafe { (&raw mut (*exported).shape, &raw mut (*exported).strides) };
    let dl_tensor = DLTensor {
        data: if layout.elements() == 0 {
            std::ptr::null_mut()
        } else {
            memory.address as *mut c_void
        },
        device: DLDevice {
            device_type,
            device_id,
        },
        ndim: layout.shape().len() as i32,
        dtype: DLDataType {
            code: dtype.code(),
            bits: dtype.bits(),
            lanes: 1,
        },
        shape: shape.cast(),
        strides: strides.cast(),
        byte_offset: 0,
    };
    let manager_ctx = exported.cast::<c_void>();
    if versioned {
        let flags =
            if memory.read_only { READ_ONLY } else { 0 } | if copied { IS_COPIED } else { 0 };
        let version = DLPackVersion {
            major: VERSION.0,
            minor: VERSION.1,
        };
        let managed = DLManagedTensorVersioned {
            version,
            manager_ctx,
            deleter: Some(delete_versioned),
            flags,
            dl_tensor,
        };
        let managed = Box::into_raw(Box::new(managed));
        // SAFETY: the tensor was made above and is the capsule's, or, if there is none, deleted
        // here.
        unsafe {
            capsule(py, managed.cast(), VERSIONED, drop_versioned)
                .inspect_err(|_| delete_versioned(managed))
        }
    } else {
        let managed = Box::into_raw(Box::new(DLManagedTensor {
            dl_tensor,
            manager_ctx,
            deleter: Some(delete_legacy),
        }));
        // SAFETY: as above.
        unsafe {
            capsule(py, managed.cast(), LEGACY, drop_legacy).inspect_err(|_| delete_legacy(managed))
        }
    }
}

/// # Safety
/// `pointer` is what the destructor takes, and lives until it or a consumer has called the deleter.
unsafe fn capsule(
    py: Python<'_>,
    pointer: *mut c_void,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Py<PyAny>> {
    // SAFETY: the pointer is not null, the name static; the result is a new reference or null with
    // an exception set.
    unsafe {
        let made = ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor));
        Bound::from_owned_ptr_or_err(py, made).map(Bound::unbind)
    }
}

/// Called by the consumer, once, on any thread, with or without the interpreter.
unsafe extern "C" fn delete_legacy(managed: *mut DLManagedTensor) {
    // SAFETY: made in `export` by `Box::into_raw`, both of them, and given up here.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.manager_ctx.cast::<Exported>()));
    }
}

/// As [`delete_legacy`].
unsafe extern "C" fn delete_versioned(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: made in `export` by `Box::into_raw`, both of them, and given up here.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.manager_ctx.cast::<Exported>()));
    }
}

/// The end of a capsule: one that was consumed has another name by then.
unsafe extern "C" fn drop_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with a live capsule; under this name it still holds what `export`
    // put there.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) == 1 {
            delete_legacy(ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr()).cast());
        }
    }
}

/// As [`drop_legacy`].
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

/// Somebody else's tensor: what it says of itself, checked, and the right to it until this is
/// dropped.
#[derive(Debug)]
pub struct Imported {
    pub device: (i32, i32),
    pub dtype: DType,
    pub shape: Vec<u64>,
    /// In elements.
    pub strides: Vec<i64>,
    /// Of the element with all indices 0.
    pub address: u64,
    _right: Right,
}

/// Calls the deleter when dropped.
#[derive(Debug)]
enum Right {
    Legacy(NonNull<DLManagedTensor>),
    Versioned(NonNull<DLManagedTensorVersioned>),
}

// SAFETY: DLPack lets any thread call the deleter, which is all that is done with these pointers
// once they are here.
unsafe impl Send for Right {}
// SAFETY: nothing is read through a shared reference.
unsafe impl Sync for Right {}

impl Drop for Right {
    fn drop(&mut self) {
        // SAFETY: taken from a capsule in `import`, which renamed it: the tensor is ours, and this
        // is the one call.
        unsafe {
            match self {
                Right::Legacy(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
                Right::Versioned(managed) => {
                    if let Some(deleter) = managed.as_ref().deleter {
                        deleter(managed.as_ptr());
                    }
                }
            }
        }
    }
}

/// Takes the tensor out of a capsule.
pub fn import(found: &Bound<'_, PyAny>) -> PyResult<Imported> {
    let (tensor, right) = take(found)?;
    let refuse = |reason: String| {
        Fault::Own(
            "ExportError",
            format!("a DLPack tensor that cannot be: {reason}"),
        )
    };
    let rank = usize::try_from(tensor.ndim)
        .ok()
        .filter(|&rank| rank <= RANK_MAX);
    let rank = rank
        .ok_or_else(|| Fault::layout(format!("{} dimensions; at most {RANK_MAX}", tensor.ndim)))?;
    let DLDataType { code, bits, lanes } = tensor.dtype;
    let dtype = DType::from_dlpack(code, bits)
        .filter(|_| lanes == 1)
        .ok_or_else(|| {
            Fault::dtype(
                format!("of DLPack code {code}, {bits} bits, {lanes} lanes"),
                "is not one that can be sent",
            )
        })?;
    if rank > 0 && tensor.shape.is_null() {
        return Err(refuse("its shape is null".into()).into());
    }
    let lengths: Vec<i64> = if rank == 0 {
        Vec::new()
    } else {
        // SAFETY: not null, and by the protocol as long as `ndim`, which was checked.
        unsafe { read(tensor.shape, rank) }
    };
    let shape: Option<Vec<u64>> = lengths
        .iter()
        .map(|&length| u64::try_from(length).ok())
        .collect();
    let shape = shape.ok_or_else(|| refuse(format!("its shape is {lengths:?}")))?;
    let strides = if rank == 0 || tensor.strides.is_null() {
        row_major(&shape)
    } else {
        // SAFETY: not null, and by the protocol as long as `ndim`.
        unsafe { read(tensor.strides, rank) }
    };
    let empty = shape.contains(&0);
    if tensor.data.is_null() && !empty {
        return Err(refuse("its data is null".into()).into());
    }
    let address = (tensor.data as u64)
        .checked_add(tensor.byte_offset)
        .ok_or_else(|| refuse("its offset".into()))?;
    let device = (tensor.device.device_type, tensor.device.device_id);
    Ok(Imported {
        device,
        dtype,
        shape,
        strides,
        address,
        _right: right,
    })
}

/// A copy of the tensor, and the right to it: the capsule is marked as used. Of several threads
/// that have one capsule, in an interpreter without a lock of its own, one gets it.
fn take(found: &Bound<'_, PyAny>) -> PyResult<(DLTensor, Right)> {
    with_critical_section(found, || take_alone(found))
}

fn take_alone(found: &Bound<'_, PyAny>) -> PyResult<(DLTensor, Right)> {
    let (py, object) = (found.py(), found.as_ptr());
    // SAFETY: `object` is a live object; a capsule of this name holds what the protocol says, until
    // it is renamed, after which its destructor leaves it alone and it is ours to delete.
    unsafe {
        if ffi::PyCapsule_IsValid(object, VERSIONED.as_ptr()) == 1 {
            let pointer = ffi::PyCapsule_GetPointer(object, VERSIONED.as_ptr())
                .cast::<DLManagedTensorVersioned>();
            let managed = NonNull::new(pointer).ok_or_else(|| PyErr::fetch(py))?;
            let version = (*managed.as_ptr()).version;
            if version.major != VERSION.0 {
                // Of another major version only the first three fields are known: it stays with its
                // capsule.
                let said = format!(
                    "it speaks DLPack {}.{}, this is 1.x",
                    version.major, version.minor
                );
                return Err(Fault::Own("ExportError", said).into());
            }
            rename(py, object, VERSIONED_USED)?;
            return Ok(((*managed.as_ptr()).dl_tensor, Right::Versioned(managed)));
        }
        if ffi::PyCapsule_IsValid(object, LEGACY.as_ptr()) == 1 {
            let pointer =
                ffi::PyCapsule_GetPointer(object, LEGACY.as_ptr()).cast::<DLManagedTensor>();
            let managed = NonNull::new(pointer).ok_or_else(|| PyErr::fetch(py))?;
            rename(py, object, LEGACY_USED)?;
            return Ok(((*managed.as_ptr()).dl_tensor, Right::Legacy(managed)));
        }
    }
    let said = "what `__dlpack__` gave is no DLPack capsule, or one that was consumed already; export it anew";
    Err(Fault::Own("ExportError", said.into()).into())
}

/// # Safety
/// `object` is a live capsule.
unsafe fn rename(py: Python<'_>, object: *mut ffi::PyObject, name: &'static CStr) -> PyResult<()> {
    // SAFETY: the caller's promise; the name is static.
    if unsafe { ffi::PyCapsule_SetName(object, name.as_ptr()) } == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(py))
    }
}

/// # Safety
/// `from` points to `count` numbers.
unsafe fn read(from: *const i64, count: usize) -> Vec<i64> {
    // SAFETY: the caller's promise.
    (0..count)
        .map(|index| unsafe { from.add(index).read_unaligned() })
        .collect()
}

/// The strides of a tensor without gaps; those that no address can reach wrap, and the layout
/// refuses them.
pub fn row_major(shape: &[u64]) -> Vec<i64> {
    let mut strides = vec![0; shape.len()];
    let mut step = 1i64;
    for (stride, &length) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.saturating_mul(i64::try_from(length.max(1)).unwrap_or(i64::MAX));
    }
    strides
}
