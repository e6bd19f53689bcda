//! The state of a publisher under its lock, and the turn to send.
//!
//! One thread of a publisher sends at a time, by a [`TimedLock`](crate::runtime::timed_lock) that
//! keeps the order of samples: its holder finds places, publishes entries, and enqueues signals
//! without the lock of the state. All other threads may read the state, take samples back and free
//! slots meanwhile.

use std::sync::{Arc, MutexGuard, Weak};

use super::PublisherCore;
use super::history::History;
use super::owners::Owners;
use super::slot_fences::SlotFences;
use crate::backend::StreamOp;
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::{Error, Result, StateFault};
use crate::ipc::message::CloseReason;
use crate::kind::Kind;
use crate::memory::arena::{Arena, SlotId};
use crate::memory::region::Region;
use crate::os::is_shortage;
use crate::pubsub::entry::{Description, Head, Metadata, PackedEntry};
use crate::pubsub::options::PublisherOptions;
use crate::pubsub::publisher_link::PublisherLink;
use crate::pubsub::subscriber_link::SubscriberLink;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::releasable::ReleasableGuard;
use crate::runtime::timed_lock::TimedGuard;
use crate::statistics::EndpointRow;
use crate::tensor::Layout;

/// What a send hands over.
#[derive(Debug, Clone, Copy)]
pub(in crate::pubsub) struct Given<'a> {
    pub(in crate::pubsub) slot: SlotId,
    pub(in crate::pubsub) layout: &'a Layout,
    pub(in crate::pubsub) metadata: &'a Metadata,
    /// What the metadata begins with.
    pub(in crate::pubsub) head: Head,
}

/// A region that the streams of its publisher work on.
pub(super) type HeldRegion = DropAfterFence<Arc<Region>>;

/// A region that was given back and may still be mapped, here or by subscribers.
pub(super) struct ClosingRegion {
    pub(super) id: u32,
    pub(super) bytes: u64,
    /// Without owners once no stream and no handle of this process needs the mapping.
    pub(super) own: Weak<Region>,
}

/// The recipients of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pubsub) enum Recipients {
    /// Every subscriber.
    All,
    /// The subscriber with this id.
    One(u64),
    /// The subscriber with this id, if it has room, while the slot stays held for others; or
    /// none.
    Keep(Option<u64>),
}

impl Recipients {
    #[inline]
    pub(super) fn include(self, link: &SubscriberLink) -> bool {
        match self {
            Recipients::All => true,
            Recipients::One(id) => link.id == id,
            Recipients::Keep(id) => id == Some(link.id) && link.room().is_some(),
        }
    }

    /// Whether a send must wait for room on this link.
    #[inline]
    pub(super) fn waits_for(self, link: &SubscriberLink) -> bool {
        self.include(link) && link.is_live() && link.policy.is_lossless() && link.room().is_none()
    }
}

pub(in crate::pubsub) struct PublisherState {
    pub(in crate::pubsub) arena: Arena,
    /// Their memory still counts against the limit.
    pub(super) closing: Vec<ClosingRegion>,
    /// Each region of the arena, unmapped behind a fence that is recorded after its last holder, a
    /// [`SlotHold`](crate::SlotHold) or the publisher, is gone.
    pub(super) regions: Vec<Arc<HeldRegion>>,
    /// Each from its welcome until it has left and holds no slot any more. All know all regions
    /// before a sample is placed: see [`announce`](Self::announce).
    pub(in crate::pubsub) links: Vec<SubscriberLink>,
    /// The regions have changed since they were last announced to every link.
    pub(super) must_announce: bool,
    /// For the observer, of links that are no longer in the list: see
    /// [`SubscriberLink::take_untaken`].
    pub(in crate::pubsub) untaken: Vec<(u64, u64)>,
    /// The samples that links which are no longer in the list did not get.
    dropped_before: u64,
    pub(super) history: History,
    pub(super) owners: Owners,
    /// Of the sample that is being sent. Only the holder of the turn uses these; their memory stays
    /// for the next send.
    pub(super) signals: Vec<StreamOp>,
    pub(super) packed: PackedEntry,
    pub(in crate::pubsub) next_sequence: u64,
    pub(in crate::pubsub) is_closed: bool,
    /// Its row of this process's statistics page.
    pub(in crate::pubsub) row: EndpointRow,
    /// A thread sends.
    pub(super) is_sending: bool,
    /// Loans since released slots were last reclaimed.
    pub(super) loans_since_reclaim: u32,
    /// How many loans had to wait for memory and got it.
    pub(super) awaited_loans: u64,
}

