//! The messages of a connection, a link's or a session's: small postcard messages with descriptors,
//! one per packet.
//!
//! A packet is an eight-byte frame (magic, version, zero) and the message; `SOCK_SEQPACKET` keeps
//! packet boundaries. Nothing read here is trusted: lengths and counts of descriptors are exact or
//! the packet is refused. Descriptors of a refused packet are closed on a thread that may block.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, sockopt,
};
use serde::{Deserialize, Serialize};

use crate::backend::{Access, DeviceId};
use crate::error::PeerLimit;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::lifeline::Lifeline;
use crate::fork::per_process::PerProcess;
use crate::fork::{CloseOnForkFd, NoForkSection};
use crate::ipc::{FDS_MAX, Kind, NOTIFICATION};
use crate::os::{self, is_shortage, received_fds, take_standard};
use crate::runtime::closer::{PeerFd, PeerSocket, SEND_BYTES, peek, peer_of};
use crate::runtime::reserve;
use crate::shm::segment::VERSION;

/// The longest packet, frame included.
pub(crate) const PACKET_BYTES_MAX: usize = 1024;

/// The most descriptors of one packet.
const DESCRIPTORS_MAX: usize = FDS_MAX + LIFELINE;

/// The most that are received for a message with fewer, from a peer that sends it with more.
const FEW_DESCRIPTORS: usize = 8;

/// The number of descriptors of the sender's lifeline, which come last with each end's first
/// message.
pub(crate) const LIFELINE: usize = 2;

/// The most packets that are looked through for unread replies: more than a socket buffer holds.
const UNREAD_REPLIES_MAX: usize = 1024;

/// The longest text in a message.
const TEXT_BYTES_MAX: usize = 256;

const MAGIC: [u8; 4] = *b"WARP";
const FRAME_BYTES: usize = 8;

/// Every message of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Client or subscriber, first: the kind of endpoint that it expects, its device, and what the
    /// endpoint's kind asks for. Descriptors: the lifeline.
    Hello {
        device: Option<DeviceId>,
        kind: Kind,
        body: Vec<u8>,
    },
    /// Publisher: the link. Descriptors: the segment, the wake channel, the lifeline.
    Welcome {
        generation: [u8; 16],
        device: DeviceId,
        depth: u32,
        access: Access,
        lossless: bool,
        /// The generation of the publisher that gave the samples their numbers: this one, or the
        /// one that it forwards.
        source: [u8; 16],
        regions: u32,
        /// The depth of the ring of the replies; 0 for a link without.
        replies: u32,
    },
    /// Publisher: one region of its memory. No region has the id of an earlier one, or a lower one.
    /// Descriptor: the memory.
    Region { id: u32, bytes: u64 },
    /// Subscriber: everything is mapped, and samples may come. Publisher, in reply: samples come
    /// from now on.
    Attached,
    /// Either end closes. The publisher's last message, or the subscriber's request for no more
    /// samples.
    Close(CloseReason),
    /// Publisher, instead of `Welcome`. Server, instead of `SessionOpened`, or before it ends a
    /// session.
    Refused { denied: bool, text: String },
    /// Server: the client is admitted. Descriptors: `fds`, and the lifeline.
    SessionOpened {
        generation: [u8; 16],
        body: Vec<u8>,
        fds: u8,
    },
    /// Server or publisher, instead of `SessionOpened` or `Welcome`: this endpoint is of another
    /// kind.
    OtherKind { found: Kind },
    /// Client: a request.
    Request { serial: u64, body: Vec<u8> },
    /// Server: the reply. Descriptors: `fds`.
    Reply { serial: u64, body: Vec<u8>, fds: u8 },
    /// Server: the request was rejected.
    RequestFailed { serial: u64, text: String },
    /// Publisher with a history, once, before the subscriber's `Attached`: the fence words of its
    /// slots. Descriptor: their memory, read-only.
    Completions { bytes: u64 },
    /// Publisher, instead of `Welcome`; server, instead of `SessionOpened`: its limit of
    /// connections is reached.
    Full { limit: PeerLimit, max: u32 },
    /// Client: a request that brings memory. Descriptor: the memory.
    MemoryRequest { serial: u64, body: Vec<u8> },
    /// Receiver of replies: it is done with samples that it set aside.
    Returned { positions: Vec<u64> },
    /// Publisher: it no longer has this region, and no sample lies there. The subscriber unmaps it.
    CloseRegion { id: u32 },
    /// Subscriber, in reply: the region is no longer mapped.
    RegionClosed { id: u32 },
    /// Publisher, instead of `Welcome`; server, instead of `SessionOpened`: its process lacks
    /// descriptors or memory for the connection.
    NoRoom { text: String },
    /// Either end closes the ring of the replies: as [`Close`](Self::Close), with the ends
    /// exchanged.
    CloseReplies(CloseReason),
    /// Publisher, once, before the first sample with long metadata: the cells of the ring's
    /// entries. Descriptor: their memory, read-only.
    MetadataPage,
}

