//! A process with a statistics page, and what the kernel says of it.

use serde::Serialize;
use warpipe::DeviceKind;
use warpipe::statistics::{Process, Region, Role};

use crate::output::printable;

/// A process whose page has not changed for this long does not run. It ticks every 200 ms.
const STALLED_NS: u64 = 900_000_000;

/// The longest name of a command.
const COMMAND_MAX: usize = 64;

/// Whether a process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessState {
    Running,
    /// It has not run for a while.
    Stalled,
    /// A signal or a debugger has stopped it.
    Stopped,
}

impl ProcessState {
    pub fn name(self) -> &'static str {
        match self {
            ProcessState::Running => "running",
            ProcessState::Stalled => "stalled",
            ProcessState::Stopped => "stopped",
        }
    }
}

/// A process with a statistics page, of this domain or another one.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessRow {
    pub pid: i32,
    /// Its name in `/proc/PID/comm`, with control characters escaped.
    pub command: String,
    pub state: ProcessState,
    /// Its open descriptors.
    pub descriptors: usize,
    pub endpoints: usize,
    /// Memory of GPUs that it has allocated, and that it has imported from others.
    pub gpu_owned: u64,
    pub gpu_imported: u64,
    /// The same of host memory.
    pub host_owned: u64,
    pub host_imported: u64,
}

/// The row of a process.
pub fn row(process: &Process, now_ns: u64) -> ProcessRow {
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
        state: state(pid, process.beat_ns, now_ns),
        descriptors: std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count),
        endpoints: process.endpoints.len(),
        gpu_owned: bytes(DeviceKind::Cuda, Role::Owner),
        gpu_imported: bytes(DeviceKind::Cuda, Role::Peer),
        host_owned: bytes(DeviceKind::Host, Role::Owner),
        host_imported: bytes(DeviceKind::Host, Role::Peer),
    }
}

/// The name of a process's command, fit for a terminal: a process chooses its own.
fn command(pid: i32) -> String {
    let comm = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let text = String::from_utf8_lossy(comm.trim_ascii_end()).into_owned();
    printable(&text).chars().take(COMMAND_MAX).collect()
}

fn state(pid: i32, beat_ns: u64, now_ns: u64) -> ProcessState {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name in parentheses, which may have parentheses itself.
    let state = stat
        .rsplit(|&byte| byte == b')')
        .next()
        .and_then(|rest| rest.get(1).copied());
    if matches!(state, Some(b'T' | b't')) {
        return ProcessState::Stopped;
    }
    // A process without endpoints does not tick.
    match beat_ns != 0 && now_ns.saturating_sub(beat_ns) > STALLED_NS {
        true => ProcessState::Stalled,
        false => ProcessState::Running,
    }
}
