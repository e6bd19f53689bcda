//! A stream with a full launch queue, for tests: a call that enqueues memory operations there
//! blocks until it is unblocked.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Backend, Hook, RawStream, StreamOp, Wrapped};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Longer than any test; a call that is blocked for longer fails.
const PATIENCE: Duration = Duration::from_secs(120);

/// Blocks the calls that enqueue memory operations on one stream.
#[derive(Debug, Default)]
pub(crate) struct FullQueue {
    state: Mutex<FullQueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct FullQueueState {
    held: Held,
    waiting: u32,
    fails: bool,
}

/// The calls that block.
#[derive(Debug, Default, PartialEq, Eq)]
enum Held {
    #[default]
    None,
    /// Calls for the stream with this handle.
    Of(usize),
    /// Calls that enqueue a wait.
    Waits,
}

impl FullQueue {
    /// A host device with such a hook.
    pub(crate) fn device() -> (Arc<Wrapped<FullQueue>>, Device) {
        let wrapped = Wrapped::new(Device::host().backend().clone(), FullQueue::default());
        (wrapped.clone(), Device::from_backend(wrapped))
    }

    fn lock(&self) -> MutexGuard<'_, FullQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on, calls for `stream` block.
    pub(crate) fn hold(&self, stream: &Stream) {
        *self.lock() = FullQueueState {
            held: Held::Of(stream.raw().0.addr()),
            ..FullQueueState::default()
        };
    }

    /// From now on, calls that enqueue a wait for a word block.
    pub(crate) fn hold_waits(&self) {
        *self.lock() = FullQueueState {
            held: Held::Waits,
            ..FullQueueState::default()
        };
    }

    /// Waits until a call is blocked.
    pub(crate) fn wait_until_held_up(&self) {
        let is_free = |state: &mut FullQueueState| state.waiting == 0;
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), PATIENCE, is_free);
        assert!(
            !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out(),
            "no call comes"
        );
    }

    /// Unblocks the calls.
    pub(crate) fn unblock(&self) {
        self.lock().held = Held::None;
        self.changed.notify_all();
    }

    /// Unblocks the calls; those that are blocked now fail.
    pub(crate) fn fail(&self) {
        let mut state = self.lock();
        (state.held, state.fails) = (Held::None, state.waiting > 0);
        drop(state);
        self.changed.notify_all();
    }
}

impl Hook for FullQueue {
    fn before(&self, _method: &'static str) -> Result<()> {
        Ok(())
    }

    fn batch(&self, _: &dyn Backend, stream: RawStream, ops: &[StreamOp]) -> Result<Vec<StreamOp>> {
        let mut state = self.lock();
        let is_meant = match state.held {
            Held::None => false,
            Held::Of(held) => held == stream.0.addr(),
            Held::Waits => ops.iter().any(|op| matches!(op, StreamOp::Wait { .. })),
        };
        if !is_meant {
            return Ok(ops.to_vec());
        }
        state.waiting += 1;
        self.changed.notify_all();
        let is_held = |state: &mut FullQueueState| state.held != Held::None;
        let held = self.changed.wait_timeout_while(state, PATIENCE, is_held);
        let (mut state, waited) = held.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        let fails = waited.timed_out() || state.fails;
        state.fails &= state.waiting > 0;
        if fails {
            Err(Error::injected("batch", 1))
        } else {
            Ok(ops.to_vec())
        }
    }
}
