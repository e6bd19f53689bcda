//! A semaphore between processes, on streams and on the CPU.
//!
//! [`Semaphore::acquire`] gives a [`Permit`] to the CPU and makes the *stream* wait for the device
//! work of the permit's last holder; [`Permit::release`] returns at once and takes effect behind
//! the stream's work. Uncontended, both are a few atomics on shared words, without a system call.
//!
//! The words lie in one page that every member maps for writing (`page.rs`): members trust each
//! other with the *count*. A wrong member cannot make another one panic, read elsewhere, or wait
//! beyond its timeout (`docs/design/protocol.md`). Streams wait for words in pages of two
//! (`signals.rs`).

#[cfg(test)]
mod driver_failures;
#[cfg(test)]
mod hostile;
mod local;
mod member_monitor;
#[cfg(all(loom, not(miri)))]
#[path = "../../../../../verify/src/models/room.rs"]
pub mod model;
mod page;
#[cfg(test)]
mod page_tests;
mod server;
mod signals;
#[cfg(loom)]
#[path = "../../../../../verify/src/states/semaphore.rs"]
pub mod states;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use self::local::{LocalSemaphore, SemaphoreRole};
use self::member_monitor::MemberMonitor;
use self::page::{CREATOR, IN_FLIGHT_MAX, PERMITS_MAX, SemaphorePage};
use self::server::{SemaphoreServer, SemaphoreWelcome};
use self::signals::MemberSignals;
use crate::backoff::Backoff;
use crate::error::{Error, Result, StateFault};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::domain::EndpointName;
use crate::ipc::{AccessPolicy, Kind, REPLY_TIMEOUT};
use crate::options::{Attachment, CreateOptions, OpenOptions, chosen_device, serve};
use crate::runtime::reactor::Reactor;
use crate::shm::page::SharedPage;
use crate::stream::Stream;
use crate::wait::Wait;

crate::ipc::messages!(
    server::SemaphoreRequest,
    server::MemberPresence,
    member_monitor::SemaphoreNotice,
    server::SemaphoreWelcome
);

/// The checks of the first waiter in line before it sleeps.
const SPINS: u32 = 2_000;

/// What [`Semaphore::state`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SemaphoreState {
    /// The number of permits.
    pub permits: u32,
    /// The number of free permits.
    pub available: u32,
    /// The number of waiting threads.
    pub waiting: u32,
}

impl Semaphore {
    fn join_as_member(attachment: Attachment<'_>) -> Result<Semaphore> {
        let Attachment {
            name,
            device,
            session,
            reply,
            ..
        } = attachment;
        let (SemaphoreWelcome { member, permits }, [fd]) =
            reply.open::<SemaphoreWelcome, 1>(name.as_str())?;
        if !(1..=PERMITS_MAX).contains(&permits) || member == 0 || member == CREATOR {
            let found = format!("member {member}, {permits} permits");
            let allowed = format!("a member's number, and 1 to {PERMITS_MAX} permits");
            return Err(Error::protocol(name, "admission", found, allowed));
        }
        let reactor = session.reactor().clone();
        let signals = MemberSignals::new(member, permits, name.as_str(), &device, &reactor)?;
        let page = SharedPage::open(Some(&device), fd, page::bytes_for(permits), name.as_str())?;
        let shared_page = Arc::new(SemaphorePage::new(page, permits));
        let monitor = MemberMonitor::new(shared_page, signals);
        let listening = session.observe(monitor.clone());
        let role = SemaphoreRole::Member { session };
        let local = LocalSemaphore::new(&device, monitor.clone(), role);
        listening?;
        reactor.register_ticks(monitor.watched());
        Ok(Semaphore {
            local: LeakOnFork::new(Arc::new(local)),
        })
    }
}

