//! The thread that follows a domain: who comes is visited, who goes is told of, and nobody who stays silent is waited
//! for.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::queue::Queue;
use super::roster::{Entry, Roster, Silent};
use super::{Change, MEMBERS_MAX, member_name};
use crate::domain::{Arrivals, Domain, EndpointName};
use crate::error::{Error, Result};
use crate::link::message::timespec;
use crate::link::wake::Bell;
use crate::link::watcher::{STALLED_AFTER, TICK};
use crate::rendezvous::{Address, Call, Kind, Visit};

/// How often the directory is looked at even though it told nothing: for who was too busy, or too many, before.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// What a watch's threads and its owner share.
pub(super) struct Shared {
    pub(super) domain: Domain,
    pub(super) roster: Mutex<Roster>,
    pub(super) queue: Arc<Queue>,
    events: Mutex<Vec<(u64, Event)>>,
    bell: Bell,
    is_closed: AtomicBool,
    is_settled: Mutex<bool>,
    settled: Condvar,
    cleans: bool,
}

/// What the library's watcher saw of a member.
enum Event {
    Ended { graceful: bool },
    Dead,
}

impl Shared {
    pub(super) fn new(domain: Domain, cleans: bool) -> Result<Shared> {
        Ok(Shared {
            domain,
            roster: Mutex::default(),
            queue: Arc::new(Queue::new()?),
            events: Mutex::default(),
            bell: Bell::new()?,
            is_closed: AtomicBool::new(false),
            is_settled: Mutex::new(false),
            settled: Condvar::new(),
            cleans,
        })
    }

    pub(super) fn roster(&self) -> MutexGuard<'_, Roster> {
        self.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn close(&self) {
        self.is_closed.store(true, SeqCst);
        self.bell.ring();
    }

    /// Waits until everybody who was there at the beginning has answered, or had time to.
    pub(super) fn wait_until_settled(&self) {
        let settled = self.is_settled.lock().unwrap_or_else(PoisonError::into_inner);
        // Bounded by the scout: this limit is for a machine on which it does not run at all.
        let limit = 10 * STALLED_AFTER;
        drop(self.settled.wait_timeout_while(settled, limit, |settled| !*settled));
    }

    fn settle(&self) {
        *self.is_settled.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.settled.notify_all();
    }

    fn tell(&self, changes: impl IntoIterator<Item = Change>) {
        changes.into_iter().for_each(|change| self.queue.push(change));
    }
}

/// What one member's visit hears, on the library's watcher thread: it leaves a note and goes.
struct Ear {
    id: u64,
    shared: Weak<Shared>,
}

impl Ear {
    fn note(&self, event: Event) {
        if let Some(shared) = self.shared.upgrade() {
            shared.events.lock().unwrap_or_else(PoisonError::into_inner).push((self.id, event));
            shared.bell.ring();
        }
    }
}

impl Visit for Ear {
    fn ended(&self, graceful: bool) {
        self.note(Event::Ended { graceful });
    }

    fn proven_dead(&self) {
        self.note(Event::Dead);
    }
}

pub(super) struct Scout {
    shared: Arc<Shared>,
    arrivals: Arrivals,
    calls: HashMap<EndpointName, Call>,
    next_id: u64,
    began: Instant,
    next_look: Instant,
    last_tick: Instant,
    is_settled: bool,
}

impl Scout {
    pub(super) fn new(shared: Arc<Shared>) -> Result<Scout> {
        let arrivals = shared.domain.arrivals()?;
        let now = Instant::now();
        Ok(Scout {
            shared,
            arrivals,
            calls: HashMap::new(),
            next_id: 0,
            began: now,
            next_look: now,
            last_tick: now,
            is_settled: false,
        })
    }

    pub(super) fn run(mut self) {
        while !self.shared.is_closed.load(SeqCst) {
            self.take_notes();
            if Instant::now() >= self.next_look {
                self.look_around();
            }
            self.hear_calls();
            if self.last_tick.elapsed() >= TICK {
                self.last_tick = Instant::now();
                let changes = self.shared.roster().look();
                self.shared.tell(changes);
            }
            if !self.is_settled && (self.calls.is_empty() || self.began.elapsed() > STALLED_AFTER) {
                self.is_settled = true;
                self.shared.settle();
            }
            if self.sleep() {
                self.arrivals.drain();
                self.next_look = Instant::now();
            }
        }
        // Goodbyes are said here, and not by whoever drops the watch last.
        let roster = std::mem::take(&mut *self.shared.roster());
        drop(roster);
    }