impl PublisherState {
    pub(super) fn new(
        options: &PublisherOptions,
        device: &Device,
        row: EndpointRow,
    ) -> PublisherState {
        PublisherState {
            arena: Arena::new(device, options.memory_limit),
            closing: Vec::new(),
            regions: Vec::new(),
            links: Vec::new(),
            must_announce: false,
            untaken: Vec::new(),
            dropped_before: 0,
            history: History::new(options.history),
            owners: Owners::default(),
            signals: Vec::new(),
            packed: PackedEntry::default(),
            next_sequence: 1,
            is_closed: false,
            row,
            is_sending: false,
            loans_since_reclaim: 0,
            awaited_loans: 0,
        }
    }

    /// Adds a link, with its row of the statistics page. Its welcome has announced every region.
    pub(super) fn add(&mut self, mut link: SubscriberLink) {
        link.row = Some(self.row.link(link.end.peer.pid, link.end.peer.uid));
        self.links.push(link);
    }

    pub(in crate::pubsub) fn find(&mut self, id: u64) -> Option<&mut SubscriberLink> {
        self.links.iter_mut().find(|link| link.id == id)
    }

    /// The links that get samples.
    pub(in crate::pubsub) fn live(&self) -> impl Iterator<Item = &SubscriberLink> {
        self.links.iter().filter(|link| link.is_live())
    }

    pub(in crate::pubsub) fn is_live(&self, id: u64) -> bool {
        self.live().any(|link| link.id == id)
    }

    /// The links with a position for the sample that is being sent, or was sent last.
    #[inline]
    pub(super) fn placed(&self) -> impl Iterator<Item = &SubscriberLink> {
        self.links.iter().filter(|link| link.placed().is_some())
    }

    /// Wakes the sleeping subscribers that have been given the last sample.
    #[inline]
    pub(in crate::pubsub) fn wake_sleepers(&mut self) {
        self.links.iter_mut().for_each(SubscriberLink::wake_sleeper);
    }

    /// Whether a chosen recipient is still attached.
    #[inline]
    pub(super) fn check(&self, to: Recipients, name: &str) -> Result<()> {
        match to {
            Recipients::One(id) if !self.is_live(id) => Err(Error::State(StateFault::LinkClosed {
                kind: Kind::Publisher,
                name: name.to_string(),
                reason: "the one it was meant for has gone".into(),
            })),
            _ => Ok(()),
        }
    }

    /// Reclaims every slot that is no longer in use. `thorough` also looks behind samples that are
    /// held long.
    #[inline]
    pub(in crate::pubsub) fn reclaim(&mut self, fences: &SlotFences, thorough: bool) {
        self.loans_since_reclaim = 0;
        let arena = &mut self.arena;
        for link in &mut self.links {
            link.reclaim(thorough, |slot| arena.release(slot));
        }
        arena.collect(|slot, value| fences.is_reached(slot, value));
    }

    /// Announces to every subscriber the regions that it does not know. A subscriber that does not
    /// read its socket loses its link.
    ///
    /// # Errors
    /// This process lacks resources for the message. No link is lost, and the announcement is
    /// repeated later.
    #[inline]
    pub(super) fn announce(&mut self, name: &str) -> Result<()> {
        if !self.must_announce {
            return Ok(());
        }
        let mut own = Ok(());
        for link in &mut self.links {
            match link.announce(self.arena.chunks()) {
                Ok(()) => {}
                // What it has mapped counts until it has released its samples.
                Err(_) if !link.is_staying() => {}
                Err(error) if is_shortage(error) => {
                    let context = format!("memory of {name:?}, to process {}", link.end.peer.pid);
                    own = Err(Error::os("sendmsg", context, error));
                }
                Err(_) => link.leave(Some(CloseReason::Evicted(
                    "it does not read its socket".into(),
                ))),
            }
        }
        self.must_announce = own.is_err();
        own
    }

