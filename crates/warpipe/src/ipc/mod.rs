//! How a process serves something under a name to others, and how they come to share it: what timelines, events,
//! pools, semaphores, members and tickets have in common.
//!
//! A [`IpcServer`] holds an endpoint of the domain and answers; a [`ClientSession`] connects to it, is admitted with a first
//! answer (bytes and descriptors: the shared words, a region), and may ask for more. Each learns of the other's
//! end: at once when it says goodbye, as *suspect* when its socket closes, as *proven* when its lifeline says so. Bytes
//! are postcard of the face's own types, at most [`BODY_BYTES_MAX`]; nothing in them is trusted before it is checked.
//!
//! It is not a way for data: messages go through the control thread's and the reactor's threads, at a few dozen
//! microseconds each. What must be fast goes through the shared [words](crate::shm::page).

pub(crate) mod domain;
pub(crate) mod limits;
pub(crate) mod message;
pub(crate) mod peer;
mod peer_state;
mod server;
mod session;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use self::peer_state::PeerState;
pub(crate) use self::server::{IpcServer, ServerCore};
pub(crate) use self::session::{ClientSession, PendingSession};
use crate::backend::DeviceId;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::limits::PeerLimits;
use crate::ipc::peer::is_admitted;
use crate::runtime::closer::PeerFd;

