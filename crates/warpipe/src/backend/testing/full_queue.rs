//! A stream whose launch queue is full, for tests: a call that gives it memory operations waits until it is let go.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Backend, Hook, RawStream, StreamOp, Wrapped};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Longer than any test; after that a call fails.
const PATIENCE: Duration = Duration::from_secs(120);

/// Holds up the calls that give one stream memory operations.
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

/// Which calls wait.
#[derive(Debug, Default, PartialEq, Eq)]
enum Held {
    #[default]
    None,
    /// Those for the stream with this handle.
    Of(usize),
    /// Those that make a stream wait.
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

    /// From now on, calls for `stream` wait.
    pub(crate) fn hold(&self, stream: &Stream) {
        *self.lock() = FullQueueState {
            held: Held::Of(stream.raw().0.addr()),
            ..FullQueueState::default()
        };
    }

    /// From now on, calls wait that make a stream wait for a word.
    pub(crate) fn hold_waits(&self) {
        *self.lock() = FullQueueState {
            held: Held::Waits,
            ..FullQueueState::default()
        };
    }

    /// Waits until a call does.
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

    /// Lets them go on.
    pub(crate) fn unblock(&self) {
        self.lock().held = Held::None;
        self.changed.notify_all();
    }

    /// Lets them go on, and those that wait now fail.
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
            Err(Error::Injected {
                method: "batch",
                call: 1,
            })
        } else {
            Ok(ops.to_vec())
        }
    }
}
