//! The state that all handles of one publisher share, and what the reactor does for it. How a
//! sample is sent: [`send`].

mod accept;
mod backpressure;
mod history;
mod send;
mod send_turn;
mod state;
#[cfg(test)]
mod tests;
mod unicast;

pub(super) use unicast::Recipients;
pub(crate) use unicast::{Disconnects, LinkedSubscriber, RetainedSlot, SubscriberChanges};

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

use self::history::PendingReplay;
use super::publisher::{PublisherBuilder, SlotHold, SlotReturn, SubscriberInfo};
use super::subscriber_link::{LinkPhase, SubscriberLink};
use crate::backend::StreamOp;
use crate::backoff::Backoff;
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::ipc::acceptor::{Acceptor, AcceptorOptions};
use crate::ipc::domain::NameClaim;
use crate::ipc::message::{self, CloseReason, Message};
use crate::memory::arena::{Arena, SLOTS_MAX, SlotId};
use crate::pubsub::entry::Description;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::fence::{LazyFence, StreamSet};
use crate::runtime::reactor::{DropReadiness, EventSource, Reactor, new_generation};
use crate::runtime::turn::{TurnLock, TurnState};
use crate::shm::fence_words::FenceWords;
use crate::stream::Stream;

/// How often a sender polls for room before it sleeps: a few milliseconds, within which a full
/// pipeline usually moves on. Each poll is short, because room that is seen late makes the sample
/// late.
const POLLS: u32 = 16_000;

/// A wait is cut into slices, so that a wake-up taken by another thread of this process costs one
/// slice instead of a hang.
const WAIT_SLICE: Duration = Duration::from_millis(50);

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
    /// Never held across a call of the driver that gives a stream work or asks one: see
    /// [`send_turn`].
    state: TurnLock<PublisherState>,
    /// The last fence value given out: no fence word has reached a later one.
    fences: AtomicU64,
    /// All streams that have worked on the links or the fence words.
    streams: Arc<StreamSet>,
    pub(super) acceptor: Arc<Acceptor>,
    doorbell: LocalDoorbell,
    fence_words: FenceWords,
    /// The fence words' memory, for subscribers of a history.
    completions: Option<CloseOnForkFd>,
    /// Stores `ready` for subscribers that get a sample later, behind the sample's own signal. Only
    /// with an observer.
    forward_stream: Option<Stream>,
}

pub(super) struct PublisherState {
    arena: Arena,
    /// Every region has been announced on every link.
    is_announced: bool,
    links: Vec<SubscriberLink>,
    next_sequence: u64,
    history: VecDeque<HistoryEntry>,
    closed: bool,
    /// The send turn.
    turn: TurnState,
    /// Links that wait for the history until the send turn ends.
    joiners: VecDeque<u64>,
    /// Samples of the history that late subscribers have been given and that are not complete.
    due: Vec<PendingReplay>,
    /// The fence thread polls `due`.
    is_polling_replays: bool,
    ops: Vec<StreamOp>,
    places: Vec<Placement>,
    /// A place of the current sample belongs to a subscriber of this process (`is_any_local`), or
    /// of another user (`is_any_foreign`).
    is_any_local: bool,
    is_any_foreign: bool,
    /// A sleeping subscriber has been given a sample.
    is_any_asleep: bool,
    /// Data of subscribers that have gone. Only with an observer.
    disconnects: Disconnects,
}

/// The place of one sample on one link.
#[derive(Debug, Clone, Copy)]
struct Placement {
    /// The index of the link when the place was found.
    index: usize,
    id: u64,
    position: u64,
    /// The entry at this place has been published.
    is_published: bool,
}

/// A sample of the history.
struct HistoryEntry {
    slot: SlotId,
    description: Description,
    /// Its data will never be complete.
    is_lost: bool,
}

