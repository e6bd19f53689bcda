//! The sending end of one link, named after its peer: the publisher's record of one subscriber. A
//! subscriber that sends replies has one, too.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::io::Errno;

use super::options::{Policy, SubscriberInfo};
use crate::backend::{DeviceId, StreamOp};
use crate::clock::now_ns;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::PeerState;
use crate::ipc::acceptor::refusal;
use crate::ipc::limits::QuotaPermit;
use crate::ipc::message::{self, CloseReason, Message};
use crate::memory::arena::{Chunk, SlotId};
use crate::os::is_shortage;
use crate::pubsub::entry::{PackedEntry, words_of};
use crate::pubsub::link_end::LinkEnd;
use crate::pubsub::publisher_link::PublisherLink;
use crate::pubsub::ring::SenderRing;
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::Registration;
use crate::shm::page::SharedPage;
use crate::shm::segment::{Header, Segment};
use crate::statistics::{LinkRow, LinkState, LinkWords};

/// The phase of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkPhase {
    /// The subscriber maps the regions; it gets no samples yet.
    Attaching,
    /// The subscriber waits for the history, until the sample being sent is out.
    Joining,
    /// The subscriber gets samples.
    Live,
    /// The subscriber gets no more samples. The link is removed when all held samples are released.
    Leaving,
    /// The socket closed without a `Close` message. Held samples stay untouched until the
    /// subscriber's death is proven.
    Suspect,
}

/// The publisher's record of one subscriber.
///
/// In this order in memory: all that a send needs of a link comes first, in two cache lines, or
/// three where it begins in the middle of one. A send to many touches these lines of all links.
#[derive(Debug)]
#[repr(C)]
pub(super) struct SubscriberLink {
    pub(super) id: u64,
    pub(super) policy: Policy,
    pub(super) ring: SenderRing,
    /// The position that was found free last, until a sample is published: a free position stays
    /// free. 0 for none, as below.
    free: Cell<u64>,
    /// The position of the sample that is being sent, or was sent last; 0 if the subscriber does
    /// not get it.
    placed: u64,
    /// The samples that the subscriber was given and has not yet released, oldest first.
    in_flight: VecDeque<(u64, SlotId)>,
    pub(super) phase: LinkPhase,
    /// The subscriber lives in this process.
    pub(super) is_local: bool,
    /// The subscriber belongs to another user, which has no other way to write this process's
    /// memory.
    pub(super) is_foreign: bool,
    /// The subscriber sleeps and has to be woken.
    sleeps: bool,
    /// Declared before the descriptors: a registration ends before its descriptor is closed.
    pub(super) registrations: Vec<Registration>,
    /// Samples that the subscriber has set aside: the slots of positions that it has not returned.
    /// `None` where it may not.
    set_aside: Option<HashMap<u64, SlotId>>,
    /// Counts from the welcome on.
    pub(super) clock: Uptime,
    /// The regions that it was told of and has not closed, and whether it was asked to close each.
    regions: Vec<(u32, bool)>,
    /// It was told of all regions with lower ids.
    next_region: u32,
    /// The metadata page, once a sample needed it.
    cells: Option<SharedPage>,
    /// Samples that it did not get because of its policy.
    pub(super) dropped: u64,
    /// Its share of the publisher's connection limits: held, not used.
    pub(super) quota_permit: Option<Arc<QuotaPermit>>,
    /// This end has closed it: what was sent before stays, whatever becomes of the socket.
    has_closed: bool,
    /// The receiver of the link's other ring.
    pub(super) partner: Option<Arc<PublisherLink>>,
    /// The ring of the replies, and the device of their sender, until the link is live.
    pub(super) replies: Option<(Segment, DeviceId)>,
    /// The positions that were taken back when it left.
    untaken: Vec<u64>,
    pub(super) end: LinkEnd,
    /// The segment's file, until the link is live.
    pub(super) segment_fd: Option<CloseOnForkFd>,
    /// Its row of this process's statistics page, once it is in the list.
    pub(super) row: Option<LinkRow>,
}

