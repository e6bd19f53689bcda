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
mod state;
mod weights;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub use fault::{DeviceFault, Expiry, HandleFault, HandshakeFault, JobEnd, PeerLimit, PointerKind};
pub use hint::Language;
pub use kind::ErrorKind;
pub use state::{Holder, LimitFault, Loss, NameFault, StateFault};
pub use weights::{WeightsDifference, WeightsFault, WeightsFileFault};

pub use construct::Returned;

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
    /// No room, or as many of something as there may be.
    #[error("{0}")]
    Limit(LimitFault),
    /// A name that no endpoint may have, or that something else has, or a domain of names that is
    /// not as it must be.
    #[error("{0}")]
    Name(NameFault),
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
    /// A ticket, or a handle of an event or of memory, that cannot be used or made.
    #[error("{}", construct::unusable(.what, .fault))]
    Handle {
        /// `ticket`, `event handle` or `legacy handle`.
        what: &'static str,
        /// The fault.
        fault: HandleFault,
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
    /// Data lost its writer before it was complete.
    #[error("{0}")]
    Lost(Loss),
    /// A wait ran out.
    #[error("{} did not come within {waited:?}", if what.is_empty() { "the awaited event" } else { what })]
    Timeout {
        /// The awaited event. Empty for a call that was not to wait.
        what: String,
        /// The timeout.
        waited: Duration,
    },
    /// Model weights that cannot be loaded, verified, or put in the place of others.
    #[error("{0}")]
    Weights(WeightsFault),
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
    /// An object whose present state does not allow the call.
    #[error("{0}")]
    State(StateFault),
    /// An argument outside its stated range.
    #[error("{}", construct::argument(.argument, .found, .allowed))]
    Argument {
        /// The name of the argument.
        argument: &'static str,
        /// The value of the argument. Of a `tensor layout`: why it is invalid, or does not fit.
        found: String,
        /// The legal range; empty for a `tensor layout`.
        allowed: String,
    },
}
