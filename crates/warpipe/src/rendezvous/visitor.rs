//! The visitor's side: comes in, asks, and hears of its keeper's end.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{ANSWER_TIMEOUT, Address, BODY_BYTES_MAX, Gift, Kind, UNASKED, Visit};
use crate::backend::DeviceId;
use crate::clock::Stopwatch;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::Home;
use crate::link::closer::PeerSocket;
use crate::link::message::{self, Farewell, Message, Received};
use crate::link::peer::{ORPHAN_TIMEOUT, Peer, Sign};
use crate::link::watcher::{Next, Watch, Watched, Watcher, new_generation};

/// Questions of this process that one keeper has not answered.
const ASKED_MAX: usize = 64;

/// How long the first answer is looked for before it is slept for.
const SPIN: Duration = Duration::from_micros(200);

/// Messages read before other sockets have their turn.
const TURN: usize = 16;

/// How often a dead keeper's socket is read once more, [`TURN`] messages each time.
const LAST_WORDS: usize = 64;

/// How long a visitor that waits for its keeper sleeps at most between looks: what the domain or the keeper tells wakes it
/// earlier.
const LOOK: Duration = Duration::from_millis(50);

const SOCKET: u64 = 0;
const PROVEN: u64 = 1;
const SUSPECT: u64 = 2;
const OVER: u64 = 3;

/// A visit at a keeper of this or another process; dropped, it says goodbye.
pub(crate) struct Visitor {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Visitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Visitor")
            .field("name", &self.inner.name)
            .field("kind", &self.inner.kind)
            .finish_non_exhaustive()
    }
}

struct Inner {
    /// Declared first: they end before their descriptors are closed.
    watches: Mutex<Vec<Watch>>,
    home: Home,
    name: String,
    kind: Kind,
    peer: Peer,
    generation: [u8; 16],
    socket: PeerSocket,
    visit: Mutex<Option<Arc<dyn Visit>>>,
    is_graceful: AtomicBool,
    /// Why the keeper has put this visitor out.
    refusal: OnceLock<String>,
    is_dead: AtomicBool,
    next_serial: AtomicU64,
    desk: Mutex<Questions>,
    answered: Condvar,
    watcher: Arc<Watcher>,
}

#[derive(Default)]
struct Questions {
    /// By serial number.
    open: HashMap<u64, Place>,
    /// No more answers will come.
    is_over: bool,
}

/// One question.
enum Place {
    Waiting,
    Answered(Result<Gift>),
    /// The answer lies in the socket, and brings what this process has no room for.
    Unread(Error),
    /// The caller has given up. It counts until the answer comes, which is for the visit.
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

/// Who stands at a keeper's door, and has not been let in yet.
#[derive(Debug)]
pub(crate) struct Call {
    socket: PeerSocket,
    peer: Peer,
    name: String,
    kind: Kind,
    watcher: Arc<Watcher>,
}

/// A keeper's word that a call may come in.
#[derive(Debug)]
pub(crate) struct Granted {
    generation: [u8; 16],
    gift: Gift,
}

impl Call {
    /// Connects and says what it comes for. Waits only while the keeper's backlog is full, at most `patience`.
    pub(crate) fn begin(at: &Address<'_>, device: Option<DeviceId>, body: &[u8], patience: Duration) -> Result<Call> {
        let (name, kind) = (at.name.to_string(), at.kind);
        let watcher = Watcher::of_process()?;
        let absent = |was_there| Error::NoOwner { kind, name: name.clone(), was_there };
        let socket = at.domain.connect_or(at.name, patience, absent)?;
        let peer = Peer::of(socket.as_fd(), &name)?;
        if peer.uid != at.domain.owner() {
            let detail = format!("uid {} listens in a domain of uid {}", peer.uid, at.domain.owner());
            return Err(Error::AccessDenied { name, detail });
        }
        let hello = Message::Visit { generation: new_generation(), device, kind, body: body.to_vec() };
        message::send_first(socket.as_fd(), &hello, ANSWER_TIMEOUT)
            .map_err(|error| Error::os("sendmsg", format!("the handshake with {name:?}"), error))?;
        Ok(Call { socket, peer, name, kind, watcher })
    }

