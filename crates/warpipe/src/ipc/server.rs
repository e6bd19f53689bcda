//! The server side of sessions: admits clients and answers their requests.
//!
//! The [acceptor](super::acceptor) takes a connection through its handshake, and the handler's
//! first reply admits its client. The session is open then, later leaving or suspect.
//! `on_disconnect` is called once for each admitted client, unless the server ends first. No call
//! of the handler is made under the server's lock.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::acceptor::{self, Acceptor, AcceptorOptions, ConnectionOwner, Hello, refusal};
use super::connection::{self, Connection, ConnectionUser};
use super::{
    AccessPolicy, Address, ClientInfo, Disconnected, FDS_MAX, NOTIFICATION, OutgoingReply,
    Rejection, RequestHandler,
};
use rustix::io::Errno;

use crate::debug::opaque_debug;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::HANDSHAKE_TIMEOUT;
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::{ORPHAN_TIMEOUT, Peer};
use crate::mutex::LockUnpoisoned;
use crate::os::{is_shortage, let_descriptors_in};
use crate::runtime::closer::{PeerFd, PeerSocket};
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, new_generation};
use crate::statistics::EndpointRow;
use crate::trace::{self, TraceEvent};

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
            sessions: Mutex::default(),
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

/// The session of one client.
struct ServedSession {
    /// Declared first: the registrations end before their descriptors are closed.
    _registrations: [Registration; 4],
    socket: Arc<PeerSocket>,
    client: ClientInfo,
    /// The client's socket has closed without a graceful close.
    is_suspect: bool,
}

impl ServedSession {
    /// Ends the connection, also where a handler holds the permit, and with it the socket.
    fn end(&self) {
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
    }
}

/// The part of a server that it shares with the reactor and its handler's callers.
pub(crate) struct ServerCore {
    generation: [u8; 16],
    acceptor: Arc<Acceptor>,
    handler: Arc<dyn RequestHandler>,
    me: Weak<ServerCore>,
    reactor: Arc<Reactor>,
    sessions: Mutex<HashMap<u64, ServedSession>>,
    is_closed: AtomicBool,
    /// Its row of this process's statistics page.
    row: EndpointRow,
}

