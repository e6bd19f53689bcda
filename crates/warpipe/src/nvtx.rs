//! Ranges for profilers: the time that this process spends in `send`, `receive` and similar calls,
//! on the time line of NVIDIA's profilers and others that take NVTX. **This module is marked for
//! unsafe**: it shares tables of function pointers with the profiler, and calls them.
//!
//! `NVTX_INJECTION64_PATH` names a profiler's library; profilers set it themselves (`nsys profile`
//! does). Without it, `WARPIPE_NVTX=1` loads `libnvToolsExt.so.1` of a toolkit (up to CUDA 12).
//! `WARPIPE_NVTX=0` turns ranges off in any case; then, and without either variable, a range costs
//! one relaxed load. A library that cannot be used leaves ranges off, and [`state`] says why. The
//! handshake and its numbers are those of `nvtxInit.h` and `nvtxTypes.h` of NVTX 3.

use std::ffi::{CStr, OsString, c_char, c_int, c_uint, c_void};
use std::io;
use std::marker::PhantomData;
use std::mem;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use libloading::Library;

use crate::error::Error;
use crate::fork::per_process::PerProcess;

/// The range of a send.
pub(crate) const SEND: &CStr = c"warpipe.send";
/// The range of a receive: its wait and the taking of the sample.
pub(crate) const RECEIVE: &CStr = c"warpipe.receive";
/// The range of a lease: its wait and the taking of the job.
pub(crate) const LEASE: &CStr = c"warpipe.lease";
/// The range of a job's completion.
pub(crate) const COMPLETE: &CStr = c"warpipe.complete";

/// Names a profiler's library. It is loaded at the first range and given the tables of NVTX 3, into
/// which it writes its functions: NVTX's C headers do the same in a C program.
const INJECTION: &str = "NVTX_INJECTION64_PATH";
/// `1` asks for ranges, `0` forbids them.
const SWITCH: &str = "WARPIPE_NVTX";
/// The library that `WARPIPE_NVTX=1` loads.
const TOOLKIT_LIBRARY: &str = "libnvToolsExt.so.1";

/// Whether ranges reach a profiler. See [`state`].
#[derive(Debug)]
#[non_exhaustive]
pub enum State {
    /// No ranges were requested.
    Off,
    /// Ranges go to this library.
    On {
        /// The library's path or name.
        library: String,
    },
    /// Ranges were requested, and cannot be had: [`Error::Os`] of `dlopen`.
    Failed(Error),
}

/// Whether ranges reach a profiler; the first call, or the first range, determines it.
///
/// ```
/// use warpipe::nvtx::{State, state};
/// match state() {
///     State::On { library } => println!("ranges go to {library}"),
///     State::Failed(error) => println!("{error}"),
///     _ => println!("nobody asked for ranges"),
/// }
/// ```
pub fn state() -> &'static State {
    // A forked child keeps the parent's result, and determines it anew if the parent had not
    // finished.
    static STATE: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());
    static STARTING: PerProcess<Mutex<()>> = PerProcess::new();
    // SAFETY: a published state is never freed, and never written through.
    let known = || unsafe { STATE.load(Ordering::Acquire).as_ref() };
    known().unwrap_or_else(|| {
        let _starting = STARTING.lock();
        known().unwrap_or_else(|| {
            let state = start(std::env::var_os(SWITCH), std::env::var_os(INJECTION));
            if !matches!(state, State::On { .. }) {
                MAY_BE_ON.store(false, Ordering::Relaxed);
            }
            let state = Box::into_raw(Box::new(state));
            STATE.store(state, Ordering::Release);
            // SAFETY: as above.
            unsafe { &*state }
        })
    })
}

/// False once it is known that no profiler listens.
static MAY_BE_ON: AtomicBool = AtomicBool::new(true);

/// A span of this thread's time: ends when it is dropped, in the reverse order of the beginnings.
#[must_use = "a range ends when it is dropped"]
pub(crate) struct Range {
    is_open: bool,
    /// The ranges of a thread are a stack: this one must end where it began.
    _of_thread: PhantomData<*const ()>,
}

/// `nvtxRangePushA`: begins a range of this thread.
#[inline]
pub(crate) fn range(name: &'static CStr) -> Range {
    let is_open = MAY_BE_ON.load(Ordering::Relaxed) && push(name);
    Range {
        is_open,
        _of_thread: PhantomData,
    }
}

