//! Errors of the Rust library as exceptions of `warpipe._errors`, with their context as attributes.

use std::collections::HashMap;

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use warpipe::{
    DeviceFault, Error, HandleFault, JobEnd, Language, LimitFault, Loss, NameFault, StateFault,
    WeightsFault,
};
use warpipe_dlpack::Refusal;

use crate::thread_exit;

/// An error of the binding: the library's, Python's, or this package's own.
#[derive(Debug)]
pub enum Fault {
    /// The library's.
    Library(Error),
    /// This package's: the exception's name and its message.
    Own(&'static str, String),
}

/// The result of calls that run without the interpreter.
pub type Outcome<T> = Result<T, Fault>;

impl Fault {
    /// An endpoint is used after `close`; `name` is empty if it has none.
    pub fn closed(what: &str, name: &str) -> Fault {
        if let "queue" | "client" = what {
            return Error::State(StateFault::QueueClosed(name.to_owned())).into();
        }
        let named = match name {
            "" => String::new(),
            _ => format!(" of {name:?}"),
        };
        let said = format!("the {what}{named} is closed; open a new one");
        Fault::Own("ClosedError", said)
    }

    /// Memory is used after its release.
    pub fn released(what: &str) -> Fault {
        let next = "use it before `release`, `finish`, `send` or the end of its `with` block, or keep an array made of it";
        Fault::Own("ReleasedError", format!("{what} is no longer held; {next}"))
    }

    /// This error; the timeout of a wait of zero does not say for what, and `what` does.
    pub fn of(self, what: impl FnOnce() -> String) -> Fault {
        match self {
            Fault::Library(Error::Timeout { what: said, waited }) if said.is_empty() => {
                let what = what();
                Fault::Library(Error::Timeout { what, waited })
            }
            other => other,
        }
    }

    /// An argument out of its range.
    pub fn argument(
        argument: &str,
        found: impl std::fmt::Display,
        allowed: impl std::fmt::Display,
    ) -> Fault {
        let said = format!("{argument} is {found}; allowed is {allowed}");
        Fault::Own("ArgumentError", said)
    }

