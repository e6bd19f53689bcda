//! A client's connection until the server has admitted it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use super::ClientSession;
use super::state::SessionState;
use crate::backend::DeviceId;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::OwnerProcess;
use crate::ipc::message::{self, Message, Received};
use crate::ipc::peer::Peer;
use crate::ipc::{Address, IncomingReply, Kind, NOTIFICATION, REPLY_TIMEOUT};
use crate::runtime::closer::PeerSocket;
use crate::runtime::reactor::{Reactor, new_generation};

/// A connection that the server has not admitted yet.
#[derive(Debug)]
pub(crate) struct PendingSession {
    socket: PeerSocket,
    peer: Peer,
    name: String,
    kind: Kind,
    reactor: Arc<Reactor>,
}

/// The server's first reply, which admits the client.
#[derive(Debug)]
pub(crate) struct Admitted {
    generation: [u8; 16],
    incoming: IncomingReply,
}

impl PendingSession {
    /// Connects and sends the client's `OpenSession`. Waits only while the server's backlog is
    /// full, at most `patience`.
    pub(crate) fn begin(
        at: &Address<'_>,
        device: Option<DeviceId>,
        body: &[u8],
        patience: Duration,
    ) -> Result<PendingSession> {
        let (name, kind) = (at.name.to_string(), at.kind);
        let reactor = Reactor::of_process()?;
        let absent = |was_there| Error::NoOwner {
            kind,
            name: name.clone(),
            was_there,
        };
        let socket = at.domain.connect_or(at.name, patience, absent)?;
        let peer = Peer::of(socket.as_fd(), &name)?;
        if peer.uid != at.domain.owner() {
            let detail = format!(
                "uid {} listens in a domain of uid {}",
                peer.uid,
                at.domain.owner()
            );
            return Err(Error::AccessDenied { name, detail });
        }
        let hello = Message::OpenSession {
            generation: new_generation(),
            device,
            kind,
            body: body.to_vec(),
        };
        message::send_first(socket.as_fd(), &hello, REPLY_TIMEOUT)
            .map_err(|error| Error::os("sendmsg", format!("the handshake with {name:?}"), error))?;
        Ok(PendingSession {
            socket,
            peer,
            name,
            kind,
            reactor,
        })
    }

    /// Reads the server's reply; `None` while there is none.
    pub(crate) fn hear(&self) -> Result<Option<Admitted>> {
        let name = &self.name;
        match message::receive(self.socket.as_fd(), name)? {
            Received::Message(
                Message::SessionOpened {
                    generation, body, ..
                },
                mut fds,
            ) => {
                let lifeline = message::take_lifeline(&mut fds);
                lifeline
                    .and_then(|lifeline| self.peer.adopt(lifeline))
                    .map_err(|fault| self.fault(fault))?;
                Ok(Some(Admitted {
                    generation,
                    incoming: IncomingReply { body, fds },
                }))
            }
            Received::Message(Message::OtherKind { found }, _) => Err(Error::OtherKind {
                name: name.clone(),
                wanted: self.kind,
                found: found.to_string(),
            }),
            Received::Message(Message::Refused { denied: true, text }, _) => {
                Err(Error::AccessDenied {
                    name: name.clone(),
                    detail: text,
                })
            }
            Received::Message(Message::Full { limit, max }, _) => {
                Err(self.fault(HandshakeFault::Full { limit, max }))
            }
            Received::Message(Message::Refused { text, .. }, _) => Err(Error::Refused {
                name: name.clone(),
                text,
            }),
            Received::Message(Message::Close(_), _) | Received::End => {
                Err(self.fault(HandshakeFault::Closed))
            }
            Received::Message(other, _) => Err(self.fault(other.unexpected("SessionOpened"))),
            Received::Nothing => Ok(None),
        }
    }

    pub(crate) fn enter(self, admitted: Admitted) -> (ClientSession, IncomingReply) {
        let inner = Arc::new(SessionState {
            registrations: Mutex::default(),
            owner_process: OwnerProcess::current(),
            name: self.name,
            kind: self.kind,
            peer: self.peer,
            generation: admitted.generation,
            socket: self.socket,
            observer: Mutex::new(None),
            is_graceful: AtomicBool::new(false),
            rejection: OnceLock::new(),
            is_dead: AtomicBool::new(false),
            next_serial: AtomicU64::new(NOTIFICATION + 1),
            requests: Mutex::default(),
            replied: Condvar::new(),
            reactor: self.reactor,
        });
        (ClientSession { inner }, admitted.incoming)
    }

    /// The server's process, as the kernel reports it.
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    pub(super) fn fault(&self, fault: HandshakeFault) -> Error {
        Error::Handshake {
            name: self.name.clone(),
            fault,
        }
    }
}

impl AsFd for PendingSession {
    /// Readable once the server has replied.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
