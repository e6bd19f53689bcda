//! The library's threads, one of each in a process. ARCHITECTURE.md, "Four threads", says which
//! driver calls each may make.
//!
//! The *reactor* reads the sockets of subscriptions and of clients' sessions, detects deaths,
//! rescues streams and keeps heartbeats. It makes no driver call that may block and takes no lock
//! held across one: such a call may wait for the very stream that the reactor must rescue. It
//! sleeps in `epoll_wait` and ticks every [`TICK`] while links exist. The *control thread* accepts
//! connections, makes links and maps regions; it gives streams no work. The *fence thread* polls
//! whether released memory is still in use, and the *reaper* returns that memory to the driver;
//! both may be held up.

mod deferred;

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

pub(crate) use self::deferred::{Deferred, DropReadiness, IntoDeferred};
use self::deferred::{DropCounts, FenceThread, FencedDrop, hand, reap};
use crate::backend::unreclaimed;
use crate::clock::now_ns;
use crate::error::Result;
use crate::fork::per_process::PerProcess;
use crate::fork::thread::Thread;
use crate::mutex::LockUnpoisoned;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::epoll::{EpollSet, EventFlags};
use crate::runtime::{closer, reserve};

/// How often heartbeats are written and checked.
pub(crate) const TICK: Duration = Duration::from_millis(200);

/// How often a drop that waits for a device is polled.
const FENCE_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A drop that has waited for longer than this is polled at each [`TICK`] only. If it waits for a
/// device, that device is presumed hung, and the drop is counted ([`Reactor::counts`]). It is never
/// given up, since only a proof shows that the memory is no longer touched.
const OVERDUE_AFTER: Duration = Duration::from_secs(60);

/// A heartbeat older than this is reported as *stalled*.
pub(crate) const STALLED_AFTER: Duration = Duration::from_millis(900);

/// Whether to go on watching a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Keep,
    Stop,
}

/// A target of the reactor's events. Called on the reactor's thread, and must not block there (see
/// [`EventSource::runs_on_control_thread`]).
pub(crate) trait EventSource: IntoDeferred + Sync {
    /// The descriptor that was registered with `tag` is readable or closed.
    fn on_ready(&self, _tag: u64) -> Next {
        Next::Stop
    }

    /// [`TICK`] has passed.
    fn on_tick(&self, _now_ns: u64) {}

    /// Whether the control thread makes these calls instead of the reactor: for a target that takes
    /// locks that are held across driver calls.
    fn runs_on_control_thread(&self) -> bool {
        false
    }
}

struct RegistrationEntry {
    target: Weak<dyn EventSource>,
    tag: u64,
    /// `None` if only [`Reactor::trigger`] causes events.
    fd: Option<RawFd>,
}

#[derive(Default)]
struct ReactorState {
    registrations: HashMap<u64, RegistrationEntry>,
    ticked: Vec<Weak<dyn EventSource>>,
    /// Triggered, and not dispatched yet.
    triggered: Vec<u64>,
}

/// A task of the control thread, which runs them in order. The number of waiting tasks is bounded
/// by the number of their sources, each with one task at a time: a watched descriptor ([`ONCE`]), a
/// link's regions, a connection, the poll of deferred drops. A limit on top of those would refuse
/// the next source for this process's own delay.
pub(crate) type ControlTask = Box<dyn FnOnce() + Send>;

/// The reactor of this process.
pub(crate) struct Reactor {
    epoll: EpollSet,
    doorbell: LocalDoorbell,
    state: Mutex<ReactorState>,
    tasks: Sender<ControlTask>,
    /// To the fence thread.
    fenced_drops: Sender<FencedDrop>,
    counts: Arc<DropCounts>,
    /// To the reaper.
    deferred: Sender<Deferred>,
    next_id: AtomicU64,
}

impl std::fmt::Debug for Reactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reactor")
    }
}

/// What a target is registered for.
pub(crate) enum Watch<'a> {
    Readable(BorrowedFd<'a>),
    /// The descriptor's hang-up alone (`EPOLLHUP`), whatever there is to be read.
    Hangup(BorrowedFd<'a>),
    /// No descriptor: [`Reactor::trigger`].
    Trigger,
}

fn runs_on_control_thread(target: &Weak<dyn EventSource>) -> bool {
    let target = target.upgrade();
    target.is_some_and(|target| target.runs_on_control_thread())
}

/// A watched descriptor. Dropping the registration ends the watch. Drop it before the descriptor.
pub(crate) struct Registration {
    reactor: Arc<Reactor>,
    id: u64,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registration({})", self.id)
    }
}

