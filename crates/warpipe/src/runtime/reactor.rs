//! The library's threads, one of each in a process.
//!
//! * The *reactor* reads the sockets of subscriptions, sees deaths, rescues streams and keeps heartbeats. It calls
//!   nothing of the driver that may block and takes no lock that is held across such a call: `cuMemHostUnregister` and
//!   the first load of a module block behind any stream of the context that waits, a full launch queue behind its
//!   own, and it is the reactor that lets such a stream go when its peer has died.
//! * The *control thread* does what a publisher needs: it accepts connections, makes links, sees subscribers die. It also
//!   maps regions. It gives no stream work and asks none that a full launch queue could hold up.
//! * The *fence thread* asks whether memory that was let go is still in use. A full launch queue may hold it up: no link waits
//!   for it.
//! * The *reaper* gives that memory back to the driver, and may be held up by it.
//!
//! The reactor sleeps in `epoll_wait` until a descriptor speaks; while links exist it also ticks every [`TICK`],
//! which is what a heartbeat costs. The others sleep until there is something to do.

mod pause;

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use crate::backend::unreclaimed;
use crate::clock::now_ns;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::fork::per_process::PerProcess;
use crate::ipc::message::timespec;
use crate::runtime::doorbell::LocalDoorbell;

/// How often heartbeats are written and looked at.
pub(crate) const TICK: Duration = Duration::from_millis(200);

/// How often memory that waits for a device is looked at again.
const FENCE_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// What waits for longer than this is looked at with every [`TICK`] only. If it waits for a device, that device is
/// taken for hung, and it is counted ([`Reactor::counts`]); it is never given up, since nothing but a proof says that
/// nobody touches it any more.
const OVERDUE_AFTER: Duration = Duration::from_secs(60);

/// A heartbeat older than this means *stalled*, to people.
pub(crate) const STALLED_AFTER: Duration = Duration::from_millis(900);

/// Whether to go on watching a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Keep,
    Stop,
    /// Not now: this process has no room for what there is to be read, which stays where it is. `on_ready` is called again
    /// after the next [`TICK`].
    RetryAtTick,
}

/// What the reactor watches. Called on its thread, and must not block there (see [`EventSource::runs_on_control_thread`]).
pub(crate) trait EventSource: Send + Sync {
    /// The descriptor that was registered with `tag` is readable or closed.
    fn on_ready(&self, tag: u64) -> Next;

    /// [`TICK`] has passed.
    fn on_tick(&self, _now_ns: u64) {}

    /// Whether the control thread is to call these, and not the reactor: for who takes locks that are held across calls
    /// of the driver.
    fn runs_on_control_thread(&self) -> bool {
        false
    }
}

struct RegistrationEntry {
    target: Weak<dyn EventSource>,
    tag: u64,
    /// `None` for what [`Reactor::trigger`] alone tells of.
    fd: Option<RawFd>,
    events: epoll::EventFlags,
}

#[derive(Default)]
struct ReactorState {
    registrations: HashMap<u64, RegistrationEntry>,
    ticked: Vec<Weak<dyn EventSource>>,
    /// Triggered, and not dispatched yet.
    triggered: Vec<u64>,
    /// Those that answered [`Next::RetryAtTick`]: not listened to before the next tick.
    paused: Vec<u64>,
    fenced_drops: Vec<FencedDrop>,
    /// Those that have waited for long: looked at with every tick.
    slow: Vec<FencedDrop>,
}

/// What a look at something that is to be dropped found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DropReadiness {
    /// It is waited for that others give it up, here or in another process: that may take as long as they like.
    Held,
    /// Nobody else holds it. Work that was enqueued on it is not done.
    Busy,
    /// It may be dropped.
    Ready,
}

impl From<bool> for DropReadiness {
    /// Of what nobody else holds: whether its work is done.
    fn from(is_quiet: bool) -> DropReadiness {
        if is_quiet {
            DropReadiness::Ready
        } else {
            DropReadiness::Busy
        }
    }
}

struct FencedDrop {
    look: Box<dyn FnMut() -> DropReadiness + Send>,
    /// What the last look found, and since when that is so.
    readiness: DropReadiness,
    since: Instant,
    /// It is looked at with every tick only.
    is_unhurried: bool,
    /// It is counted as such.
    is_overdue: bool,
}

