//! The receiving end of one link, named after its peer: the handshake, the regions, and the
//! consequences of its publisher's death. A publisher has one, too, for a subscriber that sends
//! replies.

mod handshake;
#[cfg(all(loom, not(miri)))]
#[path = "../../../../verify/src/models/rescue.rs"]
pub mod model;
mod monitor;
mod regions;
mod samples;

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

pub(super) use self::handshake::ConnectOptions;
use self::monitor::PublisherMonitor;
use self::samples::SetAside;
pub(super) use self::samples::{Admission, OpenMemory};
use crate::backend::DeviceId;
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::{Error, Result, StateFault};
use crate::ipc::connection::{self, ConnectionEvent, ConnectionUser};
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::DeathEvidence;
use crate::ipc::{Kind, PeerState};
use crate::memory::region::Region;
use crate::mutex::LockUnpoisoned;
use crate::pubsub::link_end::LinkEnd;
use crate::runtime::closer::{PeerFd, peek};
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::StreamSet;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration};
use crate::shm::page::SharedPage;
use crate::shm::segment::Segment;
use crate::statistics;
use crate::stream::Stream;
use crate::trace::{self, TraceEvent};

/// How a ring ended, as its receiver sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The publisher closed gracefully. Samples that it sent will still complete.
    Closed,
    /// The publisher closed this link alone.
    Evicted,
    /// This side closed it, because of the fault stored beside.
    Failed,
    /// The socket closed without a `Close` message.
    Suspect,
}

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
                Error::State(StateFault::LinkClosed { reason, .. }) => reason.clone(),
                other => other.to_string(),
            };
            self.error = Some(error);
        }
    }
}

/// The error of a link that has ended although its publisher may live.
fn closed(name: String, reason: String) -> Error {
    let kind = Kind::Publisher;
    Error::State(StateFault::LinkClosed { kind, name, reason })
}

/// The receiving end of one link, shared by its subscriber and all its samples. The end itself is
/// dropped when no stream uses its memory any more. It sees the publisher's death until then: a
/// stream may wait for this link's publisher, and is released by that death.
///
/// Its streams are those that have waited for, read or released a sample.
pub(crate) type PublisherLink = DropAfterFence<Arc<ReceiverEnd>>;

/// What a receiver is told of its ring.
#[derive(Debug)]
pub(in crate::pubsub) struct RingTerms {
    pub(in crate::pubsub) name: String,
    /// The receiver's.
    pub(in crate::pubsub) device: Device,
    pub(in crate::pubsub) sender_device: DeviceId,
    /// The publisher's.
    pub(in crate::pubsub) generation: [u8; 16],
    /// That of the publisher that gave the samples their numbers.
    pub(in crate::pubsub) source: [u8; 16],
    pub(in crate::pubsub) lossless: bool,
}

/// See [`PublisherLink`].
#[derive(Debug)]
pub(crate) struct ReceiverEnd {
    /// Declared first: the registrations end before their descriptors are closed.
    registrations: OnceLock<Vec<Registration>>,
    me: Weak<ReceiverEnd>,
    pub(super) terms: RingTerms,
    doorbell: Arc<LocalDoorbell>,
    /// The ring of the replies, until its sender takes it.
    replies: Mutex<Option<Segment>>,
    /// Of a link without replies.
    reads_socket: bool,
    /// Of a link with replies, once there is one: the sender of the other ring, which reads the
    /// socket for both; and the number of the link there.
    partner: OnceLock<(Weak<dyn EventSource>, u64)>,
    /// Set once no more samples come: the first end counts.
    ended: OnceLock<Ended>,
    fault: Mutex<LinkFault>,
    set_aside: SetAside,
    pub(super) monitor: PublisherMonitor,
    pub(super) segment: Arc<Segment>,
    streams: Arc<StreamSet>,
    /// Those that are open, by their ids. Only one thread at a time changes them, and not under a
    /// driver call, which may take long: every receive takes this lock, and a queue does so while
    /// it holds its own.
    regions: Mutex<Vec<(u32, Arc<Region>)>>,
    /// The metadata page, once the publisher has sent it.
    cells: OnceLock<SharedPage>,
    /// Regions that the publisher has closed and that are still mapped.
    closing: Arc<AtomicUsize>,
    /// Changes of the publisher's regions that it has announced and that have not been made here
    /// yet.
    changes: AtomicUsize,
    /// The publisher sees the end of the socket only after the last release.
    pub(super) end: LinkEnd,
    /// The stream for copies to the host, made for the first copy: a stream for each copy would
    /// cost more than the hand-over.
    copies: OnceLock<Stream>,
    reactor: Arc<Reactor>,
}

