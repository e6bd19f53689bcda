//! The links of a publisher's subscribers.
//!
//! A link is in the list from its welcome until it has left and holds no slot any more. All links
//! know all regions before a sample is placed: [`Links::announce`].

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::ipc::message::CloseReason;
use crate::kind::Kind;
use crate::memory::arena::{Arena, Chunk, SlotId};
use crate::os::is_shortage;
use crate::pubsub::publisher_link::PublisherLink;
use crate::pubsub::subscriber_link::{LinkPhase, SubscriberLink};

/// The recipients of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pubsub) enum Recipients {
    /// Every subscriber.
    All,
    /// The subscriber with this id.
    One(u64),
    /// No subscriber yet.
    Nobody,
}

impl Recipients {
    #[inline]
    pub(super) fn include(self, link: &SubscriberLink) -> bool {
        match self {
            Recipients::All => true,
            Recipients::One(id) => link.id == id,
            Recipients::Nobody => false,
        }
    }

    /// Whether a send must wait for room on this link.
    #[inline]
    pub(super) fn await_it(self, link: &SubscriberLink) -> bool {
        self.include(link) && link.must_be_awaited()
    }
}

#[derive(Default)]
pub(super) struct Links {
    list: Vec<SubscriberLink>,
    /// A link may not know the regions as they are.
    must_announce: bool,
    /// An observer asks for `untaken`.
    is_observed: bool,
    /// See [`take_untaken`](Self::take_untaken): of links that are no longer in the list.
    untaken: Vec<(u64, u64)>,
    /// The samples that links which are no longer in the list did not get.
    dropped_before: u64,
}

impl Links {
    pub(super) fn new(is_observed: bool) -> Links {
        Links {
            is_observed,
            ..Links::default()
        }
    }

    /// Adds a link. Its welcome has announced every region.
    pub(super) fn add(&mut self, link: SubscriberLink) {
        self.list.push(link);
    }

    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = &SubscriberLink> {
        self.list.iter()
    }

    #[inline]
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut SubscriberLink> {
        self.list.iter_mut()
    }

    /// The links that get samples.
    pub(super) fn live(&self) -> impl Iterator<Item = &SubscriberLink> {
        self.list.iter().filter(|link| link.is_live())
    }

    pub(super) fn find(&mut self, id: u64) -> Option<&mut SubscriberLink> {
        self.list.iter_mut().find(|link| link.id == id)
    }

    /// The link with this id, if it gets samples.
    pub(super) fn find_live(&mut self, id: u64) -> Option<&mut SubscriberLink> {
        self.find(id).filter(|link| link.is_live())
    }

    pub(super) fn is_live(&self, id: u64) -> bool {
        self.live().any(|link| link.id == id)
    }

    /// The links with a position for the sample that is being sent, or was sent last.
    #[inline]
    pub(super) fn placed(&self) -> impl Iterator<Item = &SubscriberLink> {
        self.list.iter().filter(|link| link.placed().is_some())
    }

    #[inline]
    pub(super) fn placed_mut(&mut self) -> impl Iterator<Item = &mut SubscriberLink> {
        self.list.iter_mut().filter(|link| link.placed().is_some())
    }

    /// Whether a chosen recipient is still attached.
    #[inline]
    pub(super) fn check(&self, to: Recipients, name: &str) -> Result<()> {
        match to {
            Recipients::One(id) if !self.is_live(id) => Err(Error::LinkClosed {
                kind: Kind::Publisher,
                name: name.to_string(),
                reason: "the one it was meant for has gone".into(),
            }),
            _ => Ok(()),
        }
    }

    /// The first recipient that must not miss a sample and has no room for one.
    #[inline]
    pub(super) fn first_full(&self, to: Recipients) -> Option<&SubscriberLink> {
        self.list.iter().find(|link| to.await_it(link))
    }

