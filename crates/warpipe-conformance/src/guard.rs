//! Sees that nothing is left behind: descriptors, files, mappings, threads, device memory.
//!
//! A guard is a count of what is there; later it is counted again, until both are equal or time is up. (What a
//! dead peer held comes back on *proven* death, and memory that a stream may still write a little later, so the
//! counts may take a moment.)

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use warpipe::{Device, Domain};

use crate::process::eventually;

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
        Guard { device: device.clone(), folder, before }
    }

    /// Waits until everything counts as before.
    ///
    /// # Errors
    /// What differs, when it still does after 10 s.
    pub fn settles(&self) -> Result<()> {
        let mut now = BTreeMap::new();
        let same = eventually(SETTLE, || {
            now = count(&self.device, &self.folder);
            now == self.before
        });
        if same {
            return Ok(());
        }
        let keys: std::collections::BTreeSet<_> = now.keys().chain(self.before.keys()).collect();
        let get = |counts: &BTreeMap<String, u64>, key: &str| counts.get(key).copied().unwrap_or(0);
        let changes: Vec<String> = keys
            .into_iter()
            .map(|key| (key, get(&self.before, key), get(&now, key)))
            .filter(|(_, before, now)| before != now)
            .map(|(key, before, now)| format!("{key}: {before} before, {now} now"))
            .collect();
        bail!("something was left behind: {}", changes.join("; "))
    }
}

fn count(device: &Device, folder: &Path) -> BTreeMap<String, u64> {
    let mut counts = descriptors();
    counts.insert("bytes of device memory".into(), device.backend().bytes_held());
    counts.insert("files in the domain".into(), std::fs::read_dir(folder).map_or(0, |files| files.count() as u64));
    counts.insert("mappings".into(), mappings());
    counts.insert("threads of warpipe".into(), threads());
    counts
}

/// Open descriptors by what they are: a leak says more when it is a socket or a memfd.
fn descriptors() -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return counts };
    for entry in entries.flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy();
        // The listing's own descriptor.
        if target.starts_with("/proc/") {
            continue;
        }
        let kind = target.split([':', ' ']).next().unwrap_or("?");
        let kind = if kind.starts_with('/') && !kind.starts_with("/memfd") { "file" } else { kind };
        *counts.entry(format!("descriptors ({kind})")).or_default() += 1;
    }
    counts
}

fn mappings() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter(|line| line.contains("memfd:warpipe")).count() as u64
}

fn threads() -> u64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0 };
    let names = tasks.flatten().map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default());
    names.filter(|name| name.starts_with("warpipe-")).count() as u64
}
