//! A peer's heartbeat, as this process sees it: a word that the peer changes with each [`TICK`] of its own, and is looked
//! at with each of ours.
//!
//! Silence is counted in ticks of ours that found the word unchanged, and not by a clock. While this process does not run
//! (both were stopped, the machine slept), it cannot tell a peer that is silent from one that stands as still as itself.
//! What the peer writes as the time may be anything; only that it changes counts.
//!
//! For the same reason other waits for a peer are measured in time in which this process ran ([`Uptime`]).

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::runtime::reactor::{STALLED_AFTER, TICK};

/// One peer's heartbeat. One thread looks; any may ask.
#[derive(Debug, Default)]
pub(crate) struct PeerHeartbeat {
    beat: AtomicU64,
    missed: AtomicU32,
}

impl PeerHeartbeat {
    /// Begins with a peer that was heard of just now.
    pub(crate) fn new(beat: u64) -> PeerHeartbeat {
        PeerHeartbeat {
            beat: AtomicU64::new(beat),
            missed: AtomicU32::new(0),
        }
    }

    /// A tick of ours finds this in the peer's word.
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

    /// Whether people are to be told that it is stalled.
    pub(crate) fn is_stalled(&self) -> bool {
        self.silence() > STALLED_AFTER
    }
}

/// More than this between two looks at a clock is time in which this process did not run.
const STEP: Duration = TICK.saturating_add(Duration::from_millis(50));

/// A clock that goes while this process runs, for who looks at it with each [`TICK`] or more often.
#[derive(Debug)]
pub(crate) struct Uptime(Mutex<(Instant, Duration)>);

impl Default for Uptime {
    fn default() -> Uptime {
        Uptime(Mutex::new((Instant::now(), Duration::ZERO)))
    }
}

impl Uptime {
    /// What has passed since it was made.
    pub(crate) fn ran(&self) -> Duration {
        self.look(Instant::now())
    }

    fn look(&self, now: Instant) -> Duration {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, ran) = *state;
        *state = (
            now.max(last),
            ran.saturating_add(now.saturating_duration_since(last).min(STEP)),
        );
        state.1
    }

    /// As if this process had stood still for so long since the last look.
    #[cfg(test)]
    pub(crate) fn freeze(&self, time: Duration) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
    fn silence_is_what_our_own_ticks_have_seen_of_it() {
        let peer_heartbeat = PeerHeartbeat::new(7);
        assert_eq!(peer_heartbeat.silence(), Duration::ZERO);
        (1..=4).for_each(|_| peer_heartbeat.tick(7));
        assert_eq!(
            (peer_heartbeat.silence(), peer_heartbeat.is_stalled()),
            (4 * TICK, false)
        );
        peer_heartbeat.tick(7);
        assert!(peer_heartbeat.is_stalled());
        // Another value than before, and be it a smaller one.
        peer_heartbeat.tick(3);
        assert_eq!(
            (peer_heartbeat.silence(), peer_heartbeat.is_stalled()),
            (Duration::ZERO, false)
        );
        (0..1000).for_each(|_| peer_heartbeat.tick(3));
        assert_eq!(peer_heartbeat.silence(), 1000 * TICK);
    }
}