    /// Makes the page of each subscriber's metadata, for a sample with metadata that is long.
    ///
    /// # Errors
    /// As [`SubscriberLink::make_cells`].
    #[inline]
    pub(super) fn make_cells(&mut self, metadata: &Metadata, name: &str) -> Result<()> {
        if !metadata.is_long() {
            return Ok(());
        }
        let mut live = self.links.iter_mut().filter(|link| link.is_live());
        live.try_for_each(|link| link.make_cells(name))
    }

    /// The description of the next sample, which takes the next number. `is_stamped`: with the
    /// time.
    #[inline]
    pub(in crate::pubsub) fn describe<'a>(
        &mut self,
        given: Given<'a>,
        is_stamped: bool,
    ) -> Description<'a> {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.row.count(sequence, given.layout.bytes());
        let slot = self.arena.slot(given.slot);
        Description {
            sequence,
            sent_ns: if is_stamped { now_ns() } else { 0 },
            region: self.arena.chunks()[slot.region as usize].id,
            slot: slot.offset,
            layout: given.layout,
            metadata: given.metadata,
        }
    }

    /// Takes out the links that are over.
    pub(super) fn take_links(
        &mut self,
        is_over: impl FnMut(&mut SubscriberLink) -> bool,
    ) -> Vec<SubscriberLink> {
        let over: Vec<SubscriberLink> = self.links.extract_if(.., is_over).collect();
        self.dropped_before += over.iter().map(|link| link.dropped).sum::<u64>();
        over
    }

    /// Sends `Close` to every subscriber, and reads no socket any more, save for a partner that
    /// still receives, and of subscribers that may still read a tensor in place. Returns the
    /// partners that do not receive.
    pub(super) fn close_links(&mut self) -> Vec<Arc<PublisherLink>> {
        let mut partners = Vec::new();
        self.history.end(&mut self.arena);
        let has_owners = self.owners.count() > 0;
        for link in &mut self.links {
            link.close();
            if link.has_partner_ended() || !link.end.is_of_replies {
                if !has_owners {
                    link.registrations.clear();
                }
                partners.extend(link.partner.take());
            }
        }
        partners
    }

    /// Writes what is not counted with each sample: called with each tick.
    pub(super) fn write_statistics(&mut self) {
        self.links.iter().for_each(SubscriberLink::write_statistics);
        let in_flight: u64 = self.links.iter().map(SubscriberLink::in_flight).sum();
        let dropped: u64 = self.links.iter().map(|link| link.dropped).sum();
        let (dropped, peers) = (self.dropped_before + dropped, self.links.len() as u64);
        self.forget_closed_regions();
        self.row
            .set_use(dropped, in_flight, peers, self.region_bytes());
    }
}

/// The right to send. The state is locked except during driver calls: links may leave and end
/// meanwhile, places and history stay.
pub(in crate::pubsub) struct SendTurn<'a> {
    core: &'a PublisherCore,
    /// Declared before the lock for sending: unlocked before that.
    pub(in crate::pubsub) state: ReleasableGuard<'a, PublisherState>,
    _sending: TimedGuard<'a>,
}

impl<'a> SendTurn<'a> {
    pub(in crate::pubsub) fn begin(
        core: &'a PublisherCore,
        sending: TimedGuard<'a>,
        mut state: MutexGuard<'a, PublisherState>,
    ) -> SendTurn<'a> {
        state.is_sending = true;
        SendTurn {
            core,
            state: ReleasableGuard::new(&core.state, state),
            _sending: sending,
        }
    }
}

impl Drop for SendTurn<'_> {
    /// Gives the history to the links that came during the send. Then the turn is over.
    #[inline]
    fn drop(&mut self) {
        self.state.relock();
        self.state.is_sending = false;
        if self.state.history.has_joiners {
            self.core.replay(&mut self.state);
        }
    }
}
