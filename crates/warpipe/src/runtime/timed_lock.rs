//! A lock that is held across driver calls, which a full launch queue holds up for as long as a
//! stream waits: the [turn](super::turn) of what has no other state. Any other caller waits no
//! longer than its own limit.

use std::time::Duration;

use super::turn::{TurnGuard, TurnLock, TurnState, TurnWait};
use crate::error::Result;

pub(crate) use super::turn::TURN_TIMEOUT as LOCK_TIMEOUT;

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct TimedLock(TurnLock<TurnState>);

/// The lock, held until this is dropped.
#[derive(Debug)]
pub(crate) struct TimedGuard<'a> {
    _turn: TurnGuard<'a, TurnState>,
}

impl TimedLock {
    /// Takes the lock within `limit`. The error says that another thread's `what` is held up.
    pub(crate) fn lock(
        &self,
        limit: Duration,
        what: impl Fn() -> String,
    ) -> Result<TimedGuard<'_>> {
        let mut turn = self.0.take(&mut TurnWait::within(Some(limit)), what)?;
        turn.unlock();
        Ok(TimedGuard { _turn: turn })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_lock_is_waited_for_as_long_as_its_caller_says_and_comes_when_it_is_free() {
        let lock = TimedLock::default();
        let held = lock.lock(Duration::ZERO, String::new).unwrap();
        for limit in [Duration::ZERO, Duration::from_millis(5)] {
            let late = lock.lock(limit, || "call".into()).unwrap_err();
            assert!(
                matches!(late, Error::Timeout { waited, .. } if waited == limit),
                "{late}"
            );
        }
        std::thread::scope(|scope| {
            let waiting = [0; 3]
                .map(|_| scope.spawn(|| lock.lock(Duration::from_secs(60), String::new).map(drop)));
            drop(held);
            waiting
                .into_iter()
                .for_each(|waiting| waiting.join().unwrap().unwrap());
        });
        lock.lock(Duration::ZERO, String::new).unwrap();
    }
}
