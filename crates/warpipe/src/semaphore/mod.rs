//! A semaphore between processes: at most so many at once, on streams and on the CPU.
//!
//! [`Semaphore::acquire`] gives a [`Permit`] to the CPU and makes the *stream* wait for the device work of the permit's
//! last holder; [`Permit::release`] returns at once and takes effect behind the stream's work. Nobody's CPU waits for
//! a device. Uncontended, both are a few atomics on shared words, without a system call.
//!
//! The words lie in one page that every member maps for writing (`room.rs`, and byte by byte
//! `docs/design/semaphore-page.md`): members trust each other with the *count*. What a wrong member can do to it stands
//! at the head of `room.rs`; it cannot make another one panic, read elsewhere, or wait beyond its timeout. No stream waits
//! for a word of that page: each pair of members that needs one has a page of its own (`signals.rs`).

mod core;
#[cfg(test)]
mod hostile;
mod room;
mod signals;
mod survivor;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trouble;
mod warden;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use self::core::{Core, Side, bury};
use self::room::{CREATOR, PERMITS_MAX, Room, UNDER_WAY_MAX};
use self::signals::Signals;
use self::survivor::Survivor;
use self::warden::{Warden, Welcome};
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::link::watcher::Watcher;
use crate::memory::page::Page;
use crate::rendezvous::{ANSWER_TIMEOUT, Address, Admission, Keeper, Kind, Visitor};
use crate::stream::{Backoff, Stream};

crate::rendezvous::messages!(warden::Ask, warden::Here, warden::Notice, warden::Welcome);

/// The guide's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../../../../docs/guide/semaphore.md")]
struct Guide;

/// How often a waiter that is first in line looks before it sleeps.
const SPINS: u32 = 2_000;

/// So many may hold a permit at once, in any number of processes on one machine.
///
/// Whoever [creates](Semaphore::create) it keeps it under a name; others [open](Semaphore::open) it. It is closed when
/// this handle, its clones and its permits are dropped, and the streams they were used on are past their work (at once,
/// if they are idle). May be used from any number of threads.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Semaphore};
/// # let folder = std::env::temp_dir().join(format!("warpipe-semaphore-{}", std::process::id()));
/// # let domain = Domain::at(&folder)?;
/// let device = Device::host();
/// let turns = Semaphore::create(&domain, "turns", &device, 2)?; // one process
/// let same = Semaphore::open(&domain, "turns", &device)?; // any other
///
/// let stream = device.stream()?;
/// let permit = same.acquire(&stream, Duration::from_secs(1))?; // the stream waits for the last holder's work
/// // ... enqueue work on `stream` ...
/// permit.release(&stream)?; // at once; the next holder's stream waits for that work
/// # drop((turns, same)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
///
/// # Who comes first
///
/// While anybody waits, permits go to whoever has waited longest, and nobody overtakes. That holds for 256 waiting
/// threads on the machine; further ones wait for a place among them, in no order.
///
/// # When somebody dies
///
/// * A holder: its permit comes back when its death is proven (its lifeline), after everything it could still do. The
///   next holder goes on; what the dead one had half done is for the user to see to.
/// * A holder after its release, before its device work was done: the streams behind it go on at its proven death.
/// * A waiter: its place is cleared at its proven death, and what was handed to it is handed on.
/// * The creator: whoever waits gets [`Error::OwnerGone`], and so does who comes later; permits that are held stay
///   valid and can be released; streams go on as above, let go by each process itself.
#[derive(Debug, Clone)]
pub struct Semaphore {
    core: Arc<Core>,
}

