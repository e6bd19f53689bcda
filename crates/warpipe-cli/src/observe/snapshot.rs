//! One look at a domain: its endpoints, its processes and their memory.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use warpipe::statistics::{Endpoint, Observation, Observer, Process, Region, Role};
use warpipe::{Domain, clock};

use super::memory::{self, MemoryRow};
use super::process::{self, ProcessRow, ProcessState, SlowPathRow};
use crate::output;

/// What is looked at, and what the last look has found out.
pub struct Source {
    /// The domain's directory. It may be missing: a look makes none.
    path: PathBuf,
    domain: Option<Domain>,
    /// The device and the inode of the directory that `domain` has open.
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
    /// Something else stands in its place, which no owner removes.
    Foreign,
}

impl EndpointState {
    pub fn name(self) -> &'static str {
        match self {
            EndpointState::Live => "live",
            EndpointState::Unobserved => "unobserved",
            EndpointState::Stalled => "stalled",
            EndpointState::Stopped => "stopped",
            EndpointState::Stale => "stale",
            EndpointState::Foreign => "foreign",
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
    /// What stands in its place, if that is no endpoint's.
    pub foreign: Option<&'static str>,
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
    /// Allocated for its samples, or shared by an endpoint without samples.
    pub memory: u64,
    pub memory_max: u64,
    /// Subscribers, or clients.
    pub peers: u64,
    /// The samples that each subscriber may have in flight; 0 for an endpoint without samples,
    /// which counts neither items nor drops.
    pub depth: u64,
    /// The jobs of a queue that no worker has.
    pub waiting: u64,
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

/// The domain in a directory of this user's; none if nothing is there. A command that only looks
/// makes none.
pub fn existing_domain(path: &Path) -> warpipe::Result<Option<Domain>> {
    let found = path.symlink_metadata();
    if found.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(None);
    }
    Domain::of_user(path, rustix::process::geteuid().as_raw()).map(Some)
}

impl Source {
    /// # Errors
    /// What is there cannot be a domain.
    pub fn new(path: PathBuf) -> warpipe::Result<Source> {
        Ok(Source {
            identity: identity(&path).unwrap_or_default(),
            domain: existing_domain(&path)?,
            path,
            observer: Observer::new(),
        })
    }

    /// Takes a look. A domain without a directory has no names; a note says so.
    ///
    /// # Errors
    /// The domain's directory cannot be read.
    pub fn look(&mut self) -> anyhow::Result<Snapshot> {
        let was_there = self.domain.is_some();
        match identity(&self.path) {
            Some(now) if was_there && now == self.identity => {}
            // Another directory under the same path, which the domain's processes use from now on.
            Some(now) => (self.domain, self.identity) = (existing_domain(&self.path)?, now),
            None => (self.domain, self.identity) = (None, [0; 2]),
        }
        let found = self.domain.as_ref().map(Domain::endpoints).transpose()?;
        let found = found.unwrap_or_default();
        let names: BTreeMap<String, Option<i32>> = found
            .iter()
            .map(|endpoint| {
                let holder = endpoint.holder.as_ref();
                let holder = holder.map(|holder| holder.pid.unwrap_or(0));
                (endpoint.name.to_string(), holder)
            })
            .collect();
        let observation = self.observer.observe();
        let domain = self.path.display().to_string();
        let mut snapshot = Snapshot::of(domain, self.identity, &names, &observation);
        for endpoint in found.iter().filter(|it| it.foreign.is_some()) {
            let name = endpoint.name.as_str();
            for row in snapshot.endpoints.iter_mut().filter(|it| it.name == name) {
                (row.state, row.foreign) = (EndpointState::Foreign, endpoint.foreign);
            }
        }
        if self.domain.is_none() {
            snapshot.notes.insert(0, missing(&self.path));
        }
        Ok(snapshot)
    }
}

/// The note of a domain without a directory.
pub fn missing(path: &Path) -> String {
    format!(
        "there is no directory {}; the next endpoint there makes it",
        path.display()
    )
}

/// The device and the inode of a directory, if it is there.
fn identity(path: &Path) -> Option<[u64; 2]> {
    let folder = std::fs::metadata(path).ok()?;
    Some([folder.dev(), folder.ino()])
}

impl EndpointRow {
    /// What is wrong with a queue that has jobs and no worker.
    pub fn backlog(&self) -> Option<String> {
        let jobs = output::counted(
            usize::try_from(self.waiting).ok()?,
            "job waits",
            "jobs wait",
        );
        match (self.waiting, self.peers) {
            (0, _) => None,
            (_, 0) => Some(format!("{jobs}, and no worker is attached")),
            _ => Some(jobs),
        }
    }
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
            .map(|process| process::row(process, identity, taken_ns))
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
        if observation.unsearched > 0 {
            notes.push(format!(
                "{} not searched to the end: their users' processes have too many descriptors; \
                 the next look goes on",
                output::counted(observation.unsearched, "process was", "processes were")
            ));
        }
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
    /// Whether it sends samples, and its counts are known.
    pub fn has_samples(&self) -> bool {
        self.kind.is_some() && self.depth > 0
    }

    fn unobserved(name: &str, holder: Option<i32>) -> EndpointRow {
        EndpointRow {
            name: name.to_owned(),
            kind: None,
            state: match holder {
                Some(_) => EndpointState::Unobserved,
                None => EndpointState::Stale,
            },
            foreign: None,
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
            waiting: 0,
            copied: None,
            subscribers: Vec::new(),
            generation: [0; 2],
        }
    }
}

/// The memory that an endpoint without samples shares: a pool's, or a version of weights.
fn shared_memory(process: &Process, generation: [u64; 2]) -> u64 {
    let is_of_it = |it: &&Region| it.generation == generation && it.role != Role::Peer;
    let regions = process.regions.iter().filter(is_of_it);
    regions.map(|it| it.bytes).fold(0, u64::saturating_add)
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
        foreign: None,
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
        memory: if endpoint.depth > 0 {
            endpoint.memory
        } else {
            shared_memory(process, endpoint.generation)
        },
        memory_max: endpoint.memory_max,
        peers: endpoint.peers,
        depth: endpoint.depth,
        waiting: endpoint.waiting,
        copied: endpoint.copied.map(process::slow_path),
        subscribers,
        generation: endpoint.generation,
    }
}
