//! Closes descriptors with a `close` that may take long.
//!
//! `close` of a descriptor that a peer sent takes as long as the peer likes: a TCP socket with
//! `SO_LINGER` and unsent data waits for its reader, a file on FUSE for its server, and a Unix
//! socket for such a descriptor in its queue. So does a receive that has no room for one.
//!
//! A [`PeerSocket`] with nothing unread, to which nothing more can come, is closed at once; so is
//! an [approved](PeerFd::approve) [`PeerFd`]. A thread of this module closes the others, and may
//! hang. Each user has a queue, with up to [`QUEUE_THREADS_MAX`] threads. A forked child closes its
//! copy only where a `close` that is not the last returns at once, and keeps one that a thread is
//! closing. A user with [`pending_max`] descriptors in a stuck queue is [refused](over_limit).

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, ReturnFlags, Shutdown, sockopt};

use crate::fork::per_process::PerProcess;
use crate::fork::{CloseOnForkFd, NoForkSection, OwnerProcess};
use crate::os;

/// The most threads of one queue that may hang in `close`.
pub(crate) const QUEUE_THREADS_MAX: usize = 4;

/// The most threads of all users but this process's own: a user may have many uids.
const OTHERS_THREADS_MAX: usize = 56;

/// The most descriptors of peers of this user that may wait to be closed before new connections are
/// refused.
const PENDING_MAX: usize = 256;

/// The same limit for each other user.
pub(crate) const PENDING_OF_OTHERS_MAX: usize = 64;

/// How long a queue closes nothing before it counts as stuck. Many descriptors that wait for a
/// moment are harmless.
const STUCK_AFTER: Duration = Duration::from_secs(1);

/// The most packets that are read to empty a socket before it is left to a thread.
const UNREAD_MAX: usize = 64;

/// A connected socket with its other end in another process.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    /// `None` only while dropping.
    fd: Option<CloseOnForkFd>,
    owner_process: OwnerProcess,
}

impl From<CloseOnForkFd> for PeerSocket {
    fn from(fd: CloseOnForkFd) -> PeerSocket {
        PeerSocket {
            fd: Some(fd),
            owner_process: OwnerProcess::current(),
        }
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
        if self.owner_process.is_current() && !end(fd.as_fd()) {
            enqueue(peer_of(fd.as_fd()), FdToClose::ClosedOnFork(fd));
        }
    }
}

/// Whether the first message of a connecting process brings descriptors. If so, a listener has to
/// let descriptors in before the peer has been checked. A connection lets none in once its first
/// message has been read.
const FIRST_BRINGS_DESCRIPTORS: bool = true;

/// A listening socket. A client can send to it before its credentials are checked. So it lets no
/// descriptors in unless the first message brings some, and its connections inherit that.
#[derive(Debug)]
pub(crate) struct Listener {
    /// `None` only while dropping.
    fd: Option<CloseOnForkFd>,
    /// Where the kernel cannot refuse descriptors, connections that are not accepted yet may hold
    /// some.
    lets_descriptors_in: bool,
    /// The listener lets no descriptors in for the time being.
    is_wary: AtomicBool,
    owner_process: OwnerProcess,
}

impl Listener {
    /// To be called before the socket listens.
    pub(crate) fn new(fd: CloseOnForkFd) -> Listener {
        let lets_descriptors_in =
            FIRST_BRINGS_DESCRIPTORS || !os::let_descriptors_in(fd.as_fd(), false);
        Listener {
            fd: Some(fd),
            lets_descriptors_in,
            is_wary: AtomicBool::new(false),
            owner_process: OwnerProcess::current(),
        }
    }

    /// Called at each tick. While some user has [too many](over_limit) pending descriptors, none
    /// come in (Linux 6.16) before the peer has been [screened](Self::screen).
    pub(crate) fn look(&self) {
        self.set_wary(is_anybody_over_limit());
    }

