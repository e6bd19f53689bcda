//! What all handles of one publisher share: its state, how a sample goes out, and what the reactor does for it.

mod accept;
mod backpressure;
mod history;
mod send;
mod send_turn;
#[cfg(test)]
mod tests;
mod unicast;

pub(super) use unicast::Recipients;
pub(crate) use unicast::{Disconnects, LinkedSubscriber, RetainedSlot, SubscriberChanges};

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use self::history::PendingReplay;
use self::send_turn::{SendTurn, SendTurns};
use super::publisher::{Policy, PublisherBuilder, SlotHold, SlotReturn, SubscriberInfo};
use super::subscriber_link::{LinkParts, LinkPhase, SubscriberLink, share_memory};
use crate::backend::{Access, DeviceKind, StreamOp};
use crate::clock::{Stopwatch, now_ns};
use crate::device::Device;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::ipc::domain::NameClaim;
use crate::ipc::limits::{ConnectionQuota, QuotaPermit};
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::{DeathEvidence, Peer, ProcessId};
use crate::memory::arena::{Arena, SLOTS_MAX, SlotId};
use crate::nvtx;
use crate::pubsub::entry::{Description, Metadata};
use crate::runtime::closer::PeerSocket;
use crate::runtime::doorbell::{LocalDoorbell, PeerDoorbell};
use crate::runtime::fence::StreamSet;
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::{
    DropReadiness, EventSource, Next, Reactor, Registration, new_generation,
};
use crate::shm::fence_words::FenceWords;
use crate::stream::{Backoff, Stream};
use crate::tensor::Layout;

/// Looks for room before a sender sleeps: a few milliseconds, in which a pipeline that is full moves on. Each is short,
/// because what is seen late is sent late.
const POLLS: u32 = 16_000;

/// A wait in slices, so that a wake-up taken by another thread of this process costs a slice and not a hang.
const WAIT_SLICE: Duration = Duration::from_millis(50);

/// Connections that have not said who they are.
const HANDSHAKES_MAX: usize = 64;

const TOO_MANY_HANDSHAKES: &str = "too many connect and say nothing; try again";

/// Connections accepted before others have their turn.
const ACCEPTED_AT_ONCE: usize = 32;

/// How often the socket of one that does no more is read, [`MESSAGES_AT_ONCE`] each time.
const FINAL_READS_MAX: usize = 16;

/// Messages taken from one socket before the others have their turn.
const MESSAGES_AT_ONCE: usize = 16;

const LISTENER: u64 = 0;
const SOCKET: u64 = 0;
const PROVEN: u64 = 1;
const SUSPECT: u64 = 2;

fn tag(id: u64, kind: u64) -> u64 {
    id << 2 | kind
}

/// The shared part of a publisher.
pub(super) struct PublisherCore {
    pub(super) owner_process: OwnerProcess,
    pub(super) options: PublisherBuilder,
    pub(super) name: String,
    pub(super) device: Device,
    generation: [u8; 16],
    this: Weak<PublisherCore>,
    me: Weak<dyn EventSource>,
    reactor: Arc<Reactor>,
    /// Never held across a call of the driver that gives a stream work or asks one: see [`send_turn`].
    state: Mutex<PublisherState>,
    turn_is_over: Condvar,
    turns: Arc<SendTurns>,
    /// The last value of a fence: no fence word has reached a later one.
    fences: AtomicU64,
    /// All that have worked on the links or the fence words.
    streams: Arc<StreamSet>,
    pending_handshakes: Mutex<HashMap<u64, PendingHandshake>>,
    quota: ConnectionQuota,
    next_id: AtomicU64,
    doorbell: LocalDoorbell,
    fence_words: FenceWords,
    /// The fence words' memory, for subscribers of a history.
    completions: Option<CloseOnForkFd>,
    /// Repeats `ready` for who gets a sample later, behind the sample's own. Only with an observer.
    forward_stream: Option<Stream>,
    listener_registration: Mutex<Option<Registration>>,
    /// The listener is not watched until the next tick.
    is_listener_paused: AtomicBool,
    claim: NameClaim,
}

