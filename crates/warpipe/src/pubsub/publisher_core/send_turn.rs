//! One thread of a publisher sends at a time, by a [`TimedLock`](crate::runtime::timed_lock) that
//! keeps the order of samples: its holder finds places, publishes entries, and enqueues signals
//! without the lock of the state. All other threads may read the state, take samples back and free
//! slots meanwhile.

use std::sync::MutexGuard;

use super::PublisherCore;
use super::state::PublisherState;
use crate::error::Result;
use crate::runtime::releasable::ReleasableGuard;
use crate::runtime::timed_lock::{LOCK_TIMEOUT, TimedGuard};
use crate::wait::Wait;

/// The right to send. The state is locked except during driver calls: links may leave and end
/// meanwhile, places and history stay.
pub(super) struct SendTurn<'a> {
    core: &'a PublisherCore,
    /// Declared before the lock for sending: unlocked before that.
    pub(super) state: ReleasableGuard<'a, PublisherState>,
    _sending: TimedGuard<'a>,
}

impl<'a> SendTurn<'a> {
    pub(super) fn begin(
        core: &'a PublisherCore,
        sending: TimedGuard<'a>,
        mut state: MutexGuard<'a, PublisherState>,
    ) -> SendTurn<'a> {
        state.is_sending = true;
        SendTurn {
            core,
            state: ReleasableGuard::new(&core.state, state),
            _sending: sending,
        }
    }
}

impl Drop for SendTurn<'_> {
    /// Gives the history to the links that came during the send. Then the turn is over.
    #[inline]
    fn drop(&mut self) {
        self.state.relock();
        self.state.is_sending = false;
        if self.state.history.has_joiners {
            self.core.replay(&mut self.state);
        }
    }
}

impl PublisherCore {
    /// Takes the lock for sending.
    #[inline]
    pub(super) fn lock_sending(&self, wait: Option<&Wait<'_>>) -> Result<TimedGuard<'_>> {
        let what = || format!("send of {:?}", self.name);
        match wait {
            Some(wait) => self.send_lock.lock_for_a_send(wait, what),
            None => self.send_lock.lock_for_a_send(LOCK_TIMEOUT, what),
        }
    }
}
