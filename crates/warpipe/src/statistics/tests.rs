//! Tests of the page and its observer.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{MemfdFlags, SealFlags};

use super::layout::{
    FILE_NAME, MAGIC, PAGE_BYTES, PAGE_WORDS, Table, VERSION, endpoint, header, kind_code, link,
    region,
};
use super::observer::try_read;
use super::*;
use crate::device_types::DeviceKind;
use crate::hostile::{alone, in_a_forked_child};
use crate::origin::ProcessOrigin;
use crate::slow_path;
use crate::wait::OptionalExtension;
use crate::{DeviceId, Kind};

const HOST: DeviceId = DeviceId {
    kind: DeviceKind::Host,
    uuid: [0; 16],
};

pub(super) fn words(name: &str) -> EndpointWords<'_> {
    EndpointWords {
        kind: Kind::Publisher,
        role: Role::Owner,
        name,
        domain: [1, 2],
        device: Some(HOST),
        generation: [7; 16],
        depth: 16,
        memory_max: 1 << 30,
    }
}

fn own() -> Process {
    let pid = std::process::id() as i32;
    let found = Observer::new().observe_one(pid);
    let own = found
        .processes
        .into_iter()
        .find(|process| process.pid == pid);
    own.expect("this process has a page")
}

fn find(name: &str) -> Option<Endpoint> {
    let endpoints = own().endpoints;
    endpoints.into_iter().find(|it| it.name.as_str() == name)
}

#[test]
fn an_observer_sees_what_an_endpoint_has_counted_until_it_is_closed() {
    let row = EndpointRow::open(&words("statistics/counted"));
    (1..=3).for_each(|sequence| row.count(sequence, 100));
    row.time(40);
    row.set_use(5, 2, 1, 4096);
    row.copied(SlowPath::Gathered, 10);
    row.copied(SlowPath::NotExportable, 30);
    let link = row.link(4711, 42);
    link.set(&LinkWords {
        state: LinkState::Stalled,
        in_flight: 2,
        dropped: 5,
        silent_ms: 1200,
    });
    let seen = find("statistics/counted").unwrap();
    assert_eq!((seen.items, seen.bytes, seen.sequence), (3, 300, 3));
    assert_eq!((seen.timed, seen.latency_ns), (1, 40));
    let copied = SlowPathCount {
        path: SlowPath::NotExportable,
        count: 2,
        bytes: 40,
    };
    assert_eq!(seen.copied, Some(copied), "with the last reason");
    assert_eq!((seen.dropped, seen.in_flight, seen.memory), (5, 2, 4096));
    assert_eq!(
        (seen.kind, seen.role, seen.device),
        (Kind::Publisher, Role::Owner, Some(HOST))
    );
    let [seen] = seen.links[..] else {
        panic!("one link: {seen:?}")
    };
    assert_eq!(
        (seen.pid, seen.uid, seen.state),
        (4711, 42, LinkState::Stalled)
    );
    assert_eq!((seen.in_flight, seen.silent.as_millis()), (2, 1200));
    drop((link, row));
    assert_eq!(find("statistics/counted"), None);
}

#[test]
fn slow_paths_are_seen_after_a_tick_and_a_child_counts_its_own() {
    let _row = EndpointRow::open(&words("statistics/slow"));
    let seen = || {
        let found = own().slow_paths;
        let found = found.iter().find(|it| it.path == SlowPath::StagedDownload);
        found.map_or((0, 0), |it| (it.count, it.bytes))
    };
    let (count, bytes) = seen();
    slow_path::count(SlowPath::StagedDownload, 100);
    slow_path::count(SlowPath::StagedDownload, 50);
    beat(1);
    assert_eq!(seen(), (count + 2, bytes + 150));
    in_a_forked_child(|| {
        let _own = EndpointRow::open(&words("statistics/slow-child"));
        slow_path::count(SlowPath::StagedDownload, 1);
        write_slow_paths();
        seen() == (1, 1)
    });
    assert_eq!(seen(), (count + 2, bytes + 150));
}

#[test]
fn every_slow_path_has_one_word_and_one_name() {
    for path in SlowPath::ALL {
        assert_eq!(SlowPath::of(path as u64), Some(path));
        let others = SlowPath::ALL
            .iter()
            .filter(|other| other.name() == path.name());
        assert_eq!(others.count(), 1, "{}", path.name());
    }
    assert_eq!(SlowPath::of(0), None);
    assert_eq!(SlowPath::of(u64::MAX), None);
}

#[test]
fn a_thousand_endpoints_share_one_descriptor_and_rows_are_used_again() {
    // Other tests make descriptors of that name.
    let test = "a_thousand_endpoints_share_one_descriptor_and_rows_are_used_again";
    alone(module_path!(), test, a_thousand_endpoints);
}

