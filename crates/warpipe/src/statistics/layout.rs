//! The words of the page (`docs/design/protocol.md`). All are 64 bits wide, of this
//! machine's byte order, and each has one writer.

use crate::device_types::{DeviceId, DeviceKind};
use crate::kind::Kind;
use crate::shm::segment::halves;

/// The first word: `WPSTATS` and a zero byte.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"WPSTATS\0");

/// Changes with every change of the words.
pub(super) const VERSION: u64 = 3;

/// The name of the memfd, by which an observer finds its descriptor.
pub(super) const FILE_NAME: &std::ffi::CStr = c"warpipe-statistics";

/// The target of the descriptor's link in `/proc/PID/fd`.
pub(super) const FILE_LINK: &str = "/memfd:warpipe-statistics (deleted)";

/// Words of the header.
pub(super) mod header {
    pub(in super::super) const MAGIC: usize = 0;
    pub(in super::super) const VERSION: usize = 1;
    /// The process's number in its own PID namespace.
    pub(in super::super) const PID: usize = 2;
    /// The inode of its PID namespace.
    pub(in super::super) const NAMESPACE: usize = 3;
    /// When it started: field 22 of `/proc/PID/stat`.
    pub(in super::super) const STARTED: usize = 4;
    /// `CLOCK_MONOTONIC` at the last tick of an endpoint; 0 before the first one.
    pub(in super::super) const BEAT: usize = 8;
    /// Rows that found no room.
    pub(in super::super) const UNLISTED: usize = 9;
    /// One for each table: the rows from here on have never been used.
    pub(in super::super) const ENDS: usize = 16;
    /// Two for each slow path: how often it was taken, and the bytes. Written with each tick.
    pub(in super::super) const SLOW_PATHS: usize = 32;
    pub(in super::super) const WORDS: usize = 512;
}

/// Words of an endpoint's row: a publisher's, a subscriber's, or a served name's.
pub(super) mod endpoint {
    pub(in super::super) const KIND: usize = 1;
    pub(in super::super) const ROLE: usize = 2;
    /// The device, in three words; all bits set for an endpoint without one.
    pub(in super::super) const DEVICE: usize = 3;
    /// The generation of the publisher, in two words; for a subscriber the attached one's.
    pub(in super::super) const GENERATION: usize = 6;
    /// The device and the inode of the domain's directory.
    pub(in super::super) const DOMAIN: usize = 8;
    pub(in super::super) const NAME_BYTES: usize = 10;
    /// The name, filled up with zeros.
    pub(in super::super) const NAME: usize = 11;
    pub(in super::super) const NAME_WORDS: usize = 30;
    /// The items that were copied although they were to be sent in place, their bytes, and the
    /// last reason.
    pub(in super::super) const COPIED: usize = 41;
    pub(in super::super) const COPIED_BYTES: usize = 42;
    pub(in super::super) const COPY_REASON: usize = 43;
    /// Written with each item, in a cache line of their own.
    pub(in super::super) const ITEMS: usize = 48;
    pub(in super::super) const BYTES: usize = 49;
    pub(in super::super) const SEQUENCE: usize = 50;
    /// The items with a time of sending, and the sum of their latencies.
    pub(in super::super) const TIMED: usize = 51;
    pub(in super::super) const LATENCY_NS: usize = 52;
    /// Written with each tick.
    pub(in super::super) const DROPPED: usize = 56;
    pub(in super::super) const IN_FLIGHT: usize = 57;
    pub(in super::super) const MEMORY: usize = 58;
    pub(in super::super) const MEMORY_MAX: usize = 59;
    pub(in super::super) const PEERS: usize = 60;
    pub(in super::super) const DEPTH: usize = 61;
    /// The jobs of a queue that no worker has.
    pub(in super::super) const WAITING: usize = 62;
    pub(in super::super) const WORDS: usize = 64;
}

/// Words of the row of one subscriber, in its publisher's process.
pub(super) mod link {
    /// The index of the publisher's row, and the value of that row's first word.
    pub(in super::super) const ENDPOINT: usize = 1;
    pub(in super::super) const ENDPOINT_LIFE: usize = 2;
    pub(in super::super) const PID: usize = 3;
    pub(in super::super) const UID: usize = 4;
    pub(in super::super) const STATE: usize = 5;
    pub(in super::super) const IN_FLIGHT: usize = 6;
    pub(in super::super) const DROPPED: usize = 7;
    pub(in super::super) const SILENT_MS: usize = 8;
    pub(in super::super) const WORDS: usize = 16;
}

