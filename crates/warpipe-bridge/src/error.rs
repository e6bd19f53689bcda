//! What can go wrong with a bridge.

/// An error of a bridge. Its text says what happened and, behind the last semicolon, the next step.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An endpoint off loopback without TLS.
    #[error(
        "endpoint {endpoint:?} is not on loopback and is not encrypted; use tls/HOST:PORT with certificates, or allow it with --insecure"
    )]
    Insecure {
        /// The endpoint as given.
        endpoint: String,
    },
    /// An endpoint that is no `tcp/HOST:PORT` or `tls/HOST:PORT`.
    #[error("endpoint {endpoint:?} {reason}; use tcp/127.0.0.1:7447 or tls/HOST:7447")]
    Endpoint {
        /// The endpoint as given.
        endpoint: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A pattern of names that can match none.
    #[error("pattern {pattern:?} {reason}; use names with * and **, for example camera/**")]
    Pattern {
        /// The pattern as given.
        pattern: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// An option out of its range.
    #[error("{option} is {found}; allowed is {allowed}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        found: String,
        /// The values that it may have.
        allowed: String,
    },
    /// Zenoh could not open its session.
    #[error(
        "Zenoh could not {step}: {reason}; check that the address is free and the certificates are readable"
    )]
    Zenoh {
        /// The step that failed.
        step: &'static str,
        /// Zenoh's own words.
        reason: String,
    },
    /// The operating system refused a thread.
    #[error("a thread for {purpose} was not started: {source}; raise the limit of processes")]
    Thread {
        /// The work that the thread was to do.
        purpose: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// An error of the library on this machine.
    #[error(transparent)]
    Local(#[from] warpipe::Error),
}

/// A result with a bridge's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn zenoh(step: &'static str, reason: impl ToString) -> Error {
        Error::Zenoh {
            step,
            reason: reason.to_string(),
        }
    }
}

/// As `{}`, and an error of the library with its next step: a `main` that returns an error prints
/// this.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Local(error) => std::fmt::Debug::fmt(error, f),
            other => std::fmt::Display::fmt(other, f),
        }
    }
}
