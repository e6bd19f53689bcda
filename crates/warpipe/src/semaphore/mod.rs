//! A semaphore between processes: at most so many at once, on streams and on the CPU.
//!
//! [`Semaphore::acquire`] gives a [`Permit`] to the CPU and makes the *stream* wait for the device work of the permit's
//! last holder; [`Permit::release`] returns at once and takes effect behind the stream's work. Nobody's CPU waits for
//! a device. Uncontended, both are a few atomics on shared words, without a system call.
//!
//! The words lie in one page that every member maps for writing (`room.rs`, and byte by byte
//! `docs/design/semaphore-page.md`): members trust each other with the *count*. What a wrong member can do to it stands
//! at the head of `room.rs`; it cannot make another one panic, read elsewhere, or wait beyond its timeout.

mod room;
mod survivor;
#[cfg(test)]
mod tests;
mod warden;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use self::room::{CREATOR, LOOK, Look, PERMITS_MAX, Place, Room, UNDER_WAY_MAX};
use self::survivor::Survivor;
use self::warden::{Here, Warden, Welcome, WhoIs};
use crate::backend::StreamOp;
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::link::proof::Streams;
use crate::link::watcher::Watcher;
use crate::memory::page::Page;
use crate::rendezvous::{ANSWER_TIMEOUT, Address, Admission, Keeper, Kind, Visitor, decode, encode};
use crate::stream::{Backoff, Stream};

/// How often a waiter looks before it sleeps.
const SPINS: u32 = 2_000;

