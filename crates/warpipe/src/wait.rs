//! How long a call may wait, and what else ends the wait.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::backoff::Backoff;
use crate::debug::opaque_debug;
use crate::error::{Error, Result};
use crate::mutex::LockUnpoisoned;

/// How often a wait looks whether it is cancelled.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// How long a call may wait, and what else ends the wait. A `Duration` is one, from the call on;
/// `Duration::ZERO` asks for what is there.
///
/// A call that its wait ended returns [`Error::Timeout`], or says what was missing:
/// [`Error::NotFound`] a name, [`Error::Limit`] memory or room. It has had
/// no effect: it has taken nothing, and memory that was handed to it is in
/// the error. After a wait of zero `Timeout` costs next to nothing, so it can be polled with.
///
/// ```
/// use std::cell::Cell;
/// use std::time::Duration;
/// use warpipe::{
///     Device, Domain, Error, OptionalExtension, Publisher, Subscriber,
///     SubscriberOptions, Wait,
/// };
/// # let folder = std::env::temp_dir().join(format!("warpipe-wait-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// # let stream = device.stream()?;
///
/// let publisher = Publisher::new("a", domain.on(&device))?;
/// let mut subscriber = Subscriber::open("a", domain.on(&device), Duration::ZERO)?;
/// assert!(subscriber.receive(&stream, Duration::ZERO).optional()?.is_none());
///
/// let looks = Cell::new(0);
/// let cancelled = || looks.replace(looks.get() + 1) >= 1; // a flag of yours
/// let wait = Wait::from(Duration::MAX).unless(&cancelled);
/// assert!(matches!(subscriber.receive(&stream, wait), Err(Error::Timeout { .. })));
/// # drop((subscriber, publisher)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct Wait<'a> {
    limit: Duration,
    /// `None` beyond the range of the clock, and where the limit is zero.
    deadline: Option<Instant>,
    cancelled: Option<&'a dyn Fn() -> bool>,
    /// When `cancelled` is due to be called. `None`: at once.
    next_look: Cell<Option<Instant>>,
}

impl<'a> Wait<'a> {
    /// A wait of at most this long from now on; [`Duration::MAX`] has no end.
    pub(crate) fn at_most(limit: Duration) -> Wait<'a> {
        let deadline = match limit.is_zero() {
            true => None,
            false => Instant::now().checked_add(limit),
        };
        Wait {
            limit,
            deadline,
            cancelled: None,
            next_look: Cell::new(None),
        }
    }

    /// This wait, which also ends when `cancelled` returns true, with the same result as the end of
    /// the time. It is called before each sleep, which lasts 50 ms at most, and as often by a call
    /// that polls. Once it has returned true, it is to go on so, and nothing is taken from a ring
    /// or a queue. No lock is held while it runs.
    pub fn unless(self, cancelled: &'a dyn Fn() -> bool) -> Wait<'a> {
        Wait {
            cancelled: Some(cancelled),
            ..self
        }
    }

    /// This wait, from now on for at most this long.
    pub(crate) fn no_longer_than(&self, limit: Duration) -> Wait<'a> {
        self.cancellable_within(self.time_left().min(limit))
    }

    /// A wait of this long that this one's cancellation ends, too: for an answer that comes soon.
    pub(crate) fn cancellable_within(&self, limit: Duration) -> Wait<'a> {
        Wait {
            cancelled: self.cancelled,
            next_look: self.next_look.clone(),
            ..Wait::at_most(limit)
        }
    }

    /// The limit that the wait began with.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// The time that is left, without a look whether the wait is cancelled.
    pub(crate) fn time_left(&self) -> Duration {
        match self.deadline {
            Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            None => self.limit,
        }
    }

    /// A wait of this limit that has passed.
    #[cfg(test)]
    pub(crate) fn passed(limit: Duration) -> Wait<'a> {
        Wait {
            deadline: Some(Instant::now()),
            ..Wait::at_most(limit)
        }
    }

    pub(crate) fn is_cancellable(&self) -> bool {
        self.cancelled.is_some()
    }

    /// Asks whether the wait is cancelled: for a caller that is about to take what it waited for.
    pub(crate) fn is_cancelled(&self) -> bool {
        let Some(cancelled) = self.cancelled else {
            return false;
        };
        let is_cancelled = cancelled();
        // From now on: the call may have run a signal's handler, which takes its time.
        let next_look = Instant::now().checked_add(SLICE);
        self.next_look.set(next_look.filter(|_| !is_cancelled));
        is_cancelled
    }

    /// Whether a caller that polls is to ask again whether the wait is cancelled.
    pub(crate) fn is_look_due(&self) -> bool {
        let is_due = |next_look: Instant| next_look <= Instant::now();
        self.is_cancellable() && self.next_look.get().is_none_or(is_due)
    }

    /// How long a sleep may last; zero once the wait is over. Comes before each sleep, and before
    /// anything is taken behind one, so that what was cancelled meanwhile has no effect.
    pub(crate) fn slice(&self) -> Duration {
        let left = self.time_left();
        if left.is_zero() || !self.is_cancellable() {
            return left;
        }
        match self.is_cancelled() {
            true => Duration::ZERO,
            false => self.time_left().min(SLICE),
        }
    }

    /// Whether the wait is over, for a caller that polls: does not ask `cancelled` each time.
    pub(crate) fn is_over(&self) -> bool {
        match self.is_look_due() {
            true => self.slice().is_zero(),
            false => self.time_left().is_zero(),
        }
    }

    /// Polls, ever more rarely, until `is_done`, for what no other thread reports. `what` is
    /// awaited, for the error of a wait that is over before.
    pub(crate) fn poll(
        &self,
        what: impl FnOnce() -> String,
        mut is_done: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let mut backoff = Backoff::default();
        while !is_done()? {
            if self.is_over() {
                return Err(Error::timeout(what(), self.limit));
            }
            backoff.pause();
        }
        Ok(())
    }

    /// As [`poll`](Self::poll), for what ends a `sleep`, which lasts no longer than its argument.
    pub(crate) fn until(
        &self,
        what: impl FnOnce() -> String,
        mut is_done: impl FnMut() -> Result<bool>,
        sleep: impl Fn(Duration),
    ) -> Result<()> {
        while !is_done()? {
            let slice = self.slice();
            if slice.is_zero() {
                return Err(Error::timeout(what(), self.limit));
            }
            sleep(slice);
        }
        Ok(())
    }

    /// Sleeps on `changed`, while `is_pending`, until this wait is over.
    pub(crate) fn sleep_while<'m, T>(
        &self,
        state: &'m Mutex<T>,
        changed: &Condvar,
        is_pending: impl Fn(&T) -> bool,
    ) -> MutexGuard<'m, T> {
        loop {
            let slice = self.slice();
            let pending = |state: &mut T| is_pending(state);
            let waited = changed.wait_timeout_while(state.locked(), slice, pending);
            let state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if slice.is_zero() || !is_pending(&state) {
                return state;
            }
        }
    }

    /// The error of a call that this wait has ended. A poller throws it away: after a wait of zero
    /// it does not say `what`, and allocates nothing.
    pub(crate) fn timed_out(&self, what: impl FnOnce() -> String) -> Error {
        let what = match self.limit.is_zero() {
            true => String::new(),
            false => what(),
        };
        Error::timeout(what, self.limit)
    }
}