    /// What the keeper has said by now; `None` when that is nothing.
    pub(crate) fn hear(&self) -> Result<Option<Granted>> {
        let name = &self.name;
        match message::receive(self.socket.as_fd(), name)? {
            Received::Message(Message::Granted { generation, body, .. }, mut fds) => {
                let lifeline = message::take_lifeline(&mut fds);
                lifeline.and_then(|lifeline| self.peer.adopt(lifeline)).map_err(|fault| self.fault(fault))?;
                Ok(Some(Granted { generation, gift: Gift { body, fds } }))
            }
            Received::Message(Message::OtherKind { found }, _) => {
                Err(Error::OtherKind { name: name.clone(), wanted: self.kind, found: found.to_string() })
            }
            Received::Message(Message::Refused { denied: true, text }, _) => {
                Err(Error::AccessDenied { name: name.clone(), detail: text })
            }
            Received::Message(Message::Full { limit, max }, _) => Err(self.fault(HandshakeFault::Full { limit, max })),
            Received::Message(Message::Refused { text, .. }, _) => Err(Error::Refused { name: name.clone(), text }),
            Received::Message(Message::Bye(_), _) | Received::End => Err(self.fault(HandshakeFault::Closed)),
            Received::Message(other, _) => Err(self.fault(other.unexpected("Granted"))),
            Received::Nothing => Ok(None),
        }
    }

    pub(crate) fn enter(self, granted: Granted) -> (Visitor, Gift) {
        let inner = Arc::new(Inner {
            watches: Mutex::default(),
            home: Home::here(),
            name: self.name,
            kind: self.kind,
            peer: self.peer,
            generation: granted.generation,
            socket: self.socket,
            visit: Mutex::new(None),
            is_graceful: AtomicBool::new(false),
            refusal: OnceLock::new(),
            is_dead: AtomicBool::new(false),
            next_serial: AtomicU64::new(UNASKED + 1),
            desk: Mutex::default(),
            answered: Condvar::new(),
            watcher: self.watcher,
        });
        (Visitor { inner }, granted.gift)
    }

    /// Who listens: asked of the kernel.
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    fn fault(&self, fault: HandshakeFault) -> Error {
        Error::Handshake { name: self.name.clone(), fault }
    }
}

impl AsFd for Call {
    /// Readable once the keeper has said something.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Visitor {
    /// Comes in, and waits up to `wait` for the keeper to be there. Returns what the admission brought.
    ///
    /// [`Error::NoOwner`] when there is nobody, [`Error::OtherKind`], [`Error::AccessDenied`], [`Error::Refused`],
    /// [`Error::Handshake`].
    pub(crate) fn attach(
        at: &Address<'_>,
        device: Option<DeviceId>,
        body: &[u8],
        wait: Duration,
    ) -> Result<(Visitor, Gift)> {
        let mut clock = Stopwatch::default();
        // Before the first look, so that an arrival in between is not missed.
        let arrivals = if wait.is_zero() { None } else { Some(at.domain.arrivals()?) };
        loop {
            let first = Visitor::attach_now(at, device, body);
            // Who closes without a word is about to go: by now there is nobody, or another one.
            let again = match first {
                Err(Error::Handshake { fault: HandshakeFault::Closed, .. }) => Visitor::attach_now(at, device, body),
                other => other,
            };
            let absent = match again {
                Err(error @ (Error::NoOwner { .. } | Error::Handshake { fault: HandshakeFault::Closed, .. })) => error,
                other => return other,
            };
            let left = wait.saturating_sub(clock.elapsed());
            let Some(arrivals) = arrivals.as_ref().filter(|_| !left.is_zero()) else { return Err(absent) };
            message::wait_readable(arrivals.as_fd(), left.min(LOOK));
            arrivals.drain();
        }
    }

    fn attach_now(at: &Address<'_>, device: Option<DeviceId>, body: &[u8]) -> Result<(Visitor, Gift)> {
        let call = Call::begin(at, device, body, ANSWER_TIMEOUT)?;
        let start = Instant::now();
        loop {
            if let Some(granted) = call.hear()? {
                return Ok(call.enter(granted));
            }
            let left = ANSWER_TIMEOUT.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(call.fault(HandshakeFault::Silent(ANSWER_TIMEOUT)));
            }
            // A keeper that is there answers before this thread could fall asleep and be woken.
            if start.elapsed() > SPIN {
                message::wait_readable(call.as_fd(), left);
            }
        }
    }