/// Why an end closes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CloseReason {
    /// The end has finished.
    Closed,
    /// The subscriber made no progress for too long.
    Evicted(String),
    /// The peer broke the protocol, or this end cannot go on.
    Failed(String),
}

impl Message {
    /// The name of the variant.
    fn name(&self) -> String {
        let text = format!("{self:?}");
        let end = text.find(|c: char| !c.is_alphanumeric());
        text[..end.unwrap_or(text.len())].to_string()
    }

    /// How many descriptors go with the message.
    pub(crate) fn descriptors(&self) -> usize {
        let own = match self {
            Message::Welcome { .. } => 2,
            Message::Region { .. }
            | Message::Completions { .. }
            | Message::MetadataPage
            | Message::MemoryRequest { .. } => 1,
            Message::SessionOpened { fds, .. } | Message::Reply { fds, .. } => usize::from(*fds),
            _ => 0,
        };
        if self.is_first() { own + LIFELINE } else { own }
    }

    /// Whether the sender's lifeline comes with the message, behind the message's own descriptors.
    pub(crate) fn is_first(&self) -> bool {
        use Message::{Hello, SessionOpened, Welcome};
        matches!(self, Hello { .. } | Welcome { .. } | SessionOpened { .. })
    }

    /// The part of the socket's buffer (`SO_SNDBUF`) that it may fill: without the last message a
    /// peer that was stopped would take the end for a death, and without a region it would lose its
    /// link. The others are tried again, or answer a peer that reads.
    fn room(&self) -> usize {
        use Message::{Close, CloseRegion, CloseReplies, MetadataPage, Refused, Region};
        match self {
            Close(_) | CloseReplies(_) | Refused { .. } => 2 * SEND_BYTES,
            Region { .. } | CloseRegion { .. } | MetadataPage => SEND_BYTES * 3 / 2,
            _ => SEND_BYTES,
        }
    }

    pub(crate) fn unexpected(&self, wanted: &'static str) -> HandshakeFault {
        HandshakeFault::Unexpected {
            found: self.name(),
            wanted,
        }
    }
}

/// Cuts a text to the longest that a message may carry.
pub(crate) fn text(message: impl ToString) -> String {
    let mut text = message.to_string();
    let end = (0..=TEXT_BYTES_MAX.min(text.len()))
        .rev()
        .find(|&end| text.is_char_boundary(end))
        .unwrap_or(0);
    text.truncate(end);
    text
}

/// Sends one message without blocking, the first one with this process's lifeline. `EAGAIN` means
/// that the peer does not read.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: &Message,
    fds: &[BorrowedFd<'_>],
) -> std::result::Result<(), Errno> {
    let lifeline = if message.is_first() {
        Some(Lifeline::of_process()?)
    } else {
        None
    };
    let ends = lifeline
        .iter()
        .flat_map(|lifeline| [lifeline.end.as_fd(), lifeline.alarm.as_fd()]);
    let fds: Vec<BorrowedFd<'_>> = fds.iter().copied().chain(ends).collect();
    debug_assert_eq!(fds.len(), message.descriptors());
    let mut packet = frame(VERSION).to_vec();
    packet.extend(postcard::to_stdvec(message).map_err(|_| Errno::MSGSIZE)?);
    match send_packet(socket, &packet, &fds) {
        Err(Errno::AGAIN) if message.room() > SEND_BYTES => {
            with_room(socket, message.room(), || {
                send_packet(socket, &packet, &fds)
            })
        }
        sent => sent,
    }
}

