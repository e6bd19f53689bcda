//! The keeper of a name: descriptors and a manifest of the current version, for every process that
//! asks.
//!
//! It opens no device and maps no memory. It has no thread while nothing is published: each offer
//! is fetched on a thread that ends with it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use serde::{Deserialize, Serialize};

use super::held::{Held, KnownParts, NUMBER_MAX, Version, VersionReply};
use super::holder::{clear_dead, offer_prefix};
use super::takeover::Found;
use super::{takeover, weights_name};
use crate::error::Result;
use crate::fork::OwnerProcess;
use crate::fork::thread::Thread;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    AccessPolicy, ClientInfo, IpcServer, Kind, OutgoingReply, Rejection, RequestHandler,
    ServerCore, decode,
};
use crate::mutex::LockUnpoisoned;
use crate::options::{chosen_domain, in_domain, serve};
use crate::runtime::doorbell::LocalDoorbell;
use crate::trace::{self, TraceEvent};

/// How many offers are fetched at once, each on a thread: a stopped publisher occupies its thread
/// for as long as a handshake may take.
const OFFERS_MAX: usize = 8;

/// A client's request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum KeeperRequest {
    /// The version that is offered.
    Offered,
    /// The version to be checked: the candidate, else the one that is offered.
    Candidate,
    /// Descriptors of a version's pieces, from number `first` on: as many as one reply carries.
    Pieces { version: Version, first: u32 },
    /// Fetch the version that the endpoint `name` offers. A notice follows.
    Take { name: String },
    /// The content hashes of a version have been compared.
    Checked { version: Version, is_sound: bool },
    /// Give all descriptors up, and end.
    End,
    /// This process serves a holder of the version `number`: no keeper that begins after the reply
    /// gives the number once more.
    Holding { number: u64 },
}

/// The reply.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum KeeperReply {
    /// Descriptors: the manifest, the lease, the first pieces.
    Version(VersionReply),
    /// The descriptors go with it.
    Pieces,
    /// The keeper has the version of which pieces were asked for no more.
    Replaced,
    /// There is none. A candidate may wait for its check.
    Nothing { candidate: Option<u64> },
    /// The request has been noted.
    Noted,
}

/// A notification.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum KeeperNotice {
    /// Another version is offered.
    Offered,
    /// The client's offer has become this version.
    Taken { number: u64 },
    /// The client's offer could not be fetched.
    NotTaken { text: String },
}

/// The options of a [`Keeper`].
#[derive(Debug, Clone, Default)]
pub struct KeeperOptions {
    /// The domain of its name; the environment's by default.
    pub domain: Option<Domain>,
    /// Lets these users, beside this process's own, open the weights that it offers, and do nothing
    /// else with it; none by default. The domain directory must admit them, too. They get the memory itself, and
    /// could write to it: admit users that are trusted so far.
    pub allow_uids: Vec<u32>,
    /// Admits processes with one of these as their effective group. The kernel reports no
    /// supplementary groups of a peer, so those do not count.
    pub allow_gids: Vec<u32>,
}

in_domain!(KeeperOptions);

/// What [`Keeper::state`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeeperStatus {
    /// The version that is offered.
    pub version: Option<u64>,
    /// The version that was taken over from another process and is not offered before a process
    /// with a device has compared its content hashes:
    /// [`verify`](super::SharedWeights::verify), which opens a device and so is better
    /// called in another process. If they differ, the next older version is the candidate.
    pub candidate: Option<u64>,
    /// How many holders did not answer this keeper when it began; they may be stopped. A process is
    /// a holder once for each time that it opened or published weights of the name.
    pub unanswered: usize,
    /// Whether a process of this user has asked this keeper to [end](Keeper::end). The keeper has
    /// given its descriptors up then, offers nothing and takes nothing; its owner drops it.
    pub is_asked_to_end: bool,
}

