//! The CPUs that the processes of a case are kept to.

use std::fmt;

use anyhow::{Context, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

/// Where the processes of a case run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Placement {
    /// Each on a CPU of its own, the first two as far apart as their numbers are.
    Apart { first: usize, last: usize },
    /// On the two hardware threads of one core.
    Near { first: usize, second: usize },
    /// All on one CPU.
    One { cpu: usize },
    /// Wherever the scheduler puts them.
    Free,
}

impl Placement {
    /// All that this machine allows. A case that it does not allow is said.
    pub fn all() -> anyhow::Result<Vec<Placement>> {
        let allowed = allowed()?;
        let (first, last) = (allowed[0], allowed[allowed.len() - 1]);
        let mut all = Vec::new();
        if first == last {
            println!(
                "skipped: processes on different CPUs; this process may use CPU {first} alone"
            );
        } else {
            all.push(Placement::Apart { first, last });
        }
        match sibling(first).filter(|second| allowed.contains(second)) {
            Some(second) => all.push(Placement::Near { first, second }),
            None => println!("skipped: two hardware threads of a core; CPU {first} has no other"),
        }
        all.push(Placement::One { cpu: first });
        all.push(Placement::Free);
        Ok(all)
    }

    /// With how many consumers a stream of items is measured.
    pub fn consumers(self) -> &'static [usize] {
        match self {
            Placement::Apart { .. } | Placement::Free => &[1, 2, 4],
            Placement::Near { .. } | Placement::One { .. } => &[1],
        }
    }

    /// Keeps this thread to the CPU of the process `index` of `count`.
    pub fn settle(self, index: usize, count: usize) -> anyhow::Result<Settled> {
        let settled = Settled(sched_getaffinity(None).context("sched_getaffinity")?);
        let cpu = match self {
            Placement::Apart { first, last } => match (index, count) {
                (0, _) => first,
                (_, 2) => last,
                (index, _) => {
                    let others: Vec<usize> = allowed()?.into_iter().skip(1).collect();
                    others[(index - 1) % others.len()]
                }
            },
            Placement::Near { first, second } => [first, second][index % 2],
            Placement::One { cpu } => cpu,
            Placement::Free => return Ok(settled),
        };
        let mut only = CpuSet::new();
        only.set(cpu);
        sched_setaffinity(None, &only).context("sched_setaffinity")?;
        Ok(settled)
    }

    /// Whether a process that polls may keep another one of `count` from its CPU.
    pub fn is_shared_by(self, count: usize) -> bool {
        matches!(self, Placement::One { .. })
            || count > std::thread::available_parallelism().map_or(1, usize::from)
    }
}

/// The CPUs that the thread may use again when this is dropped.
#[derive(Debug)]
pub struct Settled(CpuSet);

impl Drop for Settled {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.0);
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Apart { first, last } => write!(f, "CPUs {first} to {last}"),
            Placement::Near { first, second } => {
                write!(f, "hardware threads {first} and {second} of a core")
            }
            Placement::One { cpu } => write!(f, "all on CPU {cpu}"),
            Placement::Free => write!(f, "not pinned"),
        }
    }
}

/// The CPUs that this thread may use.
fn allowed() -> anyhow::Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("sched_getaffinity")?;
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect();
    ensure!(!allowed.is_empty(), "this process may use no CPU");
    Ok(allowed)
}

/// The other hardware thread of a CPU's core.
fn sibling(cpu: usize) -> Option<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let list = std::fs::read_to_string(path).ok()?;
    let mut numbers = list.trim().split([',', '-']);
    numbers.find_map(|number| number.parse().ok().filter(|&other| other != cpu))
}
