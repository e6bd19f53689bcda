//! The subscriber's end of one link: the handshake, the regions, and what its publisher's death means here.

mod handshake;
mod monitor;
mod regions;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use self::handshake::Welcome;
pub(super) use self::handshake::{ConnectOptions, SubscriberIdentity};
pub(super) use self::monitor::LinkState;
use self::monitor::PublisherMonitor;
use self::regions::AnnouncedRegions;
use crate::backend::{Access, DeviceId, StreamOp};
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::ipc::PeerState;
use crate::ipc::domain::EndpointName;
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::{DeathEvidence, Peer};
use crate::memory::region::Region;
use crate::pubsub::entry::{Completion, Violation};
use crate::pubsub::ring::{self, count_release};
use crate::runtime::closer::PeerSocket;
use crate::runtime::doorbell::{LocalDoorbell, PeerDoorbell};
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::heartbeat::PeerHeartbeat;
use crate::runtime::reactor::{DropReadiness, EventSource, Next, Reactor, Registration};
use crate::shm::segment::Segment;
use crate::stream::Stream;

/// The tags of what [`PublisherLink`] watches.
const SOCKET: u64 = 0;
const SUSPECT: u64 = 1;

/// How often a dead publisher's socket is read once more.
const FINAL_READS_MAX: usize = 64;

/// Messages taken from the socket before other links have their turn.
const MESSAGES_AT_ONCE: usize = 16;

/// Why this link ended: the error, for the first who asks, and its reason for all after that.
#[derive(Debug, Default)]
struct LinkFault {
    error: Option<Error>,
    reason: String,
}