fn with_room(
    socket: BorrowedFd<'_>,
    bytes: usize,
    send: impl FnOnce() -> std::result::Result<(), Errno>,
) -> std::result::Result<(), Errno> {
    // Another thread may have a message of the link's other ring.
    static TURN: PerProcess<Mutex<()>> = PerProcess::new();
    let _turn = TURN.lock();
    sockopt::set_socket_send_buffer_size(socket, bytes)?;
    let sent = send();
    let _ = sockopt::set_socket_send_buffer_size(socket, SEND_BYTES);
    sent
}

/// [`send`] with descriptors of a reply, as many as one may have.
pub(crate) fn send_owned(
    socket: &PeerSocket,
    message: &Message,
    fds: &[CloseOnForkFd],
) -> std::result::Result<(), Errno> {
    if fds.len() > FDS_MAX {
        return Err(Errno::INVAL);
    }
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    send(socket.as_fd(), message, &borrowed)
}

/// The eight bytes before a message.
fn frame(version: u16) -> [u8; FRAME_BYTES] {
    let [low, high] = version.to_le_bytes();
    [MAGIC[0], MAGIC[1], MAGIC[2], MAGIC[3], low, high, 0, 0]
}

fn send_packet(
    socket: BorrowedFd<'_>,
    packet: &[u8],
    fds: &[BorrowedFd<'_>],
) -> std::result::Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::MSGSIZE);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(packet)], &mut ancillary, flags).map(drop)
}

/// The result of one receive.
#[derive(Debug)]
pub(crate) enum Received {
    /// Nothing yet.
    Nothing,
    /// The end: the peer has closed.
    End,
    /// A message with exactly its descriptors.
    Message(Message, Vec<PeerFd>),
}

/// Receives one message without blocking, and without dropping a descriptor, which can take as long
/// as the peer likes (see [`closer`](crate::runtime::closer)). So a packet is peeked first. It is
/// taken out of the queue only if it brought no descriptors, or once this process holds copies of
/// the expected ones. Any other packet stays in the queue, which must not be read again after an
/// error, and is closed with the [`PeerSocket`](crate::runtime::closer::PeerSocket). One thread at
/// a time may read.
///
/// # Errors
/// [`Error::Handshake`] for anything that is not a whole message of this version with its exact
/// descriptors; [`Error::Os`] when this process had no room for the descriptors, not
/// even in its [`reserve`]. That is not the peer's fault ([`shortage`]).
pub(crate) fn receive(socket: BorrowedFd<'_>, name: &str) -> Result<Received> {
    let mut packet = [0u8; PACKET_BYTES_MAX];
    let looked = past_reset(|| match peek(socket, &mut packet) {
        // The kernel looks for a packet, and then whether the peer has closed. The peer's last
        // packet may have come in between: the next look finds it.
        Ok((0, flags)) if !flags.contains(ReturnFlags::CTRUNC) => peek(socket, &mut packet),
        looked => looked,
    });
    let (bytes, flags) = match looked {
        Ok(looked) => looked,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
        Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::End),
        Err(error) => return Err(Error::os("recvmsg", format!("the link of {name:?}"), error)),
    };
    let brings_descriptors = flags.contains(ReturnFlags::CTRUNC);
    let fault = |fault| Error::handshake(name, fault);
    if flags.contains(ReturnFlags::TRUNC) {
        return Err(fault(HandshakeFault::Oversized(PACKET_BYTES_MAX)));
    }
    if bytes == 0 && !brings_descriptors {
        return Ok(Received::End);
    }
    let message = decode(&packet[..bytes]).map_err(fault)?;
    let wanted = message.descriptors();
    let fds = match (brings_descriptors, wanted) {
        (false, 0) => Vec::new(),
        (false, _) => return Err(fault(HandshakeFault::Descriptors { found: 0, wanted })),
        // Their number is unknown: to count them, this process would have to receive them.
        (true, 0) => return Err(fault(HandshakeFault::Descriptors { found: 1, wanted })),
        (true, _) => descriptors(socket, wanted, name)?,
    };
    // This process holds copies of the packet's descriptors, so taking the packet out closes no
    // file.
    past_reset(|| rustix::net::recv(socket, &mut packet, RecvFlags::DONTWAIT))
        .map_err(|error| Error::os("recv", format!("the link of {name:?}"), error))?;
    Ok(Received::Message(message, fds))
}

