//! How a sender waits for room: it looks, then sleeps until a reader rings.

use super::turn::TurnWait;
use super::*;

impl Core {
    /// Waits until every recipient that may not miss a sample has room for one, and nobody else sends. Takes the turn.
    pub(super) fn make_room(&self, to: Recipients) -> Result<Turn<'_>> {
        self.make_room_within(to, None)
    }

    /// Waits at most `timeout` until a send would not have to wait. Sends nothing.
    pub(in crate::channel) fn wait_for_room(&self, to: Recipients, timeout: Duration) -> Result<()> {
        match self.make_room_within(to, Some(timeout)) {
            // A policy that fails is the send's to apply.
            Ok(_) | Err(Error::Full { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// `limit` replaces the timeout of the subscribers' policies, and that of the turn.
    pub(super) fn make_room_within(&self, to: Recipients, limit: Option<Duration>) -> Result<Turn<'_>> {
        self.home.check()?;
        let mut clock = Stopwatch::default();
        let mut backoff = Backoff::spinning(LOOKS);
        let mut wait = TurnWait::within(limit);
        let mut state = self.lock();
        loop {
            if state.is_sending {
                state = self.wait_for_turn(state, &mut wait)?;
                continue;
            }
            if state.closed {
                return Err(Error::PublisherGone { name: self.name.clone(), pid: own_pid(), graceful: true });
            }
            to.check(&self.name, &mut state)?;
            // Whether there is room does not depend on what has been reclaimed.
            let Some(full) = state.first_full(to) else { return Ok(Turn::begin(self, state)) };
            let subscriber = format!("process {}", full.peer.pid);
            let Policy::Block { timeout } = full.policy else {
                return Err(Error::Full { name: self.name.clone(), subscriber, depth: self.options.depth });
            };
            let timeout = limit.unwrap_or(timeout);
            let left = timeout.saturating_sub(clock.elapsed());
            if left.is_zero() {
                let depth = self.options.depth;
                let what = format!(
                    "room at subscriber {subscriber} of {:?} (it has not released the {depth} samples of its depth)",
                    self.name
                );
                return Err(Error::Timeout { what, waited: timeout });
            }
            state = self.wait_for_release(state, left, &mut backoff, |outlet| to.await_it(outlet));
        }
    }

    /// Sleeps until a subscriber that `concerns` us releases something, a link changes, or a slice of `left` has
    /// passed. Nobody else is asked to ring: that is a system call for each release of each subscriber.
    pub(super) fn wait_for_release<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        left: Duration,
        backoff: &mut Backoff,
        concerns: impl Fn(&Outlet) -> bool,
    ) -> MutexGuard<'a, State> {
        let pause = backoff.step();
        if pause.is_zero() {
            // The next release is mostly a moment away, and going to sleep is dearer than that.
            drop(state);
            (0..4).for_each(|_| std::hint::spin_loop());
            return self.lock();
        }
        let before = state.freed_count();
        state.outlets.iter().filter(|outlet| concerns(outlet)).for_each(|outlet| outlet.set_asleep(true));
        // Whatever was released before the flags went up did not ring.
        self.reclaim(&mut state, true);
        if state.freed_count() == before {
            // A device that completes a release cannot ring: while one is due, look again soon.
            let awaited = || state.outlets.iter().filter(|outlet| concerns(outlet));
            let device_owes = !state.arena.is_quiet() || awaited().any(Outlet::device_owes);
            let slice = if device_owes { pause } else { SLICE }.min(left);
            let wakes: Vec<Arc<Wake>> = awaited().map(|outlet| outlet.wake.clone()).collect();
            drop(state);
            self.sleep(&wakes, slice);
            state = self.lock();
        }
        state.outlets.iter().for_each(|outlet| outlet.set_asleep(false));
        state
    }

    /// Sleeps until a subscriber or the watcher rings, and takes in what rang: with many subscribers, to ask all
    /// of them would cost more than the rest of a send. What rings later makes the next sleep a short one.
    fn sleep(&self, wakes: &[Arc<Wake>], limit: Duration) {
        let open: Vec<&Wake> = wakes.iter().map(|wake| &**wake).filter(|wake| !wake.is_closed()).collect();
        let mut polls: Vec<_> = open.iter().map(|wake| PollFd::new(*wake, PollFlags::IN)).collect();
        polls.push(PollFd::new(&self.bell, PollFlags::IN));
        if rustix::event::poll(&mut polls, Some(&message::timespec(limit))).is_err() {
            return;
        }
        let rang = |poll: &PollFd<'_>| !poll.revents().is_empty();
        open.iter().zip(&polls).filter(|(_, poll)| rang(poll)).for_each(|(wake, _)| wake.drain());
        if polls.last().is_some_and(rang) {
            self.bell.drain();
        }
    }
}
