//! The thread of a queue that delivers jobs that waited and have data that is not complete.
//!
//! Such a delivery enqueues a wait for the data on a stream of the queue, and the driver holds the
//! call up while that stream's launch queue is full. Every other thread that does the queue's work
//! has a timeout to keep, or is the queue's own thread, which receives answers and notifies event
//! loops: they leave such a job to this thread. It starts when it is first needed and ends with the
//! queue. Where the system refuses a thread, the job waits until its data is complete, when any
//! thread can deliver it, or until a later look starts the thread.

use std::sync::Arc;
use std::time::Duration;

use super::{Dispatcher, State, StateGuard};

/// The longest sleep: a request wakes the thread.
const IDLE_INTERVAL: Duration = Duration::from_secs(10);

/// The state of the thread, under the queue's lock.
#[derive(Debug, Default)]
pub(in crate::queue) struct DeliveryThread {
    is_running: bool,
    /// There is a job for the thread, which has not begun with it.
    is_requested: bool,
}

impl State {
    /// Whether a thread delivers a job, or the delivery thread is about to.
    pub(in crate::queue) fn is_delivery_due(&self) -> bool {
        self.table.is_delivering() || self.delivery_thread.is_requested
    }
}

/// The run of the thread. If a call of the driver panics, the next request starts another thread,
/// and the job is given out again.
struct Run<'a>(&'a Dispatcher);

impl Drop for Run<'_> {
    fn drop(&mut self) {
        let mut guard = self.0.lock();
        guard.delivery_thread = DeliveryThread::default();
        self.0.notify_submitters(&mut guard.waiters);
    }
}

impl Dispatcher {
    /// Has the delivery thread deliver the first job that waits.
    pub(in crate::queue) fn request_delivery(self: &Arc<Self>, guard: &mut StateGuard<'_>) {
        let thread = &mut guard.delivery_thread;
        if std::mem::replace(&mut thread.is_requested, true) {
            return;
        }
        if std::mem::replace(&mut thread.is_running, true) {
            self.delivery_requested.notify_one();
            return;
        }
        let dispatcher = self.clone();
        let spawned = std::thread::Builder::new()
            .name("warpipe-deliver".into())
            .spawn(move || dispatcher.run_deliveries());
        if spawned.is_err() {
            guard.delivery_thread = DeliveryThread::default();
        }
    }

    /// The body of the delivery thread.
    fn run_deliveries(self: Arc<Self>) {
        let _run = Run(&self);
        let mut guard = self.lock();
        while !guard.table.is_closed() {
            if std::mem::take(&mut guard.delivery_thread.is_requested) {
                self.process(&mut guard, true);
                // The lease may expire before any other thread's next look.
                self.keep_next_look(&guard);
                // The request may have come to nothing: the data is complete, or the worker left.
                if guard.waiters.delivery_is_over() {
                    self.notify_submitters(&mut guard.waiters);
                }
            } else {
                guard.sleep(&self.delivery_requested, IDLE_INTERVAL);
            }
        }
    }
}
