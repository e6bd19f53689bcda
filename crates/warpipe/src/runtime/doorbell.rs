//! The wake channel, which wakes a sleeping end.
//!
//! It is a connected pair of sockets and not an eventfd, for one reason: both ends of an eventfd
//! share one open file, so a peer can clear its `O_NONBLOCK` and fill its counter, and this
//! process's next wake-up would block for ever. A socket takes `MSG_DONTWAIT` with each call, which
//! no peer can take back.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    SocketFlags, SocketType, sockopt,
};

use crate::error::{Error, HandshakeFault, Result};
use crate::fork::{CloseOnForkFd, NoForkSection};
use crate::os;
use crate::runtime::closer::{PeerFd, PeerSocket, peek, peer_of};

/// The most descriptors that go with one packet, `unix(7)`.
const SCM_MAX_FD: usize = 253;

/// One end of the channel.
#[derive(Debug)]
pub(crate) struct PeerDoorbell {
    socket: PeerSocket,
    is_closed: AtomicBool,
}

impl PeerDoorbell {
    fn new(socket: PeerSocket) -> PeerDoorbell {
        os::let_descriptors_in(socket.as_fd(), false);
        PeerDoorbell {
            socket,
            is_closed: AtomicBool::new(false),
        }
    }

    /// A new channel: our end, and the peer's descriptor.
    pub(crate) fn pair() -> Result<(PeerDoorbell, CloseOnForkFd)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let section = NoForkSection::enter();
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .and_then(|(ours, theirs)| Ok((section.adopt(ours)?, section.adopt(theirs)?)))
                .map_err(|e| Error::os("socketpair", "a link's wake channel", e))?;
        Ok((PeerDoorbell::new(PeerSocket::from(ours)), theirs))
    }

    /// The end that a peer sent, once it is seen to be a Unix socket. The check queries the socket,
    /// not a file system: a file on FUSE could delay `fstat` for as long as it likes.
    pub(crate) fn adopt(fd: PeerFd) -> Result<PeerDoorbell, HandshakeFault> {
        match (sockopt::socket_domain(&fd), sockopt::socket_type(&fd)) {
            (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) => {
                Ok(PeerDoorbell::new(PeerSocket::from(fd.accept())))
            }
            (Ok(_), Ok(_)) => Err(HandshakeFault::Wake("a socket of another kind".into())),
            (Err(error), _) | (_, Err(error)) => {
                Err(HandshakeFault::Wake(format!("no socket ({error})")))
            }
        }
    }

    /// Wakes the other end. A full channel wakes it as well; a closed one has no other end.
    pub(crate) fn ring(&self) {
        let _ = rustix::net::send(
            &self.socket,
            &[1],
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        );
    }

    /// Consumes the wake-ups so far. Bounded: a peer that rings without end does not keep this
    /// thread here. A peer that sends descriptors is ignored from then on, since dropping them may
    /// block.
    pub(crate) fn drain(&self) {
        for _ in 0..64 {
            match peek(self.socket.as_fd(), &mut [0u8; 8]) {
                Ok((1.., flags)) if !flags.contains(ReturnFlags::CTRUNC) => self.take_one(),
                Ok(_) => return self.is_closed.store(true, Relaxed),
                Err(_) => return,
            }
        }
    }

    /// Takes one packet in. The peer may have kept its copy of this end and taken away the packet
    /// that was peeked. So there is room for the descriptors of the one after it.
    fn take_one(&self) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let uid = peer_of(self.socket.as_fd());
        let section = NoForkSection::enter();
        let taken = os::take_standard();
        let _ = rustix::net::recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut [0u8; 8])],
            &mut ancillary,
            flags,
        );
        let rights = |message| {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                Some(fds)
            } else {
                None
            }
        };
        let fds = ancillary
            .drain()
            .filter_map(rights)
            .flatten()
            .map(|fd| PeerFd::received(&section, fd, uid));
        let unwanted: Vec<PeerFd> = fds.collect();
        drop(taken);
        drop(section);
        drop(unwanted);
    }

    /// Whether the other end has closed. From then on the descriptor is readable for ever, and must
    /// not be slept on.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
    }
}

impl AsFd for PeerDoorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A wake-up inside this process, from the reactor's thread: an eventfd that never leaves it.
#[derive(Debug)]
pub(crate) struct LocalDoorbell {
    eventfd: CloseOnForkFd,
}

impl LocalDoorbell {
    pub(crate) fn new() -> Result<LocalDoorbell> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let eventfd = CloseOnForkFd::open(|| rustix::event::eventfd(0, flags));
        Ok(LocalDoorbell {
            eventfd: eventfd.map_err(|e| Error::os("eventfd", "a wake-up", e))?,
        })
    }

    pub(crate) fn ring(&self) {
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }

    pub(crate) fn drain(&self) {
        let _ = rustix::io::read(&self.eventfd, &mut [0u8; 8]);
    }
}

impl AsFd for LocalDoorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}
