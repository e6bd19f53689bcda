//! The receiver of one ring: takes, checks and admits the samples of one link. A subscriber has one
//! while it is attached to a publisher; a queue has one for the replies of each worker.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::backend::DevicePtr;
use crate::error::{Error, ErrorKind, Result};
use crate::ipc::Kind;
use crate::ipc::domain::Domain;
use crate::memory::region::{Kept, Region};
use crate::pubsub::entry::{Head, Metadata, Violation, violation};
use crate::pubsub::observer::{LinkedSubscriber, Reply, ReplyLink};
use crate::pubsub::parts;
use crate::pubsub::place::{Asked, Place};
use crate::pubsub::publisher_link::{Admission, ConnectOptions, Ended, OpenMemory, PublisherLink};
use crate::pubsub::ring::ReceiverRing;
use crate::pubsub::sample::{
    Discontinuity, PreviousPublisher, RawSample, Receipt, Sample, TensorLocation,
};
use crate::runtime::heartbeat::Uptime;
use crate::shm::segment::DEPTH_MAX;
use crate::statistics::{EndpointRow, EndpointWords, Role};
use crate::stream::Stream;

/// How much memory of samples that are not in their slots is kept open for later ones, at least; as
/// much as one sample has had, if that is more.
const OPEN_MIN: usize = 8;

/// How long a sample's region may take to arrive behind the sample itself, while this process runs.
const REGION_TIMEOUT: Duration = Duration::from_secs(2);

/// A subscriber's link to its present publisher, or a receiver of replies.
#[derive(Debug)]
pub(crate) struct LinkReceiver {
    pub(super) link: Arc<PublisherLink>,
    pub(super) ring: ReceiverRing,
    /// The link's regions, by their ids, as they were when one was last looked for in vain.
    regions: Vec<(u32, Weak<Region>)>,
    /// The index in `regions` of that of the entry that was copied last.
    region: usize,
    /// The number of the sample that was taken last, lost or not; 0 for none.
    last_sequence: u64,
    /// The number of the sample that the subscriber received last, also over an earlier link to the
    /// same source; 0 for none.
    pub(super) last_received: u64,
    /// How many samples of this link were received over an earlier one. No history is longer than a
    /// ring, so beyond [`DEPTH_MAX`] the source's numbers have begun anew.
    repeated: u32,
    /// A sample was found without its region, of this number, or without the page of its metadata;
    /// and the time since then.
    pub(super) region_missing: Option<(Option<u32>, Uptime)>,
    /// A sample taken from the ring that the device refused to wait for, or that is to be
    /// [opened](Self::open_taken). It is the next to be admitted.
    pub(super) taken: Option<RawSample>,
    /// Memory of `taken`, while its owner is asked for it.
    pub(super) asked: Option<Asked>,
    /// What is open of its memory.
    opened: Vec<OpenMemory>,
    /// The memory that samples were opened in last, which the next ones mostly lie in: the driver
    /// takes long to open memory.
    open: VecDeque<OpenMemory>,
    /// The most of it: what one sample has had.
    open_max: usize,
    /// See [`Sample::released_before`].
    released_before: u64,
    /// The subscriber's row of this process's statistics page.
    row: Arc<EndpointRow>,
}

impl LinkedSubscriber {
    /// The receiver of its replies; `None` if it sends none. There is one for each subscriber.
    pub(crate) fn receive_replies(&self, name: &str, domain: &Domain) -> Option<LinkReceiver> {
        let link = self.replies.clone()?;
        let row = Arc::new(EndpointRow::open(&EndpointWords {
            kind: Kind::Results,
            role: Role::Peer,
            name,
            domain: domain.identity(),
            device: None,
            generation: link.terms.generation,
            depth: 0,
            memory_max: 0,
        }));
        Some(LinkReceiver::new(link, 0, row))
    }
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

impl LinkReceiver {
    /// `last_received`: the number of the sample that the subscriber received last over an earlier
    /// link to the same source; 0 for none.
    pub(super) fn new(
        link: Arc<PublisherLink>,
        last_received: u64,
        row: Arc<EndpointRow>,
    ) -> LinkReceiver {
        LinkReceiver {
            ring: ReceiverRing::new(link.segment.clone()),
            link,
            regions: Vec::new(),
            region: 0,
            last_sequence: 0,
            last_received,
            repeated: 0,
            region_missing: None,
            taken: None,
            asked: None,
            opened: Vec::new(),
            open: VecDeque::new(),
            open_max: OPEN_MIN,
            released_before: 0,
            row,
        }
    }

