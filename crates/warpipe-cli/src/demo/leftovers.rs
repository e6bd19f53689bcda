//! The resources of a process and the files of a folder: counted before and after, so that
//! leftovers are found.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use warpipe::{Device, Domain, Publisher, Subscriber};

/// How long what was dropped may take to go: streams have to be past it.
const SETTLE: Duration = Duration::from_secs(10);
const ASK_EVERY: Duration = Duration::from_millis(5);

/// The resources of a process, by kind: descriptors (`socket`, `/memfd`, `anon_inode` ...),
/// `mappings` of segments, and `bytes of device memory`.
pub type Holdings = BTreeMap<String, u64>;

/// A count of what this process holds.
#[derive(Debug)]
pub struct Before {
    device: Device,
    held: Holdings,
}

impl Before {
    /// Counts now. The first link of a process creates objects that stay until the process ends;
    /// they are part of this count.
    pub fn count(device: &Device, domain: &Domain) -> anyhow::Result<Before> {
        let name = format!("demo/before-{}", std::process::id());
        let publisher = Publisher::builder(&name)
            .domain(domain)
            .device(device)
            .build()?;
        drop((
            Subscriber::builder(&name)
                .domain(domain)
                .device(device)
                .build()?,
            publisher,
        ));
        Ok(Before {
            device: device.clone(),
            held: held(device)?,
        })
    }

    /// The additional resources, once there are none, or time is up.
    pub fn extra(&self) -> io::Result<Holdings> {
        let deadline = Instant::now() + SETTLE;
        loop {
            let extra = added(&self.held, &held(&self.device)?);
            if extra.is_empty() || Instant::now() > deadline {
                return Ok(extra);
            }
            std::thread::sleep(ASK_EVERY);
        }
    }
}

fn added(before: &Holdings, now: &Holdings) -> Holdings {
    let more = |(what, &count): (&String, &u64)| {
        let more = count.saturating_sub(before.get(what).copied().unwrap_or(0));
        (more > 0).then(|| (what.clone(), more))
    };
    now.iter().filter_map(more).collect()
}

fn held(device: &Device) -> io::Result<Holdings> {
    let mut held = descriptors()?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mappings = maps
        .lines()
        .filter(|line| line.contains("memfd:warpipe"))
        .count() as u64;
    held.insert("mappings".into(), mappings);
    held.insert(
        "bytes of device memory".into(),
        device.backend().bytes_held(),
    );
    Ok(held)
}

/// All but the device files of a driver.
fn descriptors() -> io::Result<Holdings> {
    let mut counts = Holdings::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        // One that was closed meanwhile counts no more.
        let Ok(target) = std::fs::read_link(entry?.path()) else {
            continue;
        };
        let target = target.to_string_lossy();
        // The listing's own descriptor is one of `/proc`.
        if !target.starts_with("/dev") && !target.starts_with("/proc") {
            let kind = target.trim_end_matches(|c: char| c.is_ascii_digit() || "[]: ".contains(c));
            *counts.entry(kind.to_owned()).or_default() += 1;
        }
    }
    Ok(counts)
}

/// The names of what lies in a folder, and in the folders in it.
pub fn files(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        names.push(entry.file_name().to_string_lossy().into_owned());
        if entry.file_type()?.is_dir() {
            names.extend(files(&entry.path())?);
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_more_than_before_is_left_over_and_what_is_less_is_not() {
        let holdings = |pairs: &[(&str, u64)]| {
            pairs
                .iter()
                .map(|(what, count)| ((*what).to_owned(), *count))
                .collect()
        };
        let (before, now): (Holdings, Holdings) = (
            holdings(&[("pipe", 2), ("socket", 1)]),
            holdings(&[("pipe", 1), ("socket", 3), ("/memfd:a", 1)]),
        );
        assert_eq!(
            added(&before, &now),
            holdings(&[("/memfd:a", 1), ("socket", 2)])
        );
        assert!(added(&now, &now).is_empty());
    }

    #[test]
    fn a_file_in_a_folder_of_a_folder_is_found() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(files(folder.path()).unwrap(), Vec::<String>::new());
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::fs::write(folder.path().join("a/b"), "").unwrap();
        assert_eq!(files(folder.path()).unwrap(), ["a", "b"]);
    }
}
