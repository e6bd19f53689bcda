//! A semaphore between processes: at most so many at once, on streams and on the CPU.
//!
//! [`Semaphore::acquire`] gives a [`Permit`] to the CPU and makes the *stream* wait for the device work of the permit's
//! last holder; [`Permit::release`] returns at once and takes effect behind the stream's work. Nobody's CPU waits for
//! a device. Uncontended, both are a few atomics on shared words, without a system call.
//!
//! The words lie in one page that every member maps for writing (`page.rs`, and byte by byte
//! `docs/design/semaphore-page.md`): members trust each other with the *count*. What a wrong member can do to it stands
//! at the head of `page.rs`; it cannot make another one panic, read elsewhere, or wait beyond its timeout. No stream waits
//! for a word of that page: each pair of members that needs one has a page of its own (`signals.rs`).

#[cfg(test)]
mod driver_failures;
#[cfg(test)]
mod hostile;
mod local;
mod member_monitor;
mod page;
mod server;
mod signals;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use self::local::{LocalSemaphore, SemaphoreRole, drop_deferred};
use self::member_monitor::MemberMonitor;
use self::page::{CREATOR, IN_FLIGHT_MAX, PERMITS_MAX, SemaphorePage};
use self::server::{SemaphoreServer, SemaphoreWelcome};
use self::signals::MemberSignals;
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{AccessPolicy, Address, ClientSession, IpcServer, Kind, REPLY_TIMEOUT};
use crate::runtime::reactor::Reactor;
use crate::shm::page::SharedPage;
use crate::stream::{Backoff, Stream};

crate::ipc::messages!(
    server::SemaphoreRequest,
    server::MemberPresence,
    server::SemaphoreNotice,
    server::SemaphoreWelcome
);

