//! Registered host memory, whose device address is its own.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use crate::memory;
use crate::status::*;

static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn with<T>(body: impl FnOnce(&mut BTreeMap<usize, usize>) -> T) -> T {
    body(&mut REGISTERED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Whether all these bytes lie in one registered range.
pub fn is_registered(address: u64, bytes: usize) -> bool {
    let address = address as usize;
    with(|ranges| {
        let below = ranges.range(..=address).next_back();
        below.is_some_and(|(start, length)| address.checked_add(bytes).is_some_and(|end| end <= start + length))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: u32) -> c_int {
    answer("cuMemHostRegister_v2", Needs::Context, || {
        let start = pointer.addr();
        let end = start.checked_add(bytes).ok_or(INVALID_VALUE)?;
        if pointer.is_null() || bytes == 0 || flags & !0xf != 0 {
            return Err(INVALID_VALUE);
        }
        with(|ranges| {
            if ranges.range(..end).next_back().is_some_and(|(other, length)| other + length > start) {
                return Err(HOST_MEMORY_ALREADY_REGISTERED);
            }
            ranges.insert(start, bytes);
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(pointer: *mut c_void) -> c_int {
    answer("cuMemHostUnregister", Needs::Context, || {
        with(|ranges| ranges.remove(&pointer.addr())).map(drop).ok_or(HOST_MEMORY_NOT_REGISTERED)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(address: *mut u64, pointer: *mut c_void, flags: u32) -> c_int {
    answer("cuMemHostGetDevicePointer_v2", Needs::Context, || {
        let value = pointer.addr() as u64;
        if flags != 0 || !is_registered(value, 1) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's out pointer.
        unsafe { give(address, value) }
    })
}

/// Knows one attribute, the memory's type.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, pointer: u64) -> c_int {
    answer("cuPointerGetAttribute", Needs::Context, || {
        const MEMORY_TYPE: u32 = 2;
        const HOST: u32 = 1;
        const DEVICE: u32 = 2;
        let kind = if is_registered(pointer, 1) {
            HOST
        } else if memory::is_device(pointer, 1, false) {
            DEVICE
        } else {
            return Err(INVALID_VALUE);
        };
        if attribute != MEMORY_TYPE {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's out pointer, an unsigned int for this attribute.
        unsafe { give(data.cast(), kind) }
    })
}