/// A limited number of permits, held in any number of processes on one machine.
///
/// The process that [creates](Semaphore::new) it serves it under a name; other processes
/// [open](Semaphore::open) it. It is closed when this handle, its clones and its permits are
/// dropped, and their streams have completed their work (at once, if they are idle). Any number of
/// threads may use it.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Semaphore};
/// # let folder = std::env::temp_dir().join(format!("warpipe-semaphore-{}", std::process::id()));
/// # let domain = Domain::at(&folder)?;
/// let device = Device::host();
/// // One process:
/// let turns = Semaphore::new("turns", 2, domain.on(&device))?;
/// // Any other:
/// let same = Semaphore::open("turns", domain.on(&device), Duration::ZERO)?;
///
/// let stream = device.stream()?;
/// // The stream waits for the last holder's work.
/// let permit = same.acquire(&stream, Duration::from_secs(1))?;
/// // ... enqueue work on `stream` ...
/// permit.release(&stream)?; // at once; the next holder's stream waits for that work
/// # drop((turns, same)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
///
/// # Order of waiters
///
/// While threads wait, permits go to the one that has waited longest, and no other overtakes it.
/// That holds for 256 waiting threads on the machine; further threads wait for a wait slot, in no
/// order.
///
/// # When a process dies
///
/// * A holder: its permit comes back when its death is proven (its lifeline), after its last
///   possible access. The next holder continues; the user must deal with the dead holder's
///   unfinished work.
/// * A holder after its release, before its device work was done: the streams behind it go on at
///   its proven death.
/// * A waiter: its wait slot is freed at its proven death, and a permit granted to it is handed on.
/// * The creator: present and later waits end with [`Error::PeerGone`]. Permits that are held stay
///   valid and can be released. Streams continue as above; each process releases its own.
#[derive(Debug, Clone)]
pub struct Semaphore {
    local: LeakOnFork<Arc<LocalSemaphore>>,
}

impl Semaphore {
    /// Creates the semaphore with 1 to 1024 permits, all free, and serves it under its name.
    ///
    /// **Every member can write the semaphore's page.** A wrong one can take permits that are not
    /// its own, let in more than the maximum, and starve the others; it cannot hang their streams,
    /// or damage anything else of theirs. Admit users that you trust to use it rightly, and
    /// give the others one of their own.
    ///
    /// It costs a sealed memfd of 24 to 84 KiB, registered with its device (`cuMemHostRegister`),
    /// and a socket in the domain.
    ///
    /// # Errors
    /// [`Error::Argument`] for the number, [`Error::Name`] and the others of
    /// a domain, [`Error::Driver`], [`Error::Os`].
    pub fn new(name: &str, permits: u32, options: CreateOptions) -> Result<Semaphore> {
        if !(1..=PERMITS_MAX).contains(&permits) {
            let allowed = format!("1 to {PERMITS_MAX}");
            return Err(Error::argument("permits", permits, allowed));
        }
        let name = EndpointName::new(name)?;
        let device = chosen_device(&options.device);
        let reactor = Reactor::of_process()?;
        let signals = MemberSignals::new(CREATOR, permits, name.as_str(), &device, &reactor)?;
        let (page, fd) = SharedPage::create(Some(&device), page::bytes_for(permits))?;
        let shared_page = Arc::new(SemaphorePage::new(page, permits));
        let monitor = MemberMonitor::new(shared_page, signals);
        let kind = device.info().id.kind;
        let semaphore_server = Arc::new(SemaphoreServer::new(fd, kind, monitor.clone()));
        let access = AccessPolicy::of(options.allow_uids, options.allow_gids);
        let served = semaphore_server.clone();
        let server = serve(&options.domain, &name, Kind::Semaphore, access, served)?;
        reactor.register_ticks(monitor.watched());
        let role = SemaphoreRole::Creator {
            server,
            semaphore_server,
        };
        Ok(Semaphore {
            local: LeakOnFork::new(Arc::new(LocalSemaphore::new(&device, monitor, role))),
        })
    }

    /// Opens the semaphore of this name.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Name`], [`Error::Timeout`]; [`Error::Refused`], also when it
    /// is for another kind of device; [`Error::Protocol`] for a creator that is broken;
    /// [`Error::Driver`], [`Error::Os`].
    pub fn open<'w>(
        name: &str,
        options: OpenOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Semaphore> {
        options.open(name, Kind::Semaphore, wait, Semaphore::join_as_member)
    }

