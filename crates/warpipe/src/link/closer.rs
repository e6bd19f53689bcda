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
//!
//! Up to [`THREADS_MAX`] threads may hang at once; what comes then waits for one of them, and its owner does not.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, ReturnFlags, Shutdown};

use super::message::FIRST_BRINGS_DESCRIPTORS;
use crate::fork::{self, Home, PrivateFd};

/// The most threads that may hang in `close`.
pub(crate) const THREADS_MAX: usize = 16;

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
            hand_over(fd);
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
    home: Home,
}

impl Listener {
    /// Before it listens.
    pub(crate) fn new(fd: PrivateFd) -> Listener {
        let lets_descriptors_in = FIRST_BRINGS_DESCRIPTORS || !crate::os::let_descriptors_in(fd.as_fd(), false);
        Listener { fd: Some(fd), lets_descriptors_in, home: Home::here() }
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
            hand_over(fd);
        }
    }
}

/// A descriptor that a peer sent. Whatever it is, to drop it does not block.
#[derive(Debug)]
pub(crate) struct PeerFd {
    /// `None` only while dropping.
    fd: Option<PrivateFd>,
    is_approved: AtomicBool,
    home: Home,
}

impl From<PrivateFd> for PeerFd {
    fn from(fd: PrivateFd) -> PeerFd {
        PeerFd { fd: Some(fd), is_approved: AtomicBool::new(false), home: Home::here() }
    }
}

impl PeerFd {
    /// It is of a kind whose `close` does not block (a memfd, a pidfd, memory of a device): it needs no thread for that.
    pub(crate) fn approve(&self) {
        self.is_approved.store(true, Relaxed);
    }

    /// The same, to keep it.
    pub(crate) fn accept(mut self) -> PrivateFd {
        self.fd.take().expect("present until dropped")
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("present until dropped").as_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take()
            && self.home.is_here()
            && !self.is_approved.load(Relaxed)
        {
            hand_over(fd);
        }
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

/// Leaves it to a thread to close this.
pub(crate) fn hand_over(fd: PrivateFd) {
    let closer = Closer::of_process();
    let mut state = closer.lock();
    state.waiting.push_back(fd);
    if state.waiting.len() <= state.idle {
        return closer.wanted.notify_one();
    }
    // Without a thread, for want of memory say, the next that is handed over tries again.
    if state.threads < THREADS_MAX {
        let runner = closer.clone();
        let spawned = std::thread::Builder::new().name("warpipe-closer".into()).spawn(move || runner.run());
        state.threads += usize::from(spawned.is_ok());
    }
}

/// Descriptors from peers whose `close` has not returned. A few for a moment are nothing; a number that stays is a peer
/// that sends what takes long to close (a socket that lingers, a file on FUSE), and costs this process a descriptor
/// each, and a thread for each of the first 16.
pub fn pending_closes() -> usize {
    let closer = Closer::of_process();
    let state = closer.lock();
    state.closing + state.waiting.len()
}

#[derive(Default)]
struct Closer {
    state: Mutex<State>,
    wanted: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<PrivateFd>,
    threads: usize,
    /// Those that wait for something to do.
    idle: usize,
    /// Those that are in `close`.
    closing: usize,
}

impl Closer {
    /// That of this process; a forked child has its own.
    fn of_process() -> Arc<Closer> {
        static CURRENT: Mutex<Option<(u64, Arc<Closer>)>> = Mutex::new(None);
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        match &*current {
            Some((generation, closer)) if *generation == fork::generation() => closer.clone(),
            _ => {
                let closer = Arc::<Closer>::default();
                // The parent's: its threads are not here, and its lock may be held.
                current.replace((fork::generation(), closer.clone())).into_iter().for_each(std::mem::forget);
                closer
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(fd) = state.waiting.pop_front() {
                state.closing += 1;
                drop(state);
                drop(fd);
                state = self.lock();
                state.closing -= 1;
                continue;
            }
            state.idle += 1;
            let (woken, slept) = self.wanted.wait_timeout(state, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if slept.timed_out() && state.waiting.is_empty() {
                state.threads -= 1;
                return;
            }
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
