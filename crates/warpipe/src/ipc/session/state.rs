//! The state of an admitted session: its open requests, and the messages that the reactor's thread
//! reads for them.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use rustix::io::Errno;

use crate::debug::opaque_debug;
use crate::error::{Error, Result};
use crate::ipc::client_handshake::ClientHandshake;
use crate::ipc::connection::{self, ConnectionUser};
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::Peer;
use crate::ipc::{IncomingReply, Kind, NOTIFICATION, SessionObserver};
use crate::mutex::LockUnpoisoned;
use crate::runtime::closer::PeerSocket;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration};
use crate::trace::{self, TraceEvent};
use crate::wait::Wait;

/// The most requests of one session that the server has not answered.
pub(super) const REQUESTS_MAX: usize = 64;

/// The longest sleep between two checks while a client waits for its server. A notification of the
/// domain or of the server wakes the client earlier.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(50);

pub(super) struct SessionState {
    /// Declared first: the registrations end before their descriptors are closed.
    pub(super) registrations: Mutex<Vec<Registration>>,
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) peer: Arc<Peer>,
    pub(super) generation: [u8; 16],
    pub(super) socket: Arc<PeerSocket>,
    pub(super) observer: Mutex<Option<Arc<dyn SessionObserver>>>,
    /// Why the session is over, unless the server has ended without a word.
    pub(super) cause: OnceLock<EndCause>,
    pub(super) is_dead: AtomicBool,
    pub(super) next_serial: AtomicU64,
    pub(super) requests: Mutex<PendingRequests>,
    pub(super) replied: Condvar,
    pub(super) reactor: Arc<Reactor>,
}

/// Why a session is over.
pub(super) enum EndCause {
    /// The server has closed it gracefully.
    Closed,
    /// The server has ended it, and says why.
    Rejected(String),
    /// This process had no descriptor, or no memory, for what the server sent.
    NoRoom(Errno),
}

#[derive(Default)]
pub(super) struct PendingRequests {
    /// By serial number.
    pub(super) open: HashMap<u64, PendingRequest>,
    /// No more replies will come.
    pub(super) is_over: bool,
    /// The session itself, once it has been dropped with requests that are not answered.
    pub(super) dropped: Option<Arc<SessionState>>,
}

impl PendingRequests {
    fn take_dropped_if(
        &mut self,
        is_due: impl FnOnce(&HashMap<u64, PendingRequest>) -> bool,
    ) -> Option<Arc<SessionState>> {
        self.dropped.take_if(|_| is_due(&self.open))
    }
}

/// The state of one request.
pub(super) enum PendingRequest {
    Waiting,
    Replied(Result<IncomingReply>),
    /// The caller has given up. The request counts until its reply comes, which goes to the
    /// observer. Holds the request's body.
    Abandoned(Vec<u8>),
}

opaque_debug!(SessionState { name, kind });

impl SessionState {
    /// The session of a client that the server has admitted.
    pub(super) fn new(handshake: ClientHandshake, generation: [u8; 16]) -> Result<SessionState> {
        let ClientHandshake {
            socket,
            peer,
            name,
            kind,
            ..
        } = handshake;
        Ok(SessionState {
            registrations: Mutex::default(),
            name,
            kind,
            peer,
            generation,
            socket,
            observer: Mutex::default(),
            cause: OnceLock::new(),
            is_dead: AtomicBool::new(false),
            next_serial: AtomicU64::new(NOTIFICATION + 1),
            requests: Mutex::default(),
            replied: Condvar::new(),
            reactor: Reactor::of_process()?,
        })
    }

    /// The error that says why this session is over.
    pub(super) fn owner_gone(&self) -> Error {
        match self.cause.get() {
            Some(EndCause::Rejected(text)) => {
                return Error::refused(&self.name, text);
            }
            Some(EndCause::NoRoom(code)) => {
                let context = format!("a message of {:?}, which ended the session", self.name);
                return Error::os("recvmsg", context, *code);
            }
            Some(EndCause::Closed) | None => {}
        }
        let graceful = self.is_graceful();
        Error::peer_gone(self.kind, self.name.clone(), self.peer.pid, graceful)
    }