pub(super) struct PublisherState {
    arena: Arena,
    /// Every link has been told of all of its regions.
    is_announced: bool,
    links: Vec<SubscriberLink>,
    next_sequence: u64,
    history: VecDeque<HistoryEntry>,
    closed: bool,
    /// One thread has the turn.
    is_sending: bool,
    awaiting_turn: u32,
    /// Links that wait for the history until the turn is over.
    joiners: VecDeque<u64>,
    /// What late joiners have been given and is not complete.
    due: Vec<PendingReplay>,
    /// The fence thread looks whether it is.
    is_polling_replays: bool,
    ops: Vec<StreamOp>,
    places: Vec<Placement>,
    /// One of the places is a subscriber's of this process; one, of another user's.
    is_any_local: bool,
    is_any_foreign: bool,
    /// Somebody who sleeps has been handed something.
    is_any_asleep: bool,
    /// Of those who have gone. Only with an observer.
    disconnects: Disconnects,
}

/// Where one sample goes on one link.
#[derive(Debug, Clone, Copy)]
struct Placement {
    /// Where the link was found.
    index: usize,
    id: u64,
    position: u64,
    /// The entry has been published there.
    is_published: bool,
}

/// A sample of the history.
struct HistoryEntry {
    slot: SlotId,
    description: Description,
    /// Its data will never be complete.
    is_lost: bool,
}

/// Why a sample did not go out, and whether anybody had heard of it by then.
pub(super) enum SendFailure {
    /// Nobody: the loan is as it was.
    BeforePublish(Error),
    /// The subscribers, who are told that it is lost; the slot is theirs to release.
    AfterPublish(Error),
}

/// A connection whose `Hello` is due.
struct PendingHandshake {
    /// Declared first: it ends before the socket is closed.
    watch: Registration,
    clock: Uptime,
    peer: Peer,
    socket: Arc<PeerSocket>,
    /// From its `Hello` on.
    quota_permit: Option<QuotaPermit>,
}