impl PublisherLink {
    /// A link that is not [watched](ReceiverEnd::watch) yet.
    pub(in crate::pubsub) fn of_ring(
        terms: RingTerms,
        segment: Segment,
        replies: Option<Segment>,
        end: LinkEnd,
        doorbell: &Arc<LocalDoorbell>,
        partner: Option<(Weak<dyn EventSource>, u64)>,
    ) -> Result<Arc<PublisherLink>> {
        let (segment, reactor) = (Arc::new(segment), Reactor::of_process()?);
        let streams = Arc::<StreamSet>::default();
        let end = Arc::new_cyclic(|me| ReceiverEnd {
            registrations: OnceLock::new(),
            me: me.clone(),
            terms,
            doorbell: doorbell.clone(),
            reads_socket: replies.is_none() && partner.is_none(),
            replies: Mutex::new(replies),
            partner: partner.map_or_else(OnceLock::new, OnceLock::from),
            ended: OnceLock::new(),
            fault: Mutex::default(),
            set_aside: SetAside::default(),
            monitor: PublisherMonitor::new(&segment),
            segment,
            streams: streams.clone(),
            regions: Mutex::default(),
            cells: OnceLock::new(),
            closing: Arc::default(),
            changes: AtomicUsize::new(0),
            end,
            copies: OnceLock::new(),
            reactor,
        });
        Ok(Arc::new(DropAfterFence::new(streams, end)?))
    }
}

impl ReceiverEnd {
    /// The ring of the replies, once: `other`, their sender, reads the socket from now on.
    pub(in crate::pubsub) fn take_replies(
        &self,
        other: (Weak<dyn EventSource>, u64),
    ) -> Option<Segment> {
        let replies = self.replies.locked().take()?;
        let _ = self.partner.set(other);
        Some(replies)
    }

    /// Begins to watch for the publisher's death, and to read its messages, unless the sender of
    /// the other ring does.
    pub(in crate::pubsub) fn watch(&self, orphan_timeout: Duration) -> Result<()> {
        let heartbeat = &self.segment.header().receiver.heartbeat_ns;
        heartbeat.store(now_ns(), Relaxed);
        let (me, peer): (Weak<dyn EventSource>, _) = (self.me.clone(), &*self.end.peer);
        let registrations = match self.reads_socket {
            true => {
                let ends = (self.end.socket(), peer);
                connection::watch(&self.reactor, ends, &me, 0, orphan_timeout)?.into()
            }
            false => {
                let tag = ConnectionEvent::Orphaned.tag(0);
                vec![peer.watch(DeathEvidence::Orphaned(orphan_timeout), &me, tag)?]
            }
        };
        let _ = self.registrations.set(registrations);
        self.reactor.register_ticks(me);
        Ok(())
    }

    /// Whether, and how, it has ended: no more samples come over it.
    #[inline]
    pub(super) fn ended(&self) -> Option<Ended> {
        self.ended.get().copied()
    }

    fn end_as(&self, ended: Ended) {
        let _ = self.ended.set(ended);
        self.doorbell.ring();
    }

