//! Who looks after a queue, and when: any thread that waits for it does the work itself, and when none does, one thread
//! of the queue's own, which sleeps on the descriptors of all workers.

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
use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::message::timespec;
use crate::pubsub::{Disconnects, Publisher, SubscriberChanges};
use crate::runtime::reactor::{DropReadiness, Reactor};
use crate::runtime::spin::{Came, Spin};
use crate::stream::Backoff;

/// Looks for the data of a result before its waiter sleeps.
const POLLS: u32 = 16_000;

/// How often, and how long each, a waiter looks for one result's data and for nothing else.
const WORD_WAITS: u32 = 8;
const WORD_WAIT: Duration = Duration::from_micros(250);

/// How a waiter's looks get fewer.
struct PollBackoff {
    backoff: Backoff,
    words: u32,
    /// How long it polls; `None` before it had to wait.
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

/// A sleep in slices, so that nothing that goes wrong elsewhere makes a hang of it.
const WAIT_SLICE: Duration = Duration::from_millis(50);

/// What rings the queue itself, among its workers' numbers (which begin with 1).
const OWN_DOORBELL: u64 = 0;

/// Each ring is told to one sleeper, once.
const EPOLL_FLAGS: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// What all handles of one queue share.
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
    /// For the queue's own thread, when nobody leads any more.
    resume: Condvar,
    readable: CloseOnForkFd,
}

/// The name of a worker's answers, which is removed once nobody holds it: its dying owner does for a moment, a child that
/// one forked until it ends; a worker that lives removes it itself. As many wait as there are locks that others hold.
struct StaleName {
    domain: Domain,
    name: EndpointName,
    since: Instant,
    /// The age at which it is looked at again: seldom, after a while.
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
            spin: Spin::new(options.spin),
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

    /// Never held across a call of the driver that gives a stream work: see [`delivery`](super::delivery).
    pub(super) fn lock_table(&self) -> MutexGuard<'_, JobTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn gone(&self) -> Error {
        Error::QueueClosed {
            name: self.publisher.name().to_string(),
        }
    }

    /// Does the queue's work until `look` finds what it looks for.
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
                // A ring wakes one: the next one is to hear of it, too.
                self.observer.doorbell.ring();
                break Err(self.gone());
            }
            let before = table.changes;
            let found = look(&mut table);
            if table.changes != before {
                // An outcome that is taken makes room for a job.
                self.notify_waiters(&mut table);
            }
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

    /// Takes back a result that was taken and not used, and wakes whoever may wait for it.
    pub(super) fn put_back(&self, result: JobResult) -> Result<bool> {
        let mut table = self.lock();
        if table.is_closed {
            // First the lock goes, then the result.
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

    /// Sleeps until somebody who looked has found something.
    pub(super) fn wait_for_change(&self, table: &mut JobTableGuard<'_>, limit: Duration) {
        table.sleepers += 1;
        table.sleep(&self.changed, limit);
        table.sleepers -= 1;
    }

    /// Sleeps on the descriptors itself: to be woken by the queue's thread would cost a second wake-up.
    fn wait_as_leader(&self, table: &mut JobTableGuard<'_>, limit: Duration) {
        table.has_leader = true;
        table.unlocked(|| self.sleep(limit));
        table.has_leader = false;
        if table.is_parked {
            self.resume.notify_one();
        }
    }

    /// Sleeps until a worker or the queue itself rings, and takes in what rang. Each ring wakes one sleeper, who then
    /// does whatever there is to do. Returns whether anything rang.
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

    /// A thread looks by itself from now on: workers need not ring.
    fn begin_polling(&self, table: &mut JobTable) {
        table.pollers += 1;
        if table.pollers == 1 {
            table
                .sessions
                .iter()
                .for_each(|session| session.subscriber.set_asleep(false));
        }
    }

    /// It no longer does. Whatever came before the workers were asked to ring did not.
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
            // A job that could not be given out waits for what may not ring, such as results that are released; a
            // leader looks soon enough.
            let wakes_runner = (is_due || table.waiting() > 0) && table.sleeps_long;
            if wakes_runner || is_due && table.has_leader {
                self.observer.doorbell.ring();
            }
        }
    }

    /// A job that waits is looked at in slices: what makes room for it, a device or the release of a result, rings nobody.
    pub(super) fn schedule_dispatch(&self, table: &mut JobTable) {
        if table.sleeps_idle && table.first_waiting().is_some() && !table.sessions.is_empty() {
            self.observer.doorbell.ring();
        }
    }

    /// Everything that is to be done just now.
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
    }

    /// Wakes whoever may wait for what has changed.
    fn notify_waiters(&self, table: &mut JobTable) {
        table.notify_watches();
        if table.sleepers > 0 {
            self.changed.notify_all();
        }
        if table.has_leader {
            self.observer.doorbell.ring();
        }
    }

    /// Wakes whoever waits until a job has been given out, and somebody to give out the next.
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
            session.is_leaving = !members.iter().any(|member| member.id == session.id);
        }
        let JobTable {
            known, sessions, ..
        } = &mut *table;
        known.retain(|id| {
            members.iter().any(|member| member.id == *id)
                || sessions.iter().any(|session| session.id == *id)
        });
        for member in &members {
            // Who has no turn now is looked at when one ends, which is news.
            if self.pending_workers.has_free_slot() && table.known.insert(member.id) {
                self.attach_worker(*member);
            }
        }
        for (member, subscriber) in self.pending_workers.take() {
            if !members.iter().any(|present| present.id == member.id) {
                // Gone meanwhile, and nobody will say so again.
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

    /// Workers whose answers have come to an end: what they had not taken comes back, and the rest was an attempt.
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

    /// Takes back what those who have gone had not taken, and removes the files that the dead left: their names were for
    /// once, and nobody will take them again.
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
                // Not here: it may take a moment, and others wait.
                reactor.drop_after_unhurried(move || stale.try_remove(Instant::now()));
            }
        }
    }

    /// The queue's own thread.
    fn run(self: Arc<Self>) {
        let mut has_rung = false;
        loop {
            let poll_interval = {
                let mut table = self.lock();
                // Said by this thread alone: a ring that was for it may have woken another one.
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

    /// Leaves the descriptors to a user's thread. What rang here may have been meant for that.
    fn park(&self, mut table: JobTableGuard<'_>, has_rung: bool) {
        if has_rung {
            self.observer.doorbell.ring();
        }
        table.is_parked = true;
        table.sleep(&self.resume, WAIT_SLICE);
        table.is_parked = false;
    }

    /// Ends everything: who waits is told, workers are told, and nothing is kept for jobs that are not done.
    pub(super) fn close(&self) {
        let mut table = self.lock();
        let rules = table.rules;
        // Dropped without the lock: that says goodbye to workers and leaves memory to be let go.
        let mut old = std::mem::replace(&mut *table, JobTable::new(rules));
        (table.is_closed, table.is_shut) = (true, true);
        table.pollers = old.pollers;
        table.sleepers = old.sleepers;
        table.has_leader = old.has_leader;
        drop(table);
        old.notify_watches();
        drop(old);
        self.changed.notify_all();
        // Now: the last holder of all this is the queue's own thread, which may not live to see it if `main` returns.
        self.publisher.close();
        // Those who died just now, before anybody has seen it, are among those who are still here.
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
