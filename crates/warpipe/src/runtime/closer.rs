//! Closes descriptors with a `close` that may take long.
//!
//! `close` of a descriptor that a peer sent takes as long as the peer likes: a TCP socket with
//! `SO_LINGER` and unsent data waits for its reader, a file on FUSE for its server, and a Unix
//! socket for such a descriptor in its queue. So does a receive that has no room for one.
//!
//! A [`PeerSocket`] with nothing unread, to which nothing more can come, is closed at once; so are
//! a [`Listener`] with an empty backlog and an [approved](PeerFd::approve) [`PeerFd`]. A thread of
//! this module closes each of the others, and may hang. A forked child closes its copy only where a
//! `close` that is not the last returns at once, and keeps one that a thread is closing. A user
//! that keeps [`pending_max`] descriptors pending is [refused](over_limit), and has no more threads
//! than that.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, ReturnFlags, Shutdown, SocketFlags, accept_with, sockopt,
};

use crate::fork::per_process::PerProcess;
use crate::fork::thread::Thread;
use crate::fork::{CloseOnForkFd, NoForkSection};
use crate::os;

/// The most descriptors of peers of this user that may wait to be closed before new connections are
/// refused.
const PENDING_MAX: usize = 256;

/// The same limit for each other user.
pub(crate) const PENDING_OF_OTHERS_MAX: usize = 64;

/// The most threads of all other users together: a user may have many uids.
const THREADS_OF_OTHERS_MAX: usize = 4 * PENDING_OF_OTHERS_MAX;

/// How long a user's descriptors are at their limit before they count as stuck. Many that wait for
/// a moment are harmless.
const STUCK_AFTER: Duration = Duration::from_secs(1);

/// The most packets that are read to empty a socket before it is left to a thread.
const UNREAD_MAX: usize = 64;

/// The stack of a thread that closes one descriptor.
const STACK_BYTES: usize = 128 << 10;

/// `SO_SNDBUF` of a [`PeerSocket`]: the kernel doubles it (`socket(7)`), to what Linux gives.
pub(crate) const SEND_BYTES: usize = 106_496;

/// A connected socket with its other end in another process.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    fd: CloseOnForkFd,
}

impl From<CloseOnForkFd> for PeerSocket {
    fn from(fd: CloseOnForkFd) -> PeerSocket {
        // One with all the room that a socket may have would have no more for a last message.
        let _ = sockopt::set_socket_send_buffer_size(&fd, SEND_BYTES);
        PeerSocket { fd }
    }
}

impl AsFd for PeerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for PeerSocket {
    fn drop(&mut self) {
        // In a forked child the connection is the parent's.
        if self.fd.is_own() && !end(self.fd.as_fd()) {
            enqueue(peer_of(self.fd.as_fd()), self.fd.take());
        }
    }
}

/// A listening socket. A client can send to it before its credentials are checked, and its
/// connections inherit whether they let descriptors in. Connections that are not accepted yet may
/// hold some.
#[derive(Debug)]
pub(crate) struct Listener {
    fd: CloseOnForkFd,
    /// The listener lets no descriptors in for the time being.
    is_refusing: AtomicBool,
}

impl Listener {
    pub(crate) fn new(fd: CloseOnForkFd) -> Listener {
        Listener {
            fd,
            is_refusing: AtomicBool::new(false),
        }
    }

    /// Called at each tick. While some user has [too many](over_limit) pending descriptors, none
    /// come in (Linux 6.16) before the peer has been [screened](Self::screen).
    pub(crate) fn update_refusing(&self) {
        self.set_refusing(is_any_user_over_limit());
    }

    fn set_refusing(&self, is_refusing: bool) {
        if self.is_refusing.swap(is_refusing, Relaxed) != is_refusing {
            os::let_descriptors_in(self.as_fd(), !is_refusing);
        }
    }

    /// Lets a new connection in, or returns the reason why not, and whether that is permanent.
    pub(crate) fn screen(
        &self,
        socket: BorrowedFd<'_>,
        uid: u32,
        is_admitted: impl FnOnce() -> bool,
    ) -> Result<(), (bool, String)> {
        let over_limit = over_limit(uid);
        if over_limit.is_some() {
            self.set_refusing(true);
        }
        if !is_admitted() {
            return Err((true, format!("uid {uid} is not on its list")));
        }
        if let Some(count) = over_limit {
            return Err((
                false,
                format!("{count} descriptors that uid {uid} sent cannot be closed"),
            ));
        }
        if self.is_refusing.load(Relaxed) {
            os::let_descriptors_in(socket, true);
        }
        Ok(())
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    /// Closed at once if no connection is left in its backlog: none comes any more.
    fn drop(&mut self) {
        if !self.fd.is_own() {
            return;
        }
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            match CloseOnForkFd::open(|| accept_with(&self.fd, flags)) {
                Ok(socket) => drop(PeerSocket::from(socket)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::INVAL) => return,
                Err(_) => return enqueue(None, self.fd.take()),
            }
        }
    }
}

