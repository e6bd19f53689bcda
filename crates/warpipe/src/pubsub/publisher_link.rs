//! The receiving end of one link, named after its peer: the handshake, the regions, and the
//! consequences of its publisher's death. A publisher has one, too, for a subscriber that sends
//! replies.

mod handshake;
mod monitor;
mod regions;
mod samples;

use crate::ipc::Kind;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

pub(super) use self::handshake::ConnectOptions;
use self::handshake::Welcome;
use self::monitor::PublisherMonitor;
pub(super) use self::monitor::SenderState;
pub(super) use self::regions::OpenRegion;
use self::regions::PublisherRegions;
use self::samples::SetAside;
use crate::backend::{Access, DeviceId};
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::ipc::PeerState;
use crate::ipc::connection::{self, ConnectionUser, watch_socket, watch_suspicion};
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::{DeathEvidence, Peer};
use crate::mutex::LockUnpoisoned;
use crate::pubsub::entry::Violation;
use crate::runtime::closer::{PeerFd, PeerSocket};
use crate::runtime::doorbell::{LocalDoorbell, PeerDoorbell};
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::heartbeat::PeerHeartbeat;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, new_generation};
use crate::shm::segment::Segment;
use crate::statistics;
use crate::stream::Stream;
use crate::trace::{self, TraceEvent};

/// Why this link ended: the error for the first caller that asks, and its text for all later
/// callers.
#[derive(Debug, Default)]
struct LinkFault {
    error: Option<Error>,
    reason: String,
}

impl LinkFault {
    /// Keeps the first fault. Later faults follow from it.
    fn keep(&mut self, error: Error) {
        if self.reason.is_empty() {
            self.reason = match &error {
                Error::Evicted { reason, .. } => reason.clone(),
                other => other.to_string(),
            };
            self.error = Some(error);
        }
    }
}

/// The memory of the link, dropped when no stream uses it any more. The monitor runs until then: a
/// stream may wait for this link's publisher, and is released by that publisher's death.
#[derive(Debug)]
struct LinkMemory {
    /// Declared first: the registration ends before its descriptor is closed.
    death: OnceLock<Registration>,
    #[expect(dead_code, reason = "held, not used: its death is watched for")]
    peer: Arc<Peer>,
    monitor: Arc<PublisherMonitor>,
    segment: Arc<Segment>,
    regions: PublisherRegions,
    /// Held until the memory is dropped, so that the publisher sees the end of the socket only
    /// after the last release.
    socket: Arc<PeerSocket>,
    /// The stream for copies to the host, made for the first copy: a stream for each copy would
    /// cost more than the hand-over.
    copies: OnceLock<Stream>,
}

/// The receiving end of one link, shared by its subscriber and all its samples.
#[derive(Debug)]
pub(crate) struct PublisherLink {
    /// Declared first: the registrations end before their descriptors are closed.
    registrations: OnceLock<[Registration; 2]>,
    me: Weak<PublisherLink>,
    /// Changes of the publisher's regions that it has announced and that have not been made here yet.
    changes: AtomicUsize,
    pub(super) owner_process: OwnerProcess,
    pub(super) name: String,
    pub(super) peer: Arc<Peer>,
    pub(super) lossless: bool,
    /// The publisher's.
    pub(super) generation: [u8; 16],
    /// That of the publisher that gave the samples their numbers.
    pub(super) source: [u8; 16],
    device: Device,
    pub(super) peer_doorbell: Arc<PeerDoorbell>,
    doorbell: Arc<LocalDoorbell>,
    /// The ring of the replies, until its sender takes it.
    replies: Mutex<Option<Segment>>,
    ring: RingKind,
    /// Of a link with replies, once there is one; and the number of the link there.
    other_end: OnceLock<(Weak<dyn OtherEnd>, u64)>,
    peer_heartbeat: PeerHeartbeat,
    fault: Mutex<LinkFault>,
    set_aside: SetAside,
    reactor: Arc<Reactor>,
    /// Its streams are those that have waited for, read or released a sample.
    memory: DropAfterFence<LinkMemory>,
}

