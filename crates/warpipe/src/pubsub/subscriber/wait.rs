//! How a subscriber sleeps until something may have come: one epoll descriptor over its sources.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{RETRY, Subscriber};
use crate::error::Result;
use crate::pubsub::observer::ReplyLink;
use crate::pubsub::sample::Sample;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::reactor::{EventSource, Next};
use crate::runtime::spin::Polls;
use crate::stream::Stream;
use crate::wait::{SLICE, Wait};

/// The sources of events in a subscriber's one descriptor, a bit for each: its own process, its
/// publisher.
pub(super) const DOORBELL: u64 = 1;
pub(super) const WAKE: u64 = 2;

/// Looks at the ring that make one poll.
const LOOKS: u32 = 8;

/// Rings a doorbell at each tick.
#[derive(Debug)]
pub(super) struct TickRinger(pub(super) Arc<LocalDoorbell>);

impl EventSource for TickRinger {
    fn on_ready(&self, _: u64) -> Next {
        Next::Stop
    }

    fn on_tick(&self, _: u64) {
        self.0.ring();
    }
}

impl Subscriber {
    /// How long a sleep may last before the next poll without a wake-up.
    pub(super) fn longest_sleep(&self) -> Duration {
        if self.must_look_again() {
            RETRY
        } else {
            Duration::MAX
        }
    }

    /// Whether a sample may come without a ring: from a publisher that could not admit this end, or
    /// in a region that was never announced.
    pub(super) fn must_look_again(&self) -> bool {
        self.attached
            .as_ref()
            .is_none_or(|attached| attached.region_missing.is_some())
    }

    /// `previous` is to be released together with the wait for the next sample, and alone once its
    /// stream works on it: earlier that does not get to the release.
    pub(super) fn poll_while(
        &mut self,
        mut polls: Polls,
        stream: &Stream,
        previous: &mut Option<Sample>,
        wait: &Wait<'_>,
    ) -> Result<Option<Sample>> {
        // Else the sleep comes soon enough.
        let is_long = self.options.spin > SLICE;
        // Without a link there is nothing to poll, and a ring does not say that its link has ended.
        let has_news = |subscriber: &Subscriber| {
            let attached = subscriber.attached.as_ref();
            attached.is_none_or(|it| !it.is_quiet())
        };
        while polls.pass() {
            for _ in 0..LOOKS {
                if has_news(self) {
                    if previous.is_some() {
                        // A graph that another thread captures meanwhile would record the release.
                        stream.check_not_capturing()?;
                    }
                    return self.poll_opening(stream, previous);
                }
                std::hint::spin_loop();
            }
            drop(previous.take_if(|it| it.is_in_progress()));
            if is_long && wait.is_look_due() && wait.is_cancelled() {
                return self.end_wait(wait);
            }
        }
        Ok(None)
    }

    /// Sets whether the publisher is asked to ring for samples; one that is polled always asks.
    /// Poll once more before sleeping: samples published before did not ring.
    pub(crate) fn set_asleep(&self, asleep: bool) {
        if !asleep && self.is_polled.load(Ordering::Relaxed) {
            return;
        }
        self.is_asleep.store(asleep, Ordering::Relaxed);
        if let Some(attached) = &self.attached {
            attached.set_asleep(asleep);
        }
    }

    /// Sleeps until a source rings, and notes which did. They are drained by
    /// [`drain_rung`](Self::drain_rung) before the next sleep: each of those system calls here
    /// would be part of a sample's latency.
    pub(super) fn sleep(&mut self, limit: Duration) {
        self.rung = self
            .readable
            .wait(limit)
            .fold(self.rung, |rung, tag| rung | tag);
    }

    /// Drains the sources that ended a sleep; a silent one is not read. Comes before
    /// [`set_asleep`](Self::set_asleep): behind it, a ring for a sample could be lost.
    pub(super) fn drain_rung(&mut self) {
        let rung = std::mem::take(&mut self.rung);
        if rung & DOORBELL != 0 {
            self.at.doorbell.drain();
        }
        if rung & WAKE != 0
            && let Some(attached) = &self.attached
        {
            attached.drain();
            if attached.link.end.peer_doorbell.is_closed() {
                // The closed doorbell would be readable for ever; the local doorbell reports the
                // end itself.
                self.readable.remove(&*attached.link.end.peer_doorbell);
            }
        }
    }

    /// Drains every source.
    pub(crate) fn drain(&mut self) {
        self.rung = DOORBELL | WAKE;
        self.drain_rung();
    }

    /// Whether a receive is worth a call; cheap.
    #[inline]
    pub(crate) fn may_have_news(&self) -> bool {
        self.attached.as_ref().is_none_or(|at| at.may_have_news())
    }
}

impl AsFd for Subscriber {
    /// A descriptor that is readable when a sample, or the end, may have come (an epoll descriptor;
    /// it nests). With [`reconnect`](super::SubscriberOptions::reconnect) also every 200 ms while
    /// there is no publisher.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.is_polled.store(true, Ordering::Relaxed);
        self.set_asleep(true);
        // While the owner of memory is asked, samples wait behind that one, and the answer rings.
        if self
            .attached
            .as_ref()
            .is_none_or(|at| at.asked.is_none() && (at.taken.is_some() || at.ring.may_have_news()))
        {
            self.at.doorbell.ring();
        }
        self.readable.as_fd()
    }
}

impl std::os::fd::AsRawFd for Subscriber {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.as_fd().as_raw_fd()
    }
}