/// A descriptor that a peer sent. Dropping it never blocks, whatever file it is.
#[derive(Debug)]
pub(crate) struct PeerFd {
    fd: CloseOnForkFd,
    /// The sender's user, if it is known.
    uid: Option<u32>,
    is_approved: AtomicBool,
}

impl From<CloseOnForkFd> for PeerFd {
    fn from(fd: CloseOnForkFd) -> PeerFd {
        PeerFd {
            fd,
            uid: None,
            is_approved: AtomicBool::new(false),
        }
    }
}

impl PeerFd {
    /// A descriptor that was received in this section, from a peer of that user. A forked child
    /// keeps a file with a `close` that could block it.
    pub(crate) fn received(section: &NoForkSection, fd: OwnedFd, uid: Option<u32>) -> PeerFd {
        let closes_at_once = closes_at_once_elsewhere(fd.as_fd());
        let fd = section.hold_from_peer(fd);
        if closes_at_once {
            fd.close_in_child();
        }
        let mut received = PeerFd::from(fd);
        received.uid = uid;
        received
    }

    /// Marks the descriptor as a file with a `close` that does not block (a memfd, a pidfd, memory
    /// of a device): it needs no thread for that.
    pub(crate) fn approve(&self) {
        self.is_approved.store(true, Relaxed);
    }

    /// As [`approve`](Self::approve), and takes the descriptor.
    pub(crate) fn accept(mut self) -> CloseOnForkFd {
        let fd = self.fd.take();
        let _section = NoForkSection::enter();
        fd.close_in_child();
        fd
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        if self.fd.is_own() && !self.is_approved.load(Relaxed) {
            enqueue(self.uid, self.fd.take());
        }
    }
}

/// Whether `close` of a copy that is not the last one returns at once. Queries no file system, and
/// does not wait.
pub(crate) fn closes_at_once_elsewhere(fd: BorrowedFd<'_>) -> bool {
    let Ok(kind) = os::kind_of(fd) else {
        return false;
    };
    match kind.file {
        _ if kind.flags.contains(OFlags::PATH) => true,
        FileType::Fifo | FileType::CharacterDevice | FileType::Unknown => true,
        FileType::Socket => sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX),
        FileType::RegularFile => rustix::fs::fcntl_get_seals(fd).is_ok(),
        _ => false,
    }
}

/// Ends the connection, so that the peer sees the end at once. True if the socket's `close` drops
/// no descriptor: nothing is unread, and after `shutdown` nothing can be sent to it.
fn end(socket: BorrowedFd<'_>) -> bool {
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
    for _ in 0..UNREAD_MAX {
        match peek(socket, &mut [0]) {
            Ok((_, flags)) if flags.contains(ReturnFlags::CTRUNC) => return false,
            // The end, or a packet of no bytes.
            Ok((0, _)) => break,
            Ok(_) => drop(rustix::net::recv(
                socket,
                &mut [0u8; 8][..],
                RecvFlags::DONTWAIT,
            )),
            Err(_) => return false,
        }
    }
    // With this option every packet in the queue has control data, for which this call has no room;
    // the end of the stream has none.
    rustix::net::sockopt::set_socket_passcred(socket, true).is_ok()
        && matches!(peek(socket, &mut [0]), Ok((_, flags)) if !flags.contains(ReturnFlags::CTRUNC))
}

/// Peeks at the next packet: its length as far as it fits, and its flags, with
/// [`ReturnFlags::CTRUNC`] if descriptors come with it.
pub(crate) fn peek(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
) -> Result<(usize, ReturnFlags), Errno> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let mut none = rustix::net::RecvAncillaryBuffer::default();
    let mut bytes = [std::io::IoSliceMut::new(bytes)];
    let got = rustix::net::recvmsg(socket, &mut bytes, &mut none, flags)?;
    Ok((got.bytes, got.flags))
}

/// The user at the other end of a socket.
pub(crate) fn peer_of(socket: BorrowedFd<'_>) -> Option<u32> {
    os::peer_uid(socket).ok()
}