/// The sender of the other ring of a link with replies. It reads the socket for both.
pub(in crate::pubsub) trait OtherEnd: Send + Sync {
    /// As [`connection::read_out`], for its link with this number.
    fn read_out(&self, link: u64);

    /// The wake channel was drained, and a ring may have been meant for this end.
    fn pass_on_wake(&self);
}

/// The parts of a receiver's end beside its memory.
pub(in crate::pubsub) struct ReceiverEnd<'a> {
    pub(in crate::pubsub) doorbell: &'a Arc<LocalDoorbell>,
    pub(in crate::pubsub) socket: Arc<PeerSocket>,
    pub(in crate::pubsub) peer: Arc<Peer>,
    pub(in crate::pubsub) orphan_timeout: Duration,
}

/// The ring of a receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RingKind {
    /// The only ring of its link.
    Single,
    /// The samples of a link with replies.
    Samples,
    Replies,
}

impl PublisherLink {
    fn assemble(
        welcome: Welcome,
        end: ReceiverEnd<'_>,
        ring: RingKind,
        reactor: Arc<Reactor>,
    ) -> Result<Arc<PublisherLink>> {
        let segment = Arc::new(welcome.segment);
        let heartbeat = &segment.header().receiver.heartbeat_ns;
        heartbeat.store(now_ns(), Relaxed);
        let monitor = PublisherMonitor::new(&segment, end.doorbell, welcome.completions);
        let regions = welcome.regions;
        let (name, device) = (regions.name.clone(), regions.device.clone());
        let generation = regions.generation;
        let memory = LinkMemory {
            death: OnceLock::new(),
            peer: end.peer.clone(),
            monitor: Arc::new(monitor),
            segment,
            regions,
            socket: end.socket,
            copies: OnceLock::new(),
        };
        let memory = DropAfterFence::new(Arc::default(), memory)?;
        let link = Arc::new_cyclic(|me: &Weak<PublisherLink>| PublisherLink {
            registrations: OnceLock::new(),
            me: me.clone(),
            changes: AtomicUsize::new(0),
            owner_process: OwnerProcess::current(),
            name,
            peer: end.peer,
            lossless: welcome.lossless,
            generation,
            source: welcome.source,
            device,
            peer_doorbell: welcome.peer_doorbell,
            doorbell: end.doorbell.clone(),
            replies: Mutex::new(welcome.replies),
            ring,
            other_end: OnceLock::new(),
            peer_heartbeat: PeerHeartbeat::default(),
            fault: Mutex::default(),
            set_aside: SetAside::default(),
            reactor,
            memory,
        });
        link.watch(end.orphan_timeout)?;
        Ok(link)
    }

    /// The receiver on `device` of replies from the device `owner`. `other` reads the socket.
    pub(in crate::pubsub) fn of_replies(
        segment: Segment,
        peer_doorbell: &Arc<PeerDoorbell>,
        name: &str,
        device: &Device,
        owner: DeviceId,
        end: ReceiverEnd<'_>,
        other: (Weak<dyn OtherEnd>, u64),
    ) -> Result<Arc<PublisherLink>> {
        let generation = new_generation();
        let welcome = Welcome {
            segment,
            replies: None,
            peer_doorbell: peer_doorbell.clone(),
            lossless: true,
            regions: PublisherRegions::new(name, device, generation, owner, Access::Read),
            region_count: 0,
            completions: None,
            source: generation,
        };
        let reactor = Reactor::of_process()?;
        let link = PublisherLink::assemble(welcome, end, RingKind::Replies, reactor)?;
        let _ = link.other_end.set(other);
        Ok(link)
    }

    /// The ring of the replies, once: `other`, their sender, reads the socket from now on.
    pub(in crate::pubsub) fn take_replies(
        &self,
        other: (Weak<dyn OtherEnd>, u64),
    ) -> Option<Segment> {
        let replies = self.replies.locked().take()?;
        let _ = self.other_end.set(other);
        Some(replies)
    }

