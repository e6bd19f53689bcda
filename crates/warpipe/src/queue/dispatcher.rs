//! Runs a queue. A thread that waits for the queue does the queue's work itself. When none waits,
//! the queue's own thread does the work, and sleeps on the descriptors of all workers.

#[cfg(test)]
mod lost_wakeups;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::delivery::JobTableGuard;
use super::job_handle::JobResult;
use super::job_table::JobTable;
use super::owner::QueueBuilder;
use super::pending_workers::PendingWorkers;
use super::results_name;
use super::worker_session::{JobEvent, WorkerSession};
use crate::backoff::Backoff;
use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::ipc::domain::{Domain, EndpointName};
use crate::os::timespec;
use crate::pubsub::{Disconnects, Publisher, SubscriberChanges};
use crate::runtime::reactor::{DropReadiness, Reactor};
use crate::runtime::spin::{Came, Spin};

/// How often a waiter polls for the data of a result before it sleeps.
const POLLS: u32 = 16_000;

/// How often a waiter waits for the word of one result alone, and for how long each time.
const WORD_WAITS: u32 = 8;
const WORD_WAIT: Duration = Duration::from_micros(250);

/// How the polls of a waiter become rarer.
struct PollBackoff {
    backoff: Backoff,
    words: u32,
    /// How long the waiter polls; `None` before it had to wait.
    spin: Option<Duration>,
    asleep: Option<Instant>,
}

impl Default for PollBackoff {
    fn default() -> PollBackoff {
        PollBackoff {
            backoff: Backoff::spinning(POLLS),
            words: WORD_WAITS,
            spin: None,
            asleep: None,
        }
    }
}

/// A sleep is cut into slices, so that a fault elsewhere costs a slice instead of a hang.
const WAIT_SLICE: Duration = Duration::from_millis(50);

/// The tag of the queue's own doorbell. Workers have the tags from 1.
const OWN_DOORBELL: u64 = 0;

/// Each ring wakes one sleeper, once.
const EPOLL_FLAGS: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// The state that all handles of one queue share.
#[derive(Debug)]
pub(super) struct Dispatcher {
    pub(super) owner_process: OwnerProcess,
    pub(super) options: QueueBuilder,
    pub(super) domain: Domain,
    pub(super) publisher: Publisher,
    pub(super) observer: Arc<SubscriberChanges>,
    pub(super) pending_workers: PendingWorkers,
    spin: Spin,
    table: Mutex<JobTable>,
    changed: Condvar,
    /// Wakes the queue's own thread when no other thread leads any more.
    resume: Condvar,
    readable: CloseOnForkFd,
}

/// The name of a worker's answers, to be removed once no process holds it. A dying owner holds it
/// for a moment, and a child that the owner forked holds it until the child ends; a worker that
/// lives removes the name itself. There are as many of these as there are locks that others hold.
struct StaleName {
    domain: Domain,
    name: EndpointName,
    since: Instant,
    /// The age at which the name is next tried: later ages are further apart.
    next: Duration,
}

impl StaleName {
    fn try_remove(&mut self, now: Instant) -> DropReadiness {
        let age = now.saturating_duration_since(self.since);
        if age < self.next {
            return DropReadiness::Held;
        }
        self.next = age + age / 8;
        if self.domain.forget(&self.name) {
            DropReadiness::Ready
        } else {
            DropReadiness::Held
        }
    }
}

