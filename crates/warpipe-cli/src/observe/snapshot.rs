//! One look at a domain: its endpoints, its processes and their memory.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::bail;
use serde::Serialize;
use warpipe::statistics::{Endpoint, Observation, Observer, Process, Role};
use warpipe::{Domain, clock};

use super::memory::{self, MemoryRow};
use super::process::{self, ProcessRow, ProcessState, SlowPathRow};

/// What is looked at, and what the last look has found out.
pub struct Source {
    domain: Domain,
    /// The device and the inode of the domain's directory.
    identity: [u64; 2],
    observer: Observer,
}

/// One look at a domain. All numbers are claims of the processes that are looked at.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Snapshot {
    /// The domain's directory.
    pub domain: String,
    /// When it was taken, by `CLOCK_MONOTONIC`.
    pub taken_ns: u64,
    pub endpoints: Vec<EndpointRow>,
    pub processes: Vec<ProcessRow>,
    pub memory: Vec<MemoryRow>,
    /// What could not be read, as sentences.
    pub notes: Vec<String>,
}

/// The state of a name's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EndpointState {
    /// Its process runs.
    Live,
    /// Its process lives, and its statistics page cannot be read from here.
    Unobserved,
    /// Its process has not run for a while.
    Stalled,
    /// Its process is stopped by a signal or a debugger.
    Stopped,
    /// A dead process left it.
    Stale,
}

impl EndpointState {
    pub fn name(self) -> &'static str {
        match self {
            EndpointState::Live => "live",
            EndpointState::Unobserved => "unobserved",
            EndpointState::Stalled => "stalled",
            EndpointState::Stopped => "stopped",
            EndpointState::Stale => "stale",
        }
    }
}

/// A name of the domain, with its owner's counts. They are 0 for an owner that is not observed.
#[derive(Debug, Clone, Serialize)]
pub struct EndpointRow {
    pub name: String,
    /// `publisher`, `queue`, `pool`, ...; unknown for an owner that is not observed.
    pub kind: Option<String>,
    pub state: EndpointState,
    pub pid: Option<i32>,
    pub device: Option<String>,
    pub items: u64,
    pub bytes: u64,
    /// The items that its subscribers received with a time of sending, and the sum of their
    /// latencies.
    pub timed: u64,
    pub latency_ns: u64,
    pub in_flight: u64,
    pub dropped: u64,
    pub memory: u64,
    pub memory_max: u64,
    /// Subscribers, or clients.
    pub peers: u64,
    pub depth: u64,
    /// The tensors that were to be sent where they lie and had to be copied, and the last reason.
    pub copied: Option<SlowPathRow>,
    pub subscribers: Vec<SubscriberRow>,
    #[serde(skip)]
    pub generation: [u64; 2],
}

/// One subscriber of an endpoint.
#[derive(Debug, Clone, Serialize)]
pub struct SubscriberRow {
    pub pid: i32,
    pub uid: u32,
    /// `attaching`, `active`, `waiting`, `leaving`, `stalled`, `suspect` or `dead`.
    pub state: &'static str,
    /// The samples that it was given and has not released.
    pub lag: u64,
    /// The samples that it has not received, if its page can be read.
    pub behind: Option<u64>,
    pub dropped: u64,
    pub silent_seconds: f64,
}

impl Source {
    pub fn new(domain: Domain) -> Source {
        Source {
            identity: identity(domain.path()).unwrap_or_default(),
            domain,
            observer: Observer::new(),
        }
    }

    /// Takes a look.
    ///
    /// # Errors
    /// The domain's directory is gone, or cannot be read.
    pub fn look(&mut self) -> anyhow::Result<Snapshot> {
        let path = self.domain.path();
        match identity(path) {
            Some(now) if now == self.identity => {}
            // Another directory under the same path, which the domain's processes use from now on.
            Some(now) => (self.domain, self.identity) = (Domain::at(path)?, now),
            None => bail!(
                "the domain's directory {} is gone; the next endpoint there makes it again",
                path.display()
            ),
        }
        let names: BTreeMap<String, Option<i32>> = self
            .domain
            .endpoints()?
            .into_iter()
            .map(|endpoint| {
                let holder = endpoint.holder.map(|holder| holder.pid.unwrap_or(0));
                (endpoint.name.to_string(), holder)
            })
            .collect();
        let observation = self.observer.observe();
        let domain = self.domain.path().display().to_string();
        Ok(Snapshot::of(domain, self.identity, &names, &observation))
    }
}

/// The device and the inode of a directory, if it is there.
fn identity(path: &Path) -> Option<[u64; 2]> {
    let folder = std::fs::metadata(path).ok()?;
    Some([folder.dev(), folder.ino()])
}

