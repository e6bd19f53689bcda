//! Closes what may take long to close.
//!
//! `close` of a descriptor that a peer sent takes as long as the peer likes: a TCP socket with `SO_LINGER` and unsent
//! data waits for its reader, a file on FUSE for its server. The same holds for a Unix socket in whose queue such a
//! descriptor lies unread (the last `close` of the socket closes it), for a receive that has no room for it, and for
//! none of the rest: neither `shutdown` nor a receive with `MSG_PEEK` drops a descriptor (seen on Linux 6.18). So:
//!
//! * Linux 6.16 refuses descriptors at the sender, where the receiver's socket wants none ([`let_descriptors_in`](crate::os::let_descriptors_in)).
//! * [`message::receive`](super::message::receive) looks with `MSG_PEEK` first and consumes only what drops nothing.
//! * A [`PeerSocket`] is closed here and now if nothing is unread in it, and nothing can come any more; else by a thread
//!   of this module, which may hang. A [`PeerFd`] is closed by such a thread unless it was [approved](PeerFd::approve).
//! * A forked child closes its copy only of what asks nobody at a `close` that is not the last one, as a file on FUSE does.
//!
//! Each user's descriptors wait in a lane, with up to [`LANE_THREADS`] threads that may hang at once: what one user sends
//! delays nobody else's. Who has sent more than [`pending_max`] that do not come to an end is [refused](overdrawn).

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, ReturnFlags, Shutdown, sockopt};

use super::message::FIRST_BRINGS_DESCRIPTORS;
use super::peer::Peer;
use crate::fork::own::Own;
use crate::fork::{Home, PrivateFd, Section};
use crate::os;

/// The most threads of one lane that may hang in `close`.
pub(crate) const LANE_THREADS: usize = 4;

/// Lanes: one for what is this library's own, one for peers of this user, the others for all other users.
const LANES: usize = 16;
const OWN_LANE: usize = 0;
const USER_LANE: usize = 1;

/// The most descriptors of peers of this user that may wait to be closed before newcomers are refused.
const PENDING_MAX: usize = 256;

/// The same of each other user.
pub(crate) const PENDING_OF_OTHERS_MAX: usize = 64;

/// How long a lane closes nothing before it counts as stuck: many that wait for a moment are nothing.
const STUCK_AFTER: Duration = Duration::from_secs(1);

/// How long a thread waits for more before it ends: long enough for the sockets of one peer, short beside a process.
const IDLE_MAX: Duration = Duration::from_millis(100);

/// The most packets that are read to empty a socket before it is left to a thread.
const UNREAD_MAX: usize = 64;

/// A connected socket whose other end is another process.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    /// `None` only while dropping.
    fd: Option<PrivateFd>,
    home: Home,
}

impl From<PrivateFd> for PeerSocket {
    fn from(fd: PrivateFd) -> PeerSocket {
        PeerSocket { fd: Some(fd), home: Home::here() }
    }
}

impl AsFd for PeerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("present until dropped").as_fd()
    }
}

impl Drop for PeerSocket {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        // In a forked child the connection is the parent's.
        if self.home.is_here() && !end(fd.as_fd()) {
            hand_over(peer_of(fd.as_fd()), Held::Private(fd));
        }
    }
}

/// A socket that listens. Whoever connects can send to it before anybody looks who that is, so it lets no descriptors in
/// unless the first message brings some, and its connections inherit that.
#[derive(Debug)]
pub(crate) struct Listener {
    /// `None` only while dropping.
    fd: Option<PrivateFd>,
    /// Where the kernel cannot keep them out, they may lie in connections that nobody has accepted.
    lets_descriptors_in: bool,
    /// It lets none in, for the time being.
    is_wary: AtomicBool,
    home: Home,
}

impl Listener {
    /// Before it listens.
    pub(crate) fn new(fd: PrivateFd) -> Listener {
        let lets_descriptors_in = FIRST_BRINGS_DESCRIPTORS || !os::let_descriptors_in(fd.as_fd(), false);
        Listener { fd: Some(fd), lets_descriptors_in, is_wary: AtomicBool::new(false), home: Home::here() }
    }