    /// Its permits and its waiting threads at this moment, for diagnostics: they may have changed
    /// when this returns.
    pub fn state(&self) -> SemaphoreState {
        let page = &self.local.shared_page;
        SemaphoreState {
            permits: page.permits(),
            available: page.available(),
            waiting: page.waiting(),
        }
    }

    /// Waits for a permit, and makes `stream` wait (`cuStreamWaitValue64`) for the
    /// device work of its last holder, unless that is done. The CPU does not wait for that work.
    ///
    /// At most 8 holders' work of one permit may be in progress on devices; beyond that the CPU
    /// waits for the oldest. The first time that a stream of this member waits for another
    /// member's, the two get a page to share: that takes a few messages, and the other process must
    /// answer. A wait of zero takes a permit that is free and that no thread waits for, and waits
    /// for no other process: until the two are connected, and while too much work is in progress,
    /// the permit counts as taken.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::PeerGone`]; [`Error::Driver`], and the permit is free again.
    /// [`Error::State`].
    pub fn acquire<'w>(&self, stream: &Stream, wait: impl Into<Wait<'w>>) -> Result<Permit> {
        self.local.check_stream(stream)?;
        let wait = wait.into();
        if wait.limit().is_zero() {
            let free = self.acquire_now(stream)?;
            return free.ok_or_else(|| self.local.no_permit(&wait));
        }
        let permit = self.take(&wait)?;
        self.join(permit, stream, &wait)
    }

    fn acquire_now(&self, stream: &Stream) -> Result<Option<Permit>> {
        let local = &self.local;
        let may = |permit| {
            local.has_room_for_work(permit) && local.unconnected_signallers(permit).is_empty()
        };
        let known = self.try_take_of(may)?;
        // Otherwise any permit: this process then connects to its signallers.
        let Some(permit) = known.map_or_else(|| self.try_take(), |permit| Ok(Some(permit)))? else {
            return Ok(None);
        };
        if !local.has_room_for_work(permit.index) {
            return Ok(None);
        }
        let unconnected = local.unconnected_signallers(permit.index);
        if !unconnected.is_empty() {
            // Handed on first: other members may be connected to them.
            drop(permit);
            return local.start_connecting(unconnected).map(|()| None);
        }
        self.join(permit, stream, &REPLY_TIMEOUT.into()).map(Some)
    }

    /// Waits for a permit *and* for the device work of its last holder, on the CPU. A wait of zero
    /// takes a permit that is free, that no thread waits for, and whose work is done.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire).
    pub fn acquire_host<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Permit> {
        let wait = wait.into();
        if wait.limit().is_zero() {
            let free = self.try_take()?.filter(|permit| self.is_idle(permit));
            return free.ok_or_else(|| self.local.no_permit(&wait));
        }
        let permit = self.take(&wait)?;
        self.settle(permit, &wait)
    }

    /// Whether the device work of the last holder is done.
    fn is_idle(&self, permit: &Permit) -> bool {
        let page = &self.local.shared_page;
        page.word(permit.index).reached(page.due(permit.index))
    }

    fn try_take(&self) -> Result<Option<Permit>> {
        self.try_take_of(|_| true)
    }

    /// Like [`try_take`](Self::try_take), among the permits that `may` accepts.
    fn try_take_of(&self, may: impl Fn(u32) -> bool) -> Result<Option<Permit>> {
        let local = self.local.get()?;
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

    fn take(&self, wait: &Wait<'_>) -> Result<Permit> {
        if let Some(permit) = self.try_take()? {
            return Ok(permit);
        }
        let local = &self.local;
        let mut backoff = Backoff::default();
        let slot = loop {
            if let Some(slot) = local.shared_page.begin_wait(local.member) {
                break slot;
            }
            if wait.is_over() {
                return Err(local.no_permit(wait));
            }
            local.check_open()?;
            backoff.pause();
        };
        let (index, passed) = local.wait_at(slot, wait)?;
        Ok(self.permit(index, passed))
    }

    /// Waits for work in progress. An error drops the permit, which hands it on.
    fn settle(&self, permit: Permit, wait: &Wait<'_>) -> Result<Permit> {
        let (local, due) = (&self.local, self.local.shared_page.due(permit.index));
        if !local.shared_page.word(permit.index).reached(due) {
            local.connect_signallers(permit.index, wait)?;
            local.await_word(permit.index, due, wait)?;
        }
        Ok(permit)
    }

    /// Makes the stream wait for work in progress. An error drops the permit, which hands it on.
    fn join(&self, mut permit: Permit, stream: &Stream, wait: &Wait<'_>) -> Result<Permit> {
        let (local, index) = (&self.local, permit.index);
        let due = local.shared_page.due(index);
        if !local.shared_page.word(index).reached(due) {
            local.connect_signallers(index, wait)?;
            local.await_word(index, due.wrapping_sub(IN_FLIGHT_MAX - 1), wait)?;
            local.wait(index, stream)?;
        }
        permit.stream = Some(stream.clone());
        Ok(permit)
    }
}