    /// Whether [`poll`](Self::poll) would find nothing and change nothing: a few words are read, so
    /// that a thread that polls sees the next sample early.
    #[inline]
    pub(super) fn is_quiet(&self) -> bool {
        self.taken.is_none() && self.region_missing.is_none() && !self.may_have_news()
    }

    /// The sample that is received next comes behind the release of this one, if there is one.
    pub(super) fn note_released(&mut self, previous: Option<&Sample>) {
        let position = previous.and_then(|it| it.position_in(&self.link));
        self.released_before = position.unwrap_or_default();
    }

    /// The next sample, if there is one, for `stream`, which waits for its data. None also if the
    /// next one is to be [opened](Self::open_taken) first. The error at the link's end comes behind
    /// the last sample. `previous` is released in front of a wait: in the same call of the driver
    /// if it is of this link.
    #[inline]
    pub(super) fn poll(
        &mut self,
        stream: &Stream,
        previous: &mut Option<Sample>,
        ended: &mut Option<EndedLink>,
    ) -> Result<Option<Sample>> {
        while let Some(taken) = self.next()? {
            if taken.location == TensorLocation::Unopened {
                self.taken = Some(taken);
                return Ok(None);
            }
            if self.released_before == 0 {
                *previous = None;
            }
            let released = previous.as_ref().map(|_| self.released_before);
            match self.link.admit(taken.receipt.position, stream, released) {
                // It is lost, and needs no memory.
                Ok(Admission::Lost) => self.opened.clear(),
                Ok(admission) => {
                    if admission == Admission::Awaited
                        && let Some(previous) = previous
                    {
                        previous.set_released();
                    }
                    let gap = self.break_before(taken.receipt.sequence, ended);
                    let mut sample = taken.into_sample(stream);
                    if gap.is_some() {
                        sample.raw.rare.get_or_insert_default().discontinuity = gap;
                    }
                    sample.released_before = self.released_before;
                    if sample.info().is_in_place {
                        let opened = std::mem::take(&mut self.opened);
                        sample.raw.rare.get_or_insert_default().memory = opened;
                    }
                    if let Some(latency_ns) = sample.latency_ns() {
                        self.row.time(latency_ns);
                    }
                    return Ok(Some(sample));
                }
                Err(error) => {
                    self.taken = Some(taken);
                    return Err(error);
                }
            }
        }
        Ok(None)
    }

    /// Opens the memory of the sample that was taken, if it does not lie in its slot and is not
    /// open: without a lock, because the driver may take long. False if there is none to open. A
    /// sample that cannot be opened is released; it is lost if its memory is gone with its sender.
    /// It stays the next while the owner of its memory is asked ([`Error::Timeout`]), and also if
    /// that owner does not answer in time.
    pub(super) fn open_taken(&mut self, at: &ConnectOptions) -> Result<bool> {
        let is_unopened = |taken: &mut RawSample| taken.location == TensorLocation::Unopened;
        let Some(mut taken) = self.taken.take_if(is_unopened) else {
            return Ok(false);
        };
        match self.open(&mut taken, at) {
            Ok((address, metadata)) => taken.open_at(address, metadata),
            Err(error) if error.kind() == ErrorKind::Timeout => {
                self.taken = Some(taken);
                return Err(error);
            }
            Err(error) => {
                self.opened.clear();
                // It is given back once its data is complete.
                self.link.keep(taken.receipt.position);
                return Err(match error.kind() {
                    ErrorKind::PeerGone => self.link.lost(taken.receipt.sequence),
                    _ => error,
                });
            }
        }
        self.taken = Some(taken);
        Ok(true)
    }