const _: () = assert!(
    std::mem::offset_of!(SubscriberLink, registrations) <= 128,
    "what a send touches of a link lies in two cache lines: put the field behind `registrations`"
);

impl SubscriberLink {
    /// A link that has not sent anything. Drop it on the reaper: it holds registered memory.
    pub(super) fn new(
        id: u64,
        end: LinkEnd,
        segment: Segment,
        policy: Policy,
        may_set_aside: bool,
    ) -> SubscriberLink {
        SubscriberLink {
            id,
            phase: LinkPhase::Attaching,
            policy,
            is_local: end.peer.is_own(),
            is_foreign: end.peer.uid != rustix::process::geteuid().as_raw(),
            ring: SenderRing::new(Arc::new(segment)),
            set_aside: may_set_aside.then(HashMap::new),
            free: Cell::new(0),
            placed: 0,
            clock: Uptime::default(),
            registrations: Vec::new(),
            in_flight: VecDeque::new(),
            regions: Vec::new(),
            next_region: 0,
            cells: None,
            dropped: 0,
            quota_permit: None,
            has_closed: false,
            partner: None,
            replies: None,
            untaken: Vec::new(),
            sleeps: false,
            end,
            segment_fd: None,
            row: None,
        }
    }

    /// Whether the receiver of the other ring, if there is one, gets no more.
    pub(super) fn has_partner_ended(&self) -> bool {
        self.partner
            .as_ref()
            .is_none_or(|partner| partner.ended().is_some())
    }

    /// Whether its socket is still read: a message of the peer may be for this end or its partner.
    pub(super) fn reads_socket(&self) -> bool {
        !self.has_closed || self.partner.is_some() || !self.registrations.is_empty()
    }

    /// Sends nothing more. What was sent can still be taken.
    pub(super) fn close(&mut self) {
        self.end.say_close(CloseReason::Closed);
        self.has_closed = true;
    }

