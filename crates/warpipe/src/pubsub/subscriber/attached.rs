//! A subscriber's end of the ring: takes, checks and admits the samples of one link.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::DevicePtr;
use crate::error::{Error, Result};
use crate::memory::region::Region;
use crate::pubsub::entry::{CheckedEntry, Violation};
use crate::pubsub::publisher_link::{LinkState, PublisherLink};
use crate::pubsub::ring::ReceiverRing;
use crate::pubsub::sample::{Discontinuity, PreviousPublisher, Sample};
use crate::runtime::heartbeat::Uptime;
use crate::shm::segment::DEPTH_MAX;
use crate::statistics::EndpointRow;
use crate::stream::Stream;

/// How long a sample's region may take to arrive behind the sample itself, while this process runs.
const REGION_TIMEOUT: Duration = Duration::from_secs(2);

/// The link to the current incarnation.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) link: Arc<PublisherLink>,
    pub(super) ring: ReceiverRing,
    pub(super) regions: Vec<Arc<Region>>,
    /// The number of the sample that was taken last, lost or not; 0 for none.
    pub(super) last_sequence: u64,
    /// The number of the sample that the subscriber received last, also over an earlier link to the
    /// same source; 0 for none.
    pub(super) last_received: u64,
    /// How many samples of this link were received over an earlier one. No history is longer than a
    /// ring, so beyond [`DEPTH_MAX`] the source's numbers have begun anew.
    pub(super) repeated: u32,
    /// The time since a sample was found without its region.
    pub(super) region_missing: Option<Uptime>,
    /// A sample taken from the ring that the device refused to wait for. It is the next to be
    /// admitted.
    pub(super) taken: Option<TakenSample>,
    /// The subscriber's row of this process's statistics page.
    pub(super) row: Arc<EndpointRow>,
}

/// A sample that belongs to this end: its position, the address of its slot, its description.
pub(super) type TakenSample = (u64, DevicePtr, CheckedEntry);

/// A link that has ended, until a sample of another link is received.
#[derive(Debug)]
pub(super) struct EndedLink {
    /// The publisher's.
    pub(super) generation: [u8; 16],
    /// That of the publisher that gave the samples their numbers.
    pub(super) source: [u8; 16],
    pub(super) publisher: PreviousPublisher,
    /// As [`Attached::last_received`].
    pub(super) last_received: u64,
}

impl EndedLink {
    /// The break before a sample of the next link.
    fn break_before(self, sequence: u64, link: &PublisherLink) -> Discontinuity {
        // An evicted subscriber may find the same publisher again, and a forwarder of a source be
        // followed by another one: the numbers go on.
        let missing = if self.source == link.source {
            missing_between(self.last_received, sequence)
        } else {
            0
        };
        let is_another = self.generation != link.generation;
        Discontinuity {
            missing,
            previous: is_another.then_some(self.publisher),
        }
    }
}

/// How many numbers lie between the sample received last and the next one. Before the first one
/// nothing is missing.
fn missing_between(last: u64, next: u64) -> u64 {
    match last {
        0 => 0,
        last => next.saturating_sub(last).saturating_sub(1),
    }
}

impl Attached {
    /// Whether [`poll`](Self::poll) would find nothing and change nothing: a few words are read, so
    /// that a thread that polls sees the next sample early.
    #[inline]
    pub(super) fn is_quiet(&self) -> bool {
        // The state before the ring, as in `poll`.
        self.taken.is_none()
            && self.region_missing.is_none()
            && self.link.link_state() == LinkState::Open
            && !self.ring.may_have_news()
    }

    pub(super) fn poll(
        &mut self,
        stream: &Stream,
        ended: &mut Option<EndedLink>,
    ) -> Result<Option<Sample>> {
        loop {
            // Read before the ring: samples sent before the end must be found before the end is
            // reported.
            let link_state = self.link.link_state();
            if link_state == LinkState::Failed {
                return Err(self.link.why_over());
            }
            let (position, address, checked) = match self
                .taken
                .take()
                .map_or_else(|| self.next(), |it| Ok(Some(it)))
            {
                Ok(Some(next)) => next,
                Ok(None) if link_state == LinkState::Open || self.is_region_due() => {
                    return self.wait_for_region();
                }
                Ok(None) => return Err(self.link.why_over()),
                Err(violation) => return Err(self.fail(violation)),
            };
            match self.link.admit(position, stream) {
                Ok(true) => {
                    let gap = self.break_before(checked.sequence, ended);
                    let link = self.link.clone();
                    let sample = Sample::new(link, address, position, checked, stream, gap);
                    if let Some(latency_ns) = sample.latency_ns() {
                        self.row.time(latency_ns);
                    }
                    return Ok(Some(sample));
                }
                Ok(false) => {}
                Err(error) => {
                    self.taken = Some((position, address, checked));
                    return Err(error);
                }
            }
        }
    }

