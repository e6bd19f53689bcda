//! Waiting for a queue. Threads wait in one loop ([`Dispatcher::wait_until`]): a thread polls for a
//! while, and does the queue's work meanwhile; then it sleeps, the first one on the descriptors
//! (the *leader*), others until a change. The queue's own thread does the work when no other does.
//!
//! - Some thread looks in time: the queue's own sleeps no longer than [`State::next_look`] says, or
//!   is rung; a ring that a leader takes instead has the work done as well.
//! - While no thread polls, workers are asked to ring; answers that came before are looked at.
//! - A change of the jobs or workers wakes every sleeper, the leader, and every watch.

#[cfg(test)]
mod lost_wakeups;

use std::cell::Cell;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::{Dispatcher, State, StateGuard, WorkerSession};
use crate::backoff::Backoff;
use crate::error::{Error, LimitFault, Result};
use crate::pubsub::Receipt;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::reactor::TICK;
use crate::runtime::spin::Polls;
use crate::wait::Wait;

/// The interval of looks without a ring.
const IDLE_INTERVAL: Duration = Duration::from_secs(10);

/// How often a waiter polls for the data of a result before it sleeps.
const POLLS: u32 = 16_000;

/// How often a waiter waits for the word of one result alone, and for how long each time.
const WORD_WAITS: u32 = 8;
const WORD_WAIT: Duration = Duration::from_micros(250);

/// How the polls of a waiter become rarer.
struct PollBackoff {
    backoff: Backoff,
    words: u32,
    /// The polls for a job or an outcome; `None` before the waiter had to wait.
    polls: Option<Polls>,
}

/// A sleep is cut into slices, so that a fault elsewhere costs a slice instead of a hang.
const WAIT_SLICE: Duration = Duration::from_millis(50);

/// The tag of the queue's own doorbell. Workers have the tags from 1.
pub(in crate::queue) const OWN_DOORBELL: u64 = 0;

/// The threads and event loops that wait, counted under the queue's lock.
#[derive(Debug, Default)]
pub(in crate::queue) struct Waiters {
    /// Users' threads that poll.
    pub(in crate::queue) polling: u32,
    /// Threads that sleep until a change.
    sleeping: u32,
    /// How long the queue's own thread sleeps at most; zero while it is awake.
    runner_sleep: Duration,
    /// A user's thread sleeps on the descriptors.
    has_leader: bool,
    /// The queue's own thread leaves the descriptors to the leader.
    is_parked: bool,
    /// Rung at every change: event loops sleep on them.
    watches: Vec<Weak<LocalDoorbell>>,
}

impl Waiters {
    pub(in crate::queue) fn add_watch(&mut self, watch: &Arc<LocalDoorbell>) {
        self.watches.push(Arc::downgrade(watch));
    }

    /// Rings all watches, and removes those that were dropped.
    pub(in crate::queue) fn notify_watches(&mut self) {
        self.watches.retain(|watch| {
            watch
                .upgrade()
                .inspect(|doorbell| doorbell.ring())
                .is_some()
        });
    }

    #[cfg(test)]
    pub(in crate::queue) fn has_sleeper(&self) -> bool {
        self.has_leader || self.sleeping > 0
    }

    /// How long the threads that sleep on the descriptors, or would, may sleep.
    fn longest_sleep(&self) -> Duration {
        match self.has_leader {
            true => self.runner_sleep.max(WAIT_SLICE),
            false => self.runner_sleep,
        }
    }
}

impl State {
    /// The data of the only result that was announced and is not complete.
    fn only_pending_result(&self) -> Option<Receipt> {
        let mut pending_results = self
            .sessions
            .iter()
            .flat_map(|session| &session.pending_results);
        let first = pending_results.next()?;
        pending_results
            .next()
            .is_none()
            .then(|| first.arrival.receipt())
    }

    /// Whether a device is to complete a result, or the input of a job: it cannot ring.
    fn awaits_device(&self) -> bool {
        let is_pending = |session: &WorkerSession| !session.pending_results.is_empty();
        self.is_input_due || self.sessions.iter().any(is_pending)
    }

    /// The time after which a thread must look although nothing rings.
    pub(in crate::queue) fn next_look(&self) -> Duration {
        if self.sessions.iter().any(|session| session.has_news()) {
            return Duration::ZERO;
        }
        let parting = self.sessions.iter().any(|session| session.end.is_some());
        // Room for a job comes from a device or the release of a result: neither rings a doorbell.
        let has_work = parting || !self.table.waiting.is_empty();
        let limit = match (self.awaits_device(), has_work) {
            (true, _) => Duration::from_micros(250),
            (false, true) => WAIT_SLICE,
            (false, false) => IDLE_INTERVAL,
        };
        let expiry = self.table.next_expiry(self.now());
        limit.min(expiry.map_or(limit, |left| {
            // The clock of leases is read with every tick.
            left.saturating_add(Duration::from_millis(1)).min(TICK)
        }))
    }
}

/// A thread's wait: the thread counts as polling, but for its sleeps, until this is dropped.
struct PollingGuard<'a> {
    dispatcher: &'a Dispatcher,
    guard: StateGuard<'a>,
}

