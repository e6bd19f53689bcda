//! The clock that all processes of one machine share.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::fork::per_process::PerProcess;

/// Now, in nanoseconds of `CLOCK_MONOTONIC` (`clock_gettime(2)`) as the host counts them: comparable
/// between processes, also of other time namespaces, not between boots.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64)
        .wrapping_mul(SECOND_NS)
        .wrapping_add(now.tv_nsec as u64)
        .wrapping_sub(offsets().monotonic_ns as u64)
}

const SECOND_NS: u64 = 1_000_000_000;

/// What the clocks of this process's time namespace are ahead of the host's, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Offsets {
    pub(crate) monotonic_ns: i64,
    pub(crate) boottime_ns: i64,
}

/// `/proc/self/timens_offsets`: `time_namespaces(7)`. A process stays in its namespace; its child may
/// begin in another one.
pub(crate) fn offsets() -> Offsets {
    static OFFSETS: PerProcess<OnceLock<Offsets>> = PerProcess::new();
    *OFFSETS.get().get_or_init(|| {
        let text = std::fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
        parse_offsets(&text)
    })
}

/// Each line is a clock, by its name or number, seconds and nanoseconds.
fn parse_offsets(text: &str) -> Offsets {
    let mut offsets = Offsets::default();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let clock = words.next();
        let mut number = || words.next()?.parse::<i64>().ok();
        let (Some(seconds), Some(rest)) = (number(), number()) else {
            continue;
        };
        let ahead_ns = seconds.wrapping_mul(SECOND_NS as i64).wrapping_add(rest);
        match clock {
            Some("monotonic" | "1") => offsets.monotonic_ns = ahead_ns,
            Some("boottime" | "7") => offsets.boottime_ns = ahead_ns,
            _ => {}
        }
    }
    offsets
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offsets_of_a_time_namespace_are_read_by_name_or_number() {
        let named =
            parse_offsets("monotonic         100         5\nboottime          -20         0\n");
        let expected = Offsets {
            monotonic_ns: 100_000_000_005,
            boottime_ns: -20_000_000_000,
        };
        assert_eq!(named, expected);
        assert_eq!(parse_offsets("1 100 5\n7 -20 0\n"), expected);
        for text in ["", "monotonic", "monotonic x 0", "9 9 9"] {
            assert_eq!(parse_offsets(text), Offsets::default(), "{text:?}");
        }
    }
}