    pub(super) fn regions(&self) -> MutexGuard<'_, Vec<(u32, Arc<Region>)>> {
        self.regions.locked()
    }

    /// The metadata page, if it is there.
    pub(super) fn cells(&self) -> Option<&SharedPage> {
        self.cells.get()
    }

    /// Samples that the publisher did not give to this subscriber because of its policy.
    pub(super) fn dropped(&self) -> u64 {
        self.segment.header().sender.dropped.load(Relaxed)
    }

    pub(super) fn peer_state(&self) -> PeerState {
        if self.is_dead() {
            return PeerState::Dead;
        }
        self.end.peer_state(self.ended().map(|ended| match ended {
            Ended::Suspect | Ended::Failed => PeerState::Suspect,
            Ended::Closed | Ended::Evicted => PeerState::Leaving,
        }))
    }

    /// Why no more samples will come.
    pub(super) fn why_over(&self) -> Error {
        let mut fault = self.fault.locked();
        let (name, reason) = (self.terms.name.clone(), fault.reason.clone());
        match (fault.error.take(), self.ended()) {
            (Some(error), _) => error,
            (None, Some(Ended::Evicted | Ended::Failed)) => closed(name, reason),
            (None, ended) => {
                let graceful = ended == Some(Ended::Closed);
                Error::peer_gone(Kind::Publisher, name, self.end.peer.pid, graceful)
            }
        }
    }

    /// Whether the publisher is proven dead and the streams that waited for it have been released.
    pub(super) fn is_dead(&self) -> bool {
        self.monitor.is_dead()
    }

    /// Whether a message of the publisher waits in the socket to be read.
    pub(super) fn has_unread(&self) -> bool {
        peek(self.end.socket(), &mut [0]).is_ok_and(|(bytes, _)| bytes > 0)
    }

    /// Closes the link because of `error`. Nothing else of this process is touched.
    pub(super) fn fail(&self, error: Error) {
        let close_reason = CloseReason::Failed(message::text(&error));
        // Before the message: its answer may end the link at once, for a later reason.
        let mut fault = self.fault.locked();
        // Also of a publisher that has closed: why its last samples are not received.
        if matches!(self.ended(), None | Some(Ended::Closed)) {
            fault.keep(error);
        }
        drop(fault);
        self.end.say_close(close_reason);
        self.end_as(Ended::Failed);
    }

    /// Asks for no more samples. Samples that are held stay valid.
    pub(super) fn leave(&self) {
        self.end.say_close(CloseReason::Closed);
    }

    fn record_close(&self, close_reason: CloseReason) {
        match close_reason {
            CloseReason::Closed => {
                trace::emit(|| TraceEvent::OwnerClosed(self.terms.name.clone(), self.end.peer.pid));
                self.end_as(Ended::Closed);
            }
            CloseReason::Evicted(reason) | CloseReason::Failed(reason) => {
                let reason = format!("the publisher evicted this subscriber: {reason}");
                let evicted = closed(self.terms.name.clone(), reason);
                self.fault.locked().keep(evicted);
                self.end_as(Ended::Evicted);
            }
        }
    }

    /// Takes a message of the publisher over this ring; returns one that is not due.
    pub(in crate::pubsub) fn handle_message(
        &self,
        message: Message,
        fds: Vec<PeerFd>,
    ) -> Result<(), Message> {
        match message {
            // Each brings a descriptor: a publisher that goes on sending them is not read.
            Message::Region { .. } | Message::MetadataPage if self.ended().is_some() => {
                return Err(message);
            }
            // Not needed.
            Message::CloseRegion { .. } if self.ended() == Some(Ended::Failed) => {}
            Message::Region { id, bytes } => {
                self.change_soon(move |link| link.map(id, bytes, &fds))
            }
            Message::MetadataPage => self.change_soon(move |link| link.map_cells(fds)),
            Message::CloseRegion { id } => self.change_soon(move |link| link.close_region(id)),
            other => self.record_close(self.end.closed_by(other)?),
        }
        Ok(())
    }
}

impl ConnectionUser for ReceiverEnd {
    fn on_message(&self, _: u64) -> Next {
        connection::read(self.end.socket(), &self.terms.name, |received| {
            if self.ended() == Some(Ended::Failed) {
                // Further messages of this publisher are not needed, however many it sends.
                return Next::Stop;
            }
            match received {
                Ok(Received::Message(message, fds)) => match self.handle_message(message, fds) {
                    Ok(()) => return Next::Keep,
                    Err(other) => self.fail(Error::handshake(
                        &self.terms.name,
                        other.unexpected("Region, CloseRegion, MetadataPage or Close"),
                    )),
                },
                Ok(_) => self.on_close(0),
                Err(error) => self.fail(error),
            }
            Next::Stop
        })
    }

    fn on_close(&self, _: u64) {
        self.end_as(Ended::Suspect);
    }

    /// The publisher's messages are read before its end is reported, in whatever order the two
    /// events arrive: its `Close` lies in the socket, behind at most a socket buffer of messages.
    fn on_orphaned(&self, _: u64) {
        trace::emit(|| TraceEvent::OwnerDied(self.terms.name.clone(), self.end.peer.pid));
        if self.reads_socket {
            connection::read_out(self, 0);
        } else if let Some((other, link)) = self.partner.get()
            && let Some(other) = other.upgrade()
        {
            other.on_ready(ConnectionEvent::Suspect.tag(*link));
            // This may be its last holder, and dropping it calls the driver.
            self.reactor.drop_on_reaper(other);
        }
        self.monitor.rescue();
        self.on_close(0);
    }
}

impl EventSource for ReceiverEnd {
    fn on_ready(&self, tag: u64) -> Next {
        connection::dispatch(self, tag)
    }

    fn on_tick(&self, now_ns: u64) {
        let header = self.segment.header();
        let (own, peers) = (&header.receiver.heartbeat_ns, &header.sender.heartbeat_ns);
        self.end.beat(now_ns, own, peers);
        statistics::beat(now_ns);
    }
}
