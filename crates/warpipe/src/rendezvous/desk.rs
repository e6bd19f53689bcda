//! The keeper's side: who is here, and what they say.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::io::Errno;

use super::{Address, Admission, Answer, Caller, Ending, FDS_MAX, Keep, Kind, Refusal, UNASKED};
use crate::domain::Claim;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::{Home, PrivateFd};
use crate::link::closer::{PeerFd, PeerSocket};
use crate::link::limits::{Seat, Seats, makes_way};
use crate::link::message::{self, Farewell, Message, Received};
use crate::link::peer::{ORPHAN_TIMEOUT, Peer, Process, Sign};
use crate::link::pulse::Uptime;
use crate::link::watcher::{Next, Watch, Watched, Watcher, new_generation};

/// Connections that have not said what they come for.
const MUTES_MAX: usize = 64;

/// How long they may take, in time in which this process ran.
const MUTE_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections accepted, and messages of one visitor answered, before others have their turn.
const TURN: usize = 16;

/// How often the socket of one that does no more is read, [`TURN`] messages each time.
const LAST_WORDS: usize = 16;

const LISTENER: u64 = 0;
const SOCKET: u64 = 0;
const PROVEN: u64 = 1;
const SUSPECT: u64 = 2;
const OVER: u64 = 3;

fn tag(id: u64, kind: u64) -> u64 {
    id << 2 | kind
}

/// Holds a name and what is kept under it; dropped, it says goodbye to all and gives the name up.
#[derive(Debug)]
pub(crate) struct Keeper {
    desk: Arc<Desk>,
}

impl Keeper {
    /// Takes the name. `keep` is called from then on.
    pub(crate) fn open(at: &Address<'_>, admission: Admission, keep: Arc<dyn Keep>) -> Result<Keeper> {
        let watcher = Watcher::of_process()?;
        let claim = at.domain.claim(at.name, admission.is_open_to_others())?;
        let desk = Arc::new_cyclic(|me: &Weak<Desk>| Desk {
            home: Home::here(),
            name: at.name.to_string(),
            kind: at.kind,
            generation: new_generation(),
            seats: Seats::new(admission.limits),
            admission,
            keep,
            me: me.clone(),
            watcher: watcher.clone(),
            guests: Mutex::default(),
            next_id: AtomicU64::new(1),
            listener_watch: Mutex::new(None),
            is_deaf: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            claim,
        });
        desk.listen()?;
        watcher.tick(desk.me.clone());
        Ok(Keeper { desk })
    }

    pub(crate) fn desk(&self) -> &Arc<Desk> {
        &self.desk
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if self.desk.home.is_here() {
            self.desk.close();
        } else {
            // A forked child: nothing of it is ours to close.
            std::mem::forget(self.desk.clone());
        }
    }
}

/// One connection.
struct Guest {
    /// Declared first: they end before their descriptors are closed.
    watches: Vec<Watch>,
    socket: Arc<PeerSocket>,
    peer: Arc<Peer>,
    phase: Phase,
    /// From its first words on: held, not used.
    seat: Option<Seat>,
}

enum Phase {
    /// It has not said what it comes for.
    Mute {
        clock: Uptime,
    },
    Present(Caller),
    /// It has said goodbye.
    Leaving(Caller),
    /// Its socket has closed without one.
    Suspect(Caller),
}