    /// The break before the sample with this number, which the subscriber receives now. Numbers of
    /// samples that were taken and lost are missing as well.
    #[inline]
    fn break_before(
        &mut self,
        sequence: u64,
        ended: &mut Option<EndedLink>,
    ) -> Option<Box<Discontinuity>> {
        let last = std::mem::replace(&mut self.last_received, sequence);
        // Also a first sample that is the publisher's first.
        if sequence.wrapping_sub(last) == 1 && ended.is_none() {
            return None;
        }
        self.find_break(last, sequence, ended.take()).map(Box::new)
    }

    #[cold]
    fn find_break(
        &self,
        last: u64,
        sequence: u64,
        ended: Option<EndedLink>,
    ) -> Option<Discontinuity> {
        if let Some(ended) = ended {
            return Some(ended.break_before(sequence, &self.link));
        }
        let missing = missing_between(last, sequence);
        (missing > 0).then_some(Discontinuity {
            missing,
            previous: None,
        })
    }

    /// Takes and checks the next sample in the ring that this subscriber has not received before.
    pub(super) fn next(&mut self) -> Result<Option<TakenSample>, Violation> {
        loop {
            let Some(position) = self.take()? else {
                return Ok(None);
            };
            let (address, checked) = self.check()?;
            // Set whatever happens to the sample: one that its publisher left incomplete is lost,
            // and the next one follows it.
            self.last_sequence = checked.sequence;
            if let Some(completion) = checked.completion {
                self.link.note_completion(position, completion)?;
            }
            if checked.sequence <= self.last_received && self.repeated < DEPTH_MAX {
                self.skip(position);
                continue;
            }
            self.row.count(checked.sequence, checked.layout.bytes());
            return Ok(Some((position, address, checked)));
        }
    }

    /// Gives back a sample that was received over an earlier link. No stream waits for it or is
    /// given its release: the user does not see it.
    #[cold]
    fn skip(&mut self, position: u64) {
        self.repeated += 1;
        self.link.keep(position);
        self.link.give_back(position);
    }

    fn take(&mut self) -> Result<Option<u64>, Violation> {
        let (link, regions) = (&self.link, &mut self.regions);
        let missing = &mut self.region_missing;
        self.ring.take(|id| {
            if id as usize >= regions.len() {
                regions.clone_from(&link.regions());
            }
            let known = (id as usize) < regions.len();
            if known {
                *missing = None;
            } else {
                missing.get_or_insert_default();
            }
            known
        })
    }

    /// Whether a sample waits for its region, which has been announced but not mapped yet.
    pub(super) fn is_region_due(&self) -> bool {
        // In this order: the region may have been mapped since the ring was polled, and then it is
        // no longer being mapped.
        self.region_missing.is_some()
            && (self.link.is_mapping() || self.link.regions().len() > self.regions.len())
    }

    /// There is no sample to take: either none was sent, or its region has not arrived yet, which
    /// is tolerated for a while.
    pub(super) fn wait_for_region(&mut self) -> Result<Option<Sample>> {
        match &self.region_missing {
            Some(clock) if clock.ran() > REGION_TIMEOUT && !self.is_region_due() => {
                let allowed = format!("one of the {} announced", self.regions.len());
                Err(self.fail(Violation {
                    field: "region",
                    found: "one never announced".into(),
                    allowed,
                }))
            }
            _ => Ok(None),
        }
    }

    /// Checks the entry that was taken last. The link keeps the region mapped.
    fn check(&mut self) -> Result<(DevicePtr, CheckedEntry), Violation> {
        let copy = self.ring.copy();
        let region = &self.regions[copy.region() as usize];
        let checked = copy.check(region.bytes())?;
        let address = region.ptr() + checked.slot;
        let follows = match self.last_sequence {
            0 => checked.sequence > 0,
            last if self.link.lossless => last.checked_add(1) == Some(checked.sequence),
            last => checked.sequence > last,
        };
        if !follows {
            let allowed = if self.link.lossless {
                "the next after"
            } else {
                "more than"
            };
            let allowed = format!("{allowed} {}", self.last_sequence);
            return Err(Violation {
                field: "sequence",
                found: checked.sequence.to_string(),
                allowed,
            });
        }
        Ok((address, checked))
    }

    pub(super) fn fail(&self, violation: Violation) -> Error {
        self.link.fail(self.link.violation(violation));
        self.link.why_over()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Some((position, ..)) = self.taken.take() {
            self.link.give_back(position);
        }
    }
}