/// A permit. The drop releases it: behind the work of the stream it was acquired on, or at once if
/// it was acquired on the CPU.
#[derive(Debug)]
#[must_use = "a permit that is dropped is released"]
pub struct Permit {
    local: LeakOnFork<Arc<LocalSemaphore>>,
    index: u32,
    stream: Option<Stream>,
    /// The permits that were granted to others while this one was waited for: at most about as many
    /// as waited before.
    pub passed: u64,
    is_open: bool,
}

impl Permit {
    /// Releases the permit behind the stream's work so far (`cuStreamWriteValue64`), and returns at
    /// once: the next holder gets it now, and its stream waits for that work.
    ///
    /// `stream` may be another one than it was acquired on. The caller orders work on further
    /// streams before it.
    ///
    /// # Errors
    /// [`Error::Driver`]: the driver does not signal behind this stream. The next holder gets the
    /// permit when the stream's work so far is known to be done; if the driver does not report that
    /// either, when this process ends. [`Error::Argument`] for a stream of another device,
    /// [`Error::State`] for a stream that is being captured: the permit is released behind the
    /// stream it was acquired on, as if it were dropped.
    pub fn release(mut self, stream: &Stream) -> Result<()> {
        self.local.check_stream(stream)?;
        self.release_behind(stream)
    }

    /// Releases the permit now. The next holder does not wait for this holder's device work (but
    /// still for that of earlier holders).
    pub fn release_now(mut self) {
        self.hand_on();
    }

    fn release_behind(&mut self, stream: &Stream) -> Result<()> {
        let (local, index) = (self.local.get()?.clone(), self.index);
        let released = match stream.check_not_capturing() {
            Err(error @ Error::State(StateFault::Capturing(_))) => Err(error),
            _ => {
                let before = local.shared_page.due(index);
                // A stream other than the acquiring one is not behind the last holder's work yet,
                // and its signal would be early.
                let is_behind = self.stream.as_ref().is_some_and(|own| own.is_same(stream))
                    || local.shared_page.word(index).reached(before);
                local.release(index, stream, is_behind)
            }
        };
        match released {
            Ok(()) => self.hand_on(),
            Err(_) => {
                // No stream would wait for this holder's work.
                self.is_open = false;
                local.hand_on_deferred(index, stream);
            }
        }
        released
    }

    fn hand_on(&mut self) {
        if std::mem::replace(&mut self.is_open, false)
            && let Ok(local) = self.local.get()
        {
            local.hint.store(self.index, Relaxed);
            local.shared_page.hand_on(self.index, local.member);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take().filter(|_| self.is_open) {
            // Every failure has been handled, and a drop cannot report one.
            self.stream = Some(stream.clone());
            let _ = self.release_behind(&stream);
        }
        self.hand_on();
    }
}
