//! Constructors of the errors that many modules report.

use std::io;

use super::{Error, LegacyFault};

impl Error {
    /// An operating system error with its context. Errors of descriptor limits have variants of
    /// their own.
    pub(crate) fn os(
        call: &'static str,
        context: impl Into<String>,
        source: impl Into<io::Error>,
    ) -> Self {
        let (context, source) = (context.into(), source.into());
        match source.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => Error::DescriptorLimit {
                context: format!("{context} ({call})"),
                soft: descriptor_limit(),
            },
            Some(libc::ETOOMANYREFS) => Error::InFlightLimit {
                context: format!("{context} ({call})"),
                soft: descriptor_limit(),
            },
            _ => Error::Os {
                call,
                context,
                source,
            },
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

    pub(crate) fn legacy(fault: LegacyFault) -> Self {
        Error::LegacyHandle { fault }
    }

    pub(crate) fn layout(reason: impl Into<String>) -> Self {
        Error::Layout {
            reason: reason.into(),
        }
    }
}

fn descriptor_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile)
        .current
        .unwrap_or(u64::MAX)
}