    fn is_graceful(&self) -> bool {
        matches!(self.cause.get(), Some(EndCause::Closed))
    }

    pub(super) fn send(&self, message: &Message) -> std::result::Result<(), Errno> {
        message::send(self.socket.as_fd(), message, &[])
    }

    pub(super) fn unsent(&self, error: Errno, waited: Duration) -> Error {
        match error {
            error if has_closed(error) => self.owner_gone(),
            // The server does not read its socket: it is stopped, or hung.
            Errno::AGAIN => Error::timeout(format!("{:?} to read its socket", self.name), waited),
            other => Error::os("sendmsg", format!("a request to {:?}", self.name), other),
        }
    }

    /// Adds a request, unless the wait is over; with a wait of zero it is added all the same. While
    /// [`REQUESTS_MAX`] requests are open, waits for one to end.
    pub(super) fn add_request(&self, serial: u64, wait: &Wait<'_>) -> Result<()> {
        let is_question = wait.limit().is_zero();
        self.until(wait, |requests, is_late| {
            if requests.is_over {
                return Some(Err(self.owner_gone()));
            }
            if requests.open.len() < REQUESTS_MAX && (is_question || !is_late) {
                requests.open.insert(serial, PendingRequest::Waiting);
                return Some(Ok(()));
            }
            let late = || {
                let open = requests.open.len();
                wait.timed_out(|| format!("an answer of {:?} ({open} are due)", self.name))
            };
            is_late.then(|| Err(late()))
        })
    }

    /// Sleeps until `look` finds a value, as it does when it is told that the wait is over. It
    /// looks after each change of a request, and every [`RETRY_INTERVAL`].
    pub(super) fn until<T>(
        &self,
        wait: &Wait<'_>,
        mut look: impl FnMut(&mut PendingRequests, bool) -> Option<T>,
    ) -> T {
        loop {
            // Without the lock: it may run a signal's handler. Also where changes of other requests
            // come so often that no sleep lasts.
            let is_late = wait.is_over();
            let mut requests = self.requests.locked();
            if let Some(found) = look(&mut requests, is_late) {
                return found;
            }
            let limit = wait.time_left().min(RETRY_INTERVAL);
            drop(self.replied.wait_timeout(requests, limit));
        }
    }

    pub(super) fn wait_for(
        &self,
        (serial, body): (u64, &[u8]),
        wait: &Wait<'_>,
    ) -> Result<IncomingReply> {
        self.until(wait, |requests, is_late| {
            if let Some(PendingRequest::Replied(_)) = requests.open.get(&serial)
                && let Some(PendingRequest::Replied(answer)) = requests.open.remove(&serial)
            {
                self.replied.notify_all();
                return Some(answer);
            }
            if requests.is_over {
                requests.open.remove(&serial);
                return Some(Err(self.owner_gone()));
            }
            if !is_late {
                return None;
            }
            let abandoned = PendingRequest::Abandoned(body.to_vec());
            requests.open.insert(serial, abandoned);
            let what = format!("an answer of {:?} (process {})", self.name, self.peer.pid);
            Some(Err(Error::timeout(what, wait.limit())))
        })
    }

    /// Takes a reply. Goes to the observer if the caller has given up.
    pub(super) fn on_reply(&self, serial: u64, answer: Result<IncomingReply>) {
        if serial == NOTIFICATION {
            return answer.into_iter().for_each(|incoming| {
                self.tell(|observer| observer.on_notification(incoming));
            });
        }
        let mut requests = self.requests.locked();
        let request = match requests.open.get_mut(&serial) {
            Some(pending @ PendingRequest::Waiting) => {
                *pending = PendingRequest::Replied(answer);
                return self.replied.notify_all();
            }
            Some(PendingRequest::Abandoned(request)) => std::mem::take(request),
            // The request was a `post`, or it has been answered before.
            Some(PendingRequest::Replied(_)) | None => return,
        };
        requests.open.remove(&serial);
        drop(requests);
        self.replied.notify_all();
        if let Ok(incoming) = answer {
            self.tell(|observer| observer.on_stale_reply(&request, incoming));
        }
        // After the observer: what it has given back, the server sees before the close.
        let last = self
            .requests
            .locked()
            .take_dropped_if(|open| open.is_empty());
        if let Some(me) = last {
            me.close();
            self.reactor.drop_on_reaper(me);
        }
    }

