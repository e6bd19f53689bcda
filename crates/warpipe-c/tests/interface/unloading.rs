//! A program that loads the shared library itself, as a plugin's host does.

use std::ffi::{CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;

const RTLD_NOW: c_int = 2;
/// Finds a library that is loaded.
const RTLD_NOLOAD: c_int = 4;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlclose(library: *mut c_void) -> c_int;
}

#[test]
fn the_library_stays_loaded_behind_dlclose_as_its_threads_do() {
    let test = std::env::current_exe().unwrap();
    let path = test.with_file_name("libwarpipe_c.so");
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path is a text, and the library's initializers need nothing of this process.
    let library = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
    assert!(!library.is_null(), "{path:?}");
    // SAFETY: opened above, and nothing of it is used.
    assert_eq!(unsafe { dlclose(library) }, 0);
    // SAFETY: as above.
    let found = unsafe { dlopen(path.as_ptr(), RTLD_NOW | RTLD_NOLOAD) };
    assert!(!found.is_null(), "unloaded");
}
