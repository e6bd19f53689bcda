//! Memory by its identity: which process owns it, and which others have it.

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
            });
            row.bytes = row.bytes.max(region.bytes);
            if let Some(name) = names.get(&region.generation) {
                row.endpoint = Some((*name).to_owned());
            }
            match region.role {
                Role::Owner => row.owner = Some(process.pid),
                Role::Peer if row.borrowers.contains(&process.pid) => {}
                Role::Peer => row.borrowers.push(process.pid),
            }
        }
    }
    let mut rows: Vec<MemoryRow> = rows.into_values().collect();
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.owner.cmp(&b.owner)));
    rows
}
