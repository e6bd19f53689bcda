//! A process with a statistics page, and what the kernel says of it.

use serde::Serialize;
use warpipe::DeviceKind;
use warpipe::statistics::{Endpoint, Process, Region, Role, SlowPathCount};

use crate::job::Job;
use crate::output::printable;

/// A process does not run if its page has not changed for this long. It ticks every 200 ms.
const STALLED_NS: u64 = 900_000_000;

/// The longest name of a command.
const COMMAND_MAX: usize = 64;

/// A process with a statistics page, of this domain or another one.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessRow {
    pub pid: i32,
    /// Its name in `/proc/PID/comm`, with control characters escaped.
    pub command: String,
    /// `running`; `stalled`, it has not run for a while; `stopped`, by a signal or a debugger.
    pub state: &'static str,
    /// Its open descriptors.
    pub descriptors: usize,
    pub endpoints: usize,
    /// Whether one of its endpoints is of the domain that is looked at.
    pub is_in_domain: bool,
    /// Memory of GPUs that it has allocated, and that it has imported from others.
    pub gpu_owned: u64,
    pub gpu_imported: u64,
    /// The same of host memory.
    pub host_owned: u64,
    pub host_imported: u64,
    /// Memory of which it has the descriptor and no mapping: a keeper of weights.
    pub gpu_kept: u64,
    pub host_kept: u64,
    /// Why its data did not take the fastest path.
    pub slow_paths: Vec<SlowPathRow>,
}

/// A path that is slower than another one, and how often it was taken.
#[derive(Debug, Clone, Serialize)]
pub struct SlowPathRow {
    /// `staged_upload`, `not_exportable`, ...: a promise, in docs/guide/observe.md.
    pub path: &'static str,
    pub reason: &'static str,
    pub count: u64,
    pub bytes: u64,
}

pub fn slow_path(found: SlowPathCount) -> SlowPathRow {
    SlowPathRow {
        path: found.path.name(),
        reason: found.path.reason(),
        count: found.count,
        bytes: found.bytes,
    }
}

/// The row of a process, in a look at the domain with this directory.
pub fn row(process: &Process, domain: [u64; 2], now_ns: u64) -> ProcessRow {
    let bytes = |kind: DeviceKind, role: Role| {
        let is_meant = |region: &&Region| region.device.kind == kind && region.role == role;
        let regions = process.regions.iter().filter(is_meant);
        regions
            .map(|region| region.bytes)
            .fold(0, u64::saturating_add)
    };
    let pid = process.pid;
    ProcessRow {
        pid,
        command: command(pid),
        state: match Job::of(pid).is_some_and(|job| job.is_stopped) {
            true => "stopped",
            false if is_silent(process, now_ns) => "stalled",
            false => "running",
        },
        descriptors: descriptors(pid),
        endpoints: process.endpoints.len(),
        is_in_domain: process.endpoints.iter().any(|it| it.domain == domain),
        gpu_owned: bytes(DeviceKind::Cuda, Role::Owner),
        gpu_imported: bytes(DeviceKind::Cuda, Role::Peer),
        host_owned: bytes(DeviceKind::Host, Role::Owner),
        host_imported: bytes(DeviceKind::Host, Role::Peer),
        gpu_kept: bytes(DeviceKind::Cuda, Role::Keeper),
        host_kept: bytes(DeviceKind::Host, Role::Keeper),
        slow_paths: process.slow_paths.iter().copied().map(slow_path).collect(),
    }
}

/// The most descriptors that are counted one by one.
const DESCRIPTORS_MAX: usize = 4096;

/// How many descriptors a process has open. Since Linux 6.2 the kernel says it as the size of their
/// directory; before, more than [`DESCRIPTORS_MAX`] are counted as so many.
fn descriptors(pid: i32) -> usize {
    let path = format!("/proc/{pid}/fd");
    match std::fs::metadata(&path).map_or(0, |directory| directory.len()) {
        0 => std::fs::read_dir(path).map_or(0, |entries| entries.take(DESCRIPTORS_MAX).count()),
        open => usize::try_from(open).unwrap_or(usize::MAX),
    }
}

/// The name of a process's command, fit for a terminal: a process chooses its own.
fn command(pid: i32) -> String {
    let comm = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let text = String::from_utf8_lossy(comm.trim_ascii_end()).into_owned();
    printable(&text).chars().take(COMMAND_MAX).collect()
}

/// Whether the process has not ticked for a while, though it has an endpoint that ticks: a name, or
/// a subscriber that is attached.
fn is_silent(process: &Process, now_ns: u64) -> bool {
    let ticks = |it: &Endpoint| it.role == Role::Owner || it.generation != [0; 2];
    let is_due = process.beat_ns != 0 && process.endpoints.iter().any(ticks);
    is_due && now_ns.saturating_sub(process.beat_ns) > STALLED_NS
}

#[cfg(test)]
mod tests {
    use warpipe::{EndpointName, Kind};

    use super::*;

    fn process(endpoints: Vec<Endpoint>) -> Process {
        Process {
            pid: 1,
            beat_ns: 1,
            endpoints,
            regions: Vec::new(),
            slow_paths: Vec::new(),
            unlisted: 0,
            damaged: 0,
        }
    }

    fn endpoint(role: Role, generation: [u64; 2]) -> Endpoint {
        Endpoint {
            kind: Kind::Publisher,
            role,
            name: EndpointName::new("a").unwrap(),
            domain: [0; 2],
            device: None,
            generation,
            items: 0,
            bytes: 0,
            sequence: 0,
            timed: 0,
            latency_ns: 0,
            dropped: 0,
            in_flight: 0,
            memory: 0,
            memory_max: 0,
            peers: 0,
            depth: 0,
            waiting: 0,
            copied: None,
            links: Vec::new(),
        }
    }

    #[test]
    fn only_a_process_that_has_to_tick_is_stalled() {
        let stalled = |endpoints, now_ns| is_silent(&process(endpoints), now_ns);
        let later = 2 * STALLED_NS;
        assert!(stalled(vec![endpoint(Role::Owner, [7, 7])], later));
        assert!(stalled(vec![endpoint(Role::Peer, [7, 7])], later));
        assert!(!stalled(vec![endpoint(Role::Owner, [7, 7])], STALLED_NS));
        // Its endpoints are closed, or it looks for its next publisher.
        assert!(!stalled(Vec::new(), later));
        assert!(!stalled(vec![endpoint(Role::Peer, [0, 0])], later));
    }
}