/// Has a thread close a descriptor. `uid` is the user of the peer that sent it; `None` for this
/// library's own descriptors.
fn enqueue(uid: Option<u32>, fd: CloseOnForkFd) {
    let mut state = CLOSER.lock();
    let pending = state.pending.entry(uid).or_default();
    pending.waiting.push_back(fd);
    pending.set_count(pending.count + 1, uid, Instant::now());
    drop(state);
    retry();
}

/// Starts a thread for each descriptor that may have one. Called at each tick, too: a thread could
/// not be started before (no memory, for one).
pub(crate) fn retry() {
    let mut state = CLOSER.lock();
    while let Some(uid) = state.next_user() {
        if Thread::with_stack("warpipe-closer", STACK_BYTES, move || run(uid)).is_err() {
            return;
        }
        state.pending.entry(uid).or_default().threads += 1;
    }
}

/// Whether [`retry`] has something to do.
pub(crate) fn is_retry_due() -> bool {
    CLOSER.lock().next_user().is_some()
}

/// The body of a thread that is counted for a user: closes a descriptor of that user's, and then
/// others that wait without a thread.
fn run(uid: Option<u32>) {
    let mut next = Some(uid);
    let mut state = CLOSER.lock();
    while let Some(uid) = next {
        let waiting = state.pending.get_mut(&uid);
        let fd = waiting.and_then(|pending| pending.waiting.pop_front());
        drop(state);
        drop(fd.map(CloseOnForkFd::release));
        state = CLOSER.lock();
        let pending = state.pending.entry(uid).or_default();
        pending.threads -= 1;
        pending.set_count(pending.count - 1, uid, Instant::now());
        state.pending.retain(|_, pending| pending.count > 0);
        next = state.next_user();
        if let Some(uid) = next {
            state.pending.entry(uid).or_default().threads += 1;
        }
    }
}

/// Queues one of this library's own descriptors with a slow `close`.
pub(crate) fn close_later(fd: CloseOnForkFd) {
    if fd.is_own() {
        enqueue(None, fd);
    }
}

fn is_other(uid: Option<u32>) -> bool {
    uid.is_some_and(|uid| uid != rustix::process::geteuid().as_raw())
}

fn pending_max(uid: Option<u32>) -> usize {
    if is_other(uid) {
        PENDING_OF_OTHERS_MAX
    } else {
        PENDING_MAX
    }
}

/// How many of that user's descriptors cannot be closed, if they are too many for a new connection
/// of that user.
pub(crate) fn over_limit(uid: u32) -> Option<usize> {
    let state = CLOSER.lock();
    state.pending.get(&Some(uid))?.over_limit(Instant::now())
}

/// Whether any user is over its limit.
pub(crate) fn is_any_user_over_limit() -> bool {
    let state = CLOSER.lock();
    let now = Instant::now();
    let mut users = state.pending.iter();
    users.any(|(uid, pending)| uid.is_some() && pending.over_limit(now).is_some())
}

/// The number of descriptors from peers with a `close` that has not returned.
pub(crate) fn pending_closes() -> usize {
    let state = CLOSER.lock();
    state.pending.values().map(|pending| pending.count).sum()
}

/// The closer of this process; a forked child has its own.
static CLOSER: PerProcess<Mutex<CloserState>> = PerProcess::new();

#[derive(Default)]
struct CloserState {
    /// By the user of the peers that sent the descriptors.
    pending: HashMap<Option<u32>, Pending>,
}

impl CloserState {
    /// A user with a descriptor that needs a thread and may have one.
    fn next_user(&self) -> Option<Option<u32>> {
        let others = self.pending.iter().filter(|(uid, _)| is_other(**uid));
        let is_full = others.map(|(_, it)| it.threads).sum::<usize>() >= THREADS_OF_OTHERS_MAX;
        let mut users = self.pending.iter();
        let next = users.find(|(uid, pending)| {
            pending.threads < pending.count.min(pending_max(**uid)) && !(is_full && is_other(**uid))
        });
        next.map(|(uid, _)| *uid)
    }
}

/// A user's descriptors that wait to be closed, or that a thread is closing.
#[derive(Default)]
struct Pending {
    count: usize,
    waiting: VecDeque<CloseOnForkFd>,
    threads: usize,
    /// Since when the count is [`pending_max`] or more.
    full_since: Option<Instant>,
}

