//! A peer's heartbeat, as this process sees it: a word that the peer changes at each [`TICK`] of
//! its own, and that this process reads at each of its own.
//!
//! Silence is counted in this process's ticks that found the word unchanged, not by a clock. While
//! this process does not run (both were stopped, the machine slept), it cannot distinguish a silent
//! peer from one that is stopped like itself. The peer may write any value; only a change counts.
//! For the same reason other waits for a peer are measured in time in which this process ran
//! ([`Uptime`]).

use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;
#[cfg(not(loom))]
use std::time::Instant;

use crate::backoff::Backoff;
use crate::mutex::LockUnpoisoned;
use crate::runtime::reactor::{STALLED_AFTER, TICK};
#[cfg(loom)]
use crate::verify::Instant;

/// One peer's heartbeat. One thread ticks; any thread may query.
#[derive(Debug, Default)]
pub(crate) struct PeerHeartbeat {
    beat: AtomicU64,
    missed: AtomicU32,
}

impl PeerHeartbeat {
    /// Starts with no silence.
    pub(crate) fn new(beat: u64) -> PeerHeartbeat {
        PeerHeartbeat {
            beat: AtomicU64::new(beat),
            missed: AtomicU32::new(0),
        }
    }

    /// Takes in the peer's word at a tick of this process.
    pub(crate) fn tick(&self, beat: u64) {
        let missed = match self.beat.swap(beat, Relaxed) == beat {
            true => self.missed.load(Relaxed).saturating_add(1),
            false => 0,
        };
        self.missed.store(missed, Relaxed);
    }

    /// How long the peer has been silent while this process ran, in whole ticks.
    pub(crate) fn silence(&self) -> Duration {
        TICK * self.missed.load(Relaxed)
    }

    /// Whether the peer is to be reported as stalled.
    pub(crate) fn is_stalled(&self) -> bool {
        self.silence() > STALLED_AFTER
    }
}

/// If two readings of the clock are further apart than this, the rest is time in which this process
/// did not run.
const STEP: Duration = TICK.saturating_add(Duration::from_millis(50));

/// A clock that runs while this process runs, provided that it is read at each [`TICK`] or more
/// often.
#[derive(Debug)]
pub(crate) struct Uptime(Mutex<(Instant, Duration)>);

impl Default for Uptime {
    fn default() -> Uptime {
        Uptime(Mutex::new((Instant::now(), Duration::ZERO)))
    }
}

impl Uptime {
    /// The time that has passed since the clock was made.
    pub(crate) fn ran(&self) -> Duration {
        self.look(Instant::now())
    }

    fn look(&self, now: Instant) -> Duration {
        let mut state = self.0.locked();
        let (last, ran) = *state;
        *state = (
            now.max(last),
            ran.saturating_add(now.saturating_duration_since(last).min(STEP)),
        );
        state.1
    }

    /// Looks until there is a value, for about as long as `limit` while this process runs.
    pub(crate) fn look_within<T>(
        limit: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let (clock, mut backoff) = (Uptime::default(), Backoff::default());
        loop {
            let is_last = clock.ran() > limit;
            let found = look();
            if found.is_some() || is_last {
                return found;
            }
            backoff.pause();
        }
    }

    /// Simulates that this process ran for `time`.
    #[cfg(any(test, loom))]
    pub(crate) fn advance(&self, time: Duration) {
        let mut state = self.0.locked();
        state.1 += time;
    }

    /// Simulates that this process stood still for `time` since the last reading.
    #[cfg(test)]
    pub(crate) fn freeze(&self, time: Duration) {
        let mut state = self.0.locked();
        state.0 = state
            .0
            .checked_sub(time)
            .expect("a moment that the clock can tell");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_does_not_go_while_this_process_stands_still() {
        let clock = Uptime::default();
        let start = clock.0.lock().unwrap().0;
        let mut now = start;
        for _ in 0..10 {
            now += TICK;
            clock.look(now);
        }
        assert_eq!(clock.look(now), 10 * TICK);
        assert_eq!(
            clock.look(now + Duration::from_secs(3600)),
            10 * TICK + STEP
        );
        assert_eq!(clock.look(now), 10 * TICK + STEP, "nor does it go back");
        clock.freeze(Duration::from_secs(60));
        assert!(clock.ran() <= 10 * TICK + 2 * STEP);
    }

    #[test]
    fn silence_is_counted_in_ticks_of_this_process() {
        let peer_heartbeat = PeerHeartbeat::new(7);
        assert_eq!(peer_heartbeat.silence(), Duration::ZERO);
        (1..=4).for_each(|_| peer_heartbeat.tick(7));
        assert_eq!(
            (peer_heartbeat.silence(), peer_heartbeat.is_stalled()),
            (4 * TICK, false)
        );
        peer_heartbeat.tick(7);
        assert!(peer_heartbeat.is_stalled());
        // Any other value than before counts, also a smaller one.
        peer_heartbeat.tick(3);
        assert_eq!(
            (peer_heartbeat.silence(), peer_heartbeat.is_stalled()),
            (Duration::ZERO, false)
        );
        (0..1000).for_each(|_| peer_heartbeat.tick(3));
        assert_eq!(peer_heartbeat.silence(), 1000 * TICK);
    }
}
