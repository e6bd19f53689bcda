//! The samples that late subscribers get first.
//!
//! The control thread admits late subscribers, so no stream is given work for them: a sample that
//! is complete is ready at once, and the `ready` of any other is stored by the CPU when the
//! sample's own fence word says that it is complete. Nothing else of this process writes that
//! `ready` word.

use std::sync::Arc;

use super::super::subscriber_link::{LinkPhase, SubscriberLink};
use super::{HistoryEntry, PublisherCore, PublisherState};
use crate::memory::arena::SlotId;
use crate::pubsub::entry::{Completion, Description};
use crate::pubsub::ring;
use crate::shm::segment::Segment;

/// A sample of the history with a `ready` still to be stored on one link.
pub(super) struct PendingReplay {
    pub(super) segment: Arc<Segment>,
    position: u64,
    slot: SlotId,
    /// The value of the slot's fence word once the sample is complete.
    fence: u64,
}

impl PublisherCore {
    /// Whether sent samples may be given to other subscribers later, so that each slot has its own
    /// fence word signalled.
    pub(super) fn sends_again(&self) -> bool {
        self.options.history > 0 || self.options.observer.is_some()
    }

    /// Gives the history to the links that wait for it; from then on they get new samples. Never
    /// called in the middle of a send: the sample being sent belongs to the history.
    pub(super) fn replay(&self, state: &mut PublisherState) {
        let PublisherState {
            arena,
            links,
            history,
            joiners,
            due,
            ..
        } = &mut *state;
        for id in joiners.drain(..) {
            let is_it =
                |link: &&mut SubscriberLink| link.id == id && link.phase == LinkPhase::Joining;
            let Some(link) = links.iter_mut().find(is_it) else {
                continue;
            };
            link.phase = LinkPhase::Live;
            for HistoryEntry {
                slot,
                description,
                is_lost,
            } in history.iter()
            {
                let (slot, is_lost) = (*slot, *is_lost);
                // The history is no longer than an empty ring.
                let Some(position) = link.place(|_| {}) else {
                    break;
                };
                let (fence, segment) = (arena.fence_of(slot), link.ring.segment().clone());
                if is_lost {
                    // The lost sample keeps its place, because a subscriber that must see every
                    // number would otherwise miss one.
                    ring::give_up(&segment, position);
                }
                if is_lost || self.fence_words.word(slot as usize).reached(fence) {
                    segment.entry(position).ready.store(position);
                } else {
                    due.push(PendingReplay {
                        segment,
                        position,
                        slot,
                        fence,
                    });
                }
                arena.hold(slot);
                // The `ready` word of a late subscriber follows the slot's fence word: if this
                // process is killed in between, the fence word decides.
                let completion = Some(Completion {
                    word: slot,
                    value: fence,
                })
                .filter(|_| !is_lost);
                link.publish(
                    position,
                    slot,
                    &Description {
                        completion,
                        ..description.clone()
                    },
                );
            }
            link.wake_sleeper();
        }
        if !state.due.is_empty() && !std::mem::replace(&mut state.is_polling_replays, true) {
            let core = self.this.clone();
            self.reactor.drop_after(move || {
                core.upgrade()
                    .is_none_or(|core| core.poll_replays(&mut core.lock()))
            });
        }
    }

    /// Stores the `ready` words that are due for complete samples, and returns whether
    /// none is left. The fence thread calls this, and so does the tick in case the driver blocks
    /// the fence thread. Uses CPU stores alone.
    pub(super) fn poll_replays(&self, state: &mut PublisherState) -> bool {
        state.due.retain(|due| {
            let is_complete = self.fence_words.word(due.slot as usize).reached(due.fence);
            if is_complete {
                due.segment.entry(due.position).ready.store(due.position);
            }
            !is_complete
        });
        let is_done = state.due.is_empty();
        state.is_polling_replays &= !is_done;
        is_done
    }
}
