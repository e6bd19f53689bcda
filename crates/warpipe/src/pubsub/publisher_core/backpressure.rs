//! How a sender waits for room: it polls, at ever longer intervals. No peer wakes it: a device,
//! which completes the releases, could not. The end of a link, which this process notices, does.

use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use super::super::options::Policy;
use super::state::{Recipients, SendTurn};
use super::{POLLS, PublisherCore};
use crate::atomic;
use crate::backoff::Backoff;
use crate::clock::Stopwatch;
use crate::error::{Error, LimitFault, Result};
use crate::ipc::Kind;
use crate::runtime::timed_lock::{LOCK_TIMEOUT, TimedGuard};
use crate::wait::Wait;

impl PublisherCore {
    /// Waits until every recipient that may not miss a sample has room for one and no other thread
    /// sends. Takes the send turn.
    ///
    /// `wait` replaces the timeout of the subscribers' policies, and that of the lock for sending.
    /// A thread that had to wait asks whether it is cancelled before it takes its turn.
    pub(super) fn make_room(
        &self,
        to: Recipients,
        wait: Option<&Wait<'_>>,
    ) -> Result<SendTurn<'_>> {
        self.owner_process.check()?;
        let mut clock = Stopwatch::default();
        let mut backoff = Backoff::patient(POLLS);
        // The subscriber that was waited for since the cancellation was asked.
        let mut waited_for = None;
        loop {
            let sending = self.lock_sending(wait)?;
            let seen = self.changes_seen();
            let state = self.lock();
            if state.is_closed {
                let (name, pid) = (self.name.clone(), std::process::id() as i32);
                return Err(Error::peer_gone(Kind::Publisher, name, pid, true));
            }
            state.check(to, &self.name)?;
            // Room does not depend on which slots have been reclaimed.
            let Some(full) = state.links.iter().find(|link| to.waits_for(link)) else {
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
                return Err(Error::Limit(LimitFault::Depth {
                    name: self.name.clone(),
                    subscriber: format!("process {pid}"),
                    depth: self.options.depth,
                }));
            };
            let left = match wait {
                Some(wait) => wait.time_left(),
                None => timeout.saturating_sub(clock.elapsed()),
            };
            if left.is_zero() {
                let policy = Wait::from(timeout);
                return Err(self.no_room_at(pid, wait.unwrap_or(&policy)));
            }
            backoff.keep_up_with(state.next_sequence);
            // Others may send meanwhile, to subscribers that have room.
            drop((state, sending));
            self.pass(&mut backoff, left, seen);
            if let Some(wait) = wait.filter(|wait| wait.is_cancellable()) {
                waited_for = Some(pid);
                // What came at the end of the time is taken.
                if wait.is_over() && !wait.time_left().is_zero() {
                    return Err(self.no_room_at(pid, wait));
                }
            }
        }
    }

    /// How many changes there were, for [`pass`](Self::pass): read before the look that they could
    /// change.
    pub(in crate::pubsub) fn changes_seen(&self) -> u32 {
        self.changes.load(Acquire)
    }

    /// Passes the time until the next look, what is `left` of it, or until there are more changes
    /// than were `seen`.
    pub(super) fn pass(&self, backoff: &mut Backoff, left: Duration, seen: u32) {
        match backoff.step() {
            Duration::ZERO => backoff.spin(4),
            pause => self.sleep_until_changed(pause.min(left), seen),
        }
    }

    /// Sleeps until there are more changes than were `seen`; may wake sooner.
    pub(in crate::pubsub) fn sleep_until_changed(&self, limit: Duration, seen: u32) {
        atomic::wait(&self.changes, seen, limit);
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

    /// Takes the lock for sending.
    #[inline]
    pub(super) fn lock_sending(&self, wait: Option<&Wait<'_>>) -> Result<TimedGuard<'_>> {
        let what = || format!("send of {:?}", self.name);
        match wait {
            Some(wait) => self.send_lock.lock_for_a_send(wait, what),
            None => self.send_lock.lock_for_a_send(LOCK_TIMEOUT, what),
        }
    }
}
