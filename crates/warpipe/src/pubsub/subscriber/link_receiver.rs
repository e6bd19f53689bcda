//! The receiver of one ring: takes, checks and admits the samples of one link. A subscriber has one
//! while it is attached to a publisher; a queue has one for the replies of each worker.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::memory::region::Region;
use crate::pubsub::entry::{CheckedEntry, Violation, violation};
use crate::pubsub::publisher_link::{OpenRegion, PublisherLink, SenderState};
use crate::pubsub::ring::ReceiverRing;
use crate::pubsub::sample::{Discontinuity, PreviousPublisher, Sample, SampleSlot, TakenSample};
use crate::runtime::heartbeat::Uptime;
use crate::shm::segment::DEPTH_MAX;
use crate::statistics::EndpointRow;
use crate::stream::Stream;

/// How long a sample's region may take to arrive behind the sample itself, while this process runs.
const REGION_TIMEOUT: Duration = Duration::from_secs(2);

/// A subscriber's link to its present publisher, or a receiver of replies.
#[derive(Debug)]
pub(crate) struct LinkReceiver {
    pub(super) link: Arc<PublisherLink>,
    pub(super) ring: ReceiverRing,
    /// The link's regions, by their ids, as they were when one was last looked for in vain.
    pub(super) regions: Vec<KnownRegion>,
    /// The index in `regions` of that of the entry that was copied last.
    region: usize,
    /// The number of the sample that was taken last, lost or not; 0 for none.
    pub(super) last_sequence: u64,
    /// The number of the sample that the subscriber received last, also over an earlier link to the
    /// same source; 0 for none.
    pub(super) last_received: u64,
    /// How many samples of this link were received over an earlier one. No history is longer than a
    /// ring, so beyond [`DEPTH_MAX`] the source's numbers have begun anew.
    pub(super) repeated: u32,
    /// A sample was found without its region.
    pub(super) region_missing: Option<MissingRegion>,
    /// A sample taken from the ring that the device refused to wait for. It is the next to be
    /// admitted.
    pub(super) taken: Option<TakenSample>,
    /// The subscriber's row of this process's statistics page.
    pub(super) row: Arc<EndpointRow>,
}

/// A region of the link's. The link keeps it mapped until the publisher closes it.
#[derive(Debug)]
pub(super) struct KnownRegion {
    id: u32,
    region: Weak<Region>,
}

impl From<&OpenRegion> for KnownRegion {
    fn from(open: &OpenRegion) -> KnownRegion {
        KnownRegion {
            id: open.id,
            region: Arc::downgrade(&open.region),
        }
    }
}

/// A region that a sample lies in and that is not mapped yet.
#[derive(Debug, Default)]
pub(super) struct MissingRegion {
    pub(super) id: u32,
    /// The time since the sample was found.
    pub(super) clock: Uptime,
}

/// A link that has ended, until a sample of another link is received.
#[derive(Debug)]
pub(super) struct EndedLink {
    /// The publisher's.
    pub(super) generation: [u8; 16],
    /// That of the publisher that gave the samples their numbers.
    pub(super) source: [u8; 16],
    pub(super) publisher: PreviousPublisher,
    /// As [`LinkReceiver::last_received`].
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

impl LinkReceiver {
    /// `last_received`: the number of the sample that the subscriber received last over an earlier
    /// link to the same source; 0 for none.
    pub(super) fn new(
        link: Arc<PublisherLink>,
        ring: ReceiverRing,
        last_received: u64,
        row: Arc<EndpointRow>,
    ) -> LinkReceiver {
        let regions = link.regions().iter().map(KnownRegion::from).collect();
        LinkReceiver {
            link,
            ring,
            regions,
            region: 0,
            last_sequence: 0,
            last_received,
            repeated: 0,
            region_missing: None,
            taken: None,
            row,
        }
    }

    /// Whether [`poll`](Self::poll) would find nothing and change nothing: a few words are read, so
    /// that a thread that polls sees the next sample early.
    #[inline]
    pub(super) fn is_quiet(&self) -> bool {
        self.taken.is_none() && self.region_missing.is_none() && !self.may_have_news()
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
            if link_state == SenderState::Failed {
                return Err(self.link.why_over());
            }
            let kept = self.taken.take();
            let taken = match kept.map_or_else(|| self.next(), |it| Ok(Some(it))) {
                Ok(Some(taken)) => taken,
                Ok(None) => return self.nothing(link_state).map(|()| None),
                Err(violation) => return Err(self.fail(violation)),
            };
            match self.link.admit(taken.position, stream) {
                Ok(true) => {
                    let gap = self.break_before(taken.checked.sequence, ended);
                    let link = self.link.clone();
                    let sample = Sample::new(link, taken, stream, gap);
                    if let Some(latency_ns) = sample.latency_ns() {
                        self.row.time(latency_ns);
                    }
                    return Ok(Some(sample));
                }
                Ok(false) => {}
                Err(error) => {
                    self.taken = Some(taken);
                    return Err(error);
                }
            }
        }
    }

