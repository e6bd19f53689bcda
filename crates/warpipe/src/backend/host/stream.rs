//! A stream as a thread with a queue. **This module is marked for unsafe**: it accesses words by
//! address.
//!
//! Work is enqueued and runs later, on the stream's own thread, so that a reader that does not wait
//! reads too early, as on a GPU. Only memory operations may run at once: with an empty queue a
//! signal cannot be early, and a wait is over once its value is reached. That keeps the hand-over of
//! host data free of a thread switch.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use crate::backend::word::PARK_MAX;
use crate::backend::{DevicePtr, StreamOp, TimelineWord};
use crate::debug::opaque_debug;
use crate::error::{Error, Result};
use crate::fork::thread::Thread;
use crate::mutex::LockUnpoisoned;

/// The most queued operations; an enqueue beyond that waits for room.
const QUEUE_MAX: usize = 1 << 16;

/// The queue length of a driver-like stream: the launch queue of an H200.
const LAUNCH_QUEUE: usize = 1_020;

/// The limit for an enqueue's wait for room in a full queue.
const ROOM_TIMEOUT: Duration = Duration::from_secs(10);

/// The same limit for a driver-like stream. A driver waits for ever.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(120);

/// Checks of a word before its wait is queued: a sample is announced a moment before its `ready` is
/// stored, and queueing the wait for that time would cost two thread switches.
const LOOKS: u32 = 64;

/// One queued operation.
pub(super) enum Op {
    Call(Box<dyn FnOnce() + Send>),
    Memory(StreamOp),
    Record(Arc<HostEvent>, u64),
    Await(Arc<HostEvent>, u64),
}

/// An event: the count of its records, and a word that follows as they complete.
#[derive(Debug, Default)]
pub(super) struct HostEvent {
    recorded: AtomicU64,
    done: TimelineWord,
    /// Whether it counts as an interprocess event.
    pub(super) is_interprocess: bool,
}

impl HostEvent {
    pub(super) fn new(is_interprocess: bool) -> Arc<HostEvent> {
        Arc::new(HostEvent {
            is_interprocess,
            ..HostEvent::default()
        })
    }

    pub(super) fn next_turn(&self) -> u64 {
        self.recorded.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn last_turn(&self) -> u64 {
        self.recorded.load(Ordering::Relaxed)
    }

    pub(super) fn is_done(&self, turn: u64) -> bool {
        self.done.reached(turn)
    }
}

#[derive(Default)]
struct StreamQueue {
    ops: VecDeque<Op>,
    closed: bool,
}

/// A stream of the host backend.
pub(super) struct HostStream {
    /// Operations that are queued and not finished, counted before the queue's lock is released. A
    /// thread finds its own operations, and those that it knows to be enqueued, counted here; a
    /// thread that reads 0 (with acquire) sees all of them done. Work of two threads that do not
    /// know of each other has no order, so a thread may act on the 0 without the lock.
    unfinished: AtomicUsize,
    queue: Mutex<StreamQueue>,
    changed: Condvar,
    /// For a driver-like stream: locked by a call that enqueues or queries. Such a call waits for
    /// room in the queue, and all other calls for the stream wait for it.
    calls: Option<Mutex<()>>,
}

opaque_debug!(HostStream { unfinished });

impl HostStream {
    /// A new stream. One that `is_like_a_drivers` has a short queue, and blocks its callers when
    /// that is full.
    pub(super) fn start(is_like_a_drivers: bool) -> Result<Arc<HostStream>> {
        let stream = Arc::new(HostStream {
            unfinished: AtomicUsize::new(0),
            queue: Mutex::default(),
            changed: Condvar::new(),
            calls: is_like_a_drivers.then(Mutex::default),
        });
        let worker = stream.clone();
        Thread::start("warpipe-stream", move || worker.run())?;
        Ok(stream)
    }

    /// Ends the thread once the queue is empty.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) == 0
    }

    /// [`is_idle`](Self::is_idle), also for a thread that has seen the last event of its work
    /// complete.
    pub(super) fn has_finished(&self) -> bool {
        let _calls = self.calls();
        self.is_idle() || {
            // An event completes under the lock, and the count falls with it.
            let _completing = self.lock();
            self.is_idle()
        }
    }

