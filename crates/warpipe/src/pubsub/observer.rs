//! The subscribers of a publisher, and their replies, as an owner sees them that chooses its
//! recipients: a queue.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::publisher_link::PublisherLink;
use crate::error::{Error, Result};
use crate::pubsub::entry::Violation;
use crate::runtime::doorbell::LocalDoorbell;

/// A live subscriber that can be chosen.
#[derive(Debug, Clone)]
pub(crate) struct LinkedSubscriber {
    pub(crate) id: u64,
    /// For messages to people.
    pub(crate) pid: i32,
    /// The receiver of its replies, if it sends any.
    pub(in crate::pubsub) replies: Option<Arc<PublisherLink>>,
}

/// Receives the replies of one subscriber: [`LinkReceiver`](super::LinkReceiver); a model has
/// another. Dropped, it asks for no more.
pub(crate) trait ReplyLink {
    type Reply: Reply;

    /// The next reply, if there is one, without a stream. The error at the end is the same as from
    /// `receive`.
    fn take(&mut self) -> Result<Option<Self::Reply>>;

    /// Closes the link because of the sender's violation.
    fn fail(&self, violation: Violation) -> Error;

    /// Whether the sender is proven dead.
    fn is_sender_dead(&self) -> bool;

    /// Whether [`take`](Self::take) is worth a call; cheap.
    fn may_have_news(&self) -> bool;
}

/// A reply that was taken.
pub(crate) trait Reply: Debug {
    fn metadata(&self) -> &[u8];

    /// Whether the data is complete; an error if it never will be.
    fn is_complete(&self) -> Result<bool>;

    /// Once [`is_complete`](Self::is_complete) is true: gives its entry of the ring back, if
    /// samples hold more than half of the entries.
    fn make_room(&mut self);
}

/// Is notified of subscribers that come and go.
#[derive(Debug)]
pub(crate) struct SubscriberChanges {
    pub(crate) doorbell: Arc<LocalDoorbell>,
    has_news: AtomicBool,
    /// The jobs of the queue that no worker has: the publisher writes its statistics.
    jobs_waiting: AtomicU64,
}

impl SubscriberChanges {
    pub(crate) fn new() -> Result<SubscriberChanges> {
        Ok(SubscriberChanges {
            doorbell: Arc::new(LocalDoorbell::new()?),
            has_news: AtomicBool::new(true),
            jobs_waiting: AtomicU64::new(0),
        })
    }

    pub(crate) fn tell(&self) {
        self.has_news.store(true, Ordering::SeqCst);
        self.doorbell.ring();
    }

    pub(crate) fn note_waiting(&self, jobs: usize) {
        self.jobs_waiting.store(jobs as u64, Ordering::Relaxed);
    }

    pub(super) fn jobs_waiting(&self) -> u64 {
        self.jobs_waiting.load(Ordering::Relaxed)
    }

    /// Whether a change came since the last call.
    #[inline]
    pub(crate) fn take_news(&self) -> bool {
        self.has_news.load(Ordering::Relaxed) && self.has_news.swap(false, Ordering::SeqCst)
    }
}