/// A keeper's shared part.
pub(crate) struct Desk {
    home: Home,
    name: String,
    kind: Kind,
    generation: [u8; 16],
    admission: Admission,
    keep: Arc<dyn Keep>,
    me: Weak<Desk>,
    watcher: Arc<Watcher>,
    guests: Mutex<HashMap<u64, Guest>>,
    seats: Seats,
    next_id: AtomicU64,
    listener_watch: Mutex<Option<Watch>>,
    /// Out of descriptors: the listener is not watched until the next tick.
    is_deaf: AtomicBool,
    is_closed: AtomicBool,
    claim: Claim,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("name", &self.name).field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Desk {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// This incarnation of the name.
    pub(crate) fn generation(&self) -> [u8; 16] {
        self.generation
    }

    pub(crate) fn watcher(&self) -> &Arc<Watcher> {
        &self.watcher
    }

    /// A visitor's process, for others to watch.
    pub(crate) fn process_of(&self, id: u64) -> Option<Arc<Process>> {
        self.lock().get(&id)?.peer.process().cloned()
    }

    /// Tells a visitor something that it has not asked for, without waiting. False if it is not there, or does not read
    /// what it is sent.
    pub(crate) fn tell(&self, id: u64, answer: Answer) -> bool {
        let socket = match self.lock().get(&id) {
            Some(Guest { phase: Phase::Present(_), socket, .. }) => socket.clone(),
            _ => return false,
        };
        let Answer { body, fds } = answer;
        send_with(&socket, &Message::Answer { serial: UNASKED, body, fds: fds.len().min(FDS_MAX) as u8 }, &fds).is_ok()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Guest>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn socket_of(&self, id: u64) -> Option<Arc<PeerSocket>> {
        self.lock().get(&id).map(|guest| guest.socket.clone())
    }

    fn watched(&self) -> Weak<dyn Watched> {
        self.me.clone()
    }

    fn listen(&self) -> Result<()> {
        let watch = self.watcher.watch(self.claim.listener.as_fd(), &self.watched(), LISTENER)?;
        *self.listener_watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
        Ok(())
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.claim.withdraw();
        *self.listener_watch.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let guests = std::mem::take(&mut *self.lock());
        for guest in guests.values() {
            let _ = message::send(guest.socket.as_fd(), &Message::Bye(Farewell::Closed), &[]);
        }
    }

    fn accept(&self) -> Next {
        use rustix::net::{SocketFlags, accept_with};
        for _ in 0..TURN {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match PrivateFd::open(|| accept_with(&self.claim.listener, flags)) {
                Ok(socket) => self.greet(PeerSocket::from(socket)),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Next::Keep,
                Err(_) => {
                    self.is_deaf.store(true, Ordering::Relaxed);
                    return Next::Stop;
                }
            }
        }
        Next::Keep
    }

    /// Looks who is there before a byte is read.
    fn greet(&self, socket: PeerSocket) {
        let peer = match Peer::of(socket.as_fd(), &self.name) {
            Ok(peer) => peer,
            Err(error) => return refuse(socket.as_fd(), false, error),
        };
        if let Err((denied, reason)) =
            self.claim.listener.screen(socket.as_fd(), &peer, || self.admission.admits(peer.uid, peer.gid))
        {
            return refuse(socket.as_fd(), denied, reason);
        }
        let mut guests = self.lock();
        let mutes = guests.iter().filter(|(_, guest)| matches!(guest.phase, Phase::Mute { .. }));
        let mutes: Vec<(u64, u32)> = mutes.map(|(id, guest)| (*id, guest.peer.uid)).collect();
        if mutes.len() >= MUTES_MAX {
            // Who says nothing makes way for who may: a crowd of mutes keeps nobody out.
            let mute = makes_way(mutes.into_iter()).and_then(|oldest| guests.remove(&oldest));
            mute.into_iter().for_each(|mute| refuse(mute.socket.as_fd(), false, "too many connect and say nothing"));
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let phase = Phase::Mute { clock: Uptime::default() };
        let (socket, peer) = (Arc::new(socket), Arc::new(peer));
        guests.insert(id, Guest { watches: Vec::new(), socket, peer, phase, seat: None });
        drop(guests);
        // Mostly it has said by now what it comes for: to hear that from the watcher would cost two threads' turns.
        if self.on_socket(id) == Next::Keep {
            self.watch_socket(id);
        }
    }

    fn watch_socket(&self, id: u64) {
        let Some(socket) = self.socket_of(id) else { return };
        match self.watcher.watch(socket.as_fd(), &self.watched(), tag(id, SOCKET)) {
            Ok(watch) => {
                // If nobody is there any more it ends here, before the socket does.
                if let Some(guest) = self.lock().get_mut(&id) {
                    guest.watches.push(watch);
                }
            }
            Err(error) => {
                refuse(socket.as_fd(), false, error);
                self.on_end(id);
            }
        }
    }

    /// A visitor's socket speaks.
    fn on_socket(&self, id: u64) -> Next {
        for _ in 0..TURN {
            let Some(socket) = self.socket_of(id) else { return Next::Stop };
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

    /// An error ends the visit.
    fn on_message(&self, id: u64, socket: &PeerSocket, message: Message, mut fds: Vec<PeerFd>) -> Result<(), Refusal> {
        let caller = match self.lock().get(&id).map(|guest| &guest.phase) {
            Some(Phase::Present(caller)) => Some(caller.clone()),
            _ => None,
        };
        match (message, caller) {
            (Message::Visit { device, kind, body, .. }, None) => {
                crate::os::let_descriptors_in(socket.as_fd(), false);
                let lifeline = message::take_lifeline(&mut fds)?;
                self.admit(id, socket, device, kind, &body, lifeline)
            }
            (Message::Hello { kind, .. }, None) => Err(self.is_other(socket, kind)),
            (Message::Ask { serial, body }, Some(caller)) => {
                let sent = match self.keep.answer(self, &caller, &body) {
                    Ok(Answer { body, fds }) => {
                        let message = Message::Answer { serial, body, fds: fds.len().min(FDS_MAX) as u8 };
                        send_with(socket, &message, &fds)
                    }
                    Err(Refusal(text)) => {
                        send_with(socket, &Message::Declined { serial, text: message::text(text) }, &[])
                    }
                };
                sent.map_err(|error| Refusal(format!("the answer could not be sent: {error}")))
            }
            (Message::Bye(_), Some(caller)) => {
                self.lock().get_mut(&id).into_iter().for_each(|guest| guest.phase = Phase::Leaving(caller.clone()));
                Ok(())
            }
            (other, None) => Err(Refusal(other.unexpected("Visit").to_string())),
            (other, Some(_)) => Err(Refusal(other.unexpected("Ask or Bye").to_string())),
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
    ) -> Result<(), Refusal> {
        if kind != self.kind {
            return Err(self.is_other(socket, kind));
        }
        let Some(caller) = self.enter(id, device, lifeline)? else { return Ok(()) };
        let answer = self.keep.admit(self, &caller, body)?;
        // Present before it is told so: whatever happens from here, `gone` is due.
        if !self.seat(id, &caller) {
            self.keep.gone(self, &caller, Ending::Left);
            return Ok(());
        }
        let fds = answer.fds.len().min(FDS_MAX) as u8;
        let message = Message::Granted { generation: self.generation, body: answer.body, fds };
        send_with(socket, &message, &answer.fds)
            .map_err(|error| Refusal(Error::os("sendmsg", "the admission", error).to_string()))
    }

    /// Tells one who took this endpoint for another kind.
    fn is_other(&self, socket: &PeerSocket, wanted: Kind) -> Refusal {
        let _ = message::send(socket.as_fd(), &Message::OtherKind { found: self.kind }, &[]);
        Refusal(format!("it is a {}, not a {wanted}", self.kind))
    }

    /// False if it is there no more: it was shown the door as a mute while it was being let in.
    fn seat(&self, id: u64, caller: &Caller) -> bool {
        let mut guests = self.lock();
        let Some(guest) = guests.get_mut(&id) else { return false };
        guest.phase = Phase::Present(caller.clone());
        true
    }

    /// Watches for the death of who comes in.
    fn enter(
        &self,
        id: u64,
        device: Option<crate::backend::DeviceId>,
        lifeline: [PeerFd; 2],
    ) -> Result<Option<Caller>, Refusal> {
        let Some(peer) = self.lock().get(&id).map(|guest| guest.peer.clone()) else { return Ok(None) };
        // Without the lock, which every tick takes: it looks at what the visitor sent.
        peer.adopt(lifeline)?;
        let mut guests = self.lock();
        let Some(guest) = guests.get_mut(&id) else { return Ok(None) };
        match self.seats.take(&guest.peer, &guest.socket) {
            Ok(seat) => guest.seat = Some(seat),
            Err((limit, max)) => {
                let full = HandshakeFault::Full { limit, max }.to_string();
                let _ = message::send(guest.socket.as_fd(), &Message::Full { limit, max }, &[]);
                return Err(Refusal(full));
            }
        }
        let signs = [(Sign::Suspect, SUSPECT), (Sign::Over(ORPHAN_TIMEOUT), OVER), (Sign::Proven, PROVEN)];
        for (sign, kind) in signs {
            guest.watches.push(guest.peer.watch(sign, &self.watched(), tag(id, kind))?);
        }
        Ok(Some(Caller { id, uid: guest.peer.uid, device }))
    }

    /// A visitor's socket is at its end, or is put to it.
    fn on_end(&self, id: u64) -> Next {
        let present = match self.lock().get(&id).map(|guest| &guest.phase) {
            Some(Phase::Present(caller)) => Some(caller.clone()),
            _ => None,
        };
        // Without the lock, which every tick takes: the answer takes a lock of the keeper's own.
        let holds = present.is_some_and(|caller| self.keep.holds(&caller));
        let mut guests = self.lock();
        let Some(mut guest) = guests.remove(&id) else { return Next::Stop };
        match guest.phase {
            Phase::Mute { .. } => {}
            Phase::Leaving(ref caller) => {
                drop(guests);
                self.keep.gone(self, caller, Ending::Left);
            }
            Phase::Suspect(_) => drop(guests.insert(id, guest)),
            Phase::Present(ref caller) => {
                let caller = caller.clone();
                if !holds {
                    drop(guests);
                    self.keep.gone(self, &caller, Ending::Left);
                    return Next::Stop;
                }
                guest.phase = Phase::Suspect(caller.clone());
                let _ = rustix::net::shutdown(&*guest.socket, rustix::net::Shutdown::Both);
                guests.insert(id, guest);
                drop(guests);
                self.keep.suspect(self, &caller);
            }
        }
        Next::Stop
    }

    /// It does no more, whenever its socket comes to its end: what it said before is in there.
    fn on_suspect(&self, id: u64) -> Next {
        if (0..LAST_WORDS).all(|_| self.on_socket(id) == Next::Keep) {
            self.on_end(id);
        }
        Next::Stop
    }

    /// It has exited, and its device work may go on for long: nobody's stream waits for it any more.
    fn on_over(&self, id: u64) -> Next {
        let caller = match self.lock().get(&id).map(|guest| &guest.phase) {
            Some(Phase::Present(caller) | Phase::Suspect(caller) | Phase::Leaving(caller)) => caller.clone(),
            _ => return Next::Stop,
        };
        self.keep.orphaned(self, &caller);
        Next::Stop
    }

    fn on_death(&self, id: u64) -> Next {
        let Some(guest) = self.lock().remove(&id) else { return Next::Stop };
        match &guest.phase {
            Phase::Mute { .. } => {}
            Phase::Present(caller) | Phase::Suspect(caller) | Phase::Leaving(caller) => {
                self.keep.gone(self, caller, Ending::Died);
            }
        }
        Next::Stop
    }
}

impl Watched for Desk {
    fn is_attended(&self) -> bool {
        !self.keep.is_quick()
    }

    fn on_ready(&self, tag: u64) -> Next {
        if !self.home.is_here() || self.is_closed.load(Ordering::SeqCst) {
            return Next::Stop;
        }
        match (tag, tag >> 2, tag & 3) {
            (LISTENER, ..) => self.accept(),
            (_, id, PROVEN) => self.on_death(id),
            (_, id, SUSPECT) => self.on_suspect(id),
            (_, id, OVER) => self.on_over(id),
            (_, id, _) => self.on_socket(id),
        }
    }

    fn on_tick(&self, now_ns: u64) {
        if self.is_closed.load(Ordering::SeqCst) {
            return;
        }
        if self.is_deaf.swap(false, Ordering::Relaxed) && self.listen().is_err() {
            self.is_deaf.store(true, Ordering::Relaxed);
        }
        let is_late = |guest: &Guest| matches!(&guest.phase, Phase::Mute { clock } if clock.ran() > MUTE_TIMEOUT);
        self.lock().retain(|_, guest| !is_late(guest));
        self.seats.settle();
        self.claim.listener.look();
        self.keep.tick(self, now_ns);
    }
}

fn send_with(socket: &PeerSocket, message: &Message, fds: &[PrivateFd]) -> std::result::Result<(), Errno> {
    if fds.len() > FDS_MAX {
        return Err(Errno::INVAL);
    }
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    message::send(socket.as_fd(), message, &borrowed)
}

fn refuse(socket: BorrowedFd<'_>, denied: bool, reason: impl Into<Reason>) {
    let _ = message::send(socket, &Message::Refused { denied, text: message::text(reason.into().0) }, &[]);
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

impl From<Refusal> for Reason {
    fn from(refusal: Refusal) -> Reason {
        Reason(refusal.0)
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
    use crate::domain::{Domain, EndpointName};
    use crate::rendezvous::Visitor;

    /// Takes so long to let somebody in that he is taken for a mute.
    struct Slow(Mutex<Sender<Ending>>);

    impl Keep for Slow {
        fn admit(&self, desk: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
            // As a tick does.
            desk.lock().retain(|_, guest| !matches!(guest.phase, Phase::Mute { .. }));
            Ok(Answer::default())
        }

        fn answer(&self, _: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
            Ok(Answer::default())
        }

        fn holds(&self, _: &Caller) -> bool {
            true
        }

        fn gone(&self, _: &Desk, _: &Caller, ending: Ending) {
            let _ = self.0.lock().unwrap().send(ending);
        }
    }

    #[test]
    fn one_who_has_not_spoken_is_not_given_up_because_this_process_stood_still() {
        let folder = std::env::temp_dir().join(format!("warpipe-desk-frozen-{}", std::process::id()));
        let (domain, name) = (Domain::at(&folder).unwrap(), EndpointName::new("kept").unwrap());
        let at = Address { domain: &domain, name: &name, kind: Kind::Timeline };
        let keeper = Keeper::open(&at, Admission::default(), Arc::new(Slow(Mutex::new(channel().0)))).unwrap();
        let newcomer = domain.connect(&name, Duration::ZERO).unwrap();
        let desk = keeper.desk();
        let mut backoff = crate::stream::Backoff::default();
        while desk.lock().is_empty() {
            backoff.pause();
        }
        for guest in desk.lock().values() {
            let Phase::Mute { clock } = &guest.phase else { panic!("it has said nothing") };
            clock.freeze(100 * MUTE_TIMEOUT);
        }
        // The other end stood still, too, and says what it comes for when both go on.
        desk.on_tick(0);
        assert_eq!(desk.lock().len(), 1);
        drop((newcomer, keeper));
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn who_is_shown_the_door_while_he_is_let_in_is_gone_and_not_forgotten() {
        let folder = std::env::temp_dir().join(format!("warpipe-desk-mute-{}", std::process::id()));
        let (domain, name) = (Domain::at(&folder).unwrap(), EndpointName::new("kept").unwrap());
        let at = Address { domain: &domain, name: &name, kind: Kind::Timeline };
        let (saw, seen) = channel();
        let keeper = Keeper::open(&at, Admission::default(), Arc::new(Slow(Mutex::new(saw)))).unwrap();
        let visit = Visitor::attach(&at, None, &[], Duration::ZERO);
        assert!(visit.is_err(), "its visit is over before it began");
        assert_eq!(seen.recv_timeout(Duration::from_secs(10)), Ok(Ending::Left));
        drop(keeper);
        let _ = std::fs::remove_dir_all(folder);
    }
}
