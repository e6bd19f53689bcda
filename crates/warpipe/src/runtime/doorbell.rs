//! Wake-ups: a [`PeerDoorbell`] is one end of a link's *wake channel*, which wakes the other
//! process; a [`LocalDoorbell`] wakes a thread of this one.
//!
//! The channel is a connected pair of sockets and not an eventfd, for one reason: both ends of an
//! eventfd share one open file, so a peer can clear its `O_NONBLOCK` and fill its counter, and this
//! process's next wake-up would block for ever. A socket takes `MSG_DONTWAIT` with each call, which
//! no peer can take back.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, SocketFlags, SocketType,
    sockopt,
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
    rights: Rights,
    is_closed: AtomicBool,
}

/// Whether descriptors can come with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rights {
    /// The kernel refuses them, and only this process could change that.
    Refused,
    /// With a packet that a peek shows: the peer has no copy of this end, so what is peeked is what
    /// is taken next.
    Peeked,
    /// With any packet: the peer made this end, and may have kept a copy of it.
    Possible,
}

impl PeerDoorbell {
    fn new(socket: PeerSocket, rights: Rights) -> PeerDoorbell {
        PeerDoorbell {
            socket,
            rights,
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
        let ours = PeerSocket::from(ours);
        let rights = match os::let_descriptors_in(ours.as_fd(), false) {
            true => Rights::Refused,
            false => Rights::Peeked,
        };
        Ok((PeerDoorbell::new(ours, rights), theirs))
    }

    /// The end that a peer sent, once it is seen to be a Unix socket. The check queries the socket,
    /// not a file system: a file on FUSE could delay `fstat` for as long as it likes.
    pub(crate) fn adopt(fd: PeerFd) -> Result<PeerDoorbell, HandshakeFault> {
        match (sockopt::socket_domain(&fd), sockopt::socket_type(&fd)) {
            (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) => {
                let socket = PeerSocket::from(fd.accept());
                os::let_descriptors_in(socket.as_fd(), false);
                Ok(PeerDoorbell::new(socket, Rights::Possible))
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

    /// Consumes the wake-ups so far, with few system calls: they are part of the latency of a
    /// hand-over where both processes share a CPU. Bounded: a peer that rings without end does not
    /// keep this thread here. A peer that sends descriptors is ignored from then on, since dropping
    /// them may block.
    pub(crate) fn drain(&self) {
        for _ in 0..64 {
            let taken = match self.rights {
                Rights::Refused => self.take(),
                Rights::Peeked | Rights::Possible => self.take_without_descriptors(),
            };
            match taken {
                Ok(true) => {}
                Ok(false) => return self.is_closed.store(true, Relaxed),
                Err(_) => return,
            }
        }
    }

    /// Takes one packet; false at the channel's end.
    fn take(&self) -> rustix::io::Result<bool> {
        let (count, _) = rustix::net::recv(&self.socket, &mut [0u8; 8], RecvFlags::DONTWAIT)?;
        Ok(count > 0)
    }

    /// Takes one packet unless descriptors come with it; false then, and at the channel's end.
    fn take_without_descriptors(&self) -> rustix::io::Result<bool> {
        match peek(self.socket.as_fd(), &mut [0u8; 8])? {
            (1.., flags) if !flags.contains(ReturnFlags::CTRUNC) => {}
            _ => return Ok(false),
        }
        match self.rights {
            Rights::Possible => self.take_what_comes(),
            Rights::Refused | Rights::Peeked => {
                self.take()?;
            }
        }
        Ok(true)
    }

    /// Takes one packet in, with its descriptors. The peer may have kept its copy of this end and
    /// taken away the packet that was peeked. So there is room for the descriptors of the one after
    /// it.
    fn take_what_comes(&self) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let section = NoForkSection::enter();
        let taken = os::take_standard();
        let _ = rustix::net::recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut [0u8; 8])],
            &mut ancillary,
            flags,
        );
        let fds = os::received_fds(&mut ancillary)
            .map(|fd| PeerFd::received(&section, fd, peer_of(self.socket.as_fd())));
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

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage};

    use super::*;

    /// The ends of a channel: descriptors come in at ours in this way.
    fn channel(rights: Rights) -> (PeerDoorbell, CloseOnForkFd) {
        let (mut ours, theirs) = PeerDoorbell::pair().unwrap();
        let is_refused = ours.rights == Rights::Refused;
        if rights != Rights::Refused {
            os::let_descriptors_in(ours.as_fd(), true);
        }
        if rights != Rights::Refused || is_refused {
            ours.rights = rights;
        }
        (ours, theirs)
    }

    const ALL: [Rights; 3] = [Rights::Refused, Rights::Peeked, Rights::Possible];

    fn is_readable(doorbell: &PeerDoorbell) -> bool {
        peek(doorbell.as_fd(), &mut [0; 8]).is_ok()
    }

    #[test]
    fn a_drain_takes_all_wake_ups_and_finds_the_end() {
        for rights in ALL {
            let (ours, theirs) = channel(rights);
            let peer = PeerDoorbell::new(PeerSocket::from(theirs), Rights::Possible);
            (0..3).for_each(|_| peer.ring());
            assert!(is_readable(&ours), "{rights:?}");
            ours.drain();
            assert!(!is_readable(&ours) && !ours.is_closed(), "{rights:?}");
            drop(peer);
            // Another thread closes it.
            while !ours.is_closed() {
                std::thread::yield_now();
                ours.drain();
            }
        }
    }

    #[test]
    fn descriptors_in_a_wake_up_are_not_taken_in_and_end_the_channel() {
        for rights in ALL {
            let (ours, theirs) = channel(rights);
            let (far, near) = rustix::pipe::pipe().unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            let fds = [near.as_fd()];
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = rustix::net::sendmsg(&theirs, &[IoSlice::new(&[1])], &mut ancillary, flags);
            assert_eq!(sent.is_err(), ours.rights == Rights::Refused, "{sent:?}");
            ours.drain();
            assert_eq!(ours.is_closed(), sent.is_ok(), "{rights:?}");
            // The channel's end takes the descriptor along.
            drop((near, ours, theirs));
            let mut byte = [0];
            assert_eq!(rustix::io::read(&far, &mut byte), Ok(0), "{rights:?}");
        }
    }
}
