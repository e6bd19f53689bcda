//! Delivery to one chosen subscriber, and slots that stay held so that they can be given to another
//! subscriber later.
//!
//! A sample sent with an observer always signals the fence word of its slot, as with a history: the
//! `ready` of a later receiver of the same slot is ordered behind that.

use std::sync::Arc;

use super::links::Recipients;
use super::send_turn::SendTurn;
use super::state::PublisherState;
use super::{PublisherCore, SendFailure};
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::message::{self, CloseReason};
use crate::memory::arena::SlotId;
use crate::pubsub::entry::Metadata;
use crate::pubsub::observer::LinkedSubscriber;
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
    /// Gives the slot to the subscriber with this id, too, once the work that fills it is done. Gives
    /// no stream work and waits for no other send.
    pub(crate) fn forward(&self, to: u64, metadata: &Metadata) -> Result<Forwarded> {
        self.core.forward(self.slot, &self.layout, metadata, to)
    }
}

/// What became of a slot that was to be forwarded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Forwarded {
    /// The subscriber has it, at this position.
    At(u64),
    /// The subscriber is gone or has no room.
    NoRoom,
    /// Its data is not complete, or another thread sends.
    NotYet,
}

#[cfg(test)]
impl RetainedSlot {
    pub(super) fn slot(&self) -> SlotId {
        self.slot
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
    /// Notifies the observer.
    pub(super) fn notify(&self) {
        let observer = self.options.observer.iter();
        observer.for_each(|observer| observer.tell());
    }

    /// The subscribers that can be chosen.
    pub(in crate::pubsub) fn linked_subscribers(&self) -> Vec<LinkedSubscriber> {
        let state = self.lock();
        let live = state.links.live();
        live.map(|link| LinkedSubscriber {
            id: link.id,
            pid: link.end.peer.pid,
            replies: link.partner.clone(),
        })
        .collect()
    }

    /// Whether the subscriber still gets samples.
    pub(in crate::pubsub) fn has_subscriber(&self, id: u64) -> bool {
        self.lock().links.is_live(id)
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
        let mut turn = self.make_room(Recipients::Nobody, None)?;
        let to = to
            .filter(|&id| {
                turn.state
                    .links
                    .find_live(id)
                    .is_some_and(|link| link.room().is_some())
            })
            .map_or(Recipients::Nobody, Recipients::One);
        let delivery = self.deliver(&mut turn.state, slot, layout, metadata, stream, to)?;
        let retained = RetainedSlot {
            core: LeakOnFork::new(self.this.upgrade().ok_or(Error::Forked)?),
            slot,
            layout: *layout,
        };
        Ok((retained, delivery.position))
    }

    fn forward(
        &self,
        slot: SlotId,
        layout: &Layout,
        metadata: &Metadata,
        to: u64,
    ) -> Result<Forwarded> {
        self.owner_process.check()?;
        let Some(sending) = self.send_lock.try_lock() else {
            return Ok(Forwarded::NotYet);
        };
        let mut turn = SendTurn::begin(self, sending, self.lock());
        let turn = &mut turn.state;
        turn.reclaim(&self.fences, false);
        if turn.closed {
            return Ok(Forwarded::NoRoom);
        }
        let Some(position) = turn.links.find_live(to).and_then(|link| link.room()) else {
            return Ok(Forwarded::NoRoom);
        };
        if !self.fences.is_reached(slot, turn.arena.fence_of(slot)) {
            return Ok(Forwarded::NotYet);
        }
        let description = turn.describe(slot, layout, metadata, self.options.timestamps);
        let PublisherState { arena, links, .. } = &mut **turn;
        if let Some(link) = links.find(to) {
            arena.hold(slot);
            link.publish(position, slot, &description.packed(), true);
            link.wake_sleeper();
        }
        Ok(Forwarded::At(position))
    }

    /// Ends one subscriber's link.
    pub(in crate::pubsub) fn expel(&self, id: u64, reason: &str) {
        if let Some(link) = self.lock().links.find_live(id) {
            link.leave(Some(CloseReason::Failed(message::text(reason))));
        }
        self.notify();
    }

    /// The samples that subscribers which have gone had been given and had not taken, each returned
    /// once: subscriber id and position.
    pub(in crate::pubsub) fn take_untaken(&self) -> Vec<(u64, u64)> {
        self.lock().links.take_untaken()
    }
}
