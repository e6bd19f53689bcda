//! Accepts connections and admits clients: credentials, limits, lifeline, then the handler's reply.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::{
    BATCH_MAX, Connection, ConnectionPhase, ORPHANED, PROVEN, SUSPECT, ServerCore, refuse,
    send_with, tag,
};
use crate::backend::DeviceId;
use crate::error::{Error, HandshakeFault};
use crate::fork::CloseOnForkFd;
use crate::ipc::limits::eviction_candidate;
use crate::ipc::message::{self, Message};
use crate::ipc::peer::{DeathEvidence, ORPHAN_TIMEOUT, Peer};
use crate::ipc::{ClientInfo, Disconnected, FDS_MAX, Kind, Rejection};
use crate::runtime::closer::{PeerFd, PeerSocket};
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::Next;

/// The most connections that are still in their handshake.
const HANDSHAKES_MAX: usize = 64;

impl ServerCore {
    pub(super) fn accept(&self) -> Next {
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

    /// Checks the peer's credentials before a byte is read.
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
            // Evicts the oldest connection without a message, so idle peers cannot exhaust the
            // limit.
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
        // The client has mostly sent its `OpenSession` by now. To read it here saves two thread
        // switches.
        if self.on_socket(id) == Next::Keep {
            self.register_socket(id);
        }
    }

    pub(super) fn admit(
        &self,
        id: u64,
        socket: &PeerSocket,
        device: Option<DeviceId>,
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
        // The connection is open before the client gets the reply. Whatever happens from here,
        // `on_disconnect` is due.
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

    /// Answers a client that expected another kind of endpoint.
    pub(super) fn is_other(&self, socket: &PeerSocket, wanted: Kind) -> Rejection {
        let _ = message::send(
            socket.as_fd(),
            &Message::OtherKind { found: self.kind },
            &[],
        );
        Rejection(format!("it is a {}, not a {wanted}", self.kind))
    }

    /// Marks the connection open. False if the connection is gone: it was evicted as idle while it
    /// was being admitted.
    fn mark_open(&self, id: u64, client: &ClientInfo) -> bool {
        let mut connections = self.lock();
        let Some(connection) = connections.get_mut(&id) else {
            return false;
        };
        connection.phase = ConnectionPhase::Open(client.clone());
        true
    }

    /// Starts to watch for the death of a new client's process.
    fn adopt(
        &self,
        id: u64,
        device: Option<DeviceId>,
        lifeline: [PeerFd; 2],
    ) -> Result<Option<ClientInfo>, Rejection> {
        let Some(peer) = self
            .lock()
            .get(&id)
            .map(|connection| connection.peer.clone())
        else {
            return Ok(None);
        };
        // Without the lock, which every tick takes: `adopt` inspects the descriptors that the
        // client sent.
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
}
