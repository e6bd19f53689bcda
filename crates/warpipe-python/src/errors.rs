//! Errors of the Rust library as exceptions of `warpipe._errors`, with their context as attributes.

use std::borrow::Cow;
use std::collections::HashMap;

use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use warpipe::{Error, Kind};
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
        let named = if name.is_empty() {
            String::new()
        } else {
            format!(" of {name:?}")
        };
        Fault::Own(
            "ClosedError",
            format!("the {what}{named} is closed; open a new one"),
        )
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
        Fault::Own(
            "ArgumentError",
            format!("{argument} is {found}; allowed is {allowed}"),
        )
    }

    /// An invalid element type.
    pub fn dtype(found: impl std::fmt::Display, next: &str) -> Fault {
        Fault::Own("DTypeError", format!("element type {found} {next}"))
    }

    /// An invalid layout.
    pub fn layout(reason: impl std::fmt::Display) -> Fault {
        Fault::Own(
            "LayoutError",
            format!("not a usable tensor layout: {reason}"),
        )
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
            Fault::Own(class, message) => raise(py, class, &message, |_| Ok(())),
            Fault::Library(error) => raise(py, class_of(&error), &message(&error), |dict| {
                dict.set_item("error_kind", error.kind().name())?;
                fill(dict, &error)
            }),
        })
    }
}

/// The fact and the next step, in one message.
fn message(error: &Error) -> String {
    match hint(error) {
        Some(hint) => format!("{error}; {hint}"),
        None => error.to_string(),
    }
}

/// The next step in Python's words. Where those are the same as Rust's, the library's.
fn hint(error: &Error) -> Option<Cow<'static, str>> {
    let own = match error {
        Error::NoDriver { .. } => "install the NVIDIA driver, or use device=\"host\"",
        Error::DriverSymbol { .. } => "update the driver (R525 or newer), or use device=\"host\"",
        Error::NoDevice { .. } => {
            "check CUDA_VISIBLE_DEVICES and the container's device list, or use device=\"host\""
        }
        Error::DevicePermission { .. } => {
            "add this user to the group that owns it, or use device=\"host\""
        }
        Error::Capturing { .. } => "call it outside of `torch.cuda.graph`, or on another stream",
        Error::NotFound {
            kind: Kind::Publisher,
            ..
        } => "start the publisher, or wait for it with `wait=`",
        Error::NotFound {
            kind: Kind::Weights,
            ..
        } => "start one with `warpipe weights serve`, or wait for it with `wait=`",
        Error::NotFound { .. } => "start its owner, or wait for it with `wait=`",
        Error::PeerGone {
            kind: Kind::Publisher,
            ..
        } => "subscribe again, or pass `reconnect=True`",
        Error::Forked => "open a new one in the child, or use `multiprocessing` with \"spawn\"",
        other => return other.hint(),
    };
    Some(Cow::Borrowed(own))
}

/// The exception's class, by the variant. Variants that this package does not know yet are plain
/// `Error`s.
fn class_of(error: &Error) -> &'static str {
    match error {
        Error::NoDriver { .. } => "NoDriverError",
        Error::DriverSymbol { .. } => "DriverSymbolError",
        Error::NoDevice { .. } => "NoDeviceError",
        Error::DevicePermission { .. } => "DevicePermissionError",
        Error::NoSuchDevice { .. } => "NoSuchDeviceError",
        Error::Driver { .. } => "DriverError",
        Error::Capturing { .. } => "CapturingError",
        Error::DeviceReset { .. } => "DeviceResetError",
        Error::DeviceMemory { .. } => "DeviceMemoryError",
        Error::NotDeviceMemory { .. } => "NotDeviceMemoryError",
        Error::PeerAccess { .. } => "PeerAccessError",
        Error::Os { .. } => "SystemCallError",
        Error::DescriptorLimit { .. } | Error::InFlightLimit { .. } => "DescriptorLimitError",
        Error::Name { .. } => "InvalidNameError",
        Error::Domain { .. } => "DomainError",
        Error::ForeignFile { .. } => "ForeignFileError",
        Error::NameTaken { .. } => "NameTakenError",
        Error::NotFound { .. } => "NotFoundError",
        Error::AccessDenied { .. } => "AccessDeniedError",
        Error::Handshake { .. } => "HandshakeError",
        Error::Protocol { .. } => "ProtocolError",
        Error::SampleLost { .. } => "SampleLostError",
        Error::Evicted { .. } => "EvictedError",
        Error::LinkClosed { .. } => "LinkClosedError",
        Error::Timeout { .. } => "TimeoutError",
        Error::Full { .. } => "FullError",
        Error::MemoryLimit { .. } => "MemoryLimitError",
        Error::QuotaExceeded { .. } => "QuotaExceededError",
        Error::Layout { .. } => "LayoutError",
        Error::Argument { .. } => "ArgumentError",
        Error::OtherKind { .. } => "OtherKindError",
        Error::Ticket(_) => "TicketError",
        Error::TicketExpired { .. } => "TicketExpiredError",
        Error::Range { .. } => "RangeError",
        Error::PeerGone { .. } => "PeerGoneError",
        Error::Refused { .. } => "RefusedError",
        Error::NotOwner { .. } => "NotOwnerError",
        Error::Backwards { .. } => "BackwardsError",
        Error::SignalPending { .. } => "SignalPendingError",
        Error::EventNotRecorded { .. } => "EventNotRecordedError",
        Error::EventLost { .. } => "EventLostError",
        Error::EventHandle { .. } => "EventHandleError",
        Error::EventLimit { .. } => "EventLimitError",
        Error::NotExportable { .. } => "NotExportableError",
        Error::LegacyHandle { .. } => "LegacyHandleError",
        Error::Profiler { .. } => "ProfilerError",
        Error::Forked => "ForkedError",
        Error::Injected { .. } => "InjectedError",
        Error::WeightsFile { .. } => "WeightsFileError",
        Error::WeightsDamaged { .. } => "WeightsDamagedError",
        Error::WeightsUnhashed { .. } => "WeightsUnhashedError",
        Error::WeightsMismatch { .. } => "WeightsMismatchError",
        // Queues and services.
        Error::QueueFull { .. } => "QueueFullError",
        Error::DeadLettered { .. } => "DeadLetteredError",
        Error::Rejected { .. } => "RejectedError",
        Error::DeadlinePassed { .. } => "DeadlinePassedError",
        Error::NoSuchJob { .. } => "NoSuchJobError",
        Error::QueueClosed { .. } => "QueueClosedError",
        _ => "Error",
    }
}