    /// Has a session that is being dropped close when its last request is answered: a reply that
    /// came after the close would lend something that is never given back. False if no request is
    /// open, or no reply would be read.
    pub(super) fn closes_later(self: &Arc<SessionState>) -> bool {
        let is_observed = !self.registrations.locked().is_empty();
        let mut requests = self.requests.locked();
        let closes_later = is_observed && !requests.is_over && !requests.open.is_empty();
        requests.dropped = closes_later.then(|| self.clone());
        closes_later
    }

    /// Closes the session gracefully.
    pub(super) fn close(&self) {
        let _ = self.send(&Message::Close(CloseReason::Closed));
        self.registrations.locked().clear();
        // The reactor's thread may hold the last reference for a moment. The server sees the end
        // now all the same.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Before the session ends because this process has no room for the next message: the observer
    /// gives back what that message and those behind it grant.
    fn give_back_unread(&self, code: Errno) {
        let _ = self.cause.set(EndCause::NoRoom(code));
        // First: what the server can no longer send, it takes back itself.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        self.tell(|observer| {
            for body in message::unread_replies(self.socket.as_fd()) {
                let fds = Vec::new();
                observer.on_stale_reply(&[], IncomingReply { body, fds });
            }
        });
    }

    /// Calls the observer, if there is one, without a lock.
    fn tell(&self, call: impl FnOnce(&dyn SessionObserver)) {
        let observer = self.observer.locked().clone();
        if let Some(observer) = observer {
            call(&*observer);
        }
    }
}

impl ConnectionUser for SessionState {
    fn on_message(&self, _: u64) -> Next {
        if self.requests.locked().is_over {
            // What lies unread may have been given back.
            return Next::Stop;
        }
        let refused = |text: String| Error::refused(&self.name, text);
        connection::read(self.socket.as_fd(), &self.name, |received| {
            match received {
                Ok(Received::Message(Message::Reply { serial, body, .. }, fds)) => {
                    self.on_reply(serial, Ok(IncomingReply { body, fds }));
                    return Next::Keep;
                }
                Ok(Received::Message(Message::RequestFailed { serial, text }, _)) => {
                    self.on_reply(serial, Err(refused(text)));
                    return Next::Keep;
                }
                Ok(Received::Message(Message::Close(_), _)) => {
                    let _ = self.cause.set(EndCause::Closed);
                    return Next::Keep;
                }
                // Any other message or error ends the session.
                Ok(Received::Message(Message::Refused { text, .. }, _)) => {
                    let _ = self.cause.set(EndCause::Rejected(text));
                }
                Ok(_) => {}
                Err(error) => {
                    if let Some(code) = message::shortage(&error) {
                        self.give_back_unread(code);
                    }
                }
            }
            self.on_close(0);
            Next::Stop
        })
    }

    fn on_close(&self, _: u64) {
        if std::mem::replace(&mut self.requests.locked().is_over, true) {
            return;
        }
        self.replied.notify_all();
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let graceful = self.is_graceful();
        if graceful {
            trace::emit(|| TraceEvent::OwnerClosed(self.name.clone(), self.peer.pid));
        }
        self.tell(|observer| observer.on_closed(graceful));
        if let Some(me) = self.requests.locked().take_dropped_if(|_| true) {
            self.reactor.drop_on_reaper(me);
        }
    }

    fn on_orphaned(&self, id: u64) {
        connection::read_out(self, id);
        self.on_close(id);
        if !self.is_dead.swap(true, SeqCst) {
            trace::emit(|| TraceEvent::OwnerDied(self.name.clone(), self.peer.pid));
        }
        self.tell(|observer| observer.on_orphaned());
    }

    fn on_proven(&self, id: u64) {
        self.on_orphaned(id);
        self.tell(|observer| observer.on_proven_dead());
    }
}

impl EventSource for SessionState {
    fn on_ready(&self, tag: u64) -> Next {
        connection::dispatch(self, tag)
    }
}

pub(super) fn has_closed(error: Errno) -> bool {
    matches!(error, Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN)
}
