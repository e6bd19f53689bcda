//! The driver's status codes: from a [`Fault`] of one call to a typed [`Error`] with a next step.

use std::ffi::{CStr, c_char};
use std::io;
use std::path::Path;

use super::shutdown_gate;
use super::sys::{self, CUresult, Fault};
use crate::error::{DeviceFault, Error, StateFault};

impl Fault {
    /// Whether the driver returned one of `codes`.
    pub fn is(&self, codes: &[CUresult]) -> bool {
        matches!(self, Fault::Call { code, .. } if codes.contains(code))
    }

    /// For messages that have their own variant: call and name, for example `cuMemMap:
    /// CUDA_ERROR_NOT_SUPPORTED`.
    pub fn words(&self) -> String {
        match self {
            Fault::Symbol(symbol) => format!("the driver lacks {symbol}"),
            Fault::Call { call, code } => format!("{call}: {}", name(*code)),
        }
    }

    /// The general error, with details beyond the code's own text.
    pub fn with_detail(self, detail: &str) -> Error {
        let mut error = Error::from(self);
        if let Error::Driver { message, .. } = &mut error
            && !detail.is_empty()
        {
            *message = format!("{message}: {detail}");
        }
        error
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        match fault {
            Fault::Symbol(symbol) => Error::device(
                DeviceFault::OldDriver,
                format!("the CUDA driver lacks {symbol}"),
            ),
            Fault::Call {
                code: CUresult::NOT_INITIALIZED,
                ..
            } if shutdown_gate::forked() => Error::State(StateFault::Forked),
            Fault::Call {
                code: CUresult::NO_DEVICE,
                ..
            } => no_device(),
            Fault::Call {
                code: CUresult::CAPTURED_EVENT,
                ..
            } => Error::State(StateFault::Capturing("the event".into())),
            Fault::Call { call, code } => Error::Driver {
                call,
                code: code.0,
                name: name(code),
                message: text(code),
                next: next(code),
            },
        }
    }
}

/// The error of a `cuInit` that failed with `fault`: several codes can mean a missing permission.
pub(super) fn init_error(fault: Fault) -> Error {
    for path in ["/dev/nvidiactl", "/dev/nvidia0"] {
        if let Some(error) = permission_error(Path::new(path)) {
            return error;
        }
    }
    fault.into()
}

fn permission_error(path: &Path) -> Option<Error> {
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path);
    match opened {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let text = format!("no permission on {}", path.display());
            Some(Error::device(DeviceFault::NoPermission, text))
        }
        _ => None,
    }
}

/// [`DeviceFault::NoGpu`], with the value of `CUDA_VISIBLE_DEVICES` if that may hide the GPUs.
pub(super) fn no_device() -> Error {
    let cause = match std::env::var_os("CUDA_VISIBLE_DEVICES") {
        Some(value) => format!(" (CUDA_VISIBLE_DEVICES is {value:?})"),
        None => String::new(),
    };
    let text = format!("the CUDA driver lists no GPU{cause}");
    Error::device(DeviceFault::NoGpu, text)
}

fn name(code: CUresult) -> String {
    let lookup = sys::driver().ok().and_then(|driver| driver.cuGetErrorName);
    look_up(lookup, code).unwrap_or_else(|| format!("CUresult {}", code.0))
}

fn text(code: CUresult) -> String {
    let lookup = sys::driver()
        .ok()
        .and_then(|driver| driver.cuGetErrorString);
    look_up(lookup, code).unwrap_or_else(|| "the driver has no text for it".into())
}

fn look_up(lookup: Option<sys::signature::cuGetErrorName>, code: CUresult) -> Option<String> {
    let lookup = lookup?;
    let _guard = shutdown_gate::enter();
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: both lookups only store a pointer to a string that is part of the driver's library.
    let found = unsafe { lookup(code, &mut text) };
    if found != CUresult::SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: not null after success, so a NUL-terminated string of the library, which is never
    // unloaded.
    Some(
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    )
}

/// `CUDA_ERROR_STREAM_CAPTURE_...`.
fn is_capture_code(code: i32) -> bool {
    (CUresult::STREAM_CAPTURE_UNSUPPORTED.0..=CUresult::STREAM_CAPTURE_WRONG_THREAD.0)
        .contains(&code)
}

/// The next step for a code, if there is one.
fn next(code: CUresult) -> &'static str {
    match code {
        CUresult::STUB_LIBRARY => {
            "the CUDA toolkit's stub was loaded: take its `stubs` directory out of LD_LIBRARY_PATH"
        }
        CUresult::DEVICE_UNAVAILABLE => {
            "another process has the GPU for itself: end it, or set the compute mode to default"
        }
        CUresult::INVALID_CONTEXT | CUresult::CONTEXT_IS_DESTROYED => {
            "the device's primary context was reset: open the device again"
        }
        CUresult::DEINITIALIZED => "the process is ending: close what is open before its end",
        CUresult::NO_BINARY_FOR_GPU => {
            "the GPU is older than compute capability 7.0: use a newer one"
        }
        CUresult::INVALID_PTX | CUresult::UNSUPPORTED_PTX_VERSION => {
            "update the driver (R525 or newer), or check the kernel's PTX"
        }
        CUresult::OPERATING_SYSTEM => "see the kernel's log (dmesg) for the driver's words",
        CUresult::ILLEGAL_ADDRESS => {
            "work on this GPU touched memory it may not (a write to a read-only import?): restart this process"
        }
        CUresult::LAUNCH_FAILED => {
            "work on this GPU failed, under MPS perhaps another client's: restart this process"
        }
        CUresult(code) if is_capture_code(code) => {
            "a stream is being captured into a graph: make this call before the capture begins or after it ends"
        }
        CUresult::NOT_PERMITTED => "check the container's or the system's restrictions on the GPU",
        CUresult::SYSTEM_NOT_READY => "wait for, or start, the NVIDIA fabric manager",
        CUresult::SYSTEM_DRIVER_MISMATCH => {
            "library and kernel module differ in version: reboot after the update, or match the container's library"
        }
        CUresult::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "take the forward-compatibility library out of LD_LIBRARY_PATH, or update the driver"
        }
        CUresult::MPS_CONNECTION_FAILED
        | CUresult::MPS_RPC_FAILURE
        | CUresult::MPS_SERVER_NOT_READY
        | CUresult::MPS_MAX_CLIENTS_REACHED
        | CUresult::MPS_CLIENT_TERMINATED => {
            "look at the MPS server (its log, its client limit), then try again"
        }
        _ => "",
    }
}
