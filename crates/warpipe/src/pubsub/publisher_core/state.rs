//! The state of a publisher under its lock: places for a sample, announcements of regions, history.

use super::{HistoryEntry, Placement, PublisherState, Recipients};
use crate::error::{Error, Result};
use crate::ipc::message::{self, CloseReason};
use crate::memory::arena::SlotId;
use crate::pubsub::entry::Description;
use crate::pubsub::subscriber_link::{LinkPhase, SubscriberLink};

impl PublisherState {
    pub(super) fn address(&self, slot: SlotId) -> u64 {
        let slot = self.arena.slot(slot);
        self.arena.chunks()[slot.region as usize].region.ptr() + slot.offset
    }

    /// Finds a place on every live recipient's link and writes the signals that complete the sample
    /// into `ops`. A recipient without a place misses this sample. All that a send needs of a link
    /// beside its entry is collected here, once.
    pub(super) fn place(&mut self, to: Recipients) {
        let PublisherState {
            arena,
            links,
            places,
            ops,
            ..
        } = self;
        let (mut is_any_local, mut is_any_foreign) = (false, false);
        places.clear();
        ops.clear();
        let is_meant = |link: &SubscriberLink| link.is_live() && to.include(link);
        for (index, link) in links
            .iter_mut()
            .enumerate()
            .filter(|(_, link)| is_meant(link))
        {
            if let Some(position) = link.place(|slot| arena.release(slot)) {
                places.push(Placement {
                    index,
                    id: link.id,
                    position,
                    is_published: false,
                });
                ops.push(link.ready_op(position));
                is_any_local |= link.is_local;
                is_any_foreign |= link.is_foreign;
            }
        }
        (self.is_any_local, self.is_any_foreign) = (is_any_local, is_any_foreign);
    }

    /// The first recipient that must not miss a sample and has no room for one.
    pub(super) fn first_full(&self, to: Recipients) -> Option<&SubscriberLink> {
        self.links.iter().find(|link| to.await_it(link))
    }

    /// Announces to every subscriber the regions that it does not know. A subscriber that does not
    /// read its socket loses its link.
    ///
    /// # Errors
    /// This process lacks resources for the message. No link is lost, and the announcement is
    /// repeated later.
    pub(super) fn announce(&mut self, name: &str) -> Result<()> {
        if self.is_announced {
            return Ok(());
        }
        let PublisherState { arena, links, .. } = self;
        let is_heard = |link: &&mut SubscriberLink| {
            matches!(
                link.phase,
                LinkPhase::Live | LinkPhase::Joining | LinkPhase::Attaching
            )
        };
        let mut own = Ok(());
        for link in links.iter_mut().filter(is_heard) {
            match link.announce(arena.chunks()) {
                Ok(()) => {}
                Err(error) if message::is_own(error) => {
                    let context = format!("memory of {name:?}, to process {}", link.peer.pid);
                    own = Err(Error::os("sendmsg", context, error));
                }
                Err(_) => link.leave(Some(CloseReason::Evicted(
                    "it does not read its socket".into(),
                ))),
            }
        }
        self.is_announced = own.is_ok();
        own
    }

    /// Bytes held by leaving and suspect subscribers. They do not count against the limit, up to
    /// the limit once more, so that a stopped process cannot stop the publisher.
    pub(super) fn quarantined(&self) -> u64 {
        let leaving = self
            .links
            .iter()
            .filter(|link| matches!(link.phase, LinkPhase::Leaving | LinkPhase::Suspect));
        let bytes: u64 = leaving
            .flat_map(SubscriberLink::holds)
            .map(|slot| self.arena.slot(slot).bytes())
            .sum();
        bytes.min(self.arena.limit())
    }

    pub(super) fn add_to_history(&mut self, slot: SlotId, description: Description, length: usize) {
        self.arena.hold(slot);
        self.history.push_back(HistoryEntry {
            slot,
            description,
            is_lost: false,
        });
        while self.history.len() > length {
            let forgotten = self.history.pop_front();
            forgotten
                .into_iter()
                .for_each(|kept| self.arena.release(kept.slot));
        }
    }

    /// Wakes every sleeping subscriber that has been given a sample.
    pub(super) fn wake_sleepers(&mut self) {
        if std::mem::take(&mut self.is_any_asleep) {
            self.links.iter_mut().for_each(SubscriberLink::wake_sleeper);
        }
    }

    /// A counter that changes whenever a slot was freed.
    pub(super) fn freed_count(&self) -> u64 {
        self.arena.changes()
    }

    pub(super) fn find(&mut self, id: u64) -> Option<&mut SubscriberLink> {
        self.links.iter_mut().find(|link| link.id == id)
    }
}
