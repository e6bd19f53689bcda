//! Shared by warpipe's tests and benchmarks: child processes that are always reaped, waits with a
//! time limit, folders that remove themselves, random numbers that a seed repeats, and figures.
#![deny(missing_docs)]

mod child;
pub mod figure;
mod sandbox;
mod wait;

pub use child::{ChildProcess, LineReader, this_program};
pub use fastrand::Rng;
pub use sandbox::refuse_calls;
pub use tempfile::TempDir;
pub use wait::{eventually, pidfd, spin_until, wait_readable};

use std::io;

/// A folder that only this user can enter, removed when it is dropped. Its path is short: the
/// addresses of sockets have 108 bytes.
///
/// # Errors
/// The temporary directory (`TMPDIR`) cannot be written.
pub fn temporary_folder() -> io::Result<TempDir> {
    tempfile::Builder::new().prefix("warpipe-").tempdir()
}

/// One of `choices`, which is not empty.
pub fn pick<'a, T>(rng: &mut Rng, choices: &'a [T]) -> &'a T {
    &choices[rng.usize(..choices.len())]
}
