//! The state of a publisher under its lock, made of parts that keep their own invariants.

use std::sync::{Arc, Weak};

use super::history::History;
use super::links::Links;
use super::slot_fences::SlotFences;
use crate::backend::StreamOp;
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::Result;
use crate::memory::arena::{Arena, SlotId};
use crate::memory::region::Region;
use crate::pubsub::builder::PublisherBuilder;
use crate::pubsub::entry::{Description, Metadata, PackedEntry};
use crate::pubsub::subscriber_link::SubscriberLink;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::statistics::EndpointRow;
use crate::tensor::Layout;

/// A region that the streams of its publisher work on.
pub(super) type HeldRegion = DropAfterFence<Arc<Region>>;

/// A region that was given back and may still be mapped, here or by subscribers.
pub(super) struct ClosingRegion {
    pub(super) id: u32,
    pub(super) bytes: u64,
    /// Without owners once no stream and no handle of this process needs the mapping.
    pub(super) own: Weak<Region>,
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
            unlooked_loans: 0,
        }
    }

    /// Adds a link, with its row of the statistics page.
    pub(super) fn add(&mut self, mut link: SubscriberLink) {
        link.row = Some(self.row.link(link.end.peer.pid, link.end.peer.uid));
        self.links.add(link);
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

    /// Announces every region to every subscriber: see [`Links::announce`].
    #[inline]
    pub(super) fn announce(&mut self, name: &str) -> Result<()> {
        self.links.announce(self.arena.chunks(), name)
    }

    /// The description of the next sample, which takes the next number. `is_stamped`: with the time.
    #[inline]
    pub(super) fn describe<'a>(
        &mut self,
        slot: SlotId,
        layout: &'a Layout,
        metadata: &'a Metadata,
        is_stamped: bool,
    ) -> Description<'a> {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.row.count(sequence, layout.bytes());
        let slot = self.arena.slot(slot);
        Description {
            sequence,
            sent_ns: if is_stamped { now_ns() } else { 0 },
            region: self.arena.chunks()[slot.region as usize].id,
            slot: slot.offset,
            layout,
            metadata,
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
}