impl LinkFault {
    /// The first fault counts; what follows from it does not.
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

/// What keeps the link's memory; let go when no stream uses it any more.
#[derive(Debug)]
struct LinkMemory {
    /// Declared first: it ends before its descriptor is closed.
    death: OnceLock<Registration>,
    #[expect(dead_code, reason = "held, not used: its death is watched for")]
    peer: Arc<Peer>,
    monitor: Arc<PublisherMonitor>,
    segment: Arc<Segment>,
    regions: Mutex<Vec<Arc<Region>>>,
    /// All that have waited for or released a sample, or read one in between.
    streams: StreamSet,
    /// Held until then, so that the publisher sees the end of the socket only after the last release.
    #[expect(dead_code, reason = "held, not used")]
    socket: Arc<PeerSocket>,
}

/// One link, as its subscriber and all its samples share it.
#[derive(Debug)]
pub(crate) struct PublisherLink {
    /// Declared first: they end before their descriptors are closed.
    words: OnceLock<[Registration; 2]>,
    me: Weak<PublisherLink>,
    announced: AnnouncedRegions,
    pub(super) owner_process: OwnerProcess,
    pub(super) name: String,
    pub(super) peer: Arc<Peer>,
    pub(super) lossless: bool,
    owner: DeviceId,
    access: Access,
    device: Device,
    pub(super) peer_doorbell: PeerDoorbell,
    doorbell: Arc<LocalDoorbell>,
    peer_heartbeat: PeerHeartbeat,
    fault: Mutex<LinkFault>,
    socket: Arc<PeerSocket>,
    reactor: Arc<Reactor>,
    /// What copies to the host run on, made for the first of them: a stream for each copy would cost more than
    /// the hand-over.
    copies: OnceLock<Stream>,
    /// `None` only while dropping.
    memory: Option<LinkMemory>,
}

impl PublisherLink {
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of one link, each made by another step of `connect`"
    )]
    fn assemble(
        welcome: Welcome,
        regions: Vec<Arc<Region>>,
        name: &EndpointName,
        device: &Device,
        doorbell: &Arc<LocalDoorbell>,
        socket: PeerSocket,
        peer: Peer,
        reactor: Arc<Reactor>,
        orphan_timeout: Duration,
    ) -> Result<Arc<PublisherLink>> {
        let (socket, peer, segment) = (Arc::new(socket), Arc::new(peer), Arc::new(welcome.segment));
        segment
            .header()
            .receiver
            .heartbeat_ns
            .store(now_ns(), Relaxed);
        let memory = LinkMemory {
            death: OnceLock::new(),
            peer: peer.clone(),
            monitor: Arc::new(PublisherMonitor::new(
                &segment,
                doorbell,
                welcome.completions,
            )),
            segment,
            regions: Mutex::new(regions),
            streams: StreamSet::default(),
            socket: socket.clone(),
        };
        let link = Arc::new_cyclic(|me: &Weak<PublisherLink>| PublisherLink {
            words: OnceLock::new(),
            me: me.clone(),
            announced: AnnouncedRegions::default(),
            owner_process: OwnerProcess::current(),
            name: name.to_string(),
            peer,
            lossless: welcome.lossless,
            owner: welcome.owner,
            access: welcome.access,
            device: device.clone(),
            peer_doorbell: welcome.peer_doorbell,
            doorbell: doorbell.clone(),
            peer_heartbeat: PeerHeartbeat::default(),
            fault: Mutex::default(),
            socket,
            reactor: reactor.clone(),
            copies: OnceLock::new(),
            memory: Some(memory),
        });
        let me: Weak<dyn EventSource> = Arc::downgrade(&link) as Weak<dyn EventSource>;
        link.monitor().read_by(Arc::downgrade(&link));
        let monitor: Weak<dyn EventSource> =
            Arc::downgrade(&link.memory().monitor) as Weak<dyn EventSource>;
        let words = [
            reactor.register(link.socket.as_fd(), &me, SOCKET)?,
            link.peer.watch(DeathEvidence::Suspect, &me, SUSPECT)?,
        ];
        let death = link
            .peer
            .watch(DeathEvidence::Orphaned(orphan_timeout), &monitor, 0)?;
        let _ = (link.words.set(words), link.memory().death.set(death));
        reactor.register_ticks(me);
        Ok(link)
    }

    #[inline]
    fn memory(&self) -> &LinkMemory {
        self.memory.as_ref().expect("present until dropped")
    }

    pub(super) fn segment(&self) -> &Arc<Segment> {
        &self.memory().segment
    }

    pub(super) fn regions(&self) -> MutexGuard<'_, Vec<Arc<Region>>> {
        self.memory()
            .regions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn link_state(&self) -> LinkState {
        self.monitor().link_state()
    }

    #[inline]
    fn monitor(&self) -> &PublisherMonitor {
        &self.memory().monitor
    }

    /// Samples that the publisher did not give to this subscriber because of its policy.
    pub(super) fn dropped(&self) -> u64 {
        self.segment().header().sender.dropped.load(Relaxed)
    }

    pub(super) fn peer_state(&self) -> PeerState {
        match self.link_state() {
            _ if self.is_dead() || self.peer.is_proven_dead() => PeerState::Dead,
            LinkState::Suspect | LinkState::Failed => PeerState::Suspect,
            LinkState::Closed | LinkState::Evicted => PeerState::Leaving,
            LinkState::Open if self.peer_heartbeat.is_stalled() => PeerState::Stalled,
            LinkState::Open => PeerState::Alive,
        }
    }

    /// Why nothing more will come.
    pub(super) fn why_over(&self) -> Error {
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, reason) = (self.name.clone(), fault.reason.clone());
        match (fault.error.take(), self.link_state()) {
            (Some(error), _) => error,
            (None, LinkState::Evicted) => Error::Evicted { name, reason },
            (None, LinkState::Failed) => Error::LinkClosed { name, reason },
            (None, link_state) => Error::PublisherGone {
                name,
                pid: self.peer.pid,
                graceful: link_state == LinkState::Closed,
            },
        }
    }

    /// Prepares `stream`, which is [usable](Stream::check_usable), to read the sample at `position`: the stream waits until
    /// the data is complete. False if the publisher is dead and it never will be.
    #[inline]
    pub(super) fn admit(&self, position: u64, stream: &Stream) -> Result<bool> {
        let index = self.segment().index(position) as usize;
        let entry = self.segment().entry(position);
        if self.monitor().hold(index, position) {
            // No rescue comes by any more: what a death between publishing and signalling left is judged here.
            self.monitor().release_wait(index, position);
            return Ok(!self.monitor().has_lost(index, position));
        }
        // Work that is launched after the CPU has seen the word is behind the data without a wait on the device.
        if entry.ready.reached(position) {
            return Ok(true);
        }
        let wait = StreamOp::Wait {
            word: self.segment().ready_word(position),
            value: position,
        };
        self.record_use(stream);
        // SAFETY: the word lies in the link segment, which is let go only when this stream, noted above, is proven
        // to be past it (see `Drop`).
        unsafe { stream.batch_checked(&[wait])? };
        Ok(true)
    }

    /// Takes note of the publisher's own word for a sample of the history, before that is kept or admitted.
    pub(super) fn note_completion(
        &self,
        position: u64,
        completion: Completion,
    ) -> Result<(), Violation> {
        let index = self.segment().index(position) as usize;
        if self.monitor().note_completion(index, position, completion) {
            return Ok(());
        }
        let (found, allowed) = (
            format!("word {}", completion.word),
            "one that the publisher has sent".into(),
        );
        Err(Violation {
            field: "completion",
            found,
            allowed,
        })
    }

    /// Takes note that the sample at `position` is out of the ring and not admitted to any stream: should its sender
    /// die first, [`completion`](Self::completion) says so.
    pub(super) fn keep(&self, position: u64) {
        let index = self.segment().index(position) as usize;
        if self.monitor().hold(index, position) {
            // What its rescue did not see is let go here.
            self.monitor().release_wait(index, position);
        }
    }

    /// Whether the publisher is proven dead, and what waited for it has been let go.
    pub(super) fn is_dead(&self) -> bool {
        self.monitor().is_dead()
    }

    fn record_use(&self, stream: &Stream) {
        self.memory().streams.record_use(stream);
    }

    /// Enqueues the release of `position` behind the stream's work.
    pub(super) fn release(&self, position: u64, stream: &Stream) -> Result<()> {
        let memory = self.memory();
        let op = StreamOp::Signal {
            word: memory.segment.released_word(position),
            value: position,
        };
        self.record_use(stream);
        // SAFETY: the word lies in the link segment, which is let go only when this stream, noted above, is proven
        // to be past it (see `Drop`).
        unsafe { stream.batch(&[op])? };
        self.notify_release();
        Ok(())
    }

    /// Releases a sample that no stream was told of, once its data is complete.
    pub(super) fn give_back(self: &Arc<Self>, position: u64) {
        let entry = self.segment().entry(position);
        if entry.ready.reached(position) {
            entry.released.store(position);
            return self.notify_release();
        }
        let me = self.clone();
        // However long its sender takes: it waits for the slot, and this end keeps the link for it.
        self.reactor.drop_after(move || {
            let entry = me.segment().entry(position);
            if !entry.ready.reached(position) {
                return DropReadiness::Held;
            }
            entry.released.store(position);
            me.notify_release();
            DropReadiness::Ready
        });
    }

    /// Releases a sample behind what `stream`, which is being captured, was given before: once the capture has ended and
    /// the stream is past that.
    pub(super) fn release_later(self: &Arc<Self>, position: u64, stream: &Stream) {
        let (me, mut fence) = (self.clone(), Fence::behind(stream));
        self.reactor.drop_after(move || {
            let entry = me.segment().entry(position);
            let is_past = fence.is_reached() && entry.ready.reached(position);
            if is_past {
                entry.released.store(position);
                me.notify_release();
            }
            is_past
        });
    }

    /// Counts a release and wakes the publisher if it waits for one.
    #[inline]
    fn notify_release(&self) {
        if count_release(self.segment()) {
            self.peer_doorbell.ring();
        }
    }

    /// Whether the sample's data is complete; an error if it never will be.
    #[inline]
    pub(super) fn completion(&self, position: u64, sequence: u64) -> Result<bool> {
        let index = self.segment().index(position) as usize;
        let entry = self.segment().entry(position);
        // `ready` first: a rescue, and a sender that gives up, mark the loss before the word is stored.
        let reached = entry.ready.reached(position);
        if self.monitor().has_lost(index, position) || ring::was_given_up(self.segment(), position)
        {
            return Err(Error::SampleLost {
                name: self.name.clone(),
                sequence,
                pid: self.peer.pid,
            });
        }
        Ok(reached)
    }

    /// Waits on the CPU until the sample's data is complete.
    #[inline]
    pub(super) fn wait_complete(
        &self,
        position: u64,
        sequence: u64,
        timeout: Duration,
    ) -> Result<()> {
        self.owner_process.check()?;
        if !self.completion(position, sequence)? {
            let word = &self.segment().entry(position).ready;
            if !self.device.backend().wait_word(word, position, timeout)? {
                let what = format!("the data of sample {sequence} of {:?}", self.name);
                return Err(Error::Timeout {
                    what,
                    waited: timeout,
                });
            }
            self.completion(position, sequence)?;
        }
        Ok(())
    }

    /// Waits on the CPU until the data may be complete, or will never be, or `limit` has passed.
    pub(super) fn wait_for_completion(&self, position: u64, limit: Duration) {
        let word = &self.segment().entry(position).ready;
        // Who asks looks again, whatever comes of this.
        let _ = self.device.backend().wait_word(word, position, limit);
    }

    /// The stream for copies to the host. Nothing but complete data is ever copied on it, so it is never stuck
    /// behind anything but other copies.
    pub(super) fn copies(&self) -> Result<&Stream> {
        if let Some(stream) = self.copies.get() {
            return Ok(stream);
        }
        let made = self.device.stream()?;
        Ok(self.copies.get_or_init(|| made))
    }

    /// Closes the link because of `error`. Nothing else of this process is touched.
    pub(super) fn fail(&self, error: Error) {
        let close_reason = CloseReason::Failed(message::text(&error));
        let _ = message::send(
            self.socket.as_fd().as_fd(),
            &Message::Close(close_reason),
            &[],
        );
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        if self.link_state() == LinkState::Open {
            fault.keep(error);
        }
        drop(fault);
        self.monitor().set_link_state(LinkState::Failed);
    }

    pub(super) fn violation(&self, violation: Violation) -> Error {
        let Violation {
            field,
            found,
            allowed,
        } = violation;
        Error::Protocol {
            name: self.name.clone(),
            field,
            found,
            allowed,
        }
    }

    /// No more samples, please; those held stay valid.
    pub(super) fn leave(&self) {
        let _ = message::send(
            self.socket.as_fd().as_fd(),
            &Message::Close(CloseReason::Closed),
            &[],
        );
    }

    fn on_message(&self) -> Next {
        for _ in 0..MESSAGES_AT_ONCE {
            if self.link_state() == LinkState::Failed {
                // Nothing more is wanted of it, however much it sends.
                return Next::Stop;
            }
            match message::receive(self.socket.as_fd().as_fd(), &self.name) {
                Ok(Received::Nothing) => return Next::Keep,
                Ok(Received::Message(Message::Region { id, bytes }, fds)) => {
                    self.map_soon(id, bytes, fds)
                }
                Ok(Received::Message(Message::Close(close_reason), _)) => {
                    self.on_close(close_reason)
                }
                Ok(Received::Message(other, _)) => {
                    let fault = other.unexpected("Region or Bye");
                    self.fail(Error::Handshake {
                        name: self.name.clone(),
                        fault,
                    });
                    return Next::Stop;
                }
                Ok(Received::End) => {
                    self.monitor().set_link_state(LinkState::Suspect);
                    return Next::Stop;
                }
                Err(error) if message::is_short(&error) => {
                    self.announced.leave_unread(error);
                    return Next::RetryAtTick;
                }
                Err(error) => {
                    self.fail(error);
                    return Next::Stop;
                }
            }
            self.announced.has_been_read();
        }
        Next::Keep
    }

    /// Reads what a publisher that does no more said before, which is in its socket whenever that comes to its end. False if
    /// some of it is left for want of room.
    fn read_final_messages(&self) -> bool {
        (0..FINAL_READS_MAX)
            .map(|_| self.on_message())
            .find(|&next| next != Next::Keep)
            != Some(Next::RetryAtTick)
    }

    fn on_close(&self, close_reason: CloseReason) {
        match close_reason {
            CloseReason::Closed => self.monitor().set_link_state(LinkState::Closed),
            CloseReason::Evicted(reason) | CloseReason::Failed(reason) => {
                let error = Error::Evicted {
                    name: self.name.clone(),
                    reason,
                };
                self.fault
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .keep(error);
                self.monitor().set_link_state(LinkState::Evicted);
            }
        }
    }
}

