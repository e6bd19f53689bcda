//! The listening end of a name: accepts connections and takes each through its handshake.
//!
//! A peer is screened by the kernel's credentials before a byte is read, then sends its `Hello`
//! with its lifeline, and is counted against the limits. Until then the connection is pending: few
//! are, and each for a limited time. Then it goes to the [`ConnectionOwner`], a server of sessions
//! or a publisher. The acceptor's events come on its owner's thread, and only the tick comes from
//! another one. No call of the owner is made under the acceptor's lock.
//!
//! A peer for which this process has no descriptors or memory is refused ([`Message::NoRoom`]): it
//! is accepted in the place of one in [`reserve`] to say so.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::connection::Connection;
use super::domain::{FilesSeen, NameClaim};
use super::limits::{ConnectionQuota, QuotaPermit, eviction_candidate};
use super::message::{self, Message, Received};
use super::peer::Peer;
use super::{AccessPolicy, Kind};
use crate::backend::DeviceId;
use crate::debug::opaque_debug;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::fork::lifeline::Lifeline;
use crate::mutex::LockUnpoisoned;
use crate::os;
use crate::runtime::closer::PeerSocket;
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, Watch, catch_panic};
use crate::runtime::reserve;
use crate::trace::{self, TraceEvent};

/// The most connections without a `Hello` so far.
const PENDING_MAX: usize = 64;

/// The most connections accepted before other descriptors are served.
const BATCH_MAX: usize = 16;

/// How many ticks pass between two looks at the files of the name.
const TICKS_PER_LOOK: u64 = 5;

/// The listener's tag. Pending connections have their numbers, from 1.
const LISTENER: u64 = 0;

/// The endpoint that gets the connections.
pub(crate) trait ConnectionOwner: EventSource {
    /// Takes a connection after its peer has sent its `Hello`. Its descriptor is not watched.
    fn on_connection(&self, connection: Connection, hello: Hello);
}

/// A peer's first message, which has named the endpoint's kind.
#[derive(Debug)]
pub(crate) struct Hello {
    /// As the peer states it.
    pub(crate) device: Option<DeviceId>,
    pub(crate) body: Vec<u8>,
}

/// How an acceptor presents its endpoint.
#[derive(Debug)]
pub(crate) struct AcceptorOptions {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) access_policy: AccessPolicy,
    /// How long a connection may be pending, counted only while this process runs.
    pub(crate) handshake_timeout: Duration,
    pub(crate) runs_on_control_thread: bool,
}

/// See the [module](self).
pub(crate) struct Acceptor {
    me: Weak<Acceptor>,
    options: AcceptorOptions,
    owner: Weak<dyn ConnectionOwner>,
    reactor: Arc<Reactor>,
    quota: ConnectionQuota,
    next_id: AtomicU64,
    state: Mutex<AcceptorState>,
    claim: NameClaim,
    ticks: AtomicU64,
    /// The control thread has been asked to look at the files of the name, and is not done.
    is_look_requested: AtomicBool,
}

#[derive(Default)]
struct AcceptorState {
    is_closed: bool,
    /// `None` while this process is out of descriptors: the next tick watches the listener again.
    listener: Option<Registration>,
    pending: HashMap<u64, PendingConnection>,
}

/// A connection without a `Hello` so far.
struct PendingConnection {
    /// Declared first: the registration ends before the socket is closed.
    registration: Registration,
    clock: Uptime,
    peer: Peer,
    socket: Arc<PeerSocket>,
}

opaque_debug!(Acceptor { options });

