//! How a process keeps something under a name for others, and how they come to share it: what timelines, events,
//! pools, semaphores, members and tickets have in common.
//!
//! A [`Keeper`] holds an endpoint of the domain and answers; a [`Visitor`] connects to it, is admitted with a first
//! answer (bytes and descriptors: the shared words, a region), and may ask for more. Each learns of the other's
//! end: at once when it says goodbye, as *suspect* when its socket closes, as *proven* when its lifeline says so. Bytes
//! are postcard of the face's own types, at most [`BODY_BYTES_MAX`]; nothing in them is trusted before it is checked.
//!
//! It is not a way for data: messages go through the attendant's and the watcher's threads, at a few dozen
//! microseconds each. What must be fast goes through the shared [words](crate::memory::page).

mod desk;
#[cfg(test)]
mod tests;
mod visitor;

use std::fmt;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(crate) use self::desk::{Desk, Keeper};
pub(crate) use self::visitor::{Call, Visitor};
use crate::backend::DeviceId;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::PrivateFd;
use crate::link::closer::PeerFd;
use crate::link::limits::PeerLimits;
use crate::link::peer::is_admitted;

/// Tries bytes as each of a face's messages, for [`fuzzing`](crate::fuzzing): what is one means the same encoded once more.
macro_rules! messages {
    ($($message:ty),* $(,)?) => {
        #[cfg(any(test, feature = "testing"))]
        pub(crate) fn try_messages(bytes: &[u8]) {
            $(if let Ok(message) = crate::rendezvous::decode::<$message>(bytes, "any") {
                let bytes = postcard::to_stdvec(&message).unwrap_or_default();
                let again = crate::rendezvous::decode::<$message>(&bytes, "any");
                let again = again.ok().and_then(|again| postcard::to_stdvec(&again).ok());
                assert_eq!(again, Some(bytes));
            })*
        }
    };
}
pub(crate) use messages;

/// The longest body of a message.
pub(crate) const BODY_BYTES_MAX: usize = 768;

/// The most descriptors that go with one answer.
pub(crate) const FDS_MAX: usize = 4;

/// The serial number of an answer to no question: see [`Desk::tell`].
const UNASKED: u64 = 0;

/// How long a handshake or an answer may take where the caller does not say.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// What is kept under a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
    /// Memory, or what tickets name.
    Memory,
    /// A timeline.
    Timeline,
    /// Events.
    Events,
    /// A pool of blocks.
    Pool,
    /// A semaphore.
    Semaphore,
    /// A member of the domain.
    Member,
    /// A publisher.
    Publisher,
    /// A queue, or a client's requests.
    Queue,
    /// The results of a queue's worker.
    Results,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Memory => "memory",
            Kind::Timeline => "timeline",
            Kind::Events => "event",
            Kind::Pool => "pool",
            Kind::Semaphore => "semaphore",
            Kind::Member => "member",
            Kind::Publisher => "publisher",
            Kind::Queue => "queue",
            Kind::Results => "worker's results",
        })
    }
}

/// Who may come besides the keeper's own user, and how many.
#[derive(Debug, Clone, Default)]
pub(crate) struct Admission {
    pub(crate) uids: Vec<u32>,
    pub(crate) gids: Vec<u32>,
    pub(crate) limits: PeerLimits,
}

impl Admission {
    fn is_open_to_others(&self) -> bool {
        !(self.uids.is_empty() && self.gids.is_empty())
    }

    fn admits(&self, uid: u32, gid: u32) -> bool {
        is_admitted((uid, gid), &self.uids, &self.gids)
    }
}

/// A visitor, as its keeper sees it. What is here was asked of the kernel, but for `device` and `generation`.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// Counted from 1 for each keeper, never used again.
    pub(crate) id: u64,
    pub(crate) uid: u32,
    /// Says the visitor.
    pub(crate) device: Option<DeviceId>,
}

/// How a visit ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It said goodbye; the process may live on, and what its device was given may still run.
    Left,
    /// Proven by its lifeline: nothing of that process touches memory any more.
    Died,
}

/// What a keeper gives.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<PrivateFd>,
}

impl Answer {
    pub(crate) fn new(body: &impl Serialize, fds: Vec<PrivateFd>) -> Result<Answer, Refusal> {
        Ok(Answer { body: encode(body).map_err(|error| Refusal(error.to_string()))?, fds })
    }
}

/// Why a keeper does not give it: a text for people. What programs must tell apart goes into an answer.
#[derive(Debug)]
pub(crate) struct Refusal(pub(crate) String);

