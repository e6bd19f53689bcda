//! Names, connections and sessions between processes, over Unix sockets.
//!
//! For every endpoint: [`domain`] (names), [`acceptor`] and [`client_handshake`] (the two ends of a
//! handshake), [`message`], [`connection`], [`peer`] (the process at the other end, and the proof
//! of its death), [`limits`]. A publisher, also one of a queue, and its subscribers go on with a
//! link of their own ([`pubsub`](crate::pubsub)); all other objects have sessions. [`handle`] is
//! the form of the texts that name objects.
//!
//! An [`IpcServer`] owns an endpoint of the domain and answers requests. A [`ClientSession`]
//! connects to it and is admitted with a first reply: bytes and descriptors (the shared words, a
//! region). Each side learns of the other's end: at once on a graceful close, as *suspect* when the
//! socket closes, as *proven* when the lifeline ends. Bodies are postcard of the endpoint's own
//! types, at most [`BODY_BYTES_MAX`], and untrusted until checked. A message costs a few dozen
//! microseconds of the control thread's and the reactor's time. Fast paths use the shared
//! [words](crate::shm::page).

pub(crate) mod acceptor;
pub(crate) mod client_handshake;
pub(crate) mod connection;
pub(crate) mod domain;
pub(crate) mod handle;
pub(crate) mod limits;
pub(crate) mod message;
pub(crate) mod peer;
mod peer_state;
mod server;
mod session;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use self::peer_state::PeerState;
pub(crate) use self::server::{IpcServer, ServerCore};
pub(crate) use self::session::{ClientSession, is_transient, until_found, until_open};
use crate::backend::DeviceId;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::limits::{PeerLimits, QuotaPermit};
use crate::ipc::message::Message;
use crate::ipc::peer::{Process, ProcessId, is_admitted};
pub(crate) use crate::kind::Kind;
use crate::os::is_shortage;
use crate::runtime::closer::PeerFd;

/// Decodes bytes as each message of an endpoint type, for `fuzzing`. A decoded message must survive
/// another encoding.
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

/// The most descriptors in one reply: the system lets 253 through, and fewer where a user has many
/// in sockets that are not read.
pub(crate) const FDS_MAX: usize = 64;

/// The serial number of a reply to no request: see [`ServerCore::tell`].
const NOTIFICATION: u64 = 0;

/// How long an endpoint waits for a `Hello`, and a subscriber for its whole handshake, unless its
/// options set another time.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a client of a session waits for its whole handshake, and for a reply, unless its caller
/// gives a limit.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Which users may connect besides the server's own, and how many connections they may have.
#[derive(Debug, Clone, Default)]
pub(crate) struct AccessPolicy {
    pub(crate) uids: Vec<u32>,
    pub(crate) gids: Vec<u32>,
    pub(crate) limits: PeerLimits,
}

impl AccessPolicy {
    /// These users and groups, with the usual limits.
    pub(crate) fn of(uids: Vec<u32>, gids: Vec<u32>) -> AccessPolicy {
        AccessPolicy {
            uids,
            gids,
            limits: PeerLimits::default(),
        }
    }

    pub(crate) fn is_open_to_others(&self) -> bool {
        !(self.uids.is_empty() && self.gids.is_empty())
    }

    /// Whether both admit the same users and groups.
    pub(crate) fn admits_the_same_as(&self, other: &AccessPolicy) -> bool {
        let are_equal = |a: &[u32], b: &[u32]| {
            a.iter().all(|id| b.contains(id)) && b.iter().all(|id| a.contains(id))
        };
        are_equal(&self.uids, &other.uids) && are_equal(&self.gids, &other.gids)
    }

    pub(crate) fn admits(&self, uid: u32, gid: u32) -> bool {
        is_admitted((uid, gid), &self.uids, &self.gids)
    }
}

