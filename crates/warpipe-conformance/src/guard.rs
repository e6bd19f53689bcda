//! Checks that nothing is left behind: descriptors, files, mappings, threads, device memory.
//!
//! A guard counts resources; later it counts again, until no count is higher or time is up. (A dead
//! peer's resources come back on *proven* death, and memory that a stream may still write a little
//! later, so the counts may take a moment.)

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use warpipe::{Device, DeviceKind, Domain, Publisher};
use warpipe_testkit::eventually;

/// How long leftovers may take to go.
const SETTLE: Duration = Duration::from_secs(10);

/// A count of everything that can leak.
#[derive(Debug)]
pub struct Guard {
    device: Device,
    folder: PathBuf,
    before: BTreeMap<String, u64>,
}

impl Guard {
    /// Counts what this process holds of `device`, and the files in the domain.
    pub fn take(device: &Device, domain: &Domain) -> Guard {
        let folder = domain.path().to_path_buf();
        let before = count(device, &folder);
        Guard {
            device: device.clone(),
            folder,
            before,
        }
    }

    /// Whether nothing counts more than before, just now.
    pub fn is_settled(&self) -> bool {
        self.is_no_more(&count(&self.device, &self.folder))
    }

    fn is_no_more(&self, now: &BTreeMap<String, u64>) -> bool {
        now.iter()
            .all(|(key, &count)| count <= self.before.get(key).copied().unwrap_or(0))
    }

    /// Waits until nothing counts more than before.
    ///
    /// # Errors
    /// The differences, if there still are any after 10 s.
    pub fn settles(&self) -> Result<()> {
        let mut now = BTreeMap::new();
        let same = eventually(SETTLE, || {
            now = count(&self.device, &self.folder);
            self.is_no_more(&now)
        });
        if same {
            return Ok(());
        }
        let keys: std::collections::BTreeSet<_> = now.keys().chain(self.before.keys()).collect();
        let get = |counts: &BTreeMap<String, u64>, key: &str| counts.get(key).copied().unwrap_or(0);
        let changes: Vec<String> = keys
            .into_iter()
            .map(|key| (key, get(&self.before, key), get(&now, key)))
            .filter(|(_, before, now)| before < now)
            .map(|(key, before, now)| format!("{key}: {before} before, {now} now"))
            .collect();
        bail!("something was left behind: {}", changes.join("; "))
    }
}

/// A guard around a publisher with memory that may grow while dead and stopped peers still hold
/// some, up to twice its limit.
#[derive(Debug)]
pub struct PublisherGuard<'a> {
    publisher: &'a Publisher,
    domain: &'a Domain,
    memory: u64,
    guard: Guard,
}

impl<'a> PublisherGuard<'a> {
    /// Counts what is there.
    pub fn take(publisher: &'a Publisher, domain: &'a Domain) -> PublisherGuard<'a> {
        let mut guard = Guard::take(publisher.device(), domain);
        // A publisher makes its doorbell, an eventfd, when a thread first sleeps for room.
        let eventfds = guard.before.entry("descriptors (anon_inode)".into());
        *eventfds.or_default() += 1;
        PublisherGuard {
            publisher,
            domain,
            memory: publisher.stats().map_or(0, |it| it.memory_bytes),
            guard,
        }
    }

    /// Waits until nothing counts more than before, or counts anew where the publisher has grown
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Guard::settles`]; memory of more than twice the limit.
    pub fn settles(&mut self) -> Result<()> {
        let stats = self.publisher.stats()?;
        let (memory, limit) = (stats.memory_bytes, stats.memory_limit);
        ensure!(
            memory <= 2 * limit,
            "{memory} bytes with a limit of {limit}"
        );
        if memory != self.memory {
            *self = PublisherGuard::take(self.publisher, self.domain);
            return Ok(());
        }
        self.guard.settles()
    }
}

fn count(device: &Device, folder: &Path) -> BTreeMap<String, u64> {
    let mut counts = descriptors();
    counts.insert(
        "bytes of device memory".into(),
        device.backend().bytes_held(),
    );
    counts.insert(
        "files in the domain".into(),
        std::fs::read_dir(folder).map_or(0, |files| files.count() as u64),
    );
    counts.insert("mappings".into(), mappings());
    counts.insert("threads".into(), threads_of(device));
    counts
}

/// Open descriptors by what they are: a leak says more when it is a socket or a memfd.
fn descriptors() -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return counts;
    };
    for entry in entries.flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else {
            continue;
        };
        let target = target.to_string_lossy();
        // The listing's own descriptor.
        if target.starts_with("/proc/") {
            continue;
        }
        let kind = target.split([':', ' ']).next().unwrap_or("?");
        let kind = if kind.starts_with('/') && !kind.starts_with("/memfd") {
            "file"
        } else {
            kind
        };
        *counts.entry(format!("descriptors ({kind})")).or_default() += 1;
    }
    counts
}

fn mappings() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines()
        .filter(|line| line.contains("memfd:warpipe"))
        .count() as u64
}

/// This process's threads, where they are all ours: a driver starts some of its own as it likes.
fn threads_of(device: &Device) -> u64 {
    match device.info().id.kind {
        DeviceKind::Host => thread_names().len() as u64,
        _ => 0,
    }
}

/// The threads and the open device files by name, for a report: where one more is left at the end
/// of a case, its name says whether it is the library's (`warpipe-...`) or a driver's.
pub fn by_name() -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for name in thread_names() {
        *counts.entry(format!("thread {name}")).or_default() += 1;
    }
    for entry in std::fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .flatten()
    {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target.starts_with("/dev") {
            *counts.entry(target.display().to_string()).or_default() += 1;
        }
    }
    counts
}

/// Whether a thread of a host stream still lives.
pub(crate) fn has_streams() -> bool {
    thread_names().iter().any(|name| name == "warpipe-stream")
}

fn thread_names() -> Vec<String> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    let name = |task: std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()
    };
    tasks
        .flatten()
        .map(|task| name(task).trim().to_string())
        .collect()
}