impl FencedDrop {
    fn look(&mut self, now: Instant) -> DropReadiness {
        // A closure that panicked may not be called again, and what it owns may be in use: it is kept.
        let readiness = catch_panic(|| (self.look)()).unwrap_or(DropReadiness::Held);
        if readiness != self.readiness {
            (self.readiness, self.since) = (readiness, now);
        }
        readiness
    }

    fn is_slow(&self, now: Instant, after: Duration) -> bool {
        now.saturating_duration_since(self.since) > after
    }
}

impl DropCounts {
    fn set_overdue(&self, is_counted: &mut bool, is_overdue: bool) {
        match (std::mem::replace(is_counted, is_overdue), is_overdue) {
            (false, true) => self.overdue.fetch_add(1, Ordering::Relaxed),
            (true, false) => self.overdue.fetch_sub(1, Ordering::Relaxed),
            _ => return,
        };
    }
}

/// What the control thread does, in order. As many can wait as there are that may ask for one, each for one at a time: a
/// watched descriptor ([`ONCE`]), a link's regions, a connection, the look at what is to be dropped. A count on top of
/// those would refuse whoever comes next for what this process is late with.
pub(crate) type ControlTask = Box<dyn FnOnce() + Send>;

/// What waits to be dropped. Counted beside the state, out of which the fence thread takes what it looks at.
#[derive(Debug, Default)]
struct DropCounts {
    waiting: AtomicUsize,
    overdue: AtomicUsize,
}

/// What the reaper drops: once each, what somebody had. So as many can wait for it as there may be of them, and each
/// has a descriptor, mapped memory or a place in its maker's limits until it is dropped; a count would be one more limit
/// that says nothing new. And there would be nothing to do at it: the caller must not drop (it may be the reactor), must
/// not wait for the reaper, which a driver may hold up, and has nobody left to tell.
pub(crate) type Deferred = Box<dyn Send>;

/// The reactor of this process.
pub(crate) struct Reactor {
    epoll: CloseOnForkFd,
    doorbell: LocalDoorbell,
    state: Mutex<ReactorState>,
    tasks: Sender<ControlTask>,
    /// Sent for each round of looks at fenced drops.
    fence_polls_tx: Sender<()>,
    /// The fence thread has been asked for a round, and has not begun.
    is_fence_poll_requested: AtomicBool,
    /// The reaper has been asked to ask again for what a device did not take back, and is not done.
    is_reclaim_requested: AtomicBool,
    overdue_after: Duration,
    counts: DropCounts,
    deferred: Sender<Deferred>,
    next_id: AtomicU64,
}

impl std::fmt::Debug for Reactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reactor")
    }
}

/// A descriptor being watched; dropping it ends that. Drop it before the descriptor.
pub(crate) struct Registration {
    reactor: Arc<Reactor>,
    id: u64,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registration({})", self.id)
    }
}

