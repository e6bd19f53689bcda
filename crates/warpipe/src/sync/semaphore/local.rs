//! The state that one process's handles and permits of a semaphore share. **This module is marked
//! for unsafe**: it passes words for streams to the device.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::SPINS;
use super::member_monitor::MemberMonitor;
use super::page::{
    CREATOR, IN_FLIGHT_MAX, RECHECK_INTERVAL, SemaphorePage, WaitProgress, WaitSlot,
};
use super::server::{MemberPresence, PageOffer, SemaphoreRequest, SemaphoreServer};
use super::signals::{MemberSignals, wait_until};
use crate::backend::StreamOp;
use crate::backoff::Backoff;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::{ClientSession, IpcServer, REPLY_TIMEOUT, decode, encode};
use crate::runtime::closer::PeerFd;
use crate::runtime::fence::Fence;
use crate::runtime::reactor::{DropReadiness, Reactor};
use crate::stream::Stream;
use crate::wait::Wait;

/// The role of this process for the semaphore.
#[derive(Debug)]
pub(super) enum SemaphoreRole {
    Creator {
        server: IpcServer,
        semaphore_server: Arc<SemaphoreServer>,
    },
    Member {
        session: ClientSession,
    },
}

/// The state that a process's handles and permits share.
#[derive(Debug)]
pub(super) struct LocalSemaphore {
    pub(super) shared_page: Arc<SemaphorePage>,
    device: Device,
    pub(super) name: String,
    pub(super) member: u32,
    /// The permit released last: most likely free, and in this CPU's cache.
    pub(super) hint: AtomicU32,
    signals: Arc<MemberSignals>,
    monitor: Arc<MemberMonitor>,
    reactor: Arc<Reactor>,
    /// A background thread is connecting to members for callers that do not wait; the last failure
    /// is kept.
    is_connecting: AtomicBool,
    connecting: Mutex<Option<Error>>,
    /// `None` only while dropping.
    pub(super) role: Option<SemaphoreRole>,
}

/// The attempt of the one background thread. It is over when this is dropped, also by a panic.
struct BackgroundConnect(Arc<LocalSemaphore>);

impl Drop for BackgroundConnect {
    fn drop(&mut self) {
        self.0.is_connecting.store(false, SeqCst);
    }
}

/// A place in the line, during a call of the user's. Dropped, by its panic, it is left, and a permit
/// that has come is handed on.
struct HeldPlace<'a> {
    local: &'a LocalSemaphore,
    slot: WaitSlot,
}

impl Drop for HeldPlace<'_> {
    fn drop(&mut self) {
        let LocalSemaphore {
            shared_page,
            member,
            ..
        } = self.local;
        if let WaitProgress::Granted { permit, .. } = shared_page.cancel_wait(self.slot, *member) {
            shared_page.hand_on(permit, *member);
        }
    }
}

impl LocalSemaphore {
    pub(super) fn new(
        shared_page: Arc<SemaphorePage>,
        device: &Device,
        member: u32,
        signals: Arc<MemberSignals>,
        monitor: Arc<MemberMonitor>,
        role: SemaphoreRole,
    ) -> LocalSemaphore {
        LocalSemaphore {
            shared_page,
            device: device.clone(),
            name: signals.name().to_string(),
            member,
            hint: AtomicU32::new(0),
            reactor: signals.reactor().clone(),
            signals,
            monitor,
            is_connecting: AtomicBool::new(false),
            connecting: Mutex::new(None),
            role: Some(role),
        }
    }

    #[cfg(test)]
    pub(super) fn signals(&self) -> &Arc<MemberSignals> {
        &self.signals
    }

    #[cfg(test)]
    pub(super) fn monitor(&self) -> &Arc<MemberMonitor> {
        &self.monitor
    }

    pub(super) fn check_open(&self) -> Result<()> {
        match &self.role {
            Some(SemaphoreRole::Member { session }) if self.monitor.is_over() => {
                Err(session.owner_gone())
            }
            _ => Ok(()),
        }
    }

    fn is_over(&self) -> bool {
        self.monitor.is_over()
    }

