//! A session until the server has admitted its client.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use super::ClientSession;
use super::state::SessionState;
use crate::backend::DeviceId;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::client_handshake::{ClientHandshake, HandshakeLimit};
use crate::ipc::message::Message;
use crate::ipc::{Address, IncomingReply, NOTIFICATION, REPLY_TIMEOUT};
use crate::runtime::closer::PeerFd;
use crate::runtime::reactor::Reactor;
use crate::wait::Wait;

/// A session that the server has not opened yet. Readable once the server has replied.
pub(crate) type PendingSession = ClientHandshake;

/// The server's first reply, which admits the client.
#[derive(Debug)]
pub(crate) struct Admitted {
    generation: [u8; 16],
    incoming: IncomingReply,
}

impl ClientHandshake {
    /// Connects and sends the client's `Hello`. The whole handshake takes at most
    /// [`REPLY_TIMEOUT`]; `waits` for room in the server's backlog.
    pub(crate) fn begin(
        at: &Address<'_>,
        device: Option<DeviceId>,
        body: &[u8],
        waits: bool,
    ) -> Result<PendingSession> {
        let limit = HandshakeLimit::new(REPLY_TIMEOUT);
        let room = waits.then_some(&limit);
        let socket = at.domain.connect(at.name, at.kind, room)?;
        let handshake = ClientHandshake::new(at, socket, limit)?;
        handshake.hello(device, body)?;
        Ok(handshake)
    }

    /// Reads the server's reply; `None` while there is none.
    pub(crate) fn poll(&self) -> Result<Option<Admitted>> {
        let answer = self.receive().map_err(refused)?;
        answer.map(|answer| self.admitted(answer)).transpose()
    }

    /// Waits for the server's reply, for as long as the handshake may take; `wait` may be cancelled.
    pub(super) fn wait_for_admission(&self, wait: &Wait<'_>) -> Result<Admitted> {
        let cancellation = wait.cancellable_within(Duration::MAX);
        match self.wait(|| cancellation.is_over()) {
            Err(_) if cancellation.is_over() => {
                Err(wait.timed_out(|| format!("an answer of {:?}", self.name)))
            }
            answer => self.admitted(answer.map_err(refused)?),
        }
    }

    fn admitted(&self, (message, mut fds): (Message, Vec<PeerFd>)) -> Result<Admitted> {
        let Message::SessionOpened {
            generation, body, ..
        } = message
        else {
            return Err(self.fault(message.unexpected("SessionOpened")));
        };
        self.adopt_lifeline(&mut fds)?;
        Ok(Admitted {
            generation,
            incoming: IncomingReply { body, fds },
        })
    }

    pub(crate) fn enter(self, admitted: Admitted) -> Result<(ClientSession, IncomingReply)> {
        let ClientHandshake {
            socket,
            peer,
            name,
            kind,
            ..
        } = self;
        let inner = Arc::new(SessionState {
            registrations: Mutex::default(),
            name,
            kind,
            peer,
            generation: admitted.generation,
            socket,
            observer: Mutex::new(None),
            cause: OnceLock::new(),
            is_dead: AtomicBool::new(false),
            next_serial: AtomicU64::new(NOTIFICATION + 1),
            requests: Mutex::default(),
            replied: Condvar::new(),
            reactor: Reactor::of_process()?,
        });
        let inner = LeakOnFork::new(inner);
        Ok((ClientSession { inner }, admitted.incoming))
    }
}

/// The error for a client: a handler's refusal is an answer to what the client asks for.
fn refused(error: Error) -> Error {
    match error {
        Error::Handshake {
            name,
            fault: HandshakeFault::Refused(text),
        } => Error::Refused { name, text },
        other => other,
    }
}
