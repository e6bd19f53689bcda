//! The state of a publisher under its lock, made of parts that keep their own invariants.

use std::sync::{Arc, Weak};

use super::history::History;
use super::links::Links;
use super::slot_fences::SlotFences;
use crate::backend::StreamOp;
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::Result;
use crate::memory::arena::{Arena, Chunk, Growth, REGIONS_MAX, SlotId};
use crate::memory::region::Region;
use crate::pubsub::builder::PublisherBuilder;
use crate::pubsub::entry::{BorrowedDescription, Metadata, PackedEntry};
use crate::pubsub::subscriber_link::SubscriberLink;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::statistics::EndpointRow;
use crate::tensor::Layout;

/// A loan of at most so many bytes takes a free slot without looking for released ones, but for
/// one in [`LOOK_EVERY`]. Longer slots are used again at once: their memory would leave the caches.
pub(super) const UNLOOKED_BYTES_MAX: u64 = 64 << 10;

/// Looking costs a cache line that the subscriber's CPU has just written; several at once cost
/// hardly more.
pub(super) const LOOK_EVERY: u32 = 8;

/// A region that the streams of its publisher work on.
pub(in crate::pubsub) type HeldRegion = DropAfterFence<Arc<Region>>;

/// A region that was given back and may still be mapped, here or by subscribers.
pub(super) struct ClosingRegion {
    id: u32,
    bytes: u64,
    /// Without owners once no stream and no handle of this process needs the mapping.
    own: Weak<Region>,
}

pub(super) struct PublisherState {
    pub(super) arena: Arena,
    /// Their memory still counts against the limit.
    pub(super) closing: Vec<ClosingRegion>,
    /// Each region of the arena, unmapped behind a fence that is recorded after its last holder, a
    /// [`SlotHold`](crate::SlotHold) or the publisher, is gone.
    pub(super) regions: Vec<Arc<HeldRegion>>,
    pub(super) links: Links,
    pub(super) history: History,
    /// Of the sample that is being sent. Only the holder of the turn uses these; their memory stays
    /// for the next send.
    pub(super) signals: Vec<StreamOp>,
    pub(super) packed: PackedEntry,
    pub(super) next_sequence: u64,
    pub(super) closed: bool,
    /// Its row of this process's statistics page.
    pub(super) row: EndpointRow,
    /// A thread sends.
    pub(super) is_sending: bool,
    /// Threads that sleep until a subscriber releases a sample. While there is one, the links that
    /// they wait for are asked to ring.
    pub(super) sleepers: u32,
    /// One of them sleeps on the doorbells and wakes the others.
    pub(super) has_leader: bool,
    /// Loans since released slots were last looked for.
    pub(super) unlooked_loans: u32,
}

impl PublisherState {
    pub(super) fn new(
        options: &PublisherBuilder,
        device: &Device,
        row: EndpointRow,
    ) -> PublisherState {
        PublisherState {
            arena: Arena::new(device, options.shared.memory_limit),
            closing: Vec::new(),
            regions: Vec::new(),
            links: Links::new(options.observer.is_some()),
            history: History::new(options.history),
            signals: Vec::new(),
            packed: PackedEntry::default(),
            next_sequence: 1,
            closed: false,
            row,
            is_sending: false,
            sleepers: 0,
            has_leader: false,
            unlooked_loans: 0,
        }
    }

    /// Adds a link, with its row of the statistics page.
    pub(super) fn add(&mut self, mut link: SubscriberLink) {
        link.row = Some(self.row.link(link.peer.pid, link.peer.uid));
        self.links.add(link);
    }

    pub(super) fn address(&self, slot: SlotId) -> u64 {
        let slot = self.arena.slot(slot);
        self.arena.chunks()[slot.region as usize].region.ptr() + slot.offset
    }

    /// The region in which a slot lies.
    pub(super) fn held_region(&self, slot: SlotId) -> Arc<HeldRegion> {
        self.regions[self.arena.slot(slot).region as usize].clone()
    }

    /// Reclaims every slot that is no longer in use. `thorough` also looks behind samples that are
    /// held long.
    #[inline]
    pub(super) fn reclaim(&mut self, fences: &SlotFences, thorough: bool) {
        self.unlooked_loans = 0;
        self.links.reclaim(&mut self.arena, thorough);
        self.arena
            .collect(|slot, value| fences.is_reached(slot, value));
    }

    /// Takes a slot without looking for released ones, as most loans can. Only a loan gains by a
    /// look: all else that depends on a release looks for itself.
    #[inline]
    pub(super) fn take_unlooked(&mut self, bytes: u64) -> Option<SlotId> {
        if bytes > UNLOOKED_BYTES_MAX || self.unlooked_loans + 1 >= LOOK_EVERY {
            return None;
        }
        let slot = self.arena.take(bytes)?;
        self.unlooked_loans += 1;
        Some(slot)
    }

