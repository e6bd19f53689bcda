//! The parts of the benchmarks that a program beside them uses, too: the other process, the bare
//! ring, and threads kept to a CPU.

pub mod peer_process;
pub mod pin;
pub mod raw;
pub mod rings;

use std::time::Duration;

/// Far more than any step takes: only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(60);
