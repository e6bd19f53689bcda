//! The server side of sessions: accepts connections, admits clients and answers their requests.
//!
//! A connection is handshaking, open, leaving or suspect. `on_disconnect` is called once for each
//! admitted client, unless the server ends first. No call of the handler is made under the server's
//! lock.

mod accept;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::io::Errno;

use super::{
    AccessPolicy, Address, ClientInfo, Disconnected, FDS_MAX, Kind, NOTIFICATION, OutgoingReply,
    Rejection, RequestHandler,
};
use crate::error::Result;
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::ipc::domain::NameClaim;
use crate::ipc::limits::{ConnectionQuota, QuotaPermit};
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::{Peer, Process};
use crate::runtime::closer::{PeerFd, PeerSocket};
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, new_generation};

/// How long a handshake may take, counted only while this process runs.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections accepted, and messages of one client answered, before other sockets are served.
const BATCH_MAX: usize = 16;

/// How many batches of [`BATCH_MAX`] messages are read from the socket of a suspect client.
const FINAL_READS_MAX: usize = 16;

const LISTENER: u64 = 0;
const SOCKET: u64 = 0;
const PROVEN: u64 = 1;
const SUSPECT: u64 = 2;
const ORPHANED: u64 = 3;

fn tag(id: u64, kind: u64) -> u64 {
    id << 2 | kind
}

/// Owns a name and answers its clients. Dropping it closes every session gracefully and releases
/// the name.
#[derive(Debug)]
pub(crate) struct IpcServer {
    server_core: Arc<ServerCore>,
}

impl IpcServer {
    /// Claims the name. `handler` is called from then on.
    pub(crate) fn open(
        at: &Address<'_>,
        access_policy: AccessPolicy,
        handler: Arc<dyn RequestHandler>,
    ) -> Result<IpcServer> {
        let reactor = Reactor::of_process()?;
        let claim = at
            .domain
            .claim(at.name, access_policy.is_open_to_others())?;
        let server_core = Arc::new_cyclic(|me: &Weak<ServerCore>| ServerCore {
            owner_process: OwnerProcess::current(),
            name: at.name.to_string(),
            kind: at.kind,
            generation: new_generation(),
            quota: ConnectionQuota::new(access_policy.limits),
            access_policy,
            handler,
            me: me.clone(),
            reactor: reactor.clone(),
            connections: Mutex::default(),
            next_id: AtomicU64::new(1),
            listener_registration: Mutex::new(None),
            is_listener_paused: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            claim,
        });
        server_core.listen()?;
        reactor.register_ticks(server_core.me.clone());
        Ok(IpcServer { server_core })
    }

    pub(crate) fn server_core(&self) -> &Arc<ServerCore> {
        &self.server_core
    }
}

impl Drop for IpcServer {
    fn drop(&mut self) {
        if self.server_core.owner_process.is_current() {
            self.server_core.close();
        } else {
            // In a forked child nothing of the server is to be closed.
            std::mem::forget(self.server_core.clone());
        }
    }
}

/// One connection.
struct Connection {
    /// Declared first: the registrations end before their descriptors are closed.
    registrations: Vec<Registration>,
    socket: Arc<PeerSocket>,
    peer: Arc<Peer>,
    phase: ConnectionPhase,
    /// Held from the `OpenSession` message on, and never read.
    quota_permit: Option<QuotaPermit>,
}

enum ConnectionPhase {
    /// The client has not sent `OpenSession`.
    Handshaking {
        clock: Uptime,
    },
    Open(ClientInfo),
    /// The client has closed gracefully.
    Leaving(ClientInfo),
    /// The client's socket has closed without a graceful close.
    Suspect(ClientInfo),
}

/// The part of a server that it shares with the reactor and its handler's callers.
pub(crate) struct ServerCore {
    owner_process: OwnerProcess,
    name: String,
    kind: Kind,
    generation: [u8; 16],
    access_policy: AccessPolicy,
    handler: Arc<dyn RequestHandler>,
    me: Weak<ServerCore>,
    reactor: Arc<Reactor>,
    connections: Mutex<HashMap<u64, Connection>>,
    quota: ConnectionQuota,
    next_id: AtomicU64,
    listener_registration: Mutex<Option<Registration>>,
    /// This process is out of descriptors: the listener is not watched until the next tick.
    is_listener_paused: AtomicBool,
    is_closed: AtomicBool,
    claim: NameClaim,
}

impl std::fmt::Debug for ServerCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerCore")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

impl ServerCore {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The generation of this claim of the name.
    pub(crate) fn generation(&self) -> [u8; 16] {
        self.generation
    }

    pub(crate) fn reactor(&self) -> &Arc<Reactor> {
        &self.reactor
    }

    /// A client's process, for other modules to watch.
    pub(crate) fn process_of(&self, id: u64) -> Option<Arc<Process>> {
        self.lock().get(&id)?.peer.process().cloned()
    }

