//! The wake channel: how an end that sleeps is woken.
//!
//! A connected pair of sockets and not an eventfd, for one reason: both ends of an eventfd share one open file,
//! so a peer can clear its `O_NONBLOCK`, fill its counter, and the next wake-up of ours would block for ever.
//! A socket takes `MSG_DONTWAIT` with each call, which no peer can take back.

use std::os::fd::{AsFd, BorrowedFd};

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::FileType;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::error::{Error, HandshakeFault, Result};
use crate::fork::{PrivateFd, Section};

/// One end of the channel.
#[derive(Debug)]
pub(crate) struct Wake {
    socket: PrivateFd,
    is_closed: AtomicBool,
}

impl Wake {
    fn new(socket: PrivateFd) -> Wake {
        Wake { socket, is_closed: AtomicBool::new(false) }
    }

    /// A new channel: our end, and the peer's descriptor.
    pub(crate) fn pair() -> Result<(Wake, PrivateFd)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let section = Section::enter();
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|e| Error::os("socketpair", "a link's wake channel", e))?;
        Ok((Wake::new(section.adopt(ours)), section.adopt(theirs)))
    }

    /// The end that a peer sent, once it is seen to be a socket.
    pub(crate) fn adopt(fd: PrivateFd) -> Result<Wake, HandshakeFault> {
        let stat = rustix::fs::fstat(&fd).map_err(|e| HandshakeFault::Wake(e.to_string()))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Socket if is_unix_seqpacket(&fd) => Ok(Wake::new(fd)),
            FileType::Socket => Err(HandshakeFault::Wake("a socket of another kind".into())),
            other => Err(HandshakeFault::Wake(format!("a {other:?} instead of a socket"))),
        }
    }

    /// Wakes the other end. A full channel wakes it as well; a closed one has nobody to wake.
    pub(crate) fn ring(&self) {
        let _ = rustix::net::send(&self.socket, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Takes in the wake-ups so far. Bounded: a peer that rings without end does not keep us here.
    pub(crate) fn drain(&self) {
        let mut byte = [0u8; 8];
        for _ in 0..64 {
            match rustix::net::recv(&self.socket, &mut byte, RecvFlags::DONTWAIT) {
                Ok((1.., _)) => {}
                Ok(_) => return self.is_closed.store(true, Relaxed),
                Err(_) => return,
            }
        }
    }

    /// Whether the other end has closed: from then on the descriptor is readable for ever, and not to be slept on.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
    }
}

/// Of this kind alone it is known that no call of ours can block: closing a TCP socket, for one, can linger.
fn is_unix_seqpacket(fd: &PrivateFd) -> bool {
    use rustix::net::sockopt::{socket_domain, socket_type};
    socket_domain(fd) == Ok(AddressFamily::UNIX) && socket_type(fd) == Ok(SocketType::SEQPACKET)
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A wake-up inside this process, from the watcher's thread: an eventfd that never leaves it.
#[derive(Debug)]
pub(crate) struct Bell {
    eventfd: PrivateFd,
}

impl Bell {
    pub(crate) fn new() -> Result<Bell> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let eventfd = PrivateFd::open(|| rustix::event::eventfd(0, flags));
        Ok(Bell { eventfd: eventfd.map_err(|e| Error::os("eventfd", "a wake-up", e))? })
    }

    pub(crate) fn ring(&self) {
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }

    pub(crate) fn drain(&self) {
        let _ = rustix::io::read(&self.eventfd, &mut [0u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}
