//! The takeover: a new keeper asks every process that holds a version of its name.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::held::{Held, KnownParts, PartialVersion, VersionReply};
use super::holder::{HolderRequest, holders, number_of};
use crate::error::{Error, Result};
use crate::fork::thread::on_several;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{Address, ClientSession, Kind, REPLY_TIMEOUT, SessionObserver, decode, encode};
use crate::mutex::LockUnpoisoned;

/// How many processes are asked at once: a stopped one occupies a thread for a whole handshake.
const ASKED_AT_ONCE: usize = 32;

/// The most versions that are taken over: a candidate keeps its memory until a check.
const VERSIONS_MAX: usize = 8;

/// From when on no further holder is asked.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(20);

/// What the holders of a name have.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Each version once, the newest last; not more than [`VERSIONS_MAX`].
    pub(super) versions: Vec<Held>,
    /// The largest number in use, also by holders that did not answer and by dead ones.
    pub(super) last_number: u64,
    /// The holders that live and did not answer.
    pub(super) unanswered: usize,
    /// This process has no room for more descriptors.
    pub(super) shortage: Option<Error>,
}

impl Found {
    /// Adds a version, and returns one that there is no room for.
    fn add(&mut self, held: Held) -> Option<Held> {
        let mut versions = self.versions.iter_mut();
        if let Some(known) = versions.find(|known| known.version == held.version) {
            // A holder may have opened it before its hashes were there.
            known.take_hashes(&held);
            return Some(held);
        }
        let number = held.version.number;
        let at = self.versions.partition_point(|v| v.version.number < number);
        self.versions.insert(at, held);
        (self.versions.len() > VERSIONS_MAX).then(|| self.versions.remove(0))
    }
}

/// Asks all holders. Removes the files of dead ones.
///
/// # Errors
/// [`Error::Os`] when this process has no room for what they hold: a version would be
/// lost without a word. [`Error::Os`] when the directory cannot be read.
pub(super) fn find(domain: &Domain, weights: &EndpointName) -> Result<Found> {
    let mut found = Found::default();
    let mut living = Vec::new();
    for name in holders(domain, weights.as_str())? {
        let number = number_of(weights.as_str(), &name);
        found.last_number = found.last_number.max(number.unwrap_or(0));
        if !domain.clean_name(&name)
            && let Some(number) = number
        {
            living.push((number, name));
        }
    }
    // The newest first: the timeout then costs the oldest.
    living.sort_by(|a, b| b.cmp(a));
    let search = Search {
        domain,
        since: Instant::now(),
        completing: Mutex::new(()),
        found: Mutex::new(found),
    };
    ask_all(living, |(number, name)| {
        match search.ask(&name, number) {
            // It ended between the look at the directory and the question.
            Ok(()) | Err(Error::NotFound { .. }) => {}
            Err(error) if error.is_descriptor_limit() => {
                search.found.locked().shortage = Some(error);
            }
            Err(_) => search.found.locked().unanswered += 1,
        }
        vec![]
    });
    let mut found = std::mem::take(&mut *search.found.locked());
    match found.shortage.take() {
        Some(error) => Err(error),
        None => Ok(found),
    }
}

/// Puts questions to other processes, on several threads, in their order. An answer may bring more
/// questions.
pub(super) fn ask_all<Q: Send>(questions: Vec<Q>, ask: impl Fn(Q) -> Vec<Q> + Sync) {
    let more = ASKED_AT_ONCE.min(questions.len()).saturating_sub(1);
    let left = Mutex::new(VecDeque::from(questions));
    on_several("warpipe-weights", more, &|| {
        loop {
            let next = left.locked().pop_front();
            let Some(next) = next else { return };
            let further = ask(next);
            left.locked().extend(further);
        }
    });
}

struct Search<'a> {
    domain: &'a Domain,
    since: Instant,
    /// Held by the thread that asks for a version's pieces: many holders may have one version, and
    /// its pieces are asked for once.
    completing: Mutex<()>,
    found: Mutex<Found>,
}

impl Search<'_> {
    fn check_time(&self) -> Result<()> {
        if self.since.elapsed() < TAKEOVER_TIMEOUT {
            return Ok(());
        }
        let what = "the answers of all holders";
        Err(Error::timeout(what, TAKEOVER_TIMEOUT))
    }

    /// Asks one holder for its version, which has to have the number in its name, unless the version
    /// has been found.
    fn ask(&self, name: &EndpointName, number: u64) -> Result<()> {
        self.check_time()?;
        let (session, version) = attach(self.domain, name)?;
        if version.version.number != number {
            let found = version.version.number;
            return Err(Error::protocol(name, "version", found, number));
        }
        // Until it has been added, so that no other thread asks for the same pieces.
        let completing = (!version.is_whole()).then(|| self.completing.locked());
        if completing.is_some() {
            self.check_time()?;
            let brings_hashes = version.manifest.is_hashed();
            let is_same = |held: &Held| {
                held.version == version.version && (held.is_hashed() || !brings_hashes)
            };
            if self.found.locked().versions.iter().any(is_same) {
                return Ok(());
            }
        }
        let held = complete(&session, version)?;
        // Closed behind the lock.
        let _superfluous = self.found.locked().add(held);
        Ok(())
    }
}

/// Gets a holder's version, and its descriptors but those of parts that are `known` here.
pub(super) fn fetch(
    domain: &Domain,
    name: &EndpointName,
    known: impl FnOnce() -> KnownParts,
) -> Result<Held> {
    let (session, mut version) = attach(domain, name)?;
    if !version.is_whole() {
        version.take_known(&known());
    }
    complete(&session, version)
}

/// Gets the description of a holder's version.
pub(super) fn describe(domain: &Domain, name: &EndpointName) -> Result<PartialVersion> {
    Ok(attach(domain, name)?.1)
}

fn attach(domain: &Domain, name: &EndpointName) -> Result<(ClientSession, PartialVersion)> {
    let at = Address {
        domain,
        name,
        kind: Kind::WeightsHolder,
    };
    let (session, incoming) = ClientSession::attach(&at, None, &[], Duration::ZERO)?;
    let reply: VersionReply = decode(&incoming.body, name.as_str())?;
    let version = PartialVersion::receive(name.as_str(), &reply, incoming.fds)?;
    Ok((session, version))
}

/// A holder sends nothing but replies.
struct NothingElse;

impl SessionObserver for NothingElse {}

/// Gets the pieces that a version lacks. A keeper serves it, and reads none of its tensors.
fn complete(session: &ClientSession, mut version: PartialVersion) -> Result<Held> {
    version.manifest.forget_tensors();
    if !version.is_whole() {
        // The reactor receives the replies.
        session.observe(Arc::new(NothingElse))?;
    }
    let start = Instant::now();
    let ask = |first| {
        // For all of them: a holder that is slow with each delays a takeover no longer.
        let left = REPLY_TIMEOUT.saturating_sub(start.elapsed());
        let request = encode(&HolderRequest { first })?;
        Ok(Some(session.request(&request, left)?))
    };
    let whole = version.complete(ask)?;
    whole.ok_or_else(|| session.owner_gone())
}
