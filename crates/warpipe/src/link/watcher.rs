//! The library's threads, one of each in a process.
//!
//! * The *watcher* reads the sockets of subscriptions, sees deaths, rescues streams and keeps heartbeats. It calls
//!   nothing of the driver that may block and takes no lock that is held across such a call: `cuMemHostUnregister` and
//!   the first load of a module block behind any stream of the context that waits, a full launch queue behind its
//!   own, and it is the watcher who lets such a stream go when its peer has died.
//! * The *attendant* does what a publisher needs: it accepts connections, makes links, sees subscribers die. It also
//!   maps regions. It gives no stream work and asks none that a full launch queue could hold up.
//! * The *prover* asks whether memory that was let go is still in use. A full launch queue may hold it up: no link waits
//!   for it.
//! * The *reaper* gives that memory back to the driver, and may be held up by it.
//!
//! The watcher sleeps in `epoll_wait` until a descriptor speaks; while links exist it also ticks every [`TICK`],
//! which is what a heartbeat costs. The others sleep until there is something to do.

mod later;

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::message::timespec;
use super::wake::Bell;
use crate::backend::kept;
use crate::clock::now_ns;
use crate::error::{Error, Result};
use crate::fork::PrivateFd;
use crate::fork::own::Own;

/// How often heartbeats are written and looked at.
pub(crate) const TICK: Duration = Duration::from_millis(200);

/// How often memory that waits for a device is looked at again.
const RETIRE_TICK: Duration = Duration::from_millis(2);

/// What waits for longer than this is looked at with every [`TICK`] only. If it waits for a device, that device is
/// taken for hung, and it is counted ([`Watcher::counts`]); it is never given up, since nothing but a proof says that
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
    Later,
}

/// What the watcher watches. Called on its thread, and must not block there (see [`Watched::is_attended`]).
pub(crate) trait Watched: Send + Sync {
    /// The descriptor that was registered with `tag` is readable or closed.
    fn on_ready(&self, tag: u64) -> Next;

    /// [`TICK`] has passed.
    fn on_tick(&self, _now_ns: u64) {}

    /// Whether the attendant is to call these, and not the watcher: for who takes locks that are held across calls
    /// of the driver.
    fn is_attended(&self) -> bool {
        false
    }
}

struct Entry {
    target: Weak<dyn Watched>,
    tag: u64,
    /// `None` for what [`Watcher::raise`] alone tells of.
    fd: Option<RawFd>,
    events: epoll::EventFlags,
}

#[derive(Default)]
struct Tables {
    watches: HashMap<u64, Entry>,
    ticked: Vec<Weak<dyn Watched>>,
    /// Raised, and not told yet.
    raised: Vec<u64>,
    /// Those that answered [`Next::Later`]: not listened to before the next tick.
    later: Vec<u64>,
    retired: Vec<Retired>,
    /// Those that have waited for long: looked at with every tick.
    slow: Vec<Retired>,
}

/// What a look at something that is to be dropped found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Usage {
    /// It is waited for that others give it up, here or in another process: that may take as long as they like.
    Held,
    /// Nobody else holds it. Work that was enqueued on it is not done.
    Busy,
    /// It may be dropped.
    Over,
}

impl From<bool> for Usage {
    /// Of what nobody else holds: whether its work is done.
    fn from(is_quiet: bool) -> Usage {
        if is_quiet { Usage::Over } else { Usage::Busy }
    }
}

struct Retired {
    look: Box<dyn FnMut() -> Usage + Send>,
    /// What the last look found, and since when that is so.
    usage: Usage,
    since: Instant,
    /// It is looked at with every tick only.
    is_unhurried: bool,
    /// It is counted as such.
    is_overdue: bool,
}

impl Retired {
    fn look(&mut self, now: Instant) -> Usage {
        // A closure that panicked may not be called again, and what it owns may be in use: it is kept.
        let usage = survive(|| (self.look)()).unwrap_or(Usage::Held);
        if usage != self.usage {
            (self.usage, self.since) = (usage, now);
        }
        usage
    }

