//! Gives jobs out: one thread at a time, and without the ledger's lock while the driver is called.
//!
//! A call that gives a stream work blocks while that stream's launch queue is full, for as long as the stream waits for a
//! peer. Whoever has to do with the queue takes the ledger's lock, and has a timeout. So the lock is never held across
//! such a call: who makes one writes down first what it is about to do ([`Giving`]), and afterwards what came of it.
//! Meanwhile all others may look, take answers in and see workers end; jobs that wait are given out when it is over.
//!
//! The lease is there before the call, since its answer may be, too; its *position* is not known, so it neither expires
//! nor ends with its worker until it is.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::desk::Desk;
use super::ledger::Ledger;
use super::loan::Loan;
use super::owner::SubmitError;
use super::seat::Finding;
use super::wire::Ticket;
use crate::channel::SendError;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// How long a thread waits at least for another one that gives a job out.
const MOMENT: Duration = Duration::from_millis(10);

/// The ledger, locked but for the calls of the driver.
pub(super) struct Books<'a> {
    desk: &'a Desk,
    ledger: Option<MutexGuard<'a, Ledger>>,
    /// It is this thread that gives a job out.
    gives: bool,
}

impl<'a> Books<'a> {
    pub(super) fn new(desk: &'a Desk, ledger: MutexGuard<'a, Ledger>) -> Books<'a> {
        Books { desk, ledger: Some(ledger), gives: false }
    }

    /// Calls something that may take its time, without the lock.
    #[inline]
    pub(super) fn unlocked<T>(&mut self, call: impl FnOnce() -> T) -> T {
        drop(self.ledger.take());
        let made = call();
        self.ledger = Some(self.desk.lock_ledger());
        made
    }

    /// Calls what gives the job with that ticket out, to `seat` if there is one. To be followed by [`Ledger::gave`].
    fn give<T>(&mut self, ticket: Ticket, seat: Option<u64>, is_new: bool, call: impl FnOnce() -> T) -> T {
        debug_assert!(self.giving.is_none());
        seat.and_then(|id| self.seat(id)).into_iter().for_each(|seat| seat.lease(ticket, None));
        self.giving = Some(Giving { ticket, seat, is_new, untaken: Vec::new(), end: None, is_awaited: false });
        self.gives = true;
        let made = self.unlocked(call);
        self.gives = false;
        made
    }

    /// Sleeps until `changed`, without the lock.
    pub(super) fn sleep(&mut self, changed: &Condvar, limit: Duration) {
        if let Some(ledger) = self.ledger.take() {
            let slept = changed.wait_timeout(ledger, limit);
            self.ledger = Some(slept.unwrap_or_else(PoisonError::into_inner).0);
        }
    }
}

impl Deref for Books<'_> {
    type Target = Ledger;

    #[inline]
    fn deref(&self) -> &Ledger {
        self.ledger.as_ref().expect("locked but for `unlocked`")
    }
}

impl DerefMut for Books<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Ledger {
        self.ledger.as_mut().expect("locked but for `unlocked`")
    }
}

impl Drop for Books<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.gives {
            // A panic in a call of the driver: nobody has the job.
            let mut ledger = self.desk.lock_ledger();
            let given = ledger.giving.as_ref().map(|giving| (giving.ticket.job, giving.is_new));
            ledger.gave(Given::Nobody);
            match given {
                Some((job, true)) => drop(ledger.call_off(job)),
                Some((job, false)) => ledger.charge(job, "a panic while it was given out".into()),
                None => {}
            }
        }
    }
}

/// What a thread is about to give out.
#[derive(Debug)]
pub(super) struct Giving {
    pub(super) ticket: Ticket,
    /// Whose lease it is to be.
    seat: Option<u64>,
    /// It is being submitted: its outcome is not to be taken before that is done.
    pub(super) is_new: bool,
    /// Positions that the same worker left untaken meanwhile.
    untaken: Vec<u64>,
    /// Why that worker's end has come meanwhile, without an answer.
    end: Option<String>,
    /// Others found something to give out, too, and left it.
    is_awaited: bool,
}

/// What came of it.
enum Given {
    /// The worker has it, at this position.
    At(u64),
    /// The worker may have been told of a job that is none: what it answers is discarded.
    Told,
    Nobody,
}

impl Ledger {
    /// Writes down what became of the lease. True if others have left something to be given out.
    fn gave(&mut self, given: Given) -> bool {
        let Some(Giving { ticket, seat: id, untaken, end, is_awaited, .. }) = self.giving.take() else { return false };
        let (mut findings, now) = (Vec::new(), self.now());
        if let Some(seat) = id.and_then(|id| self.seat(id)) {
            match given {
                Given::At(position) => {
                    seat.place(ticket, position, now);
                    untaken.into_iter().for_each(|position| seat.untake(position, &mut findings));
                }
                // No position is 0.
                Given::Told => seat.place(ticket, 0, now),
                Given::Nobody => seat.unlease(ticket),
            }
        } else if let (Given::At(position), Some(reason)) = (given, end) {
            // The worker is gone, and has not answered.
            findings.push(match untaken.contains(&position) {
                true => Finding::Returned(ticket.job),
                false => Finding::Failed(ticket.job, reason),
            });
        }
        findings.into_iter().for_each(|finding| self.take_in(finding));
        is_awaited
    }

    /// A worker has gone with a job untaken whose place nobody else knows yet.
    pub(super) fn note_untaken(&mut self, id: u64, position: u64) {
        if let Some(giving) = self.giving.as_mut().filter(|giving| giving.seat == Some(id)) {
            giving.untaken.push(position);
        }
    }

