//! The queue of changes that are not yet taken. It is bounded, and neither a hostile member nor a
//! slow listener holds up the watch.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};

use super::{Change, MEMBERS_MAX, MemberInfo};
use crate::error::Result;
use crate::mutex::LockUnpoisoned;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::reactor::catch_panic;
use crate::wait::Wait;

/// The most changes that wait. This is more than twice the members: merging always brings the queue
/// below it.
const CHANGES_MAX: usize = 4 * MEMBERS_MAX;

/// Called with each change.
pub(super) type Callback = Box<dyn FnMut(&Change) + Send>;

/// Called once a member has died.
pub(super) type Cleanup = Box<dyn FnOnce(&MemberInfo) + Send>;

/// Changes on their way to the caller or the callbacks.
pub(super) struct ChangeQueue {
    state: Mutex<ChangeQueueState>,
    changed: Condvar,
    /// Readable while changes wait.
    pub(super) doorbell: LocalDoorbell,
}

#[derive(Default)]
struct ChangeQueueState {
    changes: VecDeque<Change>,
    cleanups: VecDeque<(Cleanup, MemberInfo)>,
    merged: u64,
    is_closed: bool,
}

impl ChangeQueue {
    pub(super) fn new() -> Result<ChangeQueue> {
        Ok(ChangeQueue {
            state: Mutex::default(),
            changed: Condvar::new(),
            doorbell: LocalDoorbell::new()?,
        })
    }

    pub(super) fn push(&self, change: Change) {
        let mut state = self.state.locked();
        state.push(change, CHANGES_MAX);
        self.doorbell.ring();
        self.changed.notify_all();
    }

    /// Queues a clean-up for the callback thread.
    pub(super) fn push_cleanup(&self, cleanup: Cleanup, of: MemberInfo) {
        self.state.locked().cleanups.push_back((cleanup, of));
        self.changed.notify_all();
    }

    /// The next change; `None` when the wait is over or the watch has ended.
    pub(super) fn take(&self, wait: &Wait<'_>) -> Option<Change> {
        let is_idle = |state: &mut ChangeQueueState| state.changes.is_empty() && !state.is_closed;
        let mut state = self.state.locked();
        while is_idle(&mut state) {
            // The wait is asked whether it is cancelled before each sleep and before anything is taken,
            // and without the lock.
            drop(state);
            let pause = wait.slice();
            if pause.is_zero() {
                return None;
            }
            let slept = self
                .changed
                .wait_timeout_while(self.state.locked(), pause, is_idle);
            drop(slept);
            if wait.is_cancelled() {
                return None;
            }
            state = self.state.locked();
        }
        let change = state.changes.pop_front()?;
        if state.changes.is_empty() {
            self.doorbell.drain();
        }
        Some(change)
    }

    pub(super) fn merged(&self) -> u64 {
        self.state.locked().merged
    }

    /// Ends the queue: changes that wait are dropped.
    pub(super) fn close(&self) {
        let mut state = self.state.locked();
        state.is_closed = true;
        let changes = std::mem::take(&mut state.changes);
        let dropped = (changes, std::mem::take(&mut state.cleanups));
        drop(state);
        self.changed.notify_all();
        drop(dropped);
    }

    /// Runs the callback and clean-ups until the queue is closed. A panic in one ends that call
    /// alone (the panic hook has shown it).
    pub(super) fn serve(&self, mut callback: Option<Callback>) {
        let mut state = self.state.locked();
        while !state.is_closed {
            // Clean-ups come before changes: they are done when a death is reported.
            if let Some((cleanup, member)) = state.cleanups.pop_front() {
                drop(state);
                catch_panic(|| cleanup(&member));
            } else if let Some(callback) = &mut callback
                && let Some(change) = state.changes.pop_front()
            {
                drop(state);
                catch_panic(|| callback(&change));
            } else {
                let waited = self.changed.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state = self.state.locked();
        }
    }
}

impl ChangeQueueState {
    fn push(&mut self, change: Change, most: usize) {
        if self.changes.len() >= most {
            let before = self.changes.len();
            self.merge();
            // Only members that lie about their incarnations reach this limit.
            while self.changes.len() >= most {
                self.changes.pop_front();
            }
            self.merged += (before - self.changes.len()) as u64;
        }
        self.changes.push_back(change);
    }

    /// Drops changes that later ones cancel: a heartbeat that stalled and recovered, and members
    /// that joined and left meanwhile. At most one change remains for each member that is present,
    /// and one for each member that was reported.
    fn merge(&mut self) {
        self.changes.retain(|change| !change.is_of_heartbeat());
        let generations = |which: fn(&Change) -> bool| -> std::collections::HashSet<[u8; 16]> {
            self.changes
                .iter()
                .filter(|change| which(change))
                .map(|change| change.member().generation)
                .collect()
        };
        let ended = generations(Change::is_end);
        let joined = generations(|change| matches!(change, Change::Joined(_)));
        self.changes.retain(|change| {
            let generation = &change.member().generation;
            !(ended.contains(generation) && joined.contains(generation))
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::ipc::PeerState;

    fn member(number: u8) -> MemberInfo {
        MemberInfo {
            name: format!("m{number}"),
            role: String::new(),
            pid: 1,
            uid: 0,
            state: PeerState::Alive,
            silent_for: Duration::ZERO,
            since_ns: 0,
            generation: [number; 16],
            endpoints: Vec::new(),
        }
    }

    #[test]
    fn a_full_queue_merges_heartbeats_and_short_lived_members_and_keeps_ends_of_known_members() {
        let mut state = ChangeQueueState::default();
        let changes = [
            Change::Died(member(1)),
            Change::Joined(member(2)),
            Change::Stalled(member(3)),
            Change::Left(member(2)),
            Change::Recovered(member(3)),
            Change::Joined(member(4)),
        ];
        changes.into_iter().for_each(|change| state.push(change, 6));
        assert_eq!((state.changes.len(), state.merged), (6, 0));
        state.push(Change::Left(member(4)), 6);
        let left: Vec<Change> = state.changes.into();
        assert_eq!(
            left,
            [
                Change::Died(member(1)),
                Change::Joined(member(4)),
                Change::Left(member(4))
            ]
        );
        assert_eq!(state.merged, 4);
    }

    #[test]
    fn a_panic_of_a_callback_does_not_affect_the_next_change() {
        let queue = Arc::new(ChangeQueue::new().unwrap());
        let (heard, hears) = channel();
        let mut is_first = true;
        let callback: Callback = Box::new(move |change| {
            heard.send(change.clone()).unwrap();
            if std::mem::take(&mut is_first) {
                panic!("a callback's own fault, shown by the hook")
            }
        });
        let server = std::thread::spawn({
            let queue = queue.clone();
            move || queue.serve(Some(callback))
        });
        for number in [1, 2] {
            queue.push(Change::Joined(member(number)));
            assert_eq!(
                hears.recv_timeout(Duration::from_secs(10)).unwrap(),
                Change::Joined(member(number))
            );
        }
        queue.close();
        server.join().unwrap();
    }

    #[test]
    fn closing_a_queue_ends_waits() {
        let queue = Arc::new(ChangeQueue::new().unwrap());
        let waiting = std::thread::spawn({
            let queue = queue.clone();
            move || queue.take(&Duration::from_secs(60).into())
        });
        queue.close();
        assert_eq!(waiting.join().unwrap(), None);
    }
}