impl Drop for Range {
    #[inline]
    fn drop(&mut self) {
        if self.is_open {
            pop();
        }
    }
}

#[cold]
fn push(name: &'static CStr) -> bool {
    if !matches!(state(), State::On { .. }) {
        return false;
    }
    let function = SLOTS.0[CORE][RANGE_PUSH_A].load(Ordering::Acquire);
    if function.is_null() {
        return false;
    }
    // SAFETY: the pointer in this slot is the library's `nvtxRangePushA`, by the handshake or by
    // its name; the library is never unloaded, and the name is terminated and lives for ever.
    unsafe {
        mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_int>(function)(
            name.as_ptr(),
        )
    };
    true
}

#[cold]
fn pop() {
    let function = SLOTS.0[CORE][RANGE_POP].load(Ordering::Acquire);
    if !function.is_null() {
        // SAFETY: as in `push`; `nvtxRangePop` takes nothing.
        unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(function)() };
    }
}

/// Gets the functions out of a library. The error text says what is wrong with the library.
type Load = fn(&Library) -> Result<(), String>;

fn start(switch: Option<OsString>, injection: Option<OsString>) -> State {
    let is_asked = match switch.as_deref().and_then(|value| value.to_str()) {
        Some("0") => return State::Off,
        Some("1") => true,
        _ => false,
    };
    let (library, load): (_, Load) = match injection.filter(|path| !path.is_empty()) {
        Some(path) => (path, shake_hands),
        None if is_asked => (TOOLKIT_LIBRARY.into(), take_functions),
        None => return State::Off,
    };
    let name = library.to_string_lossy().into_owned();
    // SAFETY: the environment of this process names the library, as for every program with NVTX in
    // it; a process that sets the environment could preload a library as well.
    let loaded = unsafe { Library::new(&library) }.map_err(|error| {
        let words = std::error::Error::source(&error).map(ToString::to_string);
        format!(
            "cannot be loaded ({})",
            words.unwrap_or_else(|| error.to_string())
        )
    });
    let ready = loaded.and_then(|library| {
        let ready = load(&library);
        // Never unloaded, even when it refuses: it may have started threads or left pointers to
        // itself.
        mem::forget(library);
        ready
    });
    match ready {
        Ok(()) => State::On { library: name },
        Err(reason) => State::Failed(Error::os(
            "dlopen",
            "a profiler's library",
            io::Error::other(format!("{name} {reason}")),
        )),
    }
}

/// `nvtxRangePushA` and `nvtxRangePop` by their names.
fn take_functions(library: &Library) -> Result<(), String> {
    for (name, slot) in [
        (c"nvtxRangePushA", RANGE_PUSH_A),
        (c"nvtxRangePop", RANGE_POP),
    ] {
        // SAFETY: only the symbol's address is taken here, as a pointer.
        let symbol = unsafe { library.get::<*mut c_void>(name.to_bytes_with_nul()) };
        let symbol = symbol.map_err(|_| format!("has no {}", name.to_string_lossy()))?;
        SLOTS.0[CORE][slot].store(*symbol, Ordering::Release);
    }
    Ok(())
}

type GetExportTable = unsafe extern "C" fn(c_uint) -> *const c_void;

/// `InitializeInjectionNvtx2`: passes the export tables to the library, which writes its functions
/// into them.
fn shake_hands(library: &Library) -> Result<(), String> {
    type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;
    // SAFETY: a symbol of this name has this type, by the protocol.
    let initialize = unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2\0") };
    let initialize = initialize.map_err(|_| "has no InitializeInjectionNvtx2".to_owned())?;
    // SAFETY: the function that NVTX 3 itself would pass, with tables that live for ever.
    if unsafe { initialize(export_table) } == 0 {
        return Err("refused (InitializeInjectionNvtx2 returned 0)".into());
    }
    Ok(())
}

/// The modules of `NvtxCallbackModule`, and how many functions each has (with the unused first).
const MODULE_SIZES: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const SIZE_MAX: usize = 16;
/// `NVTX_CB_MODULE_CORE`, and in it `NVTX_CBID_CORE_RangePushA` and `..._RangePop`.
const CORE: usize = 1;
const RANGE_PUSH_A: usize = 9;
const RANGE_POP: usize = 11;

/// `NVTX_ETID_CALLBACKS` and `NVTX_ETID_VERSIONINFO`.
const CALLBACKS: c_uint = 1;
const VERSION_INFO: c_uint = 3;

