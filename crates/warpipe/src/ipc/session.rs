//! The client's side: comes in, asks, and hears of its server's end.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{
    Address, BODY_BYTES_MAX, IncomingReply, Kind, NOTIFICATION, REPLY_TIMEOUT, SessionObserver,
};
use crate::backend::DeviceId;
use crate::clock::Stopwatch;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::OwnerProcess;
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::{DeathEvidence, ORPHAN_TIMEOUT, Peer};
use crate::runtime::closer::PeerSocket;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, new_generation};

/// Questions of this process that one server has not answered.
const REQUESTS_MAX: usize = 64;

/// How long the first answer is looked for before it is slept for.
const SPIN: Duration = Duration::from_micros(200);

/// Messages read before other sockets have their turn.
const BATCH_MAX: usize = 16;

/// How often a dead server's socket is read once more, [`BATCH_MAX`] messages each time.
const FINAL_READS_MAX: usize = 64;

/// How long a client that waits for its server sleeps at most between looks: what the domain or the server tells wakes it
/// earlier.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

const SOCKET: u64 = 0;
const PROVEN: u64 = 1;
const SUSPECT: u64 = 2;
const ORPHANED: u64 = 3;

/// A session at a server of this or another process; dropped, it says goodbye.
pub(crate) struct ClientSession {
    inner: Arc<SessionState>,
}

impl std::fmt::Debug for ClientSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientSession")
            .field("name", &self.inner.name)
            .field("kind", &self.inner.kind)
            .finish_non_exhaustive()
    }
}

struct SessionState {
    /// Declared first: they end before their descriptors are closed.
    registrations: Mutex<Vec<Registration>>,
    owner_process: OwnerProcess,
    name: String,
    kind: Kind,
    peer: Peer,
    generation: [u8; 16],
    socket: PeerSocket,
    observer: Mutex<Option<Arc<dyn SessionObserver>>>,
    is_graceful: AtomicBool,
    /// Why the server has put this client out.
    rejection: OnceLock<String>,
    is_dead: AtomicBool,
    next_serial: AtomicU64,
    requests: Mutex<PendingRequests>,
    replied: Condvar,
    reactor: Arc<Reactor>,
}

#[derive(Default)]
struct PendingRequests {
    /// By serial number.
    open: HashMap<u64, PendingRequest>,
    /// No more answers will come.
    is_over: bool,
}

/// One question.
enum PendingRequest {
    Waiting,
    Replied(Result<IncomingReply>),
    /// The answer lies in the socket, and brings what this process has no room for.
    Unread(Error),
    /// The caller has given up. It counts until the answer comes, which is for the session.
    Abandoned(Vec<u8>),
}

/// How long a question's answer is waited for.
struct Patience<'a> {
    start: Instant,
    timeout: Duration,
    /// Asked without a lock.
    is_called_off: &'a dyn Fn() -> bool,
}

impl Patience<'_> {
    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.start.elapsed())
    }
}

/// Who stands at a server's door, and has not been let in yet.
#[derive(Debug)]
pub(crate) struct PendingSession {
    socket: PeerSocket,
    peer: Peer,
    name: String,
    kind: Kind,
    reactor: Arc<Reactor>,
}

/// A server's word that a call may come in.
#[derive(Debug)]
pub(crate) struct Admitted {
    generation: [u8; 16],
    incoming: IncomingReply,
}