    /// The page is registered with this device's backend, and its addresses are invalid for another
    /// one. Its words may not go into a graph.
    pub(super) fn check_stream(&self, stream: &Stream) -> Result<()> {
        stream.check_usable(&self.device)
    }

    pub(super) fn no_permit(&self, wait: &Wait<'_>) -> Error {
        wait.timed_out(|| format!("a permit of {:?}", self.name))
    }

    /// Waits in a wait slot until a permit is granted, the timeout has passed, or the wait is
    /// cancelled.
    pub(super) fn wait_at(&self, slot: WaitSlot, wait: &Wait<'_>) -> Result<(u32, u64)> {
        // Behind other waiters the grant is far off, and a holder may need the CPU that would spin.
        let mut backoff = Backoff::spinning(if self.shared_page.is_first_in_line() {
            SPINS
        } else {
            0
        });
        // A permit may have become free while no waiter was visible.
        self.shared_page.match_waiters(self.member);
        loop {
            let left = match backoff.is_spinning() {
                true => wait.time_left(),
                false => {
                    let place = HeldPlace { local: self, slot };
                    let left = wait.slice();
                    std::mem::forget(place);
                    left
                }
            };
            let give_up = left.is_zero() || self.is_over();
            let progress = if give_up {
                self.shared_page.cancel_wait(slot, self.member)
            } else {
                self.shared_page.check_wait(slot, self.member)
            };
            match progress {
                WaitProgress::Granted { permit, passed } => return Ok((permit, passed)),
                WaitProgress::Lost => return Err(self.slot_lost()),
                WaitProgress::Waiting if give_up => {
                    self.check_open()?;
                    return Err(self.no_permit(wait));
                }
                WaitProgress::Waiting if backoff.step().is_zero() => std::hint::spin_loop(),
                WaitProgress::Waiting => {
                    self.shared_page
                        .sleep(slot, left.min(RECHECK_INTERVAL), || self.is_over());
                    self.shared_page.match_waiters(self.member);
                }
            }
        }
    }

    fn slot_lost(&self) -> Error {
        Error::Protocol {
            name: self.name.clone(),
            field: "waiter's place",
            found: "overwritten".into(),
            allowed: "its waiter's own until it leaves".into(),
        }
    }

    pub(super) fn has_room_for_work(&self, permit: u32) -> bool {
        self.shared_page
            .word(permit)
            .reached(self.shared_page.due(permit).wrapping_sub(IN_FLIGHT_MAX - 1))
    }

    pub(super) fn await_word(&self, permit: u32, value: u64, wait: &Wait<'_>) -> Result<()> {
        let word = self.shared_page.word(permit);
        loop {
            let slice = wait.slice();
            if word.reached(value) || self.device.backend().wait_word(word, value, slice)? {
                return Ok(());
            }
            if slice.is_zero() {
                let what = format!("the device work of the last holder of {:?}", self.name);
                let waited = wait.limit();
                return Err(Error::Timeout { what, waited });
            }
        }
    }

    /// Makes sure that this process's streams can wait for all members that are to signal this
    /// permit, and that it learns of their deaths. The first time with each member takes a few
    /// messages. A member that ends meanwhile owes nothing any more.
    pub(super) fn connect_signallers(&self, permit: u32, wait: &Wait<'_>) -> Result<()> {
        for (_, member) in self.shared_page.in_flight(permit) {
            let mut is_settled = self.is_connected_to(member);
            while !is_settled {
                // Free between two attempts, since other members may be connected to meanwhile.
                let _one = self
                    .signals
                    .connecting
                    .lock(wait, String::new)
                    .map_err(|_| self.no_answer(wait.limit()))?;
                is_settled = self.is_connected_to(member) || self.connect(member, wait)?;
                if !is_settled && wait.is_over() {
                    let what = format!("member {member} of {:?} to share its signals", self.name);
                    return Err(Error::Timeout {
                        what,
                        waited: wait.limit(),
                    });
                }
            }
        }
        Ok(())
    }

