//! Why data did not take the fastest path. The process that moves the data counts; its statistics
//! page has the counts from the next tick on.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::fork::per_process::PerProcess;

/// A path that is slower than the one that was asked for, or that the same data could take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlowPath {
    /// An upload of more than 64 KiB from host memory that is not page-locked: the driver copies it
    /// to page-locked memory first.
    PageableUpload = 1,
    /// An upload of more than 64 KiB on a stream with unfinished work: copied to this library's
    /// page-locked memory first, because the driver would block.
    StagedUpload = 2,
    /// A download to host memory through this library's page-locked memory.
    StagedDownload = 3,
    /// A tensor that was to be sent in place: no descriptor or handle names its memory.
    NotExportable = 4,
    /// A tensor that was to be sent in place: it has gaps, or is no array, and was gathered.
    Gathered = 5,
    /// A tensor that was to be sent in place: its metadata leaves no room for the memory's name.
    NoMetadataRoom = 6,
    /// Memory of another device that this process's device cannot map: refused.
    NoPeerAccess = 7,
}

impl SlowPath {
    /// All of them.
    pub const ALL: [SlowPath; 7] = [
        SlowPath::PageableUpload,
        SlowPath::StagedUpload,
        SlowPath::StagedDownload,
        SlowPath::NotExportable,
        SlowPath::Gathered,
        SlowPath::NoMetadataRoom,
        SlowPath::NoPeerAccess,
    ];

    pub(crate) fn of(word: u64) -> Option<SlowPath> {
        SlowPath::ALL.into_iter().find(|&path| path as u64 == word)
    }

    /// Its name, in small letters: `staged_upload`.
    pub fn name(self) -> &'static str {
        match self {
            SlowPath::PageableUpload => "pageable_upload",
            SlowPath::StagedUpload => "staged_upload",
            SlowPath::StagedDownload => "staged_download",
            SlowPath::NotExportable => "not_exportable",
            SlowPath::Gathered => "gathered",
            SlowPath::NoMetadataRoom => "no_metadata_room",
            SlowPath::NoPeerAccess => "no_peer_access",
        }
    }

    /// The reason, and the remedy, in one line.
    pub fn reason(self) -> &'static str {
        match self {
            SlowPath::PageableUpload => {
                "uploads from memory that is not page-locked: the driver copies it first (page-lock it)"
            }
            SlowPath::StagedUpload => {
                "uploads behind unfinished work of their stream: staged in page-locked memory (upload on an idle stream)"
            }
            SlowPath::StagedDownload => {
                "downloads to the host: staged in page-locked memory (more than 1 MiB into page-locked memory is not)"
            }
            SlowPath::NotExportable => {
                "copied: the allocator's memory cannot be exported (send memory of a loan, of warpipe or of cudaMalloc)"
            }
            SlowPath::Gathered => "copied: not one piece of memory (make the tensor contiguous)",
            SlowPath::NoMetadataRoom => "copied: its metadata is too long to be sent in place",
            SlowPath::NoPeerAccess => {
                "refused: memory of a device that this one cannot map (use one GPU, or GPUs with peer access)"
            }
        }
    }
}

/// How often a process took a slow path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlowPathCount {
    /// Which one.
    pub path: SlowPath,
    /// How often.
    pub count: u64,
    /// The bytes that took it; 0 for a refusal.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Counts([[AtomicU64; 2]; SlowPath::ALL.len()]);

/// A forked child counts from zero.
static COUNTS: PerProcess<Counts> = PerProcess::new();

/// Counts a slow path of this process.
pub(crate) fn count(path: SlowPath, bytes: u64) {
    let [count, sum] = &COUNTS.get().0[path as usize - 1];
    count.fetch_add(1, Relaxed);
    sum.fetch_add(bytes, Relaxed);
}

/// The count and the bytes of each of [`SlowPath::ALL`] in this process.
pub(crate) fn counts() -> [[u64; 2]; SlowPath::ALL.len()] {
    let words = &COUNTS.get().0;
    std::array::from_fn(|at| [words[at][0].load(Relaxed), words[at][1].load(Relaxed)])
}