impl Semaphore {
    /// Makes one of `permits` permits (1 to 1024), all free, and keeps it under `name`.
    ///
    /// A sealed memfd of 24 to 84 KiB, registered with `device` (`cuMemHostRegister`), and a socket in the domain.
    ///
    /// # Errors
    /// [`Error::Argument`] for the number, [`Error::Name`], [`Error::NameTaken`] and the others of a domain,
    /// [`Error::Driver`], [`Error::Os`].
    pub fn create(domain: &Domain, name: &str, device: &Device, permits: u32) -> Result<Semaphore> {
        if !(1..=PERMITS_MAX).contains(&permits) {
            return Err(Error::argument("permits", permits, format!("1 to {PERMITS_MAX}")));
        }
        let name = EndpointName::new(name)?;
        let watcher = Watcher::of_process()?;
        let signals = Signals::new(CREATOR, permits, name.as_str(), device, &watcher)?;
        let (page, fd) = Page::create(Some(device), room::bytes_for(permits))?;
        let room = Arc::new(Room::new(page, permits));
        let survivor = Survivor::new(room.clone(), signals.clone(), CREATOR);
        let kind = device.info().id.kind;
        let warden = Arc::new(Warden::new(room.clone(), fd, kind, signals.clone(), survivor.clone()));
        let at = Address { domain, name: &name, kind: Kind::Semaphore };
        // Not dropped here on an error: to unregister memory, a driver may wait for a stream that waits for a peer.
        let keeper = match Keeper::open(&at, Admission::default(), warden.clone()) {
            Ok(keeper) => keeper,
            Err(error) => return Err(bury((room, signals, survivor, warden), error)),
        };
        watcher.tick(survivor.watched());
        let side = Side::Creator { keeper, warden };
        Ok(Semaphore { core: Arc::new(Core::new(room, device, CREATOR, signals, survivor, side)) })
    }

    /// Opens the one of this name.
    ///
    /// # Errors
    /// [`Error::NoOwner`], [`Error::OtherKind`], [`Error::AccessDenied`]; [`Error::Refused`], also when it is for another
    /// kind of device; [`Error::Protocol`] for a creator that is broken; [`Error::Driver`], [`Error::Os`].
    pub fn open(domain: &Domain, name: &str, device: &Device) -> Result<Semaphore> {
        Semaphore::open_timeout(domain, name, device, Duration::ZERO)
    }

    /// The same, and waits up to `wait` for it to be there.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_timeout(domain: &Domain, name: &str, device: &Device, wait: Duration) -> Result<Semaphore> {
        let name = EndpointName::new(name)?;
        let at = Address { domain, name: &name, kind: Kind::Semaphore };
        let (visitor, gift) = Visitor::attach(&at, Some(device.info().id), &[], wait)?;
        let (Welcome { member, permits }, [fd]) = gift.open::<Welcome, 1>(name.as_str())?;
        if !(1..=PERMITS_MAX).contains(&permits) || member == 0 || member == CREATOR {
            return Err(Error::Protocol {
                name: name.to_string(),
                field: "admission",
                found: format!("member {member}, {permits} permits"),
                allowed: format!("a visitor's number, and 1 to {PERMITS_MAX} permits"),
            });
        }
        let watcher = visitor.watcher().clone();
        let signals = Signals::new(member, permits, name.as_str(), device, &watcher)?;
        let page = Page::open(Some(device), fd, room::bytes_for(permits), name.as_str())?;
        let room = Arc::new(Room::new(page, permits));
        let survivor = Survivor::new(room.clone(), signals.clone(), member);
        let listening = visitor.listen(survivor.clone());
        let core = Core::new(room, device, member, signals, survivor.clone(), Side::Member { visitor });
        listening?;
        watcher.tick(survivor.watched());
        Ok(Semaphore { core: Arc::new(core) })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// How many permits there are.
    pub fn permits(&self) -> u32 {
        self.core.room.permits()
    }

    /// How many are free at this moment, for people: it may be otherwise by the time this returns.
    pub fn available(&self) -> u32 {
        self.core.room.available()
    }

    /// How many wait at this moment, for people.
    pub fn waiting(&self) -> u32 {
        self.core.room.waiting()
    }

    /// Waits up to `timeout` for a permit, and makes `stream` wait (`cuStreamWaitValue64`) for the device work of its
    /// last holder, unless that is done. The CPU does not wait for that work.
    ///
    /// At most 8 holders' works of one permit may be under way on devices; beyond that the CPU waits for the oldest. The
    /// first time that a stream of this member is to wait for another member's, the two are given a page to share: that
    /// takes a few messages, and the other one's process must answer.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::OwnerGone`]; [`Error::Driver`], and the permit is free again. [`Error::Forked`].
    pub fn acquire(&self, stream: &Stream, timeout: Duration) -> Result<Permit> {
        self.core.check_stream(stream)?;
        let mut clock = Stopwatch::default();
        let permit = self.take(timeout, &mut clock, None)?;
        self.join(permit, stream, timeout, &mut clock)
    }

