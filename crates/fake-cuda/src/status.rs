//! Status codes, and the common frame of every function.

use std::ffi::{c_char, c_int};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{config, control, device, ending};

/// A `CUresult` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(pub c_int);

pub type Outcome<T = ()> = Result<T, Status>;

macro_rules! codes {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        // Some are never returned unless a test asks for them by number.
        $(#[allow(dead_code)] pub const $name: Status = Status($code);)*

        /// Name and text of a code, both terminated.
        fn words(code: c_int) -> Option<(&'static str, &'static str)> {
            match code {
                0 => Some(("CUDA_SUCCESS\0", "no error\0")),
                $($code => Some((concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($text, "\0"))),)*
                _ => None,
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "initialization error";
    DEINITIALIZED = 4, "driver shutting down";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_CONTEXT = 201, "invalid device context";
    NO_BINARY_FOR_GPU = 209, "no kernel image is available for execution on the device";
    PEER_ACCESS_UNSUPPORTED = 217, "peer access is not supported between these two devices";
    INVALID_PTX = 218, "a PTX JIT compilation failed";
    OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, "invalid resource handle";
    ILLEGAL_STATE = 401, "the operation cannot be performed in the present state";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    NOT_SUPPORTED = 801, "operation not supported";
    SYSTEM_DRIVER_MISMATCH = 803, "system has unsupported display driver / cuda driver combination";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_UNMATCHED = 903, "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908, "attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN = 999, "unknown error";
}

/// The state that a function requires.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Nothing: `cuInit` itself.
    Nothing,
    /// An initialised driver.
    Init,
    /// A context current on the calling thread.
    Context,
}

static INITIALISED: AtomicBool = AtomicBool::new(false);

/// Runs one function of the driver: its ordered failure, its requirements, its body. No panic
/// crosses into C.
pub fn answer(name: &'static str, needs: Needs, body: impl FnOnce() -> Outcome) -> c_int {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        ending::check(name)?;
        control::pass(name)?;
        if needs != Needs::Nothing && !INITIALISED.load(Ordering::Acquire) {
            return Err(NOT_INITIALIZED);
        }
        if needs == Needs::Context {
            device::current()?;
        }
        body()
    }));
    // A call that was under way at the shutdown has lost its resources, too.
    if let Err(status) = ending::check(name) {
        return status.0;
    }
    match outcome {
        Ok(Ok(())) => 0,
        Ok(Err(status)) => status.0,
        Err(_) => UNKNOWN.0,
    }
}

/// Stores through a caller's out pointer.
///
/// # Safety
/// `out` is null or valid for a write of `T`.
pub unsafe fn give<T>(out: *mut T, value: T) -> Outcome {
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, so valid by the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}

/// Files that stay open as long as the process, or a forked child, has them. The driver's are known
/// by their names.
fn open_files() {
    static FILES: OnceLock<Vec<OwnedFd>> = OnceLock::new();
    let open = |name| rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).ok();
    FILES.get_or_init(|| {
        ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]
            .into_iter()
            .filter_map(open)
            .collect()
    });
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: u32) -> c_int {
    answer("cuInit", Needs::Nothing, || {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if config::get().visible.is_empty() {
            return Err(NO_DEVICE);
        }
        ending::expect()?;
        open_files();
        INITIALISED.store(true, Ordering::Release);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: c_int, out: *mut *const c_char) -> c_int {
    // SAFETY: the caller's out pointer.
    unsafe { describe("cuGetErrorName", code, out, |(name, _)| name) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: c_int, out: *mut *const c_char) -> c_int {
    // SAFETY: the caller's out pointer.
    unsafe { describe("cuGetErrorString", code, out, |(_, text)| text) }
}

/// Usable before `cuInit`, like the driver's.
///
/// # Safety
/// As for [`give`].
unsafe fn describe(
    name: &'static str,
    code: c_int,
    out: *mut *const c_char,
    choose: fn((&'static str, &'static str)) -> &'static str,
) -> c_int {
    if let Err(status) = ending::check(name) {
        return status.0;
    }
    let found = words(code).map(choose);
    let text = found.map_or(ptr::null(), |text| text.as_ptr().cast());
    // SAFETY: the caller's promise.
    match unsafe { give(out, text) } {
        Ok(()) if found.is_some() => 0,
        _ => INVALID_VALUE.0,
    }
}
