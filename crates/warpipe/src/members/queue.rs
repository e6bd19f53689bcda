//! What is told and not yet heard: bounded, and nobody who is told of here, or who does not listen, holds up the watch.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Change, MEMBERS_MAX, MemberInfo};
use crate::error::Result;
use crate::link::wake::Bell;

/// Changes that wait. More than twice the members: whatever can be merged has been merged before this is not enough.
const CHANGES_MAX: usize = 4 * MEMBERS_MAX;

/// What is called with each change.
pub(super) type Callback = Box<dyn FnMut(&Change) + Send>;

/// What is called once a member has died.
pub(super) type Cleanup = Box<dyn FnOnce(&MemberInfo) + Send>;

/// Changes on their way to who takes them.
pub(super) struct Queue {
    inside: Mutex<Inside>,
    news: Condvar,
    /// Readable while changes wait.
    pub(super) bell: Bell,
}

#[derive(Default)]
struct Inside {
    changes: VecDeque<Change>,
    cleanups: VecDeque<(Cleanup, MemberInfo)>,
    merged: u64,
    is_closed: bool,
}

impl Queue {
    pub(super) fn new() -> Result<Queue> {
        Ok(Queue { inside: Mutex::default(), news: Condvar::new(), bell: Bell::new()? })
    }

    pub(super) fn push(&self, change: Change) {
        let mut inside = self.lock();
        inside.push(change, CHANGES_MAX);
        self.bell.ring();
        self.news.notify_all();
    }

    /// Leaves a clean-up to the thread of the callbacks.
    pub(super) fn push_cleanup(&self, cleanup: Cleanup, of: MemberInfo) {
        self.lock().cleanups.push_back((cleanup, of));
        self.news.notify_all();
    }

    /// The next change, once there is one; `None` when `timeout` has run out or the watch has ended.
    pub(super) fn take(&self, timeout: Duration) -> Option<Change> {
        let start = Instant::now();
        let mut inside = self.lock();
        loop {
            if let Some(change) = inside.changes.pop_front() {
                if inside.changes.is_empty() {
                    self.bell.drain();
                }
                return Some(change);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() || inside.is_closed {
                return None;
            }
            inside = self.news.wait_timeout(inside, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Puts back a change that was taken and not used: the next one to be taken.
    pub(super) fn put_back(&self, change: Change) {
        let mut inside = self.lock();
        if inside.is_closed {
            return;
        }
        inside.changes.push_front(change);
        self.bell.ring();
        self.news.notify_all();
    }

    pub(super) fn merged(&self) -> u64 {
        self.lock().merged
    }

    /// Nothing more will come, and what waits is not told.
    pub(super) fn close(&self) {
        let mut inside = self.lock();
        inside.is_closed = true;
        let dropped = (std::mem::take(&mut inside.changes), std::mem::take(&mut inside.cleanups));
        drop(inside);
        self.news.notify_all();
        drop(dropped);
    }

    /// Calls whoever is to be called, until the queue is closed. A panic of theirs ends their call and nothing else (the
    /// panic hook has shown it).
    pub(super) fn serve(self: Arc<Self>, mut callbacks: Vec<Callback>) {
        while let Some(task) = self.next_task(!callbacks.is_empty()) {
            match task {
                Task::Cleanup(cleanup, member) => drop(catch_unwind(AssertUnwindSafe(|| cleanup(&member)))),
                Task::Tell(change) => {
                    for callback in &mut callbacks {
                        let _panicked = catch_unwind(AssertUnwindSafe(|| callback(&change)));
                    }
                }
            }
        }
    }

    /// Clean-ups come before changes: who hears of a death finds them done.
    fn next_task(&self, tells: bool) -> Option<Task> {
        let mut inside = self.lock();
        loop {
            if inside.is_closed {
                return None;
            }
            if let Some((cleanup, member)) = inside.cleanups.pop_front() {
                return Some(Task::Cleanup(cleanup, member));
            }
            if tells && let Some(change) = inside.changes.pop_front() {
                return Some(Task::Tell(change));
            }
            inside = self.news.wait(inside).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Task {
    Cleanup(Cleanup, MemberInfo),
    Tell(Change),
}

impl Inside {
    fn push(&mut self, change: Change, most: usize) {
        if self.changes.len() >= most {
            let before = self.changes.len();
            self.merge();
            // Only members that lie about their incarnations come this far.
            while self.changes.len() >= most {
                self.changes.pop_front();
            }
            self.merged += (before - self.changes.len()) as u64;
        }
        self.changes.push_back(change);
    }

    /// Leaves out what nobody needs to hear any more: that a heart stood still and went on, and who has come and gone
    /// meanwhile. What is left is at most one change for each member that is there, and one for each that was heard of.
    fn merge(&mut self) {
        self.changes.retain(|change| !change.is_of_the_heart());
        let generations = |which: fn(&Change) -> bool| -> std::collections::HashSet<[u8; 16]> {
            self.changes.iter().filter(|change| which(change)).map(|change| change.member().generation).collect()
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
    use std::sync::mpsc::channel;

    use super::*;
    use crate::link::PeerState;

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
    fn a_full_queue_leaves_out_heartbeats_and_who_has_come_and_gone_but_no_end_of_who_was_heard_of() {
        let mut inside = Inside::default();
        let changes = [
            Change::Died(member(1)),
            Change::Joined(member(2)),
            Change::Stalled(member(3)),
            Change::Left(member(2)),
            Change::Recovered(member(3)),
            Change::Joined(member(4)),
        ];
        changes.into_iter().for_each(|change| inside.push(change, 6));
        assert_eq!((inside.changes.len(), inside.merged), (6, 0));
        inside.push(Change::Left(member(4)), 6);
        let left: Vec<Change> = inside.changes.into();
        assert_eq!(left, [Change::Died(member(1)), Change::Joined(member(4)), Change::Left(member(4))]);
        assert_eq!(inside.merged, 4);
    }

    #[test]
    fn a_callback_that_panics_keeps_neither_the_others_nor_the_next_change_from_being_heard() {
        let queue = Arc::new(Queue::new().unwrap());
        let (heard, hears) = channel();
        let callbacks: Vec<Callback> = vec![
            Box::new(|_| panic!("a callback's own fault, shown by the hook")),
            Box::new(move |change| heard.send(change.clone()).unwrap()),
        ];
        let server = std::thread::spawn({
            let queue = queue.clone();
            move || queue.serve(callbacks)
        });
        for number in [1, 2] {
            queue.push(Change::Joined(member(number)));
            assert_eq!(hears.recv_timeout(Duration::from_secs(10)).unwrap(), Change::Joined(member(number)));
        }
        queue.close();
        server.join().unwrap();
    }

    #[test]
    fn a_closed_queue_lets_go_of_who_waits() {
        let queue = Arc::new(Queue::new().unwrap());
        let waiting = std::thread::spawn({
            let queue = queue.clone();
            move || queue.take(Duration::from_secs(60))
        });
        queue.close();
        assert_eq!(waiting.join().unwrap(), None);
    }
}