    /// Begins to read the publisher's messages, and to watch for its death.
    fn watch(self: &Arc<Self>, orphan_timeout: Duration) -> Result<()> {
        let me: Weak<dyn EventSource> = Arc::downgrade(self) as Weak<dyn EventSource>;
        self.monitor().set_link(Arc::downgrade(self));
        let monitor: Weak<dyn EventSource> =
            Arc::downgrade(&self.memory.monitor) as Weak<dyn EventSource>;
        if self.ring == RingKind::Single {
            let both = [
                watch_socket(&self.reactor, self.socket().as_fd(), &me, 0)?,
                watch_suspicion(&self.peer, &me, 0)?,
            ];
            let _ = self.registrations.set(both);
        }
        let death = self
            .peer
            .watch(DeathEvidence::Orphaned(orphan_timeout), &monitor, 0)?;
        let _ = self.memory.death.set(death);
        self.reactor.register_ticks(me);
        Ok(())
    }

    /// Drains the wake channel. A ring may have been meant for the sender of the other ring.
    pub(super) fn drain_wake(&self) {
        self.peer_doorbell.drain();
        if let Some((other, _)) = self.other_end() {
            other.pass_on_wake();
        }
    }

    fn other_end(&self) -> Option<(Arc<dyn OtherEnd>, u64)> {
        let (other, link) = self.other_end.get()?;
        Some((other.upgrade()?, *link))
    }

    /// The sender of the other ring has drained the wake channel. Returns whether this end sleeps.
    pub(super) fn pass_on_wake(&self) -> bool {
        let is_asleep = self.segment().header().receiver.asleep.load(Relaxed) != 0;
        if is_asleep {
            self.doorbell.ring();
        }
        is_asleep
    }

    pub(super) fn socket(&self) -> &Arc<PeerSocket> {
        &self.memory.socket
    }

    /// Whether no more samples come over it.
    pub(super) fn has_ended(&self) -> bool {
        self.link_state() != SenderState::Open
    }

    pub(super) fn segment(&self) -> &Arc<Segment> {
        &self.memory.segment
    }

    pub(super) fn regions(&self) -> MutexGuard<'_, Vec<OpenRegion>> {
        self.memory.regions.open()
    }

    #[inline]
    pub(super) fn link_state(&self) -> SenderState {
        self.monitor().link_state()
    }

    #[inline]
    fn monitor(&self) -> &PublisherMonitor {
        &self.memory.monitor
    }

    /// Samples that the publisher did not give to this subscriber because of its policy.
    pub(super) fn dropped(&self) -> u64 {
        self.segment().header().sender.dropped.load(Relaxed)
    }

    pub(super) fn peer_state(&self) -> PeerState {
        match self.link_state() {
            _ if self.is_dead() || self.peer.is_proven_dead() => PeerState::Dead,
            SenderState::Suspect | SenderState::Failed => PeerState::Suspect,
            SenderState::Closed | SenderState::Evicted => PeerState::Leaving,
            SenderState::Open if self.peer_heartbeat.is_stalled() => PeerState::Stalled,
            SenderState::Open => PeerState::Alive,
        }
    }

    /// Why no more samples will come.
    pub(super) fn why_over(&self) -> Error {
        let mut fault = self.fault.locked();
        let (name, reason) = (self.name.clone(), fault.reason.clone());
        match (fault.error.take(), self.link_state()) {
            (Some(error), _) => error,
            (None, SenderState::Evicted) => Error::Evicted { name, reason },
            (None, SenderState::Failed) => Error::LinkClosed {
                kind: Kind::Publisher,
                name,
                reason,
            },
            (None, link_state) => {
                let graceful = link_state == SenderState::Closed;
                Error::peer_gone(Kind::Publisher, name, self.peer.pid, graceful)
            }
        }
    }

    /// Whether the publisher is proven dead and the streams that waited for it have been released.
    pub(super) fn is_dead(&self) -> bool {
        self.monitor().is_dead()
    }

    /// Closes the link because of `error`. Nothing else of this process is touched.
    pub(super) fn fail(&self, error: Error) {
        let close_reason = CloseReason::Failed(message::text(&error));
        // Before the message: its answer may end the link at once, for a later reason.
        let mut fault = self.fault.locked();
        // Also of a publisher that has closed: why its last samples are not received.
        if matches!(self.link_state(), SenderState::Open | SenderState::Closed) {
            fault.keep(error);
        }
        drop(fault);
        self.say_close(close_reason);
        self.monitor().set_link_state(SenderState::Failed);
    }

    pub(super) fn violation(&self, violation: Violation) -> Error {
        Error::Protocol {
            name: self.name.clone(),
            field: violation.field,
            found: violation.found,
            allowed: violation.allowed,
        }
    }

    /// Asks for no more samples. Samples that are held stay valid.
    pub(super) fn leave(&self) {
        self.say_close(CloseReason::Closed);
    }

    fn say_close(&self, close_reason: CloseReason) {
        let close = match self.ring {
            RingKind::Replies => Message::CloseReplies(close_reason),
            RingKind::Single | RingKind::Samples => Message::Close(close_reason),
        };
        let _ = message::send(self.socket().as_fd().as_fd(), &close, &[]);
    }

    /// The publisher is dead.
    fn on_death(&self) {
        trace::emit(|| TraceEvent::OwnerDied {
            name: self.name.clone(),
            pid: self.peer.pid,
        });
        match self.ring {
            RingKind::Single => connection::read_out(self, 0),
            RingKind::Samples | RingKind::Replies => {
                if let Some((other, link)) = self.other_end() {
                    other.read_out(link);
                }
            }
        }
    }

    fn record_close(&self, close_reason: CloseReason) {
        match close_reason {
            CloseReason::Closed => {
                trace::emit(|| TraceEvent::OwnerClosed {
                    name: self.name.clone(),
                    pid: self.peer.pid,
                });
                self.monitor().set_link_state(SenderState::Closed);
            }
            CloseReason::Evicted(reason) | CloseReason::Failed(reason) => {
                let error = Error::Evicted {
                    name: self.name.clone(),
                    reason,
                };
                self.fault.locked().keep(error);
                self.monitor().set_link_state(SenderState::Evicted);
            }
        }
    }
}

