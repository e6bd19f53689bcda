//! A peer's heartbeat, as this process sees it: a word that the peer changes with each [`TICK`] of its own, and is looked
//! at with each of ours.
//!
//! Silence is counted in ticks of ours that found the word unchanged, and not by a clock. While this process does not run
//! (both were stopped, the machine slept), it cannot tell a peer that is silent from one that stands as still as itself.
//! What the peer writes as the time may be anything; only that it changes counts.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use super::watcher::{STALLED_AFTER, TICK};

/// One peer's heartbeat. One thread looks; any may ask.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    beat: AtomicU64,
    missed: AtomicU32,
}

impl Pulse {
    /// Begins with a peer that was heard of just now.
    pub(crate) fn new(beat: u64) -> Pulse {
        Pulse { beat: AtomicU64::new(beat), missed: AtomicU32::new(0) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_what_our_own_ticks_have_seen_of_it() {
        let pulse = Pulse::new(7);
        assert_eq!(pulse.silence(), Duration::ZERO);
        (1..=4).for_each(|_| pulse.tick(7));
        assert_eq!((pulse.silence(), pulse.is_stalled()), (4 * TICK, false));
        pulse.tick(7);
        assert!(pulse.is_stalled());
        // Another value than before, and be it a smaller one.
        pulse.tick(3);
        assert_eq!((pulse.silence(), pulse.is_stalled()), (Duration::ZERO, false));
        (0..1000).for_each(|_| pulse.tick(3));
        assert_eq!(pulse.silence(), 1000 * TICK);
    }
}
