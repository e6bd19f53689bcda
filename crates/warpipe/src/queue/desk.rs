//! Who looks after a queue, and when: any thread that waits for it does the work itself, and when none does, one thread
//! of the queue's own, which sleeps on the descriptors of all workers.

#[cfg(test)]
mod overlooked;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::answers_of;
use super::giving::Books;
use super::handle::JobResult;
use super::ledger::Ledger;
use super::owner::QueueBuilder;
use super::recruit::Recruits;
use super::seat::{Finding, Seat};
use crate::channel::{Departures, Observer, Publisher};
use crate::clock::Stopwatch;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::{Home, PrivateFd};
use crate::link::message::timespec;
use crate::link::watcher::{Usage, Watcher};
use crate::spin::{Came, Spin};
use crate::stream::Backoff;

/// Looks for the data of a result before its waiter sleeps.
const LOOKS: u32 = 16_000;

/// How often, and how long each, a waiter looks for one result's data and for nothing else.
const WORDS: u32 = 8;
const NEARLY: Duration = Duration::from_micros(250);

/// How a waiter's looks get fewer.
struct Pace {
    backoff: Backoff,
    words: u32,
    /// How long it polls; `None` before it had to wait.
    spin: Option<Duration>,
    asleep: Option<Instant>,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { backoff: Backoff::spinning(LOOKS), words: WORDS, spin: None, asleep: None }
    }
}

/// A sleep in slices, so that nothing that goes wrong elsewhere makes a hang of it.
const SLICE: Duration = Duration::from_millis(50);

/// What rings the queue itself, among its workers' numbers (which begin with 1).
const OWN: u64 = 0;

/// Each ring is told to one sleeper, once.
const LISTEN: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// What all handles of one queue share.
#[derive(Debug)]
pub(super) struct Desk {
    pub(super) home: Home,
    pub(super) options: QueueBuilder,
    pub(super) domain: Domain,
    pub(super) publisher: Publisher,
    pub(super) observer: Arc<Observer>,
    pub(super) recruits: Recruits,
    spin: Spin,
    ledger: Mutex<Ledger>,
    changed: Condvar,
    /// For the queue's own thread, when nobody leads any more.
    resume: Condvar,
    readable: PrivateFd,
}

/// The name of a worker's answers, which is removed once nobody holds it: its dying owner does for a moment, a child that
/// one forked until it ends; a worker that lives removes it itself. As many wait as there are locks that others hold.
struct Left {
    domain: Domain,
    name: EndpointName,
    since: Instant,
    /// The age at which it is looked at again: seldom, after a while.
    next: Duration,
}

impl Left {
    fn look(&mut self, now: Instant) -> Usage {
        let age = now.saturating_duration_since(self.since);
        if age < self.next {
            return Usage::Held;
        }
        self.next = age + age / 8;
        if self.domain.forget(&self.name) { Usage::Over } else { Usage::Held }
    }
}

