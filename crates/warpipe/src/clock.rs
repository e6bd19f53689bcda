//! The clock that all processes of one machine share.

/// Now, in nanoseconds of `CLOCK_MONOTONIC` (`clock_gettime(2)`): comparable between processes, not between boots.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}
