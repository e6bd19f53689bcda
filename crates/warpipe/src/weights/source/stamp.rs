//! When a file was last changed: by it a load sees that a process wrote to the file meanwhile.

use std::time::{Duration, Instant};

use rustix::fs::Stat;
use rustix::time::{ClockId, clock_gettime};

/// The longest step of a file system's times: those of FAT are two seconds apart.
const COARSE_STEP_NS: i128 = 2_000_000_000;

/// The longest wait for the next step. A clock that stands still, or is set back, ends it.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(3);

/// A file's identity, length and times, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileStamp {
    file: (u64, u64),
    pub(crate) bytes: u64,
    modified: i128,
    changed: i128,
}

impl FileStamp {
    pub(super) fn of(stat: &Stat) -> FileStamp {
        let time = |seconds: i64, ns: u64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        FileStamp {
            file: (stat.st_dev, stat.st_ino),
            bytes: stat.st_size as u64,
            modified: time(stat.st_mtime, stat.st_mtime_nsec),
            changed: time(stat.st_ctime, stat.st_ctime_nsec),
        }
    }

    /// Waits until a later change gets a later time than the one that is noted here. The kernel
    /// gives changes the time of its last tick, some milliseconds apart; a file system may keep
    /// whole seconds of it.
    pub(super) fn settle(&self) {
        let is_whole_seconds = self.changed % 1_000_000_000 == 0;
        let step = if is_whole_seconds { COARSE_STEP_NS } else { 1 };
        let start = Instant::now();
        while (0..step).contains(&(tick() - self.changed)) && start.elapsed() < SETTLE_TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The time that the kernel gives to a change now, at the latest.
fn tick() -> i128 {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
}