    /// As [`acquire`](Self::acquire), or [`acquire_host`](Self::acquire_host) without a stream, for who may be called away:
    /// once `called_off` is set, the place in the line is given up within a tenth of a second.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire); [`Error::Timeout`] also when it is called off.
    pub fn acquire_unless(
        &self,
        stream: Option<&Stream>,
        timeout: Duration,
        called_off: &AtomicBool,
    ) -> Result<Permit> {
        stream.map_or(Ok(()), |stream| self.core.check_stream(stream))?;
        let mut clock = Stopwatch::default();
        let permit = self.take(timeout, &mut clock, Some(called_off))?;
        match stream {
            Some(stream) => self.join(permit, stream, timeout, &mut clock),
            None => self.settle(permit, timeout, &mut clock),
        }
    }

    /// Takes a permit if one is free and nobody waits for it. Waits for no other process: until this one knows all whose
    /// work on a permit is under way, which takes a few messages the first time, that permit counts as taken.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire), without the timeout: a permit that has too much work under way is none.
    pub fn try_acquire(&self, stream: &Stream) -> Result<Option<Permit>> {
        self.core.check_stream(stream)?;
        let core = &self.core;
        let may = |permit| core.has_room_for_work(permit) && core.knows_signallers(permit);
        let known = self.try_take_of(may)?;
        // Else any: those who are to signal it are to be got to know.
        let Some(permit) = known.map_or_else(|| self.try_take(), |permit| Ok(Some(permit)))? else { return Ok(None) };
        if !self.core.has_room_for_work(permit.index) {
            return Ok(None);
        }
        if !self.core.knows_signallers(permit.index) {
            let index = permit.index;
            // Handed on first: others may know them.
            drop(permit);
            return self.core.meet_elsewhere(index).map(|()| None);
        }
        self.join(permit, stream, ANSWER_TIMEOUT, &mut Stopwatch::default()).map(Some)
    }

    /// Waits up to `timeout` for a permit *and* for the device work of its last holder, on the CPU.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire).
    pub fn acquire_host(&self, timeout: Duration) -> Result<Permit> {
        let mut clock = Stopwatch::default();
        let permit = self.take(timeout, &mut clock, None)?;
        self.settle(permit, timeout, &mut clock)
    }

    /// Takes a permit if one is free, nobody waits for it, and the device work of its last holder is done.
    ///
    /// # Errors
    /// [`Error::OwnerGone`], [`Error::Forked`].
    pub fn try_acquire_host(&self) -> Result<Option<Permit>> {
        let Some(permit) = self.try_take()? else { return Ok(None) };
        let is_done = self.core.room.word(permit.index).reached(self.core.room.due(permit.index));
        Ok(is_done.then_some(permit))
    }

    fn try_take(&self) -> Result<Option<Permit>> {
        self.try_take_of(|_| true)
    }

    /// The same among those that `may` be taken.
    fn try_take_of(&self, may: impl Fn(u32) -> bool) -> Result<Option<Permit>> {
        let core = &self.core;
        core.check_open()?;
        if core.room.has_waiters() {
            return Ok(None);
        }
        Ok(core.room.take_free_of(core.member, core.hint.load(Relaxed), may).map(|index| self.permit(index, 0)))
    }

    fn permit(&self, index: u32, passed: u64) -> Permit {
        Permit { core: self.core.clone(), index, stream: None, passed, is_open: true }
    }

    fn take(&self, timeout: Duration, clock: &mut Stopwatch, called_off: Option<&AtomicBool>) -> Result<Permit> {
        if let Some(permit) = self.try_take()? {
            return Ok(permit);
        }
        let core = &self.core;
        let mut backoff = Backoff::default();
        let place = loop {
            if let Some(place) = core.room.line_up(core.member) {
                break place;
            }
            if clock.elapsed() >= timeout || called_off.is_some_and(|off| off.load(Relaxed)) {
                return Err(core.no_permit(timeout));
            }
            core.check_open()?;
            backoff.pause();
        };
        let (index, passed) = core.wait_at(place, timeout, clock, called_off)?;
        Ok(self.permit(index, passed))
    }

