//! The driver's status codes: from a [`Fault`] of one call to a typed [`Error`] with a next step.

use std::ffi::{CStr, c_char};
use std::fs::OpenOptions;
use std::io::ErrorKind;

use super::shutdown_gate;
use super::sys::{self, CUresult, Driver, Fault};
use crate::error::{DeviceFault, Error, StateFault};

impl Fault {
    /// Whether the driver returned one of `codes`.
    pub fn is(&self, codes: &[CUresult]) -> bool {
        matches!(self, Fault::Call { code, .. } if codes.contains(code))
    }

    /// The typed error of one of `codes`, else the general one.
    pub fn typed(self, codes: &[CUresult], error: impl FnOnce(Fault) -> Error) -> Error {
        match self.is(codes) {
            true => error(self),
            false => self.into(),
        }
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
        let (call, code) = match fault {
            Fault::Call { call, code } => (call, code),
            Fault::Symbol(symbol) => {
                let text = format!("the CUDA driver lacks {symbol}");
                return Error::device(DeviceFault::OldDriver, text);
            }
        };
        match code {
            CUresult::NOT_INITIALIZED if shutdown_gate::forked() => {
                Error::State(StateFault::Forked)
            }
            CUresult::NO_DEVICE => no_device(),
            CUresult::CAPTURED_EVENT => Error::State(StateFault::Capturing("the event".into())),
            _ => Error::Driver {
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
        let opened = OpenOptions::new().read(true).write(true).open(path);
        if opened.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied) {
            return Error::device(
                DeviceFault::NoPermission,
                format!("no permission on {path}"),
            );
        }
    }
    fault.into()
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
    look_up(Driver::cuGetErrorName, code).unwrap_or_else(|| format!("CUresult {}", code.0))
}

fn text(code: CUresult) -> String {
    let unknown = || "the driver has no text for it".into();
    look_up(Driver::cuGetErrorString, code).unwrap_or_else(unknown)
}

type LookUp = fn(&Driver, CUresult) -> Result<*const c_char, Fault>;

fn look_up(look_up: LookUp, code: CUresult) -> Option<String> {
    let _guard = shutdown_gate::enter();
    let text = look_up(sys::driver().ok()?, code).ok()?;
    // SAFETY: not null, so a NUL-terminated string of the library, which is never unloaded.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })?;
    Some(text.to_string_lossy().into_owned())
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
