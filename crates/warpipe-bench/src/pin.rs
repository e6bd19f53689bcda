//! Keeping a thread to one CPU (`sched_setaffinity`).

use anyhow::Context;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The CPUs that the thread may use again when this is dropped.
#[derive(Debug)]
pub struct Pinned {
    before: CpuSet,
}

/// Keeps this thread to the `index`th of the CPUs that it may use; to the only one if there are no
/// more.
pub fn this_thread(index: usize) -> anyhow::Result<Pinned> {
    let before = sched_getaffinity(None).context("sched_getaffinity")?;
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|&cpu| before.is_set(cpu))
        .collect();
    match allowed.get(index % allowed.len().max(1)) {
        Some(cpu) => this_thread_to(*cpu),
        None => Ok(Pinned { before }),
    }
}

/// Keeps this thread to this CPU.
pub fn this_thread_to(cpu: usize) -> anyhow::Result<Pinned> {
    let before = sched_getaffinity(None).context("sched_getaffinity")?;
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(None, &only).context("sched_setaffinity")?;
    Ok(Pinned { before })
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.before);
    }
}