fn a_thousand_endpoints() {
    let pages = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let targets = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        targets
            .filter(|target| target.to_str() == Some(layout::FILE_LINK))
            .count()
    };
    for _ in 0..2 {
        let names: Vec<String> = (0..1000).map(|n| format!("statistics/many/{n}")).collect();
        let rows: Vec<_> = names
            .iter()
            .map(|name| EndpointRow::open(&words(name)))
            .collect();
        let seen = own();
        assert_eq!((pages(), seen.unlisted), (1, 0));
        let many = |it: &&Endpoint| it.name.as_str().starts_with("statistics/many/");
        assert_eq!(seen.endpoints.iter().filter(many).count(), 1000);
        drop(rows);
    }
}

#[test]
fn a_forked_child_writes_nothing_to_its_parents_page() {
    let row = EndpointRow::open(&words("statistics/forked"));
    row.count(1, 10);
    let link = row.link(1, 2);
    in_a_forked_child(|| {
        row.count(2, 10);
        row.time(1);
        link.set(&LinkWords {
            state: LinkState::Dead,
            in_flight: 9,
            dropped: 9,
            silent_ms: 9,
        });
        // The child's own page, not the parent's.
        let own = EndpointRow::open(&words("statistics/of-the-child"));
        own.count(1, 1);
        let is_alone = find("statistics/forked").is_none();
        is_alone && find("statistics/of-the-child").is_some()
    });
    let seen = find("statistics/forked").unwrap();
    assert_eq!((seen.items, seen.timed), (1, 0));
    assert_eq!(seen.links[0].state, LinkState::Attaching);
    assert_eq!(find("statistics/of-the-child"), None);
}

#[test]
fn no_process_can_write_a_page_or_change_its_length() {
    let _row = EndpointRow::open(&words("statistics/sealed"));
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let is_page = |fd: &std::fs::DirEntry| {
        std::fs::read_link(fd.path()).is_ok_and(|it| it.to_str() == Some(layout::FILE_LINK))
    };
    let path = fds.into_iter().find(is_page).unwrap().path();
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    assert!(std::os::unix::fs::FileExt::write_at(&file, b"x", 0).is_err());
    assert!(file.set_len(0).is_err() && file.set_len(1 << 30).is_err());
}

/// A page of this process, as a writer begins it.
fn page() -> Box<[AtomicU64; PAGE_WORDS]> {
    let words: Vec<AtomicU64> = (0..PAGE_WORDS).map(|_| AtomicU64::new(0)).collect();
    let origin = ProcessOrigin::here().unwrap();
    for (at, value) in [
        (header::MAGIC, MAGIC),
        (header::VERSION, VERSION),
        (header::PID, origin.pid as u64),
        (header::NAMESPACE, origin.namespace),
        (header::STARTED, origin.started),
    ] {
        words[at].store(value, Relaxed);
    }
    words.into_boxed_slice().try_into().unwrap()
}

#[test]
fn a_page_of_nonsense_is_refused_or_its_rows_are_left_out() {
    for value in [1, 2, u64::MAX, u64::MAX - 1, 0x1b5b_324a_1b5b_324a] {
        let page = page();
        page[header::WORDS..]
            .iter()
            .for_each(|word| word.store(value, Relaxed));
        for table in 0..3 {
            page[header::ENDS + table].store(u64::MAX, Relaxed);
        }
        let seen = try_read(&page).unwrap();
        assert!(
            seen.endpoints.is_empty() && seen.regions.len() <= 8192,
            "{value:x}"
        );
        assert_eq!(seen.damaged > 0, !value.is_multiple_of(2), "{value:x}");
    }
    for (word, value) in [
        (header::MAGIC, 0),
        (header::VERSION, VERSION + 1),
        (header::STARTED, 1),
        (header::PID, 1),
    ] {
        let page = page();
        page[word].store(value, Relaxed);
        assert_eq!(try_read(&page), None, "word {word}");
    }
}

#[test]
fn a_name_that_a_terminal_would_obey_is_not_shown() {
    let page = page();
    let start = Table::Endpoints.start();
    page[header::ENDS].store(1, Relaxed);
    for (at, value) in [
        (0, 1),
        (endpoint::KIND, kind_code(Kind::Publisher)),
        (endpoint::ROLE, Role::Owner as u64),
        (endpoint::NAME_BYTES, 4),
        (endpoint::NAME, u64::from_le_bytes(*b"abcd\0\0\0\0")),
    ] {
        page[start + at].store(value, Relaxed);
    }
    assert_eq!(try_read(&page).unwrap().endpoints[0].name.as_str(), "abcd");
    page[start + endpoint::NAME].store(u64::from_le_bytes(*b"\x1b[2J\0\0\0\0"), Relaxed);
    let seen = try_read(&page).unwrap();
    assert!(seen.endpoints.is_empty() && seen.damaged == 1);
}

