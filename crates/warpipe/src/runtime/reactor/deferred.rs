//! Deferred drops: objects that the reaper drops, some of them only after a fence.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::{EventSource, Reactor, catch_panic};
use crate::backend::unreclaimed;
use crate::mutex::LockUnpoisoned;

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
    /// Counted in [`DropCounts::overdue`].
    is_overdue: bool,
    has_panicked: bool,
}

impl FencedDrop {
    fn look(&mut self, now: Instant) -> DropReadiness {
        // A closure that panicked may not be called again, since it may have done its work, and the
        // memory that it owns may be in use. So it is kept.
        let readiness = match self.has_panicked {
            true => DropReadiness::Held,
            false => catch_panic(|| (self.look)()).unwrap_or_else(|| {
                self.has_panicked = true;
                DropReadiness::Held
            }),
        };
        if readiness != self.readiness {
            (self.readiness, self.since) = (readiness, now);
        }
        readiness
    }

    fn is_slow(&self, now: Instant, after: Duration) -> bool {
        now.saturating_duration_since(self.since) > after
    }
}

/// The number of deferred drops. Counted beside the state, since the fence thread takes drops out
/// of the state while it polls them.
#[derive(Debug, Default)]
pub(super) struct DropCounts {
    waiting: AtomicUsize,
    overdue: AtomicUsize,
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
    /// reaper drop it with all that it owns. Memory that a stream may still touch is released only
    /// with this process's own proof that the stream will not (see
    /// [`fence`](crate::runtime::fence)), however long that takes.
    pub(crate) fn drop_after<U: Into<DropReadiness>>(
        &self,
        mut look: impl FnMut() -> U + Send + 'static,
    ) {
        let (look, since) = (Box::new(move || look().into()), Instant::now());
        self.counts.waiting.fetch_add(1, Ordering::Relaxed);
        let fenced_drops = FencedDrop {
            look,
            readiness: DropReadiness::Held,
            since,
            is_overdue: false,
            has_panicked: false,
        };
        self.state.locked().fenced_drops.push(fenced_drops);
        self.doorbell.ring();
    }

    /// Has the fence thread poll the deferred drops, since the poll calls the driver. One request
    /// at a time is enough, however late the fence thread is. Returns whether a request was sent.
    pub(super) fn request_fence_poll(&self) -> bool {
        // The fence thread ends only with the process.
        !self.is_fence_poll_requested.swap(true, Ordering::AcqRel)
            && self.fence_polls_tx.send(()).is_ok()
    }

    pub(super) fn poll_fences(&self) {
        let mut waiting = std::mem::take(&mut self.state.locked().fenced_drops);
        let (mut slow, mut index) = (Vec::new(), 0);
        while index < waiting.len() {
            let (one, now) = (&mut waiting[index], Instant::now());
            let readiness = one.look(now);
            let is_slow = one.is_slow(now, self.overdue_after);
            self.counts.set_overdue(
                &mut one.is_overdue,
                is_slow && readiness == DropReadiness::Busy,
            );
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
            let mut state = self.state.locked();
            state.fenced_drops.append(&mut waiting);
            state.slow.append(&mut slow);
            drop(state);
            self.doorbell.ring();
        }
    }

    /// Has the reaper retry reclaiming memory that a device did not take back. One request at a
    /// time is enough, however late the reaper is.
    pub(super) fn request_reclaim(self: &Arc<Self>) {
        if unreclaimed::is_retry_due() && !self.is_reclaim_requested.swap(true, Ordering::AcqRel) {
            self.defer_drop(Box::new(ReclaimTask(self.clone())));
        }
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
        if let Err(mpsc::SendError(deferred)) = self.deferred.send(deferred) {
            // The reaper has ended. A leak is better than a driver call here.
            std::mem::forget(deferred);
        }
    }
}

/// Dropped by the reaper, it retries reclaiming memory that a device did not take back.
struct ReclaimTask(Arc<Reactor>);

impl Drop for ReclaimTask {
    fn drop(&mut self) {
        unreclaimed::retry_all();
        self.0.is_reclaim_requested.store(false, Ordering::Release);
    }
}