    /// Keeps this process from connecting to members.
    #[cfg(test)]
    pub(super) fn block_connecting(&self) -> crate::runtime::timed_lock::TimedGuard<'_> {
        self.signals
            .connecting
            .lock(REPLY_TIMEOUT, String::new)
            .unwrap()
    }

    /// Whether this process's streams can wait for all members that are to signal this permit.
    pub(super) fn is_connected_to_signallers(&self, permit: u32) -> bool {
        self.shared_page
            .word(permit)
            .reached(self.shared_page.due(permit))
            || self
                .shared_page
                .in_flight(permit)
                .all(|(_, member)| self.is_connected_to(member))
    }

    /// Starts to connect to them on a thread of its own, one at a time: they may be stopped.
    ///
    /// # Errors
    /// Why the last member could not be connected: reported once.
    pub(super) fn connect_in_background(self: &Arc<Self>, permit: u32) -> Result<()> {
        if let Some(error) = self
            .connecting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            return Err(error);
        }
        if self.is_connecting.swap(true, SeqCst) {
            return Ok(());
        }
        let connecting = BackgroundConnect(self.clone());
        let connect = move || {
            let local = &connecting.0;
            match local.connect_signallers(permit, &REPLY_TIMEOUT.into()) {
                Ok(()) | Err(Error::Timeout { .. }) => {}
                Err(error) => {
                    *local
                        .connecting
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner) = Some(error)
                }
            }
        };
        std::thread::Builder::new()
            .name("warpipe-connect".into())
            .spawn(connect)
            .map(drop)
            .map_err(|error| Error::Os {
                call: "clone",
                context: "a thread that gets to know members".into(),
                source: error,
            })
    }

    fn no_answer(&self, waited: Duration) -> Error {
        let what = format!(
            "another thread that gets to know a member of {:?}",
            self.name
        );
        Error::Timeout { what, waited }
    }

    fn is_connected_to(&self, member: u32) -> bool {
        self.monitor.watches(member) && self.signals.is_connected(member)
    }

    /// One attempt to connect to a member. True once it is connected to, or has ended; false if it
    /// has not answered in time, or the creator cannot tell it.
    fn connect(&self, member: u32, wait: &Wait<'_>) -> Result<bool> {
        let Some(PageOffer { page, process }) = self.offer(member, wait)? else {
            // A dead member's promises behind the work of living ones must be completed even if the
            // creator dies now.
            self.monitor.handle_death(member);
            return Ok(true);
        };
        // First: from here on the member's end ends this attempt.
        if let Some(process) = process {
            self.monitor.watch_member(member, process, &self.name)?;
        }
        let has_ended = || wait.is_over() || self.is_over() || self.monitor.has_ended(member);
        let draft = self.signals.map(page)?;
        let is_connected = if self.announce_mapped(member, wait)? {
            let limit = wait.time_left().min(REPLY_TIMEOUT);
            self.signals.connect(member, draft, limit, &has_ended)?
        } else {
            // It is about to be proven dead, or does not read its messages.
            wait_until(wait.time_left().min(RECHECK_INTERVAL), &has_ended);
            false
        };
        self.check_open()?;
        if self.monitor.has_ended(member) {
            // Also what this attempt has just added to it.
            self.monitor.remove_member(member);
            return Ok(true);
        }
        Ok(is_connected)
    }

    /// Has the creator tell a member of the page that this process has mapped. False if it could
    /// not.
    fn announce_mapped(&self, member: u32, wait: &Wait<'_>) -> Result<bool> {
        match &self.role {
            Some(SemaphoreRole::Creator {
                server,
                semaphore_server,
            }) => Ok(semaphore_server
                .forward(server.server_core(), CREATOR, member)
                .is_ok()),
            Some(SemaphoreRole::Member { session }) => {
                match session.request(&encode(&SemaphoreRequest::Mapped { member })?, wait) {
                    Ok(_) => Ok(true),
                    Err(Error::Refused { .. }) => Ok(false),
                    Err(error) => Err(error),
                }
            }
            None => Err(Error::Forked),
        }
    }

    /// Requests a page to share with a member from the creator. `None` if the member is gone.
    fn offer(&self, member: u32, wait: &Wait<'_>) -> Result<Option<PageOffer<PeerFd>>> {
        match &self.role {
            Some(SemaphoreRole::Creator {
                server,
                semaphore_server,
            }) => {
                let offer = semaphore_server.offer(server.server_core(), CREATOR, member)?;
                let process = |process: [CloseOnForkFd; 3]| process.map(PeerFd::from);
                Ok(offer.map(|offer| PageOffer {
                    page: offer.page.into(),
                    process: offer.process.map(process),
                }))
            }
            Some(SemaphoreRole::Member { session }) => {
                let request = encode(&SemaphoreRequest::Page { member })?;
                let incoming = session.request(&request, wait)?;
                let MemberPresence(is_here) = decode(&incoming.body, &self.name)?;
                let mut fds = incoming.fds.into_iter();
                let page = fds.next();
                let process = <[PeerFd; 3]>::try_from(fds.collect::<Vec<_>>()).ok();
                let is_whole = page.is_some() && (process.is_some() || member == CREATOR);
                if is_here && !is_whole {
                    return Err(Error::Protocol {
                        name: self.name.clone(),
                        field: "descriptors",
                        found: "too few".into(),
                        allowed: "a page, a pidfd and a lifeline".into(),
                    });
                }
                Ok(page
                    .filter(|_| is_here)
                    .map(|page| PageOffer { page, process }))
            }
            None => Err(Error::Forked),
        }
    }

    fn word_address(&self, permit: u32) -> Result<u64> {
        let missing = || Error::argument("device", "none", "the one it was opened on");
        self.shared_page.device_word(permit).ok_or_else(missing)
    }

    /// The waits of a stream that gets the permit.
    fn waits(&self, permit: u32) -> Vec<StreamOp> {
        self.signals.waits(
            permit,
            self.shared_page.in_flight(permit).map(|(_, member)| member),
        )
    }

    /// Makes the stream wait for the permit's earlier holders.
    pub(super) fn wait(&self, permit: u32, stream: &Stream) -> Result<()> {
        let waits = self.waits(permit);
        if waits.is_empty() {
            return Ok(());
        }
        self.signals.streams().record_use(stream);
        // SAFETY: the words lie in pages of this process and one other (or of this one alone),
        // which are dropped only when this stream, recorded above, is proven to be past them.
        unsafe { stream.batch(&waits) }
    }

    /// Promises a release of the permit behind the stream's work, and has the stream signal it,
    /// behind that of earlier holders unless it `is_behind` it already. On an error there is no
    /// promise, and the stream has no new work. The permit may be handed on only behind that
    /// stream's work.
    pub(super) fn release(&self, permit: u32, stream: &Stream, is_behind: bool) -> Result<()> {
        let mut before = if is_behind {
            Vec::new()
        } else {
            self.waits(permit)
        };
        let word = self.word_address(permit)?;
        let value = self.shared_page.promise(permit, self.member);
        // For the CPUs that read the permit: no stream waits for this word.
        before.push(StreamOp::Signal { word, value });
        let released = self.signals.release(permit, stream, &before);
        if released.is_err() {
            self.shared_page.take_back(permit);
        }
        released
    }

    /// Hands a permit on once `stream`, which gives no signal, has completed its work so far: the
    /// stream is being captured, or the driver refuses the signal.
    pub(super) fn hand_on_deferred(self: &Arc<Self>, permit: u32, stream: &Stream) {
        let local = self.clone();
        self.reactor.call_after(Fence::behind(stream), move || {
            local.shared_page.hand_on(permit, local.member);
        });
    }
}

impl Drop for LocalSemaphore {
    fn drop(&mut self) {
        let mut role = self.role.take();
        let (signals, monitor) = (self.signals.clone(), self.monitor.clone());
        let mut fence = Fence::later(signals.streams().clone());
        // A creator with streams that wait for members must still see them die; otherwise the name
        // is free at once.
        if matches!(role, Some(SemaphoreRole::Creator { .. }))
            && signals.streams().fence_busy().is_reached()
        {
            drop(role.take());
        }
        // Other processes wait for the name, and for the close.
        self.reactor.drop_after(move || {
            if !fence.is_reached() || !signals.catch_up() {
                return DropReadiness::Busy;
            }
            // The close comes only now: a member that has closed owes no signal.
            drop(role.take());
            // The reactor's thread may be in it for a moment.
            if Arc::strong_count(&monitor) == 1 {
                DropReadiness::Ready
            } else {
                DropReadiness::Held
            }
        });
    }
}
