//! Shared memory and blocks, filled and checked as a whole. **This module is marked for unsafe**:
//! it launches kernels on addresses.

use std::time::Duration;

use anyhow::Result;
use warpipe::{DeviceSlice, Stream};

use crate::PATIENCE;
use crate::payload::{Check, ErrorCounters, fill_words};

/// Enqueues the writing of the pattern of `seed`, late by `slow`. `is_named` is false for the
/// negative control: the place does not learn of the stream.
///
/// # Errors
/// Those of a launch.
pub fn fill(
    place: &DeviceSlice,
    stream: &Stream,
    seed: u64,
    slow: Duration,
    is_named: bool,
) -> Result<()> {
    if is_named {
        place.used_on(stream);
    }
    // SAFETY: the words lie in the place, which stays mapped until its stream is past them; where
    // the stream is not named, the case keeps the region mapped otherwise and lets the writers
    // meet, which is what it tries.
    unsafe { fill_words(stream, place.ptr(), place.bytes() / 8, seed, slow)? };
    Ok(())
}

/// Enqueues a check against the pattern of `seed`.
///
/// # Errors
/// Those of a launch.
pub fn check(
    place: &DeviceSlice,
    stream: &Stream,
    error_counters: &mut ErrorCounters,
    seed: u64,
) -> Result<Check> {
    place.used_on(stream);
    // SAFETY: the words lie in the place, which stays mapped until the stream, named above, is past
    // the check.
    Ok(unsafe { error_counters.check(stream, place.ptr(), place.bytes() / 8, seed)? })
}

/// How many words are not the pattern of `seed`. Waits for the check.
///
/// # Errors
/// Those of a launch; the stream does not come to its end.
pub fn wrong_words(
    place: &DeviceSlice,
    stream: &Stream,
    error_counters: &mut ErrorCounters,
    seed: u64,
) -> Result<u64> {
    let check = check(place, stream, error_counters, seed)?;
    stream.synchronize(PATIENCE)?;
    Ok(error_counters.wrong_words(check))
}
