//! The subscribers of a publisher, as an owner sees them that chooses its recipients: a queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::publisher_link::PublisherLink;
use crate::error::Result;
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
