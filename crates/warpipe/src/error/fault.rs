//! The exact fault, for error kinds with many causes.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The holder of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The holder's process id, if it is known.
    pub pid: Option<i32>,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("a live process, of another PID namespace or without its files"),
        }
    }
}

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
    /// It does not begin as any of the library's handles does.
    #[error("it does not begin as {wanted} does")]
    NoHandle {
        /// The kind that was expected, with its article.
        wanted: &'static str,
    },
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
    /// It is longer than any may be.
    #[error("it is longer than {limit} bytes")]
    Oversized {
        /// The limit.
        limit: usize,
    },
    /// It was cut short or changed in transit.
    #[error("it was cut short or changed on its way ({0})")]
    Damaged(&'static str),
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
    /// An address that is not open (any more).
    #[error("nothing is open at {ptr:#x}")]
    NotOpen {
        /// The address.
        ptr: u64,
    },
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
    /// A message shorter than its contents.
    #[error("a message of {bytes} bytes is cut short or garbled")]
    Garbled {
        /// Its length.
        bytes: usize,
    },
    /// A message longer than any message may be.
    #[error("a message is longer than {limit} bytes")]
    Oversized {
        /// The limit.
        limit: usize,
    },
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
    #[error("it has its {max} links {limit}")]
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

impl fmt::Display for PeerLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PeerLimit::All => "in all",
            PeerLimit::User => "for each other user",
            PeerLimit::Process => "for each process",
        })
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

/// The fault of a file, or of a folder, that is to hold model weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
#[non_exhaustive]
pub struct WeightsFault {
    /// What is wrong.
    pub text: String,
    /// The next step; [`hint`](crate::Error::hint) says it.
    pub next: &'static str,
}

impl WeightsFault {
    pub(crate) fn new(text: impl Into<String>, next: &'static str) -> Self {
        WeightsFault {
            text: text.into(),
            next,
        }
    }

    /// Another path is to be named.
    pub(crate) fn unnamed(text: &str) -> Self {
        let next = "name safetensors files, an index of them, or a folder with one model";
        WeightsFault::new(text, next)
    }

    /// The file is cut short, or is none.
    pub(crate) fn damaged(text: impl Into<String>) -> Self {
        let next = "take a whole safetensors file: copy or download it again";
        WeightsFault::new(text, next)
    }

    /// A process wrote to the file, or put another one in its place.
    pub(crate) fn changed() -> Self {
        let next = "load it again when no process writes to it";
        WeightsFault::new("it was changed while it was loaded", next)
    }

    /// There is more of something than this library loads under one name.
    pub(crate) fn limit(what: &str, limit: u64) -> Self {
        let text = format!("{what}: more than {limit}");
        WeightsFault::new(text, "split the weights over several names")
    }
}

/// What is wrong with weights of which these tensors have another content hash.
pub(super) fn unverified(tensors: &[String]) -> String {
    match tensors {
        [] => "has no content hashes to compare".into(),
        _ => format!("is damaged: the content hash of {} differs", names(tensors)),
    }
}

/// The tensors of an error, for people: the first ones by name.
fn names(tensors: &[String]) -> String {
    const SHOWN: usize = 3;
    let shown: Vec<String> = tensors
        .iter()
        .take(SHOWN)
        .map(|t| format!("{t:?}"))
        .collect();
    let more = tensors.len().saturating_sub(SHOWN);
    let noun = if tensors.len() == 1 {
        "tensor"
    } else {
        "tensors"
    };
    match more {
        0 => format!("{noun} {}", shown.join(", ")),
        _ => format!("{noun} {} and {more} more", shown.join(", ")),
    }
}

/// The tensors in which a version of weights differs from the one that is followed. If there are
/// none, its memory is divided in another way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WeightsDifference {
    /// The names that it lacks.
    pub missing: Vec<String>,
    /// The names that it alone has.
    pub unexpected: Vec<String>,
    /// The names of tensors of another shape, another element type or at another place.
    pub different: Vec<String>,
}

impl fmt::Display for WeightsDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |what: &str, tensors: &[String]| {
            (!tensors.is_empty()).then(|| format!("{what} {}", names(tensors)))
        };
        let parts = [
            of("it lacks", &self.missing),
            of("it alone has", &self.unexpected),
            of(
                "it has another shape, element type or place for",
                &self.different,
            ),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        match parts.is_empty() {
            true => f.write_str("its memory is divided in another way"),
            false => f.write_str(&parts.join("; ")),
        }
    }
}
