//! Samples that are taken from the ring before any stream waits for them, for callers that check
//! whether the data arrived before work on it begins; and the receiver of a subscriber's replies,
//! which takes all of its samples in this way.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::super::publisher_link::{PublisherLink, SenderState};
use super::super::sample::{Sample, TakenSample};
use super::Subscriber;
use super::link_receiver::LinkReceiver;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::Kind;
use crate::ipc::domain::Domain;
use crate::pubsub::entry::Violation;
use crate::pubsub::observer::LinkedSubscriber;
use crate::pubsub::ring::ReceiverRing;
use crate::statistics::{EndpointRow, EndpointWords, Role};
use crate::stream::Stream;

/// A sample that was taken and given to no caller yet. Dropped, it is released once its data is
/// complete.
#[derive(Debug)]
pub(crate) struct RawSample {
    link: LeakOnFork<Arc<PublisherLink>>,
    /// `None` once it has become a [`Sample`].
    taken: Option<TakenSample>,
}

impl RawSample {
    fn taken(&self) -> &TakenSample {
        self.taken
            .as_ref()
            .expect("present until it becomes a sample")
    }

    #[cfg(test)]
    pub(in crate::pubsub) fn link(&self) -> &Arc<PublisherLink> {
        &self.link
    }

    pub(crate) fn metadata(&self) -> &[u8] {
        self.taken().checked.metadata.as_bytes()
    }

    /// Whether the data is complete; an error if it never will be.
    #[inline]
    pub(crate) fn is_complete(&self) -> Result<bool> {
        let taken = self.taken();
        let (position, sequence) = (taken.position, taken.checked.sequence);
        Ok(taken.is_set_aside || self.link.completion(position, sequence)?)
    }

    /// Once [`is_complete`](Self::is_complete) is true: gives its entry of the ring back, if samples
    /// hold more than half of the entries.
    pub(crate) fn make_room(&mut self) {
        if let Some(taken) = &mut self.taken
            && !taken.is_set_aside
            && self.link.is_crowded()
        {
            self.link.set_aside(taken.position);
            taken.is_set_aside = true;
        }
    }

    /// A handle to wait for the data without keeping this sample.
    pub(crate) fn completion_wait(&self) -> CompletionWait {
        CompletionWait {
            link: Arc::clone(&self.link),
            position: self.taken().position,
        }
    }

    /// The sample, once [`is_complete`](Self::is_complete) is true: then `stream` has nothing to
    /// wait for.
    pub(crate) fn into_sample(mut self, stream: &Stream) -> Sample {
        let taken = self
            .taken
            .take()
            .expect("present until it becomes a sample");
        Sample::new(Arc::clone(&self.link), taken, stream, None)
    }
}

/// A wait for the data of a raw sample.
#[derive(Debug)]
pub(crate) struct CompletionWait {
    link: Arc<PublisherLink>,
    position: u64,
}

impl CompletionWait {
    /// Waits on the CPU until the data may be complete.
    pub(crate) fn wait(&self, limit: Duration) {
        self.link.wait_for_completion(self.position, limit);
    }
}

impl Drop for RawSample {
    fn drop(&mut self) {
        if let (Ok(link), Some(taken)) = (self.link.get(), self.taken.take()) {
            match taken.is_set_aside {
                true => link.return_slot(taken.position),
                false => link.give_back(taken.position),
            }
        }
    }
}

impl LinkReceiver {
    /// The next sample, if there is one, without a stream. The error at the end is the same as from
    /// `receive`.
    pub(crate) fn take(&mut self) -> Result<Option<RawSample>> {
        let taken = self.take_next()?;
        Ok(taken.map(|taken| {
            self.link.keep(taken.position);
            RawSample {
                link: LeakOnFork::new(self.link.clone()),
                taken: Some(taken),
            }
        }))
    }

    /// Whether [`take`](Self::take) is worth a call; cheap.
    #[inline]
    pub(crate) fn may_have_news(&self) -> bool {
        self.ring.may_have_news() || self.link.link_state() != SenderState::Open
    }

    /// Sets whether the sender is asked to ring [`descriptor`](Self::descriptor) with each sample.
    pub(crate) fn set_asleep(&self, asleep: bool) {
        match asleep {
            true => self.ring.fall_asleep(),
            false => self.ring.wake_up(),
        }
    }

    /// A descriptor that is readable when this end is rung. The observer's doorbell reports changes
    /// of the link.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.link.end.peer_doorbell.as_fd()
    }

    /// Drains the descriptor.
    pub(crate) fn quiet(&self) {
        self.link.drain_wake();
    }

    /// Whether the sender is proven dead.
    pub(crate) fn is_sender_dead(&self) -> bool {
        self.link.is_dead()
    }
}