impl PendingSession {
    /// Connects and says what it comes for. Waits only while the server's backlog is full, at most `patience`.
    pub(crate) fn begin(
        at: &Address<'_>,
        device: Option<DeviceId>,
        body: &[u8],
        patience: Duration,
    ) -> Result<PendingSession> {
        let (name, kind) = (at.name.to_string(), at.kind);
        let reactor = Reactor::of_process()?;
        let absent = |was_there| Error::NoOwner {
            kind,
            name: name.clone(),
            was_there,
        };
        let socket = at.domain.connect_or(at.name, patience, absent)?;
        let peer = Peer::of(socket.as_fd(), &name)?;
        if peer.uid != at.domain.owner() {
            let detail = format!(
                "uid {} listens in a domain of uid {}",
                peer.uid,
                at.domain.owner()
            );
            return Err(Error::AccessDenied { name, detail });
        }
        let hello = Message::OpenSession {
            generation: new_generation(),
            device,
            kind,
            body: body.to_vec(),
        };
        message::send_first(socket.as_fd(), &hello, REPLY_TIMEOUT)
            .map_err(|error| Error::os("sendmsg", format!("the handshake with {name:?}"), error))?;
        Ok(PendingSession {
            socket,
            peer,
            name,
            kind,
            reactor,
        })
    }

    /// What the server has said by now; `None` when that is nothing.
    pub(crate) fn hear(&self) -> Result<Option<Admitted>> {
        let name = &self.name;
        match message::receive(self.socket.as_fd(), name)? {
            Received::Message(
                Message::SessionOpened {
                    generation, body, ..
                },
                mut fds,
            ) => {
                let lifeline = message::take_lifeline(&mut fds);
                lifeline
                    .and_then(|lifeline| self.peer.adopt(lifeline))
                    .map_err(|fault| self.fault(fault))?;
                Ok(Some(Admitted {
                    generation,
                    incoming: IncomingReply { body, fds },
                }))
            }
            Received::Message(Message::OtherKind { found }, _) => Err(Error::OtherKind {
                name: name.clone(),
                wanted: self.kind,
                found: found.to_string(),
            }),
            Received::Message(Message::Refused { denied: true, text }, _) => {
                Err(Error::AccessDenied {
                    name: name.clone(),
                    detail: text,
                })
            }
            Received::Message(Message::Full { limit, max }, _) => {
                Err(self.fault(HandshakeFault::Full { limit, max }))
            }
            Received::Message(Message::Refused { text, .. }, _) => Err(Error::Refused {
                name: name.clone(),
                text,
            }),
            Received::Message(Message::Close(_), _) | Received::End => {
                Err(self.fault(HandshakeFault::Closed))
            }
            Received::Message(other, _) => Err(self.fault(other.unexpected("SessionOpened"))),
            Received::Nothing => Ok(None),
        }
    }

    pub(crate) fn enter(self, admitted: Admitted) -> (ClientSession, IncomingReply) {
        let inner = Arc::new(SessionState {
            registrations: Mutex::default(),
            owner_process: OwnerProcess::current(),
            name: self.name,
            kind: self.kind,
            peer: self.peer,
            generation: admitted.generation,
            socket: self.socket,
            observer: Mutex::new(None),
            is_graceful: AtomicBool::new(false),
            rejection: OnceLock::new(),
            is_dead: AtomicBool::new(false),
            next_serial: AtomicU64::new(NOTIFICATION + 1),
            requests: Mutex::default(),
            replied: Condvar::new(),
            reactor: self.reactor,
        });
        (ClientSession { inner }, admitted.incoming)
    }

    /// Who listens: asked of the kernel.
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    fn fault(&self, fault: HandshakeFault) -> Error {
        Error::Handshake {
            name: self.name.clone(),
            fault,
        }
    }
}

