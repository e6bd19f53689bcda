//! The slots of a publisher, from the loan to the return, and the regions that they lie in.

use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use super::state::{ClosingRegion, HeldRegion, PublisherState};
use super::{POLLS, PublisherCore};
use crate::backoff::Backoff;
use crate::clock::Stopwatch;
use crate::error::{Error, LimitFault, Result};
use crate::fork::OwnerProcess;
use crate::ipc::Kind;
use crate::memory::arena::{Chunk, Growth, REGIONS_MAX, SlotId};
use crate::pubsub::subscriber_link::SubscriberLink;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::{Fence, StreamSet};
use crate::stream::Stream;
use crate::wait::Wait;

/// A loan of at most so many bytes takes a free slot and reclaims no released ones, but for one in
/// [`RECLAIM_EVERY`]. Longer slots are used again at once: their memory would leave the caches.
pub(super) const SHORT_BYTES_MAX: u64 = 64 << 10;

/// To reclaim costs a cache line that the subscriber's CPU has just written; several at once cost
/// hardly more.
pub(super) const RECLAIM_EVERY: u32 = 8;

/// Reports when a slot is free again. See [`SampleMut::returned`](crate::SampleMut::returned).
#[derive(Debug, Clone)]
pub struct SlotReturn {
    core: Weak<PublisherCore>,
    owner_process: OwnerProcess,
    slot: SlotId,
    serial: u64,
}

impl SlotReturn {
    /// Whether the slot is free again. Does not wait.
    ///
    /// # Errors
    /// [`Error::PeerGone`] when the publisher was dropped before: the answer is no longer
    /// known. [`Error::State`].
    pub fn is_back(&self) -> Result<bool> {
        self.owner_process.check()?;
        let pid = std::process::id() as i32;
        let core = self.core.upgrade();
        let core = core.ok_or_else(|| Error::peer_gone(Kind::Publisher, "", pid, true))?;
        let mut state = core.lock();
        state.reclaim(&core.fences, true);
        Ok(state.arena.serial(self.slot) != self.serial)
    }
}

/// Keeps the memory of a loan mapped in this process. See
/// [`SampleMut::hold`](crate::SampleMut::hold).
#[derive(Debug)]
pub struct SlotHold {
    /// `None` in a forked child.
    _region: Option<Arc<HeldRegion>>,
}

impl PublisherCore {
    /// Takes a slot for `bytes`: a free one, a new region, or a slot that is released within the
    /// loan's timeout, or `wait` in its place.
    pub(in crate::pubsub) fn take_slot(
        &self,
        bytes: u64,
        wait: Option<&Wait<'_>>,
    ) -> Result<(SlotId, u64)> {
        self.owner_process.check()?;
        let mut clock = Stopwatch::default();
        let (mut backoff, mut has_waited) = (Backoff::patient(POLLS), false);
        let mut state = self.lock();
        loop {
            let seen = self.changes_seen();
            // This thread or another one may have made a region meanwhile. A sample in a region
            // that cannot be announced to a subscriber would end that link.
            state.announce(&self.name)?;
            if let Some(slot) = self.take_free(&mut state, bytes) {
                state.awaited_loans += u64::from(has_waited);
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
            let can_fit = state
                .arena
                .region_for(bytes)
                .is_some_and(|least| least <= limit);
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
            backoff.keep_up_with(state.awaited_loans);
            drop(state);
            let left = match wait {
                None => self.options.loan_timeout.saturating_sub(clock.elapsed()),
                // May run a signal's handler, hence without the lock.
                Some(wait) if wait.is_over() => Duration::ZERO,
                Some(wait) => wait.time_left(),
            };
            if left.is_zero() || !can_fit {
                return Err(Error::Limit(LimitFault::Memory {
                    name: self.name.clone(),
                    bytes,
                    used,
                    limit,
                }));
            }
            self.pass(&mut backoff, left, seen);
            has_waited = true;
            state = self.lock();
        }
    }

    /// Takes a slot that is free or released. Most loans do not reclaim. A new region
    /// is made only when no slot can be reclaimed, not even one behind a sample that is held long.
    #[inline]
    fn take_free(&self, state: &mut PublisherState, bytes: u64) -> Option<SlotId> {
        if bytes <= SHORT_BYTES_MAX
            && state.loans_since_reclaim + 1 < RECLAIM_EVERY
            && let Some(slot) = state.arena.take(bytes)
        {
            state.loans_since_reclaim += 1;
            return Some(slot);
        }
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
        state.must_announce = true;
        Ok(state)
    }

    /// Keeps the region of a slot mapped.
    pub(in crate::pubsub) fn hold(&self, slot: SlotId) -> SlotHold {
        // A child unmaps nothing of its parent's, and another thread of the parent may have held
        // the lock at the fork.
        let is_own = self.owner_process.is_current();
        let region = |state: MutexGuard<'_, PublisherState>| {
            state.regions[state.arena.slot(slot).region as usize].clone()
        };
        SlotHold {
            _region: is_own.then(|| region(self.lock())),
        }
    }

