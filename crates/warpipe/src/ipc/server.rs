//! The server's side: who is here, and what they say.

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
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::ipc::domain::NameClaim;
use crate::ipc::limits::{ConnectionQuota, QuotaPermit, eviction_candidate};
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::{DeathEvidence, ORPHAN_TIMEOUT, Peer, Process};
use crate::runtime::closer::{PeerFd, PeerSocket};
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, new_generation};

/// Connections that have not said what they come for.
const HANDSHAKES_MAX: usize = 64;

/// How long they may take, in time in which this process ran.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections accepted, and messages of one client answered, before others have their turn.
const BATCH_MAX: usize = 16;

/// How often the socket of one that does no more is read, [`BATCH_MAX`] messages each time.
const FINAL_READS_MAX: usize = 16;

const LISTENER: u64 = 0;
const SOCKET: u64 = 0;
const PROVEN: u64 = 1;
const SUSPECT: u64 = 2;
const ORPHANED: u64 = 3;

fn tag(id: u64, kind: u64) -> u64 {
    id << 2 | kind
}

/// Holds a name and what is kept under it; dropped, it says goodbye to all and gives the name up.
#[derive(Debug)]
pub(crate) struct IpcServer {
    server_core: Arc<ServerCore>,
}

impl IpcServer {
    /// Takes the name. `handler` is called from then on.
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
            // A forked child: nothing of it is ours to close.
            std::mem::forget(self.server_core.clone());
        }
    }
}

/// One connection.
struct Connection {
    /// Declared first: they end before their descriptors are closed.
    registrations: Vec<Registration>,
    socket: Arc<PeerSocket>,
    peer: Arc<Peer>,
    phase: ConnectionPhase,
    /// From its first words on: held, not used.
    quota_permit: Option<QuotaPermit>,
}

enum ConnectionPhase {
    /// It has not said what it comes for.
    Handshaking {
        clock: Uptime,
    },
    Open(ClientInfo),
    /// It has said goodbye.
    Leaving(ClientInfo),
    /// Its socket has closed without one.
    Suspect(ClientInfo),
}