/// Attributes of the exception, by the field names of the Rust variants.
fn fill(dict: &Bound<'_, PyDict>, error: &Error) -> PyResult<()> {
    match error {
        Error::Driver {
            call, code, name, ..
        } => {
            dict.set_item("call", call)?;
            dict.set_item("code", code)?;
            dict.set_item("driver_name", name)
        }
        Error::DeviceMemory { bytes, .. } => dict.set_item("nbytes", bytes),
        Error::Os { call, source, .. } => {
            dict.set_item("call", call)?;
            dict.set_item("code", source.raw_os_error())?;
            source
                .raw_os_error()
                .map_or(Ok(()), |code| fill_number(dict, code))
        }
        Error::DescriptorLimit { .. } => fill_shortage(dict, libc::EMFILE),
        Error::InFlightLimit { .. } => fill_shortage(dict, libc::ETOOMANYREFS),
        Error::NameTaken { name, holder } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("pid", holder.pid)
        }
        Error::Name { name, .. }
        | Error::AccessDenied { name, .. }
        | Error::Handshake { name, .. }
        | Error::Protocol { name, .. }
        | Error::Evicted { name, .. }
        | Error::LinkClosed { name, .. }
        | Error::Refused { name, .. }
        | Error::TicketExpired { name, .. } => dict.set_item("endpoint", name),
        Error::SampleLost {
            name,
            sequence,
            pid,
        } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("sequence", sequence)?;
            dict.set_item("pid", pid)
        }
        Error::Full { name, depth, .. } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("depth", depth)
        }
        Error::MemoryLimit {
            name,
            bytes,
            used,
            limit,
        } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("nbytes", bytes)?;
            dict.set_item("used", used)?;
            dict.set_item("limit", limit)
        }
        Error::QuotaExceeded {
            name,
            uid,
            bytes,
            used,
            limit,
            blocks,
            blocks_max,
        } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("uid", uid)?;
            dict.set_item("nbytes", bytes)?;
            dict.set_item("used", used)?;
            dict.set_item("limit", limit)?;
            dict.set_item("blocks", blocks)?;
            dict.set_item("blocks_max", blocks_max)
        }
        Error::Timeout { waited, .. } => dict.set_item("waited", waited.as_secs_f64()),
        other => fill_primitives(dict, other),
    }
}

/// As [`fill`], of a limit of descriptors: what the system said when it was reached.
fn fill_shortage(dict: &Bound<'_, PyDict>, code: i32) -> PyResult<()> {
    dict.set_item("call", dict.py().None())?;
    dict.set_item("code", code)?;
    fill_number(dict, code)
}

/// What an ``OSError`` has.
fn fill_number(dict: &Bound<'_, PyDict>, code: i32) -> PyResult<()> {
    let said = dict.py().import("os")?.call_method1("strerror", (code,))?;
    dict.set_item("errno", code)?;
    dict.set_item("strerror", said)
}

