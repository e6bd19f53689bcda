//! Reads the pages of other processes.
//!
//! A page is another process's, so it may hold anything. Its file is checked before it is mapped
//! (kind, size, seals), each word is loaded once, and a row with a word that no writer stores is
//! counted as damaged and left out. All numbers of a row are the other process's claim.

mod search;

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicU64, fence};
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, MemfdFlags, Mode, OFlags, Statx, StatxFlags};

pub use self::search::Observer;
use super::layout::{
    self, MAGIC, PAGE_BYTES, PAGE_WORDS, Table, VERSION, endpoint, header, link, region,
};
use crate::device_types::DeviceId;
use crate::ipc::domain::EndpointName;
use crate::kind::Kind;
use crate::origin::{self, ProcessOrigin};
use crate::os;
use crate::shm::page::SharedPage;
use crate::shm::seal;
use crate::slow_path::{SlowPath, SlowPathCount};

/// The side of an endpoint, or how a process has memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The owner of the name, or of the memory.
    Owner = 1,
    /// A subscriber, a worker or a server of another's endpoint; a process that has imported memory.
    Peer = 2,
    /// Of memory alone: a process that has its descriptor and does not map it.
    Keeper = 3,
}

impl Role {
    fn of(word: u64) -> Option<Role> {
        [Role::Owner, Role::Peer, Role::Keeper]
            .into_iter()
            .find(|&role| role as u64 == word)
    }
}

/// The state of a subscriber, as its publisher sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkState {
    /// It maps the memory, and gets no samples yet.
    Attaching = 1,
    /// It gets samples and is awake.
    Active = 2,
    /// It sleeps until the next sample comes.
    Waiting = 3,
    /// It has left, and holds samples that it has not released.
    Leaving = 4,
    /// It has given no sign of life for a second: stopped, or very slow.
    Stalled = 5,
    /// Its connection has ended without a farewell; its death is not proven.
    Suspect = 6,
    /// Its death is proven.
    Dead = 7,
}

impl LinkState {
    /// All of them.
    pub const ALL: [LinkState; 7] = [
        LinkState::Attaching,
        LinkState::Active,
        LinkState::Waiting,
        LinkState::Leaving,
        LinkState::Stalled,
        LinkState::Suspect,
        LinkState::Dead,
    ];

    fn of(word: u64) -> Option<LinkState> {
        LinkState::ALL
            .into_iter()
            .find(|&state| state as u64 == word)
    }

    /// The state's name, in small letters.
    pub fn name(self) -> &'static str {
        match self {
            LinkState::Attaching => "attaching",
            LinkState::Active => "active",
            LinkState::Waiting => "waiting",
            LinkState::Leaving => "leaving",
            LinkState::Stalled => "stalled",
            LinkState::Suspect => "suspect",
            LinkState::Dead => "dead",
        }
    }
}

/// One endpoint of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Its kind; a subscriber has that of its publisher.
    pub kind: Kind,
    /// Whether it owns the name.
    pub role: Role,
    /// The name.
    pub name: EndpointName,
    /// The device and the inode of its domain's directory.
    pub domain: [u64; 2],
    /// The device, if it has one.
    pub device: Option<DeviceId>,
    /// The generation of the publisher.
    pub generation: [u64; 2],
    /// Items sent, or received.
    pub items: u64,
    /// The bytes of these items.
    pub bytes: u64,
    /// The number of the last item.
    pub sequence: u64,
    /// The items with a known latency.
    pub timed: u64,
    /// The sum of their latencies, in nanoseconds.
    pub latency_ns: u64,
    /// Items that a policy kept back, over all subscribers, also those that have left.
    pub dropped: u64,
    /// Samples that were given to subscribers and not released.
    pub in_flight: u64,
    /// Bytes of memory that it has allocated.
    pub memory: u64,
    /// Its limit; 0 for none.
    pub memory_max: u64,
    /// Its subscribers, or its clients.
    pub peers: u64,
    /// The samples that each subscriber may have in flight; 0 for an endpoint without samples.
    pub depth: u64,
    /// The jobs of a queue that no worker has.
    pub waiting: u64,
    /// The items that were copied although they were to be sent in place, and the last reason.
    pub copied: Option<SlowPathCount>,
    /// The subscribers, for a publisher.
    pub links: Vec<Link>,
}

