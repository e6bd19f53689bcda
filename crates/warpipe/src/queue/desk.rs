//! Who looks after a queue, and when: any thread that waits for it does the work itself, and when none does, one thread
//! of the queue's own, which sleeps on the descriptors of all workers.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::epoll;

use super::ledger::{Ledger, Outcome};
use super::owner::QueueBuilder;
use super::recruit::Recruits;
use super::seat::{Finding, Seat};
use crate::channel::{Observer, Publisher};
use crate::clock::Stopwatch;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::{Home, PrivateFd};
use crate::link::message::timespec;
use crate::link::watcher::Watcher;
use crate::stream::Backoff;

/// Looks for the data of a result before its waiter sleeps.
const LOOKS: u32 = 16_000;

/// A sleep in slices, so that nothing that goes wrong elsewhere makes a hang of it.
const SLICE: Duration = Duration::from_millis(50);

/// What rings the queue itself, among its workers' numbers (which begin with 1).
const OWN: u64 = 0;

/// What all handles of one queue share.
#[derive(Debug)]
pub(super) struct Desk {
    pub(super) home: Home,
    pub(super) options: QueueBuilder,
    pub(super) domain: Domain,
    pub(super) publisher: Publisher,
    pub(super) observer: Arc<Observer>,
    pub(super) recruits: Recruits,
    ledger: Mutex<Ledger>,
    changed: Condvar,
    readable: PrivateFd,
}

