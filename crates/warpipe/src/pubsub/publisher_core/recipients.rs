//! The recipients of one sample.

use crate::pubsub::subscriber_link::SubscriberLink;

/// The recipients of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pubsub) enum Recipients {
    /// Every subscriber.
    All,
    /// The subscriber with this id.
    One(u64),
    /// No subscriber yet.
    Nobody,
}

impl Recipients {
    #[inline]
    pub(super) fn include(self, link: &SubscriberLink) -> bool {
        match self {
            Recipients::All => true,
            Recipients::One(id) => link.id == id,
            Recipients::Nobody => false,
        }
    }

    /// Whether a send must wait for room on this link.
    #[inline]
    pub(super) fn await_it(self, link: &SubscriberLink) -> bool {
        self.include(link) && link.must_be_awaited()
    }
}