    /// Waits for what is under way. An error drops the permit, which hands it on.
    fn settle(&self, permit: Permit, timeout: Duration, clock: &mut Stopwatch) -> Result<Permit> {
        let (core, due) = (&self.core, self.core.room.due(permit.index));
        if !core.room.word(permit.index).reached(due) {
            core.meet_signallers(permit.index, timeout.saturating_sub(clock.elapsed()))?;
            core.await_word(permit.index, due, timeout, clock)?;
        }
        Ok(permit)
    }

    /// Makes the stream wait for what is under way. An error drops the permit, which hands it on.
    fn join(&self, mut permit: Permit, stream: &Stream, timeout: Duration, clock: &mut Stopwatch) -> Result<Permit> {
        let (core, index) = (&self.core, permit.index);
        let due = core.room.due(index);
        if !core.room.word(index).reached(due) {
            core.meet_signallers(index, timeout.saturating_sub(clock.elapsed()))?;
            core.await_word(index, due.wrapping_sub(UNDER_WAY_MAX - 1), timeout, clock)?;
            core.wait(index, stream)?;
        }
        permit.stream = Some(stream.clone());
        Ok(permit)
    }
}

/// The right to be inside. Dropped, it is released: behind the work of the stream it was acquired on, or at once if it
/// was acquired on the CPU.
#[derive(Debug)]
#[must_use = "a permit that is dropped is released"]
pub struct Permit {
    core: Arc<Core>,
    index: u32,
    stream: Option<Stream>,
    passed: u64,
    is_open: bool,
}

impl Permit {
    /// Gives it back behind everything `stream` has been given so far (`cuStreamWriteValue64`), and returns at once: the
    /// next holder gets it now, and its stream waits for that work.
    ///
    /// `stream` may be another one than it was acquired on. Work on further streams is the caller's to order before it.
    ///
    /// # Errors
    /// [`Error::Driver`]: the driver does not signal behind this stream. The next holder gets the permit when the stream's
    /// work so far is known to be done; if the driver does not say so either, when this process ends.
    /// [`Error::Argument`] for a stream of another device, [`Error::Capturing`] for one that is being captured: it is
    /// released behind the stream it was acquired on, as if it were dropped.
    pub fn release(mut self, stream: &Stream) -> Result<()> {
        self.core.check_stream(stream)?;
        self.release_behind(stream)
    }

    /// Gives it back now. The next holder waits for nothing of this one's device work (but still for that of those
    /// before it).
    pub fn release_now(mut self) {
        self.hand_on();
    }

    /// How many permits were handed to others while this one was waited for: at most about as many as waited before.
    pub fn passed(&self) -> u64 {
        self.passed
    }

    fn release_behind(&mut self, stream: &Stream) -> Result<()> {
        let (core, index) = (self.core.clone(), self.index);
        core.home.check()?;
        if let Err(error @ Error::Capturing { .. }) = stream.check_not_capturing() {
            self.is_open = false;
            core.hand_on_later(index, stream);
            return Err(error);
        }
        let before = core.room.due(index);
        let is_behind =
            self.stream.as_ref().is_some_and(|own| own.is_same(stream)) || core.room.word(index).reached(before);
        // Another stream than it was acquired on is not behind the last holder's work yet, and its signal would be early.
        match core.release(index, stream, is_behind) {
            Ok(()) => self.hand_on(),
            Err(error) => {
                // No stream would wait for this one's work.
                self.is_open = false;
                core.hand_on_later(index, stream);
                return Err(error);
            }
        }
        Ok(())
    }

    fn hand_on(&mut self) {
        if std::mem::replace(&mut self.is_open, false) && self.core.home.is_here() {
            self.core.hint.store(self.index, Relaxed);
            self.core.room.hand_on(self.index, self.core.member);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take().filter(|_| self.is_open && self.core.home.is_here()) {
            // Whatever fails has been dealt with; nobody is here to be told.
            self.stream = Some(stream.clone());
            let _ = self.release_behind(&stream);
        }
        self.hand_on();
    }
}
