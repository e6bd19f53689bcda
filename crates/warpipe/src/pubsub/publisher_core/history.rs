//! The samples that late subscribers get first.
//!
//! The control thread admits late subscribers, so no stream is given work for them: a sample that
//! is complete is ready at once, and the `ready` of any other is stored by the CPU when the
//! sample's own fence word says that it is complete. Nothing else of this process writes that
//! `ready` word.
//!
//! Each entry holds its slot. A link is replayed to between two sends only, since the sample that
//! is being sent belongs to the history: a link that comes meanwhile joins at the end of the turn.

use std::collections::VecDeque;
use std::sync::Arc;

use super::slot_fences::SlotFences;
use crate::ipc::message::{self, CloseReason};
use crate::memory::arena::{Arena, SlotId};
use crate::pubsub::entry::{Completion, PackedEntry};
use crate::pubsub::ring;
use crate::pubsub::subscriber_link::{LinkPhase, SubscriberLink};
use crate::shm::segment::Segment;

#[derive(Default)]
pub(super) struct History {
    /// How many samples are kept.
    limit: usize,
    entries: VecDeque<HistoryEntry>,
    /// Links wait for the history until the send turn ends.
    pub(super) has_joiners: bool,
    /// Samples that late subscribers have been given and that are not complete.
    due: Vec<PendingReplay>,
    /// The fence thread polls `due`.
    is_polled: bool,
}

/// A sample of the history.
struct HistoryEntry {
    slot: SlotId,
    packed: PackedEntry,
    /// Its data will never be complete.
    is_lost: bool,
}

/// A sample of the history with a `ready` still to be stored on one link.
struct PendingReplay {
    segment: Arc<Segment>,
    position: u64,
    slot: SlotId,
    /// The value of the slot's fence word once the sample is complete.
    fence: u64,
}

impl History {
    pub(super) fn new(limit: u32) -> History {
        History {
            limit: limit as usize,
            ..History::default()
        }
    }

    /// Whether a history is kept at all.
    #[inline]
    pub(super) fn is_kept(&self) -> bool {
        self.limit > 0
    }

    /// Adds a sample, and forgets the oldest beyond the limit.
    #[inline]
    pub(super) fn add(&mut self, slot: SlotId, packed: &PackedEntry, arena: &mut Arena) {
        if !self.is_kept() {
            return;
        }
        arena.hold(slot);
        self.entries.push_back(HistoryEntry {
            slot,
            packed: packed.clone(),
            is_lost: false,
        });
        self.trim(arena);
    }

    /// Keeps no samples any more.
    pub(super) fn end(&mut self, arena: &mut Arena) {
        self.limit = 0;
        self.trim(arena);
    }

    fn trim(&mut self, arena: &mut Arena) {
        while self.entries.len() > self.limit {
            let forgotten = self.entries.pop_front();
            forgotten
                .into_iter()
                .for_each(|entry| arena.release(entry.slot));
        }
    }

    /// The data of `slot` will never be complete.
    pub(super) fn mark_lost(&mut self, slot: SlotId) {
        self.entries
            .iter_mut()
            .filter(|entry| entry.slot == slot)
            .for_each(|entry| entry.is_lost = true);
    }

    /// Gives the history to the links that wait for it; from then on they get new samples. Never
    /// called in the middle of a send. Returns whether the caller has to start
    /// [polling](Self::complete_due).
    pub(super) fn replay(
        &mut self,
        links: &mut [SubscriberLink],
        arena: &mut Arena,
        fences: &SlotFences,
    ) -> bool {
        self.has_joiners = false;
        for link in links
            .iter_mut()
            .filter(|link| link.phase == LinkPhase::Joining)
        {
            link.phase = LinkPhase::Live;
            self.replay_to(link, arena, fences);
            link.wake_sleeper();
        }
        !self.due.is_empty() && !std::mem::replace(&mut self.is_polled, true)
    }

    fn replay_to(&mut self, link: &mut SubscriberLink, arena: &mut Arena, fences: &SlotFences) {
        if self
            .entries
            .iter()
            .any(|entry| entry.packed.long().is_some())
            && let Err(error) = link.make_cells("the history")
        {
            return link.leave(Some(CloseReason::Failed(message::text(error))));
        }
        for entry in &self.entries {
            let (slot, is_lost) = (entry.slot, entry.is_lost);
            // The history is no longer than an empty ring.
            let Some(position) = link.place(true, |_| {}) else {
                break;
            };
            let (fence, segment) = (arena.fence_of(slot), link.ring.segment().clone());
            if is_lost {
                // The lost sample keeps its place, because a subscriber that must see every
                // number would otherwise miss one.
                ring::give_up(&segment, position);
            }
            if is_lost || fences.is_reached(slot, fence) {
                segment.entry(position).ready.store(position);
            } else {
                self.due.push(PendingReplay {
                    segment,
                    position,
                    slot,
                    fence,
                });
            }
            arena.hold(slot);
            // The `ready` word of a late subscriber follows the slot's fence word: if this
            // process is killed in between, the fence word decides.
            let (word, value) = (slot, fence);
            let packed = match is_lost {
                true => entry.packed.clone(),
                false => (entry.packed.clone()).with_completion(Completion { word, value }),
            };
            link.publish(slot, &packed, false, false);
        }
    }

    /// Stores the `ready` words that are due for complete samples, and returns whether none is
    /// left. The fence thread calls this, and so does the tick in case the driver blocks the fence
    /// thread. Uses CPU stores alone.
    pub(super) fn complete_due(&mut self, fences: &SlotFences) -> bool {
        self.due.retain(|due| {
            let is_complete = fences.is_reached(due.slot, due.fence);
            if is_complete {
                due.segment.entry(due.position).ready.store(due.position);
            }
            !is_complete
        });
        let is_done = self.due.is_empty();
        self.is_polled &= !is_done;
        is_done
    }

    /// The link with this segment is gone: nothing is due there.
    pub(super) fn forget(&mut self, segment: &Arc<Segment>) {
        self.due.retain(|due| !Arc::ptr_eq(&due.segment, segment));
    }
}
