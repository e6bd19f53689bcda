//! The pace of a CPU that polls.

use std::time::Duration;

/// The pace of a CPU that polls a word that a device writes, since the device cannot wake it: spin
/// first, then sleep for ever longer times, at most half a millisecond.
#[derive(Debug)]
pub(crate) struct Backoff {
    rounds: u32,
    spins: u32,
}

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff::spinning(2_000)
    }
}

impl Backoff {
    /// A backoff that polls `spins` times before it first sleeps.
    pub(crate) fn spinning(spins: u32) -> Backoff {
        Backoff { rounds: 0, spins }
    }

    pub(crate) fn pause(&mut self) {
        match self.step() {
            Duration::ZERO => std::hint::spin_loop(),
            pause => std::thread::park_timeout(pause),
        }
    }

    /// Whether the next poll comes at once.
    pub(crate) fn is_spinning(&self) -> bool {
        self.rounds < self.spins
    }

    /// The longest sleep before the next poll; zero while spinning still pays.
    pub(crate) fn step(&mut self) -> Duration {
        self.rounds = self.rounds.saturating_add(1);
        match self.rounds.checked_sub(self.spins) {
            None => Duration::ZERO,
            Some(sleeps) => Duration::from_micros(31 << sleeps.min(4)),
        }
    }
}
