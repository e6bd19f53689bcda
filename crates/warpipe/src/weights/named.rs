//! The weights of a domain, as a list for people: names, versions, and processes that have them.
//!
//! The descriptors of a version come along with its description, as every process gets them. They
//! are closed again: no memory is mapped, and no device is opened.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::holder::{number_of, weights_of};
use super::keeper::KeeperRequest;
use super::keeper_session::KeeperSession;
use super::manifest::Manifest;
use super::{WEIGHTS_NAME_BYTES_MAX, held::Held, takeover, weights_name};
use crate::device_types::DeviceId;
use crate::error::{Error, Holder, Result};
use crate::ipc::domain::{Author, Domain, EndpointName};

/// How many names are asked at once: a stopped keeper occupies a thread for a whole handshake.
const ASKED_AT_ONCE: usize = 8;

/// Weights of a domain: those that have a keeper, and those that processes have open without one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NamedWeights {
    /// The name.
    pub name: EndpointName,
    /// The process that keeps the name. Without one, the next keeper takes the version over.
    pub keeper: Option<Holder>,
    /// The version that the keeper offers, else its candidate; without a keeper the newest that a
    /// process answered with. `None` when there is none, or no process answered.
    pub version: Option<NamedVersion>,
    /// How many processes hold a version, of any number. The keeper is not counted.
    pub holders: usize,
}

/// A version of [`NamedWeights`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct NamedVersion {
    /// The version's number.
    pub number: u64,
    /// The number of tensors.
    pub tensors: usize,
    /// The length of the memory.
    pub bytes: u64,
    /// The device that the memory lies on.
    pub device: DeviceId,
    /// Whether a keeper offers it: not a candidate that waits for its check.
    pub is_offered: bool,
}

impl NamedVersion {
    fn of((held, manifest): &(Held, Manifest), is_offered: bool) -> NamedVersion {
        NamedVersion {
            number: held.version.number,
            tensors: manifest.tensors().len(),
            bytes: manifest.bytes(),
            device: held.info.device,
            is_offered,
        }
    }
}

impl NamedWeights {
    /// All weights of a domain of this user, sorted by name. A stopped process delays it by 5 s.
    ///
    /// # Errors
    /// [`Error::Os`] when the domain's directory cannot be read.
    pub fn list(domain: &Domain) -> Result<Vec<NamedWeights>> {
        let candidates = Candidate::all(domain)?;
        let found = Mutex::new(Vec::new());
        let left = Mutex::new(candidates);
        let ask_all = || {
            loop {
                let next = left
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .pop_front();
                let Some(next) = next else { return };
                let weights = next.ask(domain);
                let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                found.extend(weights);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..ASKED_AT_ONCE {
                let thread = std::thread::Builder::new().name("warpipe-weights".into());
                // Without more threads, those that run ask everyone.
                let _ = thread.spawn_scoped(scope, ask_all);
            }
            ask_all();
        });
        let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// The weights of this name; `None` when no process has any.
    ///
    /// # Errors
    /// [`Error::Name`]; as [`list`](Self::list).
    pub fn find(domain: &Domain, name: &str) -> Result<Option<NamedWeights>> {
        let name = weights_name(name)?;
        let candidates = Candidate::all(domain)?.into_iter();
        let wanted = candidates.into_iter().find(|found| found.name == name);
        Ok(wanted.and_then(|found| found.ask(domain)))
    }
}

/// A name of the directory that may be one of weights.
struct Candidate {
    name: EndpointName,
    /// Whether a process holds the name itself.
    is_held: bool,
    /// The endpoints of processes that hold a version, by its number, and their processes.
    holders: BTreeMap<u64, Vec<EndpointName>>,
    processes: BTreeSet<(i32, u64)>,
}

impl Candidate {
    fn all(domain: &Domain) -> Result<VecDeque<Candidate>> {
        let mut found: BTreeMap<String, Candidate> = BTreeMap::new();
        for (endpoint, author) in domain.held()? {
            let weights = weights_of(&endpoint);
            let text = weights.unwrap_or(endpoint.as_str());
            let Some(name) = EndpointName::new(text).ok().filter(may_be_weights) else {
                continue;
            };
            let candidate = found.entry(text.to_owned()).or_insert_with(|| Candidate {
                name,
                is_held: false,
                holders: BTreeMap::new(),
                processes: BTreeSet::new(),
            });
            match weights.and_then(|weights| number_of(weights, &endpoint)) {
                Some(number) => {
                    let Author { pid, namespace } = author;
                    candidate.processes.insert((pid, namespace));
                    candidate.holders.entry(number).or_default().push(endpoint);
                }
                None => candidate.is_held = true,
            }
        }
        Ok(found.into_values().collect())
    }

    /// Asks the keeper, or without one the holders of the newest versions. `None` when these are no
    /// weights.
    fn ask(self, domain: &Domain) -> Option<NamedWeights> {
        let keeper = self.keeper_version(domain);
        let (keeper, version) = match keeper {
            Ok(version) => (domain.holder(&self.name), version),
            // It is stopped, or ends: the name alone does not say that it keeps weights.
            Err(Error::Handshake { .. } | Error::Timeout { .. } | Error::PeerGone { .. })
                if !self.holders.is_empty() =>
            {
                (domain.holder(&self.name), None)
            }
            Err(_) if self.holders.is_empty() => return None,
            Err(_) => (None, None),
        };
        let version = match keeper {
            Some(_) => version,
            None => self.held_version(domain),
        };
        Some(NamedWeights {
            name: self.name,
            keeper,
            version,
            holders: self.processes.len(),
        })
    }

    fn keeper_version(&self, domain: &Domain) -> Result<Option<NamedVersion>> {
        if !self.is_held {
            let (name, kind) = (self.name.to_string(), crate::kind::Kind::Weights);
            return Err(Error::NotFound {
                kind,
                name,
                was_there: false,
            });
        }
        let keeper = KeeperSession::open(domain, &self.name, Duration::ZERO)?;
        if let Ok(offered) = keeper.version(&KeeperRequest::Offered, Duration::ZERO)? {
            return Ok(Some(NamedVersion::of(&offered, true)));
        }
        let candidate = keeper.version(&KeeperRequest::Candidate, Duration::ZERO)?;
        Ok(candidate.ok().map(|found| NamedVersion::of(&found, false)))
    }

    /// The newest version that a process answers with.
    fn held_version(&self, domain: &Domain) -> Option<NamedVersion> {
        let newest_first = self.holders.values().rev().flatten();
        let mut held = newest_first.filter_map(|holder| takeover::fetch(domain, holder).ok());
        held.next().map(|held| NamedVersion::of(&held, false))
    }
}

/// The names of other endpoints may be longer.
fn may_be_weights(name: &EndpointName) -> bool {
    name.as_str().len() <= WEIGHTS_NAME_BYTES_MAX && !name.as_str().contains("/offer-")
}