    /// With each tick. While the descriptors of some user are [too many](overdrawn), none come in (Linux 6.16) before it has
    /// been [seen](Self::screen) whose they are.
    pub(crate) fn look(&self) {
        self.beware(is_anybody_overdrawn());
    }

    fn beware(&self, is_wary: bool) {
        if self.is_wary.swap(is_wary, Relaxed) != is_wary {
            os::let_descriptors_in(self.as_fd(), FIRST_BRINGS_DESCRIPTORS && !is_wary);
        }
    }

    /// Lets in who connected, or says why not, and whether that is for ever.
    pub(crate) fn screen(
        &self,
        socket: BorrowedFd<'_>,
        peer: &Peer,
        is_admitted: impl FnOnce() -> bool,
    ) -> Result<(), (bool, String)> {
        let overdrawn = overdrawn(peer.uid);
        if overdrawn.is_some() {
            self.beware(true);
        }
        if !is_admitted() {
            return Err((true, format!("uid {} is not on its list", peer.uid)));
        }
        if let Some(count) = overdrawn {
            return Err((false, format!("{count} descriptors that uid {} sent cannot be closed", peer.uid)));
        }
        if self.is_wary.load(Relaxed) {
            os::let_descriptors_in(socket, FIRST_BRINGS_DESCRIPTORS);
        }
        Ok(())
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("present until dropped").as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take()
            && self.home.is_here()
            && self.lets_descriptors_in
        {
            let _ = rustix::net::shutdown(&fd, Shutdown::Both);
            hand_over(None, Held::Private(fd));
        }
    }
}

/// A descriptor that a peer sent. Whatever it is, to drop it does not block.
#[derive(Debug)]
pub(crate) struct PeerFd {
    /// `None` only while dropping.
    fd: Option<Held>,
    /// Its sender's user, if that is known.
    uid: Option<u32>,
    is_approved: AtomicBool,
    home: Home,
}

#[derive(Debug)]
enum Held {
    /// Of a kind that a forked child closes.
    Private(PrivateFd),
    /// Of another one, for which a child would wait.
    Loose(OwnedFd),
}

impl From<PrivateFd> for PeerFd {
    fn from(fd: PrivateFd) -> PeerFd {
        PeerFd { fd: Some(Held::Private(fd)), uid: None, is_approved: AtomicBool::new(false), home: Home::here() }
    }
}

impl PeerFd {
    /// One that came in this section, from a peer of that user.
    pub(crate) fn received(section: &Section, fd: OwnedFd, uid: Option<u32>) -> PeerFd {
        let held = match closes_at_once_elsewhere(fd.as_fd()) {
            true => Held::Private(section.adopt_from_peer(fd)),
            false => Held::Loose(fd),
        };
        PeerFd { fd: Some(held), uid, is_approved: AtomicBool::new(false), home: Home::here() }
    }

    /// It is of a kind whose `close` does not block (a memfd, a pidfd, memory of a device): it needs no thread for that.
    pub(crate) fn approve(&self) {
        self.is_approved.store(true, Relaxed);
    }

    /// The same, to keep it.
    pub(crate) fn accept(mut self) -> PrivateFd {
        match self.fd.take().expect("present until dropped") {
            Held::Private(fd) => fd,
            Held::Loose(fd) => Section::enter().adopt_from_peer(fd),
        }
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.fd.as_ref().expect("present until dropped") {
            Held::Private(fd) => fd.as_fd(),
            Held::Loose(fd) => fd.as_fd(),
        }
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        match self.fd.take() {
            Some(held) if self.home.is_here() && !self.is_approved.load(Relaxed) => hand_over(self.uid, held),
            // It is the parent's.
            Some(Held::Loose(fd)) if !self.home.is_here() => std::mem::forget(fd),
            _ => {}
        }
    }
}

/// Whether `close` of a copy that is not the last one returns at once. Asks no file system, and waits for nobody.
fn closes_at_once_elsewhere(fd: BorrowedFd<'_>) -> bool {
    let Ok(kind) = os::kind_of(fd) else { return false };
    match kind.file {
        _ if kind.flags.contains(OFlags::PATH) => true,
        FileType::Fifo | FileType::CharacterDevice | FileType::Unknown => true,
        FileType::Socket => sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX),
        FileType::RegularFile => rustix::fs::fcntl_get_seals(fd).is_ok(),
        _ => false,
    }
}