opaque_debug!(ServerCore { acceptor });

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

    /// The client of a session, also of a suspect one.
    pub(crate) fn client(&self, id: u64) -> Option<ClientInfo> {
        let sessions = self.sessions.locked();
        sessions.get(&id).map(|session| session.client.clone())
    }

    fn with_open<T>(&self, id: u64, look: impl FnOnce(&ServedSession) -> T) -> Option<T> {
        let sessions = self.sessions.locked();
        let session = sessions.get(&id);
        session.filter(|session| !session.is_suspect).map(look)
    }

    /// Sends a notification to a client, without waiting. False if the client is not connected, or
    /// does not read its socket.
    pub(crate) fn tell(&self, id: u64, reply: &OutgoingReply) -> bool {
        self.with_open(id, |session| session.socket.clone())
            .is_some_and(|socket| send_reply(&socket, NOTIFICATION, reply).is_ok())
    }

    /// Sends a notification without descriptors to every client, without waiting. A client that
    /// does not read its socket gets none.
    pub(crate) fn tell_all(&self, reply: &OutgoingReply) {
        let clients: Vec<u64> = self.sessions.locked().keys().copied().collect();
        for id in clients {
            self.tell(id, reply);
        }
    }

    /// Sends the last message of a connection.
    fn send_refusal(&self, socket: &PeerSocket, message: &Message) {
        acceptor::send_refusal(self.name(), socket, message);
    }

    fn trace(&self, client: &ClientInfo, event: impl FnOnce(String, u64, u32) -> TraceEvent) {
        trace::emit(|| event(self.name().to_string(), client.id, client.uid));
    }

    fn socket_of(&self, id: u64) -> Option<Arc<PeerSocket>> {
        let sessions = self.sessions.locked();
        sessions.get(&id).map(|session| session.socket.clone())
    }

    fn close(&self) {
        let mut open = self.sessions.locked();
        // Under the lock: no connection is added from here on.
        self.is_closed.store(true, Ordering::SeqCst);
        let sessions = std::mem::take(&mut *open);
        drop(open);
        self.acceptor.close();
        for session in sessions.into_values() {
            let close = Message::Close(CloseReason::Closed);
            let _ = message::send(session.socket.as_fd(), &close, &[]);
            session.end();
        }
    }

    /// Asks the handler for the reply that admits a new client, and opens its session with that.
    fn admit(&self, connection: Connection, hello: Hello) {
        let (peer, socket) = (connection.peer, connection.socket);
        let Some(process) = peer.process().cloned() else {
            return;
        };
        let client = ClientInfo {
            id: connection.id,
            uid: peer.uid,
            device: hello.device,
            process_id: peer.id,
            process,
            quota_permit: connection.quota_permit,
        };
        let refused = match self.handler.on_connect(self, &client, &hello.body) {
            Ok(reply) => match self.open(&client, (&socket, &peer), reply) {
                Ok(()) => return self.trace(&client, TraceEvent::ClientConnected),
                Err(rejection) => {
                    let closed = Disconnected::Closed;
                    self.handler.on_disconnect(self, &client, closed);
                    rejection
                }
            },
            Err(rejection) => rejection,
        };
        match self.is_closed.load(Ordering::SeqCst) {
            true => _ = message::send(socket.as_fd(), &Message::Close(CloseReason::Closed), &[]),
            false => self.send_refusal(&socket, &refused.refusal()),
        }
    }

    /// Starts to watch for the death of a client's process, and sends the client its first reply.
    /// Its events come on this thread, so none before that.
    fn open(
        &self,
        client: &ClientInfo,
        (socket, peer): (&Arc<PeerSocket>, &Peer),
        reply: OutgoingReply,
    ) -> Result<(), Rejection> {
        if self.handler.takes_memory() {
            let_descriptors_in(socket.as_fd(), true);
        }
        let me = self.me.clone() as Weak<dyn EventSource>;
        let ends = (socket.as_fd(), peer);
        let session = ServedSession {
            _registrations: connection::watch(&self.reactor, ends, &me, client.id, ORPHAN_TIMEOUT)?,
            socket: socket.clone(),
            client: client.clone(),
            is_suspect: false,
        };
        let message = Message::SessionOpened {
            generation: self.generation,
            body: reply.body,
            fds: reply.fds.len().min(FDS_MAX) as u8,
        };
        // Under the lock the reply is sent before any notification, and no client is added behind
        // `close`.
        let mut sessions = self.sessions.locked();
        if self.is_closed.load(Ordering::SeqCst) {
            return Err(Rejection::new("it is closed"));
        }
        message::send_owned(socket, &message, &reply.fds)
            .map_err(|error| Error::os("sendmsg", "the admission", error))?;
        sessions.insert(client.id, session);
        Ok(())
    }

    /// Handles one message. An error ends the session.
    fn on_request(
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
            Message::Request { serial, body } => {
                let replied = self.handler.on_request(self, &client, &body);
                self.reply(&client, socket, serial, replied)
            }
            Message::MemoryRequest { serial, body } => {
                let replied = match fds.into_iter().next() {
                    Some(memory) => {
                        if !self.handler.takes_memory_again() {
                            let_descriptors_in(socket.as_fd(), false);
                        }
                        self.handler.on_memory(self, &client, &body, memory)
                    }
                    None => Err(Rejection::new("no memory came with it")),
                };
                self.reply(&client, socket, serial, replied)
            }
            Message::Close(_) => {
                self.end_session(id, Disconnected::Closed);
                Ok(())
            }
            other => Err(Rejection::new(
                other.unexpected("Request or Close").to_string(),
            )),
        }
    }

    /// Answers a request.
    fn reply(
        &self,
        client: &ClientInfo,
        socket: &PeerSocket,
        serial: u64,
        replied: Result<OutgoingReply, Rejection>,
    ) -> Result<(), Rejection> {
        let fail = |text: String| {
            let text = message::text(text);
            message::send_owned(socket, &Message::RequestFailed { serial, text }, &[])
        };
        let sent = match replied {
            Ok(reply) => send_reply(socket, serial, &reply).or_else(|error| {
                // Also where the session ends: the client never learns of the answer.
                let is_back = self.handler.take_back(client, &reply.body);
                if is_back && is_shortage(error) {
                    fail(Error::os("sendmsg", "an answer", error).to_string())
                } else {
                    Err(error)
                }
            }),
            Err(Rejection { text, .. }) => fail(text),
        };
        sent.map_err(|error| Rejection::new(format!("the answer could not be sent: {error}")))
    }

    fn end_session(&self, id: u64, ended: Disconnected) {
        let Some(session) = self.sessions.locked().remove(&id) else {
            return;
        };
        let event = match ended {
            Disconnected::Closed => TraceEvent::ClientClosed,
            Disconnected::ProcessDied => TraceEvent::ClientDied,
        };
        self.trace(&session.client, event);
        self.handler.on_disconnect(self, &session.client, ended);
        session.end();
    }

    /// The client of an open session.
    fn open_client(&self, id: u64) -> Option<ClientInfo> {
        self.with_open(id, |session| session.client.clone())
    }
}

