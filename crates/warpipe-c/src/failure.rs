//! Statuses, and the message of a thread's last error.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use warpipe::{Error, ErrorKind, Language};

/// The result of a call. Every function that can fail returns one; `warpipe_error_message` says
/// more.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum warpipe_status {
    /// The call did what it says.
    WARPIPE_OK = 0,
    /// No usable device: use another one or the host device, or mend the installation.
    WARPIPE_DEVICE_UNAVAILABLE = 1,
    /// A device or its driver failed, or cannot do what was asked. Open the device again, or end
    /// the process: work that was under way may not be complete.
    WARPIPE_DEVICE_FAILED = 2,
    /// The operating system, a directory or a library of the system is not as it must be.
    WARPIPE_SYSTEM = 3,
    /// A limit is reached. Release something, wait, or raise the limit.
    WARPIPE_LIMIT_REACHED = 4,
    /// Nothing has this name or number now. Wait for it, or look for another one.
    WARPIPE_NOT_FOUND = 5,
    /// Something else has this name. Take another name.
    WARPIPE_NAME_CONFLICT = 6,
    /// The other side does not permit this. Trying again does not help.
    WARPIPE_REFUSED = 7,
    /// The two sides do not speak the same protocol, or the peer broke it. Run one version.
    WARPIPE_PROTOCOL = 8,
    /// The peer closed or died. Open the endpoint again when it is back.
    WARPIPE_PEER_GONE = 9,
    /// This link has ended; its peer may be alive. Connect again.
    WARPIPE_LINK_CLOSED = 10,
    /// The writer of some data was lost before the data was complete. Discard what was computed
    /// from it.
    WARPIPE_DATA_LOST = 11,
    /// A wait or a deadline has passed. Wait again, or look at the peer's state.
    WARPIPE_TIMEOUT = 12,
    /// A job or request came to no result.
    WARPIPE_JOB_FAILED = 13,
    /// An argument, name, layout, ticket or handle is not valid. Correct the caller.
    WARPIPE_INVALID_INPUT = 14,
    /// The object cannot do this in its present state, or another thread uses it. Correct the order
    /// of the calls.
    WARPIPE_INVALID_STATE = 15,
    /// The object is closed, or the pointer was never one of this type.
    WARPIPE_INVALID_OBJECT = 16,
    /// A fault of this library. Report it with its message.
    WARPIPE_INTERNAL = 17,
}

use warpipe_status::*;

/// The failure of a call.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The library's.
    Library(Box<Error>),
    /// This interface's: the fact, and where there is one the next step.
    Own(warpipe_status, String),
}

/// The result of a part of a call.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Library(Box::new(error))
    }
}

impl Failure {
    /// An argument that must not be null is.
    pub(crate) fn null(name: &str) -> Failure {
        Failure::input(format!("{name} is null; pass an address"))
    }

    /// An argument that is not allowed.
    pub(crate) fn argument(name: &str, found: impl Display, allowed: impl Display) -> Failure {
        Failure::input(format!("{name} is {found}; allowed is {allowed}"))
    }

    pub(crate) fn input(said: String) -> Failure {
        Failure::Own(WARPIPE_INVALID_INPUT, said)
    }

    /// The object was closed or consumed, or the pointer is not one of this process.
    pub(crate) fn closed(name: &str) -> Failure {
        let said = format!("this {name} is closed, was consumed by a call, or never was one");
        Failure::Own(WARPIPE_INVALID_OBJECT, said)
    }

    /// Not in this state.
    pub(crate) fn state(said: &str) -> Failure {
        Failure::Own(WARPIPE_INVALID_STATE, said.into())
    }

    pub(crate) fn status(&self) -> warpipe_status {
        match self {
            Failure::Library(error) => status_of(error.kind()),
            Failure::Own(status, _) => *status,
        }
    }

    /// The fact, and the next step in C's words.
    fn message(&self) -> String {
        match self {
            Failure::Library(error) => match error.hint_in(Language::C) {
                Some(hint) => format!("{error}; {hint}"),
                None => error.to_string(),
            },
            Failure::Own(_, said) => said.clone(),
        }
    }

