//! The server side of sessions: admits clients and answers their requests.
//!
//! The [acceptor](super::acceptor) takes a connection through its handshake, and the handler's
//! first reply admits its client. The connection is open then, later leaving or suspect.
//! `on_disconnect` is called once for each admitted client, unless the server ends first. No call
//! of the handler is made under the server's lock.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::acceptor::{
    self, Acceptor, AcceptorOptions, ConnectionOwner, Hello, Postponed, refusal,
};
use super::{
    AccessPolicy, Address, ClientInfo, Disconnected, FDS_MAX, NOTIFICATION, OutgoingReply,
    Rejection, RequestHandler, is_shortage,
};
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::HANDSHAKE_TIMEOUT;
use crate::ipc::limits::QuotaPermit;
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::{DeathEvidence, ORPHAN_TIMEOUT, Peer, Process};
use crate::os::let_descriptors_in;
use crate::runtime::closer::{PeerFd, PeerSocket};
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, new_generation};
use crate::statistics::EndpointRow;
use crate::trace::{self, TraceEvent};

/// Messages of one client answered before other sockets are served.
const BATCH_MAX: usize = 16;

/// How many batches of [`BATCH_MAX`] messages are read from the socket of a suspect client.
const FINAL_READS_MAX: usize = 16;

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
    server_core: LeakOnFork<Arc<ServerCore>>,
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
        let generation = new_generation();
        let server_core = Arc::new_cyclic(|me: &Weak<ServerCore>| ServerCore {
            generation,
            acceptor: Acceptor::new(
                claim,
                AcceptorOptions {
                    name: at.name.to_string(),
                    kind: at.kind,
                    access_policy,
                    handshake_timeout: HANDSHAKE_TIMEOUT,
                    runs_on_control_thread: !handler.runs_on_reactor(),
                },
                &reactor,
                me.clone(),
            ),
            handler,
            me: me.clone(),
            reactor: reactor.clone(),
            connections: Mutex::default(),
            is_closed: AtomicBool::new(false),
            row: EndpointRow::served(at, generation),
        });
        server_core.acceptor.listen()?;
        reactor.register_ticks(server_core.me.clone());
        Ok(IpcServer {
            server_core: LeakOnFork::new(server_core),
        })
    }

    pub(crate) fn server_core(&self) -> &Arc<ServerCore> {
        &self.server_core
    }

    /// Does what the drop does, for an owner that has to collect what its clients hold: after this
    /// no client is admitted, and none gets another answer, so that is all they have.
    pub(crate) fn close(&self) {
        if let Ok(server_core) = self.server_core.get() {
            server_core.close();
        }
    }
}

impl Drop for IpcServer {
    fn drop(&mut self) {
        self.close();
    }
}

/// The connection of one admitted client.
struct Connection {
    /// Declared first: the registrations end before their descriptors are closed.
    registrations: Vec<Registration>,
    socket: Arc<PeerSocket>,
    peer: Peer,
    client: ClientInfo,
    phase: ConnectionPhase,
    /// Held here until the session ends. A handler may hold it for longer.
    quota_permit: Arc<QuotaPermit>,
}

impl Connection {
    /// Ends the connection, also where a handler holds the permit, and with it the socket.
    fn end(self) {
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
    }

