//! The subscriber's end of one link: the handshake, the regions, and what its publisher's death means here.

mod handshake;
mod regions;
mod vigil;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use self::handshake::Welcome;
pub(super) use self::handshake::{Approach, SubscriberIdentity};
use self::regions::Announced;
pub(super) use self::vigil::Standing;
use self::vigil::Vigil;
use crate::backend::{Access, DeviceId, StreamOp};
use crate::clock::now_ns;
use crate::device::Device;
use crate::domain::EndpointName;
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::link::PeerState;
use crate::link::closer::PeerSocket;
use crate::link::entry::{Completion, Violation};
use crate::link::message::{self, Farewell, Message, Received};
use crate::link::peer::{Peer, Sign};
use crate::link::proof::{Proof, Streams};
use crate::link::pulse::Pulse;
use crate::link::ring::{self, count_release};
use crate::link::segment::Segment;
use crate::link::wake::{Bell, Wake};
use crate::link::watcher::{Next, Usage, Watch, Watched, Watcher};
use crate::memory::region::Region;
use crate::stream::Stream;

/// The tags of what [`Inlet`] watches.
const SOCKET: u64 = 0;
const SUSPECT: u64 = 1;

/// How often a dead publisher's socket is read once more.
const LAST_WORDS: usize = 64;

/// Messages taken from the socket before other links have their turn.
const MESSAGES_AT_ONCE: usize = 16;

/// Why this link ended: the error, for the first who asks, and its reason for all after that.
#[derive(Debug, Default)]
struct Fault {
    error: Option<Error>,
    reason: String,
}

impl Fault {
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
struct Memory {
    /// Declared first: it ends before its descriptor is closed.
    death: OnceLock<Watch>,
    #[expect(dead_code, reason = "held, not used: its death is watched for")]
    peer: Arc<Peer>,
    vigil: Arc<Vigil>,
    segment: Arc<Segment>,
    regions: Mutex<Vec<Arc<Region>>>,
    /// All that have waited for or released a sample, or read one in between.
    streams: Streams,
    /// Held until then, so that the publisher sees the end of the socket only after the last release.
    #[expect(dead_code, reason = "held, not used")]
    socket: Arc<PeerSocket>,
}

/// One link, as its subscriber and all its samples share it.
#[derive(Debug)]
pub(crate) struct Inlet {
    /// Declared first: they end before their descriptors are closed.
    words: OnceLock<[Watch; 2]>,
    me: Weak<Inlet>,
    announced: Announced,
    pub(super) home: Home,
    pub(super) name: String,
    pub(super) peer: Arc<Peer>,
    pub(super) lossless: bool,
    owner: DeviceId,
    access: Access,
    device: Device,
    pub(super) wake: Wake,
    bell: Arc<Bell>,
    pulse: Pulse,
    fault: Mutex<Fault>,
    socket: Arc<PeerSocket>,
    watcher: Arc<Watcher>,
    /// What copies to the host run on, made for the first of them: a stream for each copy would cost more than
    /// the hand-over.
    copies: OnceLock<Stream>,
    /// `None` only while dropping.
    memory: Option<Memory>,
}

impl Inlet {
    #[expect(clippy::too_many_arguments, reason = "the parts of one link, each made by another step of `connect`")]
    fn assemble(
        welcome: Welcome,
        regions: Vec<Arc<Region>>,
        name: &EndpointName,
        device: &Device,
        bell: &Arc<Bell>,
        socket: PeerSocket,
        peer: Peer,
        watcher: Arc<Watcher>,
        orphan_timeout: Duration,
    ) -> Result<Arc<Inlet>> {
        let (socket, peer, segment) = (Arc::new(socket), Arc::new(peer), Arc::new(welcome.segment));
        segment.header().receiver.heartbeat_ns.store(now_ns(), Relaxed);
        let memory = Memory {
            death: OnceLock::new(),
            peer: peer.clone(),
            vigil: Arc::new(Vigil::new(&segment, bell, welcome.completions)),
            segment,
            regions: Mutex::new(regions),
            streams: Streams::default(),
            socket: socket.clone(),
        };
        let inlet = Arc::new_cyclic(|me: &Weak<Inlet>| Inlet {
            words: OnceLock::new(),
            me: me.clone(),
            announced: Announced::default(),
            home: Home::here(),
            name: name.to_string(),
            peer,
            lossless: welcome.lossless,
            owner: welcome.owner,
            access: welcome.access,
            device: device.clone(),
            wake: welcome.wake,
            bell: bell.clone(),
            pulse: Pulse::default(),
            fault: Mutex::default(),
            socket,
            watcher: watcher.clone(),
            copies: OnceLock::new(),
            memory: Some(memory),
        });
        let me: Weak<dyn Watched> = Arc::downgrade(&inlet) as Weak<dyn Watched>;
        inlet.vigil().read_by(Arc::downgrade(&inlet));
        let vigil: Weak<dyn Watched> = Arc::downgrade(&inlet.memory().vigil) as Weak<dyn Watched>;
        let words = [watcher.watch(inlet.socket.as_fd(), &me, SOCKET)?, inlet.peer.watch(Sign::Suspect, &me, SUSPECT)?];
        let death = inlet.peer.watch(Sign::Over(orphan_timeout), &vigil, 0)?;
        let _ = (inlet.words.set(words), inlet.memory().death.set(death));
        watcher.tick(me);
        Ok(inlet)
    }

