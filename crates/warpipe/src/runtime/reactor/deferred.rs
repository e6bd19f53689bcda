//! Deferred drops: objects that the reaper drops, some of them only after a fence.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender};
use std::time::{Duration, Instant};

use super::{EventSource, FENCE_POLL_INTERVAL, Reactor, TICK, catch_panic};
use crate::backend::unreclaimed;

/// The result of polling a deferred drop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DropReadiness {
    /// Other owners, here or in another process, still hold the object, for as long as they like.
    Held,
    /// No other owner holds the object. Work that was enqueued on it is not done.
    Busy,
    /// The object may be dropped.
    Ready,
}

impl From<bool> for DropReadiness {
    /// For an object without other owners: `is_quiet` says whether its work is done.
    fn from(is_quiet: bool) -> DropReadiness {
        if is_quiet {
            DropReadiness::Ready
        } else {
            DropReadiness::Busy
        }
    }
}

pub(super) struct FencedDrop {
    look: Box<dyn FnMut() -> DropReadiness + Send>,
    /// The last poll's result.
    readiness: DropReadiness,
    since: Instant,
    next_poll: Instant,
}

impl FencedDrop {
    fn look(&mut self, now: Instant) -> DropReadiness {
        let readiness = catch_panic(|| (self.look)()).unwrap_or_else(|| {
            // A closure that panicked may not be called again, since it may have done its work, and
            // the memory that it owns may be in use. So it is kept.
            let panicked = std::mem::replace(&mut self.look, Box::new(|| DropReadiness::Held));
            std::mem::forget(panicked);
            DropReadiness::Held
        });
        if readiness != self.readiness {
            (self.readiness, self.since) = (readiness, now);
        }
        readiness
    }
}

/// The fence thread: polls the drops that wait, and gives those that are ready to the reaper.
pub(super) struct FenceThread {
    pub(super) new: Receiver<FencedDrop>,
    pub(super) waiting: Vec<FencedDrop>,
    pub(super) overdue_after: Duration,
    pub(super) counts: Arc<DropCounts>,
    pub(super) reaper: Sender<Deferred>,
}

impl FenceThread {
    /// Ends if the start of its reactor fails.
    pub(super) fn run(mut self) {
        while let Ok(first) = self.new.recv() {
            self.waiting.push(first);
            while !self.waiting.is_empty() {
                self.poll();
                self.sleep();
            }
        }
    }

    fn poll(&mut self) {
        let (round, mut index) = (Instant::now(), 0);
        while index < self.waiting.len() {
            let (one, now) = (&mut self.waiting[index], Instant::now());
            if one.next_poll > round {
                index += 1;
                continue;
            }
            let readiness = one.look(now);
            let is_slow = now.saturating_duration_since(one.since) > self.overdue_after;
            one.next_poll = round + if is_slow { TICK } else { FENCE_POLL_INTERVAL };
            if readiness == DropReadiness::Ready {
                self.counts.waiting.fetch_sub(1, Ordering::Relaxed);
                hand(
                    &self.reaper,
                    Box::new(self.waiting.swap_remove(index)) as Deferred,
                );
            } else {
                index += 1;
            }
        }
        let is_overdue = |one: &&FencedDrop| {
            let waited = round.saturating_duration_since(one.since);
            one.readiness == DropReadiness::Busy && waited > self.overdue_after
        };
        let overdue = self.waiting.iter().filter(is_overdue).count();
        self.counts.overdue.store(overdue, Ordering::Relaxed);
    }

    /// Takes in new drops until the next poll.
    fn sleep(&mut self) {
        let polls = self.waiting.iter().map(|one| one.next_poll);
        let Some(mut due) = polls.min() else { return };
        while let Ok(new) = self
            .new
            .recv_timeout(due.saturating_duration_since(Instant::now()))
        {
            self.waiting.push(new);
            due = due.min(Instant::now() + FENCE_POLL_INTERVAL);
        }
    }
}

