//! Names, limits, losses and states that stand in the way of a call.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::kind::Kind;

/// A limit that is reached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitFault {
    /// The device has no room for an allocation.
    #[error("{device} has no room for {bytes} bytes{detail}")]
    Device {
        /// The device's name.
        device: String,
        /// The size of the allocation.
        bytes: u64,
        /// Free and total bytes as the device reports them, or empty.
        detail: String,
    },
    /// A subscriber with [`Policy::Fail`](crate::pubsub::Policy::Fail) has no room.
    #[error(
        "subscriber {subscriber} of {name:?} has no room: it has not released the {depth} samples of its depth"
    )]
    Depth {
        /// The endpoint name.
        name: String,
        /// The subscriber, for example `process 4711`.
        subscriber: String,
        /// Its ring's depth.
        depth: u32,
    },
    /// The memory limit of a publisher or pool leaves no room for a slot or block.
    #[error(
        "{name:?} has no room for {bytes} bytes: {used} of {limit} bytes are in use and not yet released"
    )]
    Memory {
        /// The endpoint name.
        name: String,
        /// The size of the slot.
        bytes: u64,
        /// Bytes of regions in use.
        used: u64,
        /// The limit.
        limit: u64,
    },
    /// The quota of a user leaves no room for a block of a pool.
    #[error(
        "{name:?} has no room for {bytes} bytes in the quota of user {uid}: {used} of {limit} bytes and {blocks} of {blocks_max} blocks are in use and not yet released"
    )]
    Quota {
        /// The endpoint name.
        name: String,
        /// The user whose quota it is.
        uid: u32,
        /// The size of the block.
        bytes: u64,
        /// Bytes of the user's blocks.
        used: u64,
        /// The user's quota of bytes.
        limit: u64,
        /// The number of the user's blocks.
        blocks: u32,
        /// The user's quota of blocks.
        blocks_max: u32,
    },
    /// The process has as many interprocess events as it may have, this number.
    #[error("this process has {0} interprocess events, and may have no more")]
    Events(u32),
    /// A queue has as many jobs as it may have.
    #[error(
        "the queue {name:?} has its {limit} jobs, and none of them made room within {waited:?}"
    )]
    Jobs {
        /// The queue's name.
        name: String,
        /// The most jobs that are pending or have an outcome not taken yet.
        limit: usize,
        /// How long the call waited for room.
        waited: Duration,
    },
}

/// The fault of a name, or of the domain that it is in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameFault {
    /// No endpoint may have it.
    #[error("{name:?} is not an endpoint name: {reason}")]
    Invalid {
        /// The name, as given.
        name: String,
        /// The rule that the name breaks.
        reason: &'static str,
    },
    /// A live endpoint holds it.
    #[error("{name:?} is held by {holder}")]
    Taken {
        /// The endpoint name.
        name: String,
        /// Its holder, for example `process 4711`.
        holder: Holder,
    },
    /// An endpoint of another kind has it.
    #[error("{name:?} is a {found}, not a {wanted}")]
    OtherKind {
        /// The endpoint name.
        name: String,
        /// The kind that was expected.
        wanted: Kind,
        /// The kind that was found.
        found: String,
    },
    /// A foreign file stands in the place of an endpoint's file.
    #[error("{} is {found}, not an endpoint of this library", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The kind of the file.
        found: &'static str,
    },
    /// A domain directory that cannot be trusted or used.
    #[error("{} cannot be a domain: {reason}", path.display())]
    Domain {
        /// The directory.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
}

/// The holder of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The holder's process id, if it is known.
    pub pid: Option<i32>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("a live process, of another PID namespace or without its files"),
        }
    }
}

/// Data that lost its writer before it was complete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Loss {
    /// The sender died, or gave up, before this sample's data was complete. The device may have
    /// read bytes that are not the sample's: discard what was computed from them.
    #[error(
        "sample {sequence} of {name:?} was lost: its sender (process {pid}) died or gave up before the data was complete"
    )]
    Sample {
        /// The endpoint name.
        name: String,
        /// The sample's sequence number.
        sequence: u64,
        /// The sender's process id.
        pid: i32,
    },
    /// An event that lost its recorder, or maker, before the recorded work was done.
    #[error(
        "event {event} was lost: the work that process {pid} recorded did not complete before that process, or the event's maker, was gone"
    )]
    Event {
        /// The event, as `endpoint#number`.
        event: String,
        /// The process id of the recorder, as stated by the recorder.
        pid: i32,
    },
}

/// A state that does not allow a call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateFault {
    /// This stream, for example `stream 0x7f0c10`, is being captured into a graph, which would record
    /// this library's operations and repeat them at every launch. The legacy default stream (0)
    /// counts as capturing while a stream that is ordered with it is captured.
    #[error(
        "{0} is part of a stream capture, which would record this instead of doing it; nothing was done"
    )]
    Capturing(String),
    /// This event, `endpoint#number`, was never recorded: there is nothing to wait for.
    #[error("event {0} has never been recorded")]
    NotRecorded(String),
    /// This process has shut its queue of this name.
    #[error("the queue {0:?} is shut")]
    QueueClosed(String),
    /// The link has ended and its peer may live: this side has closed it, for a reason that was
    /// reported when it happened, or the publisher has closed this subscriber's link alone, or a
    /// kernel ring has stopped.
    #[error("the link to {name:?} is closed: {reason}")]
    LinkClosed {
        /// The kind of the endpoint.
        kind: Kind,
        /// The endpoint name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// A handle that was made before a `fork` is used in the child.
    #[error("this handle belongs to the process that forked")]
    Forked,
}