    /// Begins to hear what the keeper says, and of its end: `visit` is called at once if that has come already.
    pub(crate) fn listen(&self, visit: Arc<dyn Visit>) -> Result<()> {
        *self.inner.visit.lock().unwrap_or_else(PoisonError::into_inner) = Some(visit);
        let me: Weak<dyn Watched> = Arc::downgrade(&self.inner) as Weak<dyn Watched>;
        let watcher = &self.inner.watcher;
        let watches = [
            watcher.watch(self.inner.socket.as_fd(), &me, SOCKET)?,
            self.inner.peer.watch(Sign::Suspect, &me, SUSPECT)?,
            self.inner.peer.watch(Sign::Over(ORPHAN_TIMEOUT), &me, OVER)?,
            self.inner.peer.watch(Sign::Proven, &me, PROVEN)?,
        ];
        self.inner.watches.lock().unwrap_or_else(PoisonError::into_inner).extend(watches);
        Ok(())
    }

    /// Asks the keeper and waits for the answer. To be used after [`listen`](Self::listen), and never on the
    /// watcher's thread, which reads the answer.
    ///
    /// [`Error::Refused`], [`Error::OwnerGone`], [`Error::Timeout`].
    pub(crate) fn ask(&self, body: &[u8], timeout: Duration) -> Result<Gift> {
        self.ask_unless(body, timeout, &|| false)
    }

    /// The same, for a caller that may call it off, which is as if the timeout had passed: it is asked with every
    /// [`LOOK`], while no lock is held.
    pub(crate) fn ask_unless(&self, body: &[u8], timeout: Duration, is_called_off: &dyn Fn() -> bool) -> Result<Gift> {
        let inner = &self.inner;
        inner.home.check()?;
        if body.len() > BODY_BYTES_MAX {
            return Err(Error::argument("message", format!("{} bytes", body.len()), format!("up to {BODY_BYTES_MAX}")));
        }
        let serial = inner.next_serial.fetch_add(1, SeqCst);
        let patience = Patience { start: Instant::now(), timeout, is_called_off };
        inner.take_place(serial, &patience)?;
        match inner.send(&Message::Ask { serial, body: body.to_vec() }) {
            // It has closed: what it said before, its goodbye for one, is the watcher's to read, who then ends our wait.
            Err(error) if has_closed(error) => {
                let _ = rustix::net::shutdown(&inner.socket, rustix::net::Shutdown::Both);
            }
            Err(error) => {
                inner.lock().open.remove(&serial);
                inner.answered.notify_all();
                return Err(inner.unsent(error));
            }
            Ok(()) => {}
        }
        inner.wait_for((serial, body), &patience)
    }

    /// Tells the keeper something, as a question whose answer nobody waits for: for threads that must not wait.
    ///
    /// [`Error::OwnerGone`], [`Error::Timeout`] when it does not read what it is sent.
    pub(crate) fn post(&self, body: &[u8]) -> Result<()> {
        let inner = &self.inner;
        inner.home.check()?;
        if inner.lock().is_over {
            return Err(inner.owner_gone());
        }
        let question = Message::Ask { serial: inner.next_serial.fetch_add(1, SeqCst), body: body.to_vec() };
        inner.send(&question).map_err(|error| inner.unsent(error))
    }

    pub(crate) fn name(&self) -> &str {
        &self.inner.name
    }

    /// The keeper's process.
    pub(crate) fn pid(&self) -> i32 {
        self.inner.peer.pid
    }

    /// Its user.
    pub(crate) fn uid(&self) -> u32 {
        self.inner.peer.uid
    }

    /// The keeper's incarnation.
    pub(crate) fn generation(&self) -> [u8; 16] {
        self.inner.generation
    }

    pub(crate) fn watcher(&self) -> &Arc<Watcher> {
        &self.inner.watcher
    }

    /// Whether the keeper is there no more (it may not be proven dead yet).
    pub(crate) fn is_over(&self) -> bool {
        self.inner.lock().is_over
    }

    /// Whether nobody waits for the keeper any more: it is proven dead, or an orphan's parent for long.
    pub(crate) fn is_dead(&self) -> bool {
        self.inner.is_dead.load(SeqCst) || self.inner.peer.shows(Sign::Over(ORPHAN_TIMEOUT))
    }