    fn set_wary(&self, is_wary: bool) {
        if self.is_wary.swap(is_wary, Relaxed) != is_wary {
            os::let_descriptors_in(self.as_fd(), FIRST_BRINGS_DESCRIPTORS && !is_wary);
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
            && self.owner_process.is_current()
            && self.lets_descriptors_in
        {
            let _ = rustix::net::shutdown(&fd, Shutdown::Both);
            enqueue(None, FdToClose::ClosedOnFork(fd));
        }
    }
}

/// A descriptor that a peer sent. Dropping it never blocks, whatever file it is.
#[derive(Debug)]
pub(crate) struct PeerFd {
    /// `None` only while dropping.
    fd: Option<FdToClose>,
    /// The sender's user, if it is known.
    uid: Option<u32>,
    is_approved: AtomicBool,
    owner_process: OwnerProcess,
}

#[derive(Debug)]
enum FdToClose {
    /// A file that a forked child closes.
    ClosedOnFork(CloseOnForkFd),
    /// A file with a `close` that could block a forked child, which keeps it.
    KeptOnFork(OwnedFd),
}

impl From<CloseOnForkFd> for PeerFd {
    fn from(fd: CloseOnForkFd) -> PeerFd {
        PeerFd {
            fd: Some(FdToClose::ClosedOnFork(fd)),
            uid: None,
            is_approved: AtomicBool::new(false),
            owner_process: OwnerProcess::current(),
        }
    }
}

impl PeerFd {
    /// A descriptor that was received in this section, from a peer of that user.
    pub(crate) fn received(section: &NoForkSection, fd: OwnedFd, uid: Option<u32>) -> PeerFd {
        let held = match closes_at_once_elsewhere(fd.as_fd()) {
            true => FdToClose::ClosedOnFork(section.adopt_from_peer(fd)),
            false => FdToClose::KeptOnFork(fd),
        };
        PeerFd {
            fd: Some(held),
            uid,
            is_approved: AtomicBool::new(false),
            owner_process: OwnerProcess::current(),
        }
    }

    /// Marks the descriptor as a file with a `close` that does not block (a memfd, a pidfd, memory
    /// of a device): it needs no thread for that.
    pub(crate) fn approve(&self) {
        self.is_approved.store(true, Relaxed);
    }

