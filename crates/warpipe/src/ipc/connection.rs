//! One connection: a socket, the peer at its other end, and the evidence of that peer's end.
//!
//! Acceptors begin connections; servers of sessions, sessions and both ends of a link go on with
//! them. The reactor reports each one's [`ConnectionEvent`]s, which [`dispatch`] gives to its
//! [`ConnectionUser`].

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::limits::QuotaPermit;
use super::message::{self, Received};
use super::peer::{DeathEvidence, Peer};
use crate::error::Result;
use crate::runtime::closer::PeerSocket;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, Watch};

/// The most messages that are read from one socket before others are served.
const BATCH_MAX: usize = 16;

/// How many batches are read from the socket of a suspect peer: at most a socket buffer full.
const FINAL_READS_MAX: usize = 64;

/// A connection with a peer that may connect and counts against the limits. The peer's death is
/// watched for.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Counted from 1 for each acceptor, never used again.
    pub(crate) id: u64,
    pub(crate) peer: Peer,
    pub(crate) socket: Arc<PeerSocket>,
    pub(crate) quota_permit: Arc<QuotaPermit>,
}

/// An event of a connection. Its tag at the reactor is the connection's number with this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionEvent {
    /// The socket is readable, or has ended.
    Message,
    /// The peer's process does no more, even if its socket stays open.
    Suspect,
    /// The process has been suspect for the orphan timeout, or is proven dead.
    Orphaned,
    /// That process touches memory no more.
    Proven,
}

impl ConnectionEvent {
    const ALL: [ConnectionEvent; 4] = [
        ConnectionEvent::Message,
        ConnectionEvent::Suspect,
        ConnectionEvent::Orphaned,
        ConnectionEvent::Proven,
    ];

    pub(crate) fn tag(self, id: u64) -> u64 {
        id << 2 | self as u64
    }
}

/// Registers for a connection's messages, and for the evidence of the peer's death.
pub(crate) fn watch(
    reactor: &Arc<Reactor>,
    (socket, peer): (BorrowedFd<'_>, &Peer),
    user: &Weak<dyn EventSource>,
    id: u64,
    orphan_timeout: Duration,
) -> Result<[Registration; 4]> {
    use ConnectionEvent::{Message, Orphaned, Proven, Suspect};
    let orphaned = DeathEvidence::Orphaned(orphan_timeout);
    Ok([
        reactor.register(Watch::Readable(socket), user, Message.tag(id))?,
        peer.watch(DeathEvidence::Suspect, user, Suspect.tag(id))?,
        peer.watch(orphaned, user, Orphaned.tag(id))?,
        peer.watch(DeathEvidence::Proven, user, Proven.tag(id))?,
    ])
}

/// What an owner of connections does at each event.
pub(crate) trait ConnectionUser {
    /// Reads messages that are there ([`read`]).
    fn on_message(&self, id: u64) -> Next;

    /// The peer sends no more: its socket has ended, or its process is suspect and all of its
    /// messages have been read.
    fn on_close(&self, id: u64);

    /// The peer's process is orphaned. Streams that wait for it are to be rescued.
    fn on_orphaned(&self, _id: u64) {}

    /// The peer's process is proven dead.
    fn on_proven(&self, _id: u64) {}
}

/// Gives an event to its user.
pub(crate) fn dispatch(user: &impl ConnectionUser, tag: u64) -> Next {
    let id = tag >> 2;
    match ConnectionEvent::ALL[(tag & 3) as usize] {
        ConnectionEvent::Message => return user.on_message(id),
        ConnectionEvent::Suspect => {
            read_out(user, id);
            user.on_close(id);
        }
        ConnectionEvent::Orphaned => user.on_orphaned(id),
        ConnectionEvent::Proven => user.on_proven(id),
    }
    Next::Stop
}

/// Reads the last messages of a suspect peer, its graceful close for one: all of them are in the
/// socket by now, however late the socket's end comes.
pub(crate) fn read_out(user: &impl ConnectionUser, id: u64) {
    let mut reads = (0..FINAL_READS_MAX).map(|_| user.on_message(id));
    reads.find(|next| *next == Next::Stop);
}

/// Reads a batch of messages, as long as `take` says so.
pub(crate) fn read(
    socket: BorrowedFd<'_>,
    name: &str,
    mut take: impl FnMut(Result<Received>) -> Next,
) -> Next {
    for _ in 0..BATCH_MAX {
        let next = match message::receive(socket, name) {
            Ok(Received::Nothing) => return Next::Keep,
            received => take(received),
        };
        if next != Next::Keep {
            return next;
        }
    }
    Next::Keep
}