/// The system's error, if one of [`receive`] is this process's own: it lacks a descriptor or memory
/// for the packet. That is no fault of the peer's; the connection is closed all the same.
pub(crate) fn shortage(error: &Error) -> Option<Errno> {
    match error {
        Error::Os { source, .. } => Errno::from_io_error(source).filter(|&code| is_shortage(code)),
        _ => None,
    }
}

/// The bodies of the replies to requests that lie unread in a socket. They stay there, with their
/// descriptors. Called once for a socket, which is not read any more.
pub(crate) fn unread_replies(socket: BorrowedFd<'_>) -> Vec<Vec<u8>> {
    // Without that option each peek shows the next packet.
    let count = match os::peek_one_after_another(socket, true) {
        Ok(()) => UNREAD_REPLIES_MAX,
        Err(_) => 1,
    };
    let mut bodies = Vec::new();
    for _ in 0..count {
        let mut packet = [0u8; PACKET_BYTES_MAX];
        let Ok((bytes @ 1.., _)) = peek(socket, &mut packet) else {
            break;
        };
        if let Ok(Message::Reply { serial, body, .. }) = decode(&packet[..bytes])
            && serial != NOTIFICATION
        {
            bodies.push(body);
        }
    }
    // The socket's drop looks for descriptors in the first packet.
    let _ = os::peek_one_after_another(socket, false);
    bodies
}

/// Reads again after `ECONNRESET`: the peer has closed without having read all of its queue. The
/// kernel reports that once, to the next read. Messages that the peer sent before (why it refuses,
/// for example) can still be read.
fn past_reset<T>(mut read: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    match read() {
        Err(Errno::CONNRESET) => read(),
        other => other,
    }
}

/// Copies of the descriptors that come with the next packet.
fn descriptors(socket: BorrowedFd<'_>, wanted: usize, name: &str) -> Result<Vec<PeerFd>> {
    let fault = |found| Error::handshake(name, HandshakeFault::Descriptors { found, wanted });
    let failed = |error| Error::os("recvmsg", format!("the descriptors of {name:?}"), error);
    if wanted > DESCRIPTORS_MAX {
        // No message carries so many: this process does not lack room.
        return Err(fault(DESCRIPTORS_MAX));
    }
    let copy = || copy_descriptors(socket, wanted).map_err(failed);
    let (mut fds, mut is_cut) = copy()?;
    if is_cut && fds.len() < wanted && reserve::give(wanted) {
        (fds, is_cut) = copy()?;
    }
    match fds.len() {
        found if found == wanted && !is_cut => Ok(fds),
        found if found < wanted && is_cut => Err(failed(Errno::MFILE)),
        found => Err(fault(found)),
    }
}

/// Copies of up to `wanted` descriptors of the next packet, and whether there are more.
fn copy_descriptors(
    socket: BorrowedFd<'_>,
    wanted: usize,
) -> std::result::Result<(Vec<PeerFd>, bool), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let room = match wanted {
        ..=FEW_DESCRIPTORS => rustix::cmsg_space!(ScmRights(FEW_DESCRIPTORS)),
        _ => space.len(),
    };
    let mut ancillary = RecvAncillaryBuffer::new(&mut space[..room]);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let uid = peer_of(socket);
    // The descriptors are made by the call.
    let section = NoForkSection::enter();
    let taken = take_standard();
    let got = past_reset(|| {
        rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut [])],
            &mut ancillary,
            flags,
        )
    })?;
    let fds = received_fds(&mut ancillary)
        .map(|fd| PeerFd::received(&section, fd, uid))
        .collect();
    drop(taken);
    drop(section);
    Ok((fds, got.flags.contains(ReturnFlags::CTRUNC)))
}