impl std::fmt::Debug for PublisherCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher")
            .field("name", &self.name)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl PublisherCore {
    pub(super) fn new(
        options: PublisherBuilder,
        name: String,
        device: Device,
        claim: NameClaim,
    ) -> Result<Arc<PublisherCore>> {
        let reactor = Reactor::of_process()?;
        let (fence_words, completions) = if options.history > 0 {
            let (fence_words, fd) = FenceWords::published(&device, SLOTS_MAX)?;
            (fence_words, Some(fd))
        } else {
            (FenceWords::new(&device, SLOTS_MAX)?, None)
        };
        let doorbell = LocalDoorbell::new()?;
        let forward_stream = options
            .observer
            .as_ref()
            .map(|_| device.stream())
            .transpose()?;
        let streams = StreamSet::default();
        forward_stream
            .iter()
            .for_each(|stream| streams.record_use(stream));
        let core = Arc::new_cyclic(|me: &Weak<PublisherCore>| PublisherCore {
            owner_process: OwnerProcess::current(),
            generation: new_generation(),
            this: me.clone(),
            me: me.clone(),
            reactor: reactor.clone(),
            state: Mutex::new(PublisherState {
                arena: Arena::new(&device, options.memory_limit),
                is_announced: true,
                links: Vec::new(),
                next_sequence: 1,
                history: VecDeque::new(),
                closed: false,
                is_sending: false,
                awaiting_turn: 0,
                joiners: VecDeque::new(),
                due: Vec::new(),
                is_polling_replays: false,
                ops: Vec::new(),
                places: Vec::new(),
                is_any_local: false,
                is_any_foreign: false,
                is_any_asleep: false,
                disconnects: Disconnects::default(),
            }),
            turn_is_over: Condvar::new(),
            turns: Arc::default(),
            fences: AtomicU64::new(0),
            streams: Arc::new(streams),
            pending_handshakes: Mutex::default(),
            quota: ConnectionQuota::new(options.limits),
            next_id: AtomicU64::new(1),
            doorbell,
            fence_words,
            completions,
            forward_stream,
            listener_registration: Mutex::new(None),
            is_listener_paused: AtomicBool::new(false),
            claim,
            options,
            name,
            device,
        });
        core.listen()?;
        reactor.register_ticks(core.me.clone());
        Ok(core)
    }

    fn lock(&self) -> MutexGuard<'_, PublisherState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn record_use(&self, stream: &Stream) {
        self.streams.record_use(stream);
    }

    /// Takes a slot for `bytes`: a free one, a new region, or what is released within the loan's timeout.
    pub(super) fn take_slot(&self, bytes: u64) -> Result<(SlotId, u64)> {
        self.owner_process.check()?;
        let mut clock = Stopwatch::default();
        let mut backoff = Backoff::spinning(POLLS);
        let mut state = self.lock();
        loop {
            self.reclaim(&mut state, false);
            // A sample in a region that a subscriber cannot be told of would be the end of its link.
            state.announce(&self.name)?;
            if let Some(slot) = state.arena.take(bytes) {
                return Ok((slot, state.address(slot)));
            }
            // Memory is taken only when nothing comes back, also not behind a sample that is held long.
            self.reclaim(&mut state, true);
            if let Some(slot) = state.arena.take(bytes) {
                return Ok((slot, state.address(slot)));
            }
            let exempt = state.quarantined();
            if let Some(growth) = state.arena.plan(bytes, exempt) {
                // Without the lock: a driver may take its time, and the reactor must not wait for it.
                drop(state);
                let made = growth.make(&self.device);
                state = self.lock();
                state.arena.adopt(growth, made)?;
                state.is_announced = false;
                continue;
            }
            let (used, limit) = (state.arena.total(), state.arena.limit());
            let left = self.options.loan_timeout.saturating_sub(clock.elapsed());
            if left.is_zero() || bytes > limit {
                return Err(Error::MemoryLimit {
                    name: self.name.clone(),
                    bytes,
                    used,
                    limit,
                });
            }
            state = self.wait_for_release(state, left, &mut backoff, |_| true);
        }
    }

    /// Keeps the region of a slot mapped.
    pub(super) fn hold(&self, slot: SlotId) -> SlotHold {
        let state = self.lock();
        let region = state.arena.chunks()[state.arena.slot(slot).region as usize]
            .region
            .clone();
        SlotHold {
            region: Some(region),
            streams: self.streams.clone(),
            reactor: self.reactor.clone(),
            owner_process: self.owner_process,
        }
    }

    /// Tells when the slot is free again.
    pub(super) fn watch_slot(&self, slot: SlotId) -> SlotReturn {
        SlotReturn {
            core: self.this.clone(),
            owner_process: self.owner_process,
            slot,
            serial: self.lock().arena.serial(slot),
        }
    }

    /// Whether nobody holds the slot any more that was taken as this one.
    pub(super) fn is_back(&self, slot: SlotId, serial: u64) -> bool {
        let mut state = self.lock();
        self.reclaim(&mut state, true);
        state.arena.serial(slot) != serial
    }

    /// Returns a slot that was loaned and not sent. What is enqueued on the streams `behind` may still write it: it is
    /// free when they are past that.
    ///
    /// # Errors
    /// No fence was to be had. The slot is free when the streams are proven to be past what they have.
    pub(super) fn return_slot(&self, slot: SlotId, behind: &[Stream]) -> Result<()> {
        let Some((last, others)) = behind.split_last() else {
            self.lock().arena.release(slot);
            return Ok(());
        };
        let fenced = others
            .iter()
            .try_for_each(|other| last.wait_for(other))
            .and_then(|()| self.fence(slot, last));
        match fenced {
            Ok(value) => {
                let mut state = self.lock();
                state.arena.fence(slot, value);
                state.arena.release(slot);
            }
            Err(_) => self.once_past(behind, move |core| core.lock().arena.release(slot)),
        }
        fenced.map(drop)
    }

    /// Has `stream` signal a slot's own word behind the work that it has been given. Returns the value.
    fn fence(&self, slot: SlotId, stream: &Stream) -> Result<u64> {
        self.record_use(stream);
        let value = self.next_fence();
        let op = StreamOp::Signal {
            word: self.fence_words.device_word(slot as usize),
            value,
        };
        // SAFETY: the fence words outlives its signals: the caller has the core, and `close` waits for that, and then for the
        // stream, noted above.
        unsafe { stream.batch(&[op]) }?;
        Ok(value)
    }

    /// Calls `then`, on the fence thread, when the streams are proven to be past what they have been given so far. Where
    /// the driver has refused a fence there is no other way to know.
    fn once_past(&self, streams: &[Stream], then: impl FnOnce(&PublisherCore) + Send + 'static) {
        let Some(core) = self.this.upgrade() else {
            return;
        };
        let past = StreamSet::default();
        streams.iter().for_each(|stream| past.record_use(stream));
        let (mut fence, mut then) = (None, Some(then));
        // However long they take: who waits for the slot, or for the sample's end, has nobody else.
        self.reactor.drop_after(move || {
            let is_past = fence.get_or_insert_with(|| past.fence()).is_reached();
            if is_past && let Some(then) = then.take() {
                then(&core);
                core.ring();
            }
            is_past
        });
    }

    /// A value that no fence word has reached: words only grow.
    fn next_fence(&self) -> u64 {
        self.fences.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes back every slot that nobody uses any more.
    fn reclaim(&self, state: &mut PublisherState, thorough: bool) {
        let PublisherState { arena, links, .. } = state;
        links
            .iter_mut()
            .for_each(|link| link.reclaim(thorough, |slot| arena.release(slot)));
        arena.collect(|slot, value| self.fence_words.word(slot as usize).reached(value));
    }

    pub(super) fn subscribers(&self) -> Vec<SubscriberInfo> {
        if !self.owner_process.is_current() {
            // Another thread of the parent may have held the lock at the fork: it is not to be touched here.
            return Vec::new();
        }
        let mut state = self.lock();
        self.reclaim(&mut state, true);
        state
            .links
            .iter()
            .filter(|link| link.phase != LinkPhase::Attaching)
            .map(SubscriberLink::info)
            .collect()
    }

    /// Waits until `count` subscribers are attached.
    pub(super) fn wait_for_subscribers(&self, count: usize, timeout: Duration) -> Result<()> {
        self.owner_process.check()?;
        let start = Instant::now();
        loop {
            if self
                .lock()
                .links
                .iter()
                .filter(|link| link.is_live())
                .count()
                >= count
            {
                return Ok(());
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let what = format!("subscriber {count} of {:?}", self.name);
                return Err(Error::Timeout {
                    what,
                    waited: timeout,
                });
            }
            message::wait_readable(self.doorbell.as_fd(), left.min(WAIT_SLICE));
            self.doorbell.drain();
        }
    }

    pub(super) fn memory_in_use(&self) -> (u64, u64) {
        if !self.owner_process.is_current() {
            return (0, self.options.memory_limit);
        }
        let state = self.lock();
        (state.arena.total(), state.arena.limit())
    }

    /// Gives the name up, says goodbye, and keeps the memory until no stream of this process writes it any more. The
    /// goodbyes are in their sockets when this returns, for the process may end then. Once; what follows does nothing.
    pub(super) fn close(self: &Arc<PublisherCore>) {
        self.claim.withdraw();
        *self
            .listener_registration
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = None;
        self.pending_handshakes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        let mut state = self.lock();
        if std::mem::replace(&mut state.closed, true) {
            return;
        }
        for link in &mut state.links {
            let _ = message::send(link.socket(), &Message::Close(CloseReason::Closed), &[]);
            link.registrations.clear();
        }
        drop(state);
        self.ring();
        // Never here, even if all is quiet: to unregister memory, a driver may wait for a stream that waits for a peer.
        let (core, mut fence) = (self.clone(), None);
        self.reactor.drop_after(move || {
            if Arc::strong_count(&core) > 1 {
                return DropReadiness::Held;
            }
            let is_past = fence
                .get_or_insert_with(|| core.streams.fence())
                .is_reached();
            DropReadiness::from(is_past && core.poll_replays(&mut core.lock()))
        });
    }
}

