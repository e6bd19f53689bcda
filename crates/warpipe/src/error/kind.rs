//! The kinds of errors: one for each thing that a program can do next.

use super::{
    DeviceFault, Error, HandleFault, HandshakeFault, JobEnd, NameFault, StateFault, WeightsFault,
};

/// What a program can do about an [`Error`].
///
/// Several variants of [`Error`] share a kind when the program's next step is the same. The variant
/// has the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No usable device: use another one or the host device, or mend the installation.
    DeviceUnavailable,
    /// A device or its driver failed, or cannot do what was asked. Open the device again, or end
    /// the process: work that was under way may not be complete.
    DeviceFailed,
    /// The operating system, a directory or a library of the system is not as it must be.
    System,
    /// A limit is reached. Release something, wait, or raise the limit.
    LimitReached,
    /// Nothing has this name or number now. Wait for it, or look for another one.
    NotFound,
    /// Something else has this name. Take another name.
    NameConflict,
    /// The other side does not permit this. Trying again does not help.
    Refused,
    /// The two sides do not speak the same protocol, or the peer broke it. Run one version.
    Protocol,
    /// The peer closed or died. Open the endpoint again when it is back.
    PeerGone,
    /// This link has ended; its peer may be alive. Connect again.
    LinkClosed,
    /// The writer of some data was lost before the data was complete. Discard what was computed
    /// from it.
    DataLost,
    /// A wait or a deadline has passed. Wait again, or look at the peer's state.
    Timeout,
    /// A job or request came to no result. The reason is in the variant.
    JobFailed,
    /// An argument, name, layout, ticket or handle is not valid. Correct the caller.
    InvalidInput,
    /// The object cannot do this in its present state. Correct the order of the calls.
    InvalidState,
}

impl ErrorKind {
    /// The kind's name in snake case, for logs and other languages: `peer_gone`.
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::DeviceUnavailable => "device_unavailable",
            ErrorKind::DeviceFailed => "device_failed",
            ErrorKind::System => "system",
            ErrorKind::LimitReached => "limit_reached",
            ErrorKind::NotFound => "not_found",
            ErrorKind::NameConflict => "name_conflict",
            ErrorKind::Refused => "refused",
            ErrorKind::Protocol => "protocol",
            ErrorKind::PeerGone => "peer_gone",
            ErrorKind::LinkClosed => "link_closed",
            ErrorKind::DataLost => "data_lost",
            ErrorKind::Timeout => "timeout",
            ErrorKind::JobFailed => "job_failed",
            ErrorKind::InvalidInput => "invalid_input",
            ErrorKind::InvalidState => "invalid_state",
        }
    }
}

impl Error {
    /// What a program can do about this error.
    ///
    /// ```
    /// use warpipe::{Device, ErrorKind};
    /// match Device::cuda(0) {
    ///     Err(error) if error.kind() == ErrorKind::DeviceUnavailable => println!("{error}"),
    ///     other => drop(other?),
    /// }
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Device { fault, .. } => of_device(*fault),
            Error::Driver { .. } => ErrorKind::DeviceFailed,
            Error::Os { .. } if self.is_descriptor_limit() => ErrorKind::LimitReached,
            Error::Os { .. } | Error::Name(NameFault::Domain { .. }) => ErrorKind::System,
            Error::Limit(_) => ErrorKind::LimitReached,
            Error::NotFound { .. } => ErrorKind::NotFound,
            Error::Name(NameFault::Invalid { .. }) => ErrorKind::InvalidInput,
            Error::Name(_) => ErrorKind::NameConflict,
            Error::Refused { .. } => ErrorKind::Refused,
            Error::Protocol { .. } => ErrorKind::Protocol,
            Error::PeerGone { .. } => ErrorKind::PeerGone,
            Error::Lost(_) => ErrorKind::DataLost,
            Error::Timeout { .. } => ErrorKind::Timeout,
            Error::Job { end, .. } => of_job(end),
            Error::Handshake { fault, .. } => of_handshake(fault),
            Error::Handle { fault, .. } => of_handle(fault),
            Error::Weights(WeightsFault::Unverified { tensors, .. }) => match tensors.is_empty() {
                true => ErrorKind::InvalidState,
                false => ErrorKind::DataLost,
            },
            Error::Weights(_) | Error::Argument { .. } => ErrorKind::InvalidInput,
            Error::State(StateFault::LinkClosed { .. }) => ErrorKind::LinkClosed,
            Error::State(_) => ErrorKind::InvalidState,
        }
    }
}

fn of_device(fault: DeviceFault) -> ErrorKind {
    match fault {
        DeviceFault::Reset | DeviceFault::NotShareable | DeviceFault::OutOfReach => {
            ErrorKind::DeviceFailed
        }
        _ => ErrorKind::DeviceUnavailable,
    }
}

fn of_handshake(fault: &HandshakeFault) -> ErrorKind {
    match fault {
        HandshakeFault::Full { .. } | HandshakeFault::NoRoom(_) => ErrorKind::LimitReached,
        HandshakeFault::Refused(_) => ErrorKind::Refused,
        HandshakeFault::Closed => ErrorKind::PeerGone,
        HandshakeFault::Silent(_) => ErrorKind::Timeout,
        HandshakeFault::Device { .. } => ErrorKind::DeviceFailed,
        _ => ErrorKind::Protocol,
    }
}

fn of_handle(fault: &HandleFault) -> ErrorKind {
    match fault {
        HandleFault::Dropped | HandleFault::Stale { .. } | HandleFault::Expired { .. } => {
            ErrorKind::NotFound
        }
        HandleFault::Refused(_) => ErrorKind::DeviceFailed,
        _ => ErrorKind::InvalidInput,
    }
}

fn of_job(end: &JobEnd) -> ErrorKind {
    match end {
        JobEnd::DeadLettered { .. } | JobEnd::Rejected { .. } => ErrorKind::JobFailed,
        JobEnd::Expired => ErrorKind::Timeout,
        JobEnd::Taken => ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fault of another process has the kind that says what to do next.
    #[test]
    fn a_handshake_that_failed_has_the_kind_of_its_fault() {
        let kind = |fault| {
            let name = "a".to_string();
            Error::Handshake { name, fault }.kind()
        };
        assert_eq!(kind(HandshakeFault::Closed), ErrorKind::PeerGone);
        assert_eq!(kind(HandshakeFault::Magic), ErrorKind::Protocol);
        assert_eq!(
            kind(HandshakeFault::Refused("no".into())),
            ErrorKind::Refused
        );
        let wait = std::time::Duration::from_secs(1);
        assert_eq!(kind(HandshakeFault::Silent(wait)), ErrorKind::Timeout);
    }
}
