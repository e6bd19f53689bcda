//! For owners that choose which subscriber gets which sample, as a queue does: the calls of
//! [`Publisher`] and [`SampleMut`] that address one subscriber.

use super::observer::LinkedSubscriber;
use super::publisher::{Publisher, SampleMut, SendError};
use super::publisher_core::{Recipients, RetainedSlot};
use crate::error::Result;
use crate::pubsub::entry::Metadata;
use crate::stream::Stream;
use crate::wait::Wait;

impl Publisher {
    /// The subscribers that can be chosen.
    pub(crate) fn linked_subscribers(&self) -> Vec<LinkedSubscriber> {
        self.core.linked_subscribers()
    }

    /// Whether the subscriber with this id still gets samples.
    pub(crate) fn has_subscriber(&self, id: u64) -> bool {
        self.core.has_subscriber(id)
    }

    /// Whether the loan is of this publisher's memory.
    pub(crate) fn lent(&self, loan: &SampleMut) -> bool {
        std::sync::Arc::ptr_eq(&self.core, &loan.core)
    }

    /// Withdraws the name and sends `Close`, as dropping does, for an owner that cannot drop the
    /// publisher yet.
    pub(crate) fn close(&self) {
        self.core.close();
    }

    /// Ends one subscriber's link.
    pub(crate) fn expel(&self, id: u64, reason: &str) {
        self.core.expel(id, reason);
    }

    /// The samples that subscribers which have gone had been given and had not taken, each returned
    /// once: subscriber id and position.
    pub(crate) fn take_untaken(&self) -> Vec<(u64, u64)> {
        self.core.take_untaken()
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
        self.hand_over(stream, |loan, slot| {
            let to = Recipients::One(to);
            loan.core
                .send_to(slot, &loan.layout, metadata, stream, to, wait)
        })
    }

    /// Keeps the sample behind the work on `stream`, and gives it to one subscriber at once if it
    /// has room. Returns the position there.
    pub(crate) fn post(
        self,
        to: Option<u64>,
        metadata: &Metadata,
        stream: &Stream,
    ) -> Result<(RetainedSlot, Option<u64>), SendError> {
        self.hand_over(stream, |loan, slot| {
            loan.core.post(slot, &loan.layout, metadata, stream, to)
        })
    }
}