/// One subscriber of a publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Its process, by its number in the publisher's PID namespace.
    pub pid: i32,
    /// Its effective user.
    pub uid: u32,
    /// Its state.
    pub state: LinkState,
    /// The samples that it was given and has not released: its lag.
    pub in_flight: u64,
    /// The samples that it did not get because of its policy.
    pub dropped: u64,
    /// How long it has given no sign of life.
    pub silent: Duration,
}

/// The identity of memory, the same in its owner and in every process that has imported it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RegionId {
    /// The device and the inode of its file.
    File([u64; 2]),
    /// The generation of the endpoint that shares it, and its number there.
    Shared([u64; 2], u64),
    /// It has not been shared under a number: the process, and the row there.
    Own(i32, u32),
}

/// Memory that a process has allocated or imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Allocated, or imported.
    pub role: Role,
    /// Its length.
    pub bytes: u64,
    /// The device that it is on.
    pub device: DeviceId,
    /// Its identity.
    pub id: RegionId,
    /// The generation of the endpoint that shares it; zeros for none.
    pub generation: [u64; 2],
}

/// The page of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its number in this PID namespace.
    pub pid: i32,
    /// The time of its last tick, by `CLOCK_MONOTONIC`; 0 before the first one.
    pub beat_ns: u64,
    /// Its endpoints.
    pub endpoints: Vec<Endpoint>,
    /// Its memory.
    pub regions: Vec<Region>,
    /// The slow paths that it has taken.
    pub slow_paths: Vec<SlowPathCount>,
    /// How many rows found no room in its page.
    pub unlisted: u64,
    /// How many rows hold words that no writer stores.
    pub damaged: u64,
}

/// A process with a page that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// The process.
    pub pid: i32,
    /// Why not.
    pub reason: String,
}

/// What one look at all processes found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observation {
    /// The processes with a page, by their numbers.
    pub processes: Vec<Process>,
    /// The processes with a page that cannot be read.
    pub unreadable: Vec<Unreadable>,
    /// How many processes have not been searched to the end for a page: their users' processes have
    /// more descriptors than are read in one look. The next look goes on.
    pub unsearched: usize,
}

/// Why a descriptor is no readable page.
pub(super) enum Refusal {
    /// Another file: the number has been used again, or another process's page.
    Other,
    /// A page, or a file that pretends to be one.
    Bad(String),
}

pub(super) fn read_descriptor(pid: i32, fd: i32) -> Result<Process, Refusal> {
    let file = open(pid, fd).map_err(|_| Refusal::Other)?;
    // Its size and seals are checked by the first, so no access of the mapping raises SIGBUS.
    seal::check(file.as_fd(), PAGE_BYTES as u64)
        .and_then(|()| seal::check_closed(file.as_fd()))
        .map_err(|found| Refusal::Bad(format!("its statistics page is {found}")))?;
    let page = SharedPage::map_to_read(file.as_fd(), PAGE_BYTES)
        .map_err(|error| Refusal::Bad(format!("its statistics page cannot be mapped: {error}")))?;
    read(pid, page.at(0))
}

/// Opens another process's descriptor, if it is a plain file where memfds are: opening a device or
/// a pipe may have an effect, or wait, and a file system of that process's own (FUSE) may never
/// answer.
fn open(pid: i32, fd: i32) -> Result<OwnedFd, rustix::io::Errno> {
    let path = OFlags::PATH | OFlags::CLOEXEC;
    let found = rustix::fs::open(format!("/proc/{pid}/fd/{fd}"), path, Mode::empty())?;
    let stat = known_stat(&found)?;
    let is_plain = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::RegularFile;
    if !is_plain || memfd_device().is_some_and(|device| device != device_of(&stat)) {
        return Err(rustix::io::Errno::INVAL);
    }
    let read = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let opened = format!("/proc/self/fd/{}", found.as_raw_fd());
    rustix::fs::open(opened, read, Mode::empty()).and_then(os::above_standard)
}