impl Desk {
    pub(super) fn new(
        options: QueueBuilder,
        domain: Domain,
        publisher: Publisher,
        observer: Arc<Observer>,
        ledger: Ledger,
    ) -> Result<Arc<Desk>> {
        let readable = epoll::create(epoll::CreateFlags::CLOEXEC);
        let readable = PrivateFd::new(readable.map_err(|e| Error::os("epoll_create1", "a queue", e))?);
        epoll::add(&readable, &observer.bell, epoll::EventData::new_u64(OWN), epoll::EventFlags::IN)
            .map_err(|e| Error::os("epoll_ctl", "a queue's bell", e))?;
        let desk = Arc::new(Desk {
            home: Home::here(),
            options,
            domain,
            publisher,
            observer,
            recruits: Recruits::default(),
            ledger: Mutex::new(ledger),
            changed: Condvar::new(),
            readable,
        });
        let runner = desk.clone();
        let spawned = std::thread::Builder::new().name("warpipe-queue".into()).spawn(move || runner.run());
        spawned.map_err(|e| Error::os("clone", "a queue's thread", e))?;
        Ok(desk)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn gone(&self) -> Error {
        Error::QueueClosed { name: self.publisher.name().to_string() }
    }

    /// Does the queue's work until `look` finds what it looks for.
    pub(super) fn attend<T>(
        self: &Arc<Self>,
        timeout: Duration,
        mut look: impl FnMut(&mut Ledger) -> Option<Result<T>>,
        what: impl FnOnce() -> Error,
    ) -> Result<T> {
        self.home.check()?;
        let (mut clock, mut backoff) = (Stopwatch::default(), Backoff::spinning(LOOKS));
        let mut ledger = self.lock();
        self.begin_polling(&mut ledger);
        let found = loop {
            self.work(&mut ledger);
            if ledger.is_closed {
                break Err(self.gone());
            }
            if let Some(found) = look(&mut ledger) {
                break found;
            }
            let waited = clock.elapsed();
            if waited >= timeout {
                break Err(what());
            }
            ledger = self.pause(ledger, waited, timeout - waited, &mut backoff);
        };
        self.end_polling(&mut ledger);
        found
    }

    fn pause<'a>(
        &'a self,
        mut ledger: MutexGuard<'a, Ledger>,
        waited: Duration,
        left: Duration,
        backoff: &mut Backoff,
    ) -> MutexGuard<'a, Ledger> {
        let is_nearly_there = ledger.seats.iter().any(|seat| !seat.unready.is_empty());
        let pause = match is_nearly_there {
            true => backoff.step(),
            false if waited < self.options.spin => Duration::ZERO,
            false => SLICE,
        };
        if pause.is_zero() {
            drop(ledger);
            (0..8).for_each(|_| std::hint::spin_loop());
            return self.lock();
        }
        if !is_nearly_there {
            self.end_polling(&mut ledger);
        }
        ledger.sleepers += 1;
        let slept = self.changed.wait_timeout(ledger, pause.min(left));
        let mut ledger = slept.unwrap_or_else(PoisonError::into_inner).0;
        ledger.sleepers -= 1;
        if !is_nearly_there {
            self.begin_polling(&mut ledger);
        }
        ledger
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
            if is_due && std::mem::take(&mut ledger.sleeps_long) {
                self.observer.bell.ring();
            }
        }
    }

    /// Everything that is to be done just now.
    pub(super) fn work(self: &Arc<Self>, ledger: &mut Ledger) {
        if ledger.is_closed {
            return;
        }
        let before = ledger.changes;
        let mut findings = Vec::new();
        if self.observer.take_news() {
            self.review(ledger, &mut findings);
        }
        let timeout = ledger.rules.lease_timeout;
        for seat in &mut ledger.seats {
            if seat.end.is_none() && seat.subscriber.may_have_news() {
                seat.listen(&mut findings);
            }
            if !seat.unready.is_empty() {
                seat.settle(&mut findings);
            }
            if let Some(timeout) = timeout.filter(|_| !seat.leases.is_empty()) {
                seat.expire(timeout, &mut findings);
            }
        }
        if ledger.seats.iter().any(|seat| seat.end.is_some()) {
            self.part(ledger, &mut findings);
        }
        findings.into_iter().for_each(|finding| conclude(ledger, finding));
        self.dispatch(ledger);
        if ledger.changes != before && ledger.sleepers > 0 {
            self.changed.notify_all();
        }
    }

    /// Subscribers came or went.
    fn review(self: &Arc<Self>, ledger: &mut Ledger, findings: &mut Vec<Finding>) {
        for (id, position) in self.publisher.take_untaken() {
            if let Some(seat) = ledger.seat(id) {
                seat.is_leaving = true;
                seat.untake(position, findings);
            }
        }
        let members = self.publisher.members();
        for seat in &mut ledger.seats {
            seat.is_leaving = !members.iter().any(|member| member.id == seat.id);
        }
        let Ledger { known, seats, .. } = &mut *ledger;
        known.retain(|id| members.iter().any(|member| member.id == *id) || seats.iter().any(|seat| seat.id == *id));
        for member in members {
            if ledger.known.insert(member.id) {
                self.recruit(member);
            }
        }
        for (member, subscriber) in self.recruits.take() {
            let id = epoll::EventData::new_u64(member.id);
            if epoll::add(&self.readable, subscriber.descriptor(), id, epoll::EventFlags::IN).is_err() {
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
        for (id, position) in self.publisher.take_untaken() {
            ledger.seat(id).into_iter().for_each(|seat| seat.untake(position, findings));
        }
        for mut seat in ledger.seats.extract_if(.., |seat| seat.is_over()) {
            seat.leave(findings);
            self.forget(&seat);
            let _ = epoll::delete(&self.readable, seat.subscriber.descriptor());
        }
    }

    /// Removes the files that a dead worker left: its name was for once, and nobody will take it again.
    fn forget(&self, seat: &Seat) {
        let (domain, name) = (self.domain.clone(), seat.subscriber.name().to_string());
        if seat.subscriber.is_publisher_dead()
            && let (Ok(name), Ok(watcher)) = (EndpointName::new(&name), Watcher::of_process())
        {
            // Not here: it may take a moment, and others wait.
            let _ = watcher.attend(Box::new(move || _ = domain.clear_name(&name)));
        }
    }

    /// Gives out what waits, as long as there is somebody with credit.
    fn dispatch(&self, ledger: &mut Ledger) {
        let mut passed_over = Vec::new();
        while ledger.waiting() > 0 {
            let Some(id) = ledger.choose(&passed_over) else { return };
            let Some((ticket, job)) = ledger.first_waiting() else { return };
            let metadata = ticket.encode(&job.metadata);
            let Some(parcel) = job.parcel.clone() else { return };
            match metadata.and_then(|metadata| parcel.forward(id, &metadata)) {
                Ok(Some(position)) => {
                    ledger.hand_out(ticket);
                    ledger.seat(id).into_iter().for_each(|seat| seat.lease(ticket, position));
                }
                Ok(None) => passed_over.push(id),
                Err(error) => {
                    ledger.hand_out(ticket);
                    ledger.charge(ticket.job, format!("it could not be given out: {error}"));
                }
            }
        }
    }

    /// The queue's own thread.
    fn run(self: Arc<Self>) {
        loop {
            let patience = {
                let mut ledger = self.lock();
                if ledger.is_closed {
                    return;
                }
                self.work(&mut ledger);
                let patience = if ledger.pollers > 0 { SLICE } else { ledger.patience() };
                ledger.sleeps_long = patience >= SLICE;
                patience
            };
            let mut room = [const { std::mem::MaybeUninit::uninit() }; 16];
            let Ok((events, _)) = epoll::wait(&self.readable, &mut room, Some(&timespec(patience))) else { continue };
            for event in events {
                match event.data.u64() {
                    OWN => self.observer.bell.drain(),
                    id => self.lock().seat(id).into_iter().for_each(|seat| seat.subscriber.quiet()),
                }
            }
        }
    }

    /// Ends everything: who waits is told, workers are told, and nothing is kept for jobs that are not done.
    pub(super) fn close(&self) {
        let mut ledger = self.lock();
        let rules = ledger.rules;
        // Dropped without the lock: that says goodbye to workers and leaves memory to be let go.
        let old = std::mem::replace(&mut *ledger, Ledger::new(rules));
        (ledger.is_closed, ledger.is_shut) = (true, true);
        ledger.pollers = old.pollers;
        ledger.sleepers = old.sleepers;
        drop(ledger);
        drop(old);
        self.changed.notify_all();
        self.publisher.withdraw();
        self.observer.bell.ring();
    }
}

fn conclude(ledger: &mut Ledger, finding: Finding) {
    match finding {
        Finding::Failed(job, reason) => ledger.charge(job, reason),
        Finding::Returned(job) => ledger.give_back(job),
        Finding::Rejected(job, reason) => ledger.conclude(job, Outcome::Rejected { reason }),
        Finding::Expired(job) => ledger.conclude(job, Outcome::Expired),
        Finding::Done { job, attempt, pid, arrival } => ledger.conclude(job, Outcome::Done { arrival, attempt, pid }),
    }
}