/// Why a sample was not sent, and whether the failure came before or after it was announced.
pub(super) enum SendFailure {
    /// No subscriber has seen the sample: the loan is unchanged.
    BeforePublish(Error),
    /// Subscribers have seen the sample. They see that it is lost, and they release the slot.
    AfterPublish(Error),
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
            state: TurnLock::new(PublisherState {
                arena: Arena::new(&device, options.shared.memory_limit),
                is_announced: true,
                links: Vec::new(),
                next_sequence: 1,
                history: VecDeque::new(),
                closed: false,
                turn: TurnState::default(),
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
            fences: AtomicU64::new(0),
            streams: Arc::new(streams),
            acceptor: Acceptor::new(
                claim,
                AcceptorOptions {
                    name: name.clone(),
                    kind: options.kind,
                    access_policy: options.shared.access.clone(),
                    handshake_timeout: options.shared.handshake_timeout,
                    runs_on_control_thread: true,
                },
                &reactor,
                me.clone(),
            ),
            doorbell,
            fence_words,
            completions,
            forward_stream,
            options,
            name,
            device,
        });
        core.acceptor.listen()?;
        reactor.register_ticks(core.me.clone());
        Ok(core)
    }

    fn lock(&self) -> MutexGuard<'_, PublisherState> {
        self.state.lock()
    }

    pub(super) fn record_use(&self, stream: &Stream) {
        self.streams.record_use(stream);
    }

    /// Takes a slot for `bytes`: a free one, a new region, or a slot that is released within the
    /// loan's timeout.
    pub(super) fn take_slot(&self, bytes: u64) -> Result<(SlotId, u64)> {
        self.owner_process.check()?;
        let mut clock = Stopwatch::default();
        let mut backoff = Backoff::spinning(POLLS);
        let mut state = self.lock();
        loop {
            self.reclaim(&mut state, false);
            // A sample in a region that cannot be announced to a subscriber would end that link.
            state.announce(&self.name)?;
            if let Some(slot) = state.arena.take(bytes) {
                return Ok((slot, state.address(slot)));
            }
            // A new region is made only when no slot can be reclaimed, not even one behind a sample
            // that is held long.
            self.reclaim(&mut state, true);
            if let Some(slot) = state.arena.take(bytes) {
                return Ok((slot, state.address(slot)));
            }
            let exempt = state.quarantined();
            if let Some(growth) = state.arena.plan(bytes, exempt) {
                // Without the lock: the driver may take long, and the reactor must not wait for it.
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

    /// A handle that reports when the slot is free again.
    pub(super) fn watch_slot(&self, slot: SlotId) -> SlotReturn {
        SlotReturn {
            core: self.this.clone(),
            owner_process: self.owner_process,
            slot,
            serial: self.lock().arena.serial(slot),
        }
    }

    /// Whether the slot that was taken with this serial is free again.
    pub(super) fn is_back(&self, slot: SlotId, serial: u64) -> bool {
        let mut state = self.lock();
        self.reclaim(&mut state, true);
        state.arena.serial(slot) != serial
    }

    /// Returns a slot that was loaned and not sent. Work enqueued on the streams in `behind` may
    /// still write it. The slot is free when they are past that work.
    ///
    /// # Errors
    /// No fence could be enqueued. The slot is free when the streams are proven to be past their
    /// current work.
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

    /// Makes `stream` signal the fence word of the slot behind the stream's work so far. Returns
    /// the value.
    fn fence(&self, slot: SlotId, stream: &Stream) -> Result<u64> {
        self.record_use(stream);
        let value = self.next_fence();
        let op = StreamOp::Signal {
            word: self.fence_words.device_word(slot as usize),
            value,
        };
        // SAFETY: the fence words outlive their signals. The caller holds the core; `close` waits
        // until the caller drops it, and then for the stream, recorded above.
        unsafe { stream.batch(&[op]) }?;
        Ok(value)
    }

    /// Calls `then` on the fence thread when the streams are proven to be past their work so far.
    /// This is the only way to know where the driver has refused a fence.
    fn once_past(&self, streams: &[Stream], then: impl Fn(&PublisherCore) + Send + 'static) {
        let Some(core) = self.this.upgrade() else {
            return;
        };
        let past = StreamSet::default();
        streams.iter().for_each(|stream| past.record_use(stream));
        // A waiter for the slot, or for the end of the sample, depends on this alone.
        let fence = LazyFence::new(Arc::new(past));
        self.reactor.call_after(fence, move || {
            then(&core);
            core.ring();
        });
    }

    /// A value that no fence word has reached: fence words only grow.
    fn next_fence(&self) -> u64 {
        self.fences.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Reclaims every slot that is no longer in use.
    fn reclaim(&self, state: &mut PublisherState, thorough: bool) {
        let PublisherState { arena, links, .. } = state;
        links
            .iter_mut()
            .for_each(|link| link.reclaim(thorough, |slot| arena.release(slot)));
        arena.collect(|slot, value| self.fence_words.word(slot as usize).reached(value));
    }

    pub(super) fn subscribers(&self) -> Vec<SubscriberInfo> {
        if !self.owner_process.is_current() {
            // Another thread of the parent may have held the lock at the fork, so the child must
            // not take it.
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
            return (0, self.options.shared.memory_limit);
        }
        let state = self.lock();
        (state.arena.total(), state.arena.limit())
    }

    /// Withdraws the name, sends `Close` to every subscriber, and keeps the memory until no stream
    /// of this process writes it any more. The `Close` messages are in their sockets when this
    /// returns, because the process may end then. Only the first call has an effect.
    pub(super) fn close(self: &Arc<PublisherCore>) {
        self.acceptor.close();
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
        // Never on this thread, even if every stream is idle: unregistering memory may make the
        // driver wait for a stream that waits for a peer.
        let (core, mut fence) = (self.clone(), LazyFence::new(self.streams.clone()));
        self.reactor.drop_after(move || {
            if Arc::strong_count(&core) > 1 {
                return DropReadiness::Held;
            }
            DropReadiness::from(fence.is_reached() && core.poll_replays(&mut core.lock()))
        });
    }
}

fn own_pid() -> i32 {
    std::process::id() as i32
}