/// The guide's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../../../../../docs/guide/semaphore.md")]
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
    local: Arc<LocalSemaphore>,
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
            return Err(Error::argument(
                "permits",
                permits,
                format!("1 to {PERMITS_MAX}"),
            ));
        }
        let name = EndpointName::new(name)?;
        let reactor = Reactor::of_process()?;
        let signals = MemberSignals::new(CREATOR, permits, name.as_str(), device, &reactor)?;
        let (page, fd) = SharedPage::create(Some(device), page::bytes_for(permits))?;
        let shared_page = Arc::new(SemaphorePage::new(page, permits));
        let monitor = MemberMonitor::new(shared_page.clone(), signals.clone(), CREATOR);
        let kind = device.info().id.kind;
        let semaphore_server = Arc::new(SemaphoreServer::new(
            shared_page.clone(),
            fd,
            kind,
            signals.clone(),
            monitor.clone(),
        ));
        let at = Address {
            domain,
            name: &name,
            kind: Kind::Semaphore,
        };
        // Not dropped here on an error: to unregister memory, a driver may wait for a stream that waits for a peer.
        let server = match IpcServer::open(&at, AccessPolicy::default(), semaphore_server.clone()) {
            Ok(server) => server,
            Err(error) => {
                return Err(drop_deferred(
                    (shared_page, signals, monitor, semaphore_server),
                    error,
                ));
            }
        };
        reactor.register_ticks(monitor.watched());
        let role = SemaphoreRole::Creator {
            server,
            semaphore_server,
        };
        Ok(Semaphore {
            local: Arc::new(LocalSemaphore::new(
                shared_page,
                device,
                CREATOR,
                signals,
                monitor,
                role,
            )),
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
    pub fn open_timeout(
        domain: &Domain,
        name: &str,
        device: &Device,
        wait: Duration,
    ) -> Result<Semaphore> {
        let name = EndpointName::new(name)?;
        let at = Address {
            domain,
            name: &name,
            kind: Kind::Semaphore,
        };
        let (session, incoming) = ClientSession::attach(&at, Some(device.info().id), &[], wait)?;
        let (SemaphoreWelcome { member, permits }, [fd]) =
            incoming.open::<SemaphoreWelcome, 1>(name.as_str())?;
        if !(1..=PERMITS_MAX).contains(&permits) || member == 0 || member == CREATOR {
            return Err(Error::Protocol {
                name: name.to_string(),
                field: "admission",
                found: format!("member {member}, {permits} permits"),
                allowed: format!("a visitor's number, and 1 to {PERMITS_MAX} permits"),
            });
        }
        let reactor = session.reactor().clone();
        let signals = MemberSignals::new(member, permits, name.as_str(), device, &reactor)?;
        let page = SharedPage::open(Some(device), fd, page::bytes_for(permits), name.as_str())?;
        let shared_page = Arc::new(SemaphorePage::new(page, permits));
        let monitor = MemberMonitor::new(shared_page.clone(), signals.clone(), member);
        let listening = session.observe(monitor.clone());
        let local = LocalSemaphore::new(
            shared_page,
            device,
            member,
            signals,
            monitor.clone(),
            SemaphoreRole::Member { session },
        );
        listening?;
        reactor.register_ticks(monitor.watched());
        Ok(Semaphore {
            local: Arc::new(local),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.local.name
    }

    /// How many permits there are.
    pub fn permits(&self) -> u32 {
        self.local.shared_page.permits()
    }

    /// How many are free at this moment, for people: it may be otherwise by the time this returns.
    pub fn available(&self) -> u32 {
        self.local.shared_page.available()
    }

    /// How many wait at this moment, for people.
    pub fn waiting(&self) -> u32 {
        self.local.shared_page.waiting()
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
        self.local.check_stream(stream)?;
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
        stream.map_or(Ok(()), |stream| self.local.check_stream(stream))?;
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
        self.local.check_stream(stream)?;
        let local = &self.local;
        let may =
            |permit| local.has_room_for_work(permit) && local.is_connected_to_signallers(permit);
        let known = self.try_take_of(may)?;
        // Else any: those who are to signal it are to be got to know.
        let Some(permit) = known.map_or_else(|| self.try_take(), |permit| Ok(Some(permit)))? else {
            return Ok(None);
        };
        if !self.local.has_room_for_work(permit.index) {
            return Ok(None);
        }
        if !self.local.is_connected_to_signallers(permit.index) {
            let index = permit.index;
            // Handed on first: others may know them.
            drop(permit);
            return self.local.connect_in_background(index).map(|()| None);
        }
        self.join(permit, stream, REPLY_TIMEOUT, &mut Stopwatch::default())
            .map(Some)
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
        let Some(permit) = self.try_take()? else {
            return Ok(None);
        };
        let is_done = self
            .local
            .shared_page
            .word(permit.index)
            .reached(self.local.shared_page.due(permit.index));
        Ok(is_done.then_some(permit))
    }

    fn try_take(&self) -> Result<Option<Permit>> {
        self.try_take_of(|_| true)
    }

    /// The same among those that `may` be taken.
    fn try_take_of(&self, may: impl Fn(u32) -> bool) -> Result<Option<Permit>> {
        let local = &self.local;
        local.check_open()?;
        if local.shared_page.has_waiters() {
            return Ok(None);
        }
        Ok(local
            .shared_page
            .take_free_of(local.member, local.hint.load(Relaxed), may)
            .map(|index| self.permit(index, 0)))
    }

    fn permit(&self, index: u32, passed: u64) -> Permit {
        Permit {
            local: self.local.clone(),
            index,
            stream: None,
            passed,
            is_open: true,
        }
    }

    fn take(
        &self,
        timeout: Duration,
        clock: &mut Stopwatch,
        called_off: Option<&AtomicBool>,
    ) -> Result<Permit> {
        if let Some(permit) = self.try_take()? {
            return Ok(permit);
        }
        let local = &self.local;
        let mut backoff = Backoff::default();
        let slot = loop {
            if let Some(slot) = local.shared_page.begin_wait(local.member) {
                break slot;
            }
            if clock.elapsed() >= timeout || called_off.is_some_and(|off| off.load(Relaxed)) {
                return Err(local.timeout_error(timeout));
            }
            local.check_open()?;
            backoff.pause();
        };
        let (index, passed) = local.wait_at(slot, timeout, clock, called_off)?;
        Ok(self.permit(index, passed))
    }

    /// Waits for what is under way. An error drops the permit, which hands it on.
    fn settle(&self, permit: Permit, timeout: Duration, clock: &mut Stopwatch) -> Result<Permit> {
        let (local, due) = (&self.local, self.local.shared_page.due(permit.index));
        if !local.shared_page.word(permit.index).reached(due) {
            local.connect_signallers(permit.index, timeout.saturating_sub(clock.elapsed()))?;
            local.await_word(permit.index, due, timeout, clock)?;
        }
        Ok(permit)
    }

    /// Makes the stream wait for what is under way. An error drops the permit, which hands it on.
    fn join(
        &self,
        mut permit: Permit,
        stream: &Stream,
        timeout: Duration,
        clock: &mut Stopwatch,
    ) -> Result<Permit> {
        let (local, index) = (&self.local, permit.index);
        let due = local.shared_page.due(index);
        if !local.shared_page.word(index).reached(due) {
            local.connect_signallers(index, timeout.saturating_sub(clock.elapsed()))?;
            local.await_word(index, due.wrapping_sub(IN_FLIGHT_MAX - 1), timeout, clock)?;
            local.wait(index, stream)?;
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
    local: Arc<LocalSemaphore>,
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
        self.local.check_stream(stream)?;
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
        let (local, index) = (self.local.clone(), self.index);
        local.owner_process.check()?;
        if let Err(error @ Error::Capturing { .. }) = stream.check_not_capturing() {
            self.is_open = false;
            local.hand_on_deferred(index, stream);
            return Err(error);
        }
        let before = local.shared_page.due(index);
        let is_behind = self.stream.as_ref().is_some_and(|own| own.is_same(stream))
            || local.shared_page.word(index).reached(before);
        // Another stream than it was acquired on is not behind the last holder's work yet, and its signal would be early.
        match local.release(index, stream, is_behind) {
            Ok(()) => self.hand_on(),
            Err(error) => {
                // No stream would wait for this one's work.
                self.is_open = false;
                local.hand_on_deferred(index, stream);
                return Err(error);
            }
        }
        Ok(())
    }

    fn hand_on(&mut self) {
        if std::mem::replace(&mut self.is_open, false) && self.local.owner_process.is_current() {
            self.local.hint.store(self.index, Relaxed);
            self.local
                .shared_page
                .hand_on(self.index, self.local.member);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(stream) = self
            .stream
            .take()
            .filter(|_| self.is_open && self.local.owner_process.is_current())
        {
            // Whatever fails has been dealt with; nobody is here to be told.
            self.stream = Some(stream.clone());
            let _ = self.release_behind(&stream);
        }
        self.hand_on();
    }
}
