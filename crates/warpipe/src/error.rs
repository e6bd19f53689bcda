//! One error type for the whole library.
//!
//! Every variant carries what a person needs to act: the name, the peer, the bytes, the driver's own
//! code, and its message ends with the next step. Match on the variant; print with `{}`.

mod fault;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use fault::{Expiry, HandshakeFault, Holder, LegacyFault, TicketFault};

use crate::backend::PointerKind;

/// What every fallible call of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, with the next step in its message.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No CUDA driver library could be loaded.
    #[error(
        "no CUDA driver: {searched} could not be loaded ({reason}); install the NVIDIA driver, or use Device::host()"
    )]
    NoDriver {
        /// The library names tried, in order.
        searched: String,
        /// What the loader said of the first.
        reason: String,
    },
    /// The driver is there but lacks a function this library needs.
    #[error(
        "the CUDA driver lacks {symbol}; update the driver (R525 or newer), or use Device::host()"
    )]
    DriverSymbol {
        /// The missing function, as the driver's headers name it.
        symbol: &'static str,
    },
    /// The driver works and lists no GPU that this process may use.
    #[error(
        "the CUDA driver lists no GPU{hint}; check CUDA_VISIBLE_DEVICES and the container's device list, or use Device::host()"
    )]
    NoDevice {
        /// What is known of the cause, or empty.
        hint: String,
    },
    /// The driver is there but this user may not open its device files.
    #[error(
        "no permission on {path}; add this user to the group that owns it, or use Device::host()"
    )]
    DevicePermission {
        /// The device file.
        path: PathBuf,
    },
    /// No device answers to what was asked for.
    #[error("no device {wanted}; there are {available}")]
    NoSuchDevice {
        /// The ordinal or UUID asked for.
        wanted: String,
        /// What is there.
        available: String,
    },
    /// A driver call failed.
    #[error("{call} failed with {name} ({code}): {message}{next}")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// The `CUresult`.
        code: i32,
        /// Its name, for example `CUDA_ERROR_INVALID_VALUE`.
        name: String,
        /// What the driver says of it.
        message: String,
        /// The next step, starting with `"; "`, or empty.
        next: &'static str,
    },
    /// A stream is being captured into a graph, which would record what this library gives it, and do it later and again.
    #[error(
        "{what} is part of a stream capture, which would record this instead of doing it; nothing was done: call it before the capture begins or after it has ended (outside of `torch.cuda.graph`, after cuStreamEndCapture), or on another stream"
    )]
    Capturing {
        /// What captures, for example `stream 0x7f0c10`. The legacy default stream (0) does while a stream that is ordered
        /// with it is captured.
        what: String,
    },
    /// Somebody has reset the device since it was opened, and with it all that it had.
    #[error(
        "{device} was reset after it was opened (cudaDeviceReset, cuDevicePrimaryCtxReset), and all that was made on it is gone; drop it, and open the device again"
    )]
    DeviceReset {
        /// The device's name.
        device: String,
    },
    /// The device has no room for an allocation.
    #[error(
        "{device} has no room for {bytes} bytes{detail}; free memory or lower the publisher's memory limit"
    )]
    DeviceMemory {
        /// The device's name.
        device: String,
        /// What was asked for.
        bytes: u64,
        /// Free and total bytes as the device reports them, or empty.
        detail: String,
    },
    /// A descriptor that should be shareable device memory is not.
    #[error(
        "the descriptor received is not {wanted}: {found}; the peer runs another backend or is broken"
    )]
    NotDeviceMemory {
        /// What it should be.
        wanted: &'static str,
        /// What was found instead.
        found: String,
    },
    /// Two devices that cannot reach each other's memory.
    #[error(
        "{reader} cannot read memory of {owner}: {reason}; put both ends on one GPU or on GPUs joined by NVLink or PCIe peer access"
    )]
    PeerAccess {
        /// The device that wants to read.
        reader: String,
        /// The device that owns the memory.
        owner: String,
        /// What was tried and how it ended.
        reason: String,
    },
    /// An operating system call failed.
    #[error("{call} failed on {context}: {source}")]
    Os {
        /// The call.
        call: &'static str,
        /// What it was for.
        context: String,
        /// The kernel's word.
        source: io::Error,
    },
    /// The process, or the system, has no descriptor left.
    #[error(
        "no file descriptor left for {context} (soft limit {soft}); raise it with `ulimit -n` or close something"
    )]
    DescriptorLimit {
        /// What needed one.
        context: String,
        /// `RLIMIT_NOFILE`, soft.
        soft: u64,
    },
    /// This user has more descriptors on their way between processes than it may have.
    #[error(
        "this user has too many descriptors in flight for {context}: RLIMIT_NOFILE (soft limit {soft}) counts what its processes sent over sockets and nobody received; raise it with `ulimit -n`, or end some of them"
    )]
    InFlightLimit {
        /// What needed one.
        context: String,
        /// `RLIMIT_NOFILE`, soft.
        soft: u64,
    },
    /// A name that no endpoint may have.
    #[error(
        "{name:?} is not an endpoint name: {reason}; use 1 to 80 bytes of a-z A-Z 0-9 _ - . in parts joined by /, no part starting with a dot"
    )]
    Name {
        /// The name, as given.
        name: String,
        /// The rule it breaks.
        reason: &'static str,
    },
    /// A domain directory that cannot be trusted or used.
    #[error("{} cannot be a domain: {reason}; use a directory that you own with mode 0700, or set WARPIPE_DOMAIN", path.display())]
    Domain {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Something that is not ours stands where an endpoint's file should be.
    #[error("{} is {found}, not an endpoint of this library; it is left alone: move it away or take another name", path.display())]
    ForeignFile {
        /// The file.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// The name is held by a live endpoint.
    #[error("{name:?} is held by {holder}; stop it or take another name")]
    NameTaken {
        /// The endpoint name.
        name: String,
        /// Its holder, for example `process 4711`.
        holder: Holder,
    },
    /// Nobody publishes under this name.
    #[error(
        "nobody publishes {name:?}; start the publisher, or wait for it with `wait_for_publisher`"
    )]
    NoPublisher {
        /// The endpoint name.
        name: String,
    },
    /// Nobody keeps anything under this name.
    #[error("no {kind} named {name:?}: {}; start its owner, or wait for it with a timeout", if *.was_there { "its owner has died and left the name behind" } else { "nobody has made it yet, or it is closed" })]
    NoOwner {
        /// What was looked for.
        kind: crate::Kind,
        /// The endpoint name.
        name: String,
        /// Whether a dead process has left the name behind.
        was_there: bool,
    },
    /// Something else is kept under this name.
    #[error("{name:?} is a {found}, not a {wanted}; take the right name, or open it as what it is")]
    OtherKind {
        /// The endpoint name.
        name: String,
        /// What was looked for.
        wanted: crate::Kind,
        /// What is there.
        found: String,
    },
    /// A text that is no usable ticket.
    #[error("not a usable ticket: {0}")]
    Ticket(TicketFault),
    /// The memory that a ticket names is not to be had under its name any more.
    #[error(
        "what this ticket names in {name:?} is not there any more: {expiry}; get a new ticket from its owner"
    )]
    TicketExpired {
        /// The endpoint name.
        name: String,
        /// What has become of it.
        expiry: Expiry,
    },
    /// A range that does not lie inside the memory.
    #[error("bytes {offset}..{} lie outside of {name:?}, which has {available}; take a range inside", u128::from(*.offset) + u128::from(*.bytes))]
    Range {
        /// What the memory is called.
        name: String,
        /// Where the range begins.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// What there is.
        available: u64,
    },
    /// The process that keeps this has gone, and what it alone could do is not done any more.
    #[error("the owner of {kind} {name:?} (process {pid}) {}; open it again when it is back", if *.graceful { "has closed it" } else { "has died" })]
    OwnerGone {
        /// What it kept.
        kind: crate::Kind,
        /// The endpoint name.
        name: String,
        /// Its process id, as this process sees it.
        pid: i32,
        /// Whether it said goodbye.
        graceful: bool,
    },
    /// The other side does not do what it was asked.
    #[error("{name:?} refused: {text}")]
    Refused {
        /// The endpoint name.
        name: String,
        /// Its reason and, from this library, the next step.
        text: String,
    },
    /// Only who made a timeline signals it.
    #[error(
        "timeline {name:?} belongs to process {pid}, which alone may signal it; signal a timeline of your own"
    )]
    NotOwner {
        /// The timeline's name.
        name: String,
        /// Its owner.
        pid: i32,
    },
    /// A timeline's value only grows.
    #[error(
        "timeline {name:?} has been signalled to {last}, and cannot go to {value}; signal a larger value"
    )]
    Backwards {
        /// The timeline's name.
        name: String,
        /// The value asked for.
        value: u64,
        /// The last value signalled.
        last: u64,
    },
    /// A timeline was to be signalled by the CPU while a stream has yet to signal it.
    #[error(
        "timeline {name:?} stands at {reached}, and a stream has yet to signal {last}: {value} cannot come before it; signal it on a stream, or wait for {last}"
    )]
    SignalPending {
        /// The timeline's name.
        name: String,
        /// The value asked for.
        value: u64,
        /// The last value given to a stream.
        last: u64,
        /// The value reached.
        reached: u64,
    },
    /// An event that nobody has recorded: there is nothing to wait for.
    #[error(
        "event {event} has never been recorded; record it first, then tell others to wait for it"
    )]
    EventNotRecorded {
        /// The event, as `endpoint#number`.
        event: String,
    },
    /// An event whose recorder, or maker, was gone before the recorded work was done.
    #[error(
        "event {event} was lost: the work that process {pid} recorded did not complete before that process, or the event's maker, was gone; discard what depends on it"
    )]
    EventLost {
        /// The event, as `endpoint#number`.
        event: String,
        /// Who recorded it, as it said itself.
        pid: i32,
    },
    /// An event handle that cannot be used.
    #[error("not a usable event handle: {fault}")]
    EventHandle {
        /// What is wrong with it.
        fault: crate::EventHandleFault,
    },
    /// The endpoint's owner does not let this user in.
    #[error("{name:?} does not admit this user ({detail}); ask its owner to allow the uid or gid")]
    AccessDenied {
        /// The endpoint name.
        name: String,
        /// What the other side said.
        detail: String,
    },
    /// The two sides could not agree on a link.
    #[error("no link to {name:?}: {fault}")]
    Handshake {
        /// The endpoint name.
        name: String,
        /// What was wrong.
        fault: HandshakeFault,
    },
    /// A peer wrote into a link what no correct peer writes. Its link is closed; nothing else is touched.
    #[error(
        "the peer of {name:?} broke the link's protocol: {field} is {found}, allowed is {allowed}; the link is closed: reconnect, and report the peer"
    )]
    Protocol {
        /// The endpoint name.
        name: String,
        /// The field.
        field: &'static str,
        /// What was read.
        found: String,
        /// What would have been right.
        allowed: String,
    },
    /// The publisher has gone, and everything it finished has been received.
    #[error("the publisher of {name:?} (process {pid}) {}; subscribe again, or turn `reconnect` on", if *.graceful { "has closed" } else { "has died" })]
    PublisherGone {
        /// The endpoint name.
        name: String,
        /// Its process id, as this process sees it.
        pid: i32,
        /// Whether it said goodbye.
        graceful: bool,
    },
    /// The sender died, or gave up, before this sample's data was complete: what the device read was not the sample.
    #[error(
        "sample {sequence} of {name:?} was lost: its sender (process {pid}) died or gave up before the data was complete; discard what was computed from it"
    )]
    SampleLost {
        /// The endpoint name.
        name: String,
        /// The sample's sequence number.
        sequence: u64,
        /// The sender's process id.
        pid: i32,
    },
    /// The publisher closed this subscriber's link because it stood still for too long.
    #[error("the publisher of {name:?} evicted this subscriber: {reason}; subscribe again")]
    Evicted {
        /// The endpoint name.
        name: String,
        /// Why.
        reason: String,
    },
    /// This side has closed the link, for a reason that was told when it happened.
    #[error("the link to {name:?} is closed: {reason}; subscribe again")]
    LinkClosed {
        /// The endpoint name.
        name: String,
        /// Why.
        reason: String,
    },
    /// A wait ran out.
    #[error(
        "{what} did not come within {waited:?}; wait longer, or see `warpipe doctor` and the peer's state"
    )]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        waited: Duration,
    },
    /// A subscriber whose policy is to fail has no room.
    #[error(
        "subscriber {subscriber} of {name:?} has no room: it has not released the {depth} samples of its depth; receive and release faster, raise the depth, or choose another policy"
    )]
    Full {
        /// The endpoint name.
        name: String,
        /// The subscriber, for example `process 4711`.
        subscriber: String,
        /// Its ring's depth.
        depth: u32,
    },
    /// The publisher's memory limit leaves no room for a slot.
    #[error(
        "{name:?} has no room for {bytes} bytes: {used} of {limit} bytes are in use and not yet released; release some, or raise the memory limit"
    )]
    MemoryLimit {
        /// The endpoint name.
        name: String,
        /// The slot asked for.
        bytes: u64,
        /// Bytes of regions in use.
        used: u64,
        /// The stated limit.
        limit: u64,
    },
    /// Memory that no legacy handle can name.
    #[error("{ptr:#x} is {kind}, which no legacy handle can name; {}", .kind.next())]
    NotExportable {
        /// The address.
        ptr: u64,
        /// What it is.
        kind: PointerKind,
    },
    /// The process that exported some memory is gone, and with it the memory.
    #[error(
        "process {pid}, which exported this memory, is gone, and the memory with it; a legacy handle dies with its exporter: export again, or use a channel, whose memory outlives its sender"
    )]
    ExporterGone {
        /// Its process id.
        pid: i32,
    },
    /// A legacy handle that cannot be used.
    #[error("not a usable legacy handle: {fault}")]
    LegacyHandle {
        /// What is wrong with it.
        fault: LegacyFault,
    },
    /// The process has all the interprocess events that it may have.
    #[error("this process has {limit} interprocess events, and may have no more; drop some")]
    EventLimit {
        /// The limit.
        limit: u32,
    },
    /// A queue has as many jobs as it may have.
    #[error(
        "the queue {name:?} has its {limit} jobs, and none of them made room within {waited:?}; take results, add workers, or raise the limit"
    )]
    QueueFull {
        /// The queue's name.
        name: String,
        /// The most jobs whose outcome was not taken.
        limit: usize,
        /// How long room was waited for.
        waited: Duration,
    },
    /// Every attempt at a job failed.
    #[error(
        "job {job} of {name:?} was dead-lettered after {} attempts ({}); see to the cause and submit it again",
        .reasons.len(), .reasons.join("; ")
    )]
    DeadLettered {
        /// The queue's name.
        name: String,
        /// The job's number.
        job: u64,
        /// Why each attempt failed, the first first.
        reasons: Vec<String>,
    },
    /// The worker or server that had the job said that it is not to be done.
    #[error("job {job} of {name:?} was rejected: {reason}; change it before it is submitted again")]
    Rejected {
        /// The queue's or service's name.
        name: String,
        /// The job's number.
        job: u64,
        /// What was said.
        reason: String,
    },
    /// A deadline has passed.
    #[error("the deadline of job {job} of {name:?} has passed; allow more time, or add servers")]
    DeadlinePassed {
        /// The queue's or service's name.
        name: String,
        /// The job's number.
        job: u64,
    },
    /// The job is not in its queue any more: its outcome was taken, or it was called off.
    #[error(
        "the outcome of job {job} of {name:?} was taken, or the job was called off; wait for it in one place only"
    )]
    NoSuchJob {
        /// The queue's name.
        name: String,
        /// The job's number.
        job: u64,
    },
    /// This process has shut its queue.
    #[error("the queue {name:?} is shut; make a new one to submit more jobs")]
    QueueClosed {
        /// The queue's name.
        name: String,
    },
    /// A worker's queue has gone.
    #[error(
        "the queue {name:?} has gone ({reason}); what was leased from it has nobody to go to: attach to the next one"
    )]
    QueueGone {
        /// The queue's name.
        name: String,
        /// How its end was seen.
        reason: String,
        /// Whether its owner said goodbye; else it died, or the link failed.
        graceful: bool,
    },
    /// A tensor layout that cannot be, or does not fit.
    #[error("not a usable tensor layout: {reason}")]
    Layout {
        /// What is wrong with it.
        reason: String,
    },
    /// A profiler's library that was asked for cannot be used. Nothing else is affected.
    #[error(
        "no ranges for a profiler: {library} {reason}; correct NVTX_INJECTION64_PATH or WARPIPE_NVTX, or set WARPIPE_NVTX=0"
    )]
    Profiler {
        /// The library's path or name.
        library: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An argument outside its stated range.
    #[error("{argument} is {found}; allowed is {allowed}")]
    Argument {
        /// Its name.
        argument: &'static str,
        /// Its value.
        found: String,
        /// Its range.
        allowed: String,
    },
    /// A handle that was made before a `fork` is used in the child.
    #[error(
        "this handle belongs to the process that forked; open a new one in the child (CUDA cannot follow a fork at all: use spawn or exec)"
    )]
    Forked,
    /// A fault that a test asked for.
    #[error("injected fault: call {call} of {method}")]
    Injected {
        /// The backend method.
        method: &'static str,
        /// Its count, from 1.
        call: u64,
    },
}

impl Error {
    /// An operating system error in its context; the limits of descriptors get variants of their own.
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