/// Receives the replies of one subscriber, over its link's second ring. Dropped, it asks for no more.
pub(crate) type Replies = LeakOnFork<LinkReceiver>;

impl LinkedSubscriber {
    /// The receiver of its replies; `None` if it sends none. There is one for each subscriber.
    pub(crate) fn receive_replies(&self, name: &str, domain: &Domain) -> Option<Replies> {
        let link = self.replies.clone()?;
        let row = Arc::new(EndpointRow::open(&EndpointWords {
            kind: Kind::Results,
            role: Role::Peer,
            name,
            domain: domain.identity(),
            device: None,
            generation: link.generation,
            depth: 0,
            memory_max: 0,
        }));
        let ring = ReceiverRing::new(link.segment().clone());
        Some(Replies::new(LinkReceiver::new(link, ring, 0, row)))
    }
}

impl Subscriber {
    /// As [`LinkReceiver::take`].
    #[cfg(test)]
    pub(crate) fn take_raw_sample(&mut self) -> Result<Option<RawSample>> {
        match &mut self.attached {
            Some(attached) => attached.take(),
            None => Err(self.not_found()),
        }
    }

    /// Whether a receive is worth a call; cheap.
    #[inline]
    pub(crate) fn may_have_news(&self) -> bool {
        self.attached.as_ref().is_none_or(|at| at.may_have_news())
    }

    /// Sets whether the publisher is asked to ring [`descriptor`](Self::descriptor) with each
    /// sample.
    pub(crate) fn set_asleep(&self, asleep: bool) {
        if asleep {
            self.fall_asleep();
        } else {
            self.wake_up();
        }
    }

    /// A descriptor that is readable when this end is rung.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }

    /// Drains the doorbells.
    pub(crate) fn quiet(&self) {
        self.drain();
    }

    /// Closes the link because of the publisher's violation.
    pub(crate) fn fail(&self, violation: Violation) -> Error {
        match &self.attached {
            Some(attached) => attached.fail(violation),
            None => self.not_found(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::link_receiver::MissingRegion;
    use super::*;
    use crate::device::Device;
    use crate::ipc::domain::Domain;
    use crate::pubsub::Publisher;
    use crate::runtime::heartbeat::Uptime;
    use crate::tensor::Layout;

    /// A publisher has sent a sample in new memory and is gone. Its last region is mapped between
    /// the subscriber's poll of the ring and its check whether a region is still due.
    #[test]
    fn a_sample_whose_region_is_mapped_this_very_moment_is_not_lost_to_a_goodbye() {
        let folder = std::env::temp_dir().join(format!("warpipe-arrival-{}", std::process::id()));
        let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
        let stream = device.stream().unwrap();
        let publisher = Publisher::builder("grows")
            .domain(&domain)
            .device(&device)
            .build()
            .unwrap();
        let mut subscriber = Subscriber::builder("grows")
            .domain(&domain)
            .device(&device)
            .build()
            .unwrap();
        publisher
            .loan(&Layout::bytes_only(8).unwrap())
            .unwrap()
            .send(&stream)
            .unwrap();
        drop(publisher);
        let attached = subscriber.attached.as_mut().unwrap();
        let start = Instant::now();
        while attached.link.link_state() == SenderState::Open || attached.link.is_mapping() {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
        assert!(attached.regions.is_empty(), "not looked at yet");
        attached.region_missing = Some(MissingRegion::default());
        assert!(attached.is_region_due());
        assert!(subscriber.take_raw_sample().unwrap().is_some());
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn a_region_is_not_late_while_this_process_stands_still() {
        let folder = std::env::temp_dir().join(format!("warpipe-late-{}", std::process::id()));
        let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
        let _publisher = Publisher::builder("late")
            .domain(&domain)
            .device(&device)
            .build()
            .unwrap();
        let mut subscriber = Subscriber::builder("late")
            .domain(&domain)
            .device(&device)
            .build()
            .unwrap();
        let attached = subscriber.attached.as_mut().unwrap();
        let missing = attached.region_missing.insert(MissingRegion {
            id: 7,
            clock: Uptime::default(),
        });
        missing.clock.freeze(Duration::from_secs(60));
        attached.check_missing_region().unwrap();
        let missing = attached.region_missing.as_ref().unwrap();
        missing.clock.advance(Duration::from_secs(60));
        let late = attached.check_missing_region().unwrap_err();
        assert!(
            matches!(
                late,
                Error::Protocol {
                    field: "region",
                    ..
                }
            ),
            "{late}"
        );
        let _ = std::fs::remove_dir_all(folder);
    }
}