    /// Whether the keeper is there no more, or is not within `limit`. Never on the watcher's thread.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        let inner = &self.inner;
        let waited = inner.answered.wait_timeout_while(inner.lock(), limit, |desk| !desk.is_over);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_over
    }

    /// The error of who needs a keeper that is there no more. What says so may be a word of a shared page, which its
    /// goodbye comes before: that lies in the socket, and is the watcher's to read. Never on the watcher's thread.
    pub(crate) fn owner_gone(&self) -> Error {
        self.ends_within(ANSWER_TIMEOUT);
        self.inner.owner_gone()
    }
}

impl Drop for Visitor {
    fn drop(&mut self) {
        if !self.inner.home.is_here() {
            return std::mem::forget(self.inner.clone());
        }
        let _ = message::send(self.inner.socket.as_fd(), &Message::Bye(Farewell::Closed), &[]);
        self.inner.watches.lock().unwrap_or_else(PoisonError::into_inner).clear();
        // Should the watcher's thread hold the last reference for a moment, the keeper still sees the end now.
        let _ = rustix::net::shutdown(&self.inner.socket, rustix::net::Shutdown::Both);
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Questions> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why nothing more comes of this visit.
    fn owner_gone(&self) -> Error {
        if let Some(text) = self.refusal.get() {
            return Error::Refused { name: self.name.clone(), text: text.clone() };
        }
        let graceful = self.is_graceful.load(SeqCst);
        Error::OwnerGone { kind: self.kind, name: self.name.clone(), pid: self.peer.pid, graceful }
    }

    fn send(&self, message: &Message) -> std::result::Result<(), Errno> {
        message::send(self.socket.as_fd(), message, &[])
    }

    fn unsent(&self, error: Errno) -> Error {
        match error {
            error if has_closed(error) => self.owner_gone(),
            // Nobody reads: it is stopped, or hung.
            Errno::AGAIN => {
                Error::Timeout { what: format!("{:?} to read its socket", self.name), waited: Duration::ZERO }
            }
            other => Error::os("sendmsg", format!("a question to {:?}", self.name), other),
        }
    }

    /// A place for a question: waits for one while there are as many as there may be.
    fn take_place(&self, serial: u64, patience: &Patience<'_>) -> Result<()> {
        let (mut desk, mut is_over) = (self.lock(), false);
        loop {
            if desk.is_over {
                return Err(self.owner_gone());
            }
            if desk.open.len() < ASKED_MAX {
                desk.open.insert(serial, Place::Waiting);
                return Ok(());
            }
            if is_over {
                let what = format!("an answer of {:?} to one of {ASKED_MAX} earlier questions", self.name);
                return Err(Error::Timeout { what, waited: patience.timeout });
            }
            (desk, is_over) = self.sleep(desk, patience);
        }
    }

    /// Sleeps until somebody is answered, or it is time to look. Says whether the caller waits no longer.
    fn sleep<'a>(
        &'a self,
        desk: MutexGuard<'a, Questions>,
        patience: &Patience<'_>,
    ) -> (MutexGuard<'a, Questions>, bool) {
        let left = patience.left();
        if left.is_zero() {
            return (desk, true);
        }
        let (desk, waited) = self.answered.wait_timeout(desk, left.min(LOOK)).unwrap_or_else(PoisonError::into_inner);
        if !waited.timed_out() {
            return (desk, false);
        }
        drop(desk);
        let is_over = patience.left().is_zero() || (patience.is_called_off)();
        (self.lock(), is_over)
    }

    fn wait_for(&self, (serial, body): (u64, &[u8]), patience: &Patience<'_>) -> Result<Gift> {
        let (mut desk, mut is_over) = (self.lock(), false);
        loop {
            if let Some(Place::Answered(_)) = desk.open.get(&serial)
                && let Some(Place::Answered(answer)) = desk.open.remove(&serial)
            {
                self.answered.notify_all();
                return answer;
            }
            if let Some(place @ Place::Unread(_)) = desk.open.get_mut(&serial)
                && let Place::Unread(error) = std::mem::replace(place, Place::Abandoned(body.to_vec()))
            {
                return Err(error);
            }
            if desk.is_over {
                desk.open.remove(&serial);
                return Err(self.owner_gone());
            }
            if is_over {
                desk.open.insert(serial, Place::Abandoned(body.to_vec()));
                let what = format!("an answer of {:?} (process {})", self.name, self.peer.pid);
                return Err(Error::Timeout { what, waited: patience.timeout });
            }
            (desk, is_over) = self.sleep(desk, patience);
        }
    }