/// `statx(AT_STATX_DONT_SYNC)`: what the kernel knows of a file, without asking its file system.
fn known_stat(file: &OwnedFd) -> Result<Statx, rustix::io::Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, "", flags, StatxFlags::TYPE)
}

fn device_of(stat: &Statx) -> [u32; 2] {
    [stat.stx_dev_major, stat.stx_dev_minor]
}

/// The device of all memfds of this kernel. `None` where this process can make none.
fn memfd_device() -> Option<[u32; 2]> {
    static DEVICE: OnceLock<[u32; 2]> = OnceLock::new();
    if let Some(device) = DEVICE.get() {
        return Some(*device);
    }
    let made = rustix::fs::memfd_create(c"warpipe-device", MemfdFlags::CLOEXEC).ok()?;
    let device = device_of(&known_stat(&made).ok()?);
    Some(*DEVICE.get_or_init(|| device))
}

/// Reads a page that claims to be that of `pid`.
fn read(pid: i32, words: &[AtomicU64; PAGE_WORDS]) -> Result<Process, Refusal> {
    let word = |at: usize| words[at].load(Relaxed);
    if words[header::MAGIC].load(Acquire) != MAGIC {
        // It is being made, or it is no page.
        return Err(Refusal::Other);
    }
    if word(header::VERSION) != VERSION {
        return Err(Refusal::Bad(format!(
            "its statistics page has layout {}, and this program reads layout {VERSION}",
            word(header::VERSION)
        )));
    }
    let counts_here =
        ProcessOrigin::here().is_ok_and(|here| here.namespace == word(header::NAMESPACE));
    // A child that was forked without the library's knowledge has its parent's page.
    if origin::started_of(pid) != Some(word(header::STARTED))
        || (counts_here && word(header::PID) != pid as u64)
    {
        return Err(Refusal::Other);
    }
    let mut process = Process {
        pid,
        beat_ns: word(header::BEAT),
        endpoints: Vec::new(),
        regions: Vec::new(),
        slow_paths: slow_paths(&word),
        unlisted: word(header::UNLISTED),
        damaged: 0,
    };
    let damaged = &mut process.damaged;
    let endpoints = rows(words, Table::Endpoints, damaged, endpoint_of);
    let links = rows(words, Table::Links, damaged, link_of);
    let own = |index, row: &_| region_of(pid, index, row);
    let regions = rows(words, Table::Regions, damaged, own);
    let mut places = HashMap::new();
    for (index, life, endpoint) in endpoints {
        places.insert((u64::from(index), life), process.endpoints.len());
        process.endpoints.push(endpoint);
    }
    for (_, _, (of, life, link)) in links {
        // The endpoint may have been closed since its row was read.
        if let Some(&place) = places.get(&(of, life)) {
            process.endpoints[place].links.push(link);
        }
    }
    process.regions = regions.into_iter().map(|(.., region)| region).collect();
    Ok(process)
}

/// The slow paths that have been taken.
fn slow_paths(word: &impl Fn(usize) -> u64) -> Vec<SlowPathCount> {
    let counts = SlowPath::ALL.into_iter().enumerate().map(|(at, path)| {
        let first = header::SLOW_PATHS + 2 * at;
        SlowPathCount {
            path,
            count: word(first),
            bytes: word(first + 1),
        }
    });
    counts.filter(|it| it.count > 0).collect()
}

/// The rows in use of a table, each with its index and its first word; counts those that `parse`
/// refuses. A row that changes its owner meanwhile is left out.
fn rows<const N: usize, T>(
    words: &[AtomicU64; PAGE_WORDS],
    table: Table,
    damaged: &mut u64,
    parse: impl Fn(u32, &[u64; N]) -> Option<T>,
) -> Vec<(u32, u64, T)> {
    let end = words[header::ENDS + table as usize].load(Relaxed);
    let end = usize::try_from(end)
        .unwrap_or(usize::MAX)
        .min(table.rows_max());
    let mut found = Vec::new();
    for index in 0..end {
        let start = table.start() + index * N;
        let life = words[start].load(Acquire);
        if life.is_multiple_of(2) {
            continue;
        }
        let copy: [u64; N] = std::array::from_fn(|at| words[start + at].load(Relaxed));
        fence(Acquire);
        if words[start].load(Relaxed) != life {
            continue;
        }
        match parse(index as u32, &copy) {
            Some(row) => found.push((index as u32, life, row)),
            None => *damaged += 1,
        }
    }
    found
}

