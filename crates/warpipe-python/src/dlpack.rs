//! Capsules of DLPack: this package's memory for consumers, and those of other frameworks taken.
//! **This module is marked for unsafe**: it hands out and takes in structures by their address. The
//! structures themselves, and the checks, are the crate `warpipe-dlpack`.
//!
//! Source: the DLPack specification for Python, and the array API standard.

use std::ffi::CStr;
use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use warpipe_dlpack::{
    DLDevice, DLManagedTensor, DLManagedTensorVersioned, Exported, Imported, Refusal, VERSION,
};

use crate::errors::Fault;
use crate::memory::{ConsumerStay, Memory};

/// A structure that a capsule holds.
trait Managed: Sized {
    /// The capsule's name while it holds a tensor.
    const NAME: &'static CStr;
    /// The capsule's name once a consumer has taken the tensor.
    const USED: &'static CStr;

    /// # Safety
    /// As [`Imported::from_versioned`].
    unsafe fn import(tensor: NonNull<Self>) -> Result<Imported, Refusal>;
}

macro_rules! managed {
    ($structure:ty, $name:expr, $used:expr, $import:ident) => {
        impl Managed for $structure {
            const NAME: &'static CStr = $name;
            const USED: &'static CStr = $used;

            unsafe fn import(tensor: NonNull<Self>) -> Result<Imported, Refusal> {
                // SAFETY: the caller's promise.
                unsafe { Imported::$import(tensor) }
            }
        }
    };
}

managed!(DLManagedTensor, c"dltensor", c"used_dltensor", from_legacy);
managed!(
    DLManagedTensorVersioned,
    c"dltensor_versioned",
    c"used_dltensor_versioned",
    from_versioned
);

/// The type and number of a device, as `__dlpack_device__` says them.
pub fn device_of(device: &warpipe::Device) -> (i32, i32) {
    let device = DLDevice::of(device);
    (device.device_type, device.device_id)
}

/// Which of the two capsules is meant by a consumer's newest version.
pub fn is_versioned(max_version: Option<(u32, u32)>) -> bool {
    max_version.is_some_and(|(major, _)| major >= VERSION.major)
}

/// A capsule that holds `memory`, and the stay of its array there, until its consumer calls the
/// deleter, or it ends without a consumer.
pub fn export(
    py: Python<'_>,
    memory: &Memory,
    stay: Option<ConsumerStay>,
    versioned: bool,
    copied: bool,
) -> PyResult<Py<PyAny>> {
    // Dropped in this order: what the array's stream still has to do comes before the memory's end.
    let owner = (stay, memory.clone());
    let device = DLDevice::of(&memory.device);
    let exported = Exported::new(&memory.layout, device, memory.address(), owner)
        .map_err(Fault::from)?
        .read_only(memory.read_only)
        .copied(copied);
    if versioned {
        capsule(py, exported.into_versioned())
    } else {
        capsule(py, exported.into_legacy())
    }
}

/// A capsule around a tensor of [`Exported`].
fn capsule<M: Managed>(py: Python<'_>, tensor: NonNull<M>) -> PyResult<Py<PyAny>> {
    // SAFETY: the pointer is not null, the name static; the result is a new reference or null with
    // an exception set. Without a capsule the tensor is deleted here.
    unsafe {
        let pointer = tensor.as_ptr().cast();
        let made = ffi::PyCapsule_New(pointer, M::NAME.as_ptr(), Some(end_of_capsule::<M>));
        Bound::from_owned_ptr_or_err(py, made)
            .map(Bound::unbind)
            .inspect_err(|_| drop(M::import(tensor)))
    }
}

/// The destructor: deletes the tensor unless a consumer has taken it, and the capsule has another
/// name.
unsafe extern "C" fn end_of_capsule<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with a live capsule; under this name it still holds the tensor that
    // `capsule` put there.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 1 {
            let pointer = ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr());
            if let Some(tensor) = NonNull::new(pointer.cast()) {
                // What was exported here is not refused, and its drop calls the deleter.
                drop(M::import(tensor));
            }
        }
    }
}

/// Takes the tensor out of a capsule. Of several threads that have one capsule, in an interpreter
/// without a lock of its own, one gets it. A tensor that is refused stays with its capsule.
pub fn import(found: &Bound<'_, PyAny>) -> PyResult<Imported> {
    with_critical_section(found, || {
        if let Some(imported) = take::<DLManagedTensorVersioned>(found)? {
            return Ok(imported);
        }
        take::<DLManagedTensor>(found)?.ok_or_else(|| {
            let said = "what `__dlpack__` gave is no DLPack capsule, or one that was consumed already; export it anew";
            Fault::Own("ExportError", said.into()).into()
        })
    })
}

/// The tensor of a capsule, which is marked as used; `None` if it does not hold this structure.
fn take<M: Managed>(found: &Bound<'_, PyAny>) -> PyResult<Option<Imported>> {
    let object = found.as_ptr();
    // SAFETY: `object` is live. A capsule of this name holds what the protocol says, and owns it
    // until it is renamed; after that its destructor leaves the tensor alone.
    unsafe {
        if ffi::PyCapsule_IsValid(object, M::NAME.as_ptr()) != 1 {
            return Ok(None);
        }
        let pointer = ffi::PyCapsule_GetPointer(object, M::NAME.as_ptr());
        let tensor = NonNull::new(pointer.cast()).ok_or_else(|| PyErr::fetch(found.py()))?;
        let imported = M::import(tensor).map_err(Fault::from)?;
        if ffi::PyCapsule_SetName(object, M::USED.as_ptr()) != 0 {
            // The tensor is still the capsule's.
            std::mem::forget(imported);
            return Err(PyErr::fetch(found.py()));
        }
        Ok(Some(imported))
    }
}
