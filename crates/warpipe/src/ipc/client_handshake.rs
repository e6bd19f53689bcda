//! The connecting end's side of a handshake, with a server of sessions or a publisher.
//!
//! One timeout covers all of it: the connection, the `Hello`, and every answer that the handshake
//! waits for.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::message::{self, Message, Received};
use super::peer::Peer;
use super::{Address, Kind};
use crate::backend::DeviceId;
use crate::backoff::Backoff;
use crate::error::{Error, HandshakeFault, NameFault, Result};
use crate::runtime::closer::{PeerFd, PeerSocket};
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::Reactor;
use crate::wait::{SLICE, Wait};

/// How long an answer is polled for before the thread sleeps: a running server answers before this
/// thread could fall asleep and be woken.
const SPIN: Duration = Duration::from_micros(200);

/// A message of the server, with its descriptors.
pub(crate) type Answer = (Message, Vec<PeerFd>);

/// The time that a handshake has left, counted while this process runs, unless it is cancelled.
#[derive(Debug)]
pub(crate) struct HandshakeLimit<'w> {
    clock: Uptime,
    timeout: Duration,
    /// Over once it is cancelled.
    cancellation: Wait<'w>,
    /// The limit of the wait that may be cancelled.
    waited: Duration,
}

impl<'w> HandshakeLimit<'w> {
    /// A limit that counts from now, and that `wait`'s cancellation ends, too.
    pub(crate) fn new(timeout: Duration, wait: &Wait<'w>) -> HandshakeLimit<'w> {
        HandshakeLimit {
            clock: Uptime::default(),
            timeout,
            cancellation: wait.cancellable_within(Duration::MAX),
            waited: wait.limit(),
        }
    }

    /// A limit of so much time alone.
    pub(crate) fn of(timeout: Duration) -> HandshakeLimit<'w> {
        HandshakeLimit::new(timeout, &Wait::at_most(timeout))
    }

    pub(crate) fn left(&self) -> Duration {
        match self.cancellation.is_over() {
            true => Duration::ZERO,
            false => self.timeout.saturating_sub(self.clock.ran()),
        }
    }

    /// The error of a handshake with the server `name` that this has ended.
    pub(crate) fn error(&self, name: &str) -> Error {
        match self.cancellation.is_over() {
            true => Error::timeout(format!("an answer of {name:?}"), self.waited),
            false => Error::handshake(name, HandshakeFault::Silent(self.timeout)),
        }
    }
}

/// A connection with a server that has been screened and has not admitted this end yet.
#[derive(Debug)]
pub(crate) struct ClientHandshake {
    pub(crate) socket: Arc<PeerSocket>,
    pub(crate) peer: Arc<Peer>,
    pub(crate) name: String,
    pub(crate) kind: Kind,
}

impl ClientHandshake {
    /// Connects to a server of sessions and sends the client's `Hello`. `waits` for room in the
    /// server's backlog.
    pub(crate) fn begin(
        at: &Address<'_>,
        device: Option<DeviceId>,
        body: &[u8],
        limit: &HandshakeLimit<'_>,
        waits: bool,
    ) -> Result<ClientHandshake> {
        let socket = (at.domain).connect(at.name, at.kind, waits.then_some(limit))?;
        let handshake = ClientHandshake::new(at, socket)?;
        handshake.hello(device, body, limit)?;
        Ok(handshake)
    }

    /// Checks that the connected server belongs to the domain's owner.
    pub(crate) fn new(at: &Address<'_>, socket: PeerSocket) -> Result<ClientHandshake> {
        let (name, owner) = (at.name.to_string(), at.domain.owner());
        // It watches the peer. That it cannot start is a shortage of this process, no peer's fault.
        let _reactor = Reactor::of_process()?;
        let peer = Peer::of(socket.as_fd(), &name)?;
        if peer.uid != owner {
            let text = format!("uid {} listens in a domain of uid {owner}", peer.uid);
            return Err(Error::denied(name, text));
        }
        Ok(ClientHandshake {
            socket: Arc::new(socket),
            peer: Arc::new(peer),
            name,
            kind: at.kind,
        })
    }

    /// Sends this end's first message.
    pub(crate) fn hello(
        &self,
        device: Option<DeviceId>,
        body: &[u8],
        limit: &HandshakeLimit<'_>,
    ) -> Result<()> {
        let hello = Message::Hello {
            device,
            kind: self.kind,
            body: body.to_vec(),
        };
        send_first(self.socket.as_fd(), &hello, limit).map_err(|error| self.unsent(error))
    }

    /// Sends a later message. If the server has closed, its answer that says why can still be read.
    pub(crate) fn send(&self, message: &Message) -> Result<()> {
        match message::send(self.socket.as_fd(), message, &[]) {
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(error) => Err(self.unsent(error)),
        }
    }

    fn unsent(&self, error: Errno) -> Error {
        let context = format!("the handshake with {:?}", self.name);
        Error::os("sendmsg", context, error)
    }

