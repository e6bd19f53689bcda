//! The part that all handles of one publisher share: its slots, from the loan to the return.
//!
//! The lock guards [`state`], made of parts with invariants of their own: [`links`], [`history`].
//! [`slot_fences`] needs no lock.
//! The operations over them: [`backpressure`] (a send waits for room, and begins),
//! [`send`], [`unicast`], and [`accept`] (the control thread's work).

mod accept;
mod backpressure;
mod history;
mod links;
mod send;
mod send_turn;
mod slot_fences;
mod slot_handles;
mod state;
#[cfg(test)]
mod tests;
mod unicast;

pub(crate) use accept::REPLIES;
pub(super) use send::Recipients;
pub use slot_handles::{SlotHold, SlotReturn};
pub(crate) use unicast::{Forwarded, RetainedSlot};

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use self::slot_fences::SlotFences;
use self::state::PublisherState;
use super::builder::{PublisherBuilder, SubscriberInfo};
use super::subscriber_link::{LinkPhase, SubscriberLink};
use crate::backoff::Backoff;
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::ipc::acceptor::{Acceptor, AcceptorOptions};
use crate::ipc::domain::{Domain, NameClaim};
use crate::memory::arena::{Chunk, Growth, SlotId};
use crate::pubsub::publisher_link::PublisherLink;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::{LazyFence, StreamSet};
use crate::runtime::reactor::{DropReadiness, EventSource, Reactor, new_generation};
use crate::runtime::timed_lock::TimedLock;
use crate::slow_path::SlowPath;
use crate::statistics::{EndpointRow, EndpointWords, Role};
use crate::stream::Stream;

/// How often a sender polls for room before it sleeps: a few milliseconds, within which a full
/// pipeline usually moves on. Each poll is short, because room that is seen late makes the sample
/// late.
const POLLS: u32 = 16_000;

/// A wait is cut into slices, so that a fault elsewhere costs one slice instead of a hang. Tests
/// would not notice such a fault.
const WAIT_SLICE: Duration = if cfg!(test) {
    Duration::from_secs(600)
} else {
    Duration::from_millis(50)
};

