//! A session with a keeper, as publishers and workers have it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::held::{Held, KnownParts, NUMBER_MAX, PartialVersion};
use super::keeper::{Keeper, KeeperNotice, KeeperReply, KeeperRequest};
use super::weights_name;
use crate::error::{Error, HandshakeFault, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    Address, ClientSession, IncomingReply, Kind, REPLY_TIMEOUT, SessionObserver, decode, encode,
    until_open,
};
use crate::mutex::LockUnpoisoned;
use crate::wait::Wait;

/// Has a keeper fetch what the endpoint `offer` serves, and returns the session and the version's
/// number.
pub(super) fn offer_to_keeper(
    domain: &Domain,
    name: &EndpointName,
    offer: &EndpointName,
    wait: &Wait<'_>,
) -> Result<(KeeperSession, u64)> {
    let keeper = KeeperSession::open(domain, name, wait)?;
    let take = KeeperRequest::Take {
        name: offer.to_string(),
    };
    keeper.request(&take, wait)?;
    let mut news = keeper.news.wait(wait, |news| news.outcome.is_some());
    let (outcome, is_over) = (news.outcome.take(), news.is_over);
    drop(news);
    match outcome {
        Some(Ok(number)) if (1..=NUMBER_MAX).contains(&number) => Ok((keeper, number)),
        Some(Ok(number)) => Err(Error::protocol(name, "version", number, "1 to 2^48")),
        Some(Err(text)) => Err(Error::refused(name, text)),
        None if is_over => Err(keeper.session.owner_gone()),
        None => Err(Error::timeout(
            format!("the answer of the keeper of {name:?}"),
            wait.limit(),
        )),
    }
}

impl Keeper {
    /// Asks the keeper of `name`, in whatever process of this user, to give its descriptors up and
    /// to end, and waits until the name is free. Processes that have the weights
    /// open keep them.
    ///
    /// # Errors
    /// [`Error::NotFound`] without a keeper; [`Error::Timeout`] when its process does not drop it;
    /// [`Error::Name`], [`Error::Handshake`].
    pub fn end<'w>(domain: &Domain, name: &str, wait: impl Into<Wait<'w>>) -> Result<()> {
        let (name, wait) = (&weights_name(name)?, &wait.into());
        let keeper = KeeperSession::open(domain, name, &wait.no_longer_than(Duration::ZERO))?;
        match keeper.request(&KeeperRequest::End, wait) {
            // Its owner may drop it before the reply is sent.
            Ok(_) | Err(Error::PeerGone { .. }) => {}
            Err(error) => return Err(error),
        }
        let news = keeper.news.wait(wait, |_| false);
        if news.is_over {
            return Ok(());
        }
        let what = format!("the end of the keeper of {name:?}, which has given its descriptors up");
        Err(Error::timeout(what, wait.limit()))
    }
}

/// Waits for a version after number `after` in the reply to `request`, and gets all
/// of it: the pieces that are `known` here are not asked for. If the keeper ends meanwhile, waits for
/// the next one. The session is with the keeper that has replied.
pub(super) fn wait_for_version(
    domain: &Domain,
    name: &EndpointName,
    request: &KeeperRequest,
    after: u64,
    wait: &Wait<'_>,
    known: &dyn Fn(&PartialVersion) -> KnownParts,
) -> Result<(KeeperSession, Held)> {
    let whole = |keeper: &KeeperSession, mut found: PartialVersion| {
        if !found.is_whole() {
            found.take_known(&known(&found));
        }
        keeper.complete(found, wait)
    };
    wait_for(domain, name, request, after, wait, whole)
}

/// As [`wait_for_version`], for its number alone.
pub(super) fn wait_for_number(
    domain: &Domain,
    name: &EndpointName,
    request: &KeeperRequest,
    after: u64,
    wait: &Wait<'_>,
) -> Result<u64> {
    let number = |_: &KeeperSession, found: PartialVersion| Ok(Some(found.version.number));
    Ok(wait_for(domain, name, request, after, wait, number)?.1)
}

/// Waits for a version, and has `take` take what is wanted of it: none if the keeper has it no more,
/// and offers the next one. When a keeper ends, asks the next one.
fn wait_for<T>(
    domain: &Domain,
    name: &EndpointName,
    request: &KeeperRequest,
    after: u64,
    wait: &Wait<'_>,
    take: impl Fn(&KeeperSession, PartialVersion) -> Result<Option<T>>,
) -> Result<(KeeperSession, T)> {
    until_open(wait, || {
        let keeper = KeeperSession::open(domain, name, wait)?;
        loop {
            let found = keeper.version_after(request, after, wait)?;
            match take(&keeper, found)? {
                Some(taken) => return Ok((keeper, taken)),
                None if wait.is_over() => return Err(keeper.none_in_time(after, None, wait)),
                None => {}
            }
        }
    })
}

/// A session with the keeper of a name.
pub(super) struct KeeperSession {
    session: ClientSession,
    news: Arc<NewsBoard>,
}

impl KeeperSession {
    /// Waits for the keeper to exist.
    pub(super) fn open(
        domain: &Domain,
        name: &EndpointName,
        wait: &Wait<'_>,
    ) -> Result<KeeperSession> {
        let at = Address {
            domain,
            name,
            kind: Kind::Weights,
        };
        let session = loop {
            match ClientSession::attach(&at, None, &[], wait) {
                // The keeper is stopped, and may go on.
                Err(Error::Handshake {
                    fault: HandshakeFault::Silent(_),
                    ..
                }) if !wait.is_over() => {}
                other => break other?.0,
            }
        };
        let news = Arc::new(NewsBoard::default());
        session.observe(news.clone())?;
        Ok(KeeperSession { session, news })
    }

