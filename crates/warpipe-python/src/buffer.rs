//! Memory of the host by Python's buffer protocol (PEP 3118): `memoryview(sample)`, and everything
//! that takes a buffer. **This module is marked for unsafe**: it hands out memory by its address.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use warpipe::{DType, Layout, RANK_MAX};
use warpipe_dlpack::row_major;

use crate::device::is_cuda;
use crate::memory::Memory;

/// Behind a buffer's `internal`, until the consumer gives the buffer back.
struct Exported {
    /// In elements.
    shape: [isize; RANK_MAX],
    /// In bytes.
    strides: [isize; RANK_MAX],
    /// Keeps the memory mapped and, of a sample, its slot.
    _memory: Memory,
}

/// Refuses a request that `memory` does not meet, whatever the state of its data.
pub fn check(memory: &Memory, flags: c_int) -> PyResult<()> {
    let refuse = |said: String| Err(PyBufferError::new_err(said));
    let (layout, asks) = (&memory.layout, |flag: c_int| flags & flag == flag);
    if is_cuda(&memory.device) {
        return refuse(format!(
            "the memory lies on {}, and a buffer is memory of the host; use .numpy() or .tobytes(), \
             which copy, or .torch(), which does not",
            memory.device
        ));
    }
    if memory.read_only && asks(ffi::PyBUF_WRITABLE) {
        return refuse("the memory is read only; copy it to write it".into());
    }
    if !asks(ffi::PyBUF_ND) && layout.shape().len() != 1 {
        // PyTorch's `asarray` asks in this way, and has a row then.
        return refuse(format!(
            "the consumer asks for a row of bytes, and these are of shape {:?}; use .torch() or .numpy(), \
             or memoryview(it) for the bytes alone",
            layout.shape()
        ));
    }
    if asks(ffi::PyBUF_FORMAT) && format(layout.dtype()).is_none() {
        return refuse(format!(
            "the buffer protocol has no letter for {}; use .numpy() or .torch()",
            layout.dtype()
        ));
    }
    let (rows, columns) = (layout.is_contiguous(), is_column_major(layout));
    let in_order = match () {
        () if asks(ffi::PyBUF_C_CONTIGUOUS) || !asks(ffi::PyBUF_STRIDES) => rows,
        () if asks(ffi::PyBUF_F_CONTIGUOUS) => columns,
        () if asks(ffi::PyBUF_ANY_CONTIGUOUS) => rows || columns,
        () => true,
    };
    if in_order {
        return Ok(());
    }
    refuse(format!(
        "the elements have gaps or another order (strides {:?}), and the consumer asks for contiguous \
         ones; use .tobytes(), which copies",
        layout.strides()
    ))
}

/// Fills `view` with a buffer of `memory`, which is ready for the CPU and has passed [`check`].
///
/// # Safety
/// `view` is a buffer that a caller of `bf_getbuffer` wants filled.
pub unsafe fn export(
    owner: &Bound<'_, PyAny>,
    memory: Memory,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) {
    let layout = memory.layout;
    let width = layout.dtype().bytes() as isize;
    let rank = layout.shape().len();
    let mut exported = Box::new(Exported {
        shape: [0; RANK_MAX],
        strides: [0; RANK_MAX],
        _memory: memory.clone(),
    });
    // A layout's extent in bytes was checked against the address space.
    for (to, &from) in exported.shape.iter_mut().zip(layout.shape()) {
        *to = from as isize;
    }
    for (to, &from) in exported.strides.iter_mut().zip(layout.strides()) {
        *to = from as isize * width;
    }
    let exported = Box::into_raw(exported);
    let given = |flag: c_int| flags & flag == flag;
    let format = format(layout.dtype()).filter(|_| given(ffi::PyBUF_FORMAT));
    let format = format.map_or(ptr::null_mut(), |format| format.as_ptr().cast_mut());
    let or_null = |flag, lengths: *mut isize| match given(flag) {
        true => lengths,
        false => ptr::null_mut(),
    };
    // SAFETY: `exported` was just made and lives until `release`; the caller's promise for `view`.
    unsafe {
        (*view).obj = owner.clone().into_ptr();
        (*view).buf = memory.address() as *mut c_void;
        (*view).len = layout.elements() as isize * width;
        (*view).itemsize = width;
        (*view).readonly = c_int::from(memory.read_only);
        (*view).ndim = rank as c_int;
        (*view).format = format;
        (*view).shape = or_null(ffi::PyBUF_ND, (&raw mut (*exported).shape).cast());
        (*view).strides = or_null(ffi::PyBUF_STRIDES, (&raw mut (*exported).strides).cast());
        (*view).suboffsets = ptr::null_mut();
        (*view).internal = exported.cast();
    }
}

/// Ends a buffer of [`export`].
///
/// # Safety
/// `view` was filled by `export`, and is given back once.
pub unsafe fn release(view: *mut ffi::Py_buffer) {
    // SAFETY: the caller's promise; `internal` came from a box in `export`.
    drop(unsafe { Box::from_raw((*view).internal.cast::<Exported>()) });
}

/// The element type in the letters of `struct` and PEP 3118, in this machine's order and sizes.
fn format(dtype: DType) -> Option<&'static CStr> {
    Some(match dtype.name() {
        "bool" => c"?",
        "int8" => c"b",
        "uint8" => c"B",
        "int16" => c"h",
        "uint16" => c"H",
        "int32" => c"i",
        "uint32" => c"I",
        "int64" => c"l",
        "uint64" => c"L",
        "float16" => c"e",
        "float32" => c"f",
        "float64" => c"d",
        "complex64" => c"Zf",
        "complex128" => c"Zd",
        _ => return None,
    })
}

/// The element type of a buffer in one of these letters, of so many bytes.
pub fn from_format(letters: &CStr, bytes: usize) -> Option<DType> {
    let is_it = |dtype: &&DType| format(**dtype) == Some(letters) && dtype.bytes() == bytes as u64;
    DType::ALL.iter().find(is_it).copied()
}

fn is_column_major(layout: &Layout) -> bool {
    let backwards: Vec<u64> = layout.shape().iter().rev().copied().collect();
    let plain = row_major(&backwards).into_iter().rev();
    layout.elements() == 0
        || layout
            .shape()
            .iter()
            .zip(layout.strides())
            .zip(plain)
            .all(|((&length, &stride), plain)| length == 1 || stride == plain)
}