    /// The next sample that belongs to this end, if there is one, as for [`poll`](Self::poll).
    pub(super) fn take_next(&mut self) -> Result<Option<TakenSample>> {
        let link_state = self.link.link_state();
        if link_state == SenderState::Failed {
            return Err(self.link.why_over());
        }
        let kept = self.taken.take();
        match kept.map_or_else(|| self.next(), |it| Ok(Some(it))) {
            Ok(None) => self.nothing(link_state).map(|()| None),
            Ok(taken) => Ok(taken),
            Err(violation) => Err(self.fail(violation)),
        }
    }

    /// What a look at the ring says that found no sample, behind a look at the link's state. The
    /// error at the link's end comes behind the last sample.
    fn nothing(&self, link_state: SenderState) -> Result<()> {
        match link_state == SenderState::Open || self.is_region_due() {
            true => self.check_missing_region(),
            false => Err(self.link.why_over()),
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
            let Some(position) = self.take_entry()? else {
                return Ok(None);
            };
            let (slot, checked) = self.check()?;
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
            return Ok(Some(TakenSample {
                position,
                slot,
                checked,
                is_set_aside: false,
            }));
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

    fn take_entry(&mut self) -> Result<Option<u64>, Violation> {
        let LinkReceiver {
            link,
            ring,
            regions,
            region,
            region_missing,
            ..
        } = self;
        let mut missing = None;
        let taken = ring.take(|id| {
            let find = |regions: &[KnownRegion]| regions.binary_search_by_key(&id, |it| it.id);
            let found = find(regions).or_else(|_| {
                regions.clear();
                regions.extend(link.regions().iter().map(KnownRegion::from));
                find(regions)
            });
            match found {
                Ok(index) => *region = index,
                Err(_) => missing = Some(id),
            }
            found.is_ok()
        });
        // An entry may be taken back while its region is missing: then none is.
        match missing {
            None => *region_missing = None,
            Some(id) => region_missing.get_or_insert_default().id = id,
        }
        taken
    }

    /// Whether a sample waits for its region, which has been announced but not mapped yet.
    pub(super) fn is_region_due(&self) -> bool {
        let Some(MissingRegion { id, .. }) = self.region_missing else {
            return false;
        };
        // In this order: the region may have been mapped since the ring was polled, and then it is
        // no longer being mapped.
        self.link.is_mapping() || self.link.regions().iter().any(|region| region.id == id)
    }

    /// There is no sample to take: either none was sent, or its region has not arrived yet, which
    /// is tolerated for a while.
    pub(super) fn check_missing_region(&self) -> Result<()> {
        match &self.region_missing {
            Some(missing) if missing.clock.ran() > REGION_TIMEOUT && !self.is_region_due() => {
                Err(self.fail(violation(
                    "region",
                    format!("{}, never announced or closed", missing.id),
                    format!("one of the {} that are open", self.regions.len()),
                )))
            }
            _ => Ok(()),
        }
    }

    /// Checks the entry that was taken last.
    fn check(&mut self) -> Result<(SampleSlot, CheckedEntry), Violation> {
        let copy = self.ring.copy();
        let known = &self.regions[self.region];
        let region = known.region.upgrade().ok_or_else(|| {
            let found = format!("{}, which was closed", known.id);
            violation("region", found, "one that is open")
        })?;
        let checked = copy.check(region.bytes())?;
        let slot = SampleSlot {
            address: region.ptr() + checked.slot,
            region,
        };
        let follows = match self.last_sequence {
            0 => checked.sequence > 0,
            last if self.link.lossless => last.checked_add(1) == Some(checked.sequence),
            last => checked.sequence > last,
        };
        if !follows {
            let allowed = match self.link.lossless {
                true => "the next after",
                false => "more than",
            };
            let allowed = format!("{allowed} {}", self.last_sequence);
            return Err(violation("sequence", checked.sequence, allowed));
        }
        Ok((slot, checked))
    }

    /// Closes the link because of the sender's violation.
    pub(crate) fn fail(&self, violation: Violation) -> Error {
        self.link.fail(self.link.violation(violation));
        self.link.why_over()
    }
}

impl Drop for LinkReceiver {
    /// Asks for no more samples.
    fn drop(&mut self) {
        if let Some(taken) = self.taken.take() {
            self.link.give_back(taken.position);
        }
        self.link.leave();
    }
}