    fn calls(&self) -> Option<MutexGuard<'_, ()>> {
        self.calls.as_ref().map(Mutex::locked)
    }

    pub(super) fn push(&self, op: Op) -> Result<()> {
        self.push_all(1, std::iter::once(op))
    }

    /// Enqueues all of `count` operations, or none.
    fn push_all(&self, count: usize, ops: impl Iterator<Item = Op>) -> Result<()> {
        let calls = self.calls();
        let (max, limit) = if calls.is_some() {
            (LAUNCH_QUEUE, LAUNCH_TIMEOUT)
        } else {
            (QUEUE_MAX, ROOM_TIMEOUT)
        };
        let queue = self.lock();
        let full = |queue: &mut StreamQueue| queue.ops.len() + count.min(max) > max;
        let (mut queue, waited) = self
            .changed
            .wait_timeout_while(queue, limit, full)
            .unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(Error::timeout("room in the stream's queue", limit));
        }
        queue.ops.extend(ops);
        self.unfinished.fetch_add(count, Ordering::Relaxed);
        self.changed.notify_all();
        Ok(())
    }

    /// Enqueues memory operations, or runs those at once that need not wait.
    ///
    /// # Safety
    /// Every word lies in memory that outlives the operation.
    #[inline]
    pub(super) unsafe fn batch(&self, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: the caller's promise for every word.
        let done = ops
            .iter()
            .take_while(|&&op| self.is_idle() && unsafe { try_now_or_soon(op) })
            .count();
        let rest = &ops[done..];
        if rest.is_empty() {
            return Ok(());
        }
        self.push_all(rest.len(), rest.iter().map(|&op| Op::Memory(op)))
    }

    /// Waits for the stream's work so far.
    #[inline]
    pub(super) fn wait_for_work(&self) -> Result<()> {
        if self.is_idle() {
            return Ok(());
        }
        let (done, wait) = mpsc::channel();
        self.push(Op::Call(Box::new(move || {
            let _ = done.send(());
        })))?;
        let stuck = |_| Error::timeout("the stream's earlier work", ROOM_TIMEOUT);
        wait.recv_timeout(ROOM_TIMEOUT).map_err(stuck)
    }

    fn run(&self) {
        loop {
            let mut queue = self.lock();
            while queue.ops.is_empty() {
                if queue.closed {
                    return;
                }
                queue = self
                    .changed
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            let op = queue.ops.pop_front();
            drop(queue);
            if let Some(op) = op {
                // A thread that sees the event complete and then queries the stream finds it no
                // longer counted.
                let _completing = matches!(op, Op::Record(..)).then(|| self.lock());
                // SAFETY: the caller that enqueued the operation promised that its memory outlives
                // it.
                unsafe { execute(op) };
                self.unfinished.fetch_sub(1, Ordering::Release);
            }
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, StreamQueue> {
        self.queue.locked()
    }
}

/// The word at a device address.
///
/// # Safety
/// `address` is that of a live [`TimelineWord`] in registered memory.
#[inline]
unsafe fn word_at<'a>(address: DevicePtr) -> &'a TimelineWord {
    // SAFETY: the caller's promise; the word is made of atomics, so sharing it with other processes
    // is sound.
    unsafe { &*(address as *const TimelineWord) }
}

/// Runs `op` if that needs no waiting; false if it must be queued.
///
/// # Safety
/// As for [`word_at`].
#[inline]
unsafe fn try_now(op: StreamOp) -> bool {
    match op {
        StreamOp::Signal { word, value } => {
            // SAFETY: the caller's promise.
            unsafe { word_at(word) }.store(value);
            true
        }
        // SAFETY: as above.
        StreamOp::Wait { word, value } => unsafe { word_at(word) }.reached(value),
    }
}

/// [`try_now`], with repeated checks of a word that is about to be stored.
///
/// # Safety
/// As for [`word_at`].
#[inline]
unsafe fn try_now_or_soon(op: StreamOp) -> bool {
    for _ in 0..LOOKS {
        // SAFETY: the caller's promise.
        if unsafe { try_now(op) } {
            return true;
        }
        std::hint::spin_loop();
    }
    false
}

/// Runs one operation on the stream's thread.
///
/// # Safety
/// The memory that the operation names is valid for it.
unsafe fn execute(op: Op) {
    match op {
        // A panic in a user's function must not end the stream's thread; the work after it still
        // runs.
        Op::Call(function) => drop(std::panic::catch_unwind(std::panic::AssertUnwindSafe(
            function,
        ))),
        Op::Memory(op) => {
            // SAFETY: the caller's promise for the word.
            while !unsafe { try_now(op) } {
                if let StreamOp::Wait { word, value } = op {
                    // SAFETY: as above.
                    unsafe { word_at(word) }.park(value, PARK_MAX);
                }
            }
        }
        Op::Record(event, turn) => event.done.store(turn),
        Op::Await(event, turn) => {
            while !event.is_done(turn) {
                event.done.park(turn, PARK_MAX);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sees_a_streams_last_event_complete_finds_it_idle() {
        let stream = HostStream::start(false).unwrap();
        // Waking them takes the stream's thread a while, between the event and its count.
        let waiters: Vec<_> = (0..8).map(|_| HostStream::start(false).unwrap()).collect();
        for _ in 0..200 {
            let event = Arc::new(HostEvent::default());
            let turn = event.next_turn();
            let (go, wait) = mpsc::channel::<()>();
            stream
                .push(Op::Call(Box::new(move || assert!(wait.recv().is_err()))))
                .unwrap();
            stream.push(Op::Record(event.clone(), turn)).unwrap();
            waiters
                .iter()
                .for_each(|waiter| waiter.push(Op::Await(event.clone(), turn)).unwrap());
            (0..50).for_each(|_| std::thread::yield_now());
            drop(go);
            while !event.is_done(turn) {
                std::hint::spin_loop();
            }
            assert!(stream.has_finished());
        }
        stream.close();
        waiters.iter().for_each(|waiter| waiter.close());
    }
}