/// Keeps the weights of a name: descriptors alone, without a device. Dropping it releases the name;
/// processes that have the weights open keep them.
#[derive(Debug)]
pub struct Keeper {
    _server: IpcServer,
    core: Arc<KeeperCore>,
    unanswered: usize,
    owner_process: OwnerProcess,
}

impl Keeper {
    /// Claims the name (at most 200 bytes, otherwise as every endpoint name), and asks every
    /// process that holds a version of it for its descriptors (at most 25 s: a stopped process does
    /// not answer). The newest version found becomes the [candidate](KeeperStatus::candidate); up to 7
    /// older ones wait behind it.
    ///
    /// # Errors
    /// [`Error::Name`](crate::Error::Name),
    /// [`Error::Os`](crate::Error::Os).
    pub fn new(name: &str, options: KeeperOptions) -> Result<Keeper> {
        let name = weights_name(name)?;
        let domain = chosen_domain(&options.domain)?;
        let core = Arc::new(KeeperCore {
            name: name.clone(),
            domain: domain.clone(),
            state: Mutex::default(),
            server: OnceLock::new(),
            offers: Arc::default(),
            ending: LocalDoorbell::new()?,
        });
        let handler = Arc::new(core.clone());
        let access = AccessPolicy::of(options.allow_uids, options.allow_gids);
        // Before the search: a process that becomes a holder from now on has asked this keeper.
        let server = serve(&Some(domain.clone()), &name, Kind::Weights, access, handler)?;
        let found = takeover::find(&domain, &name);
        let unanswered = found.as_ref().map_or(0, |found| found.unanswered);
        // Closed behind the lock.
        let found = found.map(|found| core.state.locked().take_over(found));
        // In any case: offers wait for it.
        let _ = core.server.set(Arc::downgrade(server.server_core()));
        found?;
        // Processes may wait for something to check.
        tell_offered(server.server_core());
        Ok(Keeper {
            _server: server,
            core,
            unanswered,
            owner_process: OwnerProcess::current(),
        })
    }

    /// What it has at this moment.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State).
    pub fn state(&self) -> Result<KeeperStatus> {
        self.owner_process.check()?;
        let state = self.core.state.locked();
        Ok(KeeperStatus {
            version: state.offered.as_ref().map(|held| held.version.number),
            candidate: state.candidate(),
            unanswered: self.unanswered,
            is_asked_to_end: state.is_ending,
        })
    }
}

impl AsFd for Keeper {
    /// A descriptor that is readable from the time on when the keeper is
    /// [asked to end](KeeperStatus::is_asked_to_end) (an eventfd, for `poll` and event loops). Do not
    /// read it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.core.ending.as_fd()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if self.owner_process.is_current() {
            clear_dead(&self.core.domain, self.core.name.as_str());
        }
    }
}

#[derive(Debug)]
struct KeeperCore {
    name: EndpointName,
    domain: Domain,
    state: Mutex<KeeperState>,
    /// Set once the holders have been asked: numbers are given from then on.
    server: OnceLock<Weak<ServerCore>>,
    /// Each offer that is being fetched has it, too.
    offers: Arc<()>,
    /// Rung when a process asks the keeper to end.
    ending: LocalDoorbell,
}

#[derive(Debug, Default)]
struct KeeperState {
    offered: Option<Held>,
    /// Versions taken over and not checked, the newest last.
    candidates: Vec<Held>,
    last_number: u64,
    is_ending: bool,
}

impl KeeperState {
    fn candidate(&self) -> Option<u64> {
        self.candidates.last().map(|held| held.version.number)
    }

    /// Takes what other processes hold, and returns it if this keeper takes nothing any more.
    fn take_over(&mut self, found: Found) -> Vec<Held> {
        self.know(found.last_number);
        let mut versions = found.versions;
        if self.is_ending {
            return versions;
        }
        versions.iter_mut().for_each(Held::keep);
        std::mem::replace(&mut self.candidates, versions)
    }

    /// Gives no number up to this one from now on. Numbers that no version has count for nothing.
    fn know(&mut self, number: u64) {
        if number <= NUMBER_MAX {
            self.last_number = self.last_number.max(number);
        }
    }