/// Takes the lifeline off the descriptors of a first message.
pub(crate) fn take_lifeline(fds: &mut Vec<PeerFd>) -> Result<[PeerFd; LIFELINE], HandshakeFault> {
    let own = fds.len().saturating_sub(LIFELINE);
    let none = |fds: Vec<PeerFd>| HandshakeFault::Descriptors {
        found: fds.len(),
        wanted: LIFELINE,
    };
    fds.split_off(own).try_into().map_err(none)
}

pub(crate) fn decode(packet: &[u8]) -> Result<Message, HandshakeFault> {
    let garbled = HandshakeFault::Garbled(packet.len());
    let Some((frame, body)) = packet.split_at_checked(FRAME_BYTES) else {
        return Err(garbled);
    };
    if frame[..4] != MAGIC {
        return Err(HandshakeFault::Magic);
    }
    let theirs = u16::from_le_bytes([frame[4], frame[5]]);
    if theirs != VERSION {
        return Err(HandshakeFault::Version {
            theirs,
            ours: VERSION,
        });
    }
    match postcard::take_from_bytes::<Message>(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(garbled),
    }
}

/// Waits until `socket` has something to read; false when `timeout` ran out.
pub(crate) fn wait_readable(socket: BorrowedFd<'_>, timeout: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags};
    let mut poll = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    rustix::event::poll(&mut poll, Some(&crate::os::timespec(timeout))).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use warpipe_testkit::spin_until;

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    #[test]
    fn regions_and_last_messages_find_room_in_a_socket_that_is_not_read() {
        let (own, theirs) = pair();
        // As much as it may have, as where the system's default is that.
        sockopt::set_socket_send_buffer_size(&theirs, 1 << 30).unwrap();
        let theirs = PeerSocket::from(CloseOnForkFd::new(theirs).unwrap());
        let memory = std::fs::File::open("/dev/null").unwrap();
        let say = |message: &Message| {
            let fds = vec![memory.as_fd(); message.descriptors()];
            send(theirs.as_fd(), message, &fds)
        };
        let close = [Message::Close, Message::CloseReplies].map(|of| of(CloseReason::Closed));
        let [first, last] = [vec![Message::MetadataPage], close.to_vec()];
        let others = [
            Message::Returned { positions: vec![7] },
            Message::CloseRegion { id: 7 },
        ];
        let mut said = Vec::new();
        for (message, behind) in others.iter().zip([first, last]) {
            let sent = || say(message).is_ok().then(|| message.clone());
            said.extend(std::iter::from_fn(sent));
            for message in behind {
                assert_eq!(say(&message), Ok(()), "{message:?}");
                assert_eq!(say(&others[0]), Err(Errno::AGAIN), "no room for others");
                said.push(message);
            }
            assert_eq!(say(message), Err(Errno::AGAIN));
        }
        drop(theirs);
        for wanted in &said {
            let found = receive(own.as_fd(), "a").unwrap();
            assert!(
                matches!(&found, Received::Message(it, _) if it == wanted),
                "{found:?}"
            );
        }
    }

    #[test]
    fn the_last_message_is_read_although_its_sender_closes_right_behind_it() {
        let (close, mut lost) = (Message::Close(CloseReason::Closed), 0);
        for _ in 0..100 {
            let (own, theirs): (Vec<_>, Vec<_>) = (0..200).map(|_| pair()).unzip();
            let turn = AtomicUsize::new(usize::MAX);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for (number, socket) in theirs.into_iter().enumerate() {
                        spin_until(|| turn.load(SeqCst) == number);
                        send(socket.as_fd(), &close, &[]).unwrap();
                    }
                });
                for (number, socket) in own.iter().enumerate() {
                    turn.store(number, SeqCst);
                    let mut received = Received::Nothing;
                    spin_until(|| {
                        received = receive(socket.as_fd(), "a").unwrap();
                        !matches!(received, Received::Nothing)
                    });
                    lost += usize::from(!matches!(received, Received::Message(..)));
                }
            });
        }
        assert_eq!(lost, 0);
    }
}