    fn is_slow(&self, now: Instant, after: Duration) -> bool {
        now.saturating_duration_since(self.since) > after
    }
}

impl Counts {
    fn set_overdue(&self, is_counted: &mut bool, is_overdue: bool) {
        match (std::mem::replace(is_counted, is_overdue), is_overdue) {
            (false, true) => self.overdue.fetch_add(1, Ordering::Relaxed),
            (true, false) => self.overdue.fetch_sub(1, Ordering::Relaxed),
            _ => return,
        };
    }
}

/// What the attendant does, in order. As many can wait as there are that may ask for one, each for one at a time: a
/// watched descriptor ([`ONCE`]), a link's regions, a connection, the look at what is to be dropped. A count on top of
/// those would refuse whoever comes next for what this process is late with.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// What waits to be dropped. Counted beside the tables, out of which the prover takes what it looks at.
#[derive(Debug, Default)]
struct Counts {
    waiting: AtomicUsize,
    overdue: AtomicUsize,
}

/// What the reaper drops: once each, what somebody had. So as many can wait for him as there may be of them, and each
/// has a descriptor, mapped memory or a place in its maker's limits until it is dropped; a count would be one more limit
/// that says nothing new. And there would be nothing to do at it: who buries must not drop (it may be the watcher), must
/// not wait for the reaper, whom a driver may hold up, and has nobody left to tell.
pub(crate) type Remains = Box<dyn Send>;

/// The watcher of this process.
pub(crate) struct Watcher {
    epoll: PrivateFd,
    bell: Bell,
    tables: Mutex<Tables>,
    jobs: Sender<Job>,
    /// Sent for each round of looks at what is retired.
    rounds: Sender<()>,
    /// The prover has been asked for a round, and has not begun.
    is_reap_due: AtomicBool,
    /// The reaper has been asked to ask again for what a device did not take back, and is not done.
    is_asking: AtomicBool,
    overdue_after: Duration,
    counts: Counts,
    remains: Sender<Remains>,
    next_id: AtomicU64,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watcher")
    }
}

/// A descriptor being watched; dropping it ends that. Drop it before the descriptor.
pub(crate) struct Watch {
    watcher: Arc<Watcher>,
    id: u64,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Watch({})", self.id)
    }
}

/// What is listened for on behalf of the attendant: one event, and then silence until it has been dealt with. Nothing less
/// will do: a socket whose peer has closed is told of again and again even to who listens for nothing at all.
const ONCE: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);

/// The watcher of this process.
static CURRENT: Own<Mutex<Option<Arc<Watcher>>>> = Own::new();

/// The bell's key in the epoll set.
const BELL: u64 = 0;

impl Watcher {
    /// The watcher of this process, started on first use; a forked child starts its own.
    pub(crate) fn of_process() -> Result<Arc<Watcher>> {
        let mut current = CURRENT.lock();
        if let Some(watcher) = &*current {
            return Ok(watcher.clone());
        }
        let watcher = Watcher::start(OVERDUE_AFTER)?;
        let waker = Arc::downgrade(&watcher);
        kept::on_owed(move || waker.upgrade().into_iter().for_each(|watcher| watcher.bell.ring()));
        Ok(current.insert(watcher).clone())
    }

    /// The watcher of this process, if it has been started.
    pub(crate) fn running() -> Option<Arc<Watcher>> {
        CURRENT.lock().clone()
    }

