//! How a sender waits for room: it polls, then sleeps until a reader wakes it.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::super::builder::Policy;
use super::super::subscriber_link::SubscriberLink;
use super::links::Recipients;
use super::send_turn::SendTurn;
use super::state::PublisherState;
use super::{POLLS, PublisherCore, WAIT_SLICE, own_pid};
use crate::backoff::Backoff;
use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::ipc::Kind;
use crate::runtime::doorbell::{LocalDoorbell, PeerDoorbell};
use crate::wait::{SLICE, Wait};

impl PublisherCore {
    /// Waits until every recipient that may not miss a sample has room for one and no other thread
    /// sends. Takes the send turn.
    ///
    /// `wait` replaces the timeout of the subscribers' policies, and that of the lock for sending. A
    /// thread that had to wait asks whether it is cancelled before it takes its turn.
    pub(super) fn make_room(
        &self,
        to: Recipients,
        wait: Option<&Wait<'_>>,
    ) -> Result<SendTurn<'_>> {
        self.owner_process.check()?;
        let mut clock = Stopwatch::default();
        let mut backoff = Backoff::spinning(POLLS);
        // The subscriber that was waited for since the cancellation was asked.
        let mut waited_for = None;
        loop {
            let sending = self.lock_sending(wait)?;
            let state = self.lock();
            if state.closed {
                let name = self.name.clone();
                return Err(Error::peer_gone(Kind::Publisher, name, own_pid(), true));
            }
            state.links.check(to, &self.name)?;
            // Room does not depend on which slots have been reclaimed.
            let Some(full) = state.links.first_full(to) else {
                let (Some(wait), Some(pid)) = (wait, waited_for.take()) else {
                    return Ok(SendTurn::begin(self, sending, state));
                };
                // Without the locks: it may run a signal's handler.
                drop((state, sending));
                if wait.is_cancelled() {
                    return Err(self.no_room_at(pid, wait));
                }
                continue;
            };
            let pid = full.end.peer.pid;
            let Policy::Block { timeout } = full.policy else {
                return Err(Error::Full {
                    name: self.name.clone(),
                    subscriber: format!("process {pid}"),
                    depth: self.options.depth,
                });
            };
            let left = match wait {
                Some(wait) => wait.time_left(),
                None => timeout.saturating_sub(clock.elapsed()),
            };
            if left.is_zero() {
                let policy = Wait::from(timeout);
                return Err(self.no_room_at(pid, wait.unwrap_or(&policy)));
            }
            let left = match wait.is_some_and(Wait::is_cancellable) {
                true => left.min(SLICE),
                false => left,
            };
            // Others may send meanwhile, to subscribers that have room.
            drop(sending);
            drop(self.wait_for_release(state, left, &mut backoff, |link| to.await_it(link)));
            if let Some(wait) = wait.filter(|wait| wait.is_cancellable()) {
                waited_for = Some(pid);
                // What came at the end of the time is taken.
                if wait.is_over() && !wait.time_left().is_zero() {
                    return Err(self.no_room_at(pid, wait));
                }
            }
        }
    }

    fn no_room_at(&self, pid: i32, wait: &Wait<'_>) -> Error {
        let depth = self.options.depth;
        Error::Timeout {
            what: format!(
                "room at subscriber process {pid} of {:?} (it has not released the {depth} samples \
                 of its depth)",
                self.name
            ),
            waited: wait.limit(),
        }
    }

    /// Sleeps until a subscriber that `concerns` selects releases a sample, a link changes, or a
    /// slice of `left` has passed. No other subscriber is asked to wake this process: each wake-up
    /// costs a system call per release.
    pub(super) fn wait_for_release<'a>(
        &'a self,
        mut state: MutexGuard<'a, PublisherState>,
        left: Duration,
        backoff: &mut Backoff,
        concerns: impl Fn(&SubscriberLink) -> bool,
    ) -> MutexGuard<'a, PublisherState> {
        let pause = backoff.step();
        if pause.is_zero() {
            // The next release usually comes within moments, and sleeping costs more than polling
            // for it.
            drop(state);
            backoff.spin(4);
            return self.lock();
        }
        let before = state.freed_count();
        state.sleepers += 1;
        state
            .links
            .iter()
            .filter(|link| concerns(link))
            .for_each(|link| link.set_asleep(true));
        // Releases before the `asleep` flags were set caused no wake-up.
        state.reclaim(&self.fences, true);
        if state.freed_count() == before {
            // A device that completes a release cannot ring the doorbell: while such a release is
            // due, the next poll comes soon.
            let device_owes = !state.arena.is_quiet()
                || state
                    .links
                    .iter()
                    .any(|link| concerns(link) && link.device_owes());
            let slice = if device_owes { pause } else { WAIT_SLICE }.min(left);
            state = self.sleep(state, slice);
        }
        state.sleepers -= 1;
        if state.sleepers == 0 {
            state.links.iter().for_each(|link| link.set_asleep(false));
        }
        state
    }

    /// Sleeps until a subscriber or the reactor rings: the first thread on the doorbells, as their
    /// leader, and all others until the leader wakes. A ring wakes one thread alone, which may not
    /// be the one that it concerns.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, PublisherState>,
        limit: Duration,
    ) -> MutexGuard<'a, PublisherState> {
        if state.has_leader {
            let slept = self.changed.wait_timeout(state, limit);
            return slept.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.has_leader = true;
        // Under the lock: what changes the state from here on rings it. Without room for it, this end
        // looks again after a slice.
        if self.doorbell.get().is_none()
            && let Ok(made) = LocalDoorbell::new()
        {
            let _ = self.doorbell.set(made);
        }
        let peer_doorbells: Vec<Arc<PeerDoorbell>> = state
            .links
            .iter()
            .map(|link| link.end.peer_doorbell.clone())
            .collect();
        drop(state);
        let has_drained = self.sleep_on_doorbells(&peer_doorbells, limit);
        let mut state = self.lock();
        state.has_leader = false;
        if has_drained {
            // A ring may have been meant for the receiver of another ring. All of them are rung by
            // one doorbell.
            let mut partners = state.links.iter().filter_map(|link| link.partner.as_ref());
            partners.any(|partner| partner.pass_on_wake());
        }
        self.changed.notify_all();
        state
    }

    /// Wakes the thread that sleeps on the doorbells. Call it behind the change of the state.
    pub(super) fn ring(&self) {
        self.doorbell
            .get()
            .into_iter()
            .for_each(LocalDoorbell::ring);
    }

    /// Sleeps until a doorbell rings, and drains only those that rang: with many subscribers,
    /// draining all of them would cost more than the rest of a send. A doorbell that rings later
    /// makes the next sleep short. Returns whether a subscriber rang.
    fn sleep_on_doorbells(&self, peer_doorbells: &[Arc<PeerDoorbell>], limit: Duration) -> bool {
        let open: Vec<&PeerDoorbell> = peer_doorbells
            .iter()
            .map(|peer_doorbell| &**peer_doorbell)
            .filter(|peer_doorbell| !peer_doorbell.is_closed())
            .collect();
        let mut polls: Vec<_> = open
            .iter()
            .map(|peer_doorbell| PollFd::new(*peer_doorbell, PollFlags::IN))
            .collect();
        let own = self.doorbell.get();
        polls.extend(own.map(|doorbell| PollFd::new(doorbell, PollFlags::IN)));
        if rustix::event::poll(&mut polls, Some(&crate::os::timespec(limit))).is_err() {
            return false;
        }
        let rang = |poll: &PollFd<'_>| !poll.revents().is_empty();
        let rung = open.iter().zip(&polls).filter(|(_, poll)| rang(poll));
        let drained = rung.map(|(peer_doorbell, _)| peer_doorbell.drain());
        let has_drained = drained.count() > 0;
        if let Some(own) = own.filter(|_| polls.last().is_some_and(rang)) {
            own.drain();
        }
        has_drained
    }
}