/// A server's shared part.
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
    /// Out of descriptors: the listener is not watched until the next tick.
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

    /// This incarnation of the name.
    pub(crate) fn generation(&self) -> [u8; 16] {
        self.generation
    }

    pub(crate) fn reactor(&self) -> &Arc<Reactor> {
        &self.reactor
    }

    /// A client's process, for others to watch.
    pub(crate) fn process_of(&self, id: u64) -> Option<Arc<Process>> {
        self.lock().get(&id)?.peer.process().cloned()
    }

    /// Tells a client something that it has not asked for, without waiting. False if it is not there, or does not read
    /// what it is sent.
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

    fn accept(&self) -> Next {
        use rustix::net::{SocketFlags, accept_with};
        for _ in 0..BATCH_MAX {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match CloseOnForkFd::open(|| accept_with(&self.claim.listener, flags)) {
                Ok(socket) => self.begin_handshake(PeerSocket::from(socket)),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Next::Keep,
                Err(_) => {
                    self.is_listener_paused.store(true, Ordering::Relaxed);
                    return Next::Stop;
                }
            }
        }
        Next::Keep
    }

    /// Looks who is there before a byte is read.
    fn begin_handshake(&self, socket: PeerSocket) {
        let peer = match Peer::of(socket.as_fd(), &self.name) {
            Ok(peer) => peer,
            Err(error) => return refuse(socket.as_fd(), false, error),
        };
        if let Err((denied, reason)) = self.claim.listener.screen(socket.as_fd(), &peer, || {
            self.access_policy.admits(peer.uid, peer.gid)
        }) {
            return refuse(socket.as_fd(), denied, reason);
        }
        let mut connections = self.lock();
        let handshaking = connections.iter().filter(|(_, connection)| {
            matches!(connection.phase, ConnectionPhase::Handshaking { .. })
        });
        let handshaking: Vec<(u64, u32)> = handshaking
            .map(|(id, connection)| (*id, connection.peer.uid))
            .collect();
        if handshaking.len() >= HANDSHAKES_MAX {
            // Evicts the oldest connection without a message, so idle peers cannot exhaust the limit.
            let evicted = eviction_candidate(handshaking.into_iter())
                .and_then(|oldest| connections.remove(&oldest));
            evicted.into_iter().for_each(|evicted| {
                refuse(
                    evicted.socket.as_fd(),
                    false,
                    "too many connect and say nothing",
                )
            });
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let phase = ConnectionPhase::Handshaking {
            clock: Uptime::default(),
        };
        let (socket, peer) = (Arc::new(socket), Arc::new(peer));
        connections.insert(
            id,
            Connection {
                registrations: Vec::new(),
                socket,
                peer,
                phase,
                quota_permit: None,
            },
        );
        drop(connections);
        // Mostly it has said by now what it comes for: to hear that from the reactor would cost two threads' turns.
        if self.on_socket(id) == Next::Keep {
            self.register_socket(id);
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
                // If nobody is there any more it ends here, before the socket does.
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

    /// A client's socket speaks.
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

    /// An error ends the session.
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

    fn admit(
        &self,
        id: u64,
        socket: &PeerSocket,
        device: Option<crate::backend::DeviceId>,
        kind: Kind,
        body: &[u8],
        lifeline: [PeerFd; 2],
    ) -> Result<(), Rejection> {
        if kind != self.kind {
            return Err(self.is_other(socket, kind));
        }
        let Some(client) = self.adopt(id, device, lifeline)? else {
            return Ok(());
        };
        let reply = self.handler.on_connect(self, &client, body)?;
        // Present before it is told so: whatever happens from here, `on_disconnect` is due.
        if !self.mark_open(id, &client) {
            self.handler
                .on_disconnect(self, &client, Disconnected::Closed);
            return Ok(());
        }
        let fds = reply.fds.len().min(FDS_MAX) as u8;
        let message = Message::SessionOpened {
            generation: self.generation,
            body: reply.body,
            fds,
        };
        send_with(socket, &message, &reply.fds)
            .map_err(|error| Rejection(Error::os("sendmsg", "the admission", error).to_string()))
    }

    /// Tells one who took this endpoint for another kind.
    fn is_other(&self, socket: &PeerSocket, wanted: Kind) -> Rejection {
        let _ = message::send(
            socket.as_fd(),
            &Message::OtherKind { found: self.kind },
            &[],
        );
        Rejection(format!("it is a {}, not a {wanted}", self.kind))
    }

    /// False if it is there no more: it was evicted as an idle connection while it was being admitted.
    fn mark_open(&self, id: u64, client: &ClientInfo) -> bool {
        let mut connections = self.lock();
        let Some(connection) = connections.get_mut(&id) else {
            return false;
        };
        connection.phase = ConnectionPhase::Open(client.clone());
        true
    }

    /// Watches for the death of who comes in.
    fn adopt(
        &self,
        id: u64,
        device: Option<crate::backend::DeviceId>,
        lifeline: [PeerFd; 2],
    ) -> Result<Option<ClientInfo>, Rejection> {
        let Some(peer) = self
            .lock()
            .get(&id)
            .map(|connection| connection.peer.clone())
        else {
            return Ok(None);
        };
        // Without the lock, which every tick takes: it looks at what the client sent.
        peer.adopt(lifeline)?;
        let mut connections = self.lock();
        let Some(connection) = connections.get_mut(&id) else {
            return Ok(None);
        };
        match self.quota.take(&connection.peer, &connection.socket) {
            Ok(permit) => connection.quota_permit = Some(permit),
            Err((limit, max)) => {
                let full = HandshakeFault::Full { limit, max }.to_string();
                let _ = message::send(
                    connection.socket.as_fd(),
                    &Message::Full { limit, max },
                    &[],
                );
                return Err(Rejection(full));
            }
        }
        let signs = [
            (DeathEvidence::Suspect, SUSPECT),
            (DeathEvidence::Orphaned(ORPHAN_TIMEOUT), ORPHANED),
            (DeathEvidence::Proven, PROVEN),
        ];
        for (sign, kind) in signs {
            connection.registrations.push(connection.peer.watch(
                sign,
                &self.watched(),
                tag(id, kind),
            )?);
        }
        Ok(Some(ClientInfo {
            id,
            uid: connection.peer.uid,
            device,
        }))
    }

    /// A client's socket is at its end, or is put to it.
    fn on_end(&self, id: u64) -> Next {
        let open = match self.lock().get(&id).map(|connection| &connection.phase) {
            Some(ConnectionPhase::Open(client)) => Some(client.clone()),
            _ => None,
        };
        // Without the lock, which every tick takes: the answer takes a lock of the server's own.
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

    /// It does no more, whenever its socket comes to its end: what it said before is in there.
    fn on_suspect(&self, id: u64) -> Next {
        if (0..FINAL_READS_MAX).all(|_| self.on_socket(id) == Next::Keep) {
            self.on_end(id);
        }
        Next::Stop
    }

    /// It has exited, and its device work may go on for long: nobody's stream waits for it any more.
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
        let is_late = |connection: &Connection| matches!(&connection.phase, ConnectionPhase::Handshaking { clock } if clock.ran() > HANDSHAKE_TIMEOUT);
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

/// Whatever can be told of why.
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
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;
    use crate::ipc::ClientSession;
    use crate::ipc::domain::{Domain, EndpointName};

    /// Takes so long to admit a client that it is evicted as an idle connection.
    struct SlowHandler(Mutex<Sender<Disconnected>>);

    impl RequestHandler for SlowHandler {
        fn on_connect(
            &self,
            server_core: &ServerCore,
            _: &ClientInfo,
            _: &[u8],
        ) -> Result<OutgoingReply, Rejection> {
            // As a tick does.
            server_core.lock().retain(|_, connection| {
                !matches!(connection.phase, ConnectionPhase::Handshaking { .. })
            });
            Ok(OutgoingReply::default())
        }

        fn on_request(
            &self,
            _: &ServerCore,
            _: &ClientInfo,
            _: &[u8],
        ) -> Result<OutgoingReply, Rejection> {
            Ok(OutgoingReply::default())
        }

        fn holds_anything(&self, _: &ClientInfo) -> bool {
            true
        }

        fn on_disconnect(&self, _: &ServerCore, _: &ClientInfo, disconnected: Disconnected) {
            let _ = self.0.lock().unwrap().send(disconnected);
        }
    }

    #[test]
    fn one_who_has_not_spoken_is_not_given_up_because_this_process_stood_still() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-server-frozen-{}", std::process::id()));
        let (domain, name) = (
            Domain::at(&folder).unwrap(),
            EndpointName::new("kept").unwrap(),
        );
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let server = IpcServer::open(
            &at,
            AccessPolicy::default(),
            Arc::new(SlowHandler(Mutex::new(channel().0))),
        )
        .unwrap();
        let newcomer = domain.connect(&name, Duration::ZERO).unwrap();
        let server_core = server.server_core();
        let mut backoff = crate::stream::Backoff::default();
        while server_core.lock().is_empty() {
            backoff.pause();
        }
        for connection in server_core.lock().values() {
            let ConnectionPhase::Handshaking { clock } = &connection.phase else {
                panic!("it has said nothing")
            };
            clock.freeze(100 * HANDSHAKE_TIMEOUT);
        }
        // The other end stood still, too, and says what it comes for when both go on.
        server_core.on_tick(0);
        assert_eq!(server_core.lock().len(), 1);
        drop((newcomer, server));
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn a_client_evicted_while_it_is_admitted_is_disconnected_and_not_forgotten() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-server-mute-{}", std::process::id()));
        let (domain, name) = (
            Domain::at(&folder).unwrap(),
            EndpointName::new("kept").unwrap(),
        );
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let (saw, seen) = channel();
        let server = IpcServer::open(
            &at,
            AccessPolicy::default(),
            Arc::new(SlowHandler(Mutex::new(saw))),
        )
        .unwrap();
        let session = ClientSession::attach(&at, None, &[], Duration::ZERO);
        assert!(session.is_err(), "its session is over before it began");
        assert_eq!(
            seen.recv_timeout(Duration::from_secs(10)),
            Ok(Disconnected::Closed)
        );
        drop(server);
        let _ = std::fs::remove_dir_all(folder);
    }
}