    /// Sends a notification to a client, without waiting. False if the client is not connected, or
    /// does not read its socket.
    pub(crate) fn tell(&self, id: u64, reply: OutgoingReply) -> bool {
        let socket = match self.lock().get(&id) {
            Some(Connection {
                phase: ConnectionPhase::Open(_),
                socket,
                ..
            }) => socket.clone(),
            _ => return false,
        };
        let OutgoingReply { body, fds } = reply;
        send_with(
            &socket,
            &Message::Reply {
                serial: NOTIFICATION,
                body,
                fds: fds.len().min(FDS_MAX) as u8,
            },
            &fds,
        )
        .is_ok()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Connection>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn socket_of(&self, id: u64) -> Option<Arc<PeerSocket>> {
        self.lock()
            .get(&id)
            .map(|connection| connection.socket.clone())
    }

    fn watched(&self) -> Weak<dyn EventSource> {
        self.me.clone()
    }

    fn listen(&self) -> Result<()> {
        let watch =
            self.reactor
                .register(self.claim.listener.as_fd(), &self.watched(), LISTENER)?;
        *self
            .listener_registration
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(watch);
        Ok(())
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.claim.withdraw();
        *self
            .listener_registration
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = None;
        let connections = std::mem::take(&mut *self.lock());
        for connection in connections.values() {
            let _ = message::send(
                connection.socket.as_fd(),
                &Message::Close(CloseReason::Closed),
                &[],
            );
        }
    }

    fn register_socket(&self, id: u64) {
        let Some(socket) = self.socket_of(id) else {
            return;
        };
        match self
            .reactor
            .register(socket.as_fd(), &self.watched(), tag(id, SOCKET))
        {
            Ok(watch) => {
                // If the connection has been removed, the registration ends here, before the socket
                // does.
                if let Some(connection) = self.lock().get_mut(&id) {
                    connection.registrations.push(watch);
                }
            }
            Err(error) => {
                refuse(socket.as_fd(), false, error);
                self.on_end(id);
            }
        }
    }

    /// Reads and handles the messages in a client's socket.
    fn on_socket(&self, id: u64) -> Next {
        for _ in 0..BATCH_MAX {
            let Some(socket) = self.socket_of(id) else {
                return Next::Stop;
            };
            match message::receive(socket.as_fd(), &self.name) {
                Ok(Received::Nothing) => return Next::Keep,
                Ok(Received::Message(message, fds)) => {
                    if let Err(reason) = self.on_message(id, &socket, message, fds) {
                        refuse(socket.as_fd(), false, reason);
                        return self.on_end(id);
                    }
                }
                Ok(Received::End) => return self.on_end(id),
                Err(error) => {
                    refuse(socket.as_fd(), false, error);
                    return self.on_end(id);
                }
            }
        }
        Next::Keep
    }

    /// Handles one message. An error ends the session.
    fn on_message(
        &self,
        id: u64,
        socket: &PeerSocket,
        message: Message,
        mut fds: Vec<PeerFd>,
    ) -> Result<(), Rejection> {
        let client = match self.lock().get(&id).map(|connection| &connection.phase) {
            Some(ConnectionPhase::Open(client)) => Some(client.clone()),
            _ => None,
        };
        match (message, client) {
            (
                Message::OpenSession {
                    device, kind, body, ..
                },
                None,
            ) => {
                crate::os::let_descriptors_in(socket.as_fd(), false);
                let lifeline = message::take_lifeline(&mut fds)?;
                self.admit(id, socket, device, kind, &body, lifeline)
            }
            (Message::Hello { kind, .. }, None) => Err(self.is_other(socket, kind)),
            (Message::Request { serial, body }, Some(client)) => {
                let sent = match self.handler.on_request(self, &client, &body) {
                    Ok(OutgoingReply { body, fds }) => {
                        let message = Message::Reply {
                            serial,
                            body,
                            fds: fds.len().min(FDS_MAX) as u8,
                        };
                        send_with(socket, &message, &fds)
                    }
                    Err(Rejection(text)) => send_with(
                        socket,
                        &Message::RequestFailed {
                            serial,
                            text: message::text(text),
                        },
                        &[],
                    ),
                };
                sent.map_err(|error| Rejection(format!("the answer could not be sent: {error}")))
            }
            (Message::Close(_), Some(client)) => {
                self.lock().get_mut(&id).into_iter().for_each(|connection| {
                    connection.phase = ConnectionPhase::Leaving(client.clone())
                });
                Ok(())
            }
            (other, None) => Err(Rejection(other.unexpected("OpenSession").to_string())),
            (other, Some(_)) => Err(Rejection(other.unexpected("Request or Close").to_string())),
        }
    }

    /// Ends a connection: the client has closed its socket, or the server ends it.
    fn on_end(&self, id: u64) -> Next {
        let open = match self.lock().get(&id).map(|connection| &connection.phase) {
            Some(ConnectionPhase::Open(client)) => Some(client.clone()),
            _ => None,
        };
        // Without the lock, which every tick takes: the handler takes a lock of its own.
        let holds = open.is_some_and(|client| self.handler.holds_anything(&client));
        let mut connections = self.lock();
        let Some(mut connection) = connections.remove(&id) else {
            return Next::Stop;
        };
        match connection.phase {
            ConnectionPhase::Handshaking { .. } => {}
            ConnectionPhase::Leaving(ref client) => {
                drop(connections);
                self.handler
                    .on_disconnect(self, client, Disconnected::Closed);
            }
            ConnectionPhase::Suspect(_) => drop(connections.insert(id, connection)),
            ConnectionPhase::Open(ref client) => {
                let client = client.clone();
                if !holds {
                    drop(connections);
                    self.handler
                        .on_disconnect(self, &client, Disconnected::Closed);
                    return Next::Stop;
                }
                connection.phase = ConnectionPhase::Suspect(client.clone());
                let _ = rustix::net::shutdown(&*connection.socket, rustix::net::Shutdown::Both);
                connections.insert(id, connection);
                drop(connections);
                self.handler.on_suspect(self, &client);
            }
        }
        Next::Stop
    }

    /// The client's process does nothing more, even if its socket stays open. Messages that it sent
    /// before are still in the socket.
    fn on_suspect(&self, id: u64) -> Next {
        if (0..FINAL_READS_MAX).all(|_| self.on_socket(id) == Next::Keep) {
            self.on_end(id);
        }
        Next::Stop
    }

    /// The client's process has exited, and its device work may run for long. The handler rescues
    /// streams that wait for it.
    fn on_orphaned(&self, id: u64) -> Next {
        let client = match self.lock().get(&id).map(|connection| &connection.phase) {
            Some(
                ConnectionPhase::Open(client)
                | ConnectionPhase::Suspect(client)
                | ConnectionPhase::Leaving(client),
            ) => client.clone(),
            _ => return Next::Stop,
        };
        self.handler.on_orphaned(self, &client);
        Next::Stop
    }

    fn on_death(&self, id: u64) -> Next {
        let Some(connection) = self.lock().remove(&id) else {
            return Next::Stop;
        };
        match &connection.phase {
            ConnectionPhase::Handshaking { .. } => {}
            ConnectionPhase::Open(client)
            | ConnectionPhase::Suspect(client)
            | ConnectionPhase::Leaving(client) => {
                self.handler
                    .on_disconnect(self, client, Disconnected::ProcessDied);
            }
        }
        Next::Stop
    }
}

impl EventSource for ServerCore {
    fn runs_on_control_thread(&self) -> bool {
        !self.handler.runs_on_reactor()
    }