/// Ends the connection, so that the peer sees it at once. True if its `close` drops no descriptor: nothing is unread,
/// and after `shutdown` nothing can be sent to it.
fn end(socket: BorrowedFd<'_>) -> bool {
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
    for _ in 0..UNREAD_MAX {
        match peek(socket, &mut [0]) {
            Ok((_, flags)) if flags.contains(ReturnFlags::CTRUNC) => return false,
            // The end, or a packet of no bytes.
            Ok((0, _)) => break,
            Ok(_) => drop(rustix::net::recv(socket, &mut [0u8; 8][..], RecvFlags::DONTWAIT)),
            Err(_) => return false,
        }
    }
    // With this option whatever is in the queue has control data, which there is no room for; the end has none.
    rustix::net::sockopt::set_socket_passcred(socket, true).is_ok()
        && matches!(peek(socket, &mut [0]), Ok((_, flags)) if !flags.contains(ReturnFlags::CTRUNC))
}

/// Looks at the next packet and leaves it where it is: its length as far as it fits, and its flags, with
/// [`ReturnFlags::CTRUNC`] if descriptors come with it.
pub(super) fn peek(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, ReturnFlags), Errno> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let mut none = rustix::net::RecvAncillaryBuffer::default();
    let mut bytes = [std::io::IoSliceMut::new(bytes)];
    let got = rustix::net::recvmsg(socket, &mut bytes, &mut none, flags)?;
    Ok((got.bytes, got.flags))
}

/// The user at the other end of a socket.
pub(super) fn peer_of(socket: BorrowedFd<'_>) -> Option<u32> {
    os::peer_uid(socket).ok()
}

/// Leaves it to a thread to close this, which a peer of that user has sent; `None` of what is this library's own.
fn hand_over(uid: Option<u32>, fd: Held) {
    let closer = Closer::of_process();
    let mut state = closer.lock();
    let lane = lane_of(uid);
    uid.into_iter().for_each(|uid| *state.pending.entry(uid).or_default() += 1);
    let it = &mut state.lanes[lane];
    if it.closing == 0 && it.waiting.is_empty() {
        it.moved = Some(Instant::now());
    }
    it.waiting.push_back((uid, fd));
    if it.waiting.len() <= it.idle {
        return closer.wanted[lane].notify_one();
    }
    // Without a thread, for want of memory say, the next that is handed over tries again.
    if it.threads < LANE_THREADS {
        let runner = closer.clone();
        let spawned = std::thread::Builder::new().name("warpipe-closer".into()).spawn(move || runner.run(lane));
        it.threads += usize::from(spawned.is_ok());
    }
}

/// Leaves it to a thread to close what is this library's own and takes a while.
pub(crate) fn release_behind(fd: PrivateFd) {
    hand_over(None, Held::Private(fd));
}

fn lane_of(uid: Option<u32>) -> usize {
    match uid {
        None => OWN_LANE,
        Some(uid) if is_own(uid) => USER_LANE,
        Some(uid) => USER_LANE + 1 + uid as usize % (LANES - USER_LANE - 1),
    }
}

fn is_own(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw()
}

fn pending_max(uid: u32) -> usize {
    if is_own(uid) { PENDING_MAX } else { PENDING_OF_OTHERS_MAX }
}

/// How many of that user's descriptors cannot be closed, if these are too many for a newcomer of that user.
pub(crate) fn overdrawn(uid: u32) -> Option<usize> {
    Closer::of_process().lock().overdrawn(uid)
}

/// Whether there is such a user.
pub(crate) fn is_anybody_overdrawn() -> bool {
    let closer = Closer::of_process();
    let state = closer.lock();
    state.pending.keys().any(|&uid| state.overdrawn(uid).is_some())
}

/// Descriptors from peers whose `close` has not returned. A few for a moment are nothing; a number that stays is a peer
/// that sends what takes long to close (a socket that lingers, a file on FUSE), and costs this process a descriptor
/// each, and a thread for each of the first 4 of a user. From 64 of another user on (256 of this one), newcomers of that
/// user are refused.
pub fn pending_closes() -> usize {
    let closer = Closer::of_process();
    let state = closer.lock();
    state.lanes.iter().map(|lane| lane.closing + lane.waiting.len()).sum()
}