    /// The server's next message; `None` while there is none. One that ends the handshake is an
    /// error.
    pub(crate) fn receive(&self) -> Result<Option<Answer>> {
        let (message, fds) = match message::receive(self.socket.as_fd(), &self.name)? {
            Received::Nothing => return Ok(None),
            Received::End => return Err(self.fault(HandshakeFault::Closed)),
            Received::Message(message, fds) => (message, fds),
        };
        let name = self.name.clone();
        Err(match message {
            Message::Close(_) => self.fault(HandshakeFault::Closed),
            Message::OtherKind { found } => Error::Name(NameFault::OtherKind {
                name,
                wanted: self.kind,
                found: found.to_string(),
            }),
            Message::Full { limit, max } => self.fault(HandshakeFault::Full { limit, max }),
            Message::NoRoom { text } => self.fault(HandshakeFault::NoRoom(text)),
            Message::Refused { denied: true, text } => Error::denied(name, text),
            Message::Refused { text, .. } => self.fault(HandshakeFault::Refused(text)),
            message => return Ok(Some((message, fds))),
        })
    }

    /// Waits for the server's next message.
    pub(crate) fn wait(&self, limit: &HandshakeLimit<'_>) -> Result<Answer> {
        let start = Instant::now();
        loop {
            // First: a server that goes on sending does not hold this end up either.
            let left = limit.left();
            if left.is_zero() {
                return Err(limit.error(&self.name));
            }
            if let Some(received) = self.receive()? {
                return Ok(received);
            }
            if start.elapsed() > SPIN {
                message::wait_readable(self.socket.as_fd(), left.min(SLICE));
            }
        }
    }

    /// Takes the server's lifeline off the descriptors of its first message. From here on its death
    /// is watched for.
    pub(crate) fn adopt_lifeline(&self, fds: &mut Vec<PeerFd>) -> Result<()> {
        message::take_lifeline(fds)
            .and_then(|lifeline| self.peer.adopt(lifeline))
            .map_err(|fault| self.fault(fault))
    }

    pub(crate) fn fault(&self, fault: HandshakeFault) -> Error {
        Error::handshake(&self.name, fault)
    }
}

/// Sends the first message of a connection. The listener may let no descriptors in before it has
/// checked the peer (see
/// [`Listener::set_refusing`](crate::runtime::closer::Listener::set_refusing)). So the message is
/// sent again until the listener lets it in, replies, or `limit` is over.
fn send_first(
    socket: BorrowedFd<'_>,
    message: &Message,
    limit: &HandshakeLimit<'_>,
) -> std::result::Result<(), Errno> {
    let mut backoff = Backoff::default();
    loop {
        match message::send(socket, message, &[]) {
            Err(Errno::PERM)
                if !limit.left().is_zero() && !message::wait_readable(socket, Duration::ZERO) =>
            {
                backoff.pause()
            }
            // The refusal that explains the error may be waiting to be read.
            Err(Errno::PIPE | Errno::CONNRESET | Errno::PERM) => return Ok(()),
            other => return other,
        }
    }
}

impl AsFd for ClientHandshake {
    /// Readable once the server has answered.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ipc::domain::{Domain, EndpointName};
    use crate::runtime::reactor::TICK;

    #[test]
    fn time_that_a_handshake_spent_to_connect_is_not_there_to_wait_for_an_answer() {
        let folder = format!("warpipe-handshake-limit-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::new("a").unwrap();
        let claim = domain.claim(&name, false).unwrap();
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Publisher,
        };
        let limit = HandshakeLimit::of(2 * TICK);
        while !limit.left().is_zero() {
            std::thread::yield_now();
        }
        let socket = domain
            .connect(&name, Kind::Publisher, Some(&limit))
            .unwrap();
        let handshake = ClientHandshake::new(&at, socket).unwrap();
        handshake.hello(None, &[], &limit).unwrap();
        // An answer that is there is too late, so nothing waits for one.
        let server = rustix::net::accept(claim.listener()).unwrap();
        message::send(server.as_fd(), &Message::Attached, &[]).unwrap();
        let late = handshake.wait(&limit).unwrap_err();
        assert!(
            matches!(late, Error::Handshake { fault: HandshakeFault::Silent(limit), .. } if limit == 2 * TICK),
            "{late}"
        );
        drop(claim);
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn a_server_that_goes_on_sending_holds_no_handshake_beyond_its_limit() {
        let folder = format!("warpipe-handshake-endless-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::new("a").unwrap();
        let claim = domain.claim(&name, false).unwrap();
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Publisher,
        };
        let limit = HandshakeLimit::of(2 * TICK);
        let socket = domain
            .connect(&name, Kind::Publisher, Some(&limit))
            .unwrap();
        let server = rustix::net::accept(claim.listener()).unwrap();
        let handshake = ClientHandshake::new(&at, socket).unwrap();
        let start = Instant::now();
        let end = loop {
            // One message is always there.
            message::send(server.as_fd(), &Message::Attached, &[]).unwrap();
            match handshake.wait(&limit) {
                Ok(_) => assert!(start.elapsed() < 100 * TICK, "it goes on"),
                Err(end) => break end,
            }
        };
        assert!(
            matches!(
                end,
                Error::Handshake {
                    fault: HandshakeFault::Silent(_),
                    ..
                }
            ),
            "{end}"
        );
        drop(claim);
        let _ = std::fs::remove_dir_all(folder);
    }
}
