//! How the command ends: one exit code per kind of ending, stated in `--help`.

use std::io;

use serde::{Deserialize, Serialize};
use warpipe::{DeviceFault, Error, ErrorKind, Language, LimitFault, NameFault, WeightsFault};

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
        #[cfg(feature = "bridge")]
        if let Some(error) = cause.downcast_ref::<warpipe_bridge::Error>() {
            return Exit::of_bridge(error);
        }
        cause.is::<UsageError>().then_some(Exit::Usage)
    }

    /// `None` for an error of the library, which is the next cause.
    #[cfg(feature = "bridge")]
    fn of_bridge(error: &warpipe_bridge::Error) -> Option<Exit> {
        use warpipe_bridge::Error as Bridge;
        match error {
            Bridge::Local(error) => Some(Exit::of_library(error)),
            Bridge::Zenoh { .. } | Bridge::Thread { .. } => Some(Exit::System),
            _ => Some(Exit::Usage),
        }
    }

    fn of_library(error: &Error) -> Exit {
        match (error, error.kind()) {
            // Before the kinds: the command line gave these.
            (
                Error::Name(NameFault::Domain { .. })
                | Error::Device {
                    fault: DeviceFault::NoSuchDevice,
                    ..
                },
                _,
            ) => Exit::Usage,
            (Error::Handshake { .. }, _) => Exit::PeerGone,
            (Error::Weights(WeightsFault::File { .. }), _) => Exit::Input,
            (
                Error::Limit(LimitFault::Device { .. })
                | Error::Device {
                    fault: DeviceFault::OutOfReach,
                    ..
                },
                _,
            ) => Exit::Device,
            (Error::Refused { denied: true, .. }, _) => Exit::System,
            (_, ErrorKind::InvalidInput | ErrorKind::NameConflict) => Exit::Usage,
            (_, ErrorKind::NotFound | ErrorKind::Timeout) => Exit::Nobody,
            (_, ErrorKind::PeerGone | ErrorKind::LinkClosed) => Exit::PeerGone,
            (_, ErrorKind::DataLost | ErrorKind::Protocol) => Exit::Failed,
            (Error::Os { .. }, _) => Exit::System,
            _ => Exit::Device,
        }
    }
}

/// Whether the reader of our output went away, as `head` does: an end like any other.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    is_of_output(error, io::ErrorKind::BrokenPipe)
}

/// Whether a signal ended the wait for a reader of our output.
pub fn is_interrupted(error: &anyhow::Error) -> bool {
    is_of_output(error, io::ErrorKind::Interrupted)
}

fn is_of_output(error: &anyhow::Error, kind: io::ErrorKind) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == kind)
}

/// What happened, and the next step in the command line's terms. The library's errors have a hint;
/// messages of this program end in `; the next step`.
pub fn fact_and_hint(error: &anyhow::Error) -> (String, Option<String>) {
    let mut fact = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        // Some errors contain the text of their cause.
        match fact.ends_with(&text) {
            _ if fact.is_empty() => fact = text,
            true => {}
            false => fact = format!("{fact}: {text}"),
        }
    }
    let library = error
        .chain()
        .find_map(|cause| cause.downcast_ref::<Error>());
    match library {
        Some(library) => (fact, hint(library)),
        None => match fact.rsplit_once("; ") {
            Some((fact, next)) => (fact.to_owned(), Some(next.to_owned())),
            None => (fact, None),
        },
    }
}

/// The next step in the command line's terms.
pub fn hint(error: &Error) -> Option<String> {
    error.hint_in(Language::CommandLine).map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_exit_code_under_any_context() {
        let name = || {
            Error::Name(warpipe::NameFault::Invalid {
                name: "..".into(),
                reason: "a part starts with a dot",
            })
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
    fn an_error_of_the_library_is_told_with_a_next_step_of_the_command_line() {
        let error = Error::Device {
            fault: DeviceFault::OldDriver,
            text: "the CUDA driver lacks cuMemCreate".into(),
        };
        let (fact, hint) = fact_and_hint(&anyhow::Error::from(error).context("cannot publish"));
        assert_eq!(fact, "cannot publish: the CUDA driver lacks cuMemCreate");
        assert_eq!(
            hint.as_deref(),
            Some("update the driver (R525 or newer), or use --device host")
        );
    }

    #[test]
    fn a_cause_that_an_error_contains_is_said_once() {
        let source = io::Error::from_raw_os_error(2);
        let said = source.to_string();
        let (call, context) = ("open", "a file".to_owned());
        let error = anyhow::Error::from(Error::Os {
            call,
            context,
            source,
        });
        let (fact, _) = fact_and_hint(&error.context("cannot load"));
        assert_eq!(fact, format!("cannot load: open failed on a file: {said}"));
    }

    #[test]
    fn a_message_of_this_program_is_split_at_its_next_step() {
        let own = anyhow::anyhow!("no such file; name another one");
        assert_eq!(
            fact_and_hint(&own),
            (
                "no such file".to_owned(),
                Some("name another one".to_owned())
            )
        );
        assert_eq!(
            fact_and_hint(&anyhow::anyhow!("broken")),
            ("broken".to_owned(), None)
        );
    }
}
