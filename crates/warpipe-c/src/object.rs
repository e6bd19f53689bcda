//! What all objects have.

use std::ffi::c_void;

use crate::{handle, run, warpipe_status};

/// Closes an object of any type, once; a type says what that ends. It may be called while another
/// thread is in a call on the object, which ends when that call returns. Null is ignored.
///
/// `WARPIPE_INVALID_OBJECT` for a pointer that is closed, was consumed by a call, or is no object of
/// this library: nothing is read there.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_close(object: *mut c_void) -> warpipe_status {
    run(|| handle::close(object))
}
