//! Delivery to one chosen subscriber, and slots that stay held so that they can be given to another
//! subscriber later.
//!
//! A sample sent with an observer always signals the fence word of its slot, as with a history: the
//! `ready` of a later receiver of the same slot is ordered behind that.

use std::sync::Arc;
use std::time::Duration;

use super::recipients::Recipients;
use super::send_turn::SendTurn;
use super::state::PublisherState;
use super::{PublisherCore, SendFailure};
use crate::backend::StreamOp;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::message::{self, CloseReason};
use crate::ipc::peer::ProcessId;
use crate::memory::arena::SlotId;
use crate::pubsub::entry::Metadata;
use crate::pubsub::observer::{Disconnects, LinkedSubscriber};
use crate::shm::segment::Segment;
use crate::stream::Stream;
use crate::tensor::Layout;

/// A filled slot that is kept, so that its contents can be given to one subscriber after another
/// without a copy.
#[derive(Debug)]
pub(crate) struct RetainedSlot {
    core: LeakOnFork<Arc<PublisherCore>>,
    slot: SlotId,
    layout: Layout,
}

impl RetainedSlot {
    /// Whether the work that fills the slot is done, which it stays. Then [`forward`](Self::forward)
    /// gives no stream work, and the driver cannot hold it up.
    pub(crate) fn is_filled(&self) -> bool {
        let state = self.core.lock();
        let fence = state.arena.fence_of(self.slot);
        self.core.fences.is_reached(self.slot, fence)
    }

    /// Gives the slot to the subscriber with this id, too. `None` if the subscriber is gone or has
    /// no room.
    pub(crate) fn forward(&self, to: u64, metadata: &Metadata) -> Result<Option<u64>> {
        self.core.forward(self.slot, &self.layout, metadata, to)
    }
}

impl Drop for RetainedSlot {
    fn drop(&mut self) {
        if let Ok(core) = self.core.get() {
            core.lock().arena.release(self.slot);
        }
    }
}

impl PublisherCore {
    /// Wakes every thread that waits for a change, and notifies the observer.
    pub(super) fn ring(&self) {
        self.doorbell.ring();
        self.options
            .observer
            .iter()
            .for_each(|observer| observer.tell());
    }

    /// The subscribers that can be chosen.
    pub(in crate::pubsub) fn linked_subscribers(&self) -> Vec<LinkedSubscriber> {
        let state = self.lock();
        let live = state.links.live();
        live.map(|link| LinkedSubscriber {
            id: link.id,
            pid: link.peer.pid,
            process: link.peer.id,
            generation: link.generation,
        })
        .collect()
    }

    /// The id of the live subscriber in that process.
    pub(in crate::pubsub) fn subscriber_of(&self, process: ProcessId) -> Option<u64> {
        let state = self.lock();
        let mut live = state.links.live();
        live.find(|link| link.peer.id == process)
            .map(|link| link.id)
    }

    /// Whether the subscriber still gets samples.
    pub(in crate::pubsub) fn has_subscriber(&self, id: u64) -> bool {
        self.lock().links.is_live(id)
    }

    /// Sends to one subscriber, as [`send`](Self::send) does to all.
    pub(in crate::pubsub) fn send_to(
        &self,
        slot: SlotId,
        layout: &Layout,
        metadata: &Metadata,
        stream: &Stream,
        to: u64,
        limit: Option<Duration>,
    ) -> Result<u64, SendFailure> {
        self.admit(stream)?;
        let to = Recipients::One(to);
        let mut turn = self
            .make_room_within(to, limit)
            .map_err(SendFailure::BeforePublish)?;
        let sequence = self.deliver(&mut turn, slot, layout, metadata, stream, to)?;
        turn.arena.release(slot);
        Ok(sequence)
    }

