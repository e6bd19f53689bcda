//! Constructors of the errors that many modules report.

use std::fmt;
use std::io;
use std::path::Path;
use std::time::Duration;

use super::{DeviceFault, Error, HandleFault, HandshakeFault, Loss, PointerKind};
use crate::kind::Kind;
use crate::os::descriptor_limit;

impl Error {
    pub(crate) fn os(
        call: &'static str,
        context: impl Into<String>,
        source: impl Into<io::Error>,
    ) -> Self {
        let (mut context, source) = (context.into(), source.into());
        let soft = descriptor_limit;
        match source.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => {
                context += &format!(" (no file descriptor left, soft limit {})", soft());
            }
            Some(libc::ETOOMANYREFS) => {
                context += &format!(
                    " (RLIMIT_NOFILE (soft limit {}) counts the descriptors that this user's processes sent over sockets and nobody received)",
                    soft()
                );
            }
            _ => {}
        }
        Error::Os {
            call,
            context,
            source,
        }
    }

    /// Whether what a receive returns is of one sample: the next receive gives the next one.
    #[doc(hidden)] // For the bridge and the command line.
    pub fn is_of_one_sample(&self) -> bool {
        matches!(
            self,
            Error::Handle { .. } | Error::Lost(Loss::Sample { .. })
        )
    }

    /// Whether the process, the system or this user has no descriptor left, or none in flight: an
    /// [`Error::Os`] with `EMFILE`, `ENFILE` or `ETOOMANYREFS`.
    #[doc(hidden)] // For the command line.
    pub fn is_descriptor_limit(&self) -> bool {
        let codes = [libc::EMFILE, libc::ENFILE, libc::ETOOMANYREFS].map(Some);
        matches!(self, Error::Os { source, .. } if codes.contains(&source.raw_os_error()))
    }

    /// Whether the device was reset, which has released all that was made on it.
    pub(crate) fn is_reset(&self) -> bool {
        matches!(self, Error::Device { fault, .. } if *fault == DeviceFault::Reset)
    }

    pub(crate) fn device(fault: DeviceFault, text: impl Into<String>) -> Self {
        Error::Device {
            fault,
            text: text.into(),
        }
    }

    pub(crate) fn argument(
        argument: &'static str,
        found: impl ToString,
        allowed: impl ToString,
    ) -> Self {
        Error::Argument {
            argument,
            found: found.to_string(),
            allowed: allowed.to_string(),
        }
    }

    /// A peer's value that no correct peer writes.
    pub(crate) fn protocol(
        name: impl ToString,
        field: &'static str,
        found: impl ToString,
        allowed: impl ToString,
    ) -> Self {
        Error::Protocol {
            name: name.to_string(),
            field,
            found: found.to_string(),
            allowed: allowed.to_string(),
        }
    }

    pub(crate) fn timeout(what: impl Into<String>, waited: Duration) -> Self {
        Error::Timeout {
            what: what.into(),
            waited,
        }
    }

    pub(crate) fn handshake(name: impl ToString, fault: HandshakeFault) -> Self {
        Error::Handshake {
            name: name.to_string(),
            fault,
        }
    }

    /// The owner of an endpoint has gone.
    pub(crate) fn peer_gone(kind: Kind, name: impl Into<String>, pid: i32, graceful: bool) -> Self {
        Error::PeerGone {
            kind,
            name: name.into(),
            pid,
            graceful,
            detail: String::new(),
        }
    }

    pub(crate) fn handle(what: &'static str, fault: HandleFault) -> Self {
        Error::Handle { what, fault }
    }

    pub(crate) fn not_exportable(ptr: u64, kind: PointerKind) -> Self {
        Error::handle("memory", HandleFault::NotExportable { ptr, kind })
    }

    pub(crate) fn legacy(fault: HandleFault) -> Self {
        Error::handle("legacy handle", fault)
    }

    /// The other side's refusal of a request.
    pub(crate) fn refused(name: impl ToString, text: impl Into<String>) -> Self {
        Error::Refused {
            name: name.to_string(),
            text: text.into(),
            denied: false,
        }
    }

    /// The owner's refusal to let this user in.
    pub(crate) fn denied(name: impl ToString, text: impl Into<String>) -> Self {
        Error::Refused {
            name: name.to_string(),
            text: text.into(),
            denied: true,
        }
    }

    pub(crate) fn layout(reason: impl Into<String>) -> Self {
        Error::Argument {
            argument: "tensor layout",
            found: reason.into(),
            allowed: String::new(),
        }
    }
}

/// The text of [`Error::Handle`].
pub(super) fn unusable(what: &str, fault: &HandleFault) -> String {
    match fault {
        HandleFault::Expired { .. } | HandleFault::NotExportable { .. } => fault.to_string(),
        _ => format!("not a usable {what}: {fault}"),
    }
}

/// The text of [`Error::Argument`].
pub(super) fn argument(argument: &str, found: &str, allowed: &str) -> String {
    match allowed {
        "" => format!("not a usable {argument}: {found}"),
        _ => format!("{argument} is {found}; allowed is {allowed}"),
    }
}

/// The text of [`Error::NotFound`].
pub(super) fn not_found(kind: &Kind, name: &str, domain: &Path, was_there: bool) -> String {
    let place = match domain.as_os_str().is_empty() {
        true => String::new(),
        false => format!(" in {}", domain.display()),
    };
    let state = match was_there {
        true => "its owner has died and left the name behind",
        false => "it has not been made yet, or is closed",
    };
    format!("no {kind} named {name:?}{place}: {state}")
}

/// The text of [`Error::PeerGone`].
pub(super) fn peer_gone(kind: &Kind, name: &str, pid: i32, graceful: bool, detail: &str) -> String {
    let object = match kind {
        Kind::LegacyMemory => "the exporter of this memory".to_string(),
        Kind::Publisher => format!("the publisher of {name:?}"),
        other => format!("the owner of {other} {name:?}"),
    };
    let end = match (graceful, detail) {
        (true, _) => "has closed",
        (false, "") => "has died",
        (false, _) => "is gone",
    };
    match detail {
        "" => format!("{object} (process {pid}) {end}"),
        _ => format!("{object} (process {pid}) {end} ({detail})"),
    }
}

/// A call that failed, with what its caller gave it, for another attempt.
#[derive(Debug)]
pub struct Returned<T> {
    /// The reason.
    pub error: Error,
    /// What the call was given.
    pub returned: T,
}

impl<T> fmt::Display for Returned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl<T: fmt::Debug> std::error::Error for Returned<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<T> From<Returned<T>> for Error {
    fn from(failed: Returned<T>) -> Error {
        failed.error
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    /// A poll that finds nothing returns one by value.
    #[test]
    fn an_error_is_small() {
        assert!(size_of::<Error>() <= 96, "{} bytes", size_of::<Error>());
    }

    #[test]
    fn an_error_that_gives_its_loan_back_says_each_cause_once() {
        let failed = crate::SendError {
            error: Error::os("mmap", "a region", rustix::io::Errno::NOMEM),
            returned: None,
        };
        let (text, mut causes) = (failed.to_string(), Vec::new());
        let mut source = failed.source();
        while let Some(cause) = source {
            causes.push(cause.to_string());
            source = cause.source();
        }
        assert!(!causes.contains(&text), "{text}: {causes:?}");
    }
}