    /// Opens the memory of a sample, or of those of its parts that are not open: the sample's
    /// address and the user's metadata.
    fn open(
        &mut self,
        taken: &mut RawSample,
        at: &ConnectOptions,
    ) -> Result<(DevicePtr, Metadata)> {
        if taken.parts().is_empty() {
            let read = Place::read(taken.metadata());
            let (place, metadata) = read.map_err(|violation| self.fail(violation))?;
            let address = self.open_place(&place, taken.layout.bytes(), at)?;
            return Ok((address, Metadata::new(metadata)?));
        }
        let (slot, bytes) = (taken.address, taken.layout.bytes());
        let metadata = taken.metadata.clone();
        let read = parts::read(metadata.as_bytes(), slot, bytes);
        let list = read.map_err(|violation| self.fail(violation))?;
        let parts = taken.rare.iter_mut().flat_map(|rare| &mut rare.parts);
        for (part, place) in parts.zip(&list.places) {
            if let (0, Some(place)) = (part.slot_ptr, place) {
                part.slot_ptr = self.open_place(place, part.layout.bytes(), at)?;
                part.ptr = part.slot_ptr + part.layout.offset();
            }
        }
        Ok((slot, list.metadata()))
    }

    fn open_place(
        &mut self,
        place: &Place<'_>,
        bytes: u64,
        at: &ConnectOptions,
    ) -> Result<DevicePtr> {
        let (own, asked) = ((&at.domain, &at.device), &mut self.asked);
        let (address, memory) = place.open(bytes, own, asked, &at.doorbell)?;
        if let Some(memory) = memory {
            let memory = self.keep_open(memory)?;
            self.opened.push(memory);
        }
        Ok(address)
    }

    /// Keeps memory open for the next samples, too.
    fn keep_open(&mut self, memory: Kept) -> Result<OpenMemory> {
        let is_it = |open: &OpenMemory| ptr::addr_eq(Arc::as_ptr(&***open), Arc::as_ptr(&memory));
        let known = self.open.iter().position(is_it);
        let memory = match known.and_then(|index| self.open.remove(index)) {
            Some(known) => known,
            None => self.link.hold(memory)?,
        };
        self.open.push_back(memory.clone());
        self.open_max = self.open_max.max(self.opened.len() + 1);
        if self.open.len() > self.open_max {
            self.open.pop_front();
        }
        Ok(memory)
    }

    /// The next sample that belongs to this end, if there is one: neither admitted nor kept.
    #[inline]
    fn next(&mut self) -> Result<Option<RawSample>> {
        // Read before the ring: samples sent before the end must be found before the end is
        // reported.
        let ended = self.link.ended();
        if ended == Some(Ended::Failed) {
            return Err(self.link.why_over());
        }
        if let Some(kept) = self.taken.take() {
            return Ok(Some(kept));
        }
        match self.take_new() {
            Ok(None) if ended.is_none() || self.is_region_due() => {
                self.check_missing_region().map(|()| None)
            }
            Ok(None) => Err(self.link.why_over()),
            Ok(taken) => Ok(taken),
            Err(violation) => Err(self.fail(violation)),
        }
    }

    /// The break before the sample with this number, which the subscriber receives now. Numbers of
    /// samples that were taken and lost are missing as well.
    #[inline]
    fn break_before(
        &mut self,
        sequence: u64,
        ended: &mut Option<EndedLink>,
    ) -> Option<Discontinuity> {
        let last = std::mem::replace(&mut self.last_received, sequence);
        // Also a first sample that is the publisher's first.
        if sequence.wrapping_sub(last) == 1 && ended.is_none() {
            return None;
        }
        self.find_break(last, sequence, ended.take())
    }