impl Acceptor {
    /// An acceptor of this claim's connections, from [`listen`](Self::listen) on.
    pub(crate) fn new(
        claim: NameClaim,
        options: AcceptorOptions,
        reactor: &Arc<Reactor>,
        owner: Weak<dyn ConnectionOwner>,
    ) -> Arc<Acceptor> {
        trace::emit(|| TraceEvent::EndpointOpened(options.name.clone(), options.kind.to_string()));
        Arc::new_cyclic(|me| Acceptor {
            me: me.clone(),
            quota: ConnectionQuota::new(options.access_policy.limits),
            options,
            owner,
            reactor: reactor.clone(),
            next_id: AtomicU64::new(1),
            state: Mutex::default(),
            claim,
            ticks: AtomicU64::new(1),
            is_look_requested: AtomicBool::new(false),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.options.name
    }

    pub(crate) fn kind(&self) -> Kind {
        self.options.kind
    }

    /// The identity of the domain that the name is in.
    pub(crate) fn domain_identity(&self) -> [u64; 2] {
        self.claim.domain_identity()
    }

    /// Starts to accept connections. The owner calls [`tick`](Self::tick) from then on.
    pub(crate) fn listen(&self) -> Result<()> {
        let mut state = self.state.locked();
        if state.is_closed || state.listener.is_some() {
            return Ok(());
        }
        let (listener, me) = (self.claim.listener(), self.event_source());
        state.listener = Some(self.reactor.register(
            Watch::Readable(listener.as_fd()),
            &me,
            LISTENER,
        )?);
        Ok(())
    }

    /// Has the control thread look whether the name's files are there: a file system may take long.
    fn request_look(&self) {
        if self.is_look_requested.swap(true, Ordering::Relaxed) {
            return;
        }
        let me = self.me.clone();
        self.reactor.run_on_control_thread(Box::new(move || {
            if let Some(me) = me.upgrade() {
                me.look();
                me.is_look_requested.store(false, Ordering::Relaxed);
            }
        }));
    }

    /// Looks whether others have removed the name's files. What they lead to is put back.
    fn look(&self) {
        // Kept until it is not watched any more.
        let before = self.claim.listener();
        match self.claim.look() {
            FilesSeen::Unchanged => {}
            FilesSeen::Vanished => {
                trace::emit(|| TraceEvent::NameVanished(self.name().to_string()))
            }
            FilesSeen::PutBack => {
                let watch = self.state.locked().listener.take();
                drop(watch);
                // If this process is out of descriptors, the next tick tries again.
                let _ = self.listen();
                trace::emit(|| TraceEvent::NameRestored(self.name().to_string()));
            }
        }
        drop(before);
    }

    /// Withdraws the name and closes the pending connections.
    pub(crate) fn close(&self) {
        self.claim.withdraw();
        let mut state = self.state.locked();
        if !std::mem::replace(&mut state.is_closed, true) {
            let kind = self.kind();
            trace::emit(|| TraceEvent::EndpointClosed(self.name().to_string(), kind.to_string()));
        }
        let ended = (state.listener.take(), std::mem::take(&mut state.pending));
        drop(state);
        drop(ended);
    }

    /// Called at each tick: closes the connections that have been pending for too long.
    pub(crate) fn tick(&self) {
        self.quota.release_closed();
        self.claim.listener().update_refusing();
        if self
            .ticks
            .fetch_add(1, Ordering::Relaxed)
            .is_multiple_of(TICKS_PER_LOOK)
        {
            self.request_look();
        }
        // If this process is still out of descriptors, the next tick tries again.
        let _ = self.listen();
        let limit = self.options.handshake_timeout;
        let mut state = self.state.locked();
        state
            .pending
            .retain(|_, pending| pending.clock.ran() <= limit);
    }

    fn event_source(&self) -> Weak<dyn EventSource> {
        self.me.clone()
    }

    /// Accepts connections, a limited number at a time. Where there is not even one descriptor in
    /// reserve, they wait in the backlog. The listener stays readable, so it is not watched until
    /// the next tick.
    fn accept(&self) -> Next {
        let listener = self.claim.listener();
        for _ in 0..BATCH_MAX {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match CloseOnForkFd::open(|| accept_with(&listener, flags)) {
                Ok(socket) => self.begin(Arc::new(PeerSocket::from(socket))),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Next::Keep,
                Err(_) if reserve::give(1) => {}
                Err(_) => {
                    self.state.locked().listener = None;
                    return Next::Stop;
                }
            }
        }
        Next::Keep
    }

    /// Most peers have sent their `Hello` by now: to read it at once saves two thread switches.
    fn begin(&self, socket: Arc<PeerSocket>) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        match self.screen(id, &socket) {
            Ok(pending) => _ = self.advance(id, pending),
            Err(refusal) => send_refusal(self.name(), &socket, &refusal),
        }
    }

    /// Checks the peer's credentials before a byte is read.
    fn screen(&self, id: u64, socket: &Arc<PeerSocket>) -> Result<PendingConnection, Message> {
        let credentials = os::peer_credentials(socket.as_fd()).map_err(|error| {
            let context = format!("a connection to {:?}", self.name());
            refusal_for(&Error::os("getsockopt(SO_PEERCRED)", context, error))
        })?;
        let (uid, gid) = (credentials.uid, credentials.gid);
        let is_admitted = || self.options.access_policy.admits(uid, gid);
        let listener = self.claim.listener();
        listener
            .screen(socket.as_fd(), uid, is_admitted)
            .map_err(|(denied, reason)| refusal(denied, reason))?;
        let failed = |error| refusal_for(&error);
        let peer = self.open_peer(credentials, socket).map_err(failed)?;
        let (fd, me) = (Watch::Readable(socket.as_fd()), self.event_source());
        let registration = self.reactor.register(fd, &me, id).map_err(failed)?;
        Ok(PendingConnection {
            registration,
            clock: Uptime::default(),
            peer,
            socket: socket.clone(),
        })
    }

    /// Reads a connection's `Hello` if it is there, and hands the connection to the owner, or
    /// refuses it.
    fn advance(&self, id: u64, pending: PendingConnection) -> Next {
        let read = self.read_hello(&pending);
        if let Ok(None) = read {
            self.keep_pending(id, pending);
            return Next::Keep;
        }
        let PendingConnection {
            registration,
            peer,
            socket,
            ..
        } = pending;
        // It ends before the socket is closed, and before the owner gets the socket.
        drop(registration);
        match read {
            Ok(Some((hello, quota_permit))) => {
                let connection = Connection {
                    id,
                    peer,
                    socket,
                    quota_permit,
                };
                self.offer(hello, connection);
            }
            Ok(None) | Err(None) => {}
            Err(Some(refusal)) => send_refusal(self.name(), &socket, &refusal),
        }
        Next::Stop
    }

    fn keep_pending(&self, id: u64, connection: PendingConnection) {
        let mut state = self.state.locked();
        if state.is_closed {
            return;
        }
        let evicted = if state.pending.len() >= PENDING_MAX {
            // Evicts the oldest connection, so idle peers cannot exhaust the limit.
            let crowd = state.pending.iter().map(|(id, it)| (*id, it.peer.uid));
            eviction_candidate(crowd).and_then(|id| state.pending.remove(&id))
        } else {
            None
        };
        state.pending.insert(id, connection);
        drop(state);
        if let Some(evicted) = evicted {
            let reason = "too many connect and say nothing; try again";
            send_refusal(self.name(), &evicted.socket, &refusal(false, reason));
        }
    }

    /// Reads the peer's `Hello`, if it is there. An error is the answer to a peer that is refused,
    /// and nothing for one that has closed.
    fn read_hello(
        &self,
        pending: &PendingConnection,
    ) -> Result<Option<(Hello, Arc<QuotaPermit>)>, Option<Message>> {
        let (peer, socket) = (&pending.peer, &pending.socket);
        let refused = |reason: String| Some(refusal(false, reason));
        let (message, mut fds) = match message::receive(socket.as_fd(), self.name()) {
            Ok(Received::Nothing) => return Ok(None),
            Ok(Received::End) => return Err(None),
            Ok(Received::Message(message, fds)) => (message, fds),
            Err(error) => return Err(Some(refusal_for(&error))),
        };
        let Message::Hello { device, kind, body } = message else {
            return Err(refused(message.unexpected("Hello").to_string()));
        };
        if kind != self.kind() {
            return Err(Some(Message::OtherKind { found: self.kind() }));
        }
        os::let_descriptors_in(socket.as_fd(), false);
        message::take_lifeline(&mut fds)
            .and_then(|lifeline| peer.adopt(lifeline))
            .map_err(|fault| refused(fault.to_string()))?;
        let quota_permit = self
            .quota
            .take(peer, socket)
            .map_err(|(limit, max)| Some(Message::Full { limit, max }))?;
        Ok(Some((Hello { device, body }, Arc::new(quota_permit))))
    }

    /// Opens all that an admission needs beside the descriptors of the `Hello`: the peer's pidfd,
    /// and this process's own lifeline, which the peer's is compared with.
    fn open_peer(&self, credentials: libc::ucred, socket: &PeerSocket) -> Result<Peer> {
        let context = || {
            format!(
                "this process's lifeline, for a connection to {:?}",
                self.name()
            )
        };
        let _lifeline =
            Lifeline::of_process().map_err(|error| Error::os("pipe2", context(), error))?;
        Peer::with_credentials(socket.as_fd(), credentials, self.name())
    }

    /// Offers a connection to the owner.
    ///
    /// A panic of the owner's (its policy is the user's code) refuses this client alone: in the
    /// listener's event it would end the listening.
    fn offer(&self, hello: Hello, connection: Connection) {
        if let Some(owner) = self.owner.upgrade() {
            let _panicked = catch_panic(|| owner.on_connection(connection, hello));
            self.reactor.drop_on_reaper(owner);
        }
    }
}

impl EventSource for Acceptor {
    fn runs_on_control_thread(&self) -> bool {
        self.options.runs_on_control_thread
    }