/// A client, as its server sees it. The kernel reports everything but `device`.
#[derive(Debug, Clone)]
pub(crate) struct ClientInfo {
    /// Counted from 1 for each server, never used again.
    pub(crate) id: u64,
    pub(crate) uid: u32,
    /// As the client states it.
    pub(crate) device: Option<DeviceId>,
    pub(crate) process_id: ProcessId,
    pub(crate) process: Arc<Process>,
    /// The client's place in the limits. A handler that keeps anything for a client beyond the end
    /// of its session holds this as long, so that such sessions are limited, too.
    pub(crate) quota_permit: Arc<QuotaPermit>,
}

/// How a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disconnected {
    /// The client closed gracefully, or held nothing when its socket closed. Its process may live
    /// on, and its device work may still run.
    Closed,
    /// Proven by the client's lifeline: that process touches memory no more.
    ProcessDied,
}

/// A reply that a server sends.
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
            body: encode(body)?,
            fds,
        })
    }
}

/// Why a server refuses a request: a text for people. A result that programs must distinguish goes
/// into a reply.
#[derive(Debug)]
pub(crate) struct Rejection {
    pub(crate) text: String,
    /// This process lacks descriptors or memory at present.
    pub(crate) is_short: bool,
}

impl Rejection {
    pub(crate) fn new(text: impl Into<String>) -> Rejection {
        Rejection {
            text: text.into(),
            is_short: false,
        }
    }

    /// The message that refuses a client.
    fn refusal(&self) -> Message {
        match self.is_short {
            true => Message::NoRoom {
                text: message::text(&self.text),
            },
            false => acceptor::refusal(false, &self.text),
        }
    }
}

impl<E: std::error::Error + 'static> From<E> for Rejection {
    fn from(error: E) -> Rejection {
        let error: &(dyn std::error::Error + 'static) = &error;
        let is_short = match error.downcast_ref() {
            Some(&error) => is_shortage(error),
            None => error.downcast_ref().and_then(message::shortage).is_some(),
        };
        Rejection {
            text: error.to_string(),
            is_short,
        }
    }
}

/// A reply that a client has received.
#[derive(Debug)]
pub(crate) struct IncomingReply {
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<PeerFd>,
}

impl IncomingReply {
    /// Decodes the body, which must be a whole `T`, and takes the descriptors, which must be `N`.
    pub(crate) fn open<T: DeserializeOwned, const N: usize>(
        self,
        name: &str,
    ) -> Result<(T, [PeerFd; N])> {
        let found = self.fds.len();
        let wrong = |_| Error::protocol(name, "descriptors", found, N);
        let fds = self.fds.try_into().map_err(wrong)?;
        Ok((decode(&self.body, name)?, fds))
    }
}

/// The endpoint-specific part of a server. All calls but
/// [`on_server_tick`](RequestHandler::on_server_tick) come from the control thread (see
/// [`runs_on_reactor`](RequestHandler::runs_on_reactor)), one at a time for each server, and with
/// no lock of the server held. They may call the driver, and must not wait for another process.
pub(crate) trait RequestHandler: Send + Sync {
    /// A client connects. The reply goes with the admission. A handler must remember nothing of a
    /// client that it rejects.
    fn on_connect(
        &self,
        _server_core: &ServerCore,
        _client: &ClientInfo,
        _body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Ok(OutgoingReply::default())
    }

    /// A client sends a request.
    fn on_request(
        &self,
        _server_core: &ServerCore,
        _client: &ClientInfo,
        _body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Err(Rejection::new("it answers no requests"))
    }

    /// Whether a client sends memory of its own after its admission. The sockets of other servers
    /// let no descriptor in then.
    fn takes_memory(&self) -> bool {
        false
    }

    /// Whether a client sends such memory more than once.
    fn takes_memory_again(&self) -> bool {
        false
    }

    /// A client sends a request with memory of its own.
    fn on_memory(
        &self,
        _server_core: &ServerCore,
        _client: &ClientInfo,
        _body: &[u8],
        _memory: PeerFd,
    ) -> Result<OutgoingReply, Rejection> {
        Err(Rejection::new("it takes no memory"))
    }

