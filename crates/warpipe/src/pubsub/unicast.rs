//! For owners that choose which subscriber gets which sample, as a queue does: delivery to one
//! subscriber, and slots that stay held so that they can be given to another subscriber later.
//!
//! A sample sent with an observer always signals the fence word of its slot, as with a history: the
//! `ready` of a later receiver of the same slot is ordered behind that.

use std::sync::Arc;

use super::observer::LinkedSubscriber;
use super::publisher::{Publisher, SampleMut, SendError};
use super::publisher_core::{Given, PublisherCore, Recipients, SendTurn};
use super::subscriber_link::SubscriberLink;
use crate::error::Result;
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::message::{self, CloseReason};
use crate::memory::arena::SlotId;
use crate::pubsub::entry::{Head, Metadata};
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;

/// A filled slot that is kept, so that its contents can be given to one subscriber after another
/// without a copy.
#[derive(Debug)]
pub(crate) struct RetainedSlot {
    core: LeakOnFork<Arc<PublisherCore>>,
    pub(super) slot: SlotId,
    layout: Layout,
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

impl RetainedSlot {
    /// Gives the slot to the subscriber with this id, too, once the work that fills it is done.
    /// Gives no stream work and waits for no other send.
    pub(crate) fn forward(&self, to: u64, metadata: &Metadata) -> Result<Forwarded> {
        let (core, slot) = (self.core.get()?, self.slot);
        let Some(sending) = core.send_lock.try_lock() else {
            return Ok(Forwarded::NotYet);
        };
        let mut turn = SendTurn::begin(core, sending, core.lock());
        let state = &mut *turn.state;
        state.reclaim(&core.fences, false);
        if state.is_closed {
            return Ok(Forwarded::NoRoom);
        }
        let link = state.find(to).filter(|link| link.is_live());
        if link.and_then(|link| link.room()).is_none() {
            return Ok(Forwarded::NoRoom);
        }
        if !core.fences.is_reached(slot, state.arena.fence_of(slot)) {
            return Ok(Forwarded::NotYet);
        }
        let given = Given {
            slot,
            layout: &self.layout,
            metadata,
            head: Head::None,
        };
        let description = state.describe(given, core.options.timestamps);
        state.arena.hold(slot);
        let position = state.find(to).and_then(|link| {
            link.place(true, |_| {});
            link.publish(slot, &description.packed(), true, false)
        });
        state.wake_sleepers();
        Ok(position.map_or(Forwarded::NoRoom, Forwarded::At))
    }
}

impl Drop for RetainedSlot {
    fn drop(&mut self) {
        if let Ok(core) = self.core.get() {
            core.lock().arena.release(self.slot);
        }
    }
}

impl Publisher {
    /// The subscribers that can be chosen.
    pub(crate) fn linked_subscribers(&self) -> Vec<LinkedSubscriber> {
        let linked = |link: &SubscriberLink| LinkedSubscriber {
            id: link.id,
            pid: link.end.peer.pid,
            replies: link.partner.clone(),
        };
        self.core.lock().live().map(linked).collect()
    }

    /// Whether the subscriber with this id still gets samples.
    pub(crate) fn has_subscriber(&self, id: u64) -> bool {
        self.core.lock().is_live(id)
    }

    /// Whether the loan is of this publisher's memory.
    pub(crate) fn lent(&self, loan: &SampleMut) -> bool {
        Arc::ptr_eq(&self.core, &loan.core)
    }

    /// Withdraws the name and sends `Close`, as dropping does, for an owner that cannot drop the
    /// publisher yet.
    pub(crate) fn close(&self) {
        self.core.close();
    }

    /// Ends one subscriber's link.
    pub(crate) fn expel(&self, id: u64, reason: &str) {
        let mut state = self.core.lock();
        if let Some(link) = state.find(id).filter(|link| link.is_live()) {
            link.leave(Some(CloseReason::Failed(message::text(reason))));
        }
        drop(state);
        self.core.notify();
    }

    /// The samples that subscribers which have gone had been given and had not taken, each returned
    /// once: subscriber id and position.
    pub(crate) fn take_untaken(&self) -> Vec<(u64, u64)> {
        let mut state = self.core.lock();
        let mut untaken = std::mem::take(&mut state.untaken);
        let links = state.links.iter_mut();
        untaken.extend(links.flat_map(SubscriberLink::take_untaken));
        untaken
    }
}

impl SampleMut {
    /// [`send`](SampleMut::send) to one subscriber, with `wait` as in
    /// [`send_within`](SampleMut::send_within).
    pub(crate) fn send_to(
        self,
        to: u64,
        metadata: &Metadata,
        stream: &Stream,
        wait: Option<&Wait<'_>>,
    ) -> Result<u64, SendError> {
        let to = Recipients::One(to);
        self.give(Some(metadata), stream, to, wait, |_, sent| sent.sequence)
    }

    /// Keeps the sample behind the work on `stream`, and gives it to one subscriber at once if it
    /// has room. Returns the position there.
    pub(crate) fn post(
        self,
        to: Option<u64>,
        metadata: &Metadata,
        stream: &Stream,
    ) -> Result<(RetainedSlot, Option<u64>), SendError> {
        let to = Recipients::Keep(to);
        self.give(Some(metadata), stream, to, None, |given, sent| {
            let retained = RetainedSlot {
                core: LeakOnFork::new(given.core.clone()),
                slot: given.slot,
                layout: given.layout,
            };
            (retained, sent.position)
        })
    }
}