impl<'a> PollingGuard<'a> {
    fn begin(dispatcher: &'a Dispatcher) -> PollingGuard<'a> {
        let mut guard = dispatcher.lock();
        dispatcher.begin_polling(&mut guard);
        PollingGuard { dispatcher, guard }
    }
}

impl Drop for PollingGuard<'_> {
    fn drop(&mut self) {
        // A call without the lock may have panicked.
        self.guard.relock();
        self.dispatcher.end_polling(&mut self.guard);
    }
}

impl Dispatcher {
    /// Does the queue's work until `look` returns a value. What comes while it waits is looked at
    /// after the wait was asked whether it is cancelled: `look` may take it.
    pub(in crate::queue) fn wait_until<'w, T>(
        self: &Arc<Self>,
        wait: impl Into<Wait<'w>>,
        mut look: impl FnMut(&mut StateGuard<'_>) -> Option<Result<T>>,
        late: impl FnOnce(&State) -> Error,
    ) -> Result<T> {
        self.owner_process.check()?;
        let wait = wait.into();
        let mut poll_backoff = PollBackoff {
            backoff: Backoff::spinning(POLLS),
            words: WORD_WAITS,
            polls: None,
        };
        let mut polling = PollingGuard::begin(self);
        let guard = &mut polling.guard;
        // The revision at the last look.
        let (mut seen, mut must_ask) = (None, false);
        loop {
            if must_ask && self.without_polling(guard, || wait.is_cancelled()) {
                break Err(late(guard));
            }
            self.process_events(guard);
            let is_new = seen.is_some_and(|seen| seen != guard.table.revision);
            if is_new && !must_ask && wait.is_cancellable() {
                must_ask = true;
                continue;
            }
            if guard.table.is_closed() {
                // A ring wakes one thread: this wakes the next one, too.
                self.observer.doorbell.ring();
                break Err(self.gone());
            }
            let before = guard.table.revision;
            let found = look(guard);
            self.observer.note_waiting(guard.jobs_without_worker());
            if guard.table.revision != before {
                // An outcome that is taken makes room for a job.
                self.notify_waiters(&mut guard.waiters);
            }
            seen = Some(guard.table.revision);
            self.end_if_drained(guard);
            if let Some(found) = found {
                break found;
            }
            let left = wait.time_left();
            if left.is_zero() {
                break Err(late(guard));
            }
            // Never between the look and the sleep: what comes without the lock wakes no thread
            // that does not sleep yet.
            must_ask = wait.is_look_due();
            if !must_ask {
                self.pause(guard, left, &mut poll_backoff);
            }
        }
    }

    /// Does the queue's work, and applies `question`.
    pub(in crate::queue) fn ask<T>(
        self: &Arc<Self>,
        mut question: impl FnMut(&mut State) -> T,
    ) -> Result<T> {
        let look = |state: &mut StateGuard<'_>| Some(Ok(question(state)));
        self.wait_until(Duration::ZERO, look, |_| self.gone())
    }

    /// Does the queue's work until a job can be entered, or no longer can because the queue is
    /// shut, and no other thread submits. Then calls `enter`.
    pub(in crate::queue) fn wait_to_submit<T>(
        self: &Arc<Self>,
        wait: &Wait<'_>,
        mut enter: impl FnMut(&mut StateGuard<'_>) -> Option<T>,
    ) -> Result<T> {
        let name = &self.name;
        let is_full = Cell::new(false);
        let has_room = |state: &State| state.table.is_shut() || state.table.has_room();
        let full = |state: &State| {
            is_full.set(true);
            Error::Limit(LimitFault::Jobs {
                name: name.clone(),
                limit: state.table.rules.limit,
                waited: wait.limit(),
            })
        };
        loop {
            let submitting = self
                .submit_lock
                .lock_for_a_send(wait, || format!("submit to {name:?}"))?;
            let look = |guard: &mut StateGuard<'_>| {
                has_room(guard).then(|| enter(guard)).flatten().map(Ok)
            };
            let entered = self.wait_until(Duration::ZERO, look, full);
            drop(submitting);
            if !is_full.replace(false) || wait.time_left().is_zero() {
                return entered;
            }
            self.wait_until(wait, |guard| has_room(guard).then_some(Ok(())), full)?;
        }
    }

    /// Makes a call that may last, as one that runs a signal's handler, without the lock and as a
    /// thread that does not poll.
    fn without_polling<T>(&self, guard: &mut StateGuard<'_>, call: impl FnOnce() -> T) -> T {
        struct PollAgain<'d, 'g, 'a>(&'d Dispatcher, &'g mut StateGuard<'a>);

