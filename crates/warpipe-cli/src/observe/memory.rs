//! Memory by its identity: which process owns it, which ones have it, and which ones keep it.

use std::collections::BTreeMap;

use serde::Serialize;
use warpipe::statistics::{Observation, RegionId, Role};

/// One region of memory, in all the processes that have it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
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

/// The memory of all observed processes, the largest first.
pub fn rows(observation: &Observation) -> Vec<MemoryRow> {
    let endpoints = observation.processes.iter().flat_map(|it| &it.endpoints);
    let names = endpoints.filter(|it| it.generation != [0; 2]);
    let names = names.map(|it| (it.generation, it.name.as_str()));
    let names: BTreeMap<[u64; 2], &str> = names.collect();
    let mut rows: BTreeMap<RegionId, MemoryRow> = BTreeMap::new();
    for process in &observation.processes {
        for region in &process.regions {
            let row = rows.entry(region.id).or_insert_with(|| MemoryRow {
                device: region.device.to_string(),
                ..MemoryRow::default()
            });
            row.bytes = row.bytes.max(region.bytes);
            if let Some(name) = names.get(&region.generation) {
                row.endpoint = Some((*name).to_owned());
            }
            let holders = match region.role {
                Role::Owner => {
                    row.owner = Some(process.pid);
                    continue;
                }
                Role::Peer => &mut row.borrowers,
                Role::Keeper => &mut row.keepers,
            };
            // A process may have the memory several times.
            if !holders.contains(&process.pid) {
                holders.push(process.pid);
            }
        }
    }
    let mut rows: Vec<MemoryRow> = rows.into_values().collect();
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.owner.cmp(&b.owner)));
    rows
}