    /// Sends `welcome` with the link's descriptors, `their_wake` is the peer's end of the wake
    /// channel, and every region so far.
    pub(super) fn welcome(
        &mut self,
        welcome: &Message,
        their_wake: CloseOnForkFd,
        completions: Option<(u64, BorrowedFd<'_>)>,
        chunks: &[Chunk],
    ) -> std::result::Result<(), Errno> {
        let fds = self.segment_fd.iter().chain([&their_wake]).map(AsFd::as_fd);
        message::send(self.end.socket(), welcome, &fds.collect::<Vec<_>>())?;
        let heartbeat = &self.header().sender.heartbeat_ns;
        heartbeat.store(now_ns(), Relaxed);
        if let Some((bytes, fd)) = completions {
            message::send(self.end.socket(), &Message::Completions { bytes }, &[fd])?;
        }
        self.announce(chunks)
    }

    pub(super) fn is_live(&self) -> bool {
        self.phase == LinkPhase::Live
    }

    /// Whether the subscriber gets samples, or is about to.
    pub(super) fn is_staying(&self) -> bool {
        !matches!(self.phase, LinkPhase::Leaving | LinkPhase::Suspect)
    }

    /// Where the next sample can go. Computed once for each sample: the words that decide it are in
    /// the reader's cache.
    #[inline]
    pub(super) fn room(&self) -> Option<u64> {
        if self.free.get() == 0 {
            self.free.set(self.ring.space().unwrap_or_default());
        }
        Some(self.free.get()).filter(|&position| position != 0)
    }

    /// Ends a link that has not been live, with the reason.
    pub(super) fn refuse(&mut self, reason: impl ToString) {
        let _ = message::send(self.end.socket(), &refusal(false, reason), &[]);
        self.leave(None);
    }

    /// Brings the subscriber up to these regions: asks it to close those that are gone, and, unless
    /// the link leaves or is closed, sends the descriptors of those that are new.
    ///
    /// # Errors
    /// Either [`is_shortage`](crate::os::is_shortage), and the rest is repeated later; or the
    /// subscriber does not read its socket.
    pub(super) fn announce(&mut self, chunks: &[Chunk]) -> std::result::Result<(), Errno> {
        let socket = self.end.socket.clone();
        let is_gone = |id: u32| chunks.binary_search_by_key(&id, |chunk| chunk.id).is_err();
        for (id, is_closing) in &mut self.regions {
            if !*is_closing && is_gone(*id) {
                message::send(socket.as_fd(), &Message::CloseRegion { id: *id }, &[])?;
                *is_closing = true;
            }
        }
        if !self.is_staying() || self.has_closed {
            return Ok(());
        }
        let known = chunks.partition_point(|chunk| chunk.id < self.next_region);
        for chunk in &chunks[known..] {
            let (id, bytes) = (chunk.id, chunk.region.bytes());
            let region = Message::Region { id, bytes };
            message::send(socket.as_fd(), &region, &[chunk.export.as_fd()])?;
            self.regions.push((id, false));
            self.next_region = id + 1;
        }
        Ok(())
    }

    /// Makes the metadata page and sends it, unless the subscriber has it. One that does not read
    /// its socket loses its link.
    ///
    /// # Errors
    /// This process lacks resources for the page or the message.
    pub(super) fn make_cells(&mut self, name: &str) -> Result<()> {
        if self.cells.is_some() {
            return Ok(());
        }
        let (page, fd) = SharedPage::publish(None, self.ring.segment().cells_bytes())?;
        match message::send(self.end.socket(), &Message::MetadataPage, &[fd.as_fd()]) {
            Ok(()) => self.cells = Some(page),
            Err(error) if is_shortage(error) => {
                let context = format!("metadata of {name:?}, to process {}", self.end.peer.pid);
                return Err(Error::os("sendmsg", context, error));
            }
            Err(_) => self.leave(Some(CloseReason::Evicted(
                "it does not read its socket".into(),
            ))),
        }
        Ok(())
    }

    /// Whether the subscriber may have the region mapped.
    pub(super) fn has_region(&self, id: u32) -> bool {
        self.regions.iter().any(|&(known, _)| known == id)
    }

    /// The subscriber has closed a region. False if it was not asked to.
    pub(super) fn remove_closed_region(&mut self, id: u32) -> bool {
        let before = self.regions.len();
        self.regions.retain(|&region| region != (id, true));
        self.regions.len() < before
    }

    /// Ends the subscription: takes back the samples that were not taken, and waits for the rest.
    pub(super) fn leave(&mut self, close_reason: Option<CloseReason>) {
        if let Some(close_reason) = close_reason {
            self.end.say_close(close_reason);
        }
        self.phase = LinkPhase::Leaving;
        match (self.has_closed, self.end.is_of_replies) {
            (false, _) => self.untaken.extend(self.ring.revoke_all()),
            // Owners of tensors do not wait for samples that are not taken.
            (true, false) => drop(self.ring.revoke_all()),
            // What was sent can still be taken: the socket's end says nothing of this ring.
            (true, true) => {}
        }
    }

    /// The samples that it had been given and had not taken when it left, each returned once: its
    /// id and the position.
    pub(super) fn take_untaken(&mut self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (id, untaken) = (self.id, std::mem::take(&mut self.untaken));
        untaken.into_iter().map(move |position| (id, position))
    }

    /// The operation that marks this subscriber's sample at `position` ready.
    pub(super) fn ready_op(&self, position: u64) -> StreamOp {
        StreamOp::Signal {
            word: self.ring.segment().ready_word(position),
            value: position,
        }
    }

    /// The position of the sample that is being sent, or was sent last, if the subscriber gets it.
    #[inline]
    pub(super) fn placed(&self) -> Option<u64> {
        Some(self.placed).filter(|&position| position != 0)
    }

    /// Finds the place of the sample that is being sent, if the subscriber `is_recipient`, by its
    /// policy: `None` drops the sample for this subscriber.
    #[inline]
    pub(super) fn place(&mut self, is_recipient: bool, free: impl FnMut(SlotId)) -> Option<u64> {
        let place = match is_recipient && self.is_live() {
            true => self.room().or_else(|| self.make_room(free)),
            false => None,
        };
        self.placed = place.unwrap_or_default();
        place
    }

    #[cold]
    fn make_room(&mut self, mut free: impl FnMut(SlotId)) -> Option<u64> {
        self.count_drop();
        let revoked = match self.policy {
            Policy::DropOldest => self.ring.revoke_oldest_complete()?,
            _ => return None,
        };
        if let Some(slot) = self.take_in_flight(revoked) {
            free(slot);
        }
        let room = self.room();
        if room.is_none() {
            self.count_drop();
        }
        room
    }

    fn take_in_flight(&mut self, position: u64) -> Option<SlotId> {
        let found = self
            .in_flight
            .binary_search_by_key(&position, |&(it, _)| it);
        self.in_flight.remove(found.ok()?).map(|(_, slot)| slot)
    }

    fn count_drop(&mut self) {
        self.dropped += 1;
        self.header().sender.dropped.store(self.dropped, Relaxed);
    }

    fn header(&self) -> &Header {
        self.ring.segment().header()
    }

    /// Publishes the sample at its [place](Self::placed), or gives the place up if the link has
    /// left since. Returns the position if it is published. If the subscriber sleeps, the next
    /// [`wake_sleeper`](Self::wake_sleeper) wakes it; for one of several subscribers,
    /// [`fence_published`](crate::pubsub::ring::fence_published) and
    /// [`look_whether_it_sleeps`](Self::look_whether_it_sleeps) come before that. `is_complete`:
    /// see [`SenderRing::publish`].
    #[inline]
    pub(super) fn publish(
        &mut self,
        slot: SlotId,
        packed: &PackedEntry,
        is_complete: bool,
        is_for_many: bool,
    ) -> Option<u64> {
        let position = self.placed()?;
        if !self.is_live() {
            self.ring.forgo(position);
            if is_complete {
                self.ring.segment().entry(position).ready.store(position);
            }
            return None;
        }
        self.free.set(0);
        if self.set_aside.is_some() {
            self.keep_what_is_set_aside(position);
        }
        self.in_flight.push_back((position, slot));
        if let (Some(bytes), Some(cells)) = (packed.long(), &self.cells) {
            // As the entry's words, before the state word.
            let cell = self.ring.segment().cell(cells, position);
            cell.iter()
                .zip(words_of(bytes))
                .for_each(|(word, value)| word.store(value, Relaxed));
        }
        if is_for_many {
            self.ring
                .publish_to_one_of_many(position, packed, is_complete);
        } else {
            self.sleeps |= self.ring.publish(position, packed, is_complete);
        }
        if !is_complete {
            // The next entry's lines come while the driver's call and the next sample are made. Not
            // where CPUs do all the work: there the subscriber polls that entry, and would have to
            // fetch it back.
            self.ring.segment().fetch_early(position + 1);
        }
        Some(position)
    }

    #[inline]
    pub(super) fn look_whether_it_sleeps(&mut self) {
        self.sleeps |= self.placed != 0 && self.ring.is_receiver_asleep();
    }

    /// Before the entry of `position` is used again: the sample that lay there last may be set
    /// aside, which only the entry says.
    fn keep_what_is_set_aside(&mut self, position: u64) {
        let last = self.ring.last_at(position);
        if self.ring.is_set_aside(last)
            && let Some(slot) = self.take_in_flight(last)
            && let Some(set_aside) = &mut self.set_aside
        {
            set_aside.insert(last, slot);
        }
    }

    /// Wakes the subscriber if it slept when it was last given a sample.
    #[inline]
    pub(super) fn wake_sleeper(&mut self) {
        if std::mem::take(&mut self.sleeps) {
            self.end.peer_doorbell.ring();
        }
    }

    /// Reclaims the slots that this subscriber has released. `thorough` also looks behind a sample
    /// that is held long.
    #[inline]
    pub(super) fn reclaim(&mut self, thorough: bool, mut free: impl FnMut(SlotId)) {
        let SubscriberLink {
            ring,
            set_aside,
            in_flight,
            ..
        } = self;
        if ring.is_receiver_dead() {
            let kept = set_aside.iter_mut().flat_map(HashMap::drain);
            kept.for_each(|(_, slot)| free(slot));
        }
        let mut take_over = |&(position, slot): &(u64, SlotId)| {
            if !ring.is_over(position) {
                return false;
            }
            match set_aside {
                Some(set_aside) if ring.is_set_aside(position) => {
                    set_aside.insert(position, slot);
                }
                _ => free(slot),
            }
            true
        };
        while in_flight.front().is_some_and(&mut take_over) {
            in_flight.pop_front();
        }
        if thorough {
            in_flight.retain(|sample| !take_over(sample));
        }
    }

    /// The subscriber is done with a sample that it set aside. `None` if it has set no such sample
    /// aside: reclaim first.
    pub(super) fn take_back(&mut self, position: u64) -> Option<SlotId> {
        self.set_aside.as_mut()?.remove(&position)
    }

    /// Slots given and not yet released.
    pub(super) fn holds(&self) -> impl Iterator<Item = SlotId> + '_ {
        let set_aside = self.set_aside.iter().flatten().map(|(_, &slot)| slot);
        self.in_flight
            .iter()
            .map(|&(_, slot)| slot)
            .chain(set_aside)
    }

