//! How the command ends: one exit code per kind of ending, stated in `--help`.

use std::io;

use warpipe::Error;

use crate::source::InputError;

/// For `--help`.
pub const HELP: &str = "\
Exit codes:
  0    success
  1    a check failed: wrong or lost data, a process that failed, or no working backend
  2    wrong usage, an invalid or taken name, or a domain that cannot be used
  3    no peer: a wait timed out
  4    the peer closed or died before the work was done
  5    an input file is damaged or unreadable; nothing of it was published
  6    the device or its driver failed
  7    the operating system refused a call (descriptors, files, sockets)
  130  interrupted by SIGINT or SIGTERM";

/// An ending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    Done = 0,
    Failed = 1,
    Usage = 2,
    Nobody = 3,
    PeerGone = 4,
    Input = 5,
    Device = 6,
    System = 7,
    Interrupted = 130,
}

/// A fault in what the user asked for.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

impl Exit {
    /// The ending that an error stands for, found through its causes.
    pub fn of(error: &anyhow::Error) -> Exit {
        error
            .chain()
            .find_map(Exit::of_cause)
            .unwrap_or(Exit::System)
    }

    fn of_cause(cause: &(dyn std::error::Error + 'static)) -> Option<Exit> {
        if let Some(error) = cause.downcast_ref::<Error>() {
            return Some(Exit::of_library(error));
        }
        if cause.is::<InputError>() {
            return Some(Exit::Input);
        }
        cause.is::<UsageError>().then_some(Exit::Usage)
    }

    fn of_library(error: &Error) -> Exit {
        match error {
            Error::Name { .. }
            | Error::Domain { .. }
            | Error::ForeignFile { .. }
            | Error::NameTaken { .. } => Exit::Usage,
            Error::Argument { .. } | Error::NoSuchDevice { .. } => Exit::Usage,
            Error::NoPublisher { .. } | Error::Timeout { .. } => Exit::Nobody,
            Error::PublisherGone { .. }
            | Error::Handshake { .. }
            | Error::Evicted { .. }
            | Error::LinkClosed { .. } => Exit::PeerGone,
            Error::SampleLost { .. } | Error::Protocol { .. } => Exit::Failed,
            Error::Os { .. }
            | Error::DescriptorLimit { .. }
            | Error::InFlightLimit { .. }
            | Error::AccessDenied { .. } => Exit::System,
            _ => Exit::Device,
        }
    }
}

/// Whether the reader of our output went away, as `head` does: an end like any other.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let closed = |cause: &io::Error| cause.kind() == io::ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(closed)
}

/// Errors of the library end in `; the next step`: what happened, and that step, in the command
/// line's terms.
pub fn split_next(message: &str) -> (String, Option<String>) {
    let (happened, next) = message
        .rsplit_once("; ")
        .map_or((message, None), |(happened, next)| (happened, Some(next)));
    (happened.to_owned(), next.map(in_command_terms))
}

fn in_command_terms(step: &str) -> String {
    step.replace("Device::host()", "--device host")
        .replace(
            "wait for it with `wait_for_publisher`",
            "wait longer with --timeout",
        )
        .replace("turn `reconnect` on", "use --reconnect")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_exit_code_under_any_context() {
        let name = || Error::Name {
            name: "..".into(),
            reason: "a part starts with a dot",
        };
        assert_eq!(Exit::of(&anyhow::Error::from(name())), Exit::Usage);
        assert_eq!(
            Exit::of(&anyhow::Error::from(name()).context("cannot publish")),
            Exit::Usage
        );
        assert_eq!(Exit::of(&anyhow::anyhow!("no descriptors")), Exit::System);
    }

    #[test]
    fn every_exit_code_is_in_the_help() {
        use Exit::*;
        for exit in [
            Done,
            Failed,
            Usage,
            Nobody,
            PeerGone,
            Input,
            Device,
            System,
            Interrupted,
        ] {
            assert!(HELP.contains(&format!("\n  {:<5}", exit as u8)), "{exit:?}");
        }
    }

    #[test]
    fn an_errors_own_next_step_is_told_apart_from_what_happened() {
        let error = Error::DriverSymbol {
            symbol: "cuMemCreate",
        }
        .to_string();
        let (happened, next) = split_next(&error);
        assert!(happened.ends_with("cuMemCreate"), "{happened}");
        assert_eq!(
            next.as_deref(),
            Some("update the driver (R525 or newer), or use --device host")
        );
        assert_eq!(split_next("broken"), ("broken".to_owned(), None));
    }
}