/// What is listened for on behalf of the control thread: one event, and then silence until it has been dealt with. Nothing less
/// will do: a socket whose peer has closed is told of again and again even to who listens for nothing at all.
const ONCE: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);

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
        let reactor = Reactor::start(OVERDUE_AFTER)?;
        let waker = Arc::downgrade(&reactor);
        unreclaimed::on_retry_due(move || {
            waker
                .upgrade()
                .into_iter()
                .for_each(|reactor| reactor.doorbell.ring())
        });
        Ok(current.insert(reactor).clone())
    }

    /// The reactor of this process, if it has been started.
    pub(crate) fn running() -> Option<Arc<Reactor>> {
        CURRENT.lock().clone()
    }

    /// How much waits to be dropped, and how much of that for a device that has not done its work within
    /// [`OVERDUE_AFTER`].
    pub(crate) fn counts(&self) -> (usize, usize) {
        (
            self.counts.waiting.load(Ordering::Relaxed),
            self.counts.overdue.load(Ordering::Relaxed),
        )
    }

    fn start(overdue_after: Duration) -> Result<Arc<Reactor>> {
        let epoll = CloseOnForkFd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC))
            .map_err(|e| Error::os("epoll_create1", "the reactor", e))?;
        let (tasks, queue) = mpsc::channel::<ControlTask>();
        let (fence_polls_tx, fence_polls) = mpsc::channel::<()>();
        let (deferred, drop_queue) = mpsc::channel::<Deferred>();
        let reactor = Arc::new(Reactor {
            epoll,
            doorbell: LocalDoorbell::new()?,
            state: Mutex::default(),
            tasks,
            fence_polls_tx,
            is_fence_poll_requested: AtomicBool::new(false),
            is_reclaim_requested: AtomicBool::new(false),
            overdue_after,
            counts: DropCounts::default(),
            deferred,
            next_id: AtomicU64::new(DOORBELL + 1),
        });
        reactor.add(reactor.doorbell.as_fd(), DOORBELL, epoll::EventFlags::IN)?;
        let runner = reactor.clone();
        start_thread("warpipe-control", move || {
            for task in queue {
                let _panicked = catch_panic(task);
            }
        })?;
        // Of a reactor that comes to nothing the threads end with it.
        let this = Arc::downgrade(&reactor);
        start_thread("warpipe-fences", move || {
            for () in fence_polls {
                let Some(this) = this.upgrade() else { return };
                this.is_fence_poll_requested.store(false, Ordering::Release);
                let _panicked = catch_panic(|| this.poll_fences());
            }
        })?;
        start_thread("warpipe-reaper", move || {
            for deferred in drop_queue {
                let _panicked = catch_panic(|| drop(deferred));
            }
        })?;
        start_thread("warpipe-reactor", move || runner.run())?;
        Ok(reactor)
    }

    /// Leaves a task to the control thread. For who asks for one at a time, or counts those that wait (see [`ControlTask`]).
    pub(crate) fn run_on_control_thread(&self, task: ControlTask) {
        if let Err(mpsc::SendError(task)) = self.tasks.send(task) {
            // No control thread any more: better it stays than that it calls the driver here.
            std::mem::forget(task);
        }
    }

    fn add(&self, fd: BorrowedFd<'_>, id: u64, events: epoll::EventFlags) -> Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(id), events)
            .map_err(|e| Error::os("epoll_ctl", "a watched descriptor", e))
    }

    /// Watches `fd` for `target` until the result is dropped or `on_ready` answers [`Next::Stop`].
    pub(crate) fn register(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        target: &Weak<dyn EventSource>,
        tag: u64,
    ) -> Result<Registration> {
        let runs_on_control_thread = target
            .upgrade()
            .is_some_and(|target| target.runs_on_control_thread());
        let events = if runs_on_control_thread {
            ONCE
        } else {
            epoll::EventFlags::IN
        };
        self.register_for(events, fd, target, tag)
    }

    /// Watches `fd` for its end alone (`EPOLLHUP`), whatever there is to be read. For who is not attended.
    pub(crate) fn register_hangup(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        target: &Weak<dyn EventSource>,
        tag: u64,
    ) -> Result<Registration> {
        self.register_for(epoll::EventFlags::empty(), fd, target, tag)
    }

    fn register_for(
        self: &Arc<Self>,
        events: epoll::EventFlags,
        fd: BorrowedFd<'_>,
        target: &Weak<dyn EventSource>,
        tag: u64,
    ) -> Result<Registration> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let entry = RegistrationEntry {
            target: target.clone(),
            tag,
            fd: Some(fd.as_raw_fd()),
            events,
        };
        let mut state = self.lock();
        state.registrations.insert(id, entry);
        if let Err(error) = self.add(fd, id, events) {
            state.registrations.remove(&id);
            return Err(error);
        }
        Ok(Registration {
            reactor: self.clone(),
            id,
        })
    }

    /// A watch without a descriptor: `target` is called with `tag` when somebody [triggers](Self::trigger) it.
    pub(crate) fn register_trigger(
        self: &Arc<Self>,
        target: &Weak<dyn EventSource>,
        tag: u64,
    ) -> Registration {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let entry = RegistrationEntry {
            target: target.clone(),
            tag,
            fd: None,
            events: epoll::EventFlags::empty(),
        };
        self.lock().registrations.insert(id, entry);
        Registration {
            reactor: self.clone(),
            id,
        }
    }

    /// Has the target of that watch called, on its own thread, however much that has to do.
    pub(crate) fn trigger(&self, id: u64) {
        self.lock().triggered.push(id);
        self.doorbell.ring();
    }

    /// Whether that watch is there still.
    pub(crate) fn has(&self, id: u64) -> bool {
        self.lock().registrations.contains_key(&id)
    }

    /// Ticks `target` as long as it lives.
    pub(crate) fn register_ticks(&self, target: Weak<dyn EventSource>) {
        self.lock().ticked.push(target);
        self.doorbell.ring();
    }

    /// Has the fence thread call `look` until it finds that everything is over, then drops it with all that it owns: memory
    /// that a stream may still touch is let go only when this process has its own proof that it will not (see
    /// [`fence`](crate::runtime::fence)). However long that takes.
    pub(crate) fn drop_after<U: Into<DropReadiness>>(
        &self,
        look: impl FnMut() -> U + Send + 'static,
    ) {
        self.drop_after_as(false, look);
    }

    /// The same for what is looked at with every [`TICK`] only: nobody waits for it.
    pub(crate) fn drop_after_unhurried<U: Into<DropReadiness>>(
        &self,
        look: impl FnMut() -> U + Send + 'static,
    ) {
        self.drop_after_as(true, look);
    }

    fn drop_after_as<U: Into<DropReadiness>>(
        &self,
        is_unhurried: bool,
        mut look: impl FnMut() -> U + Send + 'static,
    ) {
        let (look, since) = (Box::new(move || look().into()), Instant::now());
        self.counts.waiting.fetch_add(1, Ordering::Relaxed);
        let fenced_drops = FencedDrop {
            look,
            readiness: DropReadiness::Held,
            since,
            is_unhurried,
            is_overdue: false,
        };
        self.lock().fenced_drops.push(fenced_drops);
        self.doorbell.ring();
    }

    fn run(self: &Arc<Self>) {
        let mut events = Vec::with_capacity(64);
        let mut last_tick = Instant::now();
        let mut last_fence_poll = last_tick;
        loop {
            events.clear();
            let timeout = self.sleep_limit(last_tick, last_fence_poll).map(timespec);
            // A failing epoll_wait can only be an interruption: the descriptor is ours and open.
            let _ = epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            );
            for event in &events {
                self.dispatch(event.data.u64());
            }
            let triggered = std::mem::take(&mut self.lock().triggered);
            triggered.into_iter().for_each(|id| self.dispatch(id));
            if last_fence_poll.elapsed() >= FENCE_POLL_INTERVAL
                && !self.lock().fenced_drops.is_empty()
            {
                last_fence_poll = Instant::now();
                self.request_fence_poll();
            }
            if last_tick.elapsed() >= TICK {
                last_tick = Instant::now();
                self.tick_all();
            }
        }
    }

    /// How long to sleep at most.
    fn sleep_limit(&self, last_tick: Instant, last_fence_poll: Instant) -> Option<Duration> {
        let state = self.lock();
        // A fence thread that is late rings when it is done.
        if !state.fenced_drops.is_empty() && !self.is_fence_poll_requested.load(Ordering::Acquire) {
            return Some(FENCE_POLL_INTERVAL.saturating_sub(last_fence_poll.elapsed()));
        }
        let is_idle = state.ticked.is_empty() && state.slow.is_empty() && state.paused.is_empty();
        let ticks = !is_idle || unreclaimed::is_retry_due();
        ticks.then(|| TICK.saturating_sub(last_tick.elapsed()))
    }

    fn dispatch(self: &Arc<Self>, id: u64) {
        if id == DOORBELL {
            return self.doorbell.drain();
        }
        let found = self
            .lock()
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
            Next::RetryAtTick => self.pause_until_tick(id),
        }
        self.drop_on_reaper(target);
    }

    /// Leaves an event to the control thread. Until it has been dealt with, its descriptor is not listened to ([`ONCE`]).
    fn dispatch_on_control_thread(
        self: &Arc<Self>,
        id: u64,
        target: Arc<dyn EventSource>,
        tag: u64,
    ) {
        let me = self.clone();
        let deal = move || {
            me.call(id, target, tag);
            me.listen_again(id);
        };
        self.run_on_control_thread(Box::new(deal));
    }

    /// Listens to a descriptor that has spoken [`ONCE`]; nothing happens if it is watched no longer.
    fn listen_again(&self, id: u64) {
        let state = self.lock();
        if let Some(fd) = state.registrations.get(&id).and_then(|entry| entry.fd) {
            let _ = epoll::modify(
                &self.epoll,
                watched(fd),
                epoll::EventData::new_u64(id),
                ONCE,
            );
        }
    }

    fn deregister(&self, id: u64) {
        let mut state = self.lock();
        if let Some(fd) = state.registrations.remove(&id).and_then(|entry| entry.fd) {
            let _ = epoll::delete(&self.epoll, watched(fd));
        }
    }

    /// Has the fence thread look at what waits for a device: to ask for it calls the driver. Once is enough, however late it is.
    /// Whether it had to be asked.
    fn request_fence_poll(&self) -> bool {
        // It ends with the process only.
        !self.is_fence_poll_requested.swap(true, Ordering::AcqRel)
            && self.fence_polls_tx.send(()).is_ok()
    }

    fn poll_fences(&self) {
        let mut waiting = std::mem::take(&mut self.lock().fenced_drops);
        let (mut slow, mut index) = (Vec::new(), 0);
        while index < waiting.len() {
            let (one, now) = (&mut waiting[index], Instant::now());
            let readiness = one.look(now);
            let is_slow = one.is_slow(now, self.overdue_after);
            self.counts.set_overdue(
                &mut one.is_overdue,
                is_slow && readiness == DropReadiness::Busy,
            );
            let is_slow = is_slow || one.is_unhurried;
            if readiness == DropReadiness::Ready {
                self.counts.waiting.fetch_sub(1, Ordering::Relaxed);
                self.defer_drop(Box::new(waiting.swap_remove(index)));
            } else if is_slow {
                slow.push(waiting.swap_remove(index));
            } else {
                index += 1;
            }
        }
        if !(waiting.is_empty() && slow.is_empty()) {
            let mut state = self.lock();
            state.fenced_drops.append(&mut waiting);
            state.slow.append(&mut slow);
            drop(state);
            self.doorbell.ring();
        }
    }

    fn tick_all(self: &Arc<Self>) {
        let targets = {
            let mut state = self.lock();
            let slow = std::mem::take(&mut state.slow);
            state.fenced_drops.extend(slow);
            state.ticked.retain(|target| target.strong_count() > 0);
            state.ticked.clone()
        };
        self.resume();
        self.request_reclaim();
        let now = now_ns();
        for target in targets.iter().filter_map(Weak::upgrade) {
            let _panicked = catch_panic(|| target.on_tick(now));
            // Mostly it has other owners; to wake the control thread with every tick would cost more than the tick.
            if Arc::strong_count(&target) == 1 {
                self.drop_on_reaper(target);
            }
        }
    }

    /// Has the reaper ask for what a device did not take back. Once is enough, however late it is.
    fn request_reclaim(self: &Arc<Self>) {
        if unreclaimed::is_retry_due() && !self.is_reclaim_requested.swap(true, Ordering::AcqRel) {
            self.defer_drop(Box::new(ReclaimTask(self.clone())));
        }
    }

    /// Lets the reaper drop it: should it be the last owner by now, that calls the driver.
    fn drop_on_reaper(&self, target: Arc<dyn EventSource>) {
        if Arc::strong_count(&target) == 1 {
            self.defer_drop(Box::new(target));
        }
    }

    /// Leaves it to the reaper to drop something, however much he has to do: never on this thread.
    pub(crate) fn defer_drop(&self, deferred: Deferred) {
        if let Err(mpsc::SendError(deferred)) = self.deferred.send(deferred) {
            // No reaper any more: better it stays than that it calls the driver here.
            std::mem::forget(deferred);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ReactorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropped by the reaper, it asks for what a device did not take back.
struct ReclaimTask(Arc<Reactor>);

impl Drop for ReclaimTask {
    fn drop(&mut self) {
        unreclaimed::retry_all();
        self.0.is_reclaim_requested.store(false, Ordering::Release);
    }
}

impl Registration {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.reactor.deregister(self.id);
    }
}

/// Runs what is not the reactor's own (a policy is chosen by the user's code): its panic must not end the one thread
/// that sees deaths. The panic hook has shown it.
fn catch_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).ok()
}