impl Snapshot {
    /// Joins the names of a domain with what the pages say. `names`: each with its holder's number,
    /// 0 for an unknown one.
    pub fn of(
        domain: String,
        identity: [u64; 2],
        names: &BTreeMap<String, Option<i32>>,
        observation: &Observation,
    ) -> Snapshot {
        let taken_ns = clock::now_ns();
        let processes: Vec<ProcessRow> = observation
            .processes
            .iter()
            .map(|process| process::row(process, taken_ns))
            .collect();
        let states: BTreeMap<i32, ProcessState> =
            processes.iter().map(|row| (row.pid, row.state)).collect();
        let mut endpoints = Vec::new();
        for (name, &holder) in names {
            let owners = endpoints_of(observation, identity, Role::Owner)
                .filter(|(_, endpoint)| endpoint.name.as_str() == name);
            // A name of a domain has one owner; a page of another process that claims it has not.
            let is_holder =
                |process: &Process| holder.is_none_or(|pid| pid == 0 || pid == process.pid);
            let owner = owners.clone().find(|(process, _)| is_holder(process));
            endpoints.push(match (owner, holder) {
                (Some((process, endpoint)), Some(_)) => {
                    observed(process, endpoint, states.get(&process.pid), observation)
                }
                (_, holder) => EndpointRow::unobserved(name, holder),
            });
        }
        let mut notes: Vec<String> = observation
            .unreadable
            .iter()
            .map(|it| format!("process {}: {}", it.pid, it.reason))
            .collect();
        for process in &observation.processes {
            let (pid, unlisted, damaged) = (process.pid, process.unlisted, process.damaged);
            if unlisted > 0 {
                notes.push(format!(
                    "process {pid}: {unlisted} rows found no room in its page"
                ));
            }
            if damaged > 0 {
                notes.push(format!(
                    "process {pid}: {damaged} rows of its page are damaged"
                ));
            }
        }
        Snapshot {
            domain,
            taken_ns,
            memory: memory::rows(observation),
            endpoints,
            processes,
            notes,
        }
    }
}

fn endpoints_of(
    observation: &Observation,
    domain: [u64; 2],
    role: Role,
) -> impl Iterator<Item = (&Process, &Endpoint)> + Clone {
    let all = observation.processes.iter();
    all.flat_map(|process| {
        process
            .endpoints
            .iter()
            .map(move |endpoint| (process, endpoint))
    })
    .filter(move |(_, endpoint)| endpoint.domain == domain && endpoint.role == role)
}

impl EndpointRow {
    fn unobserved(name: &str, holder: Option<i32>) -> EndpointRow {
        EndpointRow {
            name: name.to_owned(),
            kind: None,
            state: match holder {
                Some(_) => EndpointState::Unobserved,
                None => EndpointState::Stale,
            },
            pid: holder.filter(|&pid| pid != 0),
            device: None,
            items: 0,
            bytes: 0,
            timed: 0,
            latency_ns: 0,
            in_flight: 0,
            dropped: 0,
            memory: 0,
            memory_max: 0,
            peers: 0,
            depth: 0,
            copied: None,
            subscribers: Vec::new(),
            generation: [0; 2],
        }
    }
}

fn observed(
    process: &Process,
    endpoint: &Endpoint,
    state: Option<&ProcessState>,
    observation: &Observation,
) -> EndpointRow {
    let mut readers: Vec<(&Process, &Endpoint)> =
        endpoints_of(observation, endpoint.domain, Role::Peer)
            .filter(|(_, reader)| {
                reader.generation == endpoint.generation && reader.name == endpoint.name
            })
            .collect();
    let sum = |of: fn(&Endpoint) -> u64| {
        let numbers = readers.iter().map(|(_, reader)| of(reader));
        numbers.fold(0, u64::saturating_add)
    };
    let (timed, latency_ns) = (sum(|it| it.timed), sum(|it| it.latency_ns));
    let subscribers = endpoint.links.iter().map(|link| {
        // Several subscribers of one process are told apart by nothing: each is used once.
        let place = readers
            .iter()
            .position(|(process, _)| process.pid == link.pid);
        let reader = place.map(|place| readers.swap_remove(place).1);
        SubscriberRow {
            pid: link.pid,
            uid: link.uid,
            state: link.state.name(),
            lag: link.in_flight,
            behind: reader
                .filter(|reader| reader.items > 0)
                .map(|reader| endpoint.sequence.saturating_sub(reader.sequence)),
            dropped: link.dropped,
            silent_seconds: link.silent.as_secs_f64(),
        }
    });
    let subscribers = subscribers.collect();
    EndpointRow {
        name: endpoint.name.to_string(),
        kind: Some(endpoint.kind.to_string()),
        state: match state {
            Some(ProcessState::Stopped) => EndpointState::Stopped,
            Some(ProcessState::Stalled) => EndpointState::Stalled,
            _ => EndpointState::Live,
        },
        pid: Some(process.pid),
        device: endpoint.device.map(|device| device.to_string()),
        items: endpoint.items,
        bytes: endpoint.bytes,
        timed,
        latency_ns,
        in_flight: endpoint.in_flight,
        dropped: endpoint.dropped,
        memory: endpoint.memory,
        memory_max: endpoint.memory_max,
        peers: endpoint.peers,
        depth: endpoint.depth,
        copied: endpoint.copied.map(process::slow_path),
        subscribers,
        generation: endpoint.generation,
    }
}
