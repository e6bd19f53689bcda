//! How long a wait polls before it sleeps.
//!
//! Polling for some microseconds saves the cost of a wake-up if the peer runs on another core. If
//! both share a core, the peer cannot run while this end polls: each poll is in vain, and the event
//! comes right after it. So after some polls in vain, waits skip the poll, and try it again now and
//! then.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// The longest poll, unless the user has chosen one.
const LONGEST: Duration = Duration::from_micros(20);

/// An event that comes this soon after a poll in vain would have come during it, if this thread had
/// not kept the core.
const SOON: Duration = Duration::from_micros(200);

/// Polls in vain before waits skip the poll.
const PATIENCE: u32 = 4;

/// Waits without a poll before one polls again.
const SKIPPED_MAX: u32 = 32;

/// The polls of one endpoint's waits.
#[derive(Debug)]
pub(crate) struct Spin {
    /// The user's choice.
    fixed: Option<Duration>,
    /// Polls in vain that are still allowed.
    patience: AtomicU32,
    skipped: AtomicU32,
}

impl Spin {
    /// With the user's length, or one that adapts to whether polls pay.
    pub(crate) fn new(fixed: Option<Duration>) -> Spin {
        Spin {
            fixed,
            patience: AtomicU32::new(PATIENCE),
            skipped: AtomicU32::new(0),
        }
    }

    /// How long the wait that begins now is to poll.
    pub(crate) fn limit(&self) -> Duration {
        if let Some(fixed) = self.fixed {
            return fixed;
        }
        if self.patience.load(Relaxed) == 0 {
            let skipped = self.skipped.load(Relaxed) + 1;
            self.skipped
                .store(if skipped < SKIPPED_MAX { skipped } else { 0 }, Relaxed);
            if skipped < SKIPPED_MAX {
                return Duration::ZERO;
            }
        }
        LONGEST
    }

    /// Records when the event came, after a poll of `limit`.
    pub(crate) fn tell(&self, limit: Duration, came: Came) {
        let patience = self.patience.load(Relaxed);
        let patience = match came {
            _ if limit.is_zero() => return,
            Came::Polling { elapsed } if elapsed <= limit => (patience + 1).min(PATIENCE),
            // This thread was descheduled meanwhile: the peer may have run on this very core.
            Came::Polling { .. } => return,
            Came::Asleep { slept } if slept < SOON => patience.saturating_sub(1),
            Came::Asleep { .. } => return,
        };
        self.patience.store(patience, Relaxed);
    }
}

/// When the awaited event came.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Came {
    /// During the poll, this long after its start.
    Polling { elapsed: Duration },
    /// During the sleep after the poll, which lasted this long.
    Asleep { slept: Duration },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn polls(spin: &Spin, waits: u32) -> usize {
        (0..waits)
            .filter(|_| !spin.limit().is_zero())
            .inspect(|_| spin.tell(LONGEST, Came::Asleep { slept: SOON / 2 }))
            .count()
    }

    #[test]
    fn polls_that_are_in_vain_are_left_out_but_for_one_now_and_then() {
        let spin = Spin::new(None);
        assert_eq!(polls(&spin, PATIENCE), PATIENCE as usize);
        assert_eq!(polls(&spin, 10 * SKIPPED_MAX), 10);
    }

    #[test]
    fn polls_that_pay_bring_them_all_back_and_one_by_chance_does_not() {
        let spin = Spin::new(None);
        polls(&spin, 1000);
        let tried = (0..SKIPPED_MAX).find(|_| !spin.limit().is_zero());
        assert!(tried.is_some());
        spin.tell(
            LONGEST,
            Came::Polling {
                elapsed: 2 * LONGEST,
            },
        );
        assert!(spin.limit().is_zero(), "it was not the poll that paid");
        spin.tell(
            LONGEST,
            Came::Polling {
                elapsed: LONGEST / 2,
            },
        );
        assert_eq!(polls(&spin, SKIPPED_MAX - 2), 1);
        (0..PATIENCE).for_each(|_| {
            spin.tell(
                LONGEST,
                Came::Polling {
                    elapsed: LONGEST / 2,
                },
            )
        });
        assert!((0..100).all(|_| spin.limit() == LONGEST));
    }

    #[test]
    fn a_long_silence_says_nothing_about_polls_and_a_chosen_length_is_kept() {
        let (silent, chosen) = (Spin::new(None), Spin::new(Some(Duration::from_millis(1))));
        for _ in 0..100 {
            silent.tell(LONGEST, Came::Asleep { slept: SOON });
            chosen.tell(
                LONGEST,
                Came::Asleep {
                    slept: Duration::ZERO,
                },
            );
        }
        assert_eq!(
            (silent.limit(), chosen.limit()),
            (LONGEST, Duration::from_millis(1))
        );
    }
}
