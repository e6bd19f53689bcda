//! Closes descriptors with a `close` that may take long.
//!
//! `close` of a descriptor that a peer sent takes as long as the peer likes: a TCP socket with
//! `SO_LINGER` and unsent data waits for its reader, a file on FUSE for its server, and a Unix
//! socket for such a descriptor in its queue. So does a receive that has no room for one.
//!
//! A [`PeerSocket`] with nothing unread, to which nothing more can come, is closed at once; so is
//! an [approved](PeerFd::approve) [`PeerFd`]. A thread of this module closes each of the others, and
//! may hang. A forked child closes its copy only where a `close` that is not the last returns at
//! once, and keeps one that a thread is closing. A user with [`pending_max`] descriptors that do not
//! close is [refused](over_limit).

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, ReturnFlags, Shutdown, sockopt};

use crate::fork::per_process::PerProcess;
use crate::fork::{CloseOnForkFd, NoForkSection};
use crate::os;

/// The most descriptors of peers of this user that may wait to be closed before new connections are
/// refused.
const PENDING_MAX: usize = 256;

/// The same limit for each other user.
pub(crate) const PENDING_OF_OTHERS_MAX: usize = 64;

/// How long none of a user's descriptors closes before they count as stuck. Many that wait for a
/// moment are harmless.
const STUCK_AFTER: Duration = Duration::from_secs(1);

/// The most packets that are read to empty a socket before it is left to a thread.
const UNREAD_MAX: usize = 64;

/// The stack of a thread that closes one descriptor.
const STACK_BYTES: usize = 128 << 10;

/// A connected socket with its other end in another process.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    /// `None` only while dropping.
    fd: Option<CloseOnForkFd>,
}

impl From<CloseOnForkFd> for PeerSocket {
    fn from(fd: CloseOnForkFd) -> PeerSocket {
        PeerSocket { fd: Some(fd) }
    }
}

impl AsFd for PeerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("present until dropped").as_fd()
    }
}

impl Drop for PeerSocket {
    fn drop(&mut self) {
        // In a forked child the connection is the parent's.
        if let Some(fd) = self.fd.take_if(|fd| fd.is_own())
            && !end(fd.as_fd())
        {
            enqueue(peer_of(fd.as_fd()), fd);
        }
    }
}

/// A listening socket. A client can send to it before its credentials are checked, and its
/// connections inherit whether they let descriptors in. Connections that are not accepted yet may
/// hold some.
#[derive(Debug)]
pub(crate) struct Listener {
    /// `None` only while dropping.
    fd: Option<CloseOnForkFd>,
    /// The listener lets no descriptors in for the time being.
    is_wary: AtomicBool,
}

impl Listener {
    pub(crate) fn new(fd: CloseOnForkFd) -> Listener {
        Listener {
            fd: Some(fd),
            is_wary: AtomicBool::new(false),
        }
    }

    /// Called at each tick. While some user has [too many](over_limit) pending descriptors, none
    /// come in (Linux 6.16) before the peer has been [screened](Self::screen).
    pub(crate) fn look(&self) {
        self.set_wary(is_anybody_over_limit());
    }