    /// An invalid layout.
    pub fn layout(reason: impl std::fmt::Display) -> Fault {
        let said = format!("not a usable tensor layout: {reason}");
        Fault::Own("LayoutError", said)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::Library(error)
    }
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Fault {
        let class = match &refusal {
            Refusal::Backwards { strides } => {
                let said = format!(
                    "it runs backwards (strides {strides:?}), which DLPack's consumers do not take"
                );
                let next = "use .numpy(), or have its sender make it contiguous first";
                return Fault::Own("ExportError", format!("{said}; {next}"));
            }
            Refusal::Length { .. } | Refusal::Rank { .. } => "LayoutError",
            Refusal::ElementType { .. } => "DTypeError",
            _ => "ExportError",
        };
        Fault::Own(class, refusal.to_string())
    }
}

impl From<warpipe::SendError> for Fault {
    fn from(failed: warpipe::SendError) -> Fault {
        Fault::Library(failed.error)
    }
}

impl From<Fault> for PyErr {
    fn from(fault: Fault) -> PyErr {
        thread_exit::prepare_exit();
        Python::attach(|py| match fault {
            Fault::Own(class, message) => raise(py, &message, |_| Ok(class)),
            Fault::Library(error) => raise(py, &message(&error), |context| {
                context.set_item("error_kind", error.kind().name())?;
                describe(&error, context)
            }),
        })
    }
}

/// The fact and the next step in Python's words, in one message.
fn message(error: &Error) -> String {
    match error.hint_in(Language::Python) {
        Some(hint) => format!("{error}; {hint}"),
        None => error.to_string(),
    }
}

/// The function `describe`, from a row for each error: its pattern, the name of the exception's
/// class, and its attributes.
macro_rules! exceptions {
    ($($error:pat => $class:expr, ($($name:ident: $value:expr),*);)*) => {
        /// The name of an exception's class; its attributes go into `dict`. Errors that this
        /// package does not know yet are plain `Error`s.
        fn describe(error: &Error, dict: &Bound<'_, PyDict>) -> PyResult<&'static str> {
            match error {
                $($error => {
                    $(dict.set_item(stringify!($name), $value)?;)*
                    Ok($class)
                })*
                _ => Ok("Error"),
            }
        }
    };
}

exceptions! {
    Error::Os { call, source, .. } => "SystemCallError",
        (call: call, code: source.raw_os_error());
    Error::Device { fault, .. } => match fault {
        DeviceFault::NoPermission => "DevicePermissionError",
        DeviceFault::NoSuchDevice => "NoSuchDeviceError",
        _ => "DeviceError",
    }, (fault: format!("{fault:?}"));
    Error::Driver { call, code, name, .. } => "DriverError",
        (call: call, code: code, driver_name: name);
    Error::Limit(LimitFault::Device { bytes, .. }) => "DeviceMemoryError", (nbytes: bytes);
    Error::Limit(LimitFault::Depth { name, depth, .. }) => "FullError",
        (endpoint: name, depth: depth);
    Error::Limit(LimitFault::Memory { name, bytes, used, limit, .. }) => "MemoryLimitError",
        (endpoint: name, nbytes: bytes, used: used, limit: limit);
    Error::Limit(LimitFault::Quota { name, uid, bytes, used, limit, blocks, blocks_max, .. }) =>
        "QuotaExceededError", (endpoint: name, uid: uid, nbytes: bytes, used: used, limit: limit,
         blocks: blocks, blocks_max: blocks_max);
    Error::Limit(LimitFault::Events(limit)) => "EventLimitError", (limit: limit);
    Error::Limit(LimitFault::Jobs { name, limit, waited, .. }) => "QueueFullError",
        (endpoint: name, limit: limit, waited: waited.as_secs_f64());
    Error::Name(NameFault::Invalid { name, .. }) => "InvalidNameError", (endpoint: name);
    Error::Name(NameFault::Taken { name, holder, .. }) => "NameTakenError",
        (endpoint: name, pid: holder.pid);
    Error::Name(NameFault::OtherKind { name, wanted, found, .. }) => "OtherKindError",
        (endpoint: name, kind: wanted.to_string(), found: found);
    Error::Name(NameFault::Domain { .. }) => "DomainError", ();
    Error::Name(NameFault::Foreign { .. }) => "ForeignFileError", ();
    Error::NotFound { kind, name, was_there, .. } => "NotFoundError",
        (kind: kind.to_string(), endpoint: name, was_there: was_there);
    Error::Handle { fault: HandleFault::Expired { name, .. }, .. } => "TicketExpiredError",
        (endpoint: name);
    Error::Handle { fault: HandleFault::NotExportable { ptr, kind, .. }, .. } =>
        "NotExportableError", (ptr: ptr, kind: kind.to_string());
    Error::Handle { what, .. } => "HandleError", (what: what);
    Error::Refused { name, denied, .. } =>
        if *denied { "AccessDeniedError" } else { "RefusedError" }, (endpoint: name);
    Error::Handshake { name, .. } => "HandshakeError", (endpoint: name);
    Error::Protocol { name, .. } => "ProtocolError", (endpoint: name);
    Error::PeerGone { kind, name, pid, graceful, .. } => "PeerGoneError",
        (kind: kind.to_string(), endpoint: name, pid: pid, graceful: graceful);
    Error::Lost(Loss::Sample { name, sequence, pid, .. }) => "SampleLostError",
        (endpoint: name, sequence: sequence, pid: pid);
    Error::Lost(Loss::Event { event, pid, .. }) => "EventLostError", (event: event, pid: pid);
    Error::Timeout { waited, .. } => "TimeoutError", (waited: waited.as_secs_f64());
    Error::Weights(WeightsFault::File { path, .. }) => "WeightsFileError", (path: path);
    Error::Weights(WeightsFault::Unverified { name, version, tensors, .. }) =>
        if tensors.is_empty() { "WeightsUnhashedError" } else { "WeightsDamagedError" },
        (endpoint: name, version: version, tensors: tensors);
    Error::Weights(WeightsFault::Mismatch { difference, .. }) => "WeightsMismatchError",
        (missing: &difference.missing, unexpected: &difference.unexpected,
         different: at_other_places(&difference.different), uncomputed: Vec::<String>::new());
    Error::Job { name, job, end: JobEnd::DeadLettered { reasons }, .. } => "DeadLetteredError",
        (endpoint: name, job: job, reasons: reasons);
    Error::Job { name, job, end: JobEnd::Rejected { reason }, .. } => "RejectedError",
        (endpoint: name, job: job, reason: reason);
    Error::Job { name, job, end, .. } => match end {
        JobEnd::Expired => "DeadlinePassedError",
        JobEnd::Taken => "NoSuchJobError",
        _ => "JobError",
    }, (endpoint: name, job: job);
    Error::State(StateFault::Capturing(_)) => "CapturingError", ();
    Error::State(StateFault::NotRecorded(event)) => "EventNotRecordedError", (event: event);
    Error::State(StateFault::QueueClosed(name)) => "QueueClosedError", (endpoint: name);
    Error::State(StateFault::LinkClosed { name, .. }) => "LinkClosedError", (endpoint: name);
    Error::State(StateFault::Forked) => "ForkedError", ();
    Error::Argument { argument: "tensor layout", .. } => "LayoutError", ();
    Error::Argument { .. } => "ArgumentError", ();
}

/// The names of tensors that lie elsewhere, each with the reason.
fn at_other_places(names: &[String]) -> HashMap<&str, &str> {
    let how = "has another shape, element type or place";
    names.iter().map(|name| (name.as_str(), how)).collect()
}

/// The names of `warpipe._errors`, copied before the interpreter's end clears the module.
pub fn classes(py: Python<'_>) -> PyResult<&Py<PyDict>> {
    static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    CLASSES.get_or_try_init(py, || {
        let names = py.import("warpipe._errors")?.dict();
        Ok(names.copy()?.unbind())
    })
}

/// Makes the exception of the class that `describe` names, with the attributes that it sets.
fn raise(
    py: Python<'_>,
    message: &str,
    describe: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<&'static str>,
) -> PyErr {
    let made = (|| {
        let context = PyDict::new(py);
        let class = describe(&context)?;
        let classes = classes(py)?.bind(py);
        let class = classes
            .get_item(class)?
            .ok_or_else(|| PyKeyError::new_err(class.to_owned()))?;
        let exception = class.call1((message,))?;
        for (name, value) in context {
            exception.setattr(name.cast_into::<pyo3::types::PyString>()?, value)?;
        }
        Ok(PyErr::from_value(exception))
    })();
    made.unwrap_or_else(|error: PyErr| error)
}