impl PublisherLink {
    /// Takes a message of the publisher over this ring; returns one that is not due.
    pub(in crate::pubsub) fn handle_message(
        &self,
        message: Message,
        fds: Vec<PeerFd>,
    ) -> Result<(), Message> {
        match (message, self.ring) {
            // Each brings a descriptor: a publisher that goes on sending them is not read.
            (region @ Message::Region { .. }, _) if self.has_ended() => return Err(region),
            // Not needed.
            (Message::CloseRegion { .. }, _) if self.link_state() == SenderState::Failed => {}
            (Message::Region { id, bytes }, _) => {
                self.change_soon(move |link| link.memory.regions.map(id, bytes, &fds))
            }
            (Message::CloseRegion { id }, _) => self.change_soon(move |link| link.close_region(id)),
            (Message::Close(reason), RingKind::Single | RingKind::Samples)
            | (Message::CloseReplies(reason), RingKind::Replies) => self.record_close(reason),
            (other, _) => return Err(other),
        }
        Ok(())
    }
}

impl ConnectionUser for PublisherLink {
    fn on_message(&self, _: u64) -> Next {
        connection::read(self.socket().as_fd().as_fd(), &self.name, |received| {
            if self.link_state() == SenderState::Failed {
                // Further messages of this publisher are not needed, however many it sends.
                return Next::Stop;
            }
            match received {
                Ok(Received::Message(message, fds)) => match self.handle_message(message, fds) {
                    Ok(()) => return Next::Keep,
                    Err(other) => self.fail(Error::Handshake {
                        name: self.name.clone(),
                        fault: other.unexpected("Region, CloseRegion or Close"),
                    }),
                },
                Ok(_) => self.on_close(0),
                Err(error) => self.fail(error),
            }
            Next::Stop
        })
    }

    fn on_close(&self, _: u64) {
        self.monitor().set_link_state(SenderState::Suspect);
    }
}

impl EventSource for PublisherLink {
    fn on_ready(&self, tag: u64) -> Next {
        connection::dispatch(self, tag)
    }

    fn on_tick(&self, now_ns: u64) {
        let header = self.segment().header();
        header.receiver.heartbeat_ns.store(now_ns, Relaxed);
        self.peer_heartbeat
            .tick(header.sender.heartbeat_ns.load(Relaxed));
        statistics::beat(now_ns);
    }
}