    /// Sends a request, and waits for the reply: not less than a living keeper may need.
    pub(super) fn request(
        &self,
        request: &KeeperRequest,
        wait: &Wait<'_>,
    ) -> Result<(KeeperReply, IncomingReply)> {
        let wait = wait.cancellable_within(wait.time_left().max(REPLY_TIMEOUT));
        let reply = self.session.request(&encode(request)?, wait)?;
        Ok((decode(&reply.body, self.session.name())?, reply))
    }

    /// Tells the keeper that this process serves a holder of the version `number`. A keeper that
    /// replies has the name still, so the next one finds the holder.
    pub(super) fn tell_holding(&self, number: u64, wait: &Wait<'_>) -> Result<()> {
        let holding = KeeperRequest::Holding { number };
        self.request(&holding, wait).map(|_| ())
    }

    /// A version of the keeper's, with the checked manifest; or the number of a candidate.
    pub(super) fn version(
        &self,
        request: &KeeperRequest,
        wait: &Wait<'_>,
    ) -> Result<std::result::Result<PartialVersion, Option<u64>>> {
        match self.request(request, wait)? {
            (KeeperReply::Version(version), incoming) => {
                PartialVersion::receive(self.session.name(), &version, incoming.fds).map(Ok)
            }
            (KeeperReply::Nothing { candidate }, _) => Ok(Err(candidate)),
            (reply, _) => Err(self.wrong(&reply, "Version or Nothing")),
        }
    }

    /// Gets the pieces that a version lacks. `None` if the keeper has it no more.
    fn complete(&self, found: PartialVersion, wait: &Wait<'_>) -> Result<Option<Held>> {
        let version = found.version;
        found.complete(|first| {
            let request = KeeperRequest::Pieces { version, first };
            match self.request(&request, wait)? {
                (KeeperReply::Pieces, incoming) => Ok(Some(incoming)),
                (KeeperReply::Replaced, _) => Ok(None),
                (reply, _) => Err(self.wrong(&reply, "Pieces or Replaced")),
            }
        })
    }

    fn wrong(&self, found: &KeeperReply, allowed: &str) -> Error {
        Error::protocol(self.session.name(), "reply", format!("{found:?}"), allowed)
    }

    /// Waits until the keeper has told of something since the session began, or ends.
    pub(super) fn wait_for_news(&self, wait: &Wait<'_>) {
        drop(self.news.wait(wait, |news| news.offered > 0));
    }

    #[cfg(test)]
    pub(super) fn wait_for_offers_for_tests(&self, count: u64, timeout: Duration) -> u64 {
        let is_there = |news: &News| news.offered >= count;
        self.news.wait(&timeout.into(), is_there).offered
    }

    fn version_after(
        &self,
        request: &KeeperRequest,
        after: u64,
        wait: &Wait<'_>,
    ) -> Result<PartialVersion> {
        loop {
            // Before the question, so that a version in between is not missed.
            let seen = self.news.news.locked().offered;
            let candidate = match self.version(request, wait)? {
                Ok(found) if found.version.number > after => return Ok(found),
                Ok(_) => None,
                Err(candidate) => candidate,
            };
            if wait.is_over() {
                return Err(self.none_in_time(after, candidate, wait));
            }
            let news = self.news.wait(wait, |news| news.offered != seen);
            if news.is_over {
                drop(news);
                return Err(self.session.owner_gone());
            }
        }
    }

    fn none_in_time(&self, after: u64, candidate: Option<u64>, wait: &Wait<'_>) -> Error {
        let name = self.session.name();
        let what = match candidate {
            Some(number) => format!(
                "the check of version {number} of the weights {name:?}, which was taken over: \
                 it is offered once `verify` has compared its hashes"
            ),
            None if after == 0 => format!("a version of the weights {name:?}"),
            None => format!("a version of the weights {name:?} after {after}"),
        };
        Error::timeout(what, wait.limit())
    }
}

/// What the keeper has notified so far.
#[derive(Default)]
struct NewsBoard {
    news: Mutex<News>,
    changed: Condvar,
}

#[derive(Default)]
struct News {
    /// How many times another version was offered.
    offered: u64,
    /// The result of an offer.
    outcome: Option<std::result::Result<u64, String>>,
    /// The session has ended.
    is_over: bool,
}

impl NewsBoard {
    /// Waits until `is_there`, or the session is over.
    fn wait(&self, wait: &Wait<'_>, is_there: impl Fn(&News) -> bool) -> MutexGuard<'_, News> {
        let is_pending = |news: &News| !news.is_over && !is_there(news);
        wait.sleep_while(&self.news, &self.changed, is_pending)
    }

    fn change(&self, change: impl FnOnce(&mut News)) {
        change(&mut self.news.locked());
        self.changed.notify_all();
    }
}

impl SessionObserver for NewsBoard {
    fn on_closed(&self, _: bool) {
        self.change(|news| news.is_over = true);
    }

    fn on_orphaned(&self) {
        self.change(|news| news.is_over = true);
    }

    fn on_notification(&self, incoming: IncomingReply) {
        // A garbled notice says nothing.
        match decode(&incoming.body, "weights") {
            Ok(KeeperNotice::Offered) => self.change(|news| news.offered += 1),
            Ok(KeeperNotice::Taken { number }) => {
                self.change(|news| news.outcome = Some(Ok(number)));
            }
            Ok(KeeperNotice::NotTaken { text }) => {
                self.change(|news| news.outcome = Some(Err(text)));
            }
            Err(_) => {}
        }
    }
}