    /// Announces every region to every subscriber: see [`Links::announce`].
    #[inline]
    pub(super) fn announce(&mut self, name: &str) -> Result<()> {
        self.links.announce(self.arena.chunks(), name)
    }

    /// A region in which `bytes` fit, if the limit leaves room. Slots of leaving and suspect
    /// subscribers, and regions that were given back and are still mapped, do not count, up to the
    /// limit once more: so a stopped process cannot stop the publisher.
    pub(super) fn plan(&mut self, bytes: u64) -> Option<Growth> {
        self.forget_closed_regions();
        if self.closing.len() + self.arena.chunks().len() >= REGIONS_MAX {
            return None;
        }
        let room = self.room();
        self.arena.plan(bytes, self.arena.total(), room)
    }

    fn room(&self) -> u64 {
        let taken = self.arena.total().saturating_add(self.closing_bytes());
        let limit = self.arena.limit();
        limit.saturating_add(self.exempt()).saturating_sub(taken)
    }

    /// Bytes that do not count against the limit.
    fn exempt(&self) -> u64 {
        let slots = self.links.quarantined();
        let quarantined: u64 = slots.map(|slot| self.arena.slot(slot).bytes()).sum();
        let bytes = quarantined.saturating_add(self.closing_bytes());
        bytes.min(self.arena.limit())
    }

    /// Takes out regions without slots, so that there is room for a region in which `bytes` fit;
    /// none if that is not enough, even while they are still mapped. The caller drops them without
    /// the lock.
    pub(super) fn give_back_regions(&mut self, bytes: u64) -> Vec<(Chunk, Arc<HeldRegion>)> {
        let Some(least) = self.arena.region_for(bytes) else {
            return Vec::new();
        };
        let missing = least.saturating_sub(self.room());
        // What is given back counts until it is unmapped, but for what may be exempt: then what is
        // closing comes first.
        let is_exempt = missing <= self.arena.limit() - self.exempt();
        if !(is_exempt || self.closing.is_empty()) || self.arena.is_out_of_slots() {
            return Vec::new();
        }
        let numbers = self.arena.removable(|_| true, missing);
        let mut removed = Vec::with_capacity(numbers.len());
        for number in numbers {
            let Some(chunk) = self.arena.remove(number) else {
                continue;
            };
            self.closing.push(ClosingRegion {
                id: chunk.id,
                bytes: chunk.region.bytes(),
                own: Arc::downgrade(&chunk.region),
            });
            removed.push((chunk, self.regions.remove(number)));
            self.links.regions_have_changed();
        }
        removed
    }

    /// No longer counts the regions that neither this process nor a subscriber has mapped.
    fn forget_closed_regions(&mut self) {
        let links = &self.links;
        self.closing.retain(|region| {
            region.own.strong_count() > 0 || links.iter().any(|link| link.has_region(region.id))
        });
    }

    /// Whether this process still unmaps a region that was given back: nothing rings when it has.
    pub(super) fn is_unmapping(&self) -> bool {
        let mut closing = self.closing.iter();
        closing.any(|region| region.own.strong_count() > 0)
    }

    pub(super) fn closing_bytes(&self) -> u64 {
        self.closing.iter().map(|region| region.bytes).sum()
    }

    /// Bytes of regions, used and free, and of those that were given back and are still mapped.
    pub(super) fn region_bytes(&self) -> u64 {
        self.arena.total().saturating_add(self.closing_bytes())
    }

    /// The description of the next sample, which takes the next number. `is_stamped`: with the time.
    #[inline]
    pub(super) fn describe<'a>(
        &mut self,
        slot: SlotId,
        layout: &'a Layout,
        metadata: &'a Metadata,
        is_stamped: bool,
    ) -> BorrowedDescription<'a> {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.row.count(sequence, layout.bytes());
        let slot = self.arena.slot(slot);
        BorrowedDescription {
            sequence,
            sent_ns: if is_stamped { now_ns() } else { 0 },
            region: self.arena.chunks()[slot.region as usize].id,
            slot: slot.offset,
            layout,
            metadata,
            completion: None,
        }
    }

    /// Writes what is not counted with each sample: called with each tick.
    pub(super) fn write_statistics(&mut self) {
        self.links.iter().for_each(SubscriberLink::write_statistics);
        let in_flight: u64 = self.links.iter().map(SubscriberLink::in_flight).sum();
        let peers = self.links.iter().count() as u64;
        let dropped = self.links.dropped();
        self.forget_closed_regions();
        self.row
            .set_use(dropped, in_flight, peers, self.region_bytes());
    }

    /// A counter that changes whenever a slot was freed, or only an entry: that of a sample that its
    /// subscriber has set aside.
    pub(super) fn freed_count(&self) -> u64 {
        let seen: u64 = self.links.iter().map(SubscriberLink::releases_seen).sum();
        self.arena.changes() + seen
    }
}