/// The slots for a profiler's functions. Most are never called.
struct Slots([[AtomicPtr<c_void>; SIZE_MAX]; MODULE_SIZES.len()]);

static SLOTS: Slots =
    Slots([const { [const { AtomicPtr::new(ptr::null_mut()) }; SIZE_MAX] }; MODULE_SIZES.len()]);

/// For each module the addresses of its slots, as the profiler wants them.
struct Addresses([[*const AtomicPtr<c_void>; SIZE_MAX]; MODULE_SIZES.len()]);

// SAFETY: addresses of a static of atomics, never written.
unsafe impl Sync for Addresses {}

static ADDRESSES: Addresses = {
    let mut addresses = [[ptr::null(); SIZE_MAX]; MODULE_SIZES.len()];
    let mut module = 1;
    while module < MODULE_SIZES.len() {
        // The first slot of each module belongs to no function, and has no address.
        let mut function = 1;
        while function < MODULE_SIZES[module] {
            addresses[module][function] = &raw const SLOTS.0[module][function];
            function += 1;
        }
        module += 1;
    }
    Addresses(addresses)
};

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    struct_size: usize,
    module_function_table:
        unsafe extern "C" fn(c_uint, *mut *const *const AtomicPtr<c_void>, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: extern "C" fn(u32),
}

static CALLBACK_TABLE: Callbacks = Callbacks {
    struct_size: size_of::<Callbacks>(),
    module_function_table: give_functions,
};
static VERSION_TABLE: VersionInfo = VersionInfo {
    struct_size: size_of::<VersionInfo>(),
    version: 3,
    reserved: 0,
    set_injection_version: ignore,
};

extern "C" fn ignore(_version: u32) {}

unsafe extern "C" fn export_table(id: c_uint) -> *const c_void {
    match id {
        CALLBACKS => (&raw const CALLBACK_TABLE).cast(),
        VERSION_INFO => (&raw const VERSION_TABLE).cast(),
        _ => ptr::null(),
    }
}

/// # Safety
/// As in the protocol: each out pointer is null or valid.
unsafe extern "C" fn give_functions(
    module: c_uint,
    table: *mut *const *const AtomicPtr<c_void>,
    size: *mut c_uint,
) -> c_int {
    let Some((addresses, &count)) = ADDRESSES
        .0
        .get(module as usize)
        .zip(MODULE_SIZES.get(module as usize))
        .filter(|&(_, &count)| count > 0)
    else {
        return 0;
    };
    if !table.is_null() {
        // SAFETY: valid, as the caller promises.
        unsafe { table.write(addresses.as_ptr()) };
    }
    if !size.is_null() {
        // SAFETY: valid, as the caller promises.
        unsafe { size.write(count as c_uint) };
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(state: State) -> String {
        match state {
            State::Failed(error) => error.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn without_being_asked_nothing_is_loaded() {
        assert!(matches!(start(None, None), State::Off));
        assert!(matches!(start(None, Some("".into())), State::Off));
        assert!(
            matches!(
                start(Some("0".into()), Some("/no/such/library.so".into())),
                State::Off
            ),
            "forbidden"
        );
    }

    #[test]
    fn a_library_that_is_not_there_or_no_profilers_is_told_with_its_name() {
        let missing = failure(start(None, Some("/no/such/library.so".into())));
        assert!(
            missing.contains("/no/such/library.so cannot be loaded"),
            "{missing}"
        );
        let other = failure(start(None, Some("libc.so.6".into())));
        assert!(
            other.contains("libc.so.6 has no InitializeInjectionNvtx2"),
            "{other}"
        );
    }

    #[test]
    fn a_profiler_is_given_every_module_and_no_other() {
        for (module, count) in [
            (0, 0),
            (1, 16),
            (2, 9),
            (3, 15),
            (4, 7),
            (5, 16),
            (6, 7),
            (7, 0),
            (u32::MAX, 0),
        ] {
            let (mut table, mut size) = (ptr::null(), 0);
            // SAFETY: both out pointers are valid.
            let given = unsafe { give_functions(module, &mut table, &mut size) };
            assert_eq!(
                (given, size),
                (c_int::from(count > 0), count),
                "module {module}"
            );
            // SAFETY: the function does not write through null pointers.
            unsafe { give_functions(module, ptr::null_mut(), ptr::null_mut()) };
        }
        assert!(ADDRESSES.0[CORE][0].is_null() && !ADDRESSES.0[CORE][RANGE_POP].is_null());
    }
}