    /// An answer; one that nobody waits for any more is for the visit to give back.
    fn on_answer(&self, serial: u64, answer: Result<Gift>) {
        if serial == UNASKED {
            return answer.into_iter().zip(self.visit()).for_each(|(gift, visit)| visit.told(gift));
        }
        let mut desk = self.lock();
        let question = match desk.open.get_mut(&serial) {
            Some(place @ (Place::Waiting | Place::Unread(_))) => {
                *place = Place::Answered(answer);
                return self.answered.notify_all();
            }
            Some(Place::Abandoned(question)) => std::mem::take(question),
            // It was told, not asked, or has been answered before.
            Some(Place::Answered(_)) | None => return,
        };
        desk.open.remove(&serial);
        drop(desk);
        self.answered.notify_all();
        if let (Ok(gift), Some(visit)) = (answer, self.visit()) {
            visit.late(&question, gift);
        }
    }

    /// The next answer stays in the socket until there is room for it. The caller that waits for it is told why.
    fn leave_unread(&self, error: Error) {
        let Some(serial) = message::next_answer(self.socket.as_fd()) else { return };
        if let Some(place @ Place::Waiting) = self.lock().open.get_mut(&serial) {
            *place = Place::Unread(error);
            self.answered.notify_all();
        }
    }

    fn on_socket(&self) -> Next {
        for _ in 0..TURN {
            match message::receive(self.socket.as_fd(), &self.name) {
                Ok(Received::Nothing) => return Next::Keep,
                Ok(Received::Message(Message::Answer { serial, body, .. }, fds)) => {
                    self.on_answer(serial, Ok(Gift { body, fds }));
                }
                Ok(Received::Message(Message::Declined { serial, text }, _)) => {
                    self.on_answer(serial, Err(Error::Refused { name: self.name.clone(), text }));
                }
                Ok(Received::Message(Message::Bye(_), _)) => self.is_graceful.store(true, SeqCst),
                Ok(Received::Message(Message::Refused { text, .. }, _)) => {
                    let _ = self.refusal.set(text);
                    self.over();
                    return Next::Stop;
                }
                // Our own want, which says nothing about the keeper.
                Err(error) if message::is_short(&error) => {
                    self.leave_unread(error);
                    return Next::Later;
                }
                // Anything else is the end of what we have to say to each other.
                Ok(Received::Message(..) | Received::End) | Err(_) => {
                    self.over();
                    return Next::Stop;
                }
            }
        }
        Next::Keep
    }

    fn over(&self) {
        if std::mem::replace(&mut self.lock().is_over, true) {
            return;
        }
        self.answered.notify_all();
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let graceful = self.is_graceful.load(SeqCst);
        self.visit().into_iter().for_each(|visit| visit.ended(graceful));
    }

