//! What late joiners get first.
//!
//! The attendant lets them in, so no stream is given work for it: a sample that is complete is ready at once, and the
//! `ready` of any other is stored by the CPU when the sample's own word on the board says that it is complete. Nobody else
//! writes that word.

use super::*;
use crate::link::entry::Completion;
use crate::link::ring;
use crate::link::segment::Segment;

/// A sample of the history whose `ready` on one link is still to be stored.
pub(super) struct Due {
    pub(super) segment: Arc<Segment>,
    position: u64,
    slot: SlotId,
    /// What the slot's word says once the sample is complete.
    fence: u64,
}

impl Core {
    /// Whether what was sent may be given to others later, so that each slot has its own word signalled.
    pub(super) fn sends_again(&self) -> bool {
        self.options.history > 0 || self.options.observer.is_some()
    }

    /// Gives those who wait for it the history; from then on they get what is sent. Not while somebody sends: the sample that
    /// is on its way is part of it.
    pub(super) fn replay(&self, state: &mut State) {
        let State { arena, outlets, history, joiners, due, .. } = &mut *state;
        for id in joiners.drain(..) {
            let is_it = |outlet: &&mut Outlet| outlet.id == id && outlet.phase == Phase::Joining;
            let Some(outlet) = outlets.iter_mut().find(is_it) else { continue };
            outlet.phase = Phase::Live;
            for Kept { slot, description, is_lost } in history.iter() {
                let (slot, is_lost) = (*slot, *is_lost);
                // The history is no longer than an empty ring.
                let Some(position) = outlet.place(|_| {}) else { break };
                let (fence, segment) = (arena.fence_of(slot), outlet.ring.segment().clone());
                if is_lost {
                    // It keeps its place, or a subscriber that must see every number would miss one.
                    ring::give_up(&segment, position);
                }
                if is_lost || self.board.word(slot as usize).reached(fence) {
                    segment.entry(position).ready.store(position);
                } else {
                    due.push(Due { segment, position, slot, fence });
                }
                arena.hold(slot);
                // A late joiner's own word follows the slot's: should this process be killed in between, the slot's counts.
                let completion = Some(Completion { word: slot, value: fence }).filter(|_| !is_lost);
                outlet.publish(position, slot, &Description { completion, ..description.clone() });
            }
            outlet.wake_sleeper();
        }
        if !state.due.is_empty() && !std::mem::replace(&mut state.is_looking_out, true) {
            let core = self.this.clone();
            self.watcher.retire(move || core.upgrade().is_none_or(|core| core.look_out(&mut core.lock())));
        }
    }

    /// Stores what is due and has come, and says whether that is all. The prover asks for it, and the tick, in case that the
    /// driver holds up the prover. CPU stores alone.
    pub(super) fn look_out(&self, state: &mut State) -> bool {
        state.due.retain(|due| {
            let is_complete = self.board.word(due.slot as usize).reached(due.fence);
            if is_complete {
                due.segment.entry(due.position).ready.store(due.position);
            }
            !is_complete
        });
        let is_done = state.due.is_empty();
        state.is_looking_out &= !is_done;
        is_done
    }
}
