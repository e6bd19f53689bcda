//! What the library does in this process, in numbers.

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
}

/// What the library does in this process just now. All zeros before its first endpoint.
///
/// ```
/// assert_eq!(warpipe::process_stats().overdue, 0);
/// ```
pub fn process_stats() -> ProcessStats {
    let (dropping, overdue) = Watcher::running().map_or((0, 0), |watcher| watcher.counts());
    ProcessStats { dropping, overdue }
}