    fn last_error(&self) -> LastError {
        let mut last = LastError {
            message: CString::new(self.message().replace('\0', " ")).unwrap_or_default(),
            ..LastError::default()
        };
        if let Failure::Library(error) = self {
            match **error {
                Error::Driver { code, .. } => last.driver_code = code,
                Error::PeerGone { pid, graceful, .. } => {
                    (last.peer_pid, last.peer_closed) = (pid, graceful);
                }
                _ => {}
            }
        }
        last
    }
}

fn status_of(kind: ErrorKind) -> warpipe_status {
    match kind {
        ErrorKind::DeviceUnavailable => WARPIPE_DEVICE_UNAVAILABLE,
        ErrorKind::DeviceFailed => WARPIPE_DEVICE_FAILED,
        ErrorKind::System => WARPIPE_SYSTEM,
        ErrorKind::LimitReached => WARPIPE_LIMIT_REACHED,
        ErrorKind::NotFound => WARPIPE_NOT_FOUND,
        ErrorKind::NameConflict => WARPIPE_NAME_CONFLICT,
        ErrorKind::Refused => WARPIPE_REFUSED,
        ErrorKind::Protocol => WARPIPE_PROTOCOL,
        ErrorKind::PeerGone => WARPIPE_PEER_GONE,
        ErrorKind::LinkClosed => WARPIPE_LINK_CLOSED,
        ErrorKind::DataLost => WARPIPE_DATA_LOST,
        ErrorKind::Timeout => WARPIPE_TIMEOUT,
        ErrorKind::JobFailed => WARPIPE_JOB_FAILED,
        ErrorKind::InvalidInput => WARPIPE_INVALID_INPUT,
        ErrorKind::InvalidState => WARPIPE_INVALID_STATE,
        _ => WARPIPE_INTERNAL,
    }
}

/// The last error of a thread.
#[derive(Debug, Default)]
struct LastError {
    message: CString,
    driver_code: i32,
    /// The process that is gone.
    peer_pid: i32,
    /// Whether that had closed.
    peer_closed: bool,
}

thread_local! {
    static LAST: RefCell<LastError> = RefCell::default();
}

/// Runs a function's body: its failure, or its panic, becomes the thread's last error and the
/// status.
pub(crate) fn run(body: impl FnOnce() -> Result<()>) -> warpipe_status {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return WARPIPE_OK,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let said = format!("a fault of warpipe itself: {}", said_by(&*panic));
            // A payload that panics when it is dropped would end the process.
            std::mem::forget(panic);
            Failure::Own(WARPIPE_INTERNAL, said)
        }
    };
    remember(&failure);
    failure.status()
}

fn said_by(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message")
}

fn remember(failure: &Failure) {
    let found = failure.last_error();
    // A thread that is ending has no place for it any more.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = found;
        }
    });
}

/// The message of this thread's last error: the fact, and where there is one the next step. Empty
/// before the first error. A call that succeeds leaves it as it is. Valid until this thread's next
/// call that fails; never null.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_error_message() -> *const c_char {
    last_error(|last| last.message.as_ptr()).unwrap_or(c"".as_ptr())
}

/// The driver's own code (`CUresult`) behind this thread's last error; 0 if it came from elsewhere.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_error_driver_code() -> i32 {
    last_error(|last| last.driver_code).unwrap_or(0)
}

/// After `WARPIPE_PEER_GONE`, the process that is gone; else 0.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_error_peer_pid() -> i32 {
    last_error(|last| last.peer_pid).unwrap_or(0)
}

/// After `WARPIPE_PEER_GONE`, whether the peer had closed its end; else it died. False after other
/// errors.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_error_peer_closed() -> bool {
    last_error(|last| last.peer_closed).unwrap_or(false)
}

fn last_error<R>(work: impl FnOnce(&LastError) -> R) -> Option<R> {
    LAST.try_with(|last| Some(work(&*last.try_borrow().ok()?)))
        .ok()?
}

/// The name of a status in lower case, for logs: `peer_gone`. `unknown` for a number that is none.
/// A static string.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_status_name(status: u32) -> *const c_char {
    // Each ends as texts in C do.
    let names = "ok\0device_unavailable\0device_failed\0system\0limit_reached\0not_found\0\
        name_conflict\0refused\0protocol\0peer_gone\0link_closed\0data_lost\0timeout\0\
        job_failed\0invalid_input\0invalid_state\0invalid_object\0internal\0";
    let mut known = names.split_terminator('\0');
    let name = known.nth(status as usize).unwrap_or("unknown\0");
    name.as_ptr().cast()
}
