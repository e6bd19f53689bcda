//! The client side of a session: connects to a server, sends requests and reports the server's end.
//!
//! A caller's request waits for its reply under [`SessionState`]. The reactor's thread reads the
//! socket and wakes the caller, so no waiting call may run on that thread.

mod state;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use self::state::{SessionState, has_closed};
use super::client_handshake::{Answer, ClientHandshake, HandshakeLimit};
use super::{Address, IncomingReply, REPLY_TIMEOUT, SessionObserver, check_length};
use crate::backend::DeviceId;
use crate::backoff::Backoff;
use crate::debug::opaque_debug;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::connection;
use crate::ipc::domain::{Arrivals, Domain};
use crate::ipc::message::{self, Message};
use crate::ipc::peer::{DeathEvidence, ORPHAN_TIMEOUT};
use crate::mutex::LockUnpoisoned;
use crate::os;
use crate::runtime::reactor::{EventSource, Reactor};
use crate::wait::Wait;

/// A session at a server of this or another process. Dropping it closes the session gracefully,
/// once the requests that its callers have given up are answered.
pub(crate) struct ClientSession {
    inner: LeakOnFork<Arc<SessionState>>,
}

opaque_debug!(ClientSession { inner });

impl ClientSession {
    /// Connects, and waits for the server to exist. Returns the session and the first reply.
    ///
    /// [`Error::NotFound`] when no server has the name, [`Error::Name`],
    /// [`Error::Refused`], [`Error::Handshake`]; [`Error::Timeout`] when
    /// the wait is cancelled while a server does not answer.
    pub(crate) fn attach<'w>(
        at: &Address<'_>,
        device: Option<DeviceId>,
        body: &[u8],
        wait: impl Into<Wait<'w>>,
    ) -> Result<(ClientSession, IncomingReply)> {
        let wait = wait.into();
        until_found(at.domain, &wait, &mut None, is_transient, || {
            match ClientSession::attach_now(at, device, body, &wait) {
                // A server that closes without a reply is shutting down: by the second attempt the
                // name is free or has another server.
                Err(Error::Handshake {
                    fault: HandshakeFault::Closed,
                    ..
                }) => ClientSession::attach_now(at, device, body, &wait),
                other => other,
            }
        })
    }

    fn attach_now(
        at: &Address<'_>,
        device: Option<DeviceId>,
        body: &[u8],
        wait: &Wait<'_>,
    ) -> Result<(ClientSession, IncomingReply)> {
        let limit = HandshakeLimit::new(REPLY_TIMEOUT, wait);
        let handshake = ClientHandshake::begin(at, device, body, &limit, true)?;
        match handshake.wait(&limit) {
            // A handler's refusal is an answer to what the client asks for.
            Err(Error::Handshake {
                name,
                fault: HandshakeFault::Refused(text),
            }) => Err(Error::refused(name, text)),
            answer => ClientSession::enter(handshake, answer?),
        }
    }

    /// The session that a server's answer opens, and its first reply.
    pub(crate) fn enter(
        handshake: ClientHandshake,
        (message, mut fds): Answer,
    ) -> Result<(ClientSession, IncomingReply)> {
        let Message::SessionOpened {
            generation, body, ..
        } = message
        else {
            return Err(handshake.fault(message.unexpected("SessionOpened")));
        };
        handshake.adopt_lifeline(&mut fds)?;
        let state = SessionState::new(handshake, generation)?;
        let inner = LeakOnFork::new(Arc::new(state));
        Ok((ClientSession { inner }, IncomingReply { body, fds }))
    }

    /// Starts to receive the server's notifications and its end. If the server has ended already,
    /// `observer` is called at once.
    pub(crate) fn observe(&self, observer: Arc<dyn SessionObserver>) -> Result<()> {
        *self.inner.observer.locked() = Some(observer);
        let me = Arc::downgrade(&self.inner) as Weak<dyn EventSource>;
        let reactor = &self.inner.reactor;
        let ends = (self.inner.socket.as_fd(), &*self.inner.peer);
        let all = connection::watch(reactor, ends, &me, 0, ORPHAN_TIMEOUT)?;
        self.inner.registrations.locked().extend(all);
        Ok(())
    }

    /// Sends a request and waits for the reply. Call it after [`observe`](Self::observe), and never
    /// on the reactor's thread, which reads the reply.
    ///
    /// [`Error::Refused`], [`Error::PeerGone`], [`Error::Timeout`].
    pub(crate) fn request<'w>(
        &self,
        body: &[u8],
        wait: impl Into<Wait<'w>>,
    ) -> Result<IncomingReply> {
        self.request_with(body, None, wait)
    }

    /// As [`request`](Self::request), with memory of this process.
    pub(crate) fn request_with<'w>(
        &self,
        body: &[u8],
        memory: Option<BorrowedFd<'_>>,
        wait: impl Into<Wait<'w>>,
    ) -> Result<IncomingReply> {
        let (inner, wait) = (self.inner.get()?, wait.into());
        check_length(body)?;
        let serial = inner.next_serial.fetch_add(1, SeqCst);
        inner.add_request(serial, &wait)?;
        let (request, fds) = (body, Vec::from_iter(memory));
        let body = request.to_vec();
        let message = match memory {
            None => Message::Request { serial, body },
            Some(_) => Message::MemoryRequest { serial, body },
        };
        let sent = inner.until(&wait, |requests, is_late| {
            match message::send(inner.socket.as_fd(), &message, &fds) {
                // It does not read now. If it never will, the wait for its answer says so.
                Err(Errno::AGAIN) if !is_late => requests.is_over.then_some(Ok(())),
                sent => Some(sent),
            }
        });
        match sent {
            // The server has closed. The reactor reads the messages that it sent before, its
            // graceful close for one, and then ends this wait.
            Err(error) if has_closed(error) => {
                let _ = rustix::net::shutdown(&inner.socket, rustix::net::Shutdown::Both);
            }
            Err(error) => {
                inner.requests.locked().open.remove(&serial);
                inner.replied.notify_all();
                return Err(inner.unsent(error, wait.limit()));
            }
            Ok(()) => {}
        }
        inner.wait_for((serial, request), &wait)
    }

    /// Sends a request without waiting for its reply: for threads that must not wait.
    ///
    /// [`Error::PeerGone`], [`Error::Timeout`] when the server does not read its socket.
    pub(crate) fn post(&self, body: &[u8]) -> Result<()> {
        let inner = self.inner.get()?;
        if inner.requests.locked().is_over {
            return Err(inner.owner_gone());
        }
        let (serial, body) = (inner.next_serial.fetch_add(1, SeqCst), body.to_vec());
        let sent = inner.send(&Message::Request { serial, body });
        sent.map_err(|error| inner.unsent(error, Duration::ZERO))
    }

    pub(crate) fn name(&self) -> &str {
        &self.inner.name
    }

    /// The server's process.
    pub(crate) fn pid(&self) -> i32 {
        self.inner.peer.pid
    }

    /// The user of the server's process.
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

    /// Whether the session is over. The server may not be proven dead yet.
    pub(crate) fn is_over(&self) -> bool {
        self.inner.requests.locked().is_over
    }

    /// Whether the server has closed its end, as the kernel reports now: the reactor may not have
    /// read it yet.
    pub(crate) fn has_hung_up(&self) -> bool {
        let socket = self.inner.socket.as_fd();
        let mut ends = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
        let now = os::timespec(Duration::ZERO);
        poll(&mut ends, Some(&now)).is_ok() && ends[0].revents().contains(PollFlags::HUP)
    }

    /// Whether waiting for the server is pointless: it is proven dead, or has been orphaned for
    /// [`ORPHAN_TIMEOUT`].
    pub(crate) fn is_dead(&self) -> bool {
        self.inner.is_dead.load(SeqCst)
            || self
                .inner
                .peer
                .shows(DeathEvidence::Orphaned(ORPHAN_TIMEOUT))
    }

    /// Whether the session is over, or ends within `limit`. Never on the reactor's thread.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        let inner = &self.inner;
        let waited = inner
            .replied
            .wait_timeout_while(inner.requests.locked(), limit, |requests| !requests.is_over);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_over
    }

    /// The error for an operation that needs a server that has ended. A word of a shared page may
    /// report the end earlier than the socket does. So this waits for the reactor to read the
    /// socket, where the server's graceful close lies. Never on the reactor's thread.
    pub(crate) fn owner_gone(&self) -> Error {
        self.ends_within(REPLY_TIMEOUT);
        self.inner.owner_gone()
    }
}

