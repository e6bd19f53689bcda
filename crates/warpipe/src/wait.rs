//! How long a call may wait, and what else ends the wait.

use std::fmt;
use std::time::{Duration, Instant};

/// How often a wait looks whether it is cancelled.
const SLICE: Duration = Duration::from_millis(50);

/// How long a call may wait, and what else ends the wait. A `Duration` is one, from the call on.
///
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
/// use std::time::Duration;
/// use warpipe::Wait;
///
/// let is_cancelled = AtomicBool::new(false);
/// let cancelled = || is_cancelled.load(Relaxed);
/// let wait = Wait::at_most(Duration::MAX).unless(&cancelled);
/// assert!(!wait.is_over());
/// is_cancelled.store(true, Relaxed);
/// assert!(wait.is_over() && Wait::from(Duration::ZERO).is_over());
/// ```
#[derive(Clone, Copy)]
pub struct Wait<'a> {
    limit: Duration,
    /// `None` beyond the range of the clock.
    deadline: Option<Instant>,
    cancelled: Option<&'a dyn Fn() -> bool>,
}

impl<'a> Wait<'a> {
    /// A wait of at most this long from now on; [`Duration::MAX`] has no end.
    pub fn at_most(limit: Duration) -> Wait<'a> {
        Wait {
            limit,
            deadline: Instant::now().checked_add(limit),
            cancelled: None,
        }
    }

    /// This wait, which also ends when `cancelled` returns true, with the same result as the end of
    /// the time. It is called about every 50 ms, or more often, while no lock is held.
    pub fn unless(self, cancelled: &'a dyn Fn() -> bool) -> Wait<'a> {
        Wait {
            cancelled: Some(cancelled),
            ..self
        }
    }

    /// This wait, from now on for at most this long.
    pub(crate) fn no_longer_than(self, limit: Duration) -> Wait<'a> {
        let capped = Wait::at_most(self.time_left().min(limit));
        Wait {
            cancelled: self.cancelled,
            ..capped
        }
    }

    /// A wait of this long that this one's cancellation ends, too: for an answer that comes soon.
    pub(crate) fn cancellable_within(self, limit: Duration) -> Wait<'a> {
        Wait {
            cancelled: self.cancelled,
            ..Wait::at_most(limit)
        }
    }

    /// The limit that the wait began with.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Whether the time is over, or the wait is cancelled.
    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// The time that is left; zero once the wait is cancelled.
    pub(crate) fn left(&self) -> Duration {
        match self.is_cancelled() {
            true => Duration::ZERO,
            false => self.time_left(),
        }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.is_some_and(|cancelled| cancelled())
    }

    /// As [`left`](Self::left), without a look whether the wait is cancelled.
    pub(crate) fn time_left(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        })
    }

    /// How long a sleep may last before the next look; zero once the wait is over.
    pub(crate) fn slice(&self) -> Duration {
        match self.cancelled {
            Some(_) => self.left().min(SLICE),
            None => self.time_left(),
        }
    }
}

impl From<Duration> for Wait<'_> {
    fn from(limit: Duration) -> Self {
        Wait::at_most(limit)
    }
}

impl fmt::Debug for Wait<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wait")
            .field("limit", &self.limit)
            .field("deadline", &self.deadline)
            .field("can_be_cancelled", &self.cancelled.is_some())
            .finish()
    }
}