    #[cold]
    fn find_break(
        &self,
        last: u64,
        sequence: u64,
        ended: Option<EndedLink>,
    ) -> Option<Discontinuity> {
        let missing = match last {
            // Before the first sample of a source nothing is missing.
            0 => 0,
            last => sequence.saturating_sub(last).saturating_sub(1),
        };
        let is_break = missing > 0 || ended.is_some();
        // An evicted subscriber may find the same publisher again.
        let is_another = |ended: &EndedLink| ended.generation != self.link.terms.generation;
        let previous = ended.filter(is_another).map(|ended| ended.publisher);
        is_break.then_some(Discontinuity { missing, previous })
    }

    /// Takes and checks the next sample in the ring that this subscriber has not received before.
    fn take_new(&mut self) -> Result<Option<RawSample>, Violation> {
        while let Some(position) = self.take_entry()? {
            let taken = self.check(position)?;
            let sequence = taken.receipt.sequence;
            if sequence <= self.last_received && self.repeated < DEPTH_MAX {
                // Received over an earlier link: it is given back, and the user does not see it.
                self.repeated += 1;
                self.link.keep(position);
                continue;
            }
            self.row.count(sequence, taken.layout.bytes());
            return Ok(Some(taken));
        }
        Ok(None)
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
        let taken = ring.take(|(copy, position)| {
            if copy.is_long() {
                let Some(cells) = link.cells() else {
                    missing = Some(None);
                    return false;
                };
                copy.copy_long(link.segment.cell(cells, position));
            }
            let id = copy.region();
            let find = |regions: &[(u32, _)]| regions.binary_search_by_key(&id, |it| it.0);
            let found = find(regions).or_else(|_| {
                let open = link.regions();
                let known = open
                    .iter()
                    .map(|(id, region)| (*id, Arc::downgrade(region)));
                *regions = known.collect();
                find(regions)
            });
            match found {
                Ok(index) => *region = index,
                Err(_) => missing = Some(Some(id)),
            }
            found.is_ok()
        });
        // An entry may be taken back while its region is missing: then none is.
        match missing {
            None => *region_missing = None,
            Some(what) => region_missing.get_or_insert_default().0 = what,
        }
        taken
    }

    /// Whether a sample waits for its region, which has been announced but not mapped yet.
    pub(super) fn is_region_due(&self) -> bool {
        let Some((id, _)) = self.region_missing else {
            return false;
        };
        // In this order: the region may have been mapped since the ring was polled, and then it is
        // no longer being mapped.
        self.link.is_mapping()
            || match id {
                Some(id) => self.link.regions().iter().any(|it| it.0 == id),
                None => self.link.cells().is_some(),
            }
    }

    /// There is no sample to take: either none was sent, or its region has not arrived yet, which
    /// is tolerated for [`REGION_TIMEOUT`]. A publisher announces a region before it sends a sample
    /// there: that time begins when none of its messages is unread (the thread that reads them may
    /// be in a call of the driver) and no region is being mapped.
    pub(super) fn check_missing_region(&mut self) -> Result<()> {
        let Some((id, clock)) = &self.region_missing else {
            return Ok(());
        };
        if clock.ran() <= REGION_TIMEOUT {
            return Ok(());
        }
        if self.link.has_unread() || self.is_region_due() {
            self.region_missing = Some((*id, Uptime::default()));
            return Ok(());
        }
        let (field, found, allowed) = match id {
            Some(id) => {
                let allowed = format!("one of the {} that are open", self.regions.len());
                (
                    "region",
                    format!("{id}, never announced or closed"),
                    allowed,
                )
            }
            None => (
                "metadata",
                "in a page that was not sent".into(),
                "one that was".into(),
            ),
        };
        Err(self.fail(violation(field, found, allowed)))
    }