/// The events of a control-thread registration: one event, and then none until it has been handled.
/// Without `EPOLLONESHOT`, epoll would report a closed peer (`EPOLLHUP`) again and again, even with
/// an empty interest mask.
const ONCE: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);

/// The reactor of this process.
static CURRENT: PerProcess<Mutex<Option<Arc<Reactor>>>> = PerProcess::new();

/// The doorbell's key in the epoll set.
const DOORBELL: u64 = 0;

impl Reactor {
    /// The reactor of this process, started on first use; a forked child starts its own.
    pub(crate) fn of_process() -> Result<Arc<Reactor>> {
        let mut current = CURRENT.lock();
        if let Some(reactor) = &*current {
            return Ok(reactor.clone());
        }
        let reactor = reserve::fill()
            .and_then(|()| Reactor::start(OVERDUE_AFTER))
            .inspect_err(|_| reserve::give_up())?;
        let me = Arc::downgrade(&reactor);
        unreclaimed::on_retry_due(move || {
            // Wakes the reaper.
            let reactor = me.upgrade().into_iter();
            reactor.for_each(|reactor| reactor.defer_drop(Box::new(())));
        });
        Ok(current.insert(reactor).clone())
    }

    /// The reactor of this process, if it has been started.
    pub(crate) fn running() -> Option<Arc<Reactor>> {
        CURRENT.lock().clone()
    }

    fn start(overdue_after: Duration) -> Result<Arc<Reactor>> {
        let (tasks, queue) = mpsc::channel::<ControlTask>();
        let (fenced_drops, new) = mpsc::channel::<FencedDrop>();
        let (deferred, drop_queue) = mpsc::channel::<Deferred>();
        let reactor = Arc::new(Reactor {
            epoll: EpollSet::new("the reactor")?,
            doorbell: LocalDoorbell::new()?,
            state: Mutex::default(),
            tasks,
            fenced_drops,
            counts: Arc::default(),
            deferred,
            next_id: AtomicU64::new(DOORBELL + 1),
        });
        reactor
            .epoll
            .add(&reactor.doorbell, DOORBELL, EventFlags::IN)?;
        let runner = reactor.clone();
        Thread::start("warpipe-control", move || {
            for task in queue {
                let _panicked = catch_panic(task);
            }
        })?;
        let fences = FenceThread {
            new,
            waiting: Vec::new(),
            overdue_after,
            counts: reactor.counts.clone(),
            reaper: reactor.deferred.clone(),
        };
        Thread::start("warpipe-fences", move || fences.run())?;
        Thread::start("warpipe-reaper", move || reap(drop_queue))?;
        Thread::start("warpipe-reactor", move || runner.run())?;
        Ok(reactor)
    }

    /// Queues a task for the control thread. For callers that queue one at a time, or limit their
    /// number (see [`ControlTask`]).
    pub(crate) fn run_on_control_thread(&self, task: ControlTask) {
        hand(&self.tasks, task);
    }

    /// Calls `target` with `tag` at each event of `watch`, until the result is dropped or
    /// `on_ready` returns [`Next::Stop`].
    pub(crate) fn register(
        self: &Arc<Self>,
        watch: Watch<'_>,
        target: &Weak<dyn EventSource>,
        tag: u64,
    ) -> Result<Registration> {
        let (fd, events) = match watch {
            Watch::Readable(fd) if runs_on_control_thread(target) => (Some(fd), ONCE),
            Watch::Readable(fd) => (Some(fd), EventFlags::IN),
            Watch::Hangup(fd) => (Some(fd), EventFlags::empty()),
            Watch::Trigger => (None, EventFlags::empty()),
        };
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let entry = RegistrationEntry {
            target: target.clone(),
            tag,
            fd: fd.map(|fd| fd.as_raw_fd()),
        };
        // Under the lock of the registrations: no event finds none.
        let mut state = self.state.locked();
        if let Some(fd) = fd {
            self.epoll.add(fd, id, events)?;
        }
        state.registrations.insert(id, entry);
        let reactor = self.clone();
        Ok(Registration { reactor, id })
    }

    /// Calls the registration's target on the reactor's own thread soon, without waiting.
    pub(crate) fn trigger(&self, id: u64) {
        self.state.locked().triggered.push(id);
        self.doorbell.ring();
    }

    /// Whether the registration still exists.
    pub(crate) fn has(&self, id: u64) -> bool {
        self.state.locked().registrations.contains_key(&id)
    }

    /// Ticks `target` as long as it lives.
    pub(crate) fn register_ticks(&self, target: Weak<dyn EventSource>) {
        self.state.locked().ticked.push(target);
        self.doorbell.ring();
    }