/// As [`fill`], of errors outside the channel.
fn fill_primitives(dict: &Bound<'_, PyDict>, error: &Error) -> PyResult<()> {
    match error {
        Error::NotFound {
            kind,
            name,
            was_there,
            ..
        } => {
            dict.set_item("kind", kind.to_string())?;
            dict.set_item("endpoint", name)?;
            dict.set_item("was_there", was_there)
        }
        Error::OtherKind {
            name,
            wanted,
            found,
        } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("kind", wanted.to_string())?;
            dict.set_item("found", found)
        }
        Error::PeerGone {
            kind,
            name,
            pid,
            graceful,
            ..
        } => {
            dict.set_item("kind", kind.to_string())?;
            dict.set_item("endpoint", name)?;
            dict.set_item("pid", pid)?;
            dict.set_item("graceful", graceful)
        }
        Error::Range {
            name,
            offset,
            bytes,
            available,
        } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("offset", offset)?;
            dict.set_item("nbytes", bytes)?;
            dict.set_item("available", available)
        }
        Error::NotOwner { name, pid } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("pid", pid)
        }
        Error::Backwards { name, value, last } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("value", value)?;
            dict.set_item("last", last)
        }
        Error::SignalPending {
            name,
            value,
            last,
            reached,
        } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("value", value)?;
            dict.set_item("last", last)?;
            dict.set_item("reached", reached)
        }
        Error::EventNotRecorded { event } => dict.set_item("event", event),
        Error::EventLost { event, pid } => {
            dict.set_item("event", event)?;
            dict.set_item("pid", pid)
        }
        Error::EventLimit { limit } => dict.set_item("limit", limit),
        Error::NotExportable { ptr, kind } => {
            dict.set_item("ptr", ptr)?;
            dict.set_item("kind", kind.to_string())
        }
        other => fill_of_job(dict, other),
    }
}

/// As [`fill`], of queues and services.
fn fill_of_job(dict: &Bound<'_, PyDict>, error: &Error) -> PyResult<()> {
    match error {
        Error::QueueFull {
            name,
            limit,
            waited,
        } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("limit", limit)?;
            dict.set_item("waited", waited.as_secs_f64())
        }
        Error::DeadLettered { name, job, reasons } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("job", job)?;
            dict.set_item("reasons", reasons)
        }
        Error::Rejected { name, job, reason } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("job", job)?;
            dict.set_item("reason", reason)
        }
        Error::DeadlinePassed { name, job } | Error::NoSuchJob { name, job } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("job", job)
        }
        Error::QueueClosed { name } => dict.set_item("endpoint", name),
        Error::WeightsFile { path, .. } => dict.set_item("path", path),
        Error::WeightsDamaged {
            name,
            version,
            tensors,
        } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("version", version)?;
            dict.set_item("tensors", tensors)
        }
        Error::WeightsUnhashed { name, version } => {
            dict.set_item("endpoint", name)?;
            dict.set_item("version", version)
        }
        Error::WeightsMismatch { difference, .. } => {
            let how = "has another shape, element type or place";
            let different = difference.different.iter().map(|name| (name, how));
            dict.set_item("missing", &difference.missing)?;
            dict.set_item("unexpected", &difference.unexpected)?;
            dict.set_item("different", different.collect::<HashMap<_, _>>())?;
            dict.set_item("uncomputed", Vec::<String>::new())
        }
        _ => Ok(()),
    }
}

/// The names of `warpipe._errors`, copied before the interpreter's end clears the module.
pub fn classes(py: Python<'_>) -> PyResult<&Py<PyDict>> {
    static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    CLASSES.get_or_try_init(py, || {
        let names = py.import("warpipe._errors")?.dict();
        Ok(names.copy()?.unbind())
    })
}

/// Whether an exception is one of this package's.
pub fn is_of_this_package(py: Python<'_>, error: &PyErr) -> bool {
    let base = classes(py).and_then(|classes| classes.bind(py).get_item("Error"));
    base.ok()
        .flatten()
        .is_some_and(|base| error.is_instance(py, &base))
}

fn raise(
    py: Python<'_>,
    class: &str,
    message: &str,
    fill: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    let made = (|| {
        let classes = classes(py)?.bind(py);
        let class = classes
            .get_item(class)?
            .ok_or_else(|| PyKeyError::new_err(class.to_owned()))?;
        let exception = class.call1((message,))?;
        let context = PyDict::new(py);
        fill(&context)?;
        for (name, value) in context {
            exception.setattr(name.cast_into::<pyo3::types::PyString>()?, value)?;
        }
        Ok(PyErr::from_value(exception))
    })();
    made.unwrap_or_else(|error: PyErr| error)
}

/// The error of pickling something that belongs to a process.
pub fn no_pickle(what: &str, next: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "{what} belongs to its process and cannot be pickled; {next}"
    ))
}
