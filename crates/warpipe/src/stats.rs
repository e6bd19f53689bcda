//! What the library does in this process, in numbers.

use crate::backend::kept;
use crate::link::proof;
use crate::link::watcher::Watcher;

/// What the library does in this process: [`process_stats`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessStats {
    /// How much was dropped and is kept until nobody can touch it any more: memory, links and pages that a stream of
    /// this process still works on, or that another handle of this process holds.
    pub dropping: usize,
    /// How much of that has waited for a stream for more than 60 s. The stream waits for a process that lives and does
    /// not signal, or its device hangs. It is dropped once the stream is past it.
    pub overdue: usize,
    /// Mappings and regions that a driver did not take back. They stay until the process ends: what the driver may still
    /// use is not unmapped.
    pub kept: u64,
    /// Their bytes.
    pub kept_bytes: u64,
    /// How often a stream or an event could not be asked whether its work is done. What waits for it asks again: a few
    /// are usual where streams are captured into graphs.
    pub unanswered: u64,
}

/// What the library does in this process just now.
///
/// ```
/// assert_eq!(warpipe::process_stats().overdue, 0);
/// ```
pub fn process_stats() -> ProcessStats {
    let (dropping, overdue) = Watcher::running().map_or((0, 0), |watcher| watcher.counts());
    let (kept, kept_bytes) = kept::kept();
    ProcessStats { dropping, overdue, kept, kept_bytes, unanswered: proof::unanswered() }
}
