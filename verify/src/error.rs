//! Stand-in for the library's errors: those that these sources make.

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug)]
pub enum Error {
    Argument(String),
    Layout(String),
    DeviceMemory {},
    PeerGone {
        graceful: bool,
    },
    QueueFull {
        name: String,
        limit: usize,
        waited: std::time::Duration,
    },
    Timeout {
        what: String,
        waited: std::time::Duration,
    },
}

impl Error {
    pub(crate) fn argument(
        argument: &'static str,
        found: impl ToString,
        allowed: impl ToString,
    ) -> Error {
        Error::Argument(format!(
            "{argument}: {}, not {}",
            found.to_string(),
            allowed.to_string()
        ))
    }

    pub(crate) fn layout(reason: impl Into<String>) -> Error {
        Error::Layout(reason.into())
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

impl std::error::Error for Error {}