        impl Drop for PollAgain<'_, '_, '_> {
            fn drop(&mut self) {
                // The call may have panicked.
                self.1.relock();
                self.0.begin_polling(self.1);
            }
        }

        self.end_polling(guard);
        PollAgain(self, guard).1.unlocked(call)
    }

    /// Passes the time until the next look.
    fn pause(&self, guard: &mut StateGuard<'_>, left: Duration, poll_backoff: &mut PollBackoff) {
        let awaits_device = guard.awaits_device();
        if poll_backoff.words > 0
            && let Some(receipt) = guard.only_pending_result()
        {
            poll_backoff.words -= 1;
            // The next look asks again, whatever the result.
            guard.unlocked(|| receipt.wait_word(WORD_WAIT.min(left)));
            return;
        }
        let PollBackoff { backoff, polls, .. } = poll_backoff;
        let pause = match awaits_device {
            true => backoff.step(),
            false => WAIT_SLICE,
        };
        if pause.is_zero() {
            return guard.unlocked(|| backoff.spin(8));
        }
        if !awaits_device {
            let polls = polls.get_or_insert_with(|| Polls::for_at_most(self.spin.min(left)));
            if guard.unlocked(|| polls.pass()) {
                return;
            }
            self.end_polling(guard);
        }
        match awaits_device || guard.waiters.has_leader {
            true => self.wait_for_change(guard, pause.min(left)),
            false => self.wait_as_leader(guard, pause.min(left)),
        }
        if !awaits_device {
            self.begin_polling(guard);
        }
    }

    /// Sleeps until another thread has found a change.
    pub(in crate::queue) fn wait_for_change(&self, guard: &mut StateGuard<'_>, limit: Duration) {
        guard.waiters.sleeping += 1;
        guard.sleep(&self.changed, limit);
        guard.waiters.sleeping -= 1;
    }

    /// Sleeps on the descriptors itself: being woken by the queue's thread would cost a second
    /// wake-up.
    fn wait_as_leader(&self, guard: &mut StateGuard<'_>, limit: Duration) {
        guard.waiters.has_leader = true;
        guard.unlocked(|| self.sleep(limit));
        guard.waiters.has_leader = false;
        if guard.waiters.is_parked {
            self.resume.notify_one();
        }
    }

    /// Sleeps until a worker or the queue itself rings, and drains the doorbells that rang. Each
    /// ring wakes one sleeper, which then does all pending work. Returns whether any rang.
    fn sleep(&self, limit: Duration) -> bool {
        let mut has_rung = false;
        for tag in self.readable.wait(limit) {
            has_rung = true;
            match tag {
                OWN_DOORBELL => self.observer.doorbell.drain(),
                id => self
                    .lock()
                    .session(id)
                    .into_iter()
                    .for_each(|session| session.answers.drain()),
            }
        }
        has_rung
    }

    /// A thread polls from now on: workers need not ring.
    fn begin_polling(&self, state: &mut State) {
        state.waiters.polling += 1;
        if state.waiters.polling == 1 {
            state
                .sessions
                .iter()
                .for_each(|session| session.answers.set_asleep(false));
        }
    }

    /// The thread no longer polls. Answers that came before the workers were asked to ring did not
    /// ring.
    fn end_polling(&self, state: &mut State) {
        state.waiters.polling -= 1;
        if state.waiters.polling == 0 {
            state
                .sessions
                .iter()
                .for_each(|session| session.answers.set_asleep(true));
            self.keep_next_look(state);
        }
    }

    /// Wakes a sleeper if all would sleep beyond the next look, which this thread's work may have
    /// brought forward.
    pub(in crate::queue) fn keep_next_look(&self, state: &State) {
        if state.waiters.longest_sleep() > state.next_look() {
            self.observer.doorbell.ring();
        }
    }

    /// Wakes the threads that may wait for what has changed.
    pub(in crate::queue) fn notify_waiters(&self, waiters: &mut Waiters) {
        waiters.notify_watches();
        if waiters.sleeping > 0 {
            self.changed.notify_all();
        }
        if waiters.has_leader {
            self.observer.doorbell.ring();
        }
    }

    /// The body of the queue's own thread.
    pub(in crate::queue) fn run(self: Arc<Self>) {
        let mut has_rung = false;
        loop {
            let mut guard = self.lock();
            // Set by this thread alone: a ring meant for it may have woken another one.
            guard.waiters.runner_sleep = Duration::ZERO;
            if guard.table.is_closed() {
                return self.observer.doorbell.ring();
            }
            self.process_events(&mut guard);
            if guard.table.is_closed() {
                continue;
            }
            if guard.waiters.has_leader {
                self.park(guard, has_rung);
                has_rung = false;
                continue;
            }
            let interval = match guard.waiters.polling {
                0 => guard.next_look(),
                _ => WAIT_SLICE,
            };
            guard.waiters.runner_sleep = interval;
            drop(guard);
            has_rung = self.sleep(interval);
        }
    }

    /// Leaves the descriptors to a user's thread. A ring that arrived here may have been meant for
    /// that thread.
    fn park(&self, mut guard: StateGuard<'_>, has_rung: bool) {
        if has_rung {
            self.observer.doorbell.ring();
        }
        guard.waiters.is_parked = true;
        guard.waiters.runner_sleep = WAIT_SLICE;
        guard.sleep(&self.resume, WAIT_SLICE);
        guard.waiters.is_parked = false;
    }
}
