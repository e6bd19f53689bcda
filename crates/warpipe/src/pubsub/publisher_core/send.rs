//! How a sample is sent: a position on each link, the entries, the signals that complete it, and
//! the undoing when they fail.
//!
//! [`place`](PublisherCore::place) begins a sample, and [`publish`](PublisherCore::publish) must
//! follow even if the signals fail: a word that is reached must not meet another sample. Between
//! the two the publisher's lock may be released, and links may leave; the lock for sending keeps
//! other samples out.

use std::sync::Arc;

use super::state::{Given, PublisherState, Recipients};
use super::{PublisherCore, SendFailure};
use crate::error::Result;
use crate::memory::arena::SlotId;
use crate::nvtx;
use crate::pubsub::ring;
use crate::pubsub::subscriber_link::SubscriberLink;
use crate::runtime::releasable::ReleasableGuard;
use crate::shm::segment::Segment;
use crate::stream::Stream;
use crate::wait::Wait;

/// A sample that was announced.
pub(in crate::pubsub) struct Delivery {
    pub(in crate::pubsub) sequence: u64,
    /// Where the first recipient got it; `None` if all have left meanwhile.
    pub(in crate::pubsub) position: Option<u64>,
}

impl PublisherCore {
    /// Sends to these recipients, behind the work enqueued on `stream`. `wait` replaces the timeout
    /// of the subscribers' policies and the timeout of the send turn.
    #[inline]
    pub(in crate::pubsub) fn send(
        &self,
        given: Given<'_>,
        stream: &Stream,
        to: Recipients,
        wait: Option<&Wait<'_>>,
    ) -> Result<Delivery, SendFailure> {
        let _range = (to == Recipients::All).then(|| nvtx::range(nvtx::SEND));
        self.owner_process.check()?;
        stream.check_of(&self.device)?;
        // Before the turn: recording may query other streams, which a full launch queue blocks.
        self.record_use(stream);
        stream.check_not_capturing()?;
        let mut turn = self.make_room(to, wait)?;
        turn.state.make_cells(given.metadata, &self.name)?;
        let delivery = self.deliver(&mut turn.state, given, stream, to)?;
        if !matches!(to, Recipients::Keep(_)) {
            turn.state.arena.release(given.slot);
        }
        Ok(delivery)
    }

