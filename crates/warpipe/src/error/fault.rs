//! The exact fault, for error kinds with many causes.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The fault of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceFault {
    /// No CUDA driver library could be loaded.
    NoDriver,
    /// The driver lacks a function that this library needs.
    OldDriver,
    /// The driver works and lists no GPU that this process may use.
    NoGpu,
    /// This user may not open the driver's device files.
    NoPermission,
    /// There is no device with this ordinal or UUID.
    NoSuchDevice,
    /// The device has been reset since it was opened, which destroyed all that was made on it.
    Reset,
    /// A descriptor that should be shareable device memory is not.
    NotShareable,
    /// A device cannot reach the memory of another one.
    OutOfReach,
}

/// The fault of a ticket or handle: of its text or bytes, or of what they name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandleFault {
    /// It does not begin as any of the library's handles does; with the expected kind's article.
    #[error("it does not begin as {0} does")]
    NoHandle(&'static str),
    /// It names something of another kind.
    #[error("it is {found}, not {wanted}")]
    OtherKind {
        /// The kind that was expected, with its article.
        wanted: &'static str,
        /// Its kind.
        found: &'static str,
    },
    /// It is of another version of this library.
    #[error("it is of version {theirs}, this library reads version {ours}")]
    Version {
        /// Its version.
        theirs: u16,
        /// The version of this library.
        ours: u16,
    },
    /// It is longer than any may be: than so many bytes.
    #[error("it is longer than {0} bytes")]
    Oversized(usize),
    /// It was cut short or changed in transit.
    #[error("it was cut short or changed on its way ({0})")]
    Damaged(&'static str),
    /// What a ticket names is no longer available under its name.
    #[error("what this ticket names in {name:?} is not there any more: {expiry}")]
    Expired {
        /// The endpoint name.
        name: String,
        /// Why it is not available.
        expiry: Expiry,
    },
    /// Memory of a kind that another process cannot open by the handle that was asked for.
    #[error("{ptr:#x} cannot be exported: it is {kind}")]
    NotExportable {
        /// The address.
        ptr: u64,
        /// The kind of the memory.
        kind: PointerKind,
    },
    /// It was made on another machine, or before this machine was rebooted.
    #[error("it comes from another machine, or from before a reboot")]
    ForeignHost,
    /// It names something of another kind of device.
    #[error("it is of {owner}, and {device} cannot open that")]
    Device {
        /// The device that owns it.
        owner: String,
        /// The device that was to open it.
        device: String,
    },
    /// The event was dropped; its exporter may be alive.
    #[error("its maker has dropped the event")]
    Dropped,
    /// A range that does not lie in its allocation.
    #[error("bytes {offset} to {offset}+{bytes} do not lie in an allocation of {allocation} bytes")]
    Range {
        /// Where the range begins.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// The allocation's length.
        allocation: u64,
    },
    /// The device or its driver refuses it.
    #[error("it cannot be opened ({0})")]
    Refused(String),
    /// The exporter lives, but the memory cannot be opened.
    #[error(
        "process {pid} lives, but its memory cannot be opened ({reason}): it has freed it, or runs as another user"
    )]
    Stale {
        /// The exporter's process id.
        pid: i32,
        /// The device's error.
        reason: String,
    },
    /// This address is not open (any more).
    #[error("nothing is open at {0:#x}")]
    NotOpen(u64),
}

/// Why a ticket's memory is not available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Expiry {
    /// Its owner has closed it, or has died; no process holds the name.
    #[error("its owner {}", if *.died { "has died" } else { "has closed it, or has died and its name is removed" })]
    Gone {
        /// Whether the owner has left its name behind, as only a dead owner does. A watch of members
        /// removes such a name.
        died: bool,
    },
    /// Another process, or a later run of the owner, holds the name now.
    #[error("the name is held by a later owner")]
    Replaced,
    /// The owner has taken this block back.
    #[error("its owner has taken the block back")]
    Returned,
}