    /// The connection as it came.
    fn postponed(self, hello: Hello, reason: String) -> Box<Postponed> {
        let Connection {
            socket,
            peer,
            client: ClientInfo { id, .. },
            quota_permit,
            ..
        } = self;
        Box::new(Postponed {
            connection: acceptor::Connection {
                id,
                peer,
                socket,
                quota_permit,
            },
            hello,
            reason,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionPhase {
    /// The handler decides about the client.
    Admitting,
    Open,
    /// The client has closed gracefully.
    Leaving,
    /// The client's socket has closed without a graceful close.
    Suspect,
}

/// The part of a server that it shares with the reactor and its handler's callers.
pub(crate) struct ServerCore {
    generation: [u8; 16],
    acceptor: Arc<Acceptor>,
    handler: Arc<dyn RequestHandler>,
    me: Weak<ServerCore>,
    reactor: Arc<Reactor>,
    connections: Mutex<HashMap<u64, Connection>>,
    is_closed: AtomicBool,
    /// Its row of this process's statistics page.
    row: EndpointRow,
}

impl std::fmt::Debug for ServerCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerCore")
            .field("acceptor", &self.acceptor)
            .finish_non_exhaustive()
    }
}

impl ServerCore {
    pub(crate) fn name(&self) -> &str {
        self.acceptor.name()
    }

    /// The generation of this claim of the name.
    pub(crate) fn generation(&self) -> [u8; 16] {
        self.generation
    }

    /// How this process's statistics show the name.
    pub(crate) fn row(&self) -> &EndpointRow {
        &self.row
    }

    pub(crate) fn reactor(&self) -> &Arc<Reactor> {
        &self.reactor
    }

    /// A client's process, for other modules to watch.
    pub(crate) fn process_of(&self, id: u64) -> Option<Arc<Process>> {
        self.lock().get(&id)?.peer.process().cloned()
    }

    /// Whether two clients are known to be of one process.
    pub(crate) fn are_of_one_process(&self, one: u64, other: u64) -> bool {
        let connections = self.lock();
        let [one, other] = [one, other].map(|id| connections.get(&id));
        one.zip(other)
            .is_some_and(|(one, other)| one.peer.id == other.peer.id)
    }

    /// The place of a client in the limits. A handler that keeps anything for a client beyond the
    /// end of its session holds this as long, so that such sessions are limited, too.
    pub(crate) fn permit_of(&self, id: u64) -> Option<Arc<QuotaPermit>> {
        Some(self.lock().get(&id)?.quota_permit.clone())
    }

    /// Sends a notification to a client, without waiting. False if the client is not connected, or
    /// does not read its socket.
    pub(crate) fn tell(&self, id: u64, reply: OutgoingReply) -> bool {
        let socket = match self.lock().get(&id) {
            Some(Connection {
                phase: ConnectionPhase::Open,
                socket,
                ..
            }) => socket.clone(),
            _ => return false,
        };
        let OutgoingReply { body, fds } = reply;
        message::send_owned(
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

    /// Sends a notification without descriptors to every client, without waiting. A client that
    /// does not read its socket gets none.
    pub(crate) fn tell_all(&self, reply: &OutgoingReply) {
        let clients: Vec<u64> = self.lock().keys().copied().collect();
        for id in clients {
            let reply = OutgoingReply {
                body: reply.body.clone(),
                fds: vec![],
            };
            self.tell(id, reply);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Connection>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a connection with a reason.
    fn refuse(&self, socket: &PeerSocket, reason: impl ToString) {
        acceptor::say(self.name(), socket, &refusal(false, reason));
    }

    fn trace(&self, client: &ClientInfo, event: impl FnOnce(String, u64, u32) -> TraceEvent) {
        trace::emit(|| event(self.name().to_string(), client.id, client.uid));
    }

    fn socket_of(&self, id: u64) -> Option<Arc<PeerSocket>> {
        self.lock()
            .get(&id)
            .map(|connection| connection.socket.clone())
    }

    fn watched(&self) -> Weak<dyn EventSource> {
        self.me.clone()
    }

    fn close(&self) {
        let mut open = self.lock();
        // Under the lock: no connection is added from here on.
        self.is_closed.store(true, Ordering::SeqCst);
        let connections = std::mem::take(&mut *open);
        drop(open);
        self.acceptor.close();
        for connection in connections.into_values() {
            let _ = message::send(
                connection.socket.as_fd(),
                &Message::Close(CloseReason::Closed),
                &[],
            );
            connection.end();
        }
    }

    /// Starts to watch for the death of a new client's process, and asks the handler for the reply
    /// that admits the client.
    fn admit(&self, connection: acceptor::Connection, hello: Hello) -> Result<(), Box<Postponed>> {
        let acceptor::Connection {
            id,
            peer,
            socket,
            quota_permit,
        } = connection;
        let signs = [
            (DeathEvidence::Suspect, SUSPECT),
            (DeathEvidence::Orphaned(ORPHAN_TIMEOUT), ORPHANED),
            (DeathEvidence::Proven, PROVEN),
        ];
        let registrations: Result<Vec<Registration>> = signs
            .into_iter()
            .map(|(sign, kind)| peer.watch(sign, &self.watched(), tag(id, kind)))
            .collect();
        let client = ClientInfo {
            id,
            uid: peer.uid,
            device: hello.device,
        };
        let registrations = match registrations {
            Ok(registrations) => registrations,
            Err(error) => {
                self.refuse(&socket, error);
                return Ok(());
            }
        };
        let connection = Connection {
            registrations,
            socket: socket.clone(),
            peer,
            client: client.clone(),
            phase: ConnectionPhase::Admitting,
            quota_permit,
        };
        let mut connections = self.lock();
        if self.is_closed.load(Ordering::SeqCst) {
            // Closed since the connection came, and `close` has not seen it.
            drop(connections);
            let _ = message::send(socket.as_fd(), &Message::Close(CloseReason::Closed), &[]);
            return Ok(());
        }
        connections.insert(id, connection);
        drop(connections);
        let reply = match self.handler.on_connect(self, &client, &hello.body) {
            Ok(reply) => reply,
            Err(Rejection { text, is_short }) => {
                // `close` has taken it out, and tells the client so.
                let Some(rejected) = self.lock().remove(&id) else {
                    return Ok(());
                };
                if is_short {
                    return Err(rejected.postponed(hello, text));
                }
                self.refuse(&socket, text);
                return Ok(());
            }
        };
        if self.handler.takes_memory() {
            let_descriptors_in(socket.as_fd(), true);
        }
        let message = Message::SessionOpened {
            generation: self.generation,
            body: reply.body,
            fds: reply.fds.len().min(FDS_MAX) as u8,
        };
        // The connection is open before the client gets the reply, and under the lock the reply is
        // sent before any notification. Whatever happens from here, `on_disconnect` is due.
        let mut connections = self.lock();
        if let Some(connection) = connections.get_mut(&id) {
            connection.phase = ConnectionPhase::Open;
        }
        let sent = message::send_owned(&socket, &message, &reply.fds);
        let unsent = match sent {
            Err(error) if is_shortage(error) => connections.remove(&id),
            _ => None,
        };
        drop(connections);
        let reason = |error| Error::os("sendmsg", "the admission", error);
        match sent {
            Ok(()) => {
                self.trace(&client, |name, client, uid| TraceEvent::ClientConnected {
                    name,
                    client,
                    uid,
                });
                self.register_socket(id)
            }
            Err(error) => match unsent {
                Some(connection) => {
                    self.handler
                        .on_disconnect(self, &client, Disconnected::Closed);
                    return Err(connection.postponed(hello, reason(error).to_string()));
                }
                None => {
                    self.refuse(&socket, reason(error));
                    self.on_end(id);
                }
            },
        }
        Ok(())
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
                self.refuse(&socket, error);
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
            match message::receive(socket.as_fd(), self.name()) {
                Ok(Received::Nothing) => return Next::Keep,
                Ok(Received::Message(message, fds)) => {
                    if let Err(Rejection { text, .. }) = self.on_message(id, &socket, message, fds)
                    {
                        self.refuse(&socket, text);
                        return self.on_end(id);
                    }
                }
                Ok(Received::End) => return self.on_end(id),
                Err(error) => {
                    self.refuse(&socket, error);
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
        fds: Vec<PeerFd>,
    ) -> Result<(), Rejection> {
        let Some(client) = self.open_client(id) else {
            // `close` has taken it out, and tells the client so.
            if self.socket_of(id).is_none() {
                return Ok(());
            }
            return Err(Rejection::new("its session has ended"));
        };
        match message {
            Message::Request { serial, ref body } | Message::MemoryRequest { serial, ref body } => {
                let replied = match (&message, fds.into_iter().next()) {
                    (Message::MemoryRequest { .. }, Some(memory)) => {
                        let_descriptors_in(socket.as_fd(), false);
                        self.handler.on_memory(self, &client, body, memory)
                    }
                    _ => self.handler.on_request(self, &client, body),
                };
                let sent = match replied {
                    Ok(OutgoingReply { body, fds }) => {
                        let message = Message::Reply {
                            serial,
                            body,
                            fds: fds.len().min(FDS_MAX) as u8,
                        };
                        match message::send_owned(socket, &message, &fds) {
                            // Also where the session ends: the client never learns of the answer.
                            Err(error)
                                if let Message::Reply { body, .. } = &message
                                    && self.handler.take_back(&client, body)
                                    && is_shortage(error) =>
                            {
                                let text = Error::os("sendmsg", "an answer", error);
                                let text = message::text(text);
                                message::send_owned(
                                    socket,
                                    &Message::RequestFailed { serial, text },
                                    &[],
                                )
                            }
                            sent => sent,
                        }
                    }
                    Err(Rejection { text, .. }) => message::send_owned(
                        socket,
                        &Message::RequestFailed {
                            serial,
                            text: message::text(text),
                        },
                        &[],
                    ),
                };
                sent.map_err(|error| {
                    Rejection::new(format!("the answer could not be sent: {error}"))
                })
            }
            Message::Close(_) => {
                if let Some(connection) = self.lock().get_mut(&id) {
                    connection.phase = ConnectionPhase::Leaving;
                }
                Ok(())
            }
            other => Err(Rejection::new(
                other.unexpected("Request or Close").to_string(),
            )),
        }
    }

    /// The client of an open connection.
    fn open_client(&self, id: u64) -> Option<ClientInfo> {
        let connections = self.lock();
        let connection = connections.get(&id)?;
        (connection.phase == ConnectionPhase::Open).then(|| connection.client.clone())
    }

    /// Ends a connection: the client has closed its socket, or the server ends it.
    fn on_end(&self, id: u64) -> Next {
        // Without the lock, which every tick takes: the handler takes a lock of its own.
        let holds = self
            .open_client(id)
            .is_some_and(|client| self.handler.holds_anything(&client));
        let mut connections = self.lock();
        let Some(connection) = connections.get_mut(&id) else {
            return Next::Stop;
        };
        match connection.phase {
            ConnectionPhase::Admitting | ConnectionPhase::Suspect => {}
            ConnectionPhase::Open if holds => {
                connection.phase = ConnectionPhase::Suspect;
                let _ = rustix::net::shutdown(&*connection.socket, rustix::net::Shutdown::Both);
                let client = connection.client.clone();
                drop(connections);
                self.trace(&client, |name, client, uid| TraceEvent::ClientSuspect {
                    name,
                    client,
                    uid,
                });
                self.handler.on_suspect(self, &client);
            }
            ConnectionPhase::Open | ConnectionPhase::Leaving => {
                let ended = connections.remove(&id);
                drop(connections);
                if let Some(ended) = ended {
                    self.trace(&ended.client, |name, client, uid| {
                        TraceEvent::ClientClosed { name, client, uid }
                    });
                    self.handler
                        .on_disconnect(self, &ended.client, Disconnected::Closed);
                    ended.end();
                }
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
        let client = self
            .lock()
            .get(&id)
            .map(|connection| connection.client.clone());
        if let Some(client) = client {
            self.handler.on_orphaned(self, &client);
        }
        Next::Stop
    }

    fn on_death(&self, id: u64) -> Next {
        let dead = self.lock().remove(&id);
        if let Some(dead) = dead {
            self.trace(&dead.client, |name, client, uid| TraceEvent::ClientDied {
                name,
                client,
                uid,
            });
            self.handler
                .on_disconnect(self, &dead.client, Disconnected::ProcessDied);
            dead.end();
        }
        Next::Stop
    }
}

impl ConnectionOwner for ServerCore {
    fn on_connection(
        &self,
        connection: acceptor::Connection,
        hello: Hello,
    ) -> Result<(), Box<Postponed>> {
        if self.is_closed.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.admit(connection, hello)
    }
}

impl EventSource for ServerCore {
    fn runs_on_control_thread(&self) -> bool {
        !self.handler.runs_on_reactor()
    }

    fn on_ready(&self, tag: u64) -> Next {
        if self.is_closed.load(Ordering::SeqCst) {
            return Next::Stop;
        }
        match (tag >> 2, tag & 3) {
            (id, PROVEN) => self.on_death(id),
            (id, SUSPECT) => self.on_suspect(id),
            (id, ORPHANED) => self.on_orphaned(id),
            (id, _) => self.on_socket(id),
        }
    }

    fn on_tick(&self, now_ns: u64) {
        if self.is_closed.load(Ordering::SeqCst) {
            return;
        }
        self.acceptor.tick();
        self.handler.on_server_tick(self, now_ns);
        self.row.set_domain(self.acceptor.domain_identity());
        self.row.set_clients(self.lock().len(), now_ns);
    }
}

#[cfg(test)]
mod tests;