    /// Keeps the owner of a tensor until the slot of its sample, which is on loan, is free.
    pub(in crate::pubsub) fn keep(&self, slot: SlotId, owner: Box<dyn Send>) {
        let PublisherState { owners, arena, .. } = &mut *self.lock();
        owners.add(slot, owner, arena);
    }

    /// Keeps no history any more.
    pub(in crate::pubsub) fn end_history(&self) {
        let PublisherState { history, arena, .. } = &mut *self.lock();
        history.end(arena);
    }

    /// Drops the owners of tensors that no subscriber reads any more. Returns how many are left.
    pub(in crate::pubsub) fn drop_free_owners(&self) -> usize {
        let mut state = self.lock();
        state.reclaim(&self.fences, true);
        let PublisherState { owners, arena, .. } = &mut *state;
        let free = owners.take_free(arena);
        drop(state);
        drop(free);
        self.lock().owners.count()
    }

    /// A handle that reports when the slot is free again.
    pub(in crate::pubsub) fn watch_slot(&self, slot: SlotId) -> SlotReturn {
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

    /// Returns a slot that was loaned and not sent. Work enqueued on the streams in `behind` may
    /// still write it. The slot is free when they are past that work.
    ///
    /// # Errors
    /// No fence could be enqueued. The slot is free when the streams are proven to be past their
    /// current work.
    pub(in crate::pubsub) fn return_slot(&self, slot: SlotId, behind: &[Stream]) -> Result<()> {
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
    pub(super) fn once_past(
        &self,
        streams: &[Stream],
        then: impl Fn(&PublisherCore) + Send + 'static,
    ) {
        let Some(core) = self.this.upgrade() else {
            return;
        };
        let past = StreamSet::default();
        streams.iter().for_each(|stream| past.record_use(stream));
        // A waiter for the slot, or for the end of the sample, depends on this alone.
        let fence = Fence::later(Arc::new(past));
        self.reactor.call_after(fence, move || {
            then(&core);
            core.notify();
        });
    }
}

impl PublisherState {
    fn address(&self, slot: SlotId) -> u64 {
        let slot = self.arena.slot(slot);
        self.arena.chunks()[slot.region as usize].region.ptr() + slot.offset
    }

    /// A region in which `bytes` fit, if the limit leaves room. Slots of leaving and suspect
    /// subscribers, and regions that were given back and are still mapped, do not count, up to the
    /// limit once more: so a stopped process cannot stop the publisher.
    fn plan(&mut self, bytes: u64) -> Option<Growth> {
        self.forget_closed_regions();
        if self.closing.len() + self.arena.chunks().len() >= REGIONS_MAX {
            return None;
        }
        let room = self.room();
        self.arena.plan(bytes, self.arena.total(), room)
    }

    fn room(&self) -> u64 {
        let taken = self.arena.total().saturating_add(self.closing_bytes());
        let limit = self.arena.limit();
        limit.saturating_add(self.exempt()).saturating_sub(taken)
    }

    /// Bytes that do not count against the limit.
    fn exempt(&self) -> u64 {
        let leaving = self.links.iter().filter(|link| !link.is_staying());
        let slots = leaving.flat_map(SubscriberLink::holds);
        let quarantined: u64 = slots.map(|slot| self.arena.slot(slot).bytes()).sum();
        let bytes = quarantined.saturating_add(self.closing_bytes());
        bytes.min(self.arena.limit())
    }

    /// Takes out regions without slots, so that there is room for a region in which `bytes` fit;
    /// none if that is not enough, even while they are still mapped. The caller drops them without
    /// the lock.
    fn give_back_regions(&mut self, bytes: u64) -> Vec<(Chunk, Arc<HeldRegion>)> {
        let Some(least) = self.arena.region_for(bytes) else {
            return Vec::new();
        };
        let missing = least.saturating_sub(self.room());
        // What is given back counts until it is unmapped, but for what may be exempt: then what is
        // closing comes first.
        let is_exempt = missing <= self.arena.limit() - self.exempt();
        if !(is_exempt || self.closing.is_empty()) || self.arena.is_out_of_slots() {
            return Vec::new();
        }
        let numbers = self.arena.removable(|_| true, missing);
        let mut removed = Vec::with_capacity(numbers.len());
        for number in numbers {
            let Some(chunk) = self.arena.remove(number) else {
                continue;
            };
            self.closing.push(ClosingRegion {
                id: chunk.id,
                bytes: chunk.region.bytes(),
                own: Arc::downgrade(&chunk.region),
            });
            removed.push((chunk, self.regions.remove(number)));
            self.must_announce = true;
        }
        removed
    }

    /// No longer counts the regions that neither this process nor a subscriber has mapped.
    pub(super) fn forget_closed_regions(&mut self) {
        let links = &self.links;
        self.closing.retain(|region| {
            region.own.strong_count() > 0 || links.iter().any(|link| link.has_region(region.id))
        });
    }

    pub(super) fn closing_bytes(&self) -> u64 {
        self.closing.iter().map(|region| region.bytes).sum()
    }

    /// Bytes of regions, used and free, and of those that were given back and are still mapped.
    pub(in crate::pubsub) fn region_bytes(&self) -> u64 {
        self.arena.total().saturating_add(self.closing_bytes())
    }
}