    /// A worker has gone with a lease unanswered whose place nobody else knows yet.
    pub(super) fn note_end(&mut self, id: u64, reason: String) {
        if let Some(giving) = self.giving.as_mut().filter(|giving| giving.seat == Some(id)) {
            giving.end = Some(reason);
        }
    }
}

/// A thread's wait for another one that gives a job out.
struct Turn<'a> {
    desk: &'a Desk,
    is_awaited: bool,
}

impl Turn<'_> {
    /// Whether nobody gives a job out. Waits a moment if somebody does, since that mostly takes microseconds.
    fn is_here(&mut self, books: &mut Books<'_>) -> bool {
        if books.giving.is_some() && !std::mem::replace(&mut self.is_awaited, true) {
            books.awaiting += 1;
            let start = Instant::now();
            while books.giving.is_some() && start.elapsed() < MOMENT {
                self.desk.follow(books, MOMENT);
            }
        }
        books.giving.is_none()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.is_awaited {
            let mut ledger = self.desk.lock_ledger();
            ledger.awaiting = ledger.awaiting.saturating_sub(1);
        }
    }
}

impl Desk {
    /// Does the queue's work until a job can be entered, or none can any more because the queue is shut. Then `enter`.
    pub(super) fn attend_entry<T>(
        self: &Arc<Self>,
        timeout: Duration,
        mut enter: impl FnMut(&mut Books<'_>) -> Option<T>,
    ) -> Result<T> {
        let (limit, name) = (self.options.limit, self.publisher.name());
        let (mut turn, is_full) = (Turn { desk: self, is_awaited: false }, Cell::new(false));
        let look = |books: &mut Books<'_>| {
            let has_turn = turn.is_here(books);
            is_full.set(books.len() >= limit);
            if books.is_shut || (has_turn && !is_full.get()) { enter(books).map(Ok) } else { None }
        };
        let late = || match is_full.get() {
            true => Error::QueueFull { name: name.to_string(), limit, waited: timeout },
            false => {
                let what = format!("another thread's submit to {name:?}, which the driver holds up");
                Error::Timeout { what, waited: timeout }
            }
        };
        self.attend(timeout, look, late)
    }

    /// Does what is to be done, also what another thread that gives a job out has left: waits a moment for that one.
    pub(super) fn catch_up(self: &Arc<Self>, books: &mut Books<'_>) {
        self.work(books);
        let mut turn = Turn { desk: self, is_awaited: false };
        if books.giving.is_some() && turn.is_here(books) {
            self.work(books);
        }
        if std::mem::take(&mut turn.is_awaited) {
            books.awaiting = books.awaiting.saturating_sub(1);
        }
    }

    /// Takes a job in, and gives it out at once if it is its turn and somebody has credit. Nobody else gives one out.
    pub(super) fn enter(
        &self,
        books: &mut Books<'_>,
        input: Loan,
        stream: &Stream,
        deadline_ns: u64,
    ) -> Result<u64, SubmitError> {
        let Loan { sample, metadata, lease } = input;
        let (job, is_next) = books.next_job();
        let ticket = Ticket { job, number: 1, attempt: 1, deadline_ns };
        let encoded = match ticket.encode(&metadata) {
            Ok(encoded) => encoded,
            Err(error) => return Err(SubmitError { error, loan: Some(Box::new(Loan { sample, metadata, lease })) }),
        };
        let to = if is_next { books.choose(job, &[]) } else { None };
        books.enter(metadata, deadline_ns);
        let posted = books.give(ticket, to, true, || sample.post(to, &encoded, stream));
        if books.is_closed {
            // Not dropped here, under the lock: to take memory back gives its stream work.
            let sample = posted.err().and_then(|failed| failed.sample);
            let loan = sample.map(|sample| Box::new(Loan::new(*sample)));
            return Err(SubmitError { error: self.gone(), loan });
        }
        let (given, entered) = match posted {
            Ok((parcel, position)) => {
                books.keep(job, parcel, position.is_some());
                (position.map_or(Given::Nobody, Given::At), Ok(job))
            }
            Err(SendError { error, sample }) => {
                // If the worker may have been told, its answer is to find a lease, though no job.
                let given = if sample.is_some() { Given::Nobody } else { Given::Told };
                let metadata = books.withdraw(job, sample.is_some());
                let loan = sample.map(|sample| Box::new(Loan { sample: *sample, metadata, lease }));
                (given, Err(SubmitError { error, loan }))
            }
        };
        if books.gave(given) || books.awaiting > 0 {
            self.tell_waiters(books);
        }
        self.look_soon(books);
        entered
    }

    /// Gives out what waits, as long as there is somebody with credit, and unless another thread does.
    pub(super) fn dispatch(&self, books: &mut Books<'_>) {
        let mut passed_over = Vec::new();
        while let Some(waiting) = books.first_waiting() {
            if let Some(giving) = &mut books.giving {
                giving.is_awaited = true;
                return;
            }
            let Some(id) = books.choose(waiting, &passed_over) else { return };
            let Some((ticket, job)) = books.next_ticket(waiting) else { return };
            let metadata = ticket.encode(&job.metadata);
            let Some(parcel) = job.parcel.clone() else { return };
            books.hand_out(ticket);
            let forward = || metadata.and_then(|metadata| parcel.forward(id, &metadata));
            let forwarded = books.give(ticket, Some(id), false, forward);
            if books.is_closed {
                return;
            }
            let given = match forwarded {
                Ok(Some(position)) => Given::At(position),
                Ok(None) => {
                    passed_over.push(id);
                    books.take_back(ticket);
                    Given::Nobody
                }
                Err(error) => {
                    books.charge(ticket.job, format!("it could not be given out: {error}"));
                    Given::Nobody
                }
            };
            books.gave(given);
            if books.awaiting > 0 {
                self.tell_waiters(books);
            }
        }
    }
}