impl PublisherState {
    fn address(&self, slot: SlotId) -> u64 {
        let slot = self.arena.slot(slot);
        self.arena.chunks()[slot.region as usize].region.ptr() + slot.offset
    }

    /// Finds a place at every live recipient, and leaves the signals that complete the sample there in `ops`; who has no
    /// place misses this sample. All that a send needs of a link beside its entry is looked at here, once.
    fn place(&mut self, to: Recipients) {
        let PublisherState {
            arena,
            links,
            places,
            ops,
            ..
        } = self;
        let (mut is_any_local, mut is_any_foreign) = (false, false);
        places.clear();
        ops.clear();
        let is_meant = |link: &SubscriberLink| link.is_live() && to.include(link);
        for (index, link) in links
            .iter_mut()
            .enumerate()
            .filter(|(_, link)| is_meant(link))
        {
            if let Some(position) = link.place(|slot| arena.release(slot)) {
                places.push(Placement {
                    index,
                    id: link.id,
                    position,
                    is_published: false,
                });
                ops.push(link.ready_op(position));
                is_any_local |= link.is_local;
                is_any_foreign |= link.is_foreign;
            }
        }
        (self.is_any_local, self.is_any_foreign) = (is_any_local, is_any_foreign);
    }

    /// The first recipient that must not miss a sample and has no room for one.
    fn first_full(&self, to: Recipients) -> Option<&SubscriberLink> {
        self.links.iter().find(|link| to.await_it(link))
    }

