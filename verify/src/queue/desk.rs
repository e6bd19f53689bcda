//! Stands for a queue's desk: what looks after the books, as `queue/desk.rs` has it, and the links to its workers.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::giving::Books;
use super::ledger::{Ledger, Rules};
use super::seat::{Finding, Seat};
use super::states::{Fault, World};
use crate::channel::{Parcel, Subscriber};
use crate::error::{Error, Result};
use crate::link::entry::Metadata;
use crate::stream::Stream;

pub(crate) struct Options {
    pub(crate) limit: usize,
}

pub(crate) struct Publisher;

impl Publisher {
    pub(crate) fn name(&self) -> &'static str {
        "queue"
    }
}

pub(crate) struct Desk {
    pub(crate) options: Options,
    pub(crate) publisher: Publisher,
    pub(crate) ledger: Mutex<Ledger>,
    pub(crate) world: Mutex<World>,
    fault: Fault,
    changed: Condvar,
    me: Weak<Desk>,
}

/// A job's input before it is submitted.
#[derive(Clone)]
pub(crate) struct Sample(pub(crate) Weak<Desk>);

impl std::fmt::Debug for Sample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a sample")
    }
}

/// A failed send.
pub(crate) struct SendError {
    pub(crate) error: Error,
    pub(crate) sample: Option<Box<Sample>>,
}

impl Sample {
    pub(crate) fn post(self, to: Option<u64>, told: &Metadata, _: &Stream) -> Result<(Parcel, Option<u64>), SendError> {
        let desk = self.0.upgrade().expect("its desk is there");
        let position = to.and_then(|id| desk.put(id, told));
        desk.meanwhile();
        Ok((Parcel(self), position))
    }

    pub(crate) fn forward(&self, id: u64, told: &Metadata) -> Result<Option<u64>> {
        let desk = self.0.upgrade().expect("its desk is there");
        let position = desk.put(id, told);
        desk.meanwhile();
        Ok(position)
    }
}

impl Desk {
    pub(crate) fn new(rules: Rules, fault: Fault, world: World) -> Arc<Desk> {
        Arc::new_cyclic(|me| Desk {
            options: Options { limit: 16 },
            publisher: Publisher,
            ledger: Mutex::new(Ledger::new(rules)),
            world: Mutex::new(world),
            fault,
            changed: Condvar::new(),
            me: me.clone(),
        })
    }

    pub(crate) fn sample(&self) -> Sample {
        Sample(self.me.clone())
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn lock(&self) -> Books<'_> {
        Books::new(self, self.lock_ledger())
    }

    pub(crate) fn lock_ledger(&self) -> MutexGuard<'_, Ledger> {
        // One thread plays all parts: a lock that is held is a fault.
        self.ledger.try_lock().unwrap_or_else(|_| panic!("the books are locked across a call of the driver"))
    }

    pub(crate) fn gone(&self) -> Error {
        Error::Argument("closed".into())
    }

    /// Puts a job into a worker's ring, if that has room and the worker is a member.
    fn put(&self, id: u64, told: &Metadata) -> Option<u64> {
        self.world().put(id, told.as_bytes())
    }

    /// What happens while a job is given out.
    fn meanwhile(&self) {
        loop {
            let next = self.world().next_meanwhile();
            match next {
                Some(act) => self.act(act),
                None => return,
            }
        }
    }

    /// As `Desk::work`.
    pub(crate) fn work(&self, books: &mut Books<'_>) {
        let ledger = &mut **books;
        let mut findings = Vec::new();
        self.review(ledger, &mut findings);
        let (timeout, now) = (ledger.rules.lease_timeout, ledger.now());
        for seat in &mut ledger.seats {
            if seat.end.is_none() {
                seat.listen(now, &mut findings);
            }
            seat.settle(&mut findings);
            if let Some(timeout) = timeout.filter(|_| !seat.leases.is_empty()) {
                seat.expire(timeout, now, &mut findings);
            }
        }
        if ledger.seats.iter().any(|seat| seat.end.is_some()) {
            self.part(ledger, &mut findings);
        }
        findings.into_iter().for_each(|finding| ledger.take_in(finding));
        self.dispatch(books);
    }

    /// As `Desk::review`.
    fn review(&self, ledger: &mut Ledger, findings: &mut Vec<Finding>) {
        self.bid_farewell(ledger, findings);
        let members = self.world().members();
        for seat in &mut ledger.seats {
            seat.is_leaving = !members.iter().any(|(id, _)| *id == seat.id);
        }
        ledger.known.retain(|id| members.iter().any(|(member, _)| member == id));
        for (id, line) in members {
            if ledger.known.insert(id) {
                ledger.seats.push(Seat::new(id, id as i32, Subscriber(line)));
            }
        }
    }

    /// As `Desk::part`.
    fn part(&self, ledger: &mut Ledger, findings: &mut Vec<Finding>) {
        for seat in ledger.seats.iter().filter(|seat| seat.end.is_some()) {
            self.world().expel(seat.id);
        }
        self.bid_farewell(ledger, findings);
        for mut seat in ledger.seats.extract_if(.., |seat| seat.is_over()).collect::<Vec<_>>() {
            let mut left = Vec::new();
            let reason = seat.leave(&mut left);
            if self.fault != Fault::ForgetsLeases {
                findings.append(&mut left);
            }
            let reason = if self.fault == Fault::NotesEveryEnd { reason.or(Some(String::new())) } else { reason };
            if let Some(reason) = reason.filter(|_| self.fault != Fault::NotesNoEnd) {
                ledger.note_end(seat.id, reason);
            }
        }
    }

    /// As `Desk::bid_farewell`.
    fn bid_farewell(&self, ledger: &mut Ledger, findings: &mut Vec<Finding>) {
        let untaken = self.world().take_departures();
        for (id, position) in untaken {
            if self.fault != Fault::ForgetsUntaken {
                ledger.seat(id).into_iter().for_each(|seat| seat.untake(position, findings));
            }
            if self.fault != Fault::NotesNoUntaken {
                ledger.note_untaken(id, position);
            }
        }
    }

    pub(crate) fn attend<T>(
        self: &Arc<Self>,
        _: Duration,
        mut look: impl FnMut(&mut Books<'_>) -> Option<Result<T>>,
        late: impl FnOnce() -> Error,
    ) -> Result<T> {
        let mut books = self.lock();
        self.work(&mut books);
        look(&mut books).unwrap_or_else(|| Err(late()))
    }

    pub(crate) fn follow(&self, ledger: &mut Books<'_>, _: Duration) {
        ledger.sleep(&self.changed, Duration::ZERO);
    }

    pub(crate) fn tell_waiters(&self, _: &mut Ledger) {}

    pub(crate) fn look_soon(&self, _: &mut Ledger) {}
}