/// Words of the row of one region of memory.
pub(super) mod region {
    pub(in super::super) const ROLE: usize = 1;
    pub(in super::super) const BYTES: usize = 2;
    /// The device, in three words.
    pub(in super::super) const DEVICE: usize = 3;
    /// The device and the inode of the memfd; 0 for memory of a GPU.
    pub(in super::super) const FILE: usize = 6;
    /// The generation of the endpoint that shared it, in two words, and its number there.
    pub(in super::super) const GENERATION: usize = 8;
    pub(in super::super) const NUMBER: usize = 10;
    pub(in super::super) const WORDS: usize = 16;
}

/// A table of rows. The first word of a row is its *life*: odd while it is in use, and one more
/// with each change of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Table {
    Endpoints,
    Links,
    Regions,
}

impl Table {
    /// The most rows.
    pub(super) const fn rows_max(self) -> usize {
        match self {
            Table::Endpoints => 4096,
            Table::Links | Table::Regions => 8192,
        }
    }

    /// The words of a row.
    pub(super) const fn row_words(self) -> usize {
        match self {
            Table::Endpoints => endpoint::WORDS,
            Table::Links => link::WORDS,
            Table::Regions => region::WORDS,
        }
    }

    /// The table's first word.
    pub(super) const fn start(self) -> usize {
        match self {
            Table::Endpoints => header::WORDS,
            Table::Links => Table::Endpoints.end(),
            Table::Regions => Table::Links.end(),
        }
    }

    const fn end(self) -> usize {
        self.start() + self.rows_max() * self.row_words()
    }
}

/// The words of a page.
pub(super) const PAGE_WORDS: usize = Table::Regions.end();

/// The bytes of a page. Only the part that has been used takes memory.
pub(super) const PAGE_BYTES: usize = PAGE_WORDS * 8;

const _: () = {
    // Rows begin at a cache line, and the words of each item have lines without other writers.
    assert!(
        endpoint::WORDS.is_multiple_of(8)
            && link::WORDS.is_multiple_of(8)
            && region::WORDS.is_multiple_of(8)
    );
    assert!(endpoint::ITEMS.is_multiple_of(8) && endpoint::DROPPED == endpoint::ITEMS + 8);
    assert!(endpoint::NAME + endpoint::NAME_WORDS <= endpoint::COPIED);
    assert!(header::SLOW_PATHS + 2 * crate::slow_path::SlowPath::ALL.len() <= header::WORDS);
    assert!(endpoint::NAME_WORDS * 8 == crate::ipc::domain::DERIVED_NAME_BYTES_MAX);
    assert!(PAGE_BYTES.is_multiple_of(4096));
};

/// Each kind at its code less one.
const KINDS: [Kind; 14] = [
    Kind::Memory,
    Kind::Timeline,
    Kind::Events,
    Kind::Pool,
    Kind::Semaphore,
    Kind::Member,
    Kind::Publisher,
    Kind::Queue,
    Kind::Results,
    Kind::LegacyMemory,
    Kind::Weights,
    Kind::WeightsHolder,
    Kind::Allocations,
    Kind::KernelRing,
];

/// The code of a kind; 0 for none of [`KINDS`].
pub(super) fn kind_code(kind: Kind) -> u64 {
    (1..)
        .zip(KINDS)
        .find(|&(_, known)| known == kind)
        .map_or(0, |(code, _)| code)
}

pub(super) fn kind_of(code: u64) -> Option<Kind> {
    KINDS
        .get(usize::try_from(code).ok()?.checked_sub(1)?)
        .copied()
}

/// The words of an endpoint without a device.
const NO_DEVICE: [u64; 3] = [u64::MAX; 3];

pub(super) fn device_words(device: Option<DeviceId>) -> [u64; 3] {
    let Some(device) = device else {
        return NO_DEVICE;
    };
    let kind = match device.kind {
        DeviceKind::Host => 0,
        DeviceKind::Cuda => 1,
    };
    let [high, low] = halves(device.uuid);
    [kind, high, low]
}

/// The device of three words, `None` for words that name none.
pub(super) fn device_of(words: [u64; 3]) -> Option<DeviceId> {
    let kind = match words[0] {
        0 => DeviceKind::Host,
        1 => DeviceKind::Cuda,
        _ => return None,
    };
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&words[1].to_le_bytes());
    uuid[8..].copy_from_slice(&words[2].to_le_bytes());
    Some(DeviceId { kind, uuid })
}
