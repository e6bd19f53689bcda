//! One thread of a publisher sends at a time, and it calls the driver without the publisher's lock.
//!
//! The reactor takes the publisher's lock with every tick, and the control thread takes it for
//! every subscriber event, so a [turn] keeps the order of samples: its holder finds places,
//! publishes entries and enqueues signals. All other threads may read the state, take samples back
//! and free slots meanwhile.
//!
//! [turn]: crate::runtime::turn

use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;
use std::time::Duration;

use super::PublisherCore;
use super::state::PublisherState;
use crate::error::Result;
use crate::runtime::turn::{TurnGuard, TurnWait};

/// A shorter limit of a wait for the turn, zero too, counts as this: a send takes microseconds
/// unless the driver blocks it, but its thread may not be scheduled just now.
const MOMENT: Duration = Duration::from_millis(10);

/// Polls for the turn before the thread sleeps: a send takes a microsecond.
const TURN_POLLS: u32 = 2_000;

/// The right to send. The state is locked except during driver calls: see [`SendTurn::unlocked`].
pub(super) struct SendTurn<'a> {
    core: &'a PublisherCore,
    turn: TurnGuard<'a, PublisherState>,
}

impl<'a> SendTurn<'a> {
    /// Takes the turn, which must be free.
    pub(super) fn begin(
        core: &'a PublisherCore,
        state: MutexGuard<'a, PublisherState>,
    ) -> SendTurn<'a> {
        let turn = core.state.begin(state);
        SendTurn { core, turn }
    }

    /// Makes a driver call without the lock. Links may leave and end meanwhile; places and history
    /// stay.
    #[inline]
    pub(super) fn unlocked<T>(&mut self, call: impl FnOnce() -> T) -> T {
        self.turn.unlocked(call)
    }
}

impl Deref for SendTurn<'_> {
    type Target = PublisherState;

    #[inline]
    fn deref(&self) -> &PublisherState {
        &self.turn
    }
}

impl DerefMut for SendTurn<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut PublisherState {
        &mut self.turn
    }
}

impl Drop for SendTurn<'_> {
    /// Gives the history to the links that came during the send. Then the turn is over.
    #[inline]
    fn drop(&mut self) {
        self.turn.relock();
        if self.turn.history.has_joiners() {
            self.core.replay(&mut self.turn);
        }
    }
}

/// One thread's wait for the turn.
pub(super) fn send_turn_wait(limit: Option<Duration>) -> TurnWait {
    TurnWait::within(limit).polling(TURN_POLLS, MOMENT)
}

impl PublisherCore {
    /// The purpose of the turn, in the error of a wait for it.
    pub(super) fn send_of(&self) -> String {
        format!("send of {:?}", self.name)
    }

    /// Takes the turn as soon as it is free.
    pub(super) fn take_send_turn(&self) -> Result<SendTurn<'_>> {
        let mut wait = send_turn_wait(None);
        let turn = self.state.take(&mut wait, || self.send_of())?;
        Ok(SendTurn { core: self, turn })
    }
}