impl AsFd for PendingSession {
    /// Readable once the server has said something.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl ClientSession {
    /// Comes in, and waits up to `wait` for the server to be there. Returns what the admission brought.
    ///
    /// [`Error::NoOwner`] when there is nobody, [`Error::OtherKind`], [`Error::AccessDenied`], [`Error::Refused`],
    /// [`Error::Handshake`].
    pub(crate) fn attach(
        at: &Address<'_>,
        device: Option<DeviceId>,
        body: &[u8],
        wait: Duration,
    ) -> Result<(ClientSession, IncomingReply)> {
        let mut clock = Stopwatch::default();
        // Before the first look, so that an arrival in between is not missed.
        let arrivals = if wait.is_zero() {
            None
        } else {
            Some(at.domain.arrivals()?)
        };
        loop {
            let first = ClientSession::attach_now(at, device, body);
            // Who closes without a word is about to go: by now there is nobody, or another one.
            let again = match first {
                Err(Error::Handshake {
                    fault: HandshakeFault::Closed,
                    ..
                }) => ClientSession::attach_now(at, device, body),
                other => other,
            };
            let absent = match again {
                Err(
                    error @ (Error::NoOwner { .. }
                    | Error::Handshake {
                        fault: HandshakeFault::Closed,
                        ..
                    }),
                ) => error,
                other => return other,
            };
            let left = wait.saturating_sub(clock.elapsed());
            let Some(arrivals) = arrivals.as_ref().filter(|_| !left.is_zero()) else {
                return Err(absent);
            };
            message::wait_readable(arrivals.as_fd(), left.min(RETRY_INTERVAL));
            arrivals.drain();
        }
    }

    fn attach_now(
        at: &Address<'_>,
        device: Option<DeviceId>,
        body: &[u8],
    ) -> Result<(ClientSession, IncomingReply)> {
        let call = PendingSession::begin(at, device, body, REPLY_TIMEOUT)?;
        let start = Instant::now();
        loop {
            if let Some(admitted) = call.hear()? {
                return Ok(call.enter(admitted));
            }
            let left = REPLY_TIMEOUT.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(call.fault(HandshakeFault::Silent(REPLY_TIMEOUT)));
            }
            // A server that is there answers before this thread could fall asleep and be woken.
            if start.elapsed() > SPIN {
                message::wait_readable(call.as_fd(), left);
            }
        }
    }

    /// Begins to hear what the server says, and of its end: `observer` is called at once if that has come already.
    pub(crate) fn observe(&self, observer: Arc<dyn SessionObserver>) -> Result<()> {
        *self
            .inner
            .observer
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(observer);
        let me: Weak<dyn EventSource> = Arc::downgrade(&self.inner) as Weak<dyn EventSource>;
        let reactor = &self.inner.reactor;
        let registrations = [
            reactor.register(self.inner.socket.as_fd(), &me, SOCKET)?,
            self.inner
                .peer
                .watch(DeathEvidence::Suspect, &me, SUSPECT)?,
            self.inner
                .peer
                .watch(DeathEvidence::Orphaned(ORPHAN_TIMEOUT), &me, ORPHANED)?,
            self.inner.peer.watch(DeathEvidence::Proven, &me, PROVEN)?,
        ];
        self.inner
            .registrations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(registrations);
        Ok(())
    }

    /// Asks the server and waits for the answer. To be used after [`observe`](Self::observe), and never on the
    /// reactor's thread, which reads the answer.
    ///
    /// [`Error::Refused`], [`Error::OwnerGone`], [`Error::Timeout`].
    pub(crate) fn request(&self, body: &[u8], timeout: Duration) -> Result<IncomingReply> {
        self.ask_unless(body, timeout, &|| false)
    }

    /// The same, for a caller that may call it off, which is as if the timeout had passed: it is asked with every
    /// [`RETRY_INTERVAL`], while no lock is held.
    pub(crate) fn ask_unless(
        &self,
        body: &[u8],
        timeout: Duration,
        is_called_off: &dyn Fn() -> bool,
    ) -> Result<IncomingReply> {
        let inner = &self.inner;
        inner.owner_process.check()?;
        if body.len() > BODY_BYTES_MAX {
            return Err(Error::argument(
                "message",
                format!("{} bytes", body.len()),
                format!("up to {BODY_BYTES_MAX}"),
            ));
        }
        let serial = inner.next_serial.fetch_add(1, SeqCst);
        let patience = Patience {
            start: Instant::now(),
            timeout,
            is_called_off,
        };
        inner.add_request(serial, &patience)?;
        match inner.send(&Message::Request {
            serial,
            body: body.to_vec(),
        }) {
            // It has closed: what it said before, its goodbye for one, is the reactor's to read, who then ends our wait.
            Err(error) if has_closed(error) => {
                let _ = rustix::net::shutdown(&inner.socket, rustix::net::Shutdown::Both);
            }
            Err(error) => {
                inner.lock().open.remove(&serial);
                inner.replied.notify_all();
                return Err(inner.unsent(error));
            }
            Ok(()) => {}
        }
        inner.wait_for((serial, body), &patience)
    }

    /// Tells the server something, as a question whose answer nobody waits for: for threads that must not wait.
    ///
    /// [`Error::OwnerGone`], [`Error::Timeout`] when it does not read what it is sent.
    pub(crate) fn post(&self, body: &[u8]) -> Result<()> {
        let inner = &self.inner;
        inner.owner_process.check()?;
        if inner.lock().is_over {
            return Err(inner.owner_gone());
        }
        let request = Message::Request {
            serial: inner.next_serial.fetch_add(1, SeqCst),
            body: body.to_vec(),
        };
        inner.send(&request).map_err(|error| inner.unsent(error))
    }

    pub(crate) fn name(&self) -> &str {
        &self.inner.name
    }

    /// The server's process.
    pub(crate) fn pid(&self) -> i32 {
        self.inner.peer.pid
    }

    /// Its user.
    pub(crate) fn uid(&self) -> u32 {
        self.inner.peer.uid
    }

    /// The server's incarnation.
    pub(crate) fn generation(&self) -> [u8; 16] {
        self.inner.generation
    }

    pub(crate) fn reactor(&self) -> &Arc<Reactor> {
        &self.inner.reactor
    }

    /// Whether the server is there no more (it may not be proven dead yet).
    pub(crate) fn is_over(&self) -> bool {
        self.inner.lock().is_over
    }

    /// Whether nobody waits for the server any more: it is proven dead, or an orphan's parent for long.
    pub(crate) fn is_dead(&self) -> bool {
        self.inner.is_dead.load(SeqCst)
            || self
                .inner
                .peer
                .shows(DeathEvidence::Orphaned(ORPHAN_TIMEOUT))
    }

    /// Whether the server is there no more, or is not within `limit`. Never on the reactor's thread.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        let inner = &self.inner;
        let waited = inner
            .replied
            .wait_timeout_while(inner.lock(), limit, |requests| !requests.is_over);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_over
    }

    /// The error of who needs a server that is there no more. What says so may be a word of a shared page, which its
    /// goodbye comes before: that lies in the socket, and is the reactor's to read. Never on the reactor's thread.
    pub(crate) fn owner_gone(&self) -> Error {
        self.ends_within(REPLY_TIMEOUT);
        self.inner.owner_gone()
    }
}