fn pair(row: &[u64], at: usize) -> [u64; 2] {
    [row[at], row[at + 1]]
}

fn device(row: &[u64], at: usize) -> Option<DeviceId> {
    layout::device_of([row[at], row[at + 1], row[at + 2]])
}

fn endpoint_of(_: u32, row: &[u64; endpoint::WORDS]) -> Option<Endpoint> {
    let words = &row[endpoint::NAME..endpoint::NAME + endpoint::NAME_WORDS];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let length = usize::try_from(row[endpoint::NAME_BYTES]).ok()?;
    let name = std::str::from_utf8(bytes.get(..length)?).ok()?;
    Some(Endpoint {
        kind: layout::kind_of(row[endpoint::KIND])?,
        role: Role::of(row[endpoint::ROLE])?,
        // A checked name has no character that a terminal would obey.
        name: EndpointName::of_endpoint(name).ok()?,
        domain: pair(row, endpoint::DOMAIN),
        device: device(row, endpoint::DEVICE),
        generation: pair(row, endpoint::GENERATION),
        items: row[endpoint::ITEMS],
        bytes: row[endpoint::BYTES],
        sequence: row[endpoint::SEQUENCE],
        timed: row[endpoint::TIMED],
        latency_ns: row[endpoint::LATENCY_NS],
        dropped: row[endpoint::DROPPED],
        in_flight: row[endpoint::IN_FLIGHT],
        memory: row[endpoint::MEMORY],
        memory_max: row[endpoint::MEMORY_MAX],
        peers: row[endpoint::PEERS],
        depth: row[endpoint::DEPTH],
        waiting: row[endpoint::WAITING],
        copied: SlowPath::of(row[endpoint::COPY_REASON]).map(|path| SlowPathCount {
            path,
            count: row[endpoint::COPIED],
            bytes: row[endpoint::COPIED_BYTES],
        }),
        links: Vec::new(),
    })
}

/// A link, with the index and the first word of its publisher's row.
fn link_of(_: u32, row: &[u64; link::WORDS]) -> Option<(u64, u64, Link)> {
    let link = Link {
        pid: i32::try_from(row[link::PID]).ok()?,
        uid: u32::try_from(row[link::UID]).ok()?,
        state: LinkState::of(row[link::STATE])?,
        in_flight: row[link::IN_FLIGHT],
        dropped: row[link::DROPPED],
        silent: Duration::from_millis(row[link::SILENT_MS]),
    };
    Some((row[link::ENDPOINT], row[link::ENDPOINT_LIFE], link))
}

fn region_of(pid: i32, index: u32, row: &[u64; region::WORDS]) -> Option<Region> {
    let (file, generation) = (pair(row, region::FILE), pair(row, region::GENERATION));
    let id = match (file, generation) {
        ([0, 0], [0, 0]) => RegionId::Own(pid, index),
        ([0, 0], shared) => RegionId::Shared(shared, row[region::NUMBER]),
        (file, _) => RegionId::File(file),
    };
    Some(Region {
        role: Role::of(row[region::ROLE])?,
        bytes: row[region::BYTES],
        device: device(row, region::DEVICE)?,
        id,
        generation,
    })
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Owner => "owner",
            Role::Peer => "peer",
            Role::Keeper => "keeper",
        })
    }
}

/// For tests: reads the words of a page as those of this process.
#[cfg(test)]
pub(super) fn try_read(words: &[AtomicU64; PAGE_WORDS]) -> Option<Process> {
    read(std::process::id() as i32, words).ok()
}

/// For tests: the page at a descriptor; the reason of one that is refused, if it is a page.
#[cfg(test)]
pub(super) fn try_descriptor(pid: i32, fd: i32) -> Result<Process, Option<String>> {
    read_descriptor(pid, fd).map_err(|refusal| match refusal {
        Refusal::Other => None,
        Refusal::Bad(reason) => Some(reason),
    })
}