impl Desk {
    pub(super) fn new(
        options: QueueBuilder,
        domain: Domain,
        publisher: Publisher,
        observer: Arc<Observer>,
        ledger: Ledger,
    ) -> Result<Arc<Desk>> {
        let readable = PrivateFd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC));
        let readable = readable.map_err(|e| Error::os("epoll_create1", "a queue", e))?;
        epoll::add(&readable, &observer.bell, epoll::EventData::new_u64(OWN), LISTEN)
            .map_err(|e| Error::os("epoll_ctl", "a queue's bell", e))?;
        let desk = Arc::new(Desk {
            home: Home::here(),
            spin: Spin::new(options.spin),
            options,
            domain,
            publisher,
            observer,
            recruits: Recruits::default(),
            ledger: Mutex::new(ledger),
            changed: Condvar::new(),
            resume: Condvar::new(),
            readable,
        });
        let runner = desk.clone();
        let spawned = std::thread::Builder::new().name("warpipe-queue".into()).spawn(move || runner.run());
        spawned.map_err(|e| Error::os("clone", "a queue's thread", e))?;
        Ok(desk)
    }

    pub(super) fn lock(&self) -> Books<'_> {
        Books::new(self, self.lock_ledger())
    }

    /// Never held across a call of the driver that gives a stream work: see [`giving`](super::giving).
    pub(super) fn lock_ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn gone(&self) -> Error {
        Error::QueueClosed { name: self.publisher.name().to_string() }
    }

    /// Does the queue's work until `look` finds what it looks for.
    pub(super) fn attend<T>(
        self: &Arc<Self>,
        timeout: Duration,
        mut look: impl FnMut(&mut Books<'_>) -> Option<Result<T>>,
        what: impl FnOnce() -> Error,
    ) -> Result<T> {
        self.home.check()?;
        let (mut clock, mut pace) = (Stopwatch::default(), Pace::default());
        let mut ledger = self.lock();
        self.begin_polling(&mut ledger);
        let found = loop {
            self.work(&mut ledger);
            if ledger.is_closed {
                // A ring wakes one: the next one is to hear of it, too.
                self.observer.bell.ring();
                break Err(self.gone());
            }
            let before = ledger.changes;
            let found = look(&mut ledger);
            if ledger.changes != before {
                // An outcome that is taken makes room for a job.
                self.tell_sleepers(&mut ledger);
            }
            if let Some(found) = found {
                if let Some(limit) = pace.spin {
                    let came = match pace.asleep {
                        Some(asleep) => Came::Asleep { slept: asleep.elapsed() },
                        None => Came::Polling { elapsed: clock.elapsed() },
                    };
                    self.spin.tell(limit, came);
                }
                break found;
            }
            let waited = clock.elapsed();
            if waited >= timeout {
                break Err(what());
            }
            self.pause(&mut ledger, waited, timeout - waited, &mut pace);
        };
        self.end_polling(&mut ledger);
        found
    }

    /// Takes back a result that was taken and not used, and wakes whoever may wait for it.
    pub(super) fn put_back(&self, result: JobResult) -> Result<bool> {
        let mut ledger = self.lock();
        if ledger.is_closed {
            // First the lock goes, then the result.
            drop(ledger);
            return Err(self.gone());
        }
        let refused = ledger.put_back(result).err();
        self.tell_sleepers(&mut ledger);
        drop(ledger);
        Ok(refused.is_none())
    }

    fn pause(&self, ledger: &mut Books<'_>, waited: Duration, left: Duration, pace: &mut Pace) {
        let is_nearly_there = ledger.seats.iter().any(|seat| !seat.unready.is_empty());
        if pace.words > 0
            && let Some(word) = ledger.only_unready()
        {
            pace.words -= 1;
            return ledger.unlocked(|| word.wait(NEARLY.min(left)));
        }
        let pause = match is_nearly_there {
            true => pace.backoff.step(),
            false if waited < *pace.spin.get_or_insert_with(|| self.spin.limit()) => Duration::ZERO,
            false => SLICE,
        };
        if pause.is_zero() {
            return ledger.unlocked(|| (0..8).for_each(|_| std::hint::spin_loop()));
        }
        if !is_nearly_there {
            pace.asleep = Some(Instant::now());
            self.end_polling(ledger);
        }
        match is_nearly_there || ledger.has_leader {
            true => self.follow(ledger, pause.min(left)),
            false => self.lead(ledger, pause.min(left)),
        }
        if !is_nearly_there {
            self.begin_polling(ledger);
        }
    }

    /// Sleeps until somebody who looked has found something.
    pub(super) fn follow(&self, ledger: &mut Books<'_>, limit: Duration) {
        ledger.sleepers += 1;
        ledger.sleep(&self.changed, limit);
        ledger.sleepers -= 1;
    }

    /// Sleeps on the descriptors itself: to be woken by the queue's thread would cost a second wake-up.
    fn lead(&self, ledger: &mut Books<'_>, limit: Duration) {
        ledger.has_leader = true;
        ledger.unlocked(|| self.sleep(limit));
        ledger.has_leader = false;
        if ledger.is_parked {
            self.resume.notify_one();
        }
    }

    /// Sleeps until a worker or the queue itself rings, and takes in what rang. Each ring wakes one sleeper, who then
    /// does whatever there is to do. Returns whether anything rang.
    fn sleep(&self, limit: Duration) -> bool {
        let mut room = [const { std::mem::MaybeUninit::uninit() }; 16];
        let Ok((events, _)) = epoll::wait(&self.readable, &mut room, Some(&timespec(limit))) else { return false };
        for event in &*events {
            match event.data.u64() {
                OWN => self.observer.bell.drain(),
                id => self.lock().seat(id).into_iter().for_each(|seat| seat.subscriber.quiet()),
            }
        }
        !events.is_empty()
    }

    /// A thread looks by itself from now on: workers need not ring.
    fn begin_polling(&self, ledger: &mut Ledger) {
        ledger.pollers += 1;
        if ledger.pollers == 1 {
            ledger.seats.iter().for_each(|seat| seat.subscriber.set_asleep(false));
        }
    }

    /// It no longer does. Whatever came before the workers were asked to ring did not.
    fn end_polling(&self, ledger: &mut Ledger) {
        ledger.pollers -= 1;
        if ledger.pollers == 0 {
            ledger.seats.iter().for_each(|seat| seat.subscriber.set_asleep(true));
            let has_news = |seat: &Seat| seat.end.is_none() && seat.subscriber.may_have_news();
            let is_due = ledger.seats.iter().any(|seat| has_news(seat) || !seat.unready.is_empty());
            // A job that could not be given out waits for what may not ring, such as results that are released; a
            // leader looks soon enough.
            let wakes_runner = (is_due || ledger.waiting() > 0) && ledger.sleeps_long;
            if wakes_runner || is_due && ledger.has_leader {
                self.observer.bell.ring();
            }
        }
    }

    /// A job that waits is looked at in slices: what makes room for it, a device or the release of a result, rings nobody.
    pub(super) fn look_soon(&self, ledger: &mut Ledger) {
        if ledger.sleeps_idle && ledger.first_waiting().is_some() && !ledger.seats.is_empty() {
            self.observer.bell.ring();
        }
    }

    /// Everything that is to be done just now.
    pub(super) fn work(self: &Arc<Self>, books: &mut Books<'_>) {
        let ledger = &mut **books;
        if ledger.is_closed {
            return;
        }
        let before = ledger.changes;
        let mut findings = Vec::new();
        if self.observer.take_news() {
            self.review(ledger, &mut findings);
        }
        let (timeout, now) = (ledger.rules.lease_timeout, ledger.now());
        for seat in &mut ledger.seats {
            if seat.end.is_none() && seat.subscriber.may_have_news() {
                seat.listen(now, &mut findings);
            }
            if !seat.unready.is_empty() {
                seat.settle(&mut findings);
            }
            if let Some(timeout) = timeout.filter(|_| !seat.leases.is_empty()) {
                seat.expire(timeout, now, &mut findings);
            }
        }
        if ledger.seats.iter().any(|seat| seat.end.is_some()) {
            self.part(ledger, &mut findings);
        }
        findings.into_iter().for_each(|finding| ledger.take_in(finding));
        self.dispatch(books);
        if books.changes != before {
            self.tell_sleepers(books);
        }
    }

    /// Wakes whoever may wait for what has changed.
    fn tell_sleepers(&self, ledger: &mut Ledger) {
        ledger.tell_watches();
        if ledger.sleepers > 0 {
            self.changed.notify_all();
        }
        if ledger.has_leader {
            self.observer.bell.ring();
        }
    }

    /// Wakes whoever waits until a job has been given out, and somebody to give out the next.
    pub(super) fn tell_waiters(&self, ledger: &mut Ledger) {
        if ledger.sleepers > 0 {
            self.changed.notify_all();
        }
        self.observer.bell.ring();
    }

    /// Subscribers came or went.
    fn review(self: &Arc<Self>, ledger: &mut Ledger, findings: &mut Vec<Finding>) {
        self.bid_farewell(ledger, findings);
        let members = self.publisher.members();
        for seat in &mut ledger.seats {
            seat.is_leaving = !members.iter().any(|member| member.id == seat.id);
        }
        let Ledger { known, seats, .. } = &mut *ledger;
        known.retain(|id| members.iter().any(|member| member.id == *id) || seats.iter().any(|seat| seat.id == *id));
        for member in &members {
            // Who has no turn now is looked at when one ends, which is news.
            if self.recruits.has_turn() && ledger.known.insert(member.id) {
                self.recruit(*member);
            }
        }
        for (member, subscriber) in self.recruits.take() {
            if !members.iter().any(|present| present.id == member.id) {
                // Gone meanwhile, and nobody will say so again.
                continue;
            }
            let id = epoll::EventData::new_u64(member.id);
            if epoll::add(&self.readable, subscriber.descriptor(), id, LISTEN).is_err() {
                self.publisher.expel(member.id, "its queue has no room for it");
                continue;
            }
            subscriber.set_asleep(ledger.pollers == 0);
            ledger.seats.push(Seat::new(member.id, member.pid, subscriber));
            ledger.changes += 1;
        }
    }

    /// Workers whose answers have come to an end: what they had not taken comes back, and the rest was an attempt.
    fn part(&self, ledger: &mut Ledger, findings: &mut Vec<Finding>) {
        for seat in ledger.seats.iter().filter(|seat| seat.end.is_some()) {
            if let Some((why, ..)) = seat.end.as_ref().filter(|_| self.publisher.has_member(seat.id)) {
                self.publisher.expel(seat.id, why);
            }
        }
        self.bid_farewell(ledger, findings);
        for mut seat in ledger.seats.extract_if(.., |seat| seat.is_over()).collect::<Vec<_>>() {
            if let Some(reason) = seat.leave(findings) {
                ledger.note_end(seat.id, reason);
            }
            let _ = epoll::delete(&self.readable, seat.subscriber.descriptor());
        }
    }

    /// Takes back what those who have gone had not taken, and removes the files that the dead left: their names were for
    /// once, and nobody will take them again.
    fn bid_farewell(&self, ledger: &mut Ledger, findings: &mut Vec<Finding>) {
        let departures = self.publisher.take_departures(false);
        for &(id, position) in &departures.untaken {
            ledger.seat(id).into_iter().for_each(|seat| seat.untake(position, findings));
            ledger.note_untaken(id, position);
        }
        self.clear_away(departures);
    }

    fn clear_away(&self, departures: Departures) {
        for generation in departures.generations {
            let name = answers_of(self.publisher.name(), generation);
            if let (Ok(name), Ok(watcher)) = (name, Watcher::of_process()) {
                let mut left = Left { domain: self.domain.clone(), name, since: Instant::now(), next: Duration::ZERO };
                // Not here: it may take a moment, and others wait.
                watcher.retire_with_ticks(move || left.look(Instant::now()));
            }
        }
    }

    /// The queue's own thread.
    fn run(self: Arc<Self>) {
        let mut has_rung = false;
        loop {
            let patience = {
                let mut ledger = self.lock();
                // Said by this thread alone: a ring that was for it may have woken another one.
                (ledger.sleeps_long, ledger.sleeps_idle) = (false, false);
                if ledger.is_closed {
                    return self.observer.bell.ring();
                }
                self.work(&mut ledger);
                if ledger.is_closed {
                    continue;
                }
                if ledger.has_leader {
                    self.park(ledger, has_rung);
                    has_rung = false;
                    continue;
                }
                let patience = if ledger.pollers > 0 { SLICE } else { ledger.patience() };
                (ledger.sleeps_long, ledger.sleeps_idle) = (patience >= SLICE, patience > SLICE);
                patience
            };
            has_rung = self.sleep(patience);
        }
    }

    /// Leaves the descriptors to a user's thread. What rang here may have been meant for that.
    fn park(&self, mut ledger: Books<'_>, has_rung: bool) {
        if has_rung {
            self.observer.bell.ring();
        }
        ledger.is_parked = true;
        ledger.sleep(&self.resume, SLICE);
        ledger.is_parked = false;
    }

    /// Ends everything: who waits is told, workers are told, and nothing is kept for jobs that are not done.
    pub(super) fn close(&self) {
        let mut ledger = self.lock();
        let rules = ledger.rules;
        // Dropped without the lock: that says goodbye to workers and leaves memory to be let go.
        let mut old = std::mem::replace(&mut *ledger, Ledger::new(rules));
        (ledger.is_closed, ledger.is_shut) = (true, true);
        ledger.pollers = old.pollers;
        ledger.sleepers = old.sleepers;
        ledger.has_leader = old.has_leader;
        drop(ledger);
        old.tell_watches();
        drop(old);
        self.changed.notify_all();
        // Now: the last holder of all this is the queue's own thread, which may not live to see it if `main` returns.
        self.publisher.close();
        // Those who died just now, before anybody has seen it, are among those who are still here.
        self.clear_away(self.publisher.take_departures(true));
        self.observer.bell.ring();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn what_a_dead_worker_left_is_removed_when_nobody_holds_it_however_late_that_is() {
        let folder = std::env::temp_dir().join(format!("warpipe-queue-left-{}", std::process::id()));
        let (domain, name) = (Domain::at(&folder).unwrap(), EndpointName::new("a").unwrap());
        std::fs::write(folder.join("a.lock"), "warpipe 999999999 \n").unwrap();
        let held = std::fs::File::options().write(true).open(folder.join("a.lock")).unwrap();
        crate::os::ofd_write_lock(held.as_fd(), 0).unwrap();
        let since = Instant::now();
        let mut left = Left { domain, name, since, next: Duration::ZERO };
        let after = |days: u32| since + days * Duration::from_secs(24 * 3600);
        for days in 0..4 {
            assert_eq!(left.look(after(days)), Usage::Held);
        }
        drop(held);
        assert_eq!(left.look(after(5)), Usage::Over);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(folder).unwrap();
    }
}