/// The fault of a handshake.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeFault {
    /// The peer speaks another version of the protocol.
    #[error("it speaks protocol version {theirs}, this is {ours}")]
    Version {
        /// The peer's version.
        theirs: u16,
        /// The version of this library.
        ours: u16,
    },
    /// The bytes are not a handshake of this library at all.
    #[error("it is not a warpipe endpoint (the greeting does not begin with the magic bytes)")]
    Magic,
    /// A message of so many bytes is shorter than its contents.
    #[error("a message of {0} bytes is cut short or garbled")]
    Garbled(usize),
    /// A message longer than any message may be: than so many bytes.
    #[error("a message is longer than {0} bytes")]
    Oversized(usize),
    /// A message that is not allowed at this point.
    #[error("{found} came where {wanted} was due")]
    Unexpected {
        /// The message that came.
        found: String,
        /// The message that was due.
        wanted: &'static str,
    },
    /// Too few or too many descriptors.
    #[error("{found} descriptors came where {wanted} are due")]
    Descriptors {
        /// How many came.
        found: usize,
        /// How many are due.
        wanted: usize,
    },
    /// The link segment is not a sealed memfd of the right size and content.
    #[error("the link segment is unusable: {0}")]
    Segment(String),
    /// The wake channel is not a socket.
    #[error("the wake channel is unusable: {0}")]
    Wake(String),
    /// The two ends run on devices that cannot share memory.
    #[error("publisher on {publisher}, subscriber on {subscriber}: no memory in common")]
    Device {
        /// The publisher's device.
        publisher: String,
        /// The subscriber's device.
        subscriber: String,
    },
    /// The other side has as many links as it may.
    #[error("it has its {max} links {}", limit.text())]
    Full {
        /// The limit that was reached.
        limit: PeerLimit,
        /// The value of the limit.
        max: u32,
    },
    /// The other side's process has no descriptors or memory left for the connection.
    #[error("the peer has no room for it now: {0}")]
    NoRoom(String),
    /// The other side refused.
    #[error("the peer refused: {0}")]
    Refused(String),
    /// The other side closed without a message.
    #[error("the peer closed the connection")]
    Closed,
    /// The other side did not answer in time.
    #[error("the peer did not answer within {0:?}")]
    Silent(Duration),
    /// The peer's death cannot be observed from this process.
    #[error("no pidfd for the peer ({0})")]
    Unwatchable(String),
    /// The descriptor sent as the peer's lifeline is not the read end of a pipe.
    #[error("the peer sent no lifeline ({0})")]
    Lifeline(String),
}

/// Why a job, or a request, came to no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JobEnd {
    /// Every attempt failed.
    #[error("was dead-lettered after {} attempts ({})", .reasons.len(), .reasons.join("; "))]
    DeadLettered {
        /// Why each attempt failed, in order.
        reasons: Vec<String>,
    },
    /// The worker or server rejected it.
    #[error("was rejected: {reason}")]
    Rejected {
        /// The reason that it gave.
        reason: String,
    },
    /// Its deadline has passed.
    #[error("has passed its deadline")]
    Expired,
    /// It is not in its queue any more.
    #[error("is not there any more: its outcome was taken, or it was cancelled")]
    Taken,
}

/// The limit of an endpoint that a new connection has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PeerLimit {
    /// The limit of all peers.
    All,
    /// The limit of all processes of one user other than the endpoint's own.
    User,
    /// The limit of one process.
    Process,
}

impl PeerLimit {
    pub(crate) fn text(self) -> &'static str {
        match self {
            PeerLimit::All => "in all",
            PeerLimit::User => "for each other user",
            PeerLimit::Process => "for each process",
        }
    }
}

/// The kind of memory that an address lies in (`cuPointerGetAttribute`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PointerKind {
    /// Device memory of `cuMemAlloc` (`cudaMalloc`): the one kind that a legacy handle can name.
    Device,
    /// The null pointer.
    Null,
    /// Ordinary memory of the process, unknown to every device.
    Host,
    /// Page-locked host memory (`cuMemHostAlloc`, `cuMemHostRegister`).
    Pinned,
    /// Managed memory (`cuMemAllocManaged`).
    Managed,
    /// Memory of a pool (`cuMemAllocAsync`).
    Pool,
    /// Memory mapped by the virtual memory functions (`cuMemMap`), like this library's own regions.
    Vmm,
    /// Memory of the virtual memory functions without a handle that can be exported: another
    /// process's, imported by its descriptor, or made without one.
    VmmPrivate,
    /// Memory that this process itself has opened by a legacy handle.
    Import,
    /// An address without an allocation: freed, or never allocated.
    Unknown,
}

impl fmt::Display for PointerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PointerKind::Device => "device memory",
            PointerKind::Null => "null",
            PointerKind::Host => "ordinary host memory",
            PointerKind::Pinned => "page-locked host memory",
            PointerKind::Managed => "managed memory",
            PointerKind::Pool => "memory of a pool (cuMemAllocAsync)",
            PointerKind::Vmm => "memory of the virtual memory functions (cuMemMap)",
            PointerKind::VmmPrivate => {
                "memory of cuMemMap that was imported, or made without an exportable handle"
            }
            PointerKind::Import => "another process's memory, opened by a legacy handle",
            PointerKind::Unknown => "no memory that is there",
        })
    }
}