/// How often a loan looks whether this process has unmapped a region that was given back.
const UNMAP_POLL: Duration = Duration::from_millis(1);

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
    state: Mutex<PublisherState>,
    /// Notified when the sleeper on the doorbells wakes.
    changed: Condvar,
    send_lock: Arc<TimedLock>,
    fences: SlotFences,
    /// All streams that have worked on the links or the fence words.
    streams: Arc<StreamSet>,
    /// `None` for the sender of a link's replies, which has no name.
    acceptor: Option<Arc<Acceptor>>,
    doorbell: LocalDoorbell,
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
    /// A publisher of this name.
    pub(super) fn new(
        options: PublisherBuilder,
        name: String,
        device: Device,
        claim: NameClaim,
    ) -> Result<Arc<PublisherCore>> {
        let domain = claim.domain().clone();
        let core = PublisherCore::assemble(options, name, device, Some(claim), &domain)?;
        core.acceptor.iter().try_for_each(|it| it.listen())?;
        core.reactor.register_ticks(core.me.clone());
        Ok(core)
    }

    /// The sender of the replies to what `partner` receives.
    pub(super) fn of_replies(
        options: PublisherBuilder,
        device: Device,
        domain: &Domain,
        partner: Arc<PublisherLink>,
    ) -> Result<Arc<PublisherCore>> {
        let name = options.name.clone();
        let core = PublisherCore::assemble(options, name, device, None, domain)?;
        core.reply_over(partner)?;
        core.reactor.register_ticks(core.me.clone());
        Ok(core)
    }

    fn assemble(
        options: PublisherBuilder,
        name: String,
        device: Device,
        claim: Option<NameClaim>,
        domain: &Domain,
    ) -> Result<Arc<PublisherCore>> {
        let reactor = Reactor::of_process()?;
        let fences = SlotFences::new(&device, options.history > 0)?;
        let doorbell = LocalDoorbell::new()?;
        let generation = new_generation();
        let row = EndpointRow::open(&EndpointWords {
            kind: options.kind,
            role: Role::Owner,
            name: &name,
            domain: domain.identity(),
            device: Some(device.info().id),
            generation,
            depth: options.depth,
            memory_max: options.shared.memory_limit,
        });
        Ok(Arc::new_cyclic(|me: &Weak<PublisherCore>| PublisherCore {
            owner_process: OwnerProcess::current(),
            generation,
            this: me.clone(),
            me: me.clone(),
            reactor: reactor.clone(),
            state: Mutex::new(PublisherState::new(&options, &device, row)),
            changed: Condvar::new(),
            send_lock: Arc::default(),
            fences,
            streams: Arc::default(),
            acceptor: claim.map(|claim| {
                let acceptor = AcceptorOptions {
                    name: name.clone(),
                    kind: options.kind,
                    access_policy: options.shared.access.clone(),
                    handshake_timeout: options.shared.handshake_timeout,
                    runs_on_control_thread: true,
                };
                Acceptor::new(claim, acceptor, &reactor, me.clone())
            }),
            doorbell,
            options,
            name,
            device,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, PublisherState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count_copy(&self, reason: SlowPath, bytes: u64) {
        self.lock().row.copied(reason, bytes);
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
        // A sample in a region that cannot be announced to a subscriber would end that link.
        state.announce(&self.name)?;
        if let Some(slot) = state.take_unlooked(bytes) {
            return Ok((slot, state.address(slot)));
        }
        loop {
            // This thread or another one may have made a region meanwhile.
            state.announce(&self.name)?;
            if let Some(slot) = self.take_released(&mut state, bytes) {
                return Ok((slot, state.address(slot)));
            }
            if state.arena.is_out_of_slots() {
                // Without the lock, as below.
                drop(state);
                let slots = self.fences.extend()?;
                state = self.lock();
                state.arena.allow_slots(slots);
                if !state.arena.is_out_of_slots() {
                    continue;
                }
            }
            if let Some(growth) = state.plan(bytes) {
                state = self.grow(state, growth)?;
                continue;
            }
            let limit = state.arena.limit();
            let least = state.arena.region_for(bytes);
            let can_fit = least.is_some_and(|least| least <= limit);
            if can_fit {
                let removed = state.give_back_regions(bytes);
                if !removed.is_empty() {
                    drop(state);
                    drop(removed);
                    state = self.lock();
                    continue;
                }
            }
            let used = state.arena.bytes_in_use() + state.closing_bytes();
            let left = self.options.loan_timeout.saturating_sub(clock.elapsed());
            if left.is_zero() || !can_fit {
                return Err(Error::MemoryLimit {
                    name: self.name.clone(),
                    bytes,
                    used,
                    limit,
                });
            }
            let left = match state.is_unmapping() {
                true => left.min(UNMAP_POLL),
                false => left,
            };
            state = self.wait_for_release(state, left, &mut backoff, |_| true);
        }
    }

    /// Takes a slot that is free or released. A new region is made only when no slot can be
    /// reclaimed, not even one behind a sample that is held long.
    fn take_released(&self, state: &mut PublisherState, bytes: u64) -> Option<SlotId> {
        [false, true].into_iter().find_map(|is_thorough| {
            state.reclaim(&self.fences, is_thorough);
            state.arena.take(bytes)
        })
    }

    /// Makes a planned region without the lock: the driver may take long, and the reactor must not
    /// wait for it.
    fn grow<'a>(
        &'a self,
        state: MutexGuard<'a, PublisherState>,
        growth: Growth,
    ) -> Result<MutexGuard<'a, PublisherState>> {
        drop(state);
        let mut held = None;
        let made = growth.make(&self.device).and_then(|chunk| {
            let region = chunk.region.clone();
            held = Some(DropAfterFence::new(self.streams.clone(), region)?);
            Ok(chunk)
        });
        let mut state = self.lock();
        let number = state.arena.adopt(growth, made)?;
        let Chunk { id, region, .. } = &state.arena.chunks()[number as usize];
        region.identify(self.generation, (*id).into());
        state.regions.extend(held.map(Arc::new));
        state.links.regions_have_changed();
        Ok(state)
    }

    /// Keeps the region of a slot mapped.
    pub(super) fn hold(&self, slot: SlotId) -> SlotHold {
        // A child unmaps nothing of its parent's, and another thread of the parent may have held
        // the lock at the fork.
        let is_own = self.owner_process.is_current();
        SlotHold {
            _region: is_own.then(|| self.lock().held_region(slot)),
        }
    }

    /// A handle that reports when the slot is free again.
    pub(super) fn watch_slot(&self, slot: SlotId) -> SlotReturn {
        SlotReturn {
            core: self.this.clone(),
            owner_process: self.owner_process,
            slot,
            // A forked child gets no answer.
            serial: match self.owner_process.is_current() {
                true => self.lock().arena.serial(slot),
                false => 0,
            },
        }
    }

    /// Whether the slot that was taken with this serial is free again.
    pub(super) fn is_back(&self, slot: SlotId, serial: u64) -> bool {
        let mut state = self.lock();
        state.reclaim(&self.fences, true);
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
        let (value, op) = self.fences.next(slot);
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

    pub(super) fn subscribers(&self) -> Vec<SubscriberInfo> {
        if !self.owner_process.is_current() {
            // Another thread of the parent may have held the lock at the fork, so the child must
            // not take it.
            return Vec::new();
        }
        let mut state = self.lock();
        state.reclaim(&self.fences, true);
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
        let mut backoff = Backoff::spinning(0);
        let mut state = self.lock();
        loop {
            let attached = state.links.live().count();
            if attached >= count {
                return Ok(());
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let noun = if count == 1 {
                    "subscriber"
                } else {
                    "subscribers"
                };
                let what = format!("{count} {noun} of {:?} ({attached} attached)", self.name);
                return Err(Error::Timeout {
                    what,
                    waited: timeout,
                });
            }
            state = self.wait_for_release(state, left, &mut backoff, |_| false);
        }
    }

    pub(super) fn memory_in_use(&self) -> (u64, u64) {
        if !self.owner_process.is_current() {
            return (0, self.options.shared.memory_limit);
        }
        let state = self.lock();
        (state.region_bytes(), state.arena.limit())
    }

    /// Withdraws the name, sends `Close` to every subscriber, and keeps the memory until no stream
    /// of this process writes it any more. The `Close` messages are in their sockets when this
    /// returns, because the process may end then. Only the first call has an effect.
    pub(super) fn close(self: &Arc<PublisherCore>) {
        self.acceptor.iter().for_each(|it| it.close());
        let mut state = self.lock();
        if std::mem::replace(&mut state.closed, true) {
            return;
        }
        let partners = state.links.close();
        drop(state);
        drop(partners);
        self.ring();
        // Never on this thread, even if every stream is idle: unregistering memory may make the
        // driver wait for a stream that waits for a peer.
        let (core, mut fence) = (self.clone(), LazyFence::new(self.streams.clone()));
        self.reactor.drop_after(move || {
            // The socket is read for a partner as long as there is one.
            if Arc::strong_count(&core) > 1 || core.lock().links.has_partner() {
                return DropReadiness::Held;
            }
            let is_past = fence.is_reached();
            DropReadiness::from(is_past && core.lock().history.complete_due(&core.fences))
        });
    }
}

fn own_pid() -> i32 {
    std::process::id() as i32
}