/// Tries bytes as each of a face's messages, for `fuzzing`: what is one means the same encoded once more.
macro_rules! messages {
    ($($message:ty),* $(,)?) => {
        #[cfg(any(test, feature = "testing"))]
        pub(crate) fn try_messages(bytes: &[u8]) {
            $(if let Ok(message) = crate::ipc::decode::<$message>(bytes, "any") {
                let bytes = postcard::to_stdvec(&message).unwrap_or_default();
                let again = crate::ipc::decode::<$message>(&bytes, "any");
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

/// The serial number of an answer to no question: see [`ServerCore::tell`].
const NOTIFICATION: u64 = 0;

/// How long a handshake or an answer may take where the caller does not say.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

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

/// Who may come besides the server's own user, and how many.
#[derive(Debug, Clone, Default)]
pub(crate) struct AccessPolicy {
    pub(crate) uids: Vec<u32>,
    pub(crate) gids: Vec<u32>,
    pub(crate) limits: PeerLimits,
}

impl AccessPolicy {
    fn is_open_to_others(&self) -> bool {
        !(self.uids.is_empty() && self.gids.is_empty())
    }

    fn admits(&self, uid: u32, gid: u32) -> bool {
        is_admitted((uid, gid), &self.uids, &self.gids)
    }
}

/// A client, as its server sees it. What is here was asked of the kernel, but for `device` and `generation`.
#[derive(Debug, Clone)]
pub(crate) struct ClientInfo {
    /// Counted from 1 for each server, never used again.
    pub(crate) id: u64,
    pub(crate) uid: u32,
    /// Says the client.
    pub(crate) device: Option<DeviceId>,
}

/// How a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disconnected {
    /// It said goodbye; the process may live on, and what its device was given may still run.
    Closed,
    /// Proven by its lifeline: nothing of that process touches memory any more.
    ProcessDied,
}

/// What a server gives.
#[derive(Debug, Default)]
pub(crate) struct OutgoingReply {
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<CloseOnForkFd>,
}

impl OutgoingReply {
    pub(crate) fn new(
        body: &impl Serialize,
        fds: Vec<CloseOnForkFd>,
    ) -> Result<OutgoingReply, Rejection> {
        Ok(OutgoingReply {
            body: encode(body).map_err(|error| Rejection(error.to_string()))?,
            fds,
        })
    }
}

/// Why a server does not give it: a text for people. What programs must tell apart goes into an answer.
#[derive(Debug)]
pub(crate) struct Rejection(pub(crate) String);

impl<E: std::error::Error> From<E> for Rejection {
    fn from(error: E) -> Rejection {
        Rejection(error.to_string())
    }
}

/// What a client got.
#[derive(Debug)]
pub(crate) struct IncomingReply {
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<PeerFd>,
}

impl IncomingReply {
    /// Its body, if it is a whole `T`, and its descriptors, if there are `N`.
    pub(crate) fn open<T: DeserializeOwned, const N: usize>(
        self,
        name: &str,
    ) -> Result<(T, [PeerFd; N])> {
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

/// What a face does for its clients. All calls but [`on_server_tick`](RequestHandler::on_server_tick) come from the control thread, one at a time for each server, and
/// with no lock of the server held; they may call the driver, and must not wait for a process.
pub(crate) trait RequestHandler: Send + Sync {
    /// Somebody comes. What is answered goes with the admission. Nothing is to be remembered of who is refused.
    fn on_connect(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection>;

    /// A client asks.
    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection>;

    /// A client's socket has closed without a goodbye; it is presumed dead, and may still touch what it has.
    fn on_suspect(&self, _server_core: &ServerCore, _client: &ClientInfo) {}

    /// A client's process has exited, and a child that it forked may keep its device work running: streams that wait for
    /// it are to be rescued, and what its device may touch is not to be used again before it is [disconnected](RequestHandler::on_disconnect). Also
    /// called when that is at once.
    fn on_orphaned(&self, _server_core: &ServerCore, _client: &ClientInfo) {}

    /// Whether a client whose socket has closed without a goodbye may still use something that it was given, so that it
    /// counts, and is kept, until its process is proven dead. If not, it has left.
    fn holds_anything(&self, client: &ClientInfo) -> bool;

    /// A session is over: called once for each who was admitted, unless the server ends first.
    fn on_disconnect(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        disconnected: Disconnected,
    );

    /// Every 200 ms, on the reactor's thread, and at the same time as the other calls: nothing here may call the driver, or
    /// wait for a lock that is held across such a call.
    fn on_server_tick(&self, _server_core: &ServerCore, _now_ns: u64) {}

    /// Whether the reactor's thread may make these calls itself, which saves the way to the control thread's: only for who
    /// never calls the driver and takes no lock.
    fn runs_on_reactor(&self) -> bool {
        false
    }
}

/// What a client hears without asking. All calls come from the reactor's thread: nothing here may call the driver, or
/// take a lock that is held across such a call.
pub(crate) trait SessionObserver: Send + Sync {
    /// The server's socket has closed: `graceful` after a goodbye. It does no more; its device may.
    fn on_closed(&self, _graceful: bool) {}

    /// The server is proven dead: nothing of that process writes any more, so whoever waits for it is to be let go. Comes
    /// after [`on_orphaned`](SessionObserver::on_orphaned), for what was written in between.
    fn on_proven_dead(&self) {}

    /// The server's process has exited, and a child that it forked may keep its device work running: who waits for it is
    /// to be let go, and nothing else. Also called when it is proven dead, before that is told.
    fn on_orphaned(&self) {}

    /// An answer came to a question that its caller has given up. What it gives is counted as ours all the same.
    fn on_stale_reply(&self, _request: &[u8], _incoming: IncomingReply) {}

    /// The server says something that was not asked for.
    fn on_notification(&self, _incoming: IncomingReply) {}
}

/// Where to find a server, and as what.
#[derive(Debug, Clone)]
pub(crate) struct Address<'a> {
    pub(crate) domain: &'a Domain,
    pub(crate) name: &'a EndpointName,
    pub(crate) kind: Kind,
}

/// A face's message as bytes.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let bytes = postcard::to_stdvec(message)
        .map_err(|e| Error::argument("message", e, "what postcard can write"))?;
    if bytes.len() > BODY_BYTES_MAX {
        return Err(Error::argument(
            "message",
            format!("{} bytes", bytes.len()),
            format!("up to {BODY_BYTES_MAX}"),
        ));
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