/// The descriptor of an [`RegistrationEntry`], for a caller that holds the lock of the [`ReactorState`] that it was found in.
fn watched<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: the descriptor is open: `Registration` is dropped before it, and the lock keeps that drop out.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

fn start_thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(run);
    spawned
        .map(drop)
        .map_err(|e| Error::os("clone", format!("the thread {name}"), e))
}

/// Random bytes for an endpoint's generation: `getrandom(2)`.
pub(crate) fn new_generation() -> [u8; 16] {
    let mut bytes = [0u8; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        filled +=
            rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
                .unwrap_or(0);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    struct DropRecorder(Arc<Mutex<Vec<Option<String>>>>);

    impl Drop for DropRecorder {
        fn drop(&mut self) {
            self.0
                .lock()
                .unwrap()
                .push(std::thread::current().name().map(str::to_string));
        }
    }

    struct Stuck(mpsc::Receiver<()>);

    impl Drop for Stuck {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn whoever_defers_a_drop_drops_nothing_however_long_the_reaper_is_held_up() {
        const COUNT: usize = 10_000;
        let reactor = Reactor::start(OVERDUE_AFTER).unwrap();
        let (go, wait) = mpsc::channel();
        let dropped = Arc::new(Mutex::new(Vec::new()));
        reactor.defer_drop(Box::new(Stuck(wait)));
        (0..COUNT).for_each(|_| reactor.defer_drop(Box::new(DropRecorder(dropped.clone()))));
        assert!(dropped.lock().unwrap().is_empty());
        drop(go);
        let start = Instant::now();
        while dropped.lock().unwrap().len() < COUNT {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
        assert!(
            dropped
                .lock()
                .unwrap()
                .iter()
                .all(|name| name.as_deref() == Some("warpipe-reaper"))
        );
    }

    fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < Duration::from_secs(10), "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_fence_thread_that_is_late_is_asked_once_and_the_control_thread_goes_on() {
        let reactor = Reactor::start(OVERDUE_AFTER).unwrap();
        let ((go, wait), (stands, standing)) = (mpsc::channel::<()>(), mpsc::channel());
        reactor.drop_after(move || {
            stands.send(()).unwrap();
            let _ = wait.recv();
            DropReadiness::Ready
        });
        standing.recv_timeout(Duration::from_secs(10)).unwrap();
        // A minute of it, as the reactor would ask.
        let asked = (0..30_000).filter(|_| reactor.request_fence_poll()).count();
        assert!(asked <= 1, "{asked} rounds wait for the fence thread");
        let (tell, told) = mpsc::channel();
        reactor.run_on_control_thread(Box::new(move || tell.send(()).unwrap()));
        assert_eq!(told.recv_timeout(Duration::from_secs(10)), Ok(()));
        drop(go);
        eventually("it goes on", || reactor.counts() == (0, 0));
    }

    #[test]
    fn a_child_forked_while_another_thread_starts_the_reactor_starts_its_own() {
        let own = || {
            Reactor::running().is_none()
                && Reactor::of_process().is_ok()
                && Reactor::running().is_some()
        };
        crate::hostile::while_locked(&CURRENT, || crate::hostile::in_a_forked_child(own));
    }

    #[test]
    fn what_a_device_is_late_with_is_counted_and_dropped_when_it_is_done() {
        let reactor = Reactor::start(Duration::ZERO).unwrap();
        let (readiness, (tell, told)) = (
            Arc::new(Mutex::new(DropReadiness::Held)),
            mpsc::channel::<()>(),
        );
        let found = readiness.clone();
        reactor.drop_after(move || {
            let _owned = &tell;
            *found.lock().unwrap()
        });
        // Longer than anything may take, and no device's fault.
        eventually("it is looked at with the ticks", || {
            !reactor.lock().slow.is_empty()
        });
        assert_eq!(reactor.counts(), (1, 0));
        *readiness.lock().unwrap() = DropReadiness::Busy;
        eventually("it is counted", || reactor.counts() == (1, 1));
        assert_eq!(
            told.try_recv(),
            Err(mpsc::TryRecvError::Empty),
            "it is kept"
        );
        *readiness.lock().unwrap() = DropReadiness::Ready;
        assert_eq!(
            told.recv_timeout(Duration::from_secs(10)),
            Err(mpsc::RecvTimeoutError::Disconnected),
            "dropped"
        );
        assert_eq!(reactor.counts(), (0, 0));
    }
}