impl Drop for ClientSession {
    fn drop(&mut self) {
        if !self.inner.owner_process.is_current() {
            return std::mem::forget(self.inner.clone());
        }
        let _ = message::send(
            self.inner.socket.as_fd(),
            &Message::Close(CloseReason::Closed),
            &[],
        );
        self.inner
            .registrations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        // Should the reactor's thread hold the last reference for a moment, the server still sees the end now.
        let _ = rustix::net::shutdown(&self.inner.socket, rustix::net::Shutdown::Both);
    }
}

impl SessionState {
    fn lock(&self) -> MutexGuard<'_, PendingRequests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why nothing more comes of this session.
    fn owner_gone(&self) -> Error {
        if let Some(text) = self.rejection.get() {
            return Error::Refused {
                name: self.name.clone(),
                text: text.clone(),
            };
        }
        let graceful = self.is_graceful.load(SeqCst);
        Error::OwnerGone {
            kind: self.kind,
            name: self.name.clone(),
            pid: self.peer.pid,
            graceful,
        }
    }

    fn send(&self, message: &Message) -> std::result::Result<(), Errno> {
        message::send(self.socket.as_fd(), message, &[])
    }

    fn unsent(&self, error: Errno) -> Error {
        match error {
            error if has_closed(error) => self.owner_gone(),
            // Nobody reads: it is stopped, or hung.
            Errno::AGAIN => Error::Timeout {
                what: format!("{:?} to read its socket", self.name),
                waited: Duration::ZERO,
            },
            other => Error::os("sendmsg", format!("a question to {:?}", self.name), other),
        }
    }

