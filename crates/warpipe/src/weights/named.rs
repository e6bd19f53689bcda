//! The weights of a domain, as a list for people: names, versions, and processes that have them.
//!
//! Descriptors of a version come along with its description, as every process gets them. They are
//! closed again: no memory is mapped, and no device is opened.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::held::PartialVersion;
use super::holder::{number_of, weights_of};
use super::keeper::KeeperRequest;
use super::keeper_session::KeeperSession;
use super::manifest::Hashing;
use super::takeover::{ask_all, describe};
use super::{WEIGHTS_NAME_BYTES_MAX, weights_name};
use crate::device_types::DeviceId;
use crate::error::{Error, HandshakeFault, Holder, Result};
use crate::ipc::domain::{Author, Domain, EndpointName};
use crate::mutex::LockUnpoisoned;
use crate::origin::is_stopped;

/// From when on no further process is asked.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

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
    /// Whether a process that may know the version did not answer: it is stopped, or very slow.
    /// Without holders the name may then be that of another endpoint.
    pub is_silent: bool,
}

/// A version of [`NamedWeights`].
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// When its publisher computes the content hashes.
    pub hash: Hashing,
    /// Whether each tensor has one.
    pub is_hashed: bool,
    /// What the publisher gave with the version: a JSON text, empty without any.
    pub metadata: String,
}

impl NamedVersion {
    fn of(found: &PartialVersion, is_offered: bool) -> NamedVersion {
        NamedVersion {
            number: found.version.number,
            tensors: found.manifest.tensors().len(),
            bytes: found.manifest.bytes(),
            device: found.device,
            is_offered,
            hash: found.manifest.hashing(),
            is_hashed: found.manifest.is_hashed(),
            // The check of a manifest refuses any other bytes.
            metadata: String::from_utf8_lossy(found.manifest.metadata()).into_owned(),
        }
    }
}