    fn on_ready(&self, tag: u64) -> Next {
        if !self.owner_process.is_current() || self.is_closed.load(Ordering::SeqCst) {
            return Next::Stop;
        }
        match (tag, tag >> 2, tag & 3) {
            (LISTENER, ..) => self.accept(),
            (_, id, PROVEN) => self.on_death(id),
            (_, id, SUSPECT) => self.on_suspect(id),
            (_, id, ORPHANED) => self.on_orphaned(id),
            (_, id, _) => self.on_socket(id),
        }
    }

    fn on_tick(&self, now_ns: u64) {
        if self.is_closed.load(Ordering::SeqCst) {
            return;
        }
        if self.is_listener_paused.swap(false, Ordering::Relaxed) && self.listen().is_err() {
            self.is_listener_paused.store(true, Ordering::Relaxed);
        }
        let is_late = |connection: &Connection| match &connection.phase {
            ConnectionPhase::Handshaking { clock } => clock.ran() > HANDSHAKE_TIMEOUT,
            _ => false,
        };
        self.lock().retain(|_, connection| !is_late(connection));
        self.quota.release_closed();
        self.claim.listener.look();
        self.handler.on_server_tick(self, now_ns);
    }
}

fn send_with(
    socket: &PeerSocket,
    message: &Message,
    fds: &[CloseOnForkFd],
) -> std::result::Result<(), Errno> {
    if fds.len() > FDS_MAX {
        return Err(Errno::INVAL);
    }
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    message::send(socket.as_fd(), message, &borrowed)
}

fn refuse(socket: BorrowedFd<'_>, denied: bool, reason: impl Into<Reason>) {
    let _ = message::send(
        socket,
        &Message::Refused {
            denied,
            text: message::text(reason.into().0),
        },
        &[],
    );
}

/// The text of a refusal.
struct Reason(String);

impl From<&str> for Reason {
    fn from(text: &str) -> Reason {
        Reason(text.to_owned())
    }
}

impl From<String> for Reason {
    fn from(text: String) -> Reason {
        Reason(text)
    }
}

impl From<Rejection> for Reason {
    fn from(rejection: Rejection) -> Reason {
        Reason(rejection.0)
    }
}

impl From<crate::Error> for Reason {
    fn from(error: crate::Error) -> Reason {
        Reason(error.to_string())
    }
}

#[cfg(test)]
mod tests;