    fn run(self: &Arc<Self>) {
        let mut last_tick = Instant::now();
        loop {
            let limit = match self.ticks() {
                true => TICK.saturating_sub(last_tick.elapsed()),
                false => Duration::MAX,
            };
            for id in self.epoll.wait(limit) {
                self.dispatch(id);
            }
            let triggered = std::mem::take(&mut self.state.locked().triggered);
            triggered.into_iter().for_each(|id| self.dispatch(id));
            if last_tick.elapsed() >= TICK {
                last_tick = Instant::now();
                self.tick_all();
            }
        }
    }

    /// Whether anything is due with the next tick.
    fn ticks(&self) -> bool {
        !self.state.locked().ticked.is_empty() || closer::is_retry_due()
    }

    fn dispatch(self: &Arc<Self>, id: u64) {
        if id == DOORBELL {
            return self.doorbell.drain();
        }
        let found = self
            .state
            .locked()
            .registrations
            .get(&id)
            .map(|entry| (entry.target.upgrade(), entry.tag));
        match found {
            Some((Some(target), tag)) if target.runs_on_control_thread() => {
                self.dispatch_on_control_thread(id, target, tag)
            }
            Some((Some(target), tag)) => self.call(id, target, tag),
            Some((None, _)) => self.deregister(id),
            None => {}
        }
    }

    fn call(&self, id: u64, target: Arc<dyn EventSource>, tag: u64) {
        match catch_panic(|| target.on_ready(tag)).unwrap_or(Next::Stop) {
            Next::Keep => {}
            Next::Stop => self.deregister(id),
        }
        self.drop_on_reaper(target);
    }

    /// Queues an event for the control thread. Until it has been handled, epoll does not report its
    /// descriptor ([`ONCE`]).
    fn dispatch_on_control_thread(
        self: &Arc<Self>,
        id: u64,
        target: Arc<dyn EventSource>,
        tag: u64,
    ) {
        let me = self.clone();
        let call = move || {
            me.call(id, target, tag);
            me.rearm(id);
        };
        self.run_on_control_thread(Box::new(call));
    }

    /// Re-arms a descriptor after its [`ONCE`] event; does nothing if the registration has ended.
    fn rearm(&self, id: u64) {
        let state = self.state.locked();
        if let Some(fd) = state.registrations.get(&id).and_then(|entry| entry.fd) {
            self.epoll.rearm(watched(fd), id, ONCE);
        }
    }

    fn deregister(&self, id: u64) {
        let mut state = self.state.locked();
        if let Some(fd) = state.registrations.remove(&id).and_then(|entry| entry.fd) {
            // A descriptor must be open here: if it was closed before, another one may have its
            // number, and that one would be watched no longer. Tests count such ends.
            let _is_removed = self.epoll.remove(watched(fd));
            #[cfg(test)]
            if !_is_removed {
                CLOSED_BEFORE.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn tick_all(self: &Arc<Self>) {
        let targets = {
            let mut state = self.state.locked();
            state.ticked.retain(|target| target.strong_count() > 0);
            state.ticked.clone()
        };
        // Without room, the next tick tries again.
        let _ = reserve::fill();
        closer::retry();
        let now = now_ns();
        for target in targets.iter().filter_map(Weak::upgrade) {
            let _panicked = catch_panic(|| target.on_tick(now));
            self.drop_on_reaper(target);
        }
    }
}

impl Registration {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }
}

/// Registrations that ended after their descriptor was closed.
#[cfg(test)]
pub(crate) static CLOSED_BEFORE: AtomicU64 = AtomicU64::new(0);

impl Drop for Registration {
    fn drop(&mut self) {
        self.reactor.deregister(self.id);
    }
}

/// Runs code that is not the reactor's own (a policy is the user's code): its panic must not end
/// the one thread that detects deaths. The panic hook has reported it.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).ok()
}

/// The descriptor of a [`RegistrationEntry`], for a caller that holds the lock of the
/// [`ReactorState`] that contains it.
fn watched<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: the descriptor is open: `Registration` is dropped before it, and the lock keeps that
    // drop out.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Random bytes for an endpoint's generation: `getrandom(2)`, or where a sandbox refuses that,
/// `/dev/urandom`.
pub fn new_generation() -> [u8; 16] {
    let mut bytes = [0u8; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        let made = rustix::rand::getrandom(&mut *rest, rustix::rand::GetRandomFlags::empty());
        let made = made.or_else(|_| File::open("/dev/urandom")?.read(rest));
        filled += made.unwrap_or(0);
    }
    bytes
}

#[cfg(test)]
mod tests;
