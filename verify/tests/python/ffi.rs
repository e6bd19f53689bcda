//! Capsules, as CPython has them.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

pub type Destructor = unsafe extern "C" fn(*mut PyObject);

#[derive(Debug)]
pub struct PyObject {
    pointer: *mut c_void,
    name: *const c_char,
    destructor: Option<Destructor>,
}

thread_local! {
    static IS_FULL: Cell<bool> = const { Cell::new(false) };
}

/// The next capsule cannot be made.
pub fn refuse_next() {
    IS_FULL.set(true);
}

/// # Safety
/// `name` is null or a text that lives as long as the capsule.
#[allow(non_snake_case)]
pub unsafe fn PyCapsule_New(
    pointer: *mut c_void,
    name: *const c_char,
    destructor: Option<Destructor>,
) -> *mut PyObject {
    if IS_FULL.take() {
        return null_mut();
    }
    Box::into_raw(Box::new(PyObject {
        pointer,
        name,
        destructor,
    }))
}

/// # Safety
/// `object` is a live capsule, `name` a text.
#[allow(non_snake_case)]
pub unsafe fn PyCapsule_IsValid(object: *mut PyObject, name: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        (!(*object).pointer.is_null() && CStr::from_ptr((*object).name) == CStr::from_ptr(name))
            .into()
    }
}

/// # Safety
/// As [`PyCapsule_IsValid`].
#[allow(non_snake_case)]
pub unsafe fn PyCapsule_GetPointer(object: *mut PyObject, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe {
        if PyCapsule_IsValid(object, name) == 1 {
            (*object).pointer
        } else {
            null_mut()
        }
    }
}

/// # Safety
/// As [`PyCapsule_IsValid`].
#[allow(non_snake_case)]
pub unsafe fn PyCapsule_SetName(object: *mut PyObject, name: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { (*object).name = name };
    0
}

/// The last reference goes.
///
/// # Safety
/// `object` is a capsule of [`PyCapsule_New`], and no other reference to it is left.
pub unsafe fn end(object: *mut PyObject) {
    // SAFETY: the caller's promise; the destructor gets it while it lives.
    unsafe {
        if let Some(destructor) = (*object).destructor {
            destructor(object);
        }
        drop(Box::from_raw(object));
    }
}
