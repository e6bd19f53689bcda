//! What the library does in this process, in numbers.

use crate::backend::unreclaimed;
use crate::fork::lifeline;
use crate::ipc::peer;
use crate::runtime::fence;
use crate::runtime::reactor::Reactor;

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
    /// Mappings and regions that a driver has not taken back: it refused to, or would have had this process's allocations
    /// wait until a stream goes on. What it may still use is not unmapped. It is asked again every 200 ms, but for memory of a device that was reset, which stays until the process ends.
    pub kept: u64,
    /// Their bytes.
    pub kept_bytes: u64,
    /// How often a stream or an event could not be asked whether its work is done. What waits for it asks again: a few
    /// are usual where streams are captured into graphs.
    pub unanswered: u64,
    /// Processes with links to this one that have ended, as far as can be seen, while a child of theirs holds their
    /// files. Their device work may go on, so what they had of this process stays out of use until that child ends or
    /// calls `exec`.
    pub orphaned: usize,
    /// Whether peers are told that this process's device is quiet as soon as it is. False where CUDA was started before
    /// this library was loaded, or files with lower numbers were closed since: then they may be told when the process is
    /// gone, which takes some ten milliseconds longer.
    pub is_proof_prompt: bool,
}

/// What the library does in this process just now.
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
    }
}