impl<E: std::error::Error> From<E> for Refusal {
    fn from(error: E) -> Refusal {
        Refusal(error.to_string())
    }
}

/// What a visitor got.
#[derive(Debug)]
pub(crate) struct Gift {
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<PeerFd>,
}

impl Gift {
    /// Its body, if it is a whole `T`, and its descriptors, if there are `N`.
    pub(crate) fn open<T: DeserializeOwned, const N: usize>(self, name: &str) -> Result<(T, [PeerFd; N])> {
        let found = self.fds.len();
        let fds = self.fds.try_into().map_err(|_| Error::Protocol {
            name: name.to_string(),
            field: "descriptors",
            found: found.to_string(),
            allowed: N.to_string(),
        })?;
        Ok((decode(&self.body, name)?, fds))
    }
}

/// What a face does for its visitors. All calls but [`tick`](Keep::tick) come from the attendant's thread, one at a time for each keeper, and
/// with no lock of the desk held; they may call the driver, and must not wait for a process.
pub(crate) trait Keep: Send + Sync {
    /// Somebody comes. What is answered goes with the admission. Nothing is to be remembered of who is refused.
    fn admit(&self, desk: &Desk, caller: &Caller, body: &[u8]) -> Result<Answer, Refusal>;

    /// A visitor asks.
    fn answer(&self, desk: &Desk, caller: &Caller, body: &[u8]) -> Result<Answer, Refusal>;

    /// A visitor's socket has closed without a goodbye; it is presumed dead, and may still touch what it has.
    fn suspect(&self, _desk: &Desk, _caller: &Caller) {}

    /// A visitor's process has exited, and a child that it forked may keep its device work running: streams that wait for
    /// it are to be rescued, and what its device may touch is not to be used again before it is [gone](Keep::gone). Also
    /// called when that is at once.
    fn orphaned(&self, _desk: &Desk, _caller: &Caller) {}

    /// Whether a visitor whose socket has closed without a goodbye may still use something that it was given, so that it
    /// counts, and is kept, until its process is proven dead. If not, it has left.
    fn holds(&self, caller: &Caller) -> bool;

    /// A visit is over: called once for each who was admitted, unless the keeper ends first.
    fn gone(&self, desk: &Desk, caller: &Caller, ending: Ending);

    /// Every 200 ms, on the watcher's thread, and at the same time as the other calls: nothing here may call the driver, or
    /// wait for a lock that is held across such a call.
    fn tick(&self, _desk: &Desk, _now_ns: u64) {}

    /// Whether the watcher's thread may make these calls itself, which saves the way to the attendant's: only for who
    /// never calls the driver and takes no lock.
    fn is_quick(&self) -> bool {
        false
    }
}

/// What a visitor hears without asking. All calls come from the watcher's thread: nothing here may call the driver, or
/// take a lock that is held across such a call.
pub(crate) trait Visit: Send + Sync {
    /// The keeper's socket has closed: `graceful` after a goodbye. It does no more; its device may.
    fn ended(&self, _graceful: bool) {}

    /// The keeper is proven dead: nothing of that process writes any more, so whoever waits for it is to be let go. Comes
    /// after [`orphaned`](Visit::orphaned), for what was written in between.
    fn proven_dead(&self) {}

    /// The keeper's process has exited, and a child that it forked may keep its device work running: who waits for it is
    /// to be let go, and nothing else. Also called when it is proven dead, before that is told.
    fn orphaned(&self) {}

    /// An answer came to a question that its caller has given up. What it gives is counted as ours all the same.
    fn late(&self, _question: &[u8], _gift: Gift) {}

    /// The keeper says something that was not asked for.
    fn told(&self, _gift: Gift) {}
}

/// Where to find a keeper, and as what.
#[derive(Debug, Clone)]
pub(crate) struct Address<'a> {
    pub(crate) domain: &'a Domain,
    pub(crate) name: &'a EndpointName,
    pub(crate) kind: Kind,
}

/// A face's message as bytes.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let bytes = postcard::to_stdvec(message).map_err(|e| Error::argument("message", e, "what postcard can write"))?;
    if bytes.len() > BODY_BYTES_MAX {
        return Err(Error::argument("message", format!("{} bytes", bytes.len()), format!("up to {BODY_BYTES_MAX}")));
    }
    Ok(bytes)
}

/// Bytes as a face's message, if they are one to the last byte.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8], name: &str) -> Result<T> {
    match postcard::take_from_bytes::<T>(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(Error::Protocol {
            name: name.to_string(),
            field: "message",
            found: format!("{} garbled bytes", bytes.len()),
            allowed: "a message of this kind".into(),
        }),
    }
}
