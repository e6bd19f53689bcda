//! What both ends of a ring have: the connection with the process at the other end.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::atomic::AtomicU64;
use crate::ipc::PeerState;
use crate::ipc::message::{self, CloseReason, Message};
use crate::ipc::peer::Peer;
use crate::runtime::closer::PeerSocket;
use crate::runtime::doorbell::PeerDoorbell;
use crate::runtime::heartbeat::PeerHeartbeat;

/// One end of a ring. The ends of a link's two rings in one process share the connection.
#[derive(Debug)]
pub(super) struct LinkEnd {
    pub(super) peer: Arc<Peer>,
    pub(super) peer_doorbell: Arc<PeerDoorbell>,
    pub(super) peer_heartbeat: PeerHeartbeat,
    /// The ring is that of the replies: the subscriber sends, and the publisher receives.
    pub(super) is_of_replies: bool,
    pub(super) socket: Arc<PeerSocket>,
}

impl LinkEnd {
    /// The end of a link's first ring.
    pub(super) fn new(
        peer: Arc<Peer>,
        peer_doorbell: PeerDoorbell,
        socket: Arc<PeerSocket>,
    ) -> LinkEnd {
        LinkEnd {
            peer,
            peer_doorbell: Arc::new(peer_doorbell),
            peer_heartbeat: PeerHeartbeat::default(),
            is_of_replies: false,
            socket,
        }
    }

    /// This process's end of the link's other ring, that of the replies.
    pub(super) fn of_replies(&self) -> LinkEnd {
        LinkEnd {
            peer: self.peer.clone(),
            peer_doorbell: self.peer_doorbell.clone(),
            peer_heartbeat: PeerHeartbeat::default(),
            is_of_replies: true,
            socket: self.socket.clone(),
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Tells the peer that this ring closes.
    pub(super) fn say_close(&self, close_reason: CloseReason) {
        let close = match self.is_of_replies {
            true => Message::CloseReplies(close_reason),
            false => Message::Close(close_reason),
        };
        let _ = message::send(self.socket(), &close, &[]);
    }

    /// Why the peer closes this ring; another message is returned.
    pub(super) fn closed_by(&self, message: Message) -> Result<CloseReason, Message> {
        match (message, self.is_of_replies) {
            (Message::Close(reason), false) | (Message::CloseReplies(reason), true) => Ok(reason),
            (other, _) => Err(other),
        }
    }

    /// Called with each tick: writes this end's heartbeat, and checks the peer's.
    pub(super) fn beat(&self, now_ns: u64, own: &AtomicU64, peers: &AtomicU64) {
        own.store(now_ns, Relaxed);
        self.peer_heartbeat.tick(peers.load(Relaxed));
    }

    /// The peer's state; `ended` if this ring has ended.
    pub(super) fn peer_state(&self, ended: Option<PeerState>) -> PeerState {
        match ended {
            _ if self.peer.is_proven_dead() => PeerState::Dead,
            Some(ended) => ended,
            None if self.peer_heartbeat.is_stalled() => PeerState::Stalled,
            None => PeerState::Alive,
        }
    }
}