/// The longest sleep between two attempts to find a name. A notification of the domain wakes the
/// client earlier.
const FIND_INTERVAL: Duration = Duration::from_millis(100);

/// Waits until a name has an owner that admits this process: tries again after the errors that are
/// transient, and returns the last of them when the wait is over. Watches the domain with
/// `arrivals` meanwhile, or with an instance of its own.
pub(crate) fn until_found<'w, T>(
    domain: &Domain,
    wait: impl Into<Wait<'w>>,
    arrivals: &mut Option<Arrivals>,
    is_transient: fn(&Error) -> bool,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let wait = wait.into();
    loop {
        let absent = match attempt() {
            Err(error) if is_transient(&error) => error,
            other => return other,
        };
        let left = wait.slice();
        if left.is_zero() {
            return Err(absent);
        }
        match arrivals {
            Some(arrivals) => {
                message::wait_readable(arrivals.as_fd(), left.min(FIND_INTERVAL));
                arrivals.drain();
            }
            // Not before the first attempt: most find the owner, and the release of an inotify
            // instance delays the proof of a death (see `ipc::domain::watch`). The next attempt
            // follows at once, as an owner may have come in between.
            None => *arrivals = Some(domain.arrivals()?),
        }
    }
}

/// Whether a name may have an owner that admits this process a moment later.
pub(crate) fn is_transient(error: &Error) -> bool {
    use HandshakeFault::{Closed, NoRoom};
    matches!(
        error,
        Error::NotFound { .. }
            | Error::Handshake {
                fault: Closed | NoRoom(_),
                ..
            }
    )
}

/// The rule for all that wait for a name: an owner that ends before what it was asked for is open
/// counts as none. Until the wait is over, the next owner is asked instead.
pub(crate) fn until_open<T>(wait: &Wait<'_>, mut open: impl FnMut() -> Result<T>) -> Result<T> {
    // An owner may admit this process and end at once, each time.
    let mut backoff = Backoff::spinning(0);
    loop {
        match open() {
            Err(Error::PeerGone { .. }) if !wait.is_over() => backoff.pause(),
            other => return other,
        }
    }
}

impl Drop for ClientSession {
    fn drop(&mut self) {
        let Ok(inner) = self.inner.get() else { return };
        if !inner.closes_later() {
            inner.close();
        }
    }
}

#[cfg(test)]
mod tests;
