//! A call that may wait for a peer, on a thread of its own: a stopped peer does not answer, and
//! the caller's thread has others to serve.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::doorbell::LocalDoorbell;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::fork::thread::Thread;
use crate::mutex::LockUnpoisoned;
use crate::runtime::reactor::catch_panic;
use crate::wait::Wait;

/// An attempt to reach the peer of a name. Dropped, it is cancelled.
#[derive(Debug)]
pub(crate) struct Attempt<T: Send + 'static> {
    /// The thread holds the other reference until it ends. Its join handle is not kept: dropped in
    /// a forked child, it would detach a thread of the child that has taken its place by then.
    shared: LeakOnFork<Arc<AttemptState<T>>>,
}

#[derive(Debug)]
struct AttemptState<T> {
    is_cancelled: AtomicBool,
    result: Mutex<Option<Result<T>>>,
    /// Ends what an attempt has made, unless it was taken.
    discard: fn(T),
}

impl<T: Send + 'static> Attempt<T> {
    /// Calls `reach`, which ends early once its argument is cancelled. Rings the doorbell when
    /// there is a result.
    pub(crate) fn start(
        name: &str,
        doorbell: Arc<LocalDoorbell>,
        reach: impl FnOnce(&Wait<'_>) -> Result<T> + Send + 'static,
        discard: fn(T),
    ) -> Result<Attempt<T>> {
        let shared = Arc::new(AttemptState {
            is_cancelled: AtomicBool::new(false),
            result: Mutex::new(None),
            discard,
        });
        let (state, name) = (shared.clone(), name.to_string());
        let run = move || {
            // A panic has ended the attempt: another one is due.
            let fault = HandshakeFault::Closed;
            let cancelled = || state.is_cancelled.load(SeqCst);
            let wait = Wait::at_most(Duration::MAX).unless(&cancelled);
            let reached = catch_panic(|| reach(&wait));
            let result = reached.unwrap_or(Err(Error::handshake(name, fault)));
            *state.result.locked() = Some(result);
            doorbell.ring();
        };
        Thread::start("warpipe-attach", run)?;
        let shared = LeakOnFork::new(shared);
        Ok(Attempt { shared })
    }

    /// The result of the attempt; returned once.
    pub(crate) fn result(&self) -> Option<Result<T>> {
        self.shared.result.locked().take()
    }
}

/// By its last owner: the attempt, or its thread.
impl<T> Drop for AttemptState<T> {
    fn drop(&mut self) {
        let result = self.result.locked().take();
        if let Some(Ok(made)) = result {
            (self.discard)(made);
        }
    }
}

impl<T: Send + 'static> Drop for Attempt<T> {
    fn drop(&mut self) {
        if let Ok(state) = self.shared.get() {
            state.is_cancelled.store(true, SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::{alone, in_a_forked_child};
    use std::sync::Barrier;

    #[test]
    fn a_forked_child_that_drops_an_attempt_of_its_parents_leaves_its_own_threads_alone() {
        let test =
            "a_forked_child_that_drops_an_attempt_of_its_parents_leaves_its_own_threads_alone";
        alone(module_path!(), test, || {
            let doorbell = Arc::new(LocalDoorbell::new().unwrap());
            let (go, wait) = std::sync::mpsc::channel::<()>();
            let reach = move |_: &Wait<'_>| Ok(wait.recv().is_err());
            let attempt = Attempt::start("a", doorbell, reach, drop).unwrap();
            let mut attempt = Some(attempt);
            in_a_forked_child(|| {
                // The C library gives these the stacks of the parent's threads, which do not exist
                // in the child.
                let all = Arc::new(Barrier::new(17));
                let wait = |all: Arc<Barrier>| std::thread::spawn(move || all.wait().is_leader());
                let threads: Vec<_> = (0..16).map(|_| wait(all.clone())).collect();
                drop(attempt.take());
                all.wait();
                threads.into_iter().all(|thread| thread.join().is_ok())
            });
            drop((attempt, go));
        });
    }
}