    /// A client's socket has closed without a graceful close. The client is presumed dead, and may
    /// still touch its memory. True if it may still use something that the server gave it: it
    /// counts then, and is kept until its process is proven dead. If not, it is disconnected.
    fn on_suspect(&self, _server_core: &ServerCore, _client: &ClientInfo) -> bool {
        false
    }

    /// A client's process is proven dead, or [orphaned](peer::DeathEvidence::Orphaned): then a
    /// child that it forked may keep its device work running. Streams that wait for the client are
    /// to be rescued. Memory that its device may touch must not be reused before
    /// [`on_disconnect`](RequestHandler::on_disconnect).
    fn on_orphaned(&self, _server_core: &ServerCore, _client: &ClientInfo) {}

    /// A session is over. Called once for each admitted client, unless the server ends first.
    fn on_disconnect(
        &self,
        _server_core: &ServerCore,
        _client: &ClientInfo,
        _disconnected: Disconnected,
    ) {
    }

    /// A reply could not be sent. True if the handler has taken back what it gave: where this
    /// process lacks room for descriptors in flight, the request fails then, and the session goes
    /// on.
    fn take_back(&self, _client: &ClientInfo, _body: &[u8]) -> bool {
        false
    }

    /// Called every 200 ms on the reactor's thread, at the same time as the other calls. It must
    /// not call the driver, nor wait for a lock that is held across such a call.
    fn on_server_tick(&self, _server_core: &ServerCore, _now_ns: u64) {}

    /// Whether the reactor's thread may make these calls itself, which saves the switch to the
    /// control thread. Only for a handler that never calls the driver and takes no lock.
    fn runs_on_reactor(&self) -> bool {
        false
    }
}

/// Receives a session's notifications and its end. All calls come from the reactor's thread: they
/// must not call the driver, nor take a lock that is held across such a call.
pub(crate) trait SessionObserver: Send + Sync {
    /// The server's socket has closed; `graceful` after a graceful close. The server does no more;
    /// its device may.
    fn on_closed(&self, _graceful: bool) {}

    /// The server's process is proven dead, or [orphaned](peer::DeathEvidence::Orphaned): then a
    /// child that it forked may keep its device work running. Waits for the server are to be
    /// released, and nothing else.
    fn on_orphaned(&self) {}

    /// The server is proven dead: that process writes no more, so whatever waits for it is to be
    /// released. Comes after [`on_orphaned`](SessionObserver::on_orphaned), for words that were
    /// written in between.
    fn on_proven_dead(&self) {
        self.on_orphaned();
    }

    /// A reply came to a request after its caller had given up. Its contents count as received all
    /// the same.
    fn on_stale_reply(&self, _request: &[u8], _incoming: IncomingReply) {}

    /// The server has sent a notification.
    fn on_notification(&self, _incoming: IncomingReply) {}
}

/// The name and kind of a server to connect to.
#[derive(Debug, Clone)]
pub(crate) struct Address<'a> {
    pub(crate) domain: &'a Domain,
    pub(crate) name: &'a EndpointName,
    pub(crate) kind: Kind,
}

/// Encodes a message as bytes.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let bytes = postcard::to_stdvec(message)
        .map_err(|e| Error::argument("message", e, "what postcard can write"))?;
    check_length(&bytes)?;
    Ok(bytes)
}

fn check_length(body: &[u8]) -> Result<()> {
    if body.len() > BODY_BYTES_MAX {
        let found = format!("{} bytes", body.len());
        let allowed = format!("up to {BODY_BYTES_MAX}");
        return Err(Error::argument("message", found, allowed));
    }
    Ok(())
}

/// Decodes a message that takes up all bytes.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8], name: &str) -> Result<T> {
    match postcard::take_from_bytes::<T>(bytes) {
        Ok((message, [])) => Ok(message),
        _ => {
            let found = format!("{} garbled bytes", bytes.len());
            let allowed = "a message of this kind";
            Err(Error::protocol(name, "message", found, allowed))
        }
    }
}
