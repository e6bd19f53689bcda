//! What endpoints, links and memory write into their rows.

use std::os::fd::BorrowedFd;

use super::layout::{self, Table, endpoint, link, region};
use super::observer::{LinkState, Role};
use super::page::{self, Row};
use crate::device_types::{DeviceId, DeviceKind};
use crate::ipc::Address;
use crate::kind::Kind;
use crate::shm::segment::halves;
use crate::slow_path::{self, SlowPath};

/// Notes that this process runs: called with each tick of an endpoint.
pub(crate) fn beat(now_ns: u64) {
    if let Some(page) = page::own() {
        page.beat(now_ns);
        page.write_slow_paths(&slow_path::counts());
    }
}

/// Writes what is else written with each tick, for an endpoint that has no ticks: a subscriber that
/// cannot attach.
pub(crate) fn write_slow_paths() {
    if let Some(page) = page::own() {
        page.write_slow_paths(&slow_path::counts());
    }
}

/// The description of an endpoint, which does not change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndpointWords<'a> {
    pub(crate) kind: Kind,
    pub(crate) role: Role,
    pub(crate) name: &'a str,
    /// The device and the inode of the domain's directory.
    pub(crate) domain: [u64; 2],
    pub(crate) device: Option<DeviceId>,
    pub(crate) generation: [u8; 16],
    /// The samples that each subscriber may have in flight; 0 for an endpoint without samples.
    pub(crate) depth: u32,
    /// The most bytes of memory; 0 for no limit of its own.
    pub(crate) memory_max: u64,
}

/// The row of an endpoint.
#[derive(Debug)]
pub(crate) struct EndpointRow(Row<{ endpoint::WORDS }>);

impl EndpointRow {
    pub(crate) fn open(words: &EndpointWords<'_>) -> EndpointRow {
        EndpointRow(Row::open(Table::Endpoints, |row| {
            row.store(endpoint::KIND, layout::kind_code(words.kind));
            row.store(endpoint::ROLE, words.role as u64);
            row.store_all(endpoint::DEVICE, &layout::device_words(words.device));
            row.store_all(endpoint::GENERATION, &halves(words.generation));
            row.store_all(endpoint::DOMAIN, &words.domain);
            row.store(endpoint::NAME_BYTES, words.name.len() as u64);
            for (at, chunk) in words.name.as_bytes().chunks(8).enumerate() {
                let mut bytes = [0; 8];
                bytes[..chunk.len()].copy_from_slice(chunk);
                row.store(endpoint::NAME + at, u64::from_le_bytes(bytes));
            }
            row.store(endpoint::DEPTH, words.depth.into());
            row.store(endpoint::MEMORY_MAX, words.memory_max);
        }))
    }

    /// Counts an item: a sample sent, or received. The caller is the only thread that does.
    #[inline]
    pub(crate) fn count(&self, sequence: u64, bytes: u64) {
        self.0.add([(endpoint::ITEMS, 1), (endpoint::BYTES, bytes)]);
        self.0.store(endpoint::SEQUENCE, sequence);
    }

    /// Counts an item that was copied although it was to be sent in place. The caller is the only
    /// thread that does.
    pub(crate) fn copied(&self, reason: SlowPath, bytes: u64) {
        let copied = [(endpoint::COPIED, 1), (endpoint::COPIED_BYTES, bytes)];
        self.0.add(copied);
        self.0.store(endpoint::COPY_REASON, reason as u64);
    }

    /// Adds the time between the sending and the receiving of a counted item.
    #[inline]
    pub(crate) fn time(&self, latency_ns: u64) {
        let timed = [(endpoint::TIMED, 1), (endpoint::LATENCY_NS, latency_ns)];
        self.0.add(timed);
    }

    /// The domain that the name is in: another one after its directory was removed and made again.
    pub(crate) fn set_domain(&self, identity: [u64; 2]) {
        self.0.store_all(endpoint::DOMAIN, &identity);
    }

    /// The publisher that a subscriber is attached to from now on, or the version that a keeper's
    /// name stands for: its memory has the same generation.
    pub(crate) fn attach_to(&self, generation: [u8; 16]) {
        self.0.store_all(endpoint::GENERATION, &halves(generation));
    }

    /// A subscriber has no publisher any more.
    pub(crate) fn detach(&self) {
        self.attach_to([0; 16]);
    }

