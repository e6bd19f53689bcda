//! One look at a domain: its endpoints, its processes and their memory.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use warpipe::statistics::{Endpoint, Observation, Observer, Process, Region, Role};
use warpipe::{Domain, clock};

use super::memory::{self, MemoryRow};
use super::process::{self, ProcessRow, SlowPathRow};
use super::rates::Rate;
use crate::output::{self, Style};

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

/// A name of the domain, with its owner's counts. They are 0 for an owner that is not observed.
#[derive(Debug, Clone, Default, Serialize)]
pub struct EndpointRow {
    pub name: String,
    /// `publisher`, `queue`, `pool`, ...; unknown for an owner that is not observed.
    pub kind: Option<String>,
    /// Of the owner: `live`; `unobserved`, its statistics page cannot be read from here; `stalled`;
    /// `stopped`; `stale`, a dead process left it; `foreign`, no owner removes what is there.
    pub state: &'static str,
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
    /// None in a first look, and for an endpoint that was not there in the look before.
    pub rate: Option<Rate>,
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

/// How much the state of an endpoint, a process or a subscriber asks for attention.
pub fn style_of(state: &str) -> Style {
    match state {
        "live" | "running" => Style::Green,
        "stalled" | "stopped" => Style::Yellow,
        "stale" | "foreign" | "suspect" | "dead" => Style::Red,
        _ => Style::Dim,
    }
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
        let observation = self.observer.observe();
        let domain = self.path.display().to_string();
        let mut snapshot = Snapshot::of(domain, self.identity, &found, &observation);
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
    /// Whether it sends samples, and its counts are known.
    pub fn has_samples(&self) -> bool {
        self.kind.is_some() && self.depth > 0
    }

    /// The jobs of a queue that no worker has.
    pub fn backlog(&self) -> Option<(String, Style)> {
        let waiting = usize::try_from(self.waiting)
            .ok()
            .filter(|&jobs| jobs > 0)?;
        let jobs = output::counted(waiting, "job waits", "jobs wait");
        Some(match self.peers {
            0 => (format!("{jobs}, and no worker is attached"), Style::Yellow),
            _ => (jobs, Style::Dim),
        })
    }
}

impl Snapshot {
    /// Joins the names of a domain with what the pages say.
    fn of(
        domain: String,
        identity: [u64; 2],
        names: &[warpipe::Endpoint],
        observation: &Observation,
    ) -> Snapshot {
        let taken_ns = clock::now_ns();
        let pages = observation.processes.iter();
        let processes: Vec<ProcessRow> = pages
            .map(|process| process::row(process, identity, taken_ns))
            .collect();
        let states: BTreeMap<i32, &str> =
            processes.iter().map(|row| (row.pid, row.state)).collect();
        let endpoints = names.iter().map(|found| {
            // A name of a domain has one owner; a page of another process that claims it has not.
            let holder = found.holder.as_ref();
            let is_holder =
                |pid: i32| holder.is_some_and(|it| it.pid.is_none_or(|holder| holder == pid));
            let owner = endpoints_of(observation, identity, Role::Owner)
                .find(|(process, it)| it.name == found.name && is_holder(process.pid));
            match owner {
                Some((process, it)) => observed(
                    process,
                    it,
                    states.get(&process.pid).copied().unwrap_or("live"),
                    observation,
                ),
                None => unobserved(found),
            }
        });
        Snapshot {
            domain,
            taken_ns,
            memory: memory::rows(observation),
            endpoints: endpoints.collect(),
            processes,
            notes: notes(observation),
        }
    }
}

/// What could not be read.
fn notes(observation: &Observation) -> Vec<String> {
    let unreadable = observation.unreadable.iter();
    let mut notes: Vec<String> = unreadable
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
        let pid = process.pid;
        for (rows, fault) in [
            (process.unlisted, "found no room in its page"),
            (process.damaged, "of its page are damaged"),
        ] {
            if rows > 0 {
                notes.push(format!("process {pid}: {rows} rows {fault}"));
            }
        }
    }
    notes
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

/// A name without an owner whose page can be read.
fn unobserved(found: &warpipe::Endpoint) -> EndpointRow {
    EndpointRow {
        name: found.name.to_string(),
        state: match (&found.holder, found.foreign) {
            (_, Some(_)) => "foreign",
            (Some(_), None) => "unobserved",
            (None, None) => "stale",
        },
        foreign: found.foreign,
        pid: found.holder.as_ref().and_then(|holder| holder.pid),
        ..EndpointRow::default()
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
    state: &'static str,
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
            "running" => "live",
            state => state,
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
        rate: None,
        generation: endpoint.generation,
    }
}