    /// Sleeps until something speaks, or the next tick; whether the directory did.
    fn sleep(&self) -> bool {
        let bell = &self.shared.bell;
        let mut speakers = vec![
            PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.arrivals.as_fd(), PollFlags::IN),
        ];
        speakers.extend(self.calls.values().map(|call| PollFd::from_borrowed_fd(call.as_fd(), PollFlags::IN)));
        let is_idle = self.calls.is_empty() && self.shared.roster().len() == 0;
        let until_look = self.next_look.saturating_duration_since(Instant::now());
        let until_tick = TICK.saturating_sub(self.last_tick.elapsed());
        let limit = if is_idle { until_look } else { until_look.min(until_tick) };
        // Failing, it can only have been interrupted.
        let _ = rustix::event::poll(&mut speakers, Some(&timespec(limit)));
        bell.drain();
        !speakers[1].revents().is_empty()
    }

    fn take_notes(&mut self) {
        let notes = std::mem::take(&mut *self.shared.events.lock().unwrap_or_else(PoisonError::into_inner));
        for (id, event) in notes {
            match event {
                Event::Ended { graceful } => {
                    let told = self.shared.roster().ended(id, graceful);
                    // It may be there still, and another connection do. Not at once: one that grants and closes again and
                    // again is not to set our pace.
                    self.next_look = self.next_look.min(Instant::now() + TICK);
                    self.shared.tell(told.map(|(change, _entry)| change));
                }
                Event::Dead => self.bury(id),
            }
        }
    }

    /// Clears up after a proven death, then tells of it.
    fn bury(&mut self, id: u64) {
        let Some(mut death) = self.shared.roster().died(id) else { return };
        drop(death.remains);
        if self.shared.cleans {
            // What cannot be removed now (a domain of another user's) is what `Domain::clean` is for.
            death.member.endpoints = self.shared.domain.clean_after(death.author).unwrap_or_default();
        }
        for cleanup in death.cleanups {
            self.shared.queue.push_cleanup(cleanup, death.member.clone());
        }
        self.shared.tell([Change::Died(death.member)]);
    }

    /// Calls on everybody in the directory who is not known.
    fn look_around(&mut self) {
        self.next_look = Instant::now() + LOOK_AGAIN;
        let Ok(names) = self.shared.domain.names() else { return };
        let mut overlooked = 0;
        for name in names.into_iter().filter(|name| member_name(name).is_some()) {
            if self.calls.contains_key(&name) || self.shared.roster().has(&name) {
                continue;
            }
            if self.shared.roster().len() >= MEMBERS_MAX {
                overlooked += 1;
                continue;
            }
            let at = Address { domain: &self.shared.domain, name: &name, kind: Kind::Member };
            match Call::begin(&at, None, &[], Duration::ZERO) {
                Ok(call) => self.await_answer(name, call),
                Err(Error::NoOwner { .. }) => self.clear(&name),
                Err(_) => overlooked += 1,
            }
        }
        self.shared.roster().overlooked = overlooked;
    }

    fn await_answer(&mut self, name: EndpointName, call: Call) {
        let silent = Silent { pid: call.peer().pid, uid: call.peer().uid, since: Instant::now() };
        self.shared.roster().silent.insert(name.clone(), silent);
        self.calls.insert(name, call);
    }

    /// Removes what a member left that died before this watch knew it. (After one that is known its own death does.)
    fn clear(&self, name: &EndpointName) {
        let domain = &self.shared.domain;
        if !self.shared.cleans || self.shared.roster().knows(name) || domain.holder(name).is_some() {
            return;
        }
        if let Some(author) = domain.last_holder(name) {
            let _ = domain.clean_after(author);
        }
    }

    /// Lets in who has answered.
    fn hear_calls(&mut self) {
        let heard: Vec<_> =
            self.calls.iter().filter_map(|(name, call)| Some((name.clone(), call.hear().transpose()?))).collect();
        for (name, answer) in heard {
            let Some(call) = self.calls.remove(&name) else { continue };
            self.shared.roster().silent.remove(&name);
            let admitted = answer.and_then(|granted| {
                let (visitor, gift) = call.enter(granted);
                Entry::open(name, visitor, gift)
            });
            match admitted {
                Ok(entry) => self.admit(entry),
                // No member: another kind, a stranger, or one that went before it answered. The next look knows more.
                Err(_) => self.shared.roster().overlooked += 1,
            }
        }
    }

    fn admit(&mut self, entry: Entry) {
        self.next_id += 1;
        let ear = Arc::new(Ear { id: self.next_id, shared: Arc::downgrade(&self.shared) });
        // Before it can be heard that it has ended, it is told of.
        let mut roster = self.shared.roster();
        if entry.visitor().listen(ear).is_err() {
            roster.overlooked += 1;
            return;
        }
        let told = roster.admit(self.next_id, entry);
        drop(roster);
        self.shared.tell(told);
    }
}
