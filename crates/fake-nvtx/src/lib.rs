//! A fake profiler for tests: named by `NVTX_INJECTION64_PATH`, it puts its functions into the
//! tables of NVTX 3 as profilers do; under the name `libnvToolsExt.so.1` it is a toolkit's library.
//! It appends each range to the file that `FAKE_NVTX_LOG` names, in lines `thread push NAME` and
//! `thread pop`. With `FAKE_NVTX_REFUSE` it refuses to start.
//!
//! **This module is marked for unsafe**: it is called over the C interface of NVTX.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::OpenOptions;
use std::io::Write;
use std::ptr;

type Function = *const c_void;

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    struct_size: usize,
    module_function_table:
        unsafe extern "C" fn(c_uint, *mut *const *mut Function, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: unsafe extern "C" fn(u32),
}

const CORE: c_uint = 1;
const CORE2: c_uint = 5;
const RANGE_PUSH_A: usize = 9;
const RANGE_POP: usize = 11;

/// A profiler's initialization: checks the version, and at each table's size before it
/// writes.
///
/// # Safety
/// `export_table` is as in NVTX 3.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(
    export_table: unsafe extern "C" fn(c_uint) -> *const c_void,
) -> c_int {
    if std::env::var_os("FAKE_NVTX_REFUSE").is_some() {
        return 0;
    }
    // SAFETY: null or a table, as the caller promises.
    let (version, callbacks) = unsafe {
        (
            export_table(3).cast::<VersionInfo>(),
            export_table(1).cast::<Callbacks>(),
        )
    };
    // SAFETY: as above; a table of another number is none.
    let (Some(version), Some(callbacks), true) = (unsafe {
        (
            version.as_ref(),
            callbacks.as_ref(),
            export_table(99).is_null(),
        )
    }) else {
        return 0;
    };
    if version.version != 3
        || version.struct_size != size_of::<VersionInfo>()
        || version.reserved != 0
    {
        return 0;
    }
    // SAFETY: the version table's own function.
    unsafe { (version.set_injection_version)(3) };
    let functions: [(usize, Function); 2] = [
        (RANGE_PUSH_A, nvtxRangePushA as Function),
        (RANGE_POP, nvtxRangePop as Function),
    ];
    let is_full = callbacks.struct_size == size_of::<Callbacks>()
        && table(callbacks, CORE2).is_some_and(|(_, size)| size == 16);
    let Some((core, 16)) = table(callbacks, CORE).filter(|_| is_full) else {
        return 0;
    };
    for (place, function) in functions {
        // SAFETY: the table has 16 entries, and each but the first is the address of a place for a
        // function.
        unsafe { core.add(place).read().write(function) };
    }
    1
}

fn table(callbacks: &Callbacks, module: c_uint) -> Option<(*const *mut Function, c_uint)> {
    let (mut table, mut size) = (ptr::null(), 0);
    // SAFETY: the table's own function, with valid out pointers.
    let given = unsafe { (callbacks.module_function_table)(module, &mut table, &mut size) };
    (given == 1 && !table.is_null()).then_some((table, size))
}

/// `nvtxRangePushA`.
///
/// # Safety
/// `name` is a terminated text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvtxRangePushA(name: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    log(&format!("push {}", name.to_string_lossy()))
}

/// `nvtxRangePop`.
#[unsafe(no_mangle)]
pub extern "C" fn nvtxRangePop() -> c_int {
    log("pop")
}

/// One line, in one write.
fn log(words: &str) -> c_int {
    let line = format!("{:?} {words}\n", std::thread::current().id());
    let file = std::env::var_os("FAKE_NVTX_LOG")
        .and_then(|path| OpenOptions::new().append(true).create(true).open(path).ok());
    file.map_or(-1, |mut file| {
        file.write_all(line.as_bytes()).map_or(-1, |()| 0)
    })
}