    /// The version, if this keeper has it.
    fn find(&self, version: Version) -> Option<&Held> {
        let mut held = self.candidates.iter().chain(&self.offered);
        held.find(|held| held.version == version)
    }

    /// The pieces that this keeper has: a publisher need not send them again.
    fn known(&self) -> KnownParts {
        let mut known = KnownParts::default();
        let held = self.candidates.iter().chain(&self.offered);
        held.for_each(|held| known.add_version(held));
        known
    }

    /// Takes a publisher's version, and returns its number with the versions that it replaces.
    fn replace(&mut self, mut held: Held) -> Result<(u64, Vec<Held>), String> {
        if self.is_ending {
            return Err("it was asked to end".into());
        }
        if held.version.number != 0 {
            return Ok((held.version.number, vec![self.add_hashes(held)]));
        }
        if let Some(offered) = &self.offered
            && offered.version.id == held.version.id
        {
            return Ok((offered.version.number, vec![held]));
        }
        // Its publisher was not told of the number that the previous keeper gave.
        let known = self
            .candidates
            .last()
            .map(|newest| newest.version)
            .filter(|newest| newest.id == held.version.id && newest.number == self.last_number);
        let number = known.map_or(self.last_number + 1, |known| known.number);
        if number > NUMBER_MAX {
            return Err(format!("{NUMBER_MAX} versions have been published"));
        }
        held.version.number = number;
        held.keep();
        self.last_number = number;
        let mut replaced = std::mem::take(&mut self.candidates);
        replaced.extend(self.offered.replace(held));
        Ok((number, replaced))
    }

    /// Takes the hashes that the publisher of a version has computed since it was offered, if this
    /// keeper has the version.
    fn add_hashes(&mut self, hashed: Held) -> Held {
        let mut held = self.candidates.iter_mut().chain(&mut self.offered);
        if let Some(held) = held.find(|held| held.version == hashed.version) {
            held.take_hashes(&hashed);
        }
        hashed
    }

    /// Notes the result of a check, and returns the versions that are held no longer; `None` when
    /// this version is not the candidate.
    fn check(&mut self, version: Version, is_sound: bool) -> Option<Vec<Held>> {
        let candidate = self.candidates.pop_if(|held| held.version == version)?;
        if !is_sound {
            return Some(vec![candidate]);
        }
        let mut replaced = std::mem::take(&mut self.candidates);
        replaced.extend(self.offered.replace(candidate));
        Some(replaced)
    }

    /// Gives every version up, and takes none from now on.
    fn end(&mut self) -> Vec<Held> {
        self.is_ending = true;
        let mut replaced = std::mem::take(&mut self.candidates);
        replaced.extend(self.offered.take());
        replaced
    }
}

impl KeeperCore {
    fn reply_with(&self, held: &Held) -> Result<OutgoingReply, Rejection> {
        held.reply(&KeeperReply::Version(held.describe()))
    }

    /// Fetches the version that `endpoint` offers. Waits for another process.
    fn fetch(&self, endpoint: &str) -> Result<u64, String> {
        let endpoint = EndpointName::of_endpoint(endpoint).map_err(|error| error.to_string())?;
        let fetched = takeover::fetch(&self.domain, &endpoint, || self.state.locked().known());
        let held = fetched.map_err(|error| error.to_string())?;
        // Closed behind the lock.
        let (number, _replaced) = self.state.locked().replace(held)?;
        Ok(number)
    }

    fn begin_offer(
        self: &Arc<Self>,
        client: u64,
        endpoint: String,
    ) -> Result<OutgoingReply, Rejection> {
        if !endpoint.starts_with(&offer_prefix(self.name.as_str())) {
            return Err(Rejection::new(format!(
                "{endpoint:?} is no offer of these weights"
            )));
        }
        let (core, offer) = (self.clone(), self.offers.clone());
        if Arc::strong_count(&offer) > 1 + OFFERS_MAX {
            return Err(Rejection::new(format!(
                "it fetches {OFFERS_MAX} offers already"
            )));
        }
        Thread::start("warpipe-weights", move || {
            let _fetched = &offer;
            core.take_offer(client, &endpoint);
        })?;
        OutgoingReply::new(&KeeperReply::Noted, vec![])
    }