    /// The state of a publisher, written with each tick.
    pub(crate) fn set_use(&self, dropped: u64, in_flight: u64, peers: u64, memory: u64) {
        self.0.store(endpoint::DROPPED, dropped);
        self.0.store(endpoint::IN_FLIGHT, in_flight);
        self.0.store(endpoint::PEERS, peers);
        self.0.store(endpoint::MEMORY, memory);
    }

    /// The jobs of a queue that no worker has, written with each tick.
    pub(crate) fn set_waiting(&self, jobs: u64) {
        self.0.store(endpoint::WAITING, jobs);
    }

    /// The row of a name that a server answers for.
    pub(crate) fn served(at: &Address<'_>, generation: [u8; 16]) -> EndpointRow {
        EndpointRow::open(&EndpointWords {
            kind: at.kind,
            role: Role::Owner,
            name: at.name.as_str(),
            domain: at.domain.identity(),
            device: None,
            generation,
            depth: 0,
            memory_max: 0,
        })
    }

    /// The clients of a server, written with each tick.
    pub(crate) fn set_clients(&self, clients: usize, now_ns: u64) {
        self.0.store(endpoint::PEERS, clients as u64);
        beat(now_ns);
    }

    /// The row of a new subscriber of this publisher.
    pub(crate) fn link(&self, pid: i32, uid: u32) -> LinkRow {
        let Some((index, life)) = self.0.place() else {
            return LinkRow(Row::unlisted(Table::Links));
        };
        LinkRow(Row::open(Table::Links, |row| {
            row.store(link::ENDPOINT, index.into());
            row.store(link::ENDPOINT_LIFE, life);
            row.store(link::PID, pid as u64);
            row.store(link::UID, uid.into());
            row.store(link::STATE, LinkState::Attaching as u64);
        }))
    }
}

/// The row of one subscriber of a publisher.
#[derive(Debug)]
pub(crate) struct LinkRow(Row<{ link::WORDS }>);

/// The state of a link, written with each tick.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinkWords {
    pub(crate) state: LinkState,
    pub(crate) in_flight: u64,
    pub(crate) dropped: u64,
    pub(crate) silent_ms: u64,
}

impl LinkRow {
    pub(crate) fn set(&self, words: &LinkWords) {
        self.0.store(link::STATE, words.state as u64);
        self.0.store(link::IN_FLIGHT, words.in_flight);
        self.0.store(link::DROPPED, words.dropped);
        self.0.store(link::SILENT_MS, words.silent_ms);
    }
}

/// The identity of memory without a file of its own: a GPU's descriptors are all of one file.
pub(crate) const NO_FILE: [u64; 2] = [0; 2];

/// The device and the inode of the file of a memory's descriptor, if it has one of its own.
pub(crate) fn file_of(fd: BorrowedFd<'_>, device: DeviceId) -> [u64; 2] {
    match device.kind {
        DeviceKind::Host => {
            rustix::fs::fstat(fd).map_or(NO_FILE, |stat| [stat.st_dev, stat.st_ino])
        }
        DeviceKind::Cuda => NO_FILE,
    }
}

/// The row of one region of memory.
#[derive(Debug)]
pub(crate) struct RegionRow(Row<{ region::WORDS }>);

impl RegionRow {
    /// `file`: the device and the inode of the memory's file, for memory that has one of its own.
    pub(crate) fn open(role: Role, bytes: u64, device: DeviceId, file: [u64; 2]) -> RegionRow {
        RegionRow(Row::open(Table::Regions, |row| {
            row.store(region::ROLE, role as u64);
            row.store(region::BYTES, bytes);
            row.store_all(region::DEVICE, &layout::device_words(Some(device)));
            row.store_all(region::FILE, &file);
        }))
    }

    /// The row of memory of which this process has the descriptor alone.
    pub(crate) fn keep(fd: BorrowedFd<'_>, bytes: u64, device: DeviceId) -> RegionRow {
        RegionRow::open(Role::Keeper, bytes, device, file_of(fd, device))
    }

    /// As [`keep`](Self::keep), of memory in several pieces.
    pub(crate) fn keep_many(bytes: u64, device: DeviceId) -> RegionRow {
        RegionRow::open(Role::Keeper, bytes, device, NO_FILE)
    }

    /// Other memory lies there from now on; `file` as for [`open`](Self::open).
    pub(crate) fn replace(&self, file: [u64; 2]) {
        self.0.store_all(region::FILE, &file);
    }

    /// The endpoint that shares the region, and the region's number there.
    pub(crate) fn identify(&self, generation: [u8; 16], number: u64) {
        self.0.store_all(region::GENERATION, &halves(generation));
        self.0.store(region::NUMBER, number);
    }
}
