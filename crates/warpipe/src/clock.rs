//! The clock that all processes of one machine share.

use std::time::{Duration, Instant};

/// Now, in nanoseconds of `CLOCK_MONOTONIC` (`clock_gettime(2)`): comparable between processes, not
/// between boots.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// Measures from its first call: on a path that rarely waits, reading the clock at the start would
/// cost more than the rest.
#[derive(Debug, Default)]
pub(crate) struct Stopwatch(Option<Instant>);

impl Stopwatch {
    /// Zero at the first call.
    pub(crate) fn elapsed(&mut self) -> Duration {
        self.0.get_or_insert_with(Instant::now).elapsed()
    }
}