    /// Fetches the offer of `client` and tells the result.
    fn take_offer(&self, client: u64, endpoint: &str) {
        let server = self.server.wait().clone();
        // The keeper has gone, or goes: no process would be told of the version.
        if server.upgrade().is_none() {
            return;
        }
        let fetched = self.fetch(endpoint);
        let Some(server) = server.upgrade() else {
            return;
        };
        let is_taken = fetched.is_ok();
        let notice = match fetched {
            Ok(number) => KeeperNotice::Taken { number },
            Err(text) => KeeperNotice::NotTaken {
                text: crate::ipc::message::text(text),
            },
        };
        if let Ok(notice) = OutgoingReply::new(&notice, vec![]) {
            server.tell(client, &notice);
        }
        if is_taken {
            self.note_offered(&server);
            tell_offered(&server);
        }
    }

    /// Says in the statistics and to the program which version is offered from now on.
    fn note_offered(&self, server: &ServerCore) {
        if let Some(offered) = &self.state.locked().offered {
            server.row().attach_to(offered.version.id);
        }
        trace::emit(|| {
            let state = self.state.locked();
            let offered = state.offered.as_ref();
            TraceEvent::WeightsOffered(
                self.name.to_string(),
                offered.map_or(0, |held| held.version.number),
                offered.map_or(0, |held| held.manifest.bytes()),
            )
        });
    }
}

/// Tells every client that another version is offered.
fn tell_offered(server: &ServerCore) {
    if let Ok(notice) = OutgoingReply::new(&KeeperNotice::Offered, vec![]) {
        server.tell_all(&notice);
    }
}

impl RequestHandler for Arc<KeeperCore> {
    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let nothing = |candidate| OutgoingReply::new(&KeeperReply::Nothing { candidate }, vec![]);
        let request = decode(body, server_core.name())?;
        let is_own = client.uid == rustix::process::geteuid().as_raw();
        let reads = matches!(
            request,
            KeeperRequest::Offered | KeeperRequest::Pieces { .. }
        );
        if !is_own && !reads {
            return Err(Rejection::new(
                "other users may open what it offers, and no more",
            ));
        }
        match request {
            KeeperRequest::Offered => {
                let state = self.state.locked();
                match &state.offered {
                    Some(held) => self.reply_with(held),
                    None => nothing(state.candidate()),
                }
            }
            KeeperRequest::Candidate => {
                let state = self.state.locked();
                match state.candidates.last().or(state.offered.as_ref()) {
                    Some(held) => self.reply_with(held),
                    None => nothing(None),
                }
            }
            KeeperRequest::Pieces { version, first } => match self.state.locked().find(version) {
                Some(held) => held.reply_pieces(&KeeperReply::Pieces, first),
                None => OutgoingReply::new(&KeeperReply::Replaced, vec![]),
            },
            KeeperRequest::Take { name } => self.begin_offer(client.id, name),
            KeeperRequest::Checked { version, is_sound } => {
                // Closed behind the lock.
                let replaced = self.state.locked().check(version, is_sound);
                if replaced.is_some() {
                    self.note_offered(server_core);
                    tell_offered(server_core);
                }
                OutgoingReply::new(&KeeperReply::Noted, vec![])
            }
            KeeperRequest::End => {
                // Closed behind the lock.
                let _given_up = self.state.locked().end();
                self.ending.ring();
                OutgoingReply::new(&KeeperReply::Noted, vec![])
            }
            KeeperRequest::Holding { number } => {
                self.state.locked().know(number);
                OutgoingReply::new(&KeeperReply::Noted, vec![])
            }
        }
    }
}

#[cfg(test)]
mod tests;
