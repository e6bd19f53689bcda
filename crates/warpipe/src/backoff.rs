//! The pace of a CPU that polls.

use std::time::Duration;

use crate::clock::now_ns;

/// After so many polls a thread gives its CPU away between them: the thread that it waits for may
/// run on this very CPU.
const POLLS_BEFORE_YIELD: u32 = 64;

/// `sched_yield(2)` takes at least about as long as so many polls.
const POLLS_OF_A_YIELD: u32 = 16;

/// Nanoseconds that count as one poll, of a yield that took longer because others want the CPU.
const NS_OF_A_POLL: u64 = 128;

/// After so many sleeps of one length they are twice as long.
const SLEEPS_OF_ONE_LENGTH: u32 = 16;

/// How often the sleeps of a wait for a device are made twice as long: up to half a millisecond.
const DOUBLINGS: u32 = 4;

/// The pace of a CPU that polls a word that a device writes, since the device cannot wake it: spin
/// first, then sleep for ever longer times.
#[derive(Debug)]
pub(crate) struct Backoff {
    rounds: u32,
    spins: u32,
    doublings: u32,
    /// See [`keep_up_with`](Self::keep_up_with).
    others: u64,
}

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff::spinning(2_000)
    }
}

impl Backoff {
    /// One that polls `spins` times before it first sleeps, then at most half a millisecond.
    pub(crate) fn spinning(spins: u32) -> Backoff {
        Backoff {
            rounds: 0,
            spins,
            doublings: DOUBLINGS,
            others: 0,
        }
    }

    /// One for what a peer may keep for long: its sleeps grow to 32 ms.
    pub(crate) fn patient(spins: u32) -> Backoff {
        Backoff {
            doublings: 10,
            ..Backoff::spinning(spins)
        }
    }

    /// Begins anew if others have got what is waited for since the last call, by their count. Else
    /// a thread that has begun just now, and looks more often, would be the first to see all that
    /// comes.
    pub(crate) fn keep_up_with(&mut self, others: u64) {
        if std::mem::replace(&mut self.others, others) != others {
            self.rounds = 0;
        }
    }

    pub(crate) fn pause(&mut self) {
        match self.step() {
            Duration::ZERO => std::hint::spin_loop(),
            pause => std::thread::park_timeout(pause),
        }
    }

    /// Passes the time until the next poll, if [`step`](Self::step) says that it comes at once: a
    /// few instructions, or a turn of the CPU's other threads.
    pub(crate) fn spin(&mut self, instructions: u32) {
        if self.rounds <= POLLS_BEFORE_YIELD {
            (0..instructions).for_each(|_| std::hint::spin_loop());
        } else {
            let start = now_ns();
            std::thread::yield_now();
            self.count_yield(now_ns().saturating_sub(start));
        }
    }

    /// Brings the sleep nearer by the time that others had the CPU: beside threads that compute, a
    /// yield takes milliseconds, and a count of yields seconds.
    fn count_yield(&mut self, took_ns: u64) {
        let polls = u32::try_from(took_ns / NS_OF_A_POLL).unwrap_or(u32::MAX);
        let polls = polls.max(POLLS_OF_A_YIELD - 1);
        self.rounds = self
            .rounds
            .saturating_add(polls)
            .min(self.rounds.max(self.spins));
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
            // So a wait is at most about a sixteenth longer than what it waits for.
            Some(sleeps) => {
                let doublings = (sleeps / SLEEPS_OF_ONE_LENGTH).min(self.doublings);
                Duration::from_micros(31 << doublings)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which polls were followed by another thread's turn is seen in how far each brings the sleep
    /// nearer.
    #[test]
    fn a_thread_that_polls_gives_its_cpu_away_before_it_sleeps() {
        let mut backoff = Backoff::spinning(16_000);
        let mut turns = 0;
        while backoff.step().is_zero() {
            let before = backoff.rounds;
            backoff.spin(4);
            turns += u32::from(backoff.rounds > before);
        }
        assert!(turns > 0);
    }

    #[test]
    fn yields_end_the_polling_by_the_time_that_they_take() {
        let yields_before_a_sleep = |took_ns| {
            let mut backoff = Backoff::spinning(16_000);
            let mut yields = 0;
            while backoff.step().is_zero() {
                backoff.count_yield(took_ns);
                yields += 1;
            }
            assert!(
                backoff.step() < Duration::from_micros(62),
                "the first sleep is a short one"
            );
            yields
        };
        assert_eq!(yields_before_a_sleep(100), 16_000 / POLLS_OF_A_YIELD);
        assert_eq!(yields_before_a_sleep(1_024_000), 2);
        assert_eq!(yields_before_a_sleep(u64::MAX), 1);
    }

    #[test]
    fn a_thread_that_waits_looks_as_often_as_a_new_one_once_others_got_what_it_waits_for() {
        let mut backoff = Backoff::patient(2);
        backoff.keep_up_with(7);
        while backoff.step() < Duration::from_millis(1) {}
        backoff.keep_up_with(7);
        assert!(
            backoff.step() >= Duration::from_millis(1),
            "no other one got any"
        );
        backoff.keep_up_with(8);
        assert!(backoff.is_spinning());
    }
}