impl Dispatcher {
    pub(super) fn new(
        options: QueueBuilder,
        domain: Domain,
        publisher: Publisher,
        observer: Arc<SubscriberChanges>,
        table: JobTable,
    ) -> Result<Arc<Dispatcher>> {
        let readable = CloseOnForkFd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC));
        let readable = readable.map_err(|e| Error::os("epoll_create1", "a queue", e))?;
        epoll::add(
            &readable,
            &observer.doorbell,
            epoll::EventData::new_u64(OWN_DOORBELL),
            EPOLL_FLAGS,
        )
        .map_err(|e| Error::os("epoll_ctl", "a queue's bell", e))?;
        let dispatcher = Arc::new(Dispatcher {
            owner_process: OwnerProcess::current(),
            spin: Spin::new(options.shared.spin),
            options,
            domain,
            publisher,
            observer,
            pending_workers: PendingWorkers::default(),
            table: Mutex::new(table),
            changed: Condvar::new(),
            resume: Condvar::new(),
            readable,
        });
        let runner = dispatcher.clone();
        let spawned = std::thread::Builder::new()
            .name("warpipe-queue".into())
            .spawn(move || runner.run());
        spawned.map_err(|e| Error::os("clone", "a queue's thread", e))?;
        Ok(dispatcher)
    }

    pub(super) fn lock(&self) -> JobTableGuard<'_> {
        JobTableGuard::new(self, self.lock_table())
    }

    /// The lock is never held across a call of the driver that gives a stream work: see
    /// [`delivery`](super::delivery).
    pub(super) fn lock_table(&self) -> MutexGuard<'_, JobTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn gone(&self) -> Error {
        Error::QueueClosed {
            name: self.publisher.name().to_string(),
        }
    }

    /// Does the queue's work until `look` returns a value.
    pub(super) fn wait_until<T>(
        self: &Arc<Self>,
        timeout: Duration,
        mut look: impl FnMut(&mut JobTableGuard<'_>) -> Option<Result<T>>,
        what: impl FnOnce() -> Error,
    ) -> Result<T> {
        self.owner_process.check()?;
        let (mut clock, mut poll_backoff) = (Stopwatch::default(), PollBackoff::default());
        let mut table = self.lock();
        self.begin_polling(&mut table);
        let found = loop {
            self.process_events(&mut table);
            if table.is_closed {
                // A ring wakes one thread: this wakes the next one, too.
                self.observer.doorbell.ring();
                break Err(self.gone());
            }
            let before = table.changes;
            let found = look(&mut table);
            if table.changes != before {
                // An outcome that is taken makes room for a job.
                self.notify_waiters(&mut table);
            }
            self.end_if_drained(&mut table);
            if let Some(found) = found {
                if let Some(limit) = poll_backoff.spin {
                    let came = match poll_backoff.asleep {
                        Some(asleep) => Came::Asleep {
                            slept: asleep.elapsed(),
                        },
                        None => Came::Polling {
                            elapsed: clock.elapsed(),
                        },
                    };
                    self.spin.tell(limit, came);
                }
                break found;
            }
            let waited = clock.elapsed();
            if waited >= timeout {
                break Err(what());
            }
            self.pause(&mut table, waited, timeout - waited, &mut poll_backoff);
        };
        self.end_polling(&mut table);
        found
    }

    /// Puts back a result that was taken and not used, and wakes the threads that may wait for it.
    pub(super) fn put_back(&self, result: JobResult) -> Result<bool> {
        let mut table = self.lock();
        if table.is_closed {
            // The lock is released before the result is dropped.
            drop(table);
            return Err(self.gone());
        }
        let refused = table.put_back(result).err();
        self.notify_waiters(&mut table);
        drop(table);
        Ok(refused.is_none())
    }

    fn pause(
        &self,
        table: &mut JobTableGuard<'_>,
        waited: Duration,
        left: Duration,
        poll_backoff: &mut PollBackoff,
    ) {
        let has_pending_result = table
            .sessions
            .iter()
            .any(|session| !session.pending_results.is_empty());
        if poll_backoff.words > 0
            && let Some(word) = table.only_pending_result()
        {
            poll_backoff.words -= 1;
            return table.unlocked(|| word.wait(WORD_WAIT.min(left)));
        }
        let pause = match has_pending_result {
            true => poll_backoff.backoff.step(),
            false if waited < *poll_backoff.spin.get_or_insert_with(|| self.spin.limit()) => {
                Duration::ZERO
            }
            false => WAIT_SLICE,
        };
        if pause.is_zero() {
            return table.unlocked(|| (0..8).for_each(|_| std::hint::spin_loop()));
        }
        if !has_pending_result {
            poll_backoff.asleep = Some(Instant::now());
            self.end_polling(table);
        }
        match has_pending_result || table.has_leader {
            true => self.wait_for_change(table, pause.min(left)),
            false => self.wait_as_leader(table, pause.min(left)),
        }
        if !has_pending_result {
            self.begin_polling(table);
        }
    }

    /// Sleeps until another thread has found a change.
    pub(super) fn wait_for_change(&self, table: &mut JobTableGuard<'_>, limit: Duration) {
        table.sleepers += 1;
        table.sleep(&self.changed, limit);
        table.sleepers -= 1;
    }

    /// Sleeps on the descriptors itself: being woken by the queue's thread would cost a second
    /// wake-up.
    fn wait_as_leader(&self, table: &mut JobTableGuard<'_>, limit: Duration) {
        table.has_leader = true;
        table.unlocked(|| self.sleep(limit));
        table.has_leader = false;
        if table.is_parked {
            self.resume.notify_one();
        }
    }

    /// Sleeps until a worker or the queue itself rings, and drains the doorbells that rang. Each
    /// ring wakes one sleeper, which then does all pending work. Returns whether any rang.
    fn sleep(&self, limit: Duration) -> bool {
        let mut room = [const { std::mem::MaybeUninit::uninit() }; 16];
        let Ok((events, _)) = epoll::wait(&self.readable, &mut room, Some(&timespec(limit))) else {
            return false;
        };
        for event in &*events {
            match event.data.u64() {
                OWN_DOORBELL => self.observer.doorbell.drain(),
                id => self
                    .lock()
                    .session(id)
                    .into_iter()
                    .for_each(|session| session.subscriber.quiet()),
            }
        }
        !events.is_empty()
    }

    /// A thread polls from now on: workers need not ring.
    fn begin_polling(&self, table: &mut JobTable) {
        table.pollers += 1;
        if table.pollers == 1 {
            table
                .sessions
                .iter()
                .for_each(|session| session.subscriber.set_asleep(false));
        }
    }

    /// The thread no longer polls. Answers that came before the workers were asked to ring did not
    /// ring.
    fn end_polling(&self, table: &mut JobTable) {
        table.pollers -= 1;
        if table.pollers == 0 {
            table
                .sessions
                .iter()
                .for_each(|session| session.subscriber.set_asleep(true));
            let has_news = |session: &WorkerSession| {
                session.end.is_none() && session.subscriber.may_have_news()
            };
            let is_due = table
                .sessions
                .iter()
                .any(|session| has_news(session) || !session.pending_results.is_empty());
            // A job that could not be delivered waits for events that may not ring, such as results
            // that are released; a leader polls soon enough.
            let wakes_runner = (is_due || table.waiting() > 0) && table.sleeps_long;
            if wakes_runner || is_due && table.has_leader {
                self.observer.doorbell.ring();
            }
        }
    }

    /// A waiting job is retried in slices: what makes room for it, a device or the release of a
    /// result, rings no doorbell.
    pub(super) fn schedule_dispatch(&self, table: &mut JobTable) {
        if table.sleeps_idle && table.first_waiting().is_some() && !table.sessions.is_empty() {
            self.observer.doorbell.ring();
        }
    }

    /// Does all pending work.
    pub(super) fn process_events(self: &Arc<Self>, guard: &mut JobTableGuard<'_>) {
        let table = &mut **guard;
        if table.is_closed {
            return;
        }
        let before = table.changes;
        let mut events = Vec::new();
        if self.observer.take_news() {
            self.update_workers(table, &mut events);
        }
        let (timeout, now) = (table.rules.lease_timeout, table.now());
        for session in &mut table.sessions {
            if session.end.is_none() && session.subscriber.may_have_news() {
                session.receive_answers(now, &mut events);
            }
            if !session.pending_results.is_empty() {
                session.collect_results(&mut events);
            }
            if let Some(timeout) = timeout.filter(|_| !session.leases.is_empty()) {
                session.expire(timeout, now, &mut events);
            }
        }
        if table.sessions.iter().any(|session| session.end.is_some()) {
            self.remove_disconnected(table, &mut events);
        }
        events.into_iter().for_each(|event| table.apply(event));
        self.dispatch(guard);
        if guard.changes != before {
            self.notify_waiters(guard);
        }
        self.end_if_drained(guard);
    }

    /// After a shutdown, once the last job is done: releases the queue's name, and closes the
    /// workers' links gracefully. Their answers and results lie on links of their own, which stay.
    fn end_if_drained(&self, table: &mut JobTableGuard<'_>) {
        if !table.is_shut || table.is_drained || table.is_closed || table.unfinished() > 0 {
            return;
        }
        table.is_drained = true;
        for session in &mut table.sessions {
            session.is_leaving = true;
        }
        table.unlocked(|| self.publisher.close());
    }

    /// Wakes the threads that may wait for what has changed.
    fn notify_waiters(&self, table: &mut JobTable) {
        table.notify_watches();
        if table.sleepers > 0 {
            self.changed.notify_all();
        }
        if table.has_leader {
            self.observer.doorbell.ring();
        }
    }

    /// Wakes the threads that wait until a job has been delivered, and a thread to deliver the
    /// next.
    pub(super) fn notify_submitters(&self, table: &mut JobTable) {
        if table.sleepers > 0 {
            self.changed.notify_all();
        }
        self.observer.doorbell.ring();
    }

    /// Subscribers came or went.
    fn update_workers(self: &Arc<Self>, table: &mut JobTable, events: &mut Vec<JobEvent>) {
        self.return_undelivered(table, events);
        let members = self.publisher.linked_subscribers();
        for session in &mut table.sessions {
            session.is_leaving =
                table.is_drained || !members.iter().any(|member| member.id == session.id);
        }
        let JobTable {
            known, sessions, ..
        } = &mut *table;
        known.retain(|id| {
            members.iter().any(|member| member.id == *id)
                || sessions.iter().any(|session| session.id == *id)
        });
        for member in &members {
            // A worker without a free slot is handled when an attach ends, which rings.
            if self.pending_workers.has_free_slot() && table.known.insert(member.id) {
                self.attach_worker(*member);
            }
        }
        for (member, subscriber) in self.pending_workers.take() {
            if !members.iter().any(|present| present.id == member.id) {
                // The worker has gone meanwhile, and no other event will report it.
                continue;
            }
            let id = epoll::EventData::new_u64(member.id);
            if epoll::add(&self.readable, subscriber.descriptor(), id, EPOLL_FLAGS).is_err() {
                self.publisher
                    .expel(member.id, "its queue has no room for it");
                continue;
            }
            subscriber.set_asleep(table.pollers == 0);
            table
                .sessions
                .push(WorkerSession::new(member.id, member.pid, subscriber));
            table.changes += 1;
        }
    }

    /// Removes workers after the end of their answers. Jobs that they had not taken return at no cost;
    /// each other unanswered job has failed an attempt.
    fn remove_disconnected(&self, table: &mut JobTable, events: &mut Vec<JobEvent>) {
        for session in table
            .sessions
            .iter()
            .filter(|session| session.end.is_some())
        {
            if let Some((why, ..)) = session
                .end
                .as_ref()
                .filter(|_| self.publisher.has_subscriber(session.id))
            {
                self.publisher.expel(session.id, why);
            }
        }
        self.return_undelivered(table, events);
        for mut session in table
            .sessions
            .extract_if(.., |session| session.has_ended())
            .collect::<Vec<_>>()
        {
            if let Some(reason) = session.abandon_leases(events) {
                table.record_worker_end(session.id, reason);
            }
            let _ = epoll::delete(&self.readable, session.subscriber.descriptor());
        }
    }

    /// Returns jobs that gone workers had not taken, and removes the files that dead workers left:
    /// each name is used once, so no other process takes it again.
    fn return_undelivered(&self, table: &mut JobTable, events: &mut Vec<JobEvent>) {
        let departures = self.publisher.take_disconnects(false);
        for &(id, position) in &departures.untaken {
            table
                .session(id)
                .into_iter()
                .for_each(|session| session.undo_delivery(position, events));
            table.record_untaken(id, position);
        }
        self.remove_stale_names(departures);
    }

    fn remove_stale_names(&self, departures: Disconnects) {
        for generation in departures.generations {
            let name = results_name(self.publisher.name(), generation);
            if let (Ok(name), Ok(reactor)) = (name, Reactor::of_process()) {
                let mut stale = StaleName {
                    domain: self.domain.clone(),
                    name,
                    since: Instant::now(),
                    next: Duration::ZERO,
                };
                // Deferred: it may take a moment, and other threads wait.
                reactor.drop_after_unhurried(move || stale.try_remove(Instant::now()));
            }
        }
    }

    /// The body of the queue's own thread.
    fn run(self: Arc<Self>) {
        let mut has_rung = false;
        loop {
            let poll_interval = {
                let mut table = self.lock();
                // Set by this thread alone: a ring meant for it may have woken another one.
                (table.sleeps_long, table.sleeps_idle) = (false, false);
                if table.is_closed {
                    return self.observer.doorbell.ring();
                }
                self.process_events(&mut table);
                if table.is_closed {
                    continue;
                }
                if table.has_leader {
                    self.park(table, has_rung);
                    has_rung = false;
                    continue;
                }
                let poll_interval = if table.pollers > 0 {
                    WAIT_SLICE
                } else {
                    table.poll_interval()
                };
                (table.sleeps_long, table.sleeps_idle) =
                    (poll_interval >= WAIT_SLICE, poll_interval > WAIT_SLICE);
                poll_interval
            };
            has_rung = self.sleep(poll_interval);
        }
    }

    /// Leaves the descriptors to a user's thread. A ring that arrived here may have been meant for
    /// that thread.
    fn park(&self, mut table: JobTableGuard<'_>, has_rung: bool) {
        if has_rung {
            self.observer.doorbell.ring();
        }
        table.is_parked = true;
        table.sleep(&self.resume, WAIT_SLICE);
        table.is_parked = false;
    }

    /// Ends the queue: notifies waiting threads and workers, and drops the data of unfinished jobs.
    pub(super) fn close(&self) {
        let mut table = self.lock();
        let rules = table.rules;
        // Dropped without the lock: this sends `Close` to workers and defers the drop of memory.
        let mut old = std::mem::replace(&mut *table, JobTable::new(rules));
        (table.is_closed, table.is_shut) = (true, true);
        table.pollers = old.pollers;
        table.sleepers = old.sleepers;
        table.has_leader = old.has_leader;
        drop(table);
        old.notify_watches();
        drop(old);
        self.changed.notify_all();
        // Closed now: the last holder of the state is the queue's own thread, which may not run
        // again if `main` returns.
        self.publisher.close();
        // Workers that died just now, before this process has seen it, are still listed as
        // attached.
        self.remove_stale_names(self.publisher.take_disconnects(true));
        self.observer.doorbell.ring();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_dead_workers_stale_name_is_removed_once_its_lock_is_free() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-queue-left-{}", std::process::id()));
        let (domain, name) = (
            Domain::at(&folder).unwrap(),
            EndpointName::new("a").unwrap(),
        );
        std::fs::write(folder.join("a.lock"), "warpipe 999999999 \n").unwrap();
        let held = std::fs::File::options()
            .write(true)
            .open(folder.join("a.lock"))
            .unwrap();
        crate::os::ofd_write_lock(held.as_fd(), 0).unwrap();
        let since = Instant::now();
        let mut stale = StaleName {
            domain,
            name,
            since,
            next: Duration::ZERO,
        };
        let after = |days: u32| since + days * Duration::from_secs(24 * 3600);
        for days in 0..4 {
            assert_eq!(stale.try_remove(after(days)), DropReadiness::Held);
        }
        drop(held);
        assert_eq!(stale.try_remove(after(5)), DropReadiness::Ready);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(folder).unwrap();
    }
}