    /// A place for a question: waits for one while there are as many as there may be.
    fn add_request(&self, serial: u64, patience: &Patience<'_>) -> Result<()> {
        let (mut requests, mut is_over) = (self.lock(), false);
        loop {
            if requests.is_over {
                return Err(self.owner_gone());
            }
            if requests.open.len() < REQUESTS_MAX {
                requests.open.insert(serial, PendingRequest::Waiting);
                return Ok(());
            }
            if is_over {
                let what = format!(
                    "an answer of {:?} to one of {REQUESTS_MAX} earlier questions",
                    self.name
                );
                return Err(Error::Timeout {
                    what,
                    waited: patience.timeout,
                });
            }
            (requests, is_over) = self.sleep(requests, patience);
        }
    }

    /// Sleeps until somebody is answered, or it is time to look. Says whether the caller waits no longer.
    fn sleep<'a>(
        &'a self,
        requests: MutexGuard<'a, PendingRequests>,
        patience: &Patience<'_>,
    ) -> (MutexGuard<'a, PendingRequests>, bool) {
        let left = patience.left();
        if left.is_zero() {
            return (requests, true);
        }
        let (requests, waited) = self
            .replied
            .wait_timeout(requests, left.min(RETRY_INTERVAL))
            .unwrap_or_else(PoisonError::into_inner);
        if !waited.timed_out() {
            return (requests, false);
        }
        drop(requests);
        let is_over = patience.left().is_zero() || (patience.is_called_off)();
        (self.lock(), is_over)
    }

    fn wait_for(
        &self,
        (serial, body): (u64, &[u8]),
        patience: &Patience<'_>,
    ) -> Result<IncomingReply> {
        let (mut requests, mut is_over) = (self.lock(), false);
        loop {
            if let Some(PendingRequest::Replied(_)) = requests.open.get(&serial)
                && let Some(PendingRequest::Replied(answer)) = requests.open.remove(&serial)
            {
                self.replied.notify_all();
                return answer;
            }
            if let Some(pending @ PendingRequest::Unread(_)) = requests.open.get_mut(&serial)
                && let PendingRequest::Unread(error) =
                    std::mem::replace(pending, PendingRequest::Abandoned(body.to_vec()))
            {
                return Err(error);
            }
            if requests.is_over {
                requests.open.remove(&serial);
                return Err(self.owner_gone());
            }
            if is_over {
                requests
                    .open
                    .insert(serial, PendingRequest::Abandoned(body.to_vec()));
                let what = format!("an answer of {:?} (process {})", self.name, self.peer.pid);
                return Err(Error::Timeout {
                    what,
                    waited: patience.timeout,
                });
            }
            (requests, is_over) = self.sleep(requests, patience);
        }
    }

    /// An answer; one that nobody waits for any more is for the session to give back.
    fn on_reply(&self, serial: u64, answer: Result<IncomingReply>) {
        if serial == NOTIFICATION {
            return answer
                .into_iter()
                .zip(self.observer())
                .for_each(|(incoming, observer)| observer.on_notification(incoming));
        }
        let mut requests = self.lock();
        let request = match requests.open.get_mut(&serial) {
            Some(pending @ (PendingRequest::Waiting | PendingRequest::Unread(_))) => {
                *pending = PendingRequest::Replied(answer);
                return self.replied.notify_all();
            }
            Some(PendingRequest::Abandoned(request)) => std::mem::take(request),
            // It was told, not asked, or has been answered before.
            Some(PendingRequest::Replied(_)) | None => return,
        };
        requests.open.remove(&serial);
        drop(requests);
        self.replied.notify_all();
        if let (Ok(incoming), Some(observer)) = (answer, self.observer()) {
            observer.on_stale_reply(&request, incoming);
        }
    }

    /// The next answer stays in the socket until there is room for it. The caller that waits for it is told why.
    fn leave_unread(&self, error: Error) {
        let Some(serial) = message::next_answer(self.socket.as_fd()) else {
            return;
        };
        if let Some(pending @ PendingRequest::Waiting) = self.lock().open.get_mut(&serial) {
            *pending = PendingRequest::Unread(error);
            self.replied.notify_all();
        }
    }

    fn on_socket(&self) -> Next {
        for _ in 0..BATCH_MAX {
            match message::receive(self.socket.as_fd(), &self.name) {
                Ok(Received::Nothing) => return Next::Keep,
                Ok(Received::Message(Message::Reply { serial, body, .. }, fds)) => {
                    self.on_reply(serial, Ok(IncomingReply { body, fds }));
                }
                Ok(Received::Message(Message::RequestFailed { serial, text }, _)) => {
                    self.on_reply(
                        serial,
                        Err(Error::Refused {
                            name: self.name.clone(),
                            text,
                        }),
                    );
                }
                Ok(Received::Message(Message::Close(_), _)) => self.is_graceful.store(true, SeqCst),
                Ok(Received::Message(Message::Refused { text, .. }, _)) => {
                    let _ = self.rejection.set(text);
                    self.on_closed();
                    return Next::Stop;
                }
                // Our own want, which says nothing about the server.
                Err(error) if message::is_short(&error) => {
                    self.leave_unread(error);
                    return Next::RetryAtTick;
                }
                // Anything else is the end of what we have to say to each other.
                Ok(Received::Message(..) | Received::End) | Err(_) => {
                    self.on_closed();
                    return Next::Stop;
                }
            }
        }
        Next::Keep
    }

    fn on_closed(&self) {
        if std::mem::replace(&mut self.lock().is_over, true) {
            return;
        }
        self.replied.notify_all();
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let graceful = self.is_graceful.load(SeqCst);
        self.observer()
            .into_iter()
            .for_each(|observer| observer.on_closed(graceful));
    }

    fn observer(&self) -> Option<Arc<dyn SessionObserver>> {
        self.observer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl EventSource for SessionState {
    fn on_ready(&self, tag: u64) -> Next {
        match tag {
            _ if !self.owner_process.is_current() => Next::Stop,
            SUSPECT => {
                // What it said last is still there to be read, its goodbye for one: no more than a socket's buffer holds.
                // The socket's end need not come: another process may have a copy of it.
                let is_over = || self.on_socket() == Next::Stop || self.lock().is_over;
                let _ = (0..FINAL_READS_MAX).any(|_| is_over());
                self.on_closed();
                Next::Stop
            }
            ORPHANED => {
                self.on_ready(SUSPECT);
                self.is_dead.store(true, SeqCst);
                self.observer()
                    .into_iter()
                    .for_each(|observer| observer.on_orphaned());
                Next::Stop
            }
            PROVEN => {
                self.on_ready(ORPHANED);
                self.observer()
                    .into_iter()
                    .for_each(|observer| observer.on_proven_dead());
                Next::Stop
            }
            _ => self.on_socket(),
        }
    }
}

fn has_closed(error: Errno) -> bool {
    matches!(error, Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::ipc::domain::{Domain, EndpointName};
    use crate::ipc::{
        AccessPolicy, ClientInfo, Disconnected, IpcServer, OutgoingReply, Rejection,
        RequestHandler, ServerCore,
    };

    struct SilentHandler;

    impl RequestHandler for SilentHandler {
        fn on_connect(
            &self,
            _: &ServerCore,
            _: &ClientInfo,
            _: &[u8],
        ) -> std::result::Result<OutgoingReply, Rejection> {
            Ok(OutgoingReply::default())
        }

        fn on_request(
            &self,
            _: &ServerCore,
            _: &ClientInfo,
            _: &[u8],
        ) -> std::result::Result<OutgoingReply, Rejection> {
            Ok(OutgoingReply::default())
        }

        fn holds_anything(&self, _: &ClientInfo) -> bool {
            true
        }

        fn on_disconnect(&self, _: &ServerCore, _: &ClientInfo, _: Disconnected) {}
    }

    #[test]
    fn who_asks_a_server_that_has_just_left_is_told_that_it_said_goodbye() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-session-left-{}", std::process::id()));
        let (domain, name) = (
            Domain::at(&folder).unwrap(),
            EndpointName::new("left").unwrap(),
        );
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let server =
            IpcServer::open(&at, AccessPolicy::default(), Arc::new(SilentHandler)).unwrap();
        // It does not listen: the reactor's part is played here, after the question.
        let (session, _) = ClientSession::attach(&at, None, &[], Duration::ZERO).unwrap();
        drop(server);
        let told = std::thread::scope(|scope| {
            let asking = scope.spawn(|| session.request(b"anybody?", Duration::from_secs(10)));
            while session.inner.lock().open.is_empty() && !asking.is_finished() {
                std::thread::yield_now();
            }
            while session.inner.on_socket() == Next::Keep {
                std::thread::yield_now();
            }
            asking.join().unwrap()
        });
        assert!(
            matches!(told, Err(Error::OwnerGone { graceful: true, .. })),
            "{told:?}"
        );
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn the_error_of_a_server_that_has_left_waits_for_its_goodbye_to_be_read() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-session-bye-{}", std::process::id()));
        let (domain, name) = (
            Domain::at(&folder).unwrap(),
            EndpointName::new("leaving").unwrap(),
        );
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let server =
            IpcServer::open(&at, AccessPolicy::default(), Arc::new(SilentHandler)).unwrap();
        // The reactor's part is played here, late.
        let (session, _) = ClientSession::attach(&at, None, &[], Duration::ZERO).unwrap();
        drop(server);
        let told = std::thread::scope(|scope| {
            let (begins, begun) = channel();
            let session = &session;
            let asking = scope.spawn(move || {
                begins.send(()).unwrap();
                session.owner_gone()
            });
            begun.recv().unwrap();
            while session.inner.on_socket() == Next::Keep {
                std::thread::yield_now();
            }
            asking.join().unwrap()
        });
        assert!(
            matches!(told, Error::OwnerGone { graceful: true, .. }),
            "{told:?}"
        );
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn a_dead_server_whose_socket_somebody_else_holds_open_is_dead_nevertheless() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-session-held-{}", std::process::id()));
        let (domain, name) = (
            Domain::at(&folder).unwrap(),
            EndpointName::new("kept").unwrap(),
        );
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let server =
            IpcServer::open(&at, AccessPolicy::default(), Arc::new(SilentHandler)).unwrap();
        let (session, _) = ClientSession::attach(&at, None, &[], Duration::ZERO).unwrap();
        let (inner, (told, hears)) = (session.inner.clone(), channel());
        // What the reactor does when the lifeline ends; the socket is open, and silent.
        std::thread::spawn(move || told.send(inner.on_ready(PROVEN)));
        assert_eq!(hears.recv_timeout(Duration::from_secs(10)), Ok(Next::Stop));
        assert!(session.is_dead() && session.is_over());
        drop((session, server));
        let _ = std::fs::remove_dir_all(folder);
    }

    struct IgnoresAll;

    impl SessionObserver for IgnoresAll {}

    #[test]
    fn a_question_beyond_the_limit_waits_for_another_one_to_be_answered() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-session-many-{}", std::process::id()));
        let (domain, name) = (
            Domain::at(&folder).unwrap(),
            EndpointName::new("asked").unwrap(),
        );
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let server =
            IpcServer::open(&at, AccessPolicy::default(), Arc::new(SilentHandler)).unwrap();
        let (session, _) = ClientSession::attach(&at, None, &[], Duration::ZERO).unwrap();
        session.observe(Arc::new(IgnoresAll)).unwrap();
        let others = (0..REQUESTS_MAX as u64).map(|other| u64::MAX - other);
        session
            .inner
            .lock()
            .open
            .extend(others.map(|other| (other, PendingRequest::Waiting)));
        let (short, start) = (Duration::from_millis(100), Instant::now());
        let told = session.request(b"a place?", short).map(drop);
        assert!(
            matches!(told, Err(Error::Timeout { waited, .. }) if waited == short),
            "{told:?}"
        );
        assert!(start.elapsed() >= short, "it waits for a place");
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                session
                    .request(b"a place?", Duration::from_secs(60))
                    .map(drop)
            });
            session.inner.on_reply(
                u64::MAX,
                Ok(IncomingReply {
                    body: Vec::new(),
                    fds: Vec::new(),
                }),
            );
            let none = Patience {
                start: Instant::now(),
                timeout: Duration::ZERO,
                is_called_off: &|| false,
            };
            session.inner.wait_for((u64::MAX, &[]), &none).unwrap();
            asking.join().unwrap().unwrap();
        });
        drop((session, server));
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn a_question_that_is_called_off_ends_as_if_its_time_had_passed_wherever_it_waits() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-session-off-{}", std::process::id()));
        let (domain, name) = (
            Domain::at(&folder).unwrap(),
            EndpointName::new("asked").unwrap(),
        );
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let server =
            IpcServer::open(&at, AccessPolicy::default(), Arc::new(SilentHandler)).unwrap();
        // It does not listen, so no answer is read.
        let (session, _) = ClientSession::attach(&at, None, &[], Duration::ZERO).unwrap();
        // Who is asked may look at the client: nothing is locked.
        let called_off = || !session.inner.lock().is_over;
        let told = session
            .ask_unless(b"anybody?", Duration::MAX, &called_off)
            .map(drop);
        assert!(matches!(told, Err(Error::Timeout { .. })), "{told:?}");
        let others = (0..REQUESTS_MAX as u64).map(|other| u64::MAX - other);
        session
            .inner
            .lock()
            .open
            .extend(others.map(|other| (other, PendingRequest::Waiting)));
        let told = session
            .ask_unless(b"a place?", Duration::MAX, &called_off)
            .map(drop);
        assert!(matches!(told, Err(Error::Timeout { .. })), "{told:?}");
        drop((session, server));
        let _ = std::fs::remove_dir_all(folder);
    }

    /// Hears of late answers.
    struct Late(Mutex<std::sync::mpsc::Sender<Vec<u8>>>);

    impl SessionObserver for Late {
        fn on_stale_reply(&self, request: &[u8], _: IncomingReply) {
            self.0.lock().unwrap().send(request.to_vec()).unwrap();
        }
    }

    #[test]
    fn a_late_answer_comes_with_its_question_and_counts_until_then() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-session-late-{}", std::process::id()));
        let (domain, name) = (
            Domain::at(&folder).unwrap(),
            EndpointName::new("late").unwrap(),
        );
        let at = Address {
            domain: &domain,
            name: &name,
            kind: Kind::Timeline,
        };
        let server =
            IpcServer::open(&at, AccessPolicy::default(), Arc::new(SilentHandler)).unwrap();
        // The reactor's part is played here, after the timeout.
        let (session, _) = ClientSession::attach(&at, None, &[], Duration::ZERO).unwrap();
        let (tells, told) = channel();
        *session.inner.observer.lock().unwrap() = Some(Arc::new(Late(Mutex::new(tells))));
        let asked = session.request(b"in time?", Duration::ZERO).map(drop);
        assert!(matches!(asked, Err(Error::Timeout { .. })), "{asked:?}");
        assert_eq!(session.inner.lock().open.len(), 1);
        let answer = loop {
            assert_eq!(session.inner.on_socket(), Next::Keep);
            match told.try_recv() {
                Ok(answer) => break answer,
                Err(_) => std::thread::yield_now(),
            }
        };
        assert_eq!(
            (answer, session.inner.lock().open.len()),
            (b"in time?".to_vec(), 0)
        );
        drop((session, server));
        let _ = std::fs::remove_dir_all(folder);
    }
}