    /// How much waits to be dropped, and how much of that for a device that has not done its work within
    /// [`OVERDUE_AFTER`].
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.counts.waiting.load(Ordering::Relaxed), self.counts.overdue.load(Ordering::Relaxed))
    }

    fn start(overdue_after: Duration) -> Result<Arc<Watcher>> {
        let epoll = PrivateFd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC))
            .map_err(|e| Error::os("epoll_create1", "the watcher", e))?;
        let (jobs, queue) = mpsc::channel::<Job>();
        let (rounds, due) = mpsc::channel::<()>();
        let (remains, graves) = mpsc::channel::<Remains>();
        let watcher = Arc::new(Watcher {
            epoll,
            bell: Bell::new()?,
            tables: Mutex::default(),
            jobs,
            rounds,
            is_reap_due: AtomicBool::new(false),
            is_asking: AtomicBool::new(false),
            overdue_after,
            counts: Counts::default(),
            remains,
            next_id: AtomicU64::new(BELL + 1),
        });
        watcher.add(watcher.bell.as_fd(), BELL, epoll::EventFlags::IN)?;
        let runner = watcher.clone();
        start_thread("warpipe-attendant", move || {
            for job in queue {
                let _panicked = survive(job);
            }
        })?;
        // Of a watcher that comes to nothing the threads end with it.
        let prover = Arc::downgrade(&watcher);
        start_thread("warpipe-prover", move || {
            for () in due {
                let Some(prover) = prover.upgrade() else { return };
                prover.is_reap_due.store(false, Ordering::Release);
                let _panicked = survive(|| prover.reap());
            }
        })?;
        start_thread("warpipe-reaper", move || {
            for remains in graves {
                let _panicked = survive(|| drop(remains));
            }
        })?;
        start_thread("warpipe-watcher", move || runner.run())?;
        Ok(watcher)
    }

    /// Leaves a job to the attendant. For who asks for one at a time, or counts those that wait (see [`Job`]).
    pub(crate) fn attend(&self, job: Job) {
        if let Err(mpsc::SendError(job)) = self.jobs.send(job) {
            // No attendant any more: better it stays than that it calls the driver here.
            std::mem::forget(job);
        }
    }

    fn add(&self, fd: BorrowedFd<'_>, id: u64, events: epoll::EventFlags) -> Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(id), events)
            .map_err(|e| Error::os("epoll_ctl", "a watched descriptor", e))
    }

    /// Watches `fd` for `target` until the result is dropped or `on_ready` answers [`Next::Stop`].
    pub(crate) fn watch(self: &Arc<Self>, fd: BorrowedFd<'_>, target: &Weak<dyn Watched>, tag: u64) -> Result<Watch> {
        let is_attended = target.upgrade().is_some_and(|target| target.is_attended());
        let events = if is_attended { ONCE } else { epoll::EventFlags::IN };
        self.watch_for(events, fd, target, tag)
    }

    /// Watches `fd` for its end alone (`EPOLLHUP`), whatever there is to be read. For who is not attended.
    pub(crate) fn watch_end(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        target: &Weak<dyn Watched>,
        tag: u64,
    ) -> Result<Watch> {
        self.watch_for(epoll::EventFlags::empty(), fd, target, tag)
    }

    fn watch_for(
        self: &Arc<Self>,
        events: epoll::EventFlags,
        fd: BorrowedFd<'_>,
        target: &Weak<dyn Watched>,
        tag: u64,
    ) -> Result<Watch> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let entry = Entry { target: target.clone(), tag, fd: Some(fd.as_raw_fd()), events };
        let mut tables = self.lock();
        tables.watches.insert(id, entry);
        if let Err(error) = self.add(fd, id, events) {
            tables.watches.remove(&id);
            return Err(error);
        }
        Ok(Watch { watcher: self.clone(), id })
    }

    /// A watch without a descriptor: `target` is called with `tag` when somebody [raises](Self::raise) it.
    pub(crate) fn signal(self: &Arc<Self>, target: &Weak<dyn Watched>, tag: u64) -> Watch {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let entry = Entry { target: target.clone(), tag, fd: None, events: epoll::EventFlags::empty() };
        self.lock().watches.insert(id, entry);
        Watch { watcher: self.clone(), id }
    }

    /// Has the target of that watch called, on its own thread, however much that has to do.
    pub(crate) fn raise(&self, id: u64) {
        self.lock().raised.push(id);
        self.bell.ring();
    }

    /// Whether that watch is there still.
    pub(crate) fn has(&self, id: u64) -> bool {
        self.lock().watches.contains_key(&id)
    }

    /// Ticks `target` as long as it lives.
    pub(crate) fn tick(&self, target: Weak<dyn Watched>) {
        self.lock().ticked.push(target);
        self.bell.ring();
    }

    /// Has the prover call `look` until it finds that everything is over, then drops it with all that it owns: memory
    /// that a stream may still touch is let go only when this process has its own proof that it will not (see
    /// [`proof`](super::proof)). However long that takes.
    pub(crate) fn retire<U: Into<Usage>>(&self, look: impl FnMut() -> U + Send + 'static) {
        self.retire_as(false, look);
    }

    /// The same for what is looked at with every [`TICK`] only: nobody waits for it.
    pub(crate) fn retire_with_ticks<U: Into<Usage>>(&self, look: impl FnMut() -> U + Send + 'static) {
        self.retire_as(true, look);
    }

    fn retire_as<U: Into<Usage>>(&self, is_unhurried: bool, mut look: impl FnMut() -> U + Send + 'static) {
        let (look, since) = (Box::new(move || look().into()), Instant::now());
        self.counts.waiting.fetch_add(1, Ordering::Relaxed);
        let retired = Retired { look, usage: Usage::Held, since, is_unhurried, is_overdue: false };
        self.lock().retired.push(retired);
        self.bell.ring();
    }

    fn run(self: &Arc<Self>) {
        let mut events = Vec::with_capacity(64);
        let mut last_tick = Instant::now();
        let mut last_reap = last_tick;
        loop {
            events.clear();
            let timeout = self.pause(last_tick, last_reap).map(timespec);
            // A failing epoll_wait can only be an interruption: the descriptor is ours and open.
            let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
            for event in &events {
                self.dispatch(event.data.u64());
            }
            let raised = std::mem::take(&mut self.lock().raised);
            raised.into_iter().for_each(|id| self.dispatch(id));
            if last_reap.elapsed() >= RETIRE_TICK && !self.lock().retired.is_empty() {
                last_reap = Instant::now();
                self.reap_soon();
            }
            if last_tick.elapsed() >= TICK {
                last_tick = Instant::now();
                self.tick_all();
            }
        }
    }

    /// How long to sleep at most.
    fn pause(&self, last_tick: Instant, last_reap: Instant) -> Option<Duration> {
        let tables = self.lock();
        // A prover that is late rings when it is done.
        if !tables.retired.is_empty() && !self.is_reap_due.load(Ordering::Acquire) {
            return Some(RETIRE_TICK.saturating_sub(last_reap.elapsed()));
        }
        let is_idle = tables.ticked.is_empty() && tables.slow.is_empty() && tables.later.is_empty();
        let ticks = !is_idle || kept::is_owed();
        ticks.then(|| TICK.saturating_sub(last_tick.elapsed()))
    }

    fn dispatch(self: &Arc<Self>, id: u64) {
        if id == BELL {
            return self.bell.drain();
        }
        let found = self.lock().watches.get(&id).map(|entry| (entry.target.upgrade(), entry.tag));
        match found {
            Some((Some(target), tag)) if target.is_attended() => self.hand_over(id, target, tag),
            Some((Some(target), tag)) => self.call(id, target, tag),
            Some((None, _)) => self.forget(id),
            None => {}
        }
    }

    fn call(&self, id: u64, target: Arc<dyn Watched>, tag: u64) {
        match survive(|| target.on_ready(tag)).unwrap_or(Next::Stop) {
            Next::Keep => {}
            Next::Stop => self.forget(id),
            Next::Later => self.put_off(id),
        }
        self.give_away(target);
    }

    /// Leaves an event to the attendant. Until it has been dealt with, its descriptor is not listened to ([`ONCE`]).
    fn hand_over(self: &Arc<Self>, id: u64, target: Arc<dyn Watched>, tag: u64) {
        let me = self.clone();
        let deal = move || {
            me.call(id, target, tag);
            me.listen_again(id);
        };
        self.attend(Box::new(deal));
    }

    /// Listens to a descriptor that has spoken [`ONCE`]; nothing happens if it is watched no longer.
    fn listen_again(&self, id: u64) {
        let tables = self.lock();
        if let Some(fd) = tables.watches.get(&id).and_then(|entry| entry.fd) {
            let _ = epoll::modify(&self.epoll, watched(fd), epoll::EventData::new_u64(id), ONCE);
        }
    }

    fn forget(&self, id: u64) {
        let mut tables = self.lock();
        if let Some(fd) = tables.watches.remove(&id).and_then(|entry| entry.fd) {
            let _ = epoll::delete(&self.epoll, watched(fd));
        }
    }

    /// Has the prover look at what waits for a device: to ask for it calls the driver. Once is enough, however late it is.
    /// Whether it had to be asked.
    fn reap_soon(&self) -> bool {
        // It ends with the process only.
        !self.is_reap_due.swap(true, Ordering::AcqRel) && self.rounds.send(()).is_ok()
    }

    fn reap(&self) {
        let mut waiting = std::mem::take(&mut self.lock().retired);
        let (mut slow, mut index) = (Vec::new(), 0);
        while index < waiting.len() {
            let (one, now) = (&mut waiting[index], Instant::now());
            let usage = one.look(now);
            let is_slow = one.is_slow(now, self.overdue_after);
            self.counts.set_overdue(&mut one.is_overdue, is_slow && usage == Usage::Busy);
            let is_slow = is_slow || one.is_unhurried;
            if usage == Usage::Over {
                self.counts.waiting.fetch_sub(1, Ordering::Relaxed);
                self.bury(Box::new(waiting.swap_remove(index)));
            } else if is_slow {
                slow.push(waiting.swap_remove(index));
            } else {
                index += 1;
            }
        }
        if !(waiting.is_empty() && slow.is_empty()) {
            let mut tables = self.lock();
            tables.retired.append(&mut waiting);
            tables.slow.append(&mut slow);
            drop(tables);
            self.bell.ring();
        }
    }

    fn tick_all(self: &Arc<Self>) {
        let targets = {
            let mut tables = self.lock();
            let slow = std::mem::take(&mut tables.slow);
            tables.retired.extend(slow);
            tables.ticked.retain(|target| target.strong_count() > 0);
            tables.ticked.clone()
        };
        self.resume();
        self.ask_again();
        let now = now_ns();
        for target in targets.iter().filter_map(Weak::upgrade) {
            let _panicked = survive(|| target.on_tick(now));
            // Mostly it has other owners; to wake the attendant with every tick would cost more than the tick.
            if Arc::strong_count(&target) == 1 {
                self.give_away(target);
            }
        }
    }

    /// Has the reaper ask for what a device did not take back. Once is enough, however late it is.
    fn ask_again(self: &Arc<Self>) {
        if kept::is_owed() && !self.is_asking.swap(true, Ordering::AcqRel) {
            self.bury(Box::new(Asking(self.clone())));
        }
    }

    /// Lets the reaper drop it: should it be the last owner by now, that calls the driver.
    fn give_away(&self, target: Arc<dyn Watched>) {
        if Arc::strong_count(&target) == 1 {
            self.bury(Box::new(target));
        }
    }

    /// Leaves it to the reaper to drop something, however much he has to do: never on this thread.
    pub(crate) fn bury(&self, remains: Remains) {
        if let Err(mpsc::SendError(remains)) = self.remains.send(remains) {
            // No reaper any more: better it stays than that it calls the driver here.
            std::mem::forget(remains);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropped by the reaper, it asks for what a device did not take back.
struct Asking(Arc<Watcher>);

impl Drop for Asking {
    fn drop(&mut self) {
        kept::ask_again();
        self.0.is_asking.store(false, Ordering::Release);
    }
}

impl Watch {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watcher.forget(self.id);
    }
}

/// Runs what is not the watcher's own (a policy is chosen by the user's code): its panic must not end the one thread
/// that sees deaths. The panic hook has shown it.
fn survive<T>(work: impl FnOnce() -> T) -> Option<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).ok()
}

