//! The state that one process's handles and permits of a semaphore share. **This module is marked
//! for unsafe**: it passes words for streams to the device.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::SPINS;
use super::member_monitor::MemberMonitor;
use super::page::{CREATOR, IN_FLIGHT_MAX, SemaphorePage, WaitProgress, WaitSlot};
use super::server::{Introduction, MemberPresence, SemaphoreRequest, SemaphoreServer};
use super::signals::{MemberSignals, Waits, wait_until};
use crate::backend::StreamOp;
use crate::backoff::Backoff;
use crate::device::Device;
use crate::error::{Error, Result, StateFault};
use crate::fork::CloseOnForkFd;
use crate::fork::thread::Thread;
use crate::ipc::{ClientSession, IpcServer, REPLY_TIMEOUT, decode, encode};
use crate::mutex::LockUnpoisoned;
use crate::runtime::closer::PeerFd;
use crate::runtime::fence::Fence;
use crate::runtime::reactor::DropReadiness;
use crate::shm::page::UnsealedPage;
use crate::stream::Stream;
use crate::wait::Wait;

/// The pause before the creator is asked again to tell a member that did not read its messages, and
/// between the looks whether a member that does not answer still owes a signal.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// How long a member that owes no signal any more is waited for: it may be stopped.
const SETTLED_TIMEOUT: Duration = Duration::from_millis(500);

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
    pub(super) member: u32,
    /// The permit released last: most likely free, and in this CPU's cache.
    pub(super) hint: AtomicU32,
    pub(super) signals: Arc<MemberSignals>,
    pub(super) monitor: Arc<MemberMonitor>,
    connecting: Mutex<Connecting>,
    /// Notified at the end of each attempt.
    connected: Condvar,
    /// `None` only while dropping.
    pub(super) role: Option<SemaphoreRole>,
}

/// The attempts to connect to members.
#[derive(Debug, Default)]
struct Connecting {
    /// The members that a thread is at, which is an owner of the semaphore.
    members: BTreeSet<u32>,
    /// Why the last failed attempt failed, until a caller is told.
    error: Option<Error>,
}

/// The one thread that connects to a member. Its attempt is over when this is dropped, also by a
/// panic.
pub(super) struct ConnectingThread(Arc<LocalSemaphore>, u32);

impl Drop for ConnectingThread {
    fn drop(&mut self) {
        self.0.connecting.locked().members.remove(&self.1);
        self.0.connected.notify_all();
    }
}

/// Keeps the wait slot while the user's code runs. Dropped when that code panics: the wait is
/// cancelled, and a permit that was granted meanwhile is handed on.
struct HeldSlot<'a> {
    local: &'a LocalSemaphore,
    slot: WaitSlot,
}

