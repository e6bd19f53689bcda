//! Memory by its identity: which process owns it, which ones have it, and which ones keep it.

use std::collections::BTreeMap;

use serde::Serialize;
use warpipe::statistics::{Observation, RegionId, Role};

/// One region of memory, in all the processes that have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryRow {
    pub bytes: u64,
    pub device: String,
    /// The endpoint that shares it, if it is known.
    pub endpoint: Option<String>,
    /// The process that allocated it; none if that is dead, or is not observed.
    pub owner: Option<i32>,
    /// The processes that have imported it.
    pub borrowers: Vec<i32>,
    /// The processes that have its descriptor and do not map it: keepers of weights.
    pub keepers: Vec<i32>,
}

/// Adds a process that may have the memory several times.
fn add(pids: &mut Vec<i32>, pid: i32) {
    if !pids.contains(&pid) {
        pids.push(pid);
    }
}

impl MemoryRow {
    /// Whether an observed process is answerable for the memory: one that allocated it, or a
    /// keeper.
    pub fn is_kept(&self) -> bool {
        self.owner.is_some() || !self.keepers.is_empty()
    }
}

/// The memory of all observed processes, the largest first.
pub fn rows(observation: &Observation) -> Vec<MemoryRow> {
    let mut names: BTreeMap<[u64; 2], &str> = BTreeMap::new();
    for process in &observation.processes {
        for endpoint in process
            .endpoints
            .iter()
            .filter(|it| it.generation != [0; 2])
        {
            names.insert(endpoint.generation, endpoint.name.as_str());
        }
    }
    let mut rows: BTreeMap<RegionId, MemoryRow> = BTreeMap::new();
    for process in &observation.processes {
        for region in &process.regions {
            let row = rows.entry(region.id).or_insert_with(|| MemoryRow {
                bytes: 0,
                device: region.device.to_string(),
                endpoint: None,
                owner: None,
                borrowers: Vec::new(),
                keepers: Vec::new(),
            });
            row.bytes = row.bytes.max(region.bytes);
            if let Some(name) = names.get(&region.generation) {
                row.endpoint = Some((*name).to_owned());
            }
            match region.role {
                Role::Owner => row.owner = Some(process.pid),
                Role::Peer => add(&mut row.borrowers, process.pid),
                Role::Keeper => add(&mut row.keepers, process.pid),
            }
        }
    }
    let mut rows: Vec<MemoryRow> = rows.into_values().collect();
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.owner.cmp(&b.owner)));
    rows
}