    /// Checks the entry at `position`, which was taken last.
    fn check(&mut self, position: u64) -> Result<RawSample, Violation> {
        let (id, region) = &self.regions[self.region];
        let region = region.upgrade().ok_or_else(|| {
            let found = format!("{id}, which was closed");
            violation("region", found, "one that is open")
        })?;
        let checked = self.ring.copy().check(region.bytes())?;
        let last = self.last_sequence;
        let sequence = checked.sequence;
        let lossless = self.link.terms.lossless;
        let follows = match last {
            0 => sequence > 0,
            last if lossless => last.checked_add(1) == Some(sequence),
            last => sequence > last,
        };
        if !follows {
            let allowed = match lossless {
                true => "the next after",
                false => "more than",
            };
            return Err(violation("sequence", sequence, format!("{allowed} {last}")));
        }
        // Set whatever happens to the sample: one that its publisher left incomplete is lost, and
        // the next one follows it.
        self.last_sequence = sequence;
        if let Some(completion) = checked.completion {
            self.link.monitor.note_completion(position, completion)?;
        }
        let receipt = Receipt {
            link: self.link.clone(),
            position,
            sequence,
            is_set_aside: false,
        };
        let has_parts = checked.head == Head::Parts;
        let mut taken = RawSample::new(receipt, region, checked);
        if has_parts {
            taken.read_parts()?;
        }
        Ok(taken)
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
    pub(crate) fn drain(&self) {
        self.link.end.peer_doorbell.drain();
    }
}

impl ReplyLink for LinkReceiver {
    type Reply = RawSample;

    fn take(&mut self) -> Result<Option<RawSample>> {
        let taken = self.next()?;
        if taken
            .as_ref()
            .is_some_and(|taken| taken.location != TensorLocation::InSlot)
        {
            return Err(self.fail(violation("flags", "a tensor in place", "a slot")));
        }
        Ok(taken.inspect(|taken| self.link.keep(taken.receipt.position)))
    }

    fn fail(&self, violation: Violation) -> Error {
        let Violation {
            field,
            found,
            allowed,
        } = violation;
        let name = &self.link.terms.name;
        self.link.fail(Error::protocol(name, field, found, allowed));
        self.link.why_over()
    }

    fn is_sender_dead(&self) -> bool {
        self.link.is_dead()
    }

    #[inline]
    fn may_have_news(&self) -> bool {
        self.ring.may_have_news() || self.link.ended().is_some()
    }
}

impl Drop for LinkReceiver {
    /// Asks for no more samples.
    fn drop(&mut self) {
        self.taken = None;
        self.link.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::device::Device;
    use crate::pubsub::{Publisher, Subscriber};
    use crate::runtime::heartbeat::Uptime;
    use crate::tensor::Layout;

    /// A publisher has sent a sample in new memory and is gone. Its last region is mapped between
    /// the subscriber's poll of the ring and its check whether a region is still due.
    #[test]
    fn a_sample_whose_region_is_mapped_this_very_moment_is_not_lost_to_a_goodbye() {
        let folder = std::env::temp_dir().join(format!("warpipe-arrival-{}", std::process::id()));
        let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
        let stream = device.stream().unwrap();
        let publisher = Publisher::new("grows", domain.on(&device)).unwrap();
        let mut subscriber = Subscriber::open("grows", domain.on(&device), Duration::ZERO).unwrap();
        publisher
            .loan(&Layout::bytes_only(8).unwrap())
            .unwrap()
            .send(&stream)
            .unwrap();
        drop(publisher);
        let attached = subscriber.attached.as_mut().unwrap();
        let start = Instant::now();
        while attached.link.ended().is_none() || attached.link.is_mapping() {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
        assert!(attached.regions.is_empty(), "not looked at yet");
        attached.region_missing = Some((Some(0), Uptime::default()));
        assert!(attached.is_region_due());
        assert!(subscriber.take_raw_sample().unwrap().is_some());
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn a_region_is_not_late_while_this_process_stands_still() {
        let folder = std::env::temp_dir().join(format!("warpipe-late-{}", std::process::id()));
        let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
        let _publisher = Publisher::new("late", domain.on(&device)).unwrap();
        let mut subscriber = Subscriber::open("late", domain.on(&device), Duration::ZERO).unwrap();
        let attached = subscriber.attached.as_mut().unwrap();
        let (_, clock) = attached.region_missing.insert((Some(7), Uptime::default()));
        clock.freeze(Duration::from_secs(60));
        attached.check_missing_region().unwrap();
        let (_, clock) = attached.region_missing.as_ref().unwrap();
        clock.advance(Duration::from_secs(60));
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