    fn set_wary(&self, is_wary: bool) {
        if self.is_wary.swap(is_wary, Relaxed) != is_wary {
            os::let_descriptors_in(self.as_fd(), !is_wary);
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
            self.set_wary(true);
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
        if self.is_wary.load(Relaxed) {
            os::let_descriptors_in(socket, true);
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
        if let Some(fd) = self.fd.take_if(|fd| fd.is_own()) {
            let _ = rustix::net::shutdown(&fd, Shutdown::Both);
            enqueue(None, fd);
        }
    }
}

/// A descriptor that a peer sent. Dropping it never blocks, whatever file it is.
#[derive(Debug)]
pub(crate) struct PeerFd {
    /// `None` only while dropping.
    fd: Option<CloseOnForkFd>,
    /// The sender's user, if it is known.
    uid: Option<u32>,
    is_approved: AtomicBool,
}

impl From<CloseOnForkFd> for PeerFd {
    fn from(fd: CloseOnForkFd) -> PeerFd {
        PeerFd {
            fd: Some(fd),
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
        let fd = self.fd.take().expect("present until dropped");
        let _section = NoForkSection::enter();
        fd.close_in_child();
        fd
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("present until dropped").as_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        let is_approved = self.is_approved.load(Relaxed);
        if let Some(fd) = self.fd.take_if(|fd| fd.is_own() && !is_approved) {
            enqueue(self.uid, fd);
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
    let closer = Closer::of_process();
    let mut state = closer.lock();
    let pending = state.pending.entry(uid).or_insert_with(Pending::begin);
    pending.count += 1;
    state.waiting.push((uid, fd));
    drop(state);
    let runner = closer.clone();
    // Where no thread can be started (no memory, for one), the next one closes it, too.
    let _ = std::thread::Builder::new()
        .name("warpipe-closer".into())
        .stack_size(STACK_BYTES)
        .spawn(move || runner.run());
}

/// Queues one of this library's own descriptors with a slow `close`.
pub(crate) fn close_later(fd: CloseOnForkFd) {
    enqueue(None, fd);
}

fn pending_max(uid: u32) -> usize {
    if uid == rustix::process::geteuid().as_raw() {
        PENDING_MAX
    } else {
        PENDING_OF_OTHERS_MAX
    }
}

/// How many of that user's descriptors cannot be closed, if they are too many for a new connection
/// of that user.
pub(crate) fn over_limit(uid: u32) -> Option<usize> {
    let state = Closer::of_process().lock();
    state.pending.get(&Some(uid))?.over_limit(uid)
}

/// Whether any user is over its limit.
pub(crate) fn is_anybody_over_limit() -> bool {
    let state = Closer::of_process().lock();
    let mut users = state.pending.iter();
    users.any(|(uid, pending)| uid.is_some_and(|uid| pending.over_limit(uid).is_some()))
}

/// The number of descriptors from peers with a `close` that has not returned. A few for a moment are
/// harmless. A number that stays means that a peer sends files that take long to close (a socket
/// that lingers, a file on FUSE). Each costs this process a descriptor and a thread. From 64 of
/// another user on (256 of this one), new connections of that user are refused.
pub fn pending_closes() -> usize {
    let state = Closer::of_process().lock();
    state.pending.values().map(|pending| pending.count).sum()
}

#[derive(Default)]
struct CloserState {
    /// By the user of the peers that sent the descriptors.
    pending: HashMap<Option<u32>, Pending>,
    waiting: Vec<(Option<u32>, CloseOnForkFd)>,
}

/// A user's descriptors that wait to be closed, or that a thread is closing.
struct Pending {
    count: usize,
    /// When one was last closed, or the first one came.
    progress_at: Instant,
}

impl Pending {
    fn begin() -> Pending {
        Pending {
            count: 0,
            progress_at: Instant::now(),
        }
    }

    fn over_limit(&self, uid: u32) -> Option<usize> {
        let is_stuck = self.progress_at.elapsed() > STUCK_AFTER;
        (self.count >= pending_max(uid) && is_stuck).then_some(self.count)
    }
}

#[derive(Default)]
struct Closer(Mutex<CloserState>);

impl Closer {
    /// The closer of this process; a forked child has its own.
    fn of_process() -> &'static Arc<Closer> {
        static CURRENT: PerProcess<Arc<Closer>> = PerProcess::new();
        CURRENT.get()
    }

    fn lock(&self) -> MutexGuard<'_, CloserState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes what waits.
    fn run(&self) {
        let next = || self.lock().waiting.pop();
        while let Some((uid, fd)) = next() {
            drop(fd.release());
            let mut state = self.lock();
            if let Some(pending) = state.pending.get_mut(&uid) {
                pending.count -= 1;
                pending.progress_at = Instant::now();
            }
            state.pending.retain(|_, pending| pending.count > 0);
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