/// The descriptor of an [`Entry`], for a caller that holds the lock of the [`Tables`] that it was found in.
fn watched<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: the descriptor is open: `Watch` is dropped before it, and the lock keeps that drop out.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

fn start_thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(run);
    spawned.map(drop).map_err(|e| Error::os("clone", format!("the thread {name}"), e))
}

/// Random bytes for an endpoint's generation: `getrandom(2)`.
pub(crate) fn new_generation() -> [u8; 16] {
    let mut bytes = [0u8; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()).unwrap_or(0);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Grave(Arc<Mutex<Vec<Option<String>>>>);

    impl Drop for Grave {
        fn drop(&mut self) {
            self.0.lock().unwrap().push(std::thread::current().name().map(str::to_string));
        }
    }

    struct Stuck(mpsc::Receiver<()>);

    impl Drop for Stuck {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn whoever_buries_drops_nothing_however_long_the_reaper_is_held_up() {
        const COUNT: usize = 10_000;
        let watcher = Watcher::start(OVERDUE_AFTER).unwrap();
        let (go, wait) = mpsc::channel();
        let dropped = Arc::new(Mutex::new(Vec::new()));
        watcher.bury(Box::new(Stuck(wait)));
        (0..COUNT).for_each(|_| watcher.bury(Box::new(Grave(dropped.clone()))));
        assert!(dropped.lock().unwrap().is_empty());
        drop(go);
        let start = Instant::now();
        while dropped.lock().unwrap().len() < COUNT {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
        assert!(dropped.lock().unwrap().iter().all(|name| name.as_deref() == Some("warpipe-reaper")));
    }

    fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < Duration::from_secs(10), "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_prover_that_is_late_is_asked_once_and_the_attendant_goes_on() {
        let watcher = Watcher::start(OVERDUE_AFTER).unwrap();
        let ((go, wait), (stands, standing)) = (mpsc::channel::<()>(), mpsc::channel());
        watcher.retire(move || {
            stands.send(()).unwrap();
            let _ = wait.recv();
            Usage::Over
        });
        standing.recv_timeout(Duration::from_secs(10)).unwrap();
        // A minute of it, as the watcher would ask.
        let asked = (0..30_000).filter(|_| watcher.reap_soon()).count();
        assert!(asked <= 1, "{asked} rounds wait for the prover");
        let (tell, told) = mpsc::channel();
        watcher.attend(Box::new(move || tell.send(()).unwrap()));
        assert_eq!(told.recv_timeout(Duration::from_secs(10)), Ok(()));
        drop(go);
        eventually("it goes on", || watcher.counts() == (0, 0));
    }

    #[test]
    fn a_child_forked_while_another_thread_starts_the_watcher_starts_its_own() {
        let own = || Watcher::running().is_none() && Watcher::of_process().is_ok() && Watcher::running().is_some();
        crate::hostile::while_locked(&CURRENT, || crate::hostile::in_a_forked_child(own));
    }

    #[test]
    fn what_a_device_is_late_with_is_counted_and_dropped_when_it_is_done() {
        let watcher = Watcher::start(Duration::ZERO).unwrap();
        let (usage, (tell, told)) = (Arc::new(Mutex::new(Usage::Held)), mpsc::channel::<()>());
        let found = usage.clone();
        watcher.retire(move || {
            let _owned = &tell;
            *found.lock().unwrap()
        });
        // Longer than anything may take, and no device's fault.
        eventually("it is looked at with the ticks", || !watcher.lock().slow.is_empty());
        assert_eq!(watcher.counts(), (1, 0));
        *usage.lock().unwrap() = Usage::Busy;
        eventually("it is counted", || watcher.counts() == (1, 1));
        assert_eq!(told.try_recv(), Err(mpsc::TryRecvError::Empty), "it is kept");
        *usage.lock().unwrap() = Usage::Over;
        assert_eq!(told.recv_timeout(Duration::from_secs(10)), Err(mpsc::RecvTimeoutError::Disconnected), "dropped");
        assert_eq!(watcher.counts(), (0, 0));
    }
}