    /// As [`approve`](Self::approve), and takes the descriptor.
    pub(crate) fn accept(mut self) -> CloseOnForkFd {
        match self.fd.take().expect("present until dropped") {
            FdToClose::ClosedOnFork(fd) => fd,
            FdToClose::KeptOnFork(fd) => NoForkSection::enter().adopt_from_peer(fd),
        }
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.fd.as_ref().expect("present until dropped") {
            FdToClose::ClosedOnFork(fd) => fd.as_fd(),
            FdToClose::KeptOnFork(fd) => fd.as_fd(),
        }
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        match self.fd.take() {
            Some(held) if self.owner_process.is_current() && !self.is_approved.load(Relaxed) => {
                enqueue(self.uid, held)
            }
            // The descriptor is the parent's.
            Some(FdToClose::KeptOnFork(fd)) if !self.owner_process.is_current() => {
                std::mem::forget(fd)
            }
            _ => {}
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

/// Queues a descriptor for a thread that closes it. `uid` is the user of the peer that sent it;
/// `None` for this library's own descriptors.
fn enqueue(uid: Option<u32>, fd: FdToClose) {
    let closer = Closer::of_process();
    let mut queues = closer.lock();
    let queue = queues.entry(uid).or_default();
    if queue.pending() == 0 {
        queue.progress_at = Some(Instant::now());
    }
    queue.waiting.push_back(fd);
    // If no thread can be started (no memory, for one), the next call tries again.
    if may_start(&queues, uid) {
        let runner = closer.clone();
        let spawned = std::thread::Builder::new()
            .name("warpipe-closer".into())
            .spawn(move || runner.run(uid));
        queues.entry(uid).or_default().threads += usize::from(spawned.is_ok());
    }
}

/// Whether another thread may close descriptors of that user.
fn may_start(queues: &Queues, uid: Option<u32>) -> bool {
    let is_free = |uid: Option<u32>| uid.is_none_or(is_own);
    let others = queues.iter().filter(|(uid, _)| !is_free(**uid));
    queues[&uid].threads < QUEUE_THREADS_MAX
        && (is_free(uid) || others.map(|(_, it)| it.threads).sum::<usize>() < OTHERS_THREADS_MAX)
}

/// Queues one of this library's own descriptors with a slow `close`.
pub(crate) fn close_later(fd: CloseOnForkFd) {
    enqueue(None, FdToClose::ClosedOnFork(fd));
}

fn is_own(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw()
}

fn pending_max(uid: u32) -> usize {
    if is_own(uid) {
        PENDING_MAX
    } else {
        PENDING_OF_OTHERS_MAX
    }
}

/// How many of that user's descriptors cannot be closed, if they are too many for a new connection
/// of that user.
pub(crate) fn over_limit(uid: u32) -> Option<usize> {
    let closer = Closer::of_process();
    let queues = closer.lock();
    let queue = queues.get(&Some(uid))?;
    let pending = queue.pending();
    (pending >= pending_max(uid) && queue.is_stuck()).then_some(pending)
}

/// Whether any user is over its limit.
pub(crate) fn is_anybody_over_limit() -> bool {
    let uids: Vec<u32> = Closer::of_process()
        .lock()
        .keys()
        .flatten()
        .copied()
        .collect();
    uids.into_iter().any(|uid| over_limit(uid).is_some())
}

/// The number of descriptors from peers with a `close` that has not returned. A few for a moment are
/// harmless. A number that stays means that a peer sends files that take long to close (a socket
/// that lingers, a file on FUSE). Each costs this process a descriptor, and the first 4 of a user
/// cost a thread each. From 64 of another user on (256 of this one), new connections of that user
/// are refused.
pub fn pending_closes() -> usize {
    Closer::of_process()
        .lock()
        .values()
        .map(CloseQueue::pending)
        .sum()
}

/// The queues that are not empty, by the user of the peers that sent the descriptors.
type Queues = HashMap<Option<u32>, CloseQueue>;

#[derive(Default)]
struct Closer(Mutex<Queues>);

#[derive(Default)]
struct CloseQueue {
    waiting: VecDeque<FdToClose>,
    threads: usize,
    /// The threads that are in `close`.
    closing: usize,
    /// When the queue last closed a descriptor, or began to.
    progress_at: Option<Instant>,
}

impl CloseQueue {
    fn pending(&self) -> usize {
        self.waiting.len() + self.closing
    }

    fn begin(&mut self) -> Option<FdToClose> {
        let fd = self.waiting.pop_front()?;
        self.closing += 1;
        Some(fd)
    }

    fn end(&mut self) {
        self.closing -= 1;
        self.progress_at = Some(Instant::now());
    }

    fn is_stuck(&self) -> bool {
        self.progress_at
            .is_some_and(|progress_at| progress_at.elapsed() > STUCK_AFTER)
    }
}

impl FdToClose {
    fn close(self) {
        match self {
            FdToClose::ClosedOnFork(fd) => drop(fd.release()),
            FdToClose::KeptOnFork(fd) => drop(fd),
        }
    }
}

impl Closer {
    /// The closer of this process; a forked child has its own.
    fn of_process() -> Arc<Closer> {
        static CURRENT: PerProcess<Arc<Closer>> = PerProcess::new();
        CURRENT.get().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes what waits for a user, then what waits for users without a thread.
    fn run(&self, mut uid: Option<u32>) {
        let mut queues = self.lock();
        loop {
            while let Some(fd) = queues.get_mut(&uid).and_then(CloseQueue::begin) {
                drop(queues);
                fd.close();
                queues = self.lock();
                queues.entry(uid).or_default().end();
            }
            queues.entry(uid).or_default().threads -= 1;
            queues.retain(|_, queue| queue.threads + queue.pending() > 0);
            let mut left = queues.iter().filter(|(_, queue)| queue.threads == 0);
            let next = left.find(|(uid, _)| may_start(&queues, **uid));
            let Some(next) = next.map(|(uid, _)| *uid) else {
                return;
            };
            queues.entry(next).or_default().threads += 1;
            uid = next;
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
    fn all_other_users_together_have_a_limited_number_of_threads_and_this_one_has_its_own() {
        let own = rustix::process::geteuid().as_raw();
        let users = (1..).map(|offset| Some(own + offset));
        let full = |uid| {
            let threads = QUEUE_THREADS_MAX;
            (
                uid,
                CloseQueue {
                    threads,
                    ..CloseQueue::default()
                },
            )
        };
        let mut queues: Queues = users
            .map(full)
            .take(OTHERS_THREADS_MAX / QUEUE_THREADS_MAX)
            .collect();
        for uid in [Some(own + 1_000), Some(own), None] {
            queues.insert(uid, CloseQueue::default());
        }
        assert!(!may_start(&queues, Some(own + 1_000)));
        assert!(may_start(&queues, Some(own)) && may_start(&queues, None));
        queues.remove(&Some(own + 1));
        assert!(may_start(&queues, Some(own + 1_000)));
        queues.insert(None, full(None).1);
        assert!(!may_start(&queues, None));
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
