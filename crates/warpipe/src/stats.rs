//! Counters of the library in this process.

use crate::backend::unreclaimed;
use crate::fork::lifeline;
use crate::ipc::peer;
use crate::runtime::reactor::Reactor;
use crate::runtime::{closer, fence};

/// Counters of the library in this process: [`process_stats`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessStats {
    /// How many dropped objects are kept until nothing can access them any more: memory, links and
    /// pages that a stream of this process still works on, or that another handle of this process
    /// holds.
    pub dropping: usize,
    /// How many of them have waited for a stream for more than 60 s. The stream waits for a process
    /// that lives and does not signal, or its device hangs. Each object is dropped once the stream
    /// is past it.
    pub overdue: usize,
    /// Mappings and regions that a driver has not released: it refused to, or the release would
    /// have blocked this process's allocations until a stream continues. Memory that the driver may
    /// still use is not unmapped. The release is tried again every 200 ms, except for memory of a
    /// device that was reset, which stays until the process ends.
    pub kept: u64,
    /// The bytes of the mappings and regions in `kept`.
    pub kept_bytes: u64,
    /// How often a query whether a stream's or an event's work is done failed. The query is
    /// repeated: a few failures are usual where streams are captured into graphs.
    pub unanswered: u64,
    /// Processes with links to this one that have ended, as far as this process can see, while a
    /// child of theirs holds their files. Their device work may continue, so this process's memory
    /// that they used stays out of use until that child ends or calls `exec`.
    pub orphaned: usize,
    /// Whether peers see this process's death proven as soon as its device is quiet. False where
    /// CUDA was started before this library was loaded, or files with lower numbers were closed
    /// since: then the proof may come only when the process is gone, tens of milliseconds later.
    pub is_proof_prompt: bool,
    /// The number of descriptors from peers with a `close` that has not returned. A few for a moment
    /// are harmless. A number that stays means that a peer sends files that take long to close (a
    /// socket that lingers, a file on FUSE). Each costs this process a descriptor and a thread. From
    /// 64 of another user on (256 of this one), new connections of that user are refused, and further
    /// descriptors wait without a thread.
    pub pending_closes: usize,
}

/// The current counters of this process.
///
/// ```
/// assert_eq!(warpipe::process_stats().overdue, 0);
/// ```
pub fn process_stats() -> ProcessStats {
    let (dropping, overdue) = Reactor::running().map_or((0, 0), |reactor| reactor.counts());
    let (kept, kept_bytes) = unreclaimed::totals();
    let (orphaned, is_proof_prompt) = (peer::orphaned(), lifeline::is_prompt());
    ProcessStats {
        dropping,
        overdue,
        kept,
        kept_bytes,
        unanswered: fence::unanswered(),
        orphaned,
        is_proof_prompt,
        pending_closes: closer::pending_closes(),
    }
}