    fn visit(&self) -> Option<Arc<dyn Visit>> {
        self.visit.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Watched for Inner {
    fn on_ready(&self, tag: u64) -> Next {
        match tag {
            _ if !self.home.is_here() => Next::Stop,
            SUSPECT => {
                // What it said last is still there to be read, its goodbye for one: no more than a socket's buffer holds.
                // The socket's end need not come: another process may have a copy of it.
                let is_over = || self.on_socket() == Next::Stop || self.lock().is_over;
                let _ = (0..LAST_WORDS).any(|_| is_over());
                self.over();
                Next::Stop
            }
            OVER => {
                self.on_ready(SUSPECT);
                self.is_dead.store(true, SeqCst);
                self.visit().into_iter().for_each(|visit| visit.orphaned());
                Next::Stop
            }
            PROVEN => {
                self.on_ready(OVER);
                self.visit().into_iter().for_each(|visit| visit.proven_dead());
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
    use crate::domain::{Domain, EndpointName};
    use crate::rendezvous::{Admission, Answer, Caller, Desk, Ending, Keep, Keeper, Refusal};

    struct Mute;

    impl Keep for Mute {
        fn admit(&self, _: &Desk, _: &Caller, _: &[u8]) -> std::result::Result<Answer, Refusal> {
            Ok(Answer::default())
        }

        fn answer(&self, _: &Desk, _: &Caller, _: &[u8]) -> std::result::Result<Answer, Refusal> {
            Ok(Answer::default())
        }

        fn holds(&self, _: &Caller) -> bool {
            true
        }

        fn gone(&self, _: &Desk, _: &Caller, _: Ending) {}
    }

    #[test]
    fn who_asks_a_keeper_that_has_just_left_is_told_that_it_said_goodbye() {
        let folder = std::env::temp_dir().join(format!("warpipe-visitor-left-{}", std::process::id()));
        let (domain, name) = (Domain::at(&folder).unwrap(), EndpointName::new("left").unwrap());
        let at = Address { domain: &domain, name: &name, kind: Kind::Timeline };
        let keeper = Keeper::open(&at, Admission::default(), Arc::new(Mute)).unwrap();
        // It does not listen: the watcher's part is played here, after the question.
        let (visitor, _) = Visitor::attach(&at, None, &[], Duration::ZERO).unwrap();
        drop(keeper);
        let told = std::thread::scope(|scope| {
            let asking = scope.spawn(|| visitor.ask(b"anybody?", Duration::from_secs(10)));
            while visitor.inner.lock().open.is_empty() && !asking.is_finished() {
                std::thread::yield_now();
            }
            while visitor.inner.on_socket() == Next::Keep {
                std::thread::yield_now();
            }
            asking.join().unwrap()
        });
        assert!(matches!(told, Err(Error::OwnerGone { graceful: true, .. })), "{told:?}");
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn the_error_of_a_keeper_that_has_left_waits_for_its_goodbye_to_be_read() {
        let folder = std::env::temp_dir().join(format!("warpipe-visitor-bye-{}", std::process::id()));
        let (domain, name) = (Domain::at(&folder).unwrap(), EndpointName::new("leaving").unwrap());
        let at = Address { domain: &domain, name: &name, kind: Kind::Timeline };
        let keeper = Keeper::open(&at, Admission::default(), Arc::new(Mute)).unwrap();
        // The watcher's part is played here, late.
        let (visitor, _) = Visitor::attach(&at, None, &[], Duration::ZERO).unwrap();
        drop(keeper);
        let told = std::thread::scope(|scope| {
            let (begins, begun) = channel();
            let visitor = &visitor;
            let asking = scope.spawn(move || {
                begins.send(()).unwrap();
                visitor.owner_gone()
            });
            begun.recv().unwrap();
            while visitor.inner.on_socket() == Next::Keep {
                std::thread::yield_now();
            }
            asking.join().unwrap()
        });
        assert!(matches!(told, Error::OwnerGone { graceful: true, .. }), "{told:?}");
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn a_dead_keeper_whose_socket_somebody_else_holds_open_is_dead_nevertheless() {
        let folder = std::env::temp_dir().join(format!("warpipe-visitor-held-{}", std::process::id()));
        let (domain, name) = (Domain::at(&folder).unwrap(), EndpointName::new("kept").unwrap());
        let at = Address { domain: &domain, name: &name, kind: Kind::Timeline };
        let keeper = Keeper::open(&at, Admission::default(), Arc::new(Mute)).unwrap();
        let (visitor, _) = Visitor::attach(&at, None, &[], Duration::ZERO).unwrap();
        let (inner, (told, hears)) = (visitor.inner.clone(), channel());
        // What the watcher does when the lifeline ends; the socket is open, and silent.
        std::thread::spawn(move || told.send(inner.on_ready(PROVEN)));
        assert_eq!(hears.recv_timeout(Duration::from_secs(10)), Ok(Next::Stop));
        assert!(visitor.is_dead() && visitor.is_over());
        drop((visitor, keeper));
        let _ = std::fs::remove_dir_all(folder);
    }

    struct Deaf;

    impl Visit for Deaf {}

    #[test]
    fn a_question_beyond_the_limit_waits_for_another_one_to_be_answered() {
        let folder = std::env::temp_dir().join(format!("warpipe-visitor-many-{}", std::process::id()));
        let (domain, name) = (Domain::at(&folder).unwrap(), EndpointName::new("asked").unwrap());
        let at = Address { domain: &domain, name: &name, kind: Kind::Timeline };
        let keeper = Keeper::open(&at, Admission::default(), Arc::new(Mute)).unwrap();
        let (visitor, _) = Visitor::attach(&at, None, &[], Duration::ZERO).unwrap();
        visitor.listen(Arc::new(Deaf)).unwrap();
        let others = (0..ASKED_MAX as u64).map(|other| u64::MAX - other);
        visitor.inner.lock().open.extend(others.map(|other| (other, Place::Waiting)));
        let (short, start) = (Duration::from_millis(100), Instant::now());
        let told = visitor.ask(b"a place?", short).map(drop);
        assert!(matches!(told, Err(Error::Timeout { waited, .. }) if waited == short), "{told:?}");
        assert!(start.elapsed() >= short, "it waits for a place");
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| visitor.ask(b"a place?", Duration::from_secs(60)).map(drop));
            visitor.inner.on_answer(u64::MAX, Ok(Gift { body: Vec::new(), fds: Vec::new() }));
            let none = Patience { start: Instant::now(), timeout: Duration::ZERO, is_called_off: &|| false };
            visitor.inner.wait_for((u64::MAX, &[]), &none).unwrap();
            asking.join().unwrap().unwrap();
        });
        drop((visitor, keeper));
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn a_question_that_is_called_off_ends_as_if_its_time_had_passed_wherever_it_waits() {
        let folder = std::env::temp_dir().join(format!("warpipe-visitor-off-{}", std::process::id()));
        let (domain, name) = (Domain::at(&folder).unwrap(), EndpointName::new("asked").unwrap());
        let at = Address { domain: &domain, name: &name, kind: Kind::Timeline };
        let keeper = Keeper::open(&at, Admission::default(), Arc::new(Mute)).unwrap();
        // It does not listen, so no answer is read.
        let (visitor, _) = Visitor::attach(&at, None, &[], Duration::ZERO).unwrap();
        // Who is asked may look at the visitor: nothing is locked.
        let called_off = || !visitor.inner.lock().is_over;
        let told = visitor.ask_unless(b"anybody?", Duration::MAX, &called_off).map(drop);
        assert!(matches!(told, Err(Error::Timeout { .. })), "{told:?}");
        let others = (0..ASKED_MAX as u64).map(|other| u64::MAX - other);
        visitor.inner.lock().open.extend(others.map(|other| (other, Place::Waiting)));
        let told = visitor.ask_unless(b"a place?", Duration::MAX, &called_off).map(drop);
        assert!(matches!(told, Err(Error::Timeout { .. })), "{told:?}");
        drop((visitor, keeper));
        let _ = std::fs::remove_dir_all(folder);
    }

    /// Hears of late answers.
    struct Late(Mutex<std::sync::mpsc::Sender<Vec<u8>>>);

    impl Visit for Late {
        fn late(&self, question: &[u8], _: Gift) {
            self.0.lock().unwrap().send(question.to_vec()).unwrap();
        }
    }

    #[test]
    fn a_late_answer_comes_with_its_question_and_counts_until_then() {
        let folder = std::env::temp_dir().join(format!("warpipe-visitor-late-{}", std::process::id()));
        let (domain, name) = (Domain::at(&folder).unwrap(), EndpointName::new("late").unwrap());
        let at = Address { domain: &domain, name: &name, kind: Kind::Timeline };
        let keeper = Keeper::open(&at, Admission::default(), Arc::new(Mute)).unwrap();
        // The watcher's part is played here, after the timeout.
        let (visitor, _) = Visitor::attach(&at, None, &[], Duration::ZERO).unwrap();
        let (tells, told) = channel();
        *visitor.inner.visit.lock().unwrap() = Some(Arc::new(Late(Mutex::new(tells))));
        let asked = visitor.ask(b"in time?", Duration::ZERO).map(drop);
        assert!(matches!(asked, Err(Error::Timeout { .. })), "{asked:?}");
        assert_eq!(visitor.inner.lock().open.len(), 1);
        let answer = loop {
            assert_eq!(visitor.inner.on_socket(), Next::Keep);
            match told.try_recv() {
                Ok(answer) => break answer,
                Err(_) => std::thread::yield_now(),
            }
        };
        assert_eq!((answer, visitor.inner.lock().open.len()), (b"in time?".to_vec(), 0));
        drop((visitor, keeper));
        let _ = std::fs::remove_dir_all(folder);
    }
}
