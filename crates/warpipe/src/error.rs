//! One error type for the whole library.
//!
//! Every variant carries the facts needed to act (the name, the peer, the bytes, the driver's own
//! code). Match on [`Error::kind`] to decide what to do next, on the variant for its context. `{}`
//! prints the fact; [`Error::hint`] is the next step for a person, and [`Error::hint_in`] says it
//! in the words of another language.

mod construct;
mod fault;
mod hint;
mod kind;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use fault::{
    DeviceFault, Expiry, HandleFault, HandshakeFault, Holder, JobEnd, PeerLimit, PointerKind,
    WeightsDifference, WeightsFault,
};
pub use hint::Language;
pub use kind::ErrorKind;

pub(crate) use construct::returns_to_caller;

use crate::kind::Kind;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate: what happened, as data.
///
/// [`kind`](Error::kind) says what a program can do about it; [`hint`](Error::hint) says it to a
/// person. `{:?}` prints the fact and the hint, as a `main` that returns an error, `unwrap` and
/// `expect` do.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device that is missing, cannot be used, or cannot reach some memory.
    #[error("{text}")]
    Device {
        /// The fault.
        fault: DeviceFault,
        /// The device, or what else the fault is of, and what is known of it.
        text: String,
    },
    /// A driver call failed.
    #[error("{call} failed with {name} ({code}): {message}")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// The `CUresult`.
        code: i32,
        /// Its name, for example `CUDA_ERROR_INVALID_VALUE`.
        name: String,
        /// The driver's text for the code.
        message: String,
        /// The next step for this code, or empty; [`hint`](Error::hint) says it.
        next: &'static str,
    },
    /// A stream is being captured into a graph. The graph would record this library's operations
    /// and repeat them at every launch.
    #[error(
        "{what} is part of a stream capture, which would record this instead of doing it; nothing was done"
    )]
    Capturing {
        /// The capturing stream, for example `stream 0x7f0c10`. The legacy default stream (0)
        /// counts as capturing while a stream that is ordered with it is captured.
        what: String,
    },
    /// The device has no room for an allocation.
    #[error("{device} has no room for {bytes} bytes{detail}")]
    DeviceMemory {
        /// The device's name.
        device: String,
        /// The size of the allocation.
        bytes: u64,
        /// Free and total bytes as the device reports them, or empty.
        detail: String,
    },
    /// An operating system call failed; see [`is_descriptor_limit`](Error::is_descriptor_limit).
    #[error("{call} failed on {context}: {source}")]
    Os {
        /// The call.
        call: &'static str,
        /// The object of the call.
        context: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// A name that no endpoint may have.
    #[error("{name:?} is not an endpoint name: {reason}")]
    Name {
        /// The name, as given.
        name: String,
        /// The rule that the name breaks.
        reason: &'static str,
    },
    /// A domain directory that cannot be trusted or used.
    #[error("{} cannot be a domain: {reason}", path.display())]
    Domain {
        /// The directory.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// A foreign file stands in the place of an endpoint's file.
    #[error("{} is {found}, not an endpoint of this library", path.display())]
    ForeignFile {
        /// The file.
        path: PathBuf,
        /// The kind of the file.
        found: &'static str,
    },
    /// The name is held by a live endpoint.
    #[error("{name:?} is held by {holder}")]
    NameTaken {
        /// The endpoint name.
        name: String,
        /// Its holder, for example `process 4711`.
        holder: Holder,
    },
    /// No endpoint has this name.
    #[error("{}", construct::not_found(.kind, .name, .domain, *.was_there))]
    NotFound {
        /// The kind that was expected.
        kind: Kind,
        /// The endpoint name.
        name: String,
        /// The directory of the domain in which it was looked for; empty if that is not known.
        domain: PathBuf,
        /// Whether a dead process has left the name behind.
        was_there: bool,
    },
    /// An endpoint of another kind has this name.
    #[error("{name:?} is a {found}, not a {wanted}")]
    OtherKind {
        /// The endpoint name.
        name: String,
        /// The kind that was expected.
        wanted: Kind,
        /// The kind that was found.
        found: String,
    },
    /// A ticket, or a handle of an event or of memory, that cannot be used.
    #[error("not a usable {what}: {fault}")]
    Handle {
        /// `ticket`, `event handle` or `legacy handle`.
        what: &'static str,
        /// The fault.
        fault: HandleFault,
    },
    /// The memory that a ticket names is no longer available under its name.
    #[error("what this ticket names in {name:?} is not there any more: {expiry}")]
    TicketExpired {
        /// The endpoint name.
        name: String,
        /// Why it is not available.
        expiry: Expiry,
    },
    /// The other side refused a request, or the endpoint's owner does not let this user in.
    #[error("{name:?} {}: {text}", if *.denied { "does not admit this user" } else { "refused" })]
    Refused {
        /// The endpoint name.
        name: String,
        /// The other side's reason.
        text: String,
        /// Whether this user is not let in.
        denied: bool,
    },
    /// An event that was never recorded: there is nothing to wait for.
    #[error("event {event} has never been recorded")]
    EventNotRecorded {
        /// The event, as `endpoint#number`.
        event: String,
    },
    /// An event that lost its recorder, or maker, before the recorded work was done.
    #[error(
        "event {event} was lost: the work that process {pid} recorded did not complete before that process, or the event's maker, was gone"
    )]
    EventLost {
        /// The event, as `endpoint#number`.
        event: String,
        /// The process id of the recorder, as stated by the recorder.
        pid: i32,
    },
    /// The two sides could not agree on a link.
    #[error("no link to {name:?}: {fault}")]
    Handshake {
        /// The endpoint name.
        name: String,
        /// The fault.
        fault: HandshakeFault,
    },
    /// A peer wrote a value into a link that no correct peer writes. Its link is closed; no other
    /// link is affected.
    #[error(
        "the peer of {name:?} broke the link's protocol: {field} is {found}, allowed is {allowed}"
    )]
    Protocol {
        /// The endpoint name.
        name: String,
        /// The field.
        field: &'static str,
        /// The value that was read.
        found: String,
        /// The values that are legal.
        allowed: String,
    },
    /// The process that owned an endpoint, or exported memory, has gone: it closed, or died. All
    /// that it had completed before has been delivered; no other process can do the rest.
    #[error("{}", construct::peer_gone(.kind, .name, *.pid, *.graceful, .detail))]
    PeerGone {
        /// The kind of the object that it owned.
        kind: Kind,
        /// The object's endpoint name; empty for [`Kind::LegacyMemory`](crate::kind::Kind), which has
        /// none.
        name: String,
        /// The process id of the peer, as this process sees it.
        pid: i32,
        /// Whether it closed gracefully. Otherwise it died, or its link failed.
        graceful: bool,
        /// How the end was detected, if more is known than the fields above say; else empty.
        detail: String,
    },
    /// The sender died, or gave up, before this sample's data was complete. The device may have
    /// read bytes that are not the sample's: discard what was computed from them.
    #[error(
        "sample {sequence} of {name:?} was lost: its sender (process {pid}) died or gave up before the data was complete"
    )]
    SampleLost {
        /// The endpoint name.
        name: String,
        /// The sample's sequence number.
        sequence: u64,
        /// The sender's process id.
        pid: i32,
    },
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
    /// A wait ran out.
    #[error("{} did not come within {waited:?}", if what.is_empty() { "the awaited event" } else { what })]
    Timeout {
        /// The awaited event. Empty for a call that was not to wait.
        what: String,
        /// The timeout.
        waited: Duration,
    },
    /// A subscriber with [`Policy::Fail`](crate::pubsub::Policy::Fail) has no room.
    #[error(
        "subscriber {subscriber} of {name:?} has no room: it has not released the {depth} samples of its depth"
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
        "{name:?} has no room for {bytes} bytes: {used} of {limit} bytes are in use and not yet released"
    )]
    MemoryLimit {
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
    QuotaExceeded {
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
    /// A file, or a folder, of model weights that cannot be loaded.
    #[error("{} cannot be loaded: {fault}", path.display())]
    WeightsFile {
        /// The file or folder.
        path: PathBuf,
        /// The fault.
        fault: WeightsFault,
    },
    /// Published weights are not proven to be what their publisher wrote.
    #[error(
        "version {version} of the weights {name:?} {}",
        fault::unverified(tensors)
    )]
    WeightsUnverified {
        /// The weights' name.
        name: String,
        /// The version.
        version: u64,
        /// The tensors with another content hash, in the order of their offsets: they are damaged.
        /// None of a version without hashes to compare.
        tensors: Vec<String>,
    },
    /// A version of weights that cannot take the place of the one that is followed: its tensors lie
    /// at other places. Nothing was changed.
    #[error(
        "version {version} of the weights {name:?} does not fit the version that is followed: \
         {difference}"
    )]
    WeightsMismatch {
        /// The weights' name.
        name: String,
        /// The version that does not fit.
        version: u64,
        /// The tensors in which it differs.
        difference: Box<WeightsDifference>,
    },
    /// Memory of a kind that another process cannot open by the handle that was asked for.
    #[error("{ptr:#x} cannot be exported: it is {kind}")]
    NotExportable {
        /// The address.
        ptr: u64,
        /// The kind of the memory.
        kind: PointerKind,
    },
    /// The process has as many interprocess events as it may have.
    #[error("this process has {limit} interprocess events, and may have no more")]
    EventLimit {
        /// The limit.
        limit: u32,
    },
    /// A queue has as many jobs as it may have.
    #[error(
        "the queue {name:?} has its {limit} jobs, and none of them made room within {waited:?}"
    )]
    QueueFull {
        /// The queue's name.
        name: String,
        /// The most jobs that are pending or have an outcome not taken yet.
        limit: usize,
        /// How long the call waited for room.
        waited: Duration,
    },
    /// A job, or a request, that came to no result.
    #[error("job {job} of {name:?} {end}")]
    Job {
        /// The queue's or service's name.
        name: String,
        /// The job's number.
        job: u64,
        /// Why.
        end: JobEnd,
    },
    /// This process has shut its queue.
    #[error("the queue {name:?} is shut")]
    QueueClosed {
        /// The queue's name.
        name: String,
    },
    /// A tensor layout that is invalid, or does not fit.
    #[error("not a usable tensor layout: {reason}")]
    Layout {
        /// The fault.
        reason: String,
    },
    /// An argument outside its stated range.
    #[error("{argument} is {found}; allowed is {allowed}")]
    Argument {
        /// The name of the argument.
        argument: &'static str,
        /// The value of the argument.
        found: String,
        /// The legal range.
        allowed: String,
    },
    /// A handle that was made before a `fork` is used in the child.
    #[error("this handle belongs to the process that forked")]
    Forked,
}