/// For callers that treat the end of a wait as no error.
pub trait OptionalExtension<T> {
    /// Converts [`Error::Timeout`] to `None`.
    ///
    /// # Errors
    /// Every other error.
    fn optional(self) -> Result<Option<T>>;
}

impl<T> OptionalExtension<T> for Result<T> {
    fn optional(self) -> Result<Option<T>> {
        match self {
            Ok(found) => Ok(Some(found)),
            Err(Error::Timeout { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl<'a> From<&Wait<'a>> for Wait<'a> {
    fn from(wait: &Wait<'a>) -> Self {
        wait.clone()
    }
}

impl From<Duration> for Wait<'_> {
    fn from(limit: Duration) -> Self {
        Wait::at_most(limit)
    }
}

opaque_debug!(Wait<'_> { limit, deadline });

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancellation_is_asked_before_each_sleep_and_not_at_each_poll() {
        let asked = Cell::new(0);
        let cancelled = || {
            asked.set(asked.get() + 1);
            false
        };
        let wait = Wait::at_most(Duration::MAX).unless(&cancelled);
        assert_eq!(asked.get(), 0);
        assert_eq!((wait.slice(), wait.slice(), asked.get()), (SLICE, SLICE, 2));
        wait.next_look
            .set(Some(Instant::now() + Duration::from_secs(600)));
        assert!((0..1000).all(|_| !wait.is_over()));
        assert!(!wait.no_longer_than(SLICE).is_over() && asked.get() == 2);
        wait.next_look.set(Some(Instant::now()));
        assert!(!wait.is_over() && asked.get() == 3);
    }

    #[test]
    fn a_wait_that_is_cancelled_stays_over() {
        let cancelled = || true;
        let wait = Wait::at_most(Duration::MAX).unless(&cancelled);
        assert!(wait.is_over() && wait.is_over() && Wait::from(&wait).is_over());
    }

    #[test]
    fn a_wait_of_zero_is_over_at_once_and_its_error_allocates_nothing() {
        let wait = Wait::from(Duration::ZERO);
        assert!(wait.is_over() && wait.time_left().is_zero());
        let late = wait.timed_out(|| unreachable!("nothing is formatted"));
        assert_eq!(
            late.to_string(),
            "the awaited event did not come within 0ns"
        );
        assert!(matches!(Err::<(), _>(late).optional(), Ok(None)));
    }
}