impl Pending {
    fn set_count(&mut self, count: usize, uid: Option<u32>, now: Instant) {
        self.count = count;
        let is_full = count >= pending_max(uid);
        self.full_since = is_full.then(|| self.full_since.unwrap_or(now));
    }

    fn over_limit(&self, now: Instant) -> Option<usize> {
        let full_for = now.saturating_duration_since(self.full_since?);
        (full_for > STUCK_AFTER).then_some(self.count)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;
    use crate::hostile::alone;

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    fn say(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        crate::hostile::send_raw(socket, bytes, fds).unwrap();
    }

    #[test]
    fn a_quick_close_each_second_does_not_hide_descriptors_that_hang() {
        let other = Some(rustix::process::geteuid().as_raw() + 1);
        let (mut pending, mut now) = (Pending::default(), Instant::now());
        for count in 1..=PENDING_OF_OTHERS_MAX {
            pending.set_count(count, other, now);
        }
        assert_eq!(pending.over_limit(now), None, "many for a moment");
        for _ in 0..2 {
            now += STUCK_AFTER;
            for count in [PENDING_OF_OTHERS_MAX + 1, PENDING_OF_OTHERS_MAX] {
                pending.set_count(count, other, now);
            }
        }
        assert_eq!(pending.over_limit(now), Some(PENDING_OF_OTHERS_MAX));
        pending.set_count(PENDING_OF_OTHERS_MAX - 1, other, now);
        pending.set_count(PENDING_OF_OTHERS_MAX, other, now);
        assert_eq!(pending.over_limit(now), None, "one that hung was closed");
    }

    #[test]
    fn the_threads_of_each_user_and_of_all_other_users_are_limited() {
        let own = rustix::process::geteuid().as_raw();
        let with = |count, threads| Pending {
            count,
            threads,
            ..Pending::default()
        };
        let mut state = CloserState::default();
        for (uid, max) in [(None, PENDING_MAX), (Some(own), PENDING_MAX)] {
            state.pending.insert(uid, with(max + 1, max - 1));
            assert_eq!(state.next_user(), Some(uid));
            state.pending.insert(uid, with(max + 1, max));
            assert_eq!(state.next_user(), None);
        }
        let max = PENDING_OF_OTHERS_MAX;
        let others = (1..).map(|offset| Some(own + offset));
        for uid in others.take(THREADS_OF_OTHERS_MAX / max) {
            state.pending.insert(uid, with(max + 1, max - 1));
            assert_eq!(state.next_user(), Some(uid));
            state.pending.insert(uid, with(max + 1, max));
            assert_eq!(state.next_user(), None);
        }
        state.pending.insert(Some(own + 1_000), with(1, 0));
        assert_eq!(state.next_user(), None);
        state.pending.insert(Some(own), with(1, 0));
        assert_eq!(state.next_user(), Some(Some(own)));
        state.pending.insert(Some(own), with(1, 1));
        state.pending.remove(&Some(own + 1));
        assert_eq!(state.next_user(), Some(Some(own + 1_000)));
    }

    #[test]
    fn a_descriptor_that_got_no_thread_is_closed_when_that_is_tried_again() {
        let test = "a_descriptor_that_got_no_thread_is_closed_when_that_is_tried_again";
        alone(module_path!(), test, || {
            let (ours, _theirs) = pair();
            let mut state = CLOSER.lock();
            let pending = state.pending.entry(None).or_default();
            let fd = CloseOnForkFd::open(|| Ok(ours)).unwrap();
            pending.waiting.push_back(fd);
            pending.set_count(1, None, Instant::now());
            drop(state);
            retry();
            let is_closed = || pending_closes() == 0;
            assert!(warpipe_testkit::eventually(
                Duration::from_secs(30),
                is_closed
            ));
        });
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
            (
                "behind nothing",
                &[(b"one", 0), (b"", 0), (b"two", 1)],
                false,
            ),
            ("with nothing", &[(b"", 1)], false),
        ];
        for (what, packets, is_quiet) in cases {
            let (ours, theirs) = pair();
            for &(bytes, count) in packets {
                say(&theirs, bytes, &vec![file.0.as_fd(); count]);
            }
            assert_eq!(end(ours.as_fd()), is_quiet, "{what}");
            assert_eq!(
                rustix::net::send(&theirs, b"more", rustix::net::SendFlags::NOSIGNAL),
                Err(Errno::PIPE)
            );
        }
        let (ours, theirs) = pair();
        drop(theirs);
        assert!(end(ours.as_fd()), "its peer has gone");
    }
}