/// A file that pretends to be this process's page, while it lives.
fn pretend(name: &CStr, flags: MemfdFlags, bytes: u64, seals: SealFlags) -> std::os::fd::OwnedFd {
    let fd = rustix::fs::memfd_create(name, flags | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    let _ = rustix::fs::fcntl_add_seals(&fd, seals);
    fd
}

#[test]
fn a_file_that_could_shrink_or_has_another_length_is_never_mapped() {
    let pid = std::process::id() as i32;
    let sealed = SealFlags::GROW | SealFlags::SHRINK | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    let bytes = PAGE_BYTES as u64;
    let cases = [
        (MemfdFlags::ALLOW_SEALING, bytes, SealFlags::empty()),
        (
            MemfdFlags::ALLOW_SEALING,
            bytes,
            SealFlags::GROW | SealFlags::SHRINK,
        ),
        (MemfdFlags::ALLOW_SEALING, bytes + 4096, sealed),
        (MemfdFlags::ALLOW_SEALING, 0, sealed),
        (MemfdFlags::empty(), bytes, SealFlags::empty()),
    ];
    for (flags, bytes, seals) in cases {
        let fd = pretend(FILE_NAME, flags, bytes, seals);
        let refused = observer::try_descriptor(pid, fd.as_fd().as_raw_fd());
        assert!(refused.unwrap_err().is_some(), "{bytes} bytes, {seals:?}");
    }
    // An empty page of the right kind is another process's that has not begun: passed over.
    let fd = pretend(FILE_NAME, MemfdFlags::ALLOW_SEALING, bytes, sealed);
    assert_eq!(
        observer::try_descriptor(pid, fd.as_raw_fd()).unwrap_err(),
        None
    );
    // A pipe is not opened at all: that could wait.
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(
        observer::try_descriptor(pid, pipe.as_raw_fd()).unwrap_err(),
        None
    );
}

#[test]
fn a_file_of_another_file_system_is_not_opened() {
    // One of FUSE could let the opener wait for ever. A file on a disk stands for it.
    let path = std::env::temp_dir().join(format!("warpipe-no-memfd-{}", std::process::id()));
    let file = std::fs::File::create(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    let found = observer::try_descriptor(std::process::id() as i32, file.as_raw_fd());
    assert_eq!(found.unwrap_err(), None);
}

#[test]
fn the_memory_of_an_owner_and_of_an_importer_has_one_identity() {
    use crate::{Access, Device, Memory};
    let device = Device::host();
    let memory = Memory::allocate(&device, 12_288).unwrap();
    let (fd, info) = (memory.export_fd().unwrap(), memory.info());
    let before = own().regions;
    let opened = Memory::import_fd(&device, &fd, &info, Access::Read).unwrap();
    let regions = own().regions;
    let shared: Vec<_> = regions.iter().filter(|it| !before.contains(it)).collect();
    assert!(
        shared.iter().any(|it| it.role == Role::Peer
            && before
                .iter()
                .any(|own| { own.id == it.id && own.role == Role::Owner && own.bytes == 12_288 })),
        "{shared:?}"
    );
    drop((opened, memory));
}

#[test]
fn a_subscriber_that_looks_for_its_next_publisher_is_attached_to_none() {
    use crate::{Device, Domain, Publisher, Subscriber, SubscriberOptions};
    use std::time::Duration;
    let folder = std::env::temp_dir().join(format!("warpipe-detached-{}", std::process::id()));
    let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
    let name = "statistics/detached";
    let publisher = Publisher::new(name, domain.on(&device)).unwrap();
    let options = SubscriberOptions {
        reconnect: true,
        ..domain.on(&device)
    };
    let mut subscriber = Subscriber::open(name, options, Duration::ZERO).unwrap();
    let generations = || -> Vec<_> {
        let seen = own()
            .endpoints
            .into_iter()
            .filter(|it| it.name.as_str() == name);
        seen.map(|it| (it.role, it.generation)).collect()
    };
    let [(_, published), (_, attached)] = generations()[..] else {
        panic!("a publisher and a subscriber: {:?}", generations())
    };
    assert!(published == attached && published != [0; 2]);
    drop(publisher);
    let stream = device.stream().unwrap();
    let received = subscriber.receive(&stream, Duration::from_millis(20));
    assert!(received.is_err());
    let ended = warpipe_testkit::eventually(Duration::from_secs(60), || {
        let _ = subscriber.receive(&stream, Duration::ZERO).optional();
        generations()
            .iter()
            .all(|&(role, it)| role == Role::Owner || it == [0; 2])
    });
    assert!(ended, "{:?}", generations());
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn every_word_of_a_row_has_a_place_of_its_own() {
    let places = [
        endpoint::KIND,
        endpoint::ROLE,
        endpoint::DEVICE,
        endpoint::GENERATION,
        endpoint::DOMAIN,
        endpoint::NAME_BYTES,
        endpoint::NAME,
        endpoint::ITEMS,
        endpoint::BYTES,
        endpoint::SEQUENCE,
        endpoint::TIMED,
        endpoint::LATENCY_NS,
        endpoint::DROPPED,
        endpoint::IN_FLIGHT,
        endpoint::MEMORY,
        endpoint::MEMORY_MAX,
        endpoint::PEERS,
        endpoint::DEPTH,
    ];
    assert!(places.is_sorted_by(|a, b| a < b) && places[places.len() - 1] < endpoint::WORDS);
    const { assert!(link::SILENT_MS < link::WORDS && region::NUMBER < region::WORDS) };
}