    /// Keeps the contents of `slot` behind the work on `stream`, and gives them to one subscriber
    /// at once if it has room. Returns the position there.
    pub(in crate::pubsub) fn post(
        &self,
        slot: SlotId,
        layout: &Layout,
        metadata: &Metadata,
        stream: &Stream,
        to: Option<u64>,
    ) -> Result<(RetainedSlot, Option<u64>), SendFailure> {
        self.admit(stream)?;
        let mut turn = self
            .make_room(Recipients::Nobody)
            .map_err(SendFailure::BeforePublish)?;
        let to = to
            .filter(|&id| turn.links.has_room(id))
            .map_or(Recipients::Nobody, Recipients::One);
        self.deliver(&mut turn, slot, layout, metadata, stream, to)?;
        // A subscriber that has left meanwhile has not seen the sample.
        let position = turn.placement.published_position();
        let core = self
            .this
            .upgrade()
            .ok_or(SendFailure::BeforePublish(Error::Forked))?;
        Ok((
            RetainedSlot {
                core: LeakOnFork::new(core),
                slot,
                layout: *layout,
            },
            position,
        ))
    }

    fn forward(
        &self,
        slot: SlotId,
        layout: &Layout,
        metadata: &Metadata,
        to: u64,
    ) -> Result<Option<u64>> {
        self.owner_process.check()?;
        let mut turn = self.take_send_turn()?;
        turn.reclaim(&self.fences, false);
        if turn.closed || !turn.links.has_room(to) {
            return Ok(None);
        }
        let Some(link) = turn.links.find(to) else {
            return Ok(None);
        };
        let Some(position) = link.place(|_| {}) else {
            return Ok(None);
        };
        let segment = link.ring.segment().clone();
        // An error has enqueued nothing (see `Backend::batch`), so the position stays free.
        self.ready_behind(&mut turn, slot, &segment, position)?;
        // The link may have left during that call.
        match turn.links.find(to) {
            Some(link) if link.is_live() => {}
            Some(link) => {
                link.ring.forgo(position);
                return Ok(None);
            }
            None => return Ok(None),
        }
        let description = turn.describe(slot, layout, metadata, self.options.timestamps);
        let PublisherState { arena, links, .. } = &mut *turn;
        if let Some(link) = links.find(to) {
            arena.hold(slot);
            link.publish(position, slot, &description.packed(), false);
            link.wake_sleeper();
        }
        Ok(Some(position))
    }

    /// Makes `position` of a link ready behind the work that fills `slot`: by the CPU if that work
    /// is done, else on the device, behind the word that the original send signals. That signal has
    /// been enqueued, because the caller holds the send turn.
    fn ready_behind(
        &self,
        turn: &mut SendTurn<'_>,
        slot: SlotId,
        segment: &Arc<Segment>,
        position: u64,
    ) -> Result<()> {
        let fence = turn.arena.fence_of(slot);
        if self.fences.is_reached(slot, fence) {
            segment.entry(position).ready.store(position);
        } else if let Some(stream) = &self.forward_stream {
            let wait = self.fences.wait(slot, fence);
            let signal = StreamOp::Signal {
                word: segment.ready_word(position),
                value: position,
            };
            // SAFETY: the fence words and the link's segment outlive their operations (see `send`).
            turn.unlocked(|| unsafe { stream.batch(&[wait, signal]) })?;
        }
        Ok(())
    }

    /// Ends one subscriber's link.
    pub(in crate::pubsub) fn expel(&self, id: u64, reason: &str) {
        let mut state = self.lock();
        if let Some(link) = state.links.find(id).filter(|link| link.is_live()) {
            link.leave(Some(CloseReason::Failed(message::text(reason))));
        }
        drop(state);
        self.ring();
    }

    /// The data of the subscribers that have gone, each returned once; with `all`, also the
    /// generations of those still attached.
    pub(in crate::pubsub) fn take_disconnects(&self, all: bool) -> Disconnects {
        self.lock().links.take_disconnects(all)
    }
}