impl Drop for HeldSlot<'_> {
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
        device: &Device,
        monitor: Arc<MemberMonitor>,
        role: SemaphoreRole,
    ) -> LocalSemaphore {
        LocalSemaphore {
            shared_page: monitor.shared_page.clone(),
            device: device.clone(),
            member: monitor.signals.member,
            hint: AtomicU32::new(0),
            signals: monitor.signals.clone(),
            monitor,
            connecting: Mutex::default(),
            connected: Condvar::new(),
            role: Some(role),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.signals.name
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
        wait.timed_out(|| format!("a permit of {:?}", self.name()))
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
            let is_spinning = backoff.step().is_zero();
            let left = match is_spinning {
                true => wait.time_left(),
                false => {
                    let held = HeldSlot { local: self, slot };
                    let left = wait.slice();
                    std::mem::forget(held);
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
                WaitProgress::Lost => {
                    let (field, allowed) = ("waiter's place", "its waiter's own until it leaves");
                    return Err(Error::protocol(self.name(), field, "overwritten", allowed));
                }
                WaitProgress::Waiting if give_up => {
                    self.check_open()?;
                    return Err(self.no_permit(wait));
                }
                WaitProgress::Waiting if is_spinning => std::hint::spin_loop(),
                WaitProgress::Waiting => {
                    self.shared_page.sleep(slot, left, || self.is_over());
                }
            }
        }
    }

    pub(super) fn has_room_for_work(&self, permit: u32) -> bool {
        self.shared_page
            .word(permit)
            .reached(self.shared_page.due(permit).wrapping_sub(IN_FLIGHT_MAX - 1))
    }

    pub(super) fn await_word(&self, permit: u32, value: u64, wait: &Wait<'_>) -> Result<()> {
        let word = self.shared_page.word(permit);
        let what = || format!("the device work of the last holder of {:?}", self.name());
        let sleep = |slice| _ = word.wait(value, slice, self.device.is_gpu());
        wait.until(what, || Ok(word.reached(value)), sleep)
    }

    /// Makes sure that this process's streams can wait for all members that are to signal this
    /// permit, and that it learns of their deaths. The first time with each member takes a few
    /// messages. A member that ends meanwhile owes nothing any more.
    pub(super) fn connect_signallers(self: &Arc<Self>, permit: u32, wait: &Wait<'_>) -> Result<()> {
        if self.unconnected_signallers(permit).is_empty() {
            return Ok(());
        }
        // An earlier attempt's: it may succeed now.
        self.connecting.locked().error = None;
        let what = || format!("a member of {:?} to share its signals", self.name());
        let is_connected = || {
            let unconnected = self.unconnected_signallers(permit);
            let is_connected = unconnected.is_empty();
            if !is_connected {
                self.start_connecting(unconnected)?;
            }
            Ok(is_connected)
        };
        wait.until(what, is_connected, |slice| {
            let awaited = self.unconnected_signallers(permit);
            let is_running = |connecting: &mut Connecting| {
                let mut all = awaited.iter();
                !awaited.is_empty() && all.all(|it| connecting.members.contains(it))
            };
            let (connecting, slice) = (self.connecting.locked(), slice.min(RETRY_INTERVAL));
            drop((self.connected).wait_timeout_while(connecting, slice, is_running));
        })
    }

    /// Keeps this process from connecting to a member.
    #[cfg(test)]
    pub(super) fn block_connecting(self: &Arc<Self>, member: u32) -> ConnectingThread {
        self.connecting.locked().members.insert(member);
        ConnectingThread(self.clone(), member)
    }

    /// The members that are to signal this permit, and that this process's streams cannot wait for
    /// yet.
    pub(super) fn unconnected_signallers(&self, permit: u32) -> Vec<u32> {
        let signallers = self.shared_page.in_flight(permit);
        let signallers = signallers.map(|(_, member)| member);
        signallers.filter(|&it| !self.is_connected_to(it)).collect()
    }

    /// Starts to connect to members, each on a thread of its own: one may be stopped. One that owes
    /// no signal any more is connected to, too: else each hand-over would start a thread.
    ///
    /// # Errors
    /// Why the last member could not be connected: reported once.
    pub(super) fn start_connecting(self: &Arc<Self>, members: Vec<u32>) -> Result<()> {
        for member in members {
            // An owner first: no thread finds more threads than owners.
            let local = self.clone();
            let mut connecting = self.connecting.locked();
            if let Some(error) = connecting.error.take() {
                return Err(error);
            }
            if !connecting.members.insert(member) {
                continue;
            }
            drop(connecting);
            let thread = ConnectingThread(local, member);
            let connect = move || {
                if let Err(error) = thread.0.connect_in_time(member) {
                    thread.0.connecting.locked().error = Some(error);
                }
            };
            Thread::start("warpipe-connect", connect).map(drop)?;
        }
        Ok(())
    }

    /// Connects to a member; gives up one that does not answer, and each once such threads are the
    /// only owners.
    fn connect_in_time(self: &Arc<Self>, member: u32) -> Result<()> {
        let start = Instant::now();
        let is_late = || {
            let elapsed = start.elapsed();
            elapsed >= REPLY_TIMEOUT
                || elapsed >= SETTLED_TIMEOUT && !self.shared_page.owes_signal(member)
                || self.connecting.locked().members.len() >= Arc::strong_count(self)
        };
        let mut is_settled = self.is_connected_to(member);
        while !is_settled && !is_late() {
            is_settled = match self.connect(member, &is_late) {
                Err(Error::Timeout { .. }) => false,
                settled => settled?,
            };
        }
        Ok(())
    }

    /// Whether this process's streams can wait for the member's and it learns of the member's
    /// death, or the member has ended.
    pub(super) fn is_connected_to(&self, member: u32) -> bool {
        self.monitor.watches(member) && self.signals.is_connected(member)
            || self.monitor.is_dead(member)
    }

    /// One attempt to connect to a member. True once it is connected to, or has ended; false if it
    /// has not answered in time, or the creator cannot tell it.
    fn connect(&self, member: u32, is_late: &dyn Fn() -> bool) -> Result<bool> {
        let draft = self.signals.draft()?;
        // First: from here on the member's end ends this attempt.
        self.monitor.expect_member(member);
        let Some(Introduction { is_told, process }) = self.introduce(member, &draft)? else {
            // A dead member's promises behind the work of living ones must be completed even if the
            // creator dies now.
            self.monitor.remove_member(member);
            return Ok(true);
        };
        if let Some(process) = process {
            self.monitor.watch_member(member, process, self.name())?;
        }
        let is_over = || self.is_over() || self.monitor.has_ended(member) || is_late();
        let is_connected = if is_told {
            (self.signals).connect(member, draft, REPLY_TIMEOUT, &is_over)?
        } else {
            wait_until(RETRY_INTERVAL, &is_over);
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

    /// Has the creator give a member a page to share with this process. `None` if the member is
    /// gone.
    fn introduce(&self, member: u32, page: &UnsealedPage) -> Result<Option<Introduction>> {
        match &self.role {
            Some(SemaphoreRole::Creator {
                server,
                semaphore_server,
            }) => {
                let page = CloseOnForkFd::duplicate(page)
                    .map_err(|e| Error::os("fcntl(F_DUPFD)", "a page of two members", e))?;
                semaphore_server.introduce(server.server_core(), CREATOR, member, page.into())
            }
            Some(SemaphoreRole::Member { session }) => {
                let request = encode(&SemaphoreRequest { member })?;
                let incoming = session.request_with(&request, Some(page.as_fd()), REPLY_TIMEOUT)?;
                let MemberPresence { is_here, is_told } = decode(&incoming.body, self.name())?;
                let process = <[PeerFd; 3]>::try_from(incoming.fds).ok();
                if is_here && process.is_none() && member != CREATOR {
                    let (name, allowed) = (self.name(), "a pidfd and a lifeline");
                    return Err(Error::protocol(name, "descriptors", "too few", allowed));
                }
                Ok(is_here.then_some(Introduction { is_told, process }))
            }
            None => Err(Error::State(StateFault::Forked)),
        }
    }

    /// The waits of a stream that gets the permit.
    pub(super) fn waits(&self, permit: u32) -> Waits {
        self.signals.waits(
            permit,
            self.shared_page.in_flight(permit).map(|(_, member)| member),
        )
    }

    /// Makes the stream wait for the permit's earlier holders.
    pub(super) fn wait(&self, permit: u32, stream: &Stream) -> Result<()> {
        let waits = self.waits(permit);
        if waits.ops.is_empty() {
            return Ok(());
        }
        self.signals.streams.record_use(stream);
        // SAFETY: the words lie in pages of this process and one other (or of this one alone),
        // which `waits` keeps, and which are then dropped only when this stream, recorded above, is
        // proven to be past them.
        unsafe { stream.batch(&waits.ops) }
    }

    /// Promises a release of the permit behind the stream's work, and has the stream signal it,
    /// behind that of earlier holders unless it `is_behind` it already. On an error there is no
    /// promise, and the stream has no new work. The permit may be handed on only behind that
    /// stream's work.
    pub(super) fn release(&self, permit: u32, stream: &Stream, is_behind: bool) -> Result<()> {
        let mut before = if is_behind {
            Waits::default()
        } else {
            self.waits(permit)
        };
        let word = self.shared_page.device_word(permit);
        let word =
            word.ok_or_else(|| Error::argument("device", "none", "the one it was opened on"))?;
        let value = self.shared_page.promise(permit, self.member);
        // For the CPUs that read the permit: no stream waits for this word.
        before.ops.push(StreamOp::Signal { word, value });
        let released = self.signals.release(permit, stream, &before.ops);
        if released.is_err() {
            self.shared_page.take_back(permit);
        }
        released
    }

    /// Hands a permit on once `stream`, which gives no signal, has completed its work so far: the
    /// stream is being captured, or the driver refuses the signal.
    pub(super) fn hand_on_deferred(self: &Arc<Self>, permit: u32, stream: &Stream) {
        let local = self.clone();
        self.signals
            .reactor
            .call_after(Fence::behind(stream), move || {
                local.shared_page.hand_on(permit, local.member);
            });
    }
}

impl Drop for LocalSemaphore {
    fn drop(&mut self) {
        let mut role = self.role.take();
        let (signals, monitor) = (self.signals.clone(), self.monitor.clone());
        let mut fence = Fence::later(signals.streams.clone());
        // A creator with streams that wait for members must still see them die; otherwise the name
        // is free at once.
        if matches!(role, Some(SemaphoreRole::Creator { .. }))
            && signals.streams.fence_busy().is_reached()
        {
            drop(role.take());
        }
        // Other processes wait for the name, and for the close.
        self.signals.reactor.drop_after(move || {
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
