//! One thread of a publisher sends at a time, and it calls the driver without the publisher's lock.
//!
//! A call that gives a stream work blocks while the stream's launch queue is full, for as long as
//! the stream waits for a peer. The reactor, which releases such a stream when that peer dies,
//! takes the publisher's lock with every tick, and the control thread takes it for every subscriber
//! event. So the lock is never held across such a call. The send turn keeps the order of samples
//! instead: its holder finds places, publishes entries and enqueues signals. All other threads may
//! read the state, take samples back and free slots meanwhile.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use super::{PublisherCore, PublisherState};
use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::stream::Backoff;

/// How long a sender without a limit of its own waits for another thread's send, which a full
/// launch queue may block.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// A shorter limit of that wait, zero too, counts as this: a send takes microseconds unless the
/// driver blocks it, but its thread may not be scheduled just now.
const MOMENT: Duration = Duration::from_millis(10);

/// Polls for the turn before the thread sleeps: a send takes a microsecond.
const TURN_LOOKS: u32 = 2_000;

/// Counts the turns that were taken and those that are over. A deferred drop waits for the sends
/// that may still signal its memory, because they may not have enqueued their signals yet.
///
/// Both are written under the publisher's lock, so neither needs a locked bus instruction.
#[derive(Debug, Default)]
pub(super) struct SendTurns {
    begun: AtomicU64,
    over: AtomicU64,
}

impl SendTurns {
    /// The last turn so far. Called under the publisher's lock.
    pub(super) fn last(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    fn begin(&self) {
        self.begun
            .store(self.begun.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    fn end(&self) {
        self.over
            .store(self.over.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// Whether this turn and all turns before it are over.
    pub(super) fn is_over(&self, turn: u64) -> bool {
        self.over.load(Ordering::Acquire) >= turn
    }
}

/// The right to send. The state is locked except during driver calls: see [`SendTurn::unlocked`].
pub(super) struct SendTurn<'a> {
    core: &'a PublisherCore,
    state: Option<MutexGuard<'a, PublisherState>>,
}

impl<'a> SendTurn<'a> {
    /// Takes the turn, which must be free.
    pub(super) fn begin(
        core: &'a PublisherCore,
        mut state: MutexGuard<'a, PublisherState>,
    ) -> SendTurn<'a> {
        debug_assert!(!state.is_sending);
        state.is_sending = true;
        core.turns.begin();
        SendTurn {
            core,
            state: Some(state),
        }
    }

    /// Makes a driver call without the lock. Links may leave and end meanwhile; places and history
    /// stay.
    #[inline]
    pub(super) fn unlocked<T>(&mut self, call: impl FnOnce() -> T) -> T {
        drop(self.state.take());
        let made = call();
        self.state = Some(self.core.lock());
        made
    }
}

impl Deref for SendTurn<'_> {
    type Target = PublisherState;

    #[inline]
    fn deref(&self) -> &PublisherState {
        self.state.as_ref().expect("locked but for `unlocked`")
    }
}

impl DerefMut for SendTurn<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut PublisherState {
        self.state.as_mut().expect("locked but for `unlocked`")
    }
}

impl Drop for SendTurn<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.state.is_none() {
            // The driver call panicked.
            self.state = Some(self.core.lock());
        }
        let core = self.core;
        if !self.joiners.is_empty() {
            core.replay(self);
        }
        self.is_sending = false;
        let others_wait = self.awaiting_turn > 0;
        core.turns.end();
        drop(self.state.take());
        if others_wait {
            self.core.turn_is_over.notify_all();
        }
    }
}

/// One thread's wait for the turn.
pub(super) struct SendTurnWait {
    /// Limit of the whole wait. `None` means [`TURN_TIMEOUT`] for each turn of another thread.
    limit: Option<Duration>,
    turn: u64,
    clock: Stopwatch,
    backoff: Backoff,
}

impl SendTurnWait {
    pub(super) fn within(limit: Option<Duration>) -> SendTurnWait {
        SendTurnWait {
            limit,
            turn: 0,
            clock: Stopwatch::default(),
            backoff: Backoff::spinning(TURN_LOOKS),
        }
    }
}

impl PublisherCore {
    /// Waits for a while for the turn, which another thread holds.
    #[cold]
    pub(super) fn wait_for_send_turn<'a>(
        &'a self,
        mut state: MutexGuard<'a, PublisherState>,
        wait: &mut SendTurnWait,
    ) -> Result<MutexGuard<'a, PublisherState>> {
        let turn = self.turns.last();
        if wait.limit.is_none() && wait.turn != turn {
            *wait = SendTurnWait {
                turn,
                ..SendTurnWait::within(None)
            };
        }
        if wait.backoff.step().is_zero() {
            drop(state);
            (0..8).for_each(|_| std::hint::spin_loop());
            return Ok(self.lock());
        }
        let limit = wait.limit.unwrap_or(TURN_TIMEOUT);
        let left = limit.max(MOMENT).saturating_sub(wait.clock.elapsed());
        if left.is_zero() {
            let what = format!(
                "another thread's send of {:?}, which the driver holds up",
                self.name
            );
            return Err(Error::Timeout {
                what,
                waited: limit,
            });
        }
        state.awaiting_turn += 1;
        let waited = self.turn_is_over.wait_timeout(state, left);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.awaiting_turn -= 1;
        Ok(state)
    }

    /// Takes the turn as soon as it is free.
    pub(super) fn take_send_turn(&self) -> Result<SendTurn<'_>> {
        let mut wait = SendTurnWait::within(None);
        let mut state = self.lock();
        while state.is_sending {
            state = self.wait_for_send_turn(state, &mut wait)?;
        }
        Ok(SendTurn::begin(self, state))
    }
}