    /// Returns to the arena the slots that subscribers have released. `thorough` also looks behind
    /// samples that are held long.
    #[inline]
    pub(super) fn reclaim(&mut self, arena: &mut Arena, thorough: bool) {
        for link in &mut self.list {
            link.reclaim(thorough, |slot| arena.release(slot));
        }
    }

    /// The arena has a region that no link knows.
    pub(super) fn regions_have_changed(&mut self) {
        self.must_announce = true;
    }

    /// Announces to every subscriber the regions that it does not know. A subscriber that does not
    /// read its socket loses its link.
    ///
    /// # Errors
    /// This process lacks resources for the message. No link is lost, and the announcement is
    /// repeated later.
    #[inline]
    pub(super) fn announce(&mut self, chunks: &[Chunk], name: &str) -> Result<()> {
        if !self.must_announce {
            return Ok(());
        }
        let mut own = Ok(());
        for link in &mut self.list {
            match link.announce(chunks) {
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

    /// The slots that leaving and suspect subscribers hold.
    pub(super) fn quarantined(&self) -> impl Iterator<Item = SlotId> {
        self.list
            .iter()
            .filter(|link| matches!(link.phase, LinkPhase::Leaving | LinkPhase::Suspect))
            .flat_map(SubscriberLink::holds)
    }

    /// Sends `Close` to every subscriber, and reads no socket any more, save for a partner that still
    /// receives. Returns the partners that do not.
    pub(super) fn close(&mut self) -> Vec<Arc<PublisherLink>> {
        let mut partners = Vec::new();
        for link in &mut self.list {
            link.close();
            if link.has_partner_ended() || !link.end.is_of_replies {
                link.registrations.clear();
                partners.extend(link.partner.take());
            }
        }
        partners
    }

    /// Whether somebody receives over the other ring of a link.
    pub(super) fn has_partner(&self) -> bool {
        let mut partners = self.list.iter().filter_map(|link| link.partner.as_ref());
        partners.any(|partner| Arc::strong_count(partner) > 1)
    }

    /// Takes out the links that have left and hold no slot, and keeps their data for the observer.
    pub(super) fn take_finished(&mut self) -> Vec<SubscriberLink> {
        let is_done = |link: &mut SubscriberLink| {
            matches!(link.phase, LinkPhase::Leaving | LinkPhase::Suspect)
                && link.holds_nothing()
                && link.has_partner_ended()
        };
        let done: Vec<SubscriberLink> = self.list.extract_if(.., is_done).collect();
        self.dropped_before += done.iter().map(|link| link.dropped).sum::<u64>();
        if self.is_observed {
            for link in &done {
                let untaken = link.untaken.iter().map(|&position| (link.id, position));
                self.untaken.extend(untaken);
            }
        }
        done
    }

    /// Takes out the links that have been attaching for longer than `limit`.
    pub(super) fn take_late(&mut self, limit: Duration) -> Vec<SubscriberLink> {
        let is_late = |link: &mut SubscriberLink| {
            link.phase == LinkPhase::Attaching && link.clock.ran() > limit
        };
        self.list.extract_if(.., is_late).collect()
    }

    /// The samples that subscribers which have gone had been given and had not taken, each returned
    /// once: subscriber id and position.
    pub(super) fn take_untaken(&mut self) -> Vec<(u64, u64)> {
        let mut untaken = std::mem::take(&mut self.untaken);
        for link in &mut self.list {
            let positions = std::mem::take(&mut link.untaken).into_iter();
            untaken.extend(positions.map(|position| (link.id, position)));
        }
        untaken
    }

    /// The samples that subscribers, those that have gone too, did not get because of a policy.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped_before + self.list.iter().map(|link| link.dropped).sum::<u64>()
    }

    /// Wakes the sleeping subscribers that have been given the last sample.
    #[inline]
    pub(super) fn wake_sleepers(&mut self) {
        self.placed_mut().for_each(SubscriberLink::wake_sleeper);
    }
}