/// The body of the reaper. It drops what others leave to it, and retries at each [`TICK`] to
/// reclaim memory that a device did not take back.
pub(super) fn reap(queue: Receiver<Deferred>) {
    let mut last_retry = Instant::now();
    loop {
        let next = match unreclaimed::is_retry_due() {
            true => queue.recv_timeout(TICK.saturating_sub(last_retry.elapsed())),
            false => queue.recv().map_err(RecvTimeoutError::from),
        };
        match next {
            Ok(deferred) => _ = catch_panic(|| drop(deferred)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if unreclaimed::is_retry_due() && last_retry.elapsed() >= TICK {
            catch_panic(unreclaimed::retry_all);
            last_retry = Instant::now();
        }
    }
}

/// Hands an object to the thread that takes it.
pub(super) fn hand<T>(queue: &Sender<T>, object: T) {
    if let Err(SendError(object)) = queue.send(object) {
        // The thread has ended, and nothing proves that memory is touched no more: a leak is better
        // than a driver call here.
        std::mem::forget(object);
    }
}

/// The number of deferred drops.
#[derive(Debug, Default)]
pub(super) struct DropCounts {
    waiting: AtomicUsize,
    overdue: AtomicUsize,
}

/// An object that the reaper drops. Each is deferred once, and until it is dropped holds a
/// descriptor, mapped memory or a place in its maker's limits. So those limits bound the queue, and
/// a count of its own would add nothing. A caller could not react to a full queue either: it must
/// not drop (it may be the reactor), must not wait for the reaper, which a driver may hold up, and
/// has no caller to report to.
pub(crate) type Deferred = Box<dyn Send>;

/// Shared by several owners, of which the last one may be a thread that must not drop it.
pub(crate) trait IntoDeferred: Send {
    /// Gives up one owner's part. Returns the value to the last owner, as exactly one of several
    /// that give up at once is told: a count that is read before cannot tell.
    fn into_deferred(self: Arc<Self>) -> Option<Deferred>;
}

impl<T: Send + 'static> IntoDeferred for T {
    fn into_deferred(self: Arc<Self>) -> Option<Deferred> {
        Some(Box::new(Arc::into_inner(self)?))
    }
}

impl Reactor {
    /// How many drops are deferred, and how many of them wait for a device that has not done its
    /// work within [`OVERDUE_AFTER`](super::OVERDUE_AFTER).
    pub(crate) fn counts(&self) -> (usize, usize) {
        (
            self.counts.waiting.load(Ordering::Relaxed),
            self.counts.overdue.load(Ordering::Relaxed),
        )
    }

    /// Has the fence thread call `look` until it returns [`DropReadiness::Ready`], then has the
    /// reaper drop it with all that it owns. Also for work that is tried until it succeeds, which
    /// `look` does itself. Memory that a stream may still touch is released only
    /// with this process's own proof that the stream will not (see
    /// [`fence`](crate::runtime::fence)), however long that takes.
    pub(crate) fn drop_after<U: Into<DropReadiness>>(
        &self,
        mut look: impl FnMut() -> U + Send + 'static,
    ) {
        let now = Instant::now();
        self.counts.waiting.fetch_add(1, Ordering::Relaxed);
        let deferred = FencedDrop {
            look: Box::new(move || look().into()),
            readiness: DropReadiness::Held,
            since: now,
            next_poll: now,
        };
        hand(&self.fenced_drops, deferred);
    }

    /// Gives up this owner's part of `target`. If it is the last owner, the reaper drops the
    /// target, since that drop calls the driver.
    pub(crate) fn drop_on_reaper(&self, target: Arc<dyn EventSource>) {
        if let Some(target) = target.into_deferred() {
            self.defer_drop(target);
        }
    }

    /// Has the reaper drop an object, however much waits there; never on this thread.
    pub(crate) fn defer_drop(&self, deferred: Deferred) {
        hand(&self.deferred, deferred);
    }
}