#[derive(Default)]
struct Closer {
    state: Mutex<State>,
    wanted: [Condvar; LANES],
}

#[derive(Default)]
struct State {
    lanes: [Lane; LANES],
    /// Of each user.
    pending: HashMap<u32, usize>,
}

#[derive(Default)]
struct Lane {
    waiting: VecDeque<(Option<u32>, Held)>,
    threads: usize,
    /// Those that wait for something to do.
    idle: usize,
    /// Those that are in `close`.
    closing: usize,
    /// When it closed something last, or began to.
    moved: Option<Instant>,
}

impl State {
    fn overdrawn(&self, uid: u32) -> Option<usize> {
        let count = self.pending.get(&uid).copied().filter(|&count| count >= pending_max(uid))?;
        self.lanes[lane_of(Some(uid))].is_stuck().then_some(count)
    }
}

impl Lane {
    fn is_stuck(&self) -> bool {
        self.moved.is_some_and(|moved| moved.elapsed() > STUCK_AFTER)
    }
}

impl Held {
    /// Of a lane that is stuck. A child that is forked meanwhile may have the last copy of what hangs, and keeps it.
    fn loosened(self) -> Held {
        match self {
            Held::Private(fd) => Held::Loose(fd.release()),
            loose => loose,
        }
    }
}

impl Closer {
    /// That of this process; a forked child has its own.
    fn of_process() -> Arc<Closer> {
        static CURRENT: Own<Arc<Closer>> = Own::new();
        CURRENT.get().clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, lane: usize) {
        let mut state = self.lock();
        loop {
            if let Some((uid, fd)) = state.lanes[lane].waiting.pop_front() {
                state.lanes[lane].closing += 1;
                let is_stuck = state.lanes[lane].is_stuck();
                drop(state);
                drop(if is_stuck { fd.loosened() } else { fd });
                state = self.lock();
                let State { lanes, pending } = &mut *state;
                lanes[lane].closing -= 1;
                lanes[lane].moved = Some(Instant::now());
                uid.into_iter().for_each(|uid| one_less(pending, uid));
                continue;
            }
            state.lanes[lane].idle += 1;
            let waited = self.wanted[lane].wait_timeout(state, IDLE_MAX);
            let (woken, slept) = waited.unwrap_or_else(PoisonError::into_inner);
            state = woken;
            let it = &mut state.lanes[lane];
            it.idle -= 1;
            if slept.timed_out() && it.waiting.is_empty() {
                it.threads -= 1;
                return;
            }
        }
    }
}

fn one_less(pending: &mut HashMap<u32, usize>, uid: u32) {
    if let Some(count) = pending.get_mut(&uid) {
        *count -= 1;
        if *count == 0 {
            pending.remove(&uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    fn say(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        crate::hostile::send_raw(socket, bytes, fds).unwrap();
    }

    #[test]
    fn a_socket_is_closed_here_if_it_holds_no_descriptor_and_only_then() {
        let file = pair();
        type Packet<'a> = (&'a [u8], usize);
        type Case<'a> = (&'a str, &'a [Packet<'a>], bool);
        let cases: [Case<'_>; 6] = [
            ("nothing", &[], true),
            ("words", &[(b"one", 0), (b"two", 0)], true),
            ("a descriptor", &[(b"one", 1)], false),
            ("behind words", &[(b"one", 0), (b"two", 1)], false),
            ("behind nothing", &[(b"one", 0), (b"", 0), (b"two", 1)], false),
            ("with nothing", &[(b"", 1)], false),
        ];
        for (what, packets, is_quiet) in cases {
            let (ours, theirs) = pair();
            for &(bytes, count) in packets {
                say(&theirs, bytes, &vec![file.0.as_fd(); count]);
            }
            assert_eq!(end(ours.as_fd()), is_quiet, "{what}");
            assert_eq!(rustix::net::send(&theirs, b"more", rustix::net::SendFlags::NOSIGNAL), Err(Errno::PIPE));
        }
        let (ours, theirs) = pair();
        drop(theirs);
        assert!(end(ours.as_fd()), "whose peer has gone");
    }
}