impl EventSource for PublisherLink {
    fn on_ready(&self, tag: u64) -> Next {
        match tag {
            _ if !self.owner_process.is_current() => Next::Stop,
            SUSPECT => {
                // Its end is told behind what it said, its goodbye for one.
                if !self.read_final_messages() {
                    return Next::RetryAtTick;
                }
                self.monitor().set_link_state(LinkState::Suspect);
                Next::Stop
            }
            _ => self.on_message(),
        }
    }

    fn on_tick(&self, now_ns: u64) {
        let header = self.segment().header();
        header.receiver.heartbeat_ns.store(now_ns, Relaxed);
        self.peer_heartbeat
            .tick(header.sender.heartbeat_ns.load(Relaxed));
        self.map_again();
    }
}

impl Drop for PublisherLink {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        if !self.owner_process.is_current() {
            let copies = self.copies.take();
            return std::mem::forget((memory, copies));
        }
        // Never here, even if all is quiet: to unregister memory, a driver may wait for a stream that waits for a peer.
        // The monitor goes on until then: such a stream may wait for this one's publisher, and is let go by its death.
        let mut fence = None;
        self.reactor.drop_after(move || {
            // All of it: a closure takes along only the fields that it names.
            let memory = &memory;
            fence
                .get_or_insert_with(|| memory.streams.fence())
                .is_reached()
        });
    }
}