impl ConnectionUser for ServerCore {
    fn on_message(&self, id: u64) -> Next {
        let Some(socket) = self.socket_of(id) else {
            return Next::Stop;
        };
        connection::read(socket.as_fd(), self.name(), |received| {
            let end = match received {
                Ok(Received::Message(message, fds)) => {
                    match self.on_request(id, &socket, message, fds) {
                        Ok(()) if self.sessions.locked().contains_key(&id) => return Next::Keep,
                        Ok(()) => return Next::Stop,
                        Err(Rejection { text, .. }) => Some(text),
                    }
                }
                Ok(_) => None,
                Err(error) => Some(error.to_string()),
            };
            if let Some(reason) = end {
                self.send_refusal(&socket, &refusal(false, reason));
            }
            self.on_close(id);
            Next::Stop
        })
    }

    fn on_close(&self, id: u64) {
        let Some(client) = self.open_client(id) else {
            return;
        };
        // Without the lock, which every tick takes: the handler takes a lock of its own.
        if !self.handler.on_suspect(self, &client) {
            return self.end_session(id, Disconnected::Closed);
        }
        if let Some(session) = self.sessions.locked().get_mut(&id) {
            session.is_suspect = true;
            session.end();
        }
        self.trace(&client, TraceEvent::ClientSuspect);
    }

    fn on_orphaned(&self, id: u64) {
        if let Some(client) = self.client(id) {
            self.handler.on_orphaned(self, &client);
        }
    }

    fn on_proven(&self, id: u64) {
        self.end_session(id, Disconnected::ProcessDied);
    }
}

/// Sends a reply with its descriptors, without waiting.
fn send_reply(socket: &PeerSocket, serial: u64, reply: &OutgoingReply) -> Result<(), Errno> {
    let message = Message::Reply {
        serial,
        body: reply.body.clone(),
        fds: reply.fds.len().min(FDS_MAX) as u8,
    };
    message::send_owned(socket, &message, &reply.fds)
}

impl ConnectionOwner for ServerCore {
    fn on_connection(&self, connection: Connection, hello: Hello) {
        if !self.is_closed.load(Ordering::SeqCst) {
            self.admit(connection, hello);
        }
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
        connection::dispatch(self, tag)
    }

    fn on_tick(&self, now_ns: u64) {
        if self.is_closed.load(Ordering::SeqCst) {
            return;
        }
        self.acceptor.tick();
        self.handler.on_server_tick(self, now_ns);
        self.row.set_domain(self.acceptor.domain_identity());
        self.row.set_clients(self.sessions.locked().len(), now_ns);
    }
}

#[cfg(test)]
mod tests;