    /// Tells every subscriber of the regions that it does not know. Who does not read its socket loses its link.
    ///
    /// # Errors
    /// This process has no room for that; nobody loses anything by it, and it is done later.
    fn announce(&mut self, name: &str) -> Result<()> {
        if self.is_announced {
            return Ok(());
        }
        let PublisherState { arena, links, .. } = self;
        let is_heard = |link: &&mut SubscriberLink| {
            matches!(
                link.phase,
                LinkPhase::Live | LinkPhase::Joining | LinkPhase::Attaching
            )
        };
        let mut own = Ok(());
        for link in links.iter_mut().filter(is_heard) {
            match link.announce(arena.chunks()) {
                Ok(()) => {}
                Err(error) if message::is_own(error) => {
                    let context = format!("memory of {name:?}, to process {}", link.peer.pid);
                    own = Err(Error::os("sendmsg", context, error));
                }
                Err(_) => link.leave(Some(CloseReason::Evicted(
                    "it does not read its socket".into(),
                ))),
            }
        }
        self.is_announced = own.is_ok();
        own
    }

    /// Bytes that leavers hold: they do not count against the limit, up to the limit once more, so that a
    /// stopped process cannot stop the publisher.
    fn quarantined(&self) -> u64 {
        let leaving = self
            .links
            .iter()
            .filter(|link| matches!(link.phase, LinkPhase::Leaving | LinkPhase::Suspect));
        let bytes: u64 = leaving
            .flat_map(SubscriberLink::holds)
            .map(|slot| self.arena.slot(slot).bytes())
            .sum();
        bytes.min(self.arena.limit())
    }

    fn add_to_history(&mut self, slot: SlotId, description: Description, length: usize) {
        self.arena.hold(slot);
        self.history.push_back(HistoryEntry {
            slot,
            description,
            is_lost: false,
        });
        while self.history.len() > length {
            let forgotten = self.history.pop_front();
            forgotten
                .into_iter()
                .for_each(|kept| self.arena.release(kept.slot));
        }
    }

    /// Wakes every subscriber that sleeps and has been handed something.
    fn wake_sleepers(&mut self) {
        if std::mem::take(&mut self.is_any_asleep) {
            self.links.iter_mut().for_each(SubscriberLink::wake_sleeper);
        }
    }

    /// A number that changes whenever something was freed.
    fn freed_count(&self) -> u64 {
        self.arena.changes()
    }

    fn find(&mut self, id: u64) -> Option<&mut SubscriberLink> {
        self.links.iter_mut().find(|link| link.id == id)
    }
}

fn own_pid() -> i32 {
    std::process::id() as i32
}