impl NamedWeights {
    /// All weights of a domain of this user, sorted by name, or those of one name alone. Processes
    /// are asked at the same time. Stopped ones are not; others that do not answer delay it by 5 s,
    /// and many of them by 10 s at most.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::Os`] when the domain's directory cannot be read.
    pub fn list<'n>(
        domain: &Domain,
        name: impl Into<Option<&'n str>>,
    ) -> Result<Vec<NamedWeights>> {
        let name = name.into().map(weights_name).transpose()?;
        let mut candidates = Candidate::all(domain)?;
        candidates.retain(|found| name.as_ref().is_none_or(|name| found.name == *name));
        Ok(Survey::of(domain, candidates))
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
    fn all(domain: &Domain) -> Result<Vec<Candidate>> {
        let mut found: BTreeMap<String, Candidate> = BTreeMap::new();
        for (endpoint, author) in domain.held()? {
            let weights = weights_of(&endpoint);
            let text = weights.unwrap_or(endpoint.as_str());
            let Some(name) = EndpointName::of_endpoint(text).ok().filter(may_be_weights) else {
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

    /// Asks the keeper.
    fn keeper_version(&self, domain: &Domain) -> Result<Option<NamedVersion>> {
        let now = &Duration::ZERO.into();
        let keeper = KeeperSession::open(domain, &self.name, now)?;
        if let Ok(offered) = keeper.version(&KeeperRequest::Offered, now)? {
            return Ok(Some(NamedVersion::of(&offered, true)));
        }
        let candidate = keeper.version(&KeeperRequest::Candidate, now)?;
        Ok(candidate.ok().map(|found| NamedVersion::of(&found, false)))
    }

    /// One question for each holder, the newest version's first.
    fn questions(&self, index: usize) -> Vec<Question> {
        let newest_first = self.holders.iter().rev();
        let questions = newest_first.flat_map(|(&number, holders)| {
            let question = move |holder: &EndpointName| Question {
                index,
                holder: Some((number, holder.clone())),
            };
            holders.iter().map(question)
        });
        questions.collect()
    }
}

/// A question to one process: to the keeper of the candidate with this index, or to a holder of the
/// version with this number.
struct Question {
    index: usize,
    holder: Option<(u64, EndpointName)>,
}

/// What has been found of all candidates, whose processes several threads ask.
struct Survey<'a> {
    domain: &'a Domain,
    candidates: &'a [Candidate],
    since: Instant,
    /// One for each candidate; `None` for the name of another endpoint.
    found: Mutex<Vec<Option<NamedWeights>>>,
}

impl Survey<'_> {
    /// The weights among the candidates, in their order.
    fn of(domain: &Domain, candidates: Vec<Candidate>) -> Vec<NamedWeights> {
        let (mut questions, mut of_holders) = (Vec::new(), Vec::new());
        for (index, candidate) in candidates.iter().enumerate() {
            match candidate.is_held {
                true => questions.push(Question {
                    index,
                    holder: None,
                }),
                false => of_holders.extend(candidate.questions(index).into_iter().enumerate()),
            }
        }
        // The newest of each name first: the timeout then costs the oldest.
        of_holders.sort_by_key(|(rank, _)| *rank);
        questions.extend(of_holders.into_iter().map(|(_, question)| question));
        let weights = |candidate: &Candidate| NamedWeights {
            name: candidate.name.clone(),
            keeper: None,
            version: None,
            holders: candidate.processes.len(),
            is_silent: false,
        };
        let found = candidates.iter().map(|it| Some(weights(it))).collect();
        let survey = Survey {
            domain,
            candidates: &candidates,
            since: Instant::now(),
            found: Mutex::new(found),
        };
        ask_all(questions, |question| survey.ask(question));
        let found = std::mem::take(&mut *survey.found.locked());
        found.into_iter().flatten().collect()
    }

    /// Asks one process, and returns what is to be asked then.
    fn ask(&self, Question { index, holder }: Question) -> Vec<Question> {
        match holder {
            None => return self.ask_keeper(index),
            Some((number, holder)) => self.ask_holder(index, number, &holder),
        }
        vec![]
    }

    /// Whether a process is not to be waited for.
    fn is_passed_over(&self, endpoint: &EndpointName) -> bool {
        let pid = || self.domain.holder(endpoint)?.pid;
        self.since.elapsed() >= LIST_TIMEOUT || pid().is_some_and(is_stopped)
    }

    fn ask_keeper(&self, index: usize) -> Vec<Question> {
        let candidate = &self.candidates[index];
        let version = match self.is_passed_over(&candidate.name) {
            true => Err(Error::timeout("the answer of a keeper", LIST_TIMEOUT)),
            false => candidate.keeper_version(self.domain),
        };
        let is_silent = version.as_ref().is_err_and(is_silence);
        let version = match version {
            Ok(version) => version,
            Err(_) if is_silent => None,
            // The name alone does not say that it keeps weights.
            Err(_) if candidate.holders.is_empty() => {
                self.found.locked()[index] = None;
                return vec![];
            }
            // It ends.
            Err(Error::Handshake { .. } | Error::PeerGone { .. }) => None,
            // The name is another endpoint's.
            Err(_) => return candidate.questions(index),
        };
        let keeper = self.domain.holder(&candidate.name);
        if let Some(weights) = &mut self.found.locked()[index] {
            (weights.keeper, weights.version, weights.is_silent) = (keeper, version, is_silent);
        }
        vec![]
    }

    /// Asks a holder, unless its answer would come late or change nothing.
    fn ask_holder(&self, index: usize, number: u64, holder: &EndpointName) {
        let is_newer = |weights: &NamedWeights| {
            let known = weights.version.as_ref().map_or(0, |version| version.number);
            number > known
        };
        if !self.found.locked()[index].as_ref().is_some_and(is_newer) {
            return;
        }
        let found = (!self.is_passed_over(holder)).then(|| describe(self.domain, holder));
        let Some(Ok(found)) = found else {
            let is_silent = found.is_none_or(|found| found.is_err_and(|error| is_silence(&error)));
            if let Some(weights) = &mut self.found.locked()[index] {
                weights.is_silent |= is_silent;
            }
            return;
        };
        let version = NamedVersion::of(&found, false);
        // Another thread may have got a newer one meanwhile.
        if let Some(weights) = &mut self.found.locked()[index]
            && version.number == number
            && is_newer(weights)
        {
            weights.version = Some(version);
        }
    }
}

fn is_silence(error: &Error) -> bool {
    matches!(
        error,
        Error::Timeout { .. }
            | Error::Handshake {
                fault: HandshakeFault::Silent(_),
                ..
            }
    )
}

/// The names of other endpoints may be longer.
fn may_be_weights(name: &EndpointName) -> bool {
    name.as_str().len() <= WEIGHTS_NAME_BYTES_MAX && !name.as_str().contains("/offer-")
}