/// So many may hold a permit at once, in any number of processes on one machine.
///
/// Whoever [creates](Semaphore::create) it keeps it under a name; others [open](Semaphore::open) it. It is closed when
/// this handle, its clones and its permits are dropped. May be used from any number of threads.
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
/// * A holder: its permit comes back when its death is proven (its pidfd), after everything it could still do. The
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
        let (page, fd) = Page::create(Some(device), room::bytes_for(permits))?;
        let room = Arc::new(Room::new(page, permits));
        let keep = Arc::new(Warden::new(room.clone(), fd, device.info().id.kind));
        let at = Address { domain, name: &name, kind: Kind::Semaphore };
        // Not dropped here on an error: to unregister memory, a driver may wait for a stream that waits for a peer.
        let keeper = match Keeper::open(&at, Admission::default(), keep) {
            Ok(keeper) => keeper,
            Err(error) => return Err(bury(room, error)),
        };
        let watcher = keeper.desk().watcher().clone();
        Ok(Semaphore {
            core: Arc::new(Core::new(room, device, name.as_str(), CREATOR, watcher, Side::Creator(keeper))),
        })
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
        let page = Page::open(Some(device), fd, room::bytes_for(permits), name.as_str())?;
        let room = Arc::new(Room::new(page, permits));
        let survivor = Survivor::new(room.clone(), member);
        let watcher = visitor.watcher().clone();
        let side = Side::Member { visitor, survivor: survivor.clone() };
        let core = Core::new(room, device, name.as_str(), member, watcher.clone(), side);
        if let Some(Side::Member { visitor, .. }) = &core.side {
            visitor.listen(survivor.clone())?;
        }
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
    /// At most 8 holders' works of one permit may be under way on devices; beyond that the CPU waits for the oldest.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::OwnerGone`]; [`Error::Driver`], and the permit is free again. [`Error::Forked`].
    pub fn acquire(&self, stream: &Stream, timeout: Duration) -> Result<Permit> {
        self.core.check_stream(stream)?;
        let mut clock = Stopwatch::default();
        let permit = self.take(timeout, &mut clock)?;
        self.join(permit, stream, timeout, &mut clock)
    }

    /// Takes a permit if one is free and nobody waits for it.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire), without the timeout: a permit that has too much work under way is none.
    pub fn try_acquire(&self, stream: &Stream) -> Result<Option<Permit>> {
        self.core.check_stream(stream)?;
        let Some(permit) = self.try_take()? else { return Ok(None) };
        if !self.core.has_room_for_work(permit.index) {
            return Ok(None);
        }
        self.join(permit, stream, ANSWER_TIMEOUT, &mut Stopwatch::default()).map(Some)
    }

    /// Waits up to `timeout` for a permit *and* for the device work of its last holder, on the CPU.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire).
    pub fn acquire_host(&self, timeout: Duration) -> Result<Permit> {
        let mut clock = Stopwatch::default();
        let permit = self.take(timeout, &mut clock)?;
        let (core, due) = (&self.core, self.core.room.due(permit.index));
        if !core.room.word(permit.index).reached(due) {
            core.meet_signallers(permit.index)?;
            core.await_word(permit.index, due, timeout, &mut clock)?;
        }
        Ok(permit)
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
        let core = &self.core;
        core.check_open()?;
        if core.room.has_waiters() {
            return Ok(None);
        }
        Ok(core.room.take_free(core.member, core.hint.load(Relaxed)).map(|index| self.permit(index, 0)))
    }

    fn permit(&self, index: u32, passed: u64) -> Permit {
        Permit { core: self.core.clone(), index, stream: None, passed, is_open: true }
    }

    fn take(&self, timeout: Duration, clock: &mut Stopwatch) -> Result<Permit> {
        if let Some(permit) = self.try_take()? {
            return Ok(permit);
        }
        let core = &self.core;
        let mut backoff = Backoff::default();
        let place = loop {
            if let Some(place) = core.room.line_up(core.member) {
                break place;
            }
            if clock.elapsed() >= timeout {
                return Err(core.no_permit(timeout));
            }
            core.check_open()?;
            backoff.pause();
        };
        let (index, passed) = core.wait_at(place, timeout, clock)?;
        Ok(self.permit(index, passed))
    }

    /// Makes the stream wait for what is under way. An error drops the permit, which hands it on.
    fn join(&self, mut permit: Permit, stream: &Stream, timeout: Duration, clock: &mut Stopwatch) -> Result<Permit> {
        let (core, index) = (&self.core, permit.index);
        let due = core.room.due(index);
        if !core.room.word(index).reached(due) {
            core.meet_signallers(index)?;
            core.await_word(index, due.wrapping_sub(UNDER_WAY_MAX - 1), timeout, clock)?;
            core.enqueue(stream, &[core.wait_op(index, due)?])?;
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
    /// [`Error::Driver`]: the permit is given back, but the next holder does not wait for this stream's work.
    /// [`Error::Argument`] for a stream of another device: it is released behind the stream it was acquired on.
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
        let before = core.room.due(index);
        let is_behind =
            self.stream.as_ref().is_some_and(|own| own.is_same(stream)) || core.room.word(index).reached(before);
        // Another stream than it was acquired on is not behind the last holder's work yet, and its signal would be early.
        let wait = if is_behind { None } else { Some(core.wait_op(index, before)?) };
        let value = core.room.promise(index, core.member);
        let signal = core.signal_op(index, value)?;
        let ops: Vec<StreamOp> = wait.into_iter().chain([signal]).collect();
        let enqueued = core.enqueue(stream, &ops);
        if enqueued.is_err() {
            core.pay_later(index, value);
        }
        self.hand_on();
        enqueued
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

/// Leaves a room that nobody came into to the reaper.
fn bury(room: Arc<Room>, why: Error) -> Error {
    if let Ok(watcher) = Watcher::of_process() {
        watcher.bury(Box::new(room));
    }
    why
}

/// How this process belongs to it.
#[derive(Debug)]
enum Side {
    Creator(#[expect(dead_code, reason = "held, not used")] Keeper),
    Member { visitor: Visitor, survivor: Arc<Survivor> },
}

/// What a process's handles and permits share.
#[derive(Debug)]
struct Core {
    room: Arc<Room>,
    home: Home,
    device: Device,
    name: String,
    member: u32,
    /// The permit given back last: most likely free, and in this CPU's cache.
    hint: AtomicU32,
    streams: Arc<Streams>,
    watcher: Arc<Watcher>,
    /// `None` only while dropping.
    side: Option<Side>,
}

impl Core {
    fn new(room: Arc<Room>, device: &Device, name: &str, member: u32, watcher: Arc<Watcher>, side: Side) -> Core {
        Core {
            room,
            home: Home::here(),
            device: device.clone(),
            name: name.to_string(),
            member,
            hint: AtomicU32::new(0),
            streams: Arc::default(),
            watcher,
            side: Some(side),
        }
    }

    fn check_open(&self) -> Result<()> {
        self.home.check()?;
        match &self.side {
            Some(Side::Member { visitor, survivor }) if survivor.is_over() => Err(visitor.owner_gone()),
            _ => Ok(()),
        }
    }

    fn is_over(&self) -> bool {
        matches!(&self.side, Some(Side::Member { survivor, .. }) if survivor.is_over())
    }

    /// The page is registered with this device's backend, and its addresses mean nothing to another.
    fn check_stream(&self, stream: &Stream) -> Result<()> {
        let (found, own) = (stream.device().info(), self.device.info());
        if found.id == own.id {
            return Ok(());
        }
        Err(Error::argument("stream", format!("one of {}", found.id), format!("one of {}, as it was opened", own.id)))
    }

    fn no_permit(&self, waited: Duration) -> Error {
        Error::Timeout { what: format!("a permit of {:?}", self.name), waited }
    }

    fn wait_at(&self, place: Place, timeout: Duration, clock: &mut Stopwatch) -> Result<(u32, u64)> {
        let mut backoff = Backoff::spinning(SPINS);
        // A permit may have become free while nobody was to be seen.
        self.room.serve(self.member);
        loop {
            let left = timeout.saturating_sub(clock.elapsed());
            let give_up = left.is_zero() || self.is_over();
            let look =
                if give_up { self.room.withdraw(place, self.member) } else { self.room.look(place, self.member) };
            match look {
                Look::Granted { permit, passed } => return Ok((permit, passed)),
                Look::Lost => return Err(self.place_lost()),
                Look::Waiting if give_up => {
                    self.check_open()?;
                    return Err(self.no_permit(timeout));
                }
                Look::Waiting if backoff.step().is_zero() => std::hint::spin_loop(),
                Look::Waiting => {
                    self.room.sleep(place, left.min(LOOK), || self.is_over());
                    self.room.serve(self.member);
                }
            }
        }
    }

    fn place_lost(&self) -> Error {
        Error::Protocol {
            name: self.name.clone(),
            field: "waiter's place",
            found: "overwritten".into(),
            allowed: "its waiter's own until it leaves".into(),
        }
    }

    fn has_room_for_work(&self, permit: u32) -> bool {
        self.room.word(permit).reached(self.room.due(permit).wrapping_sub(UNDER_WAY_MAX - 1))
    }

    fn await_word(&self, permit: u32, value: u64, timeout: Duration, clock: &mut Stopwatch) -> Result<()> {
        let word = self.room.word(permit);
        let left = timeout.saturating_sub(clock.elapsed());
        if word.reached(value) || self.device.backend().wait_word(word, value, left)? {
            return Ok(());
        }
        let what = format!("the device work of the last holder of {:?}", self.name);
        Err(Error::Timeout { what, waited: timeout })
    }

    /// Makes sure that this process hears of the death of everybody who is to signal this permit.
    fn meet_signallers(&self, permit: u32) -> Result<()> {
        let Some(Side::Member { visitor, survivor }) = &self.side else { return Ok(()) };
        for (_, member) in self.room.under_way(permit) {
            if survivor.knows(member) {
                continue;
            }
            let mut gift = visitor.ask(&encode(&WhoIs { member })?, ANSWER_TIMEOUT)?;
            let Here(is_here) = decode(&gift.body, &self.name)?;
            // Without a descriptor it is gone, and the creator has stored what it owed.
            if let (true, Some(pidfd)) = (is_here, gift.fds.pop()) {
                survivor.learn(member, pidfd, &self.watcher, &self.name)?;
            }
        }
        Ok(())
    }

    fn word_address(&self, permit: u32) -> Result<u64> {
        let missing = || Error::argument("device", "none", "the one it was opened on");
        self.room.device_word(permit).ok_or_else(missing)
    }

    fn wait_op(&self, permit: u32, value: u64) -> Result<StreamOp> {
        Ok(StreamOp::Wait { word: self.word_address(permit)?, value })
    }

    fn signal_op(&self, permit: u32, value: u64) -> Result<StreamOp> {
        Ok(StreamOp::Signal { word: self.word_address(permit)?, value })
    }

    fn enqueue(&self, stream: &Stream, ops: &[StreamOp]) -> Result<()> {
        self.streams.note(stream);
        // SAFETY: the words lie in the page, which is let go only when this stream, noted above, is proven to be past
        // them (see `Drop`).
        unsafe { stream.batch(ops) }
    }

    /// Stores, once what came before it is done, a value that was promised and could not be enqueued.
    fn pay_later(&self, permit: u32, value: u64) {
        let room = self.room.clone();
        self.watcher.retire(move || {
            room.word(permit).advance(value.wrapping_sub(1), value);
            room.word(permit).reached(value)
        });
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let mut side = self.side.take();
        if !self.home.is_here() {
            return std::mem::forget((side, self.room.clone()));
        }
        if let Some(Side::Creator(_)) = &side {
            drop(side.take());
        }
        let (room, streams, mut proof) = (self.room.clone(), self.streams.clone(), None);
        self.watcher.retire(move || {
            let room = &room;
            if !proof.get_or_insert_with(|| streams.mark()).is_passed() {
                return false;
            }
            // Only now a goodbye: whoever has said it owes no signal any more. And only now the page: never on this
            // thread, since to unregister memory, a driver may wait for a stream that waits for a peer.
            drop(side.take());
            Arc::strong_count(room) == 1
        });
    }
}
