//! How long a wait polls before it sleeps.
//!
//! Polling for some microseconds saves the cost of a wake-up. The event's maker may need the very
//! CPU that polls, so a thread that polls gives its CPU away between polls.

use std::time::{Duration, Instant};

/// How long a wait polls, unless the user has chosen.
pub(crate) const SPIN: Duration = Duration::from_micros(20);

/// So many polls come before a thread gives its CPU away between them. On a free CPU that takes
/// longer than a pause.
const POLLS_BEFORE_YIELD: u32 = 1;

/// The polls of one wait.
#[derive(Debug)]
pub(crate) struct Polls {
    start: Instant,
    limit: Duration,
    rounds: u32,
}

impl Polls {
    /// From now on, for `limit`.
    pub(crate) fn for_at_most(limit: Duration) -> Polls {
        Polls {
            start: Instant::now(),
            limit,
            rounds: 0,
        }
    }

    /// Passes the time until the next poll; false once the limit has passed.
    pub(crate) fn pass(&mut self) -> bool {
        if self.start.elapsed() >= self.limit {
            return false;
        }
        if self.rounds < POLLS_BEFORE_YIELD {
            self.rounds += 1;
            (0..8).for_each(|_| std::hint::spin_loop());
        } else {
            std::thread::yield_now();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_polls_until_its_limit_and_not_at_all_without_one() {
        assert!(!Polls::for_at_most(Duration::ZERO).pass());
        let mut polls = Polls::for_at_most(Duration::from_millis(2));
        let mut passed = 0;
        while polls.pass() {
            passed += 1;
        }
        assert!(passed > 0 && polls.start.elapsed() >= polls.limit);
        assert!(!polls.pass());
    }

    #[test]
    fn a_wait_gives_its_cpu_away_after_its_first_polls() {
        let mut polls = Polls::for_at_most(Duration::from_secs(3600));
        (0..100).for_each(|_| assert!(polls.pass()));
        assert_eq!(polls.rounds, POLLS_BEFORE_YIELD);
    }
}