    fn on_ready(&self, tag: u64) -> Next {
        if self.state.locked().is_closed {
            return Next::Stop;
        }
        match tag {
            LISTENER => {
                let next = self.accept();
                // If this process is still out of descriptors, the next tick tries again.
                let _ = reserve::fill();
                next
            }
            id => {
                // Taken out while it is read: a tick may not end it meanwhile.
                let pending = self.state.locked().pending.remove(&id);
                pending.map_or(Next::Stop, |pending| self.advance(id, pending))
            }
        }
    }
}

/// The message that refuses a peer; `denied` if it is refused whenever it asks.
pub(crate) fn refusal(denied: bool, reason: impl ToString) -> Message {
    Message::Refused {
        denied,
        text: message::text(reason),
    }
}

/// The message that refuses a peer because of an error.
pub(crate) fn refusal_for(error: &Error) -> Message {
    match error {
        error if message::shortage(error).is_some() => Message::NoRoom {
            text: message::text(error),
        },
        Error::Handshake { fault, .. } => refusal(false, fault),
        error => refusal(false, error),
    }
}

/// Sends a peer of `name` the last message of its connection, which says why it is refused.
pub(crate) fn send_refusal(name: &str, socket: &PeerSocket, message: &Message) {
    let _ = message::send(socket.as_fd(), message, &[]);
    trace::emit(|| {
        let peer = os::peer_credentials(socket.as_fd()).ok();
        let (uid, pid) = peer.map_or((u32::MAX, 0), |peer| (peer.uid, peer.pid));
        let reason = match message {
            Message::Refused { text, .. } | Message::NoRoom { text } => text.clone(),
            Message::OtherKind { found } => format!("it asks for another kind than {found}"),
            Message::Full { limit, max } => format!("it is full: {max} {}", limit.text()),
            other => format!("{other:?}"),
        };
        TraceEvent::ConnectionRefused(name.to_string(), uid, pid, reason)
    });
}

#[cfg(test)]
mod tests;