    #[inline]
    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("present until dropped")
    }

    pub(super) fn segment(&self) -> &Arc<Segment> {
        &self.memory().segment
    }

    pub(super) fn regions(&self) -> MutexGuard<'_, Vec<Arc<Region>>> {
        self.memory().regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn standing(&self) -> Standing {
        self.vigil().standing()
    }

    #[inline]
    fn vigil(&self) -> &Vigil {
        &self.memory().vigil
    }

    /// Samples that the publisher did not give to this subscriber because of its policy.
    pub(super) fn dropped(&self) -> u64 {
        self.segment().header().sender.dropped.load(Relaxed)
    }

    pub(super) fn peer_state(&self) -> PeerState {
        match self.standing() {
            _ if self.is_dead() || self.peer.is_proven_dead() => PeerState::Dead,
            Standing::Suspect | Standing::Failed => PeerState::Suspect,
            Standing::Closed | Standing::Evicted => PeerState::Leaving,
            Standing::Open if self.pulse.is_stalled() => PeerState::Stalled,
            Standing::Open => PeerState::Alive,
        }
    }

    /// Why nothing more will come.
    pub(super) fn why_over(&self) -> Error {
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, reason) = (self.name.clone(), fault.reason.clone());
        match (fault.error.take(), self.standing()) {
            (Some(error), _) => error,
            (None, Standing::Evicted) => Error::Evicted { name, reason },
            (None, Standing::Failed) => Error::LinkClosed { name, reason },
            (None, standing) => {
                Error::PublisherGone { name, pid: self.peer.pid, graceful: standing == Standing::Closed }
            }
        }
    }

    /// Prepares `stream`, which is [usable](Stream::check_usable), to read the sample at `position`: the stream waits until
    /// the data is complete. False if the publisher is dead and it never will be.
    #[inline]
    pub(super) fn admit(&self, position: u64, stream: &Stream) -> Result<bool> {
        let index = self.segment().index(position) as usize;
        let entry = self.segment().entry(position);
        if self.vigil().hold(index, position) {
            // No rescue comes by any more: what a death between publishing and signalling left is judged here.
            self.vigil().let_go(index, position);
            return Ok(!self.vigil().has_lost(index, position));
        }
        // Work that is launched after the CPU has seen the word is behind the data without a wait on the device.
        if entry.ready.reached(position) {
            return Ok(true);
        }
        let wait = StreamOp::Wait { word: self.segment().ready_word(position), value: position };
        self.note(stream);
        // SAFETY: the word lies in the link segment, which is let go only when this stream, noted above, is proven
        // to be past it (see `Drop`).
        unsafe { stream.batch_checked(&[wait])? };
        Ok(true)
    }

    /// Takes note of the publisher's own word for a sample of the history, before that is kept or admitted.
    pub(super) fn note_completion(&self, position: u64, completion: Completion) -> Result<(), Violation> {
        let index = self.segment().index(position) as usize;
        if self.vigil().note_completion(index, position, completion) {
            return Ok(());
        }
        let (found, allowed) = (format!("word {}", completion.word), "one that the publisher has sent".into());
        Err(Violation { field: "completion", found, allowed })
    }

    /// Takes note that the sample at `position` is out of the ring and not admitted to any stream: should its sender
    /// die first, [`completion`](Self::completion) says so.
    pub(super) fn keep(&self, position: u64) {
        let index = self.segment().index(position) as usize;
        if self.vigil().hold(index, position) {
            // What its rescue did not see is let go here.
            self.vigil().let_go(index, position);
        }
    }

    /// Whether the publisher is proven dead, and what waited for it has been let go.
    pub(super) fn is_dead(&self) -> bool {
        self.vigil().is_dead()
    }

    fn note(&self, stream: &Stream) {
        self.memory().streams.note(stream);
    }

    /// Enqueues the release of `position` behind the stream's work.
    pub(super) fn release(&self, position: u64, stream: &Stream) -> Result<()> {
        let memory = self.memory();
        let op = StreamOp::Signal { word: memory.segment.released_word(position), value: position };
        self.note(stream);
        // SAFETY: the word lies in the link segment, which is let go only when this stream, noted above, is proven
        // to be past it (see `Drop`).
        unsafe { stream.batch(&[op])? };
        self.tell_release();
        Ok(())
    }

    /// Releases a sample that no stream was told of, once its data is complete.
    pub(super) fn give_back(self: &Arc<Self>, position: u64) {
        let entry = self.segment().entry(position);
        if entry.ready.reached(position) {
            entry.released.store(position);
            return self.tell_release();
        }
        let me = self.clone();
        // However long its sender takes: it waits for the slot, and this end keeps the link for it.
        self.watcher.retire(move || {
            let entry = me.segment().entry(position);
            if !entry.ready.reached(position) {
                return Usage::Held;
            }
            entry.released.store(position);
            me.tell_release();
            Usage::Over
        });
    }

    /// Releases a sample behind what `stream`, which is being captured, was given before: once the capture has ended and
    /// the stream is past that.
    pub(super) fn release_later(self: &Arc<Self>, position: u64, stream: &Stream) {
        let (me, mut proof) = (self.clone(), Proof::behind(stream));
        self.watcher.retire(move || {
            let entry = me.segment().entry(position);
            let is_past = proof.is_passed() && entry.ready.reached(position);
            if is_past {
                entry.released.store(position);
                me.tell_release();
            }
            is_past
        });
    }

    /// Counts a release and wakes the publisher if it waits for one.
    #[inline]
    fn tell_release(&self) {
        if count_release(self.segment()) {
            self.wake.ring();
        }
    }

    /// Whether the sample's data is complete; an error if it never will be.
    #[inline]
    pub(super) fn completion(&self, position: u64, sequence: u64) -> Result<bool> {
        let index = self.segment().index(position) as usize;
        let entry = self.segment().entry(position);
        // `ready` first: a rescue, and a sender that gives up, mark the loss before the word is stored.
        let reached = entry.ready.reached(position);
        if self.vigil().has_lost(index, position) || ring::was_given_up(self.segment(), position) {
            return Err(Error::SampleLost { name: self.name.clone(), sequence, pid: self.peer.pid });
        }
        Ok(reached)
    }

    /// Waits on the CPU until the sample's data is complete.
    #[inline]
    pub(super) fn wait_complete(&self, position: u64, sequence: u64, timeout: Duration) -> Result<()> {
        self.home.check()?;
        if !self.completion(position, sequence)? {
            let word = &self.segment().entry(position).ready;
            if !self.device.backend().wait_word(word, position, timeout)? {
                let what = format!("the data of sample {sequence} of {:?}", self.name);
                return Err(Error::Timeout { what, waited: timeout });
            }
            self.completion(position, sequence)?;
        }
        Ok(())
    }

    /// Waits on the CPU until the data may be complete, or will never be, or `limit` has passed.
    pub(super) fn linger(&self, position: u64, limit: Duration) {
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
        let farewell = Farewell::Failed(message::text(&error));
        let _ = message::send(self.socket.as_fd().as_fd(), &Message::Bye(farewell), &[]);
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        if self.standing() == Standing::Open {
            fault.keep(error);
        }
        drop(fault);
        self.vigil().stand(Standing::Failed);
    }

    pub(super) fn violation(&self, violation: Violation) -> Error {
        let Violation { field, found, allowed } = violation;
        Error::Protocol { name: self.name.clone(), field, found, allowed }
    }

    /// No more samples, please; those held stay valid.
    pub(super) fn leave(&self) {
        let _ = message::send(self.socket.as_fd().as_fd(), &Message::Bye(Farewell::Closed), &[]);
    }

    fn on_message(&self) -> Next {
        for _ in 0..MESSAGES_AT_ONCE {
            if self.standing() == Standing::Failed {
                // Nothing more is wanted of it, however much it sends.
                return Next::Stop;
            }
            match message::receive(self.socket.as_fd().as_fd(), &self.name) {
                Ok(Received::Nothing) => return Next::Keep,
                Ok(Received::Message(Message::Region { id, bytes }, fds)) => self.map_soon(id, bytes, fds),
                Ok(Received::Message(Message::Bye(farewell), _)) => self.on_farewell(farewell),
                Ok(Received::Message(other, _)) => {
                    let fault = other.unexpected("Region or Bye");
                    self.fail(Error::Handshake { name: self.name.clone(), fault });
                    return Next::Stop;
                }
                Ok(Received::End) => {
                    self.vigil().stand(Standing::Suspect);
                    return Next::Stop;
                }
                Err(error) if message::is_short(&error) => {
                    self.announced.leave_unread(error);
                    return Next::Later;
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
    fn hear_last_words(&self) -> bool {
        (0..LAST_WORDS).map(|_| self.on_message()).find(|&next| next != Next::Keep) != Some(Next::Later)
    }

    fn on_farewell(&self, farewell: Farewell) {
        match farewell {
            Farewell::Closed => self.vigil().stand(Standing::Closed),
            Farewell::Evicted(reason) | Farewell::Failed(reason) => {
                let error = Error::Evicted { name: self.name.clone(), reason };
                self.fault.lock().unwrap_or_else(PoisonError::into_inner).keep(error);
                self.vigil().stand(Standing::Evicted);
            }
        }
    }
}

impl Watched for Inlet {
    fn on_ready(&self, tag: u64) -> Next {
        match tag {
            _ if !self.home.is_here() => Next::Stop,
            SUSPECT => {
                // Its end is told behind what it said, its goodbye for one.
                if !self.hear_last_words() {
                    return Next::Later;
                }
                self.vigil().stand(Standing::Suspect);
                Next::Stop
            }
            _ => self.on_message(),
        }
    }

    fn on_tick(&self, now_ns: u64) {
        let header = self.segment().header();
        header.receiver.heartbeat_ns.store(now_ns, Relaxed);
        self.pulse.tick(header.sender.heartbeat_ns.load(Relaxed));
        self.map_again();
    }
}

impl Drop for Inlet {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if !self.home.is_here() {
            let copies = self.copies.take();
            return std::mem::forget((memory, copies));
        }
        // Never here, even if all is quiet: to unregister memory, a driver may wait for a stream that waits for a peer.
        // The vigil goes on until then: such a stream may wait for this one's publisher, and is let go by its death.
        let mut proof = None;
        self.watcher.retire(move || {
            // All of it: a closure takes along only the fields that it names.
            let memory = &memory;
            proof.get_or_insert_with(|| memory.streams.mark()).is_passed()
        });
    }
}