    /// Called with each tick: writes this end's heartbeat, and checks the subscriber's.
    pub(super) fn beat(&self, now_ns: u64) {
        let header = self.header();
        let (own, peers) = (&header.sender.heartbeat_ns, &header.receiver.heartbeat_ns);
        self.end.beat(now_ns, own, peers);
    }

    /// How long the subscriber has given no sign of life.
    pub(super) fn silence(&self) -> Duration {
        self.end.peer_heartbeat.silence()
    }

    /// Samples given and not yet released.
    pub(super) fn in_flight(&self) -> u64 {
        let set_aside = self.set_aside.as_ref().map_or(0, HashMap::len);
        (self.in_flight.len() + set_aside) as u64
    }

    /// Writes its row of the statistics page: called with each tick.
    pub(super) fn write_statistics(&self) {
        let Some(row) = &self.row else { return };
        let is_asleep = || self.header().receiver.asleep.load(Relaxed) != 0;
        let state = match self.info().state {
            PeerState::Dead => LinkState::Dead,
            PeerState::Suspect => LinkState::Suspect,
            PeerState::Leaving => LinkState::Leaving,
            PeerState::Stalled => LinkState::Stalled,
            PeerState::Alive if !self.is_live() => LinkState::Attaching,
            PeerState::Alive if is_asleep() => LinkState::Waiting,
            PeerState::Alive => LinkState::Active,
        };
        row.set(&LinkWords {
            state,
            in_flight: self.in_flight(),
            dropped: self.dropped,
            silent_ms: self.silence().as_millis() as u64,
        });
    }

    pub(super) fn info(&self) -> SubscriberInfo {
        let ended = match self.phase {
            LinkPhase::Suspect => Some(PeerState::Suspect),
            LinkPhase::Leaving => Some(PeerState::Leaving),
            LinkPhase::Attaching | LinkPhase::Joining | LinkPhase::Live => None,
        };
        SubscriberInfo {
            pid: self.end.peer.pid,
            uid: self.end.peer.uid,
            state: self.end.peer_state(ended),
            silent_for: self.silence(),
            in_flight: self.in_flight() as u32,
            dropped: self.dropped,
        }
    }
}
