//! The placement of one sample: a position on each recipient's link, and the signals that complete
//! it there.
//!
//! [`Placement::find`] begins a sample, and [`Placement::publish`] must follow even if the signals
//! fail: a word that is reached must not meet another sample. Between the two the publisher's lock
//! may be released, and links may leave; the send turn keeps other samples out. The lists keep their
//! allocations from one send to the next.

use std::sync::Arc;

use super::links::Links;
use super::recipients::Recipients;
use crate::backend::StreamOp;
use crate::memory::arena::{Arena, SlotId};
use crate::pubsub::entry::{BorrowedDescription, PackedEntry};
use crate::pubsub::ring;
use crate::shm::segment::Segment;

#[derive(Default)]
pub(super) struct Placement {
    packed: PackedEntry,
    ops: Vec<StreamOp>,
    positions: Vec<PlacedPosition>,
    /// A position belongs to a subscriber of this process (`is_any_local`), or of another user
    /// (`is_any_foreign`).
    is_any_local: bool,
    is_any_foreign: bool,
    /// A sleeping subscriber has been given a sample.
    is_any_asleep: bool,
}

/// The position of one sample on one link.
#[derive(Debug, Clone, Copy)]
struct PlacedPosition {
    /// The index of the link when the position was found.
    index: usize,
    link: u64,
    position: u64,
    /// The entry at this position has been published.
    is_published: bool,
}

impl Placement {
    /// Finds a position on every live recipient's link, and the signals that complete the sample
    /// there. A recipient without a position misses this sample. All that a send needs of a link
    /// beside its entry is collected here, once.
    pub(super) fn find(&mut self, links: &mut Links, arena: &mut Arena, to: Recipients) {
        let (mut is_any_local, mut is_any_foreign) = (false, false);
        self.positions.clear();
        self.ops.clear();
        for (index, link) in links
            .iter_mut()
            .enumerate()
            .filter(|(_, link)| link.is_live() && to.include(link))
        {
            if let Some(position) = link.place(|slot| arena.release(slot)) {
                self.positions.push(PlacedPosition {
                    index,
                    link: link.id,
                    position,
                    is_published: false,
                });
                self.ops.push(link.ready_op(position));
                is_any_local |= link.is_local;
                is_any_foreign |= link.is_foreign;
            }
        }
        (self.is_any_local, self.is_any_foreign) = (is_any_local, is_any_foreign);
    }

    /// No reader that this process trusts says when it is done: there is none, or one is another
    /// user's, which can write `ready` and `released` as if sender and receiver had. A reader of
    /// this user could write this process's memory anyway.
    pub(super) fn is_without_trusted_word(&self) -> bool {
        self.positions.is_empty() || self.is_any_foreign
    }

    pub(super) fn has_local(&self) -> bool {
        self.is_any_local
    }

    /// Adds a signal behind those of the positions.
    pub(super) fn add_signal(&mut self, signal: StreamOp) {
        self.ops.push(signal);
    }

    /// The signals, for a call of the driver without the lock. Give them back with
    /// [`return_signals`](Self::return_signals).
    pub(super) fn take_signals(&mut self) -> Vec<StreamOp> {
        std::mem::take(&mut self.ops)
    }

    pub(super) fn return_signals(&mut self, signals: Vec<StreamOp>) {
        self.ops = signals;
    }

    /// Writes the entries at the positions, with their signals if the data `is_complete`.
    #[inline]
    pub(super) fn publish(
        &mut self,
        links: &mut Links,
        arena: &mut Arena,
        slot: SlotId,
        description: BorrowedDescription<'_>,
        is_complete: bool,
    ) {
        self.packed.pack(description);
        let is_for_many = self.positions.len() > 1;
        for placed in &mut self.positions {
            let (position, packed) = (placed.position, &self.packed);
            match links.find_near(placed.index, placed.link) {
                Some(link) if link.is_live() => {
                    arena.hold(slot);
                    if is_for_many {
                        link.publish_to_one_of_many(position, slot, packed, is_complete);
                    } else {
                        self.is_any_asleep |= link.publish(position, slot, packed, is_complete);
                    }
                    placed.is_published = true;
                }
                // The link has left since the position was found, and gets no more samples.
                Some(link) => {
                    link.ring.forgo(position);
                    if is_complete {
                        link.ring.segment().entry(position).ready.store(position);
                    }
                }
                None => {}
            }
        }
        if is_for_many {
            self.look_for_sleepers(links);
        }
    }

    /// Looks whether subscribers sleep that have been given the sample.
    fn look_for_sleepers(&mut self, links: &mut Links) {
        ring::fence_published();
        for placed in self.positions.iter().filter(|placed| placed.is_published) {
            if let Some(link) = links.find_near(placed.index, placed.link) {
                self.is_any_asleep |= link.look_whether_it_sleeps();
            }
        }
    }

    /// Where a sample for one subscriber was published; `None` if the subscriber has left
    /// meanwhile, or was not chosen.
    pub(super) fn published_position(&self) -> Option<u64> {
        let placed = self.positions.first().filter(|placed| placed.is_published);
        placed.map(|placed| placed.position)
    }

    /// The segments and positions of the links that are still there.
    pub(super) fn entries(&self, links: &mut Links) -> Vec<(Arc<Segment>, u64)> {
        self.positions
            .iter()
            .filter_map(|placed| {
                let link = links.find_near(placed.index, placed.link)?;
                Some((link.ring.segment().clone(), placed.position))
            })
            .collect()
    }

    /// Wakes every sleeping subscriber that has been given a sample.
    #[inline]
    pub(super) fn wake_sleepers(&mut self, links: &mut Links) {
        if std::mem::take(&mut self.is_any_asleep) {
            links.wake_sleepers();
        }
    }
}