    /// Announces the sample to the recipients, and enqueues on `stream`, which the caller has
    /// recorded, the signals that complete it. The caller's hold on the slot stays, unless the
    /// failure came after the announcement.
    fn deliver(
        &self,
        turn: &mut ReleasableGuard<'_, PublisherState>,
        given: Given<'_>,
        stream: &Stream,
        to: Recipients,
    ) -> Result<Delivery, SendFailure> {
        let slot = given.slot;
        let fence = self.place(turn, slot, to);
        if stream.may_signal_from_cpu() {
            if let Some(value) = fence {
                self.fences.store(slot, value);
            }
            let delivery = self.publish(turn, given, true);
            turn.wake_sleepers();
            return Ok(delivery);
        }
        let signals = std::mem::take(&mut turn.signals);
        let enqueue = |turn: &mut ReleasableGuard<'_, PublisherState>| {
            // SAFETY: the words lie in link segments and the fence words, which are dropped only
            // when this turn is over and this stream, recorded by the caller, is proven to be past
            // them (`close`, `reap_links`).
            turn.unlocked(|| unsafe { stream.batch_at_once(&signals) })
        };
        // `ready` orders the devices, so the entries may be published before the driver call: a
        // subscriber on another core enqueues its wait and its kernels meanwhile.
        let early = self.signals_first(turn).then(|| enqueue(turn));
        let delivery = self.publish(turn, given, false);
        let enqueued = early.unwrap_or_else(|| enqueue(turn));
        turn.signals = signals;
        if enqueued.is_err() {
            self.mark_lost(turn, slot, stream);
        } else if turn.arena.is_sole(slot) {
            // Every recipient has left since the signals were made: no reader's word says when the
            // stream is past the slot.
            turn.arena.hold(slot);
            self.once_past(std::slice::from_ref(stream), move |core| {
                core.lock().arena.release(slot)
            });
        }
        // Only now: a wake-up costs as much as many signals, and a woken subscriber finds the words
        // of host streams stored.
        turn.wake_sleepers();
        enqueued
            .map(|()| delivery)
            .map_err(SendFailure::AfterPublish)
    }

    /// Whether the signals must, or should, be enqueued before the entries are out.
    ///
    /// They must for a subscriber in this process: the streams of one context share a few hardware
    /// queues, and a wait that gets into one ahead of its own signal never ends. They should on the
    /// host, where there is no driver to wait for: an entry that is ready from the start moves to
    /// the reader's cache once, without a second transfer.
    fn signals_first(&self, state: &PublisherState) -> bool {
        !self.device.is_gpu() || state.placed().any(|link| link.is_local)
    }

    /// Finds a position on every live recipient's link, and the signals that complete the sample
    /// there. A recipient without a position misses this sample. [`publish`](Self::publish) must
    /// follow. Returns the value of the slot's fence word that is signalled, too, if it is.
    fn place(&self, state: &mut PublisherState, slot: SlotId, to: Recipients) -> Option<u64> {
        let PublisherState {
            arena,
            links,
            signals,
            ..
        } = state;
        let mut is_any_foreign = false;
        signals.clear();
        for link in links.iter_mut() {
            if let Some(position) = link.place(to.include(link), |slot| arena.release(slot)) {
                signals.push(link.ready_op(position));
                is_any_foreign |= link.is_foreign;
            }
        }
        // Without a reader, or with one of another user, which can write `ready` and `released` as
        // if sender and receiver had, the slot's fence word says when the slot is done; beside a
        // foreign reader's that costs a second device operation. (A reader of this user could write
        // this process's memory anyway.) Sent again later, a sample is ordered behind that word,
        // too.
        let is_sent_again = self.options.history > 0 || self.role.observer.is_some();
        if !(signals.is_empty() || is_any_foreign || is_sent_again) {
            return None;
        }
        let (value, signal) = self.fences.next(slot);
        arena.fence(slot, value);
        signals.push(signal);
        Some(value)
    }

    /// Writes the entries of one sample at the positions that [`place`](Self::place) found, and
    /// their signals if its data `is_complete`.
    fn publish(&self, state: &mut PublisherState, given: Given<'_>, is_complete: bool) -> Delivery {
        let slot = given.slot;
        let description = state.describe(given, self.options.timestamps);
        let mut delivery = Delivery {
            sequence: description.sequence,
            position: None,
        };
        let PublisherState {
            arena,
            links,
            history,
            packed,
            ..
        } = state;
        packed.pack(description);
        packed.set_head(given.head);
        let is_for_many = links
            .iter()
            .filter(|link| link.placed().is_some())
            .nth(1)
            .is_some();
        for link in links.iter_mut() {
            if link.is_live() && link.placed().is_some() {
                arena.hold(slot);
            }
            let position = link.publish(slot, packed, is_complete, is_for_many);
            delivery.position = delivery.position.or(position);
        }
        if is_for_many {
            ring::fence_published();
            links
                .iter_mut()
                .for_each(SubscriberLink::look_whether_it_sleeps);
        }
        history.add(slot, packed, arena);
        delivery
    }

    /// Ends a published sample after the driver refused its signals: its readers see at
    /// once that it is lost. Their streams continue, and its slot is free, only when `stream` is
    /// past the work that fills the slot, which was enqueued before and still runs.
    fn mark_lost(&self, state: &mut PublisherState, slot: SlotId, stream: &Stream) {
        let entries: Vec<(Arc<Segment>, u64)> = state
            .placed()
            .filter_map(|link| Some((link.ring.segment().clone(), link.placed()?)))
            .collect();
        entries
            .iter()
            .for_each(|(segment, position)| ring::give_up(segment, *position));
        state.history.mark_lost(slot);
        let fence = state.arena.fence_of(slot);
        self.once_past(std::slice::from_ref(stream), move |core| {
            entries
                .iter()
                .for_each(|(segment, position)| segment.entry(*position).ready.store(*position));
            if fence != 0 {
                core.fences.store(slot, fence);
            }
            core.lock().arena.release(slot);
        });
    }
}
