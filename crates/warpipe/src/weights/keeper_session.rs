//! A session with a keeper, as publishers and workers have it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::held::Held;
use super::keeper::{KeeperNotice, KeeperReply, KeeperRequest};
use super::manifest::Manifest;
use crate::clock::Stopwatch;
use crate::error::{Error, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    Address, ClientSession, IncomingReply, Kind, REPLY_TIMEOUT, SessionObserver, decode, encode,
};

/// Has a keeper fetch what the endpoint `offer` serves, and returns the version's number. Waits up
/// to `timeout`.
pub(super) fn offer_to_keeper(
    domain: &Domain,
    name: &EndpointName,
    offer: &EndpointName,
    timeout: Duration,
) -> Result<u64> {
    let start = Instant::now();
    let keeper = KeeperSession::open(domain, name, timeout)?;
    let take = KeeperRequest::Take {
        name: offer.to_string(),
    };
    keeper.request(&take)?;
    let left = timeout.saturating_sub(start.elapsed());
    let news = keeper.news.wait(left, |news| news.outcome.is_some());
    match &news.outcome {
        Some(Ok(number)) => Ok(*number),
        Some(Err(text)) => Err(Error::Refused {
            name: name.to_string(),
            text: text.clone(),
        }),
        None if news.is_over => {
            drop(news);
            Err(keeper.session.owner_gone())
        }
        None => Err(Error::Timeout {
            what: format!("the answer of the keeper of {name:?}"),
            waited: timeout,
        }),
    }
}

/// Has a keeper give its descriptors up, and waits up to `timeout` until it has ended.
pub(super) fn end_keeper(domain: &Domain, name: &EndpointName, timeout: Duration) -> Result<()> {
    let keeper = KeeperSession::open(domain, name, Duration::ZERO)?;
    match keeper.request(&KeeperRequest::End) {
        // Its owner may drop it before the reply is sent.
        Ok(_) | Err(Error::PeerGone { .. }) => {}
        Err(error) => return Err(error),
    }
    let news = keeper.news.wait(timeout, |_| false);
    if news.is_over {
        return Ok(());
    }
    Err(Error::Timeout {
        what: format!("the end of the keeper of {name:?}, which has given its descriptors up"),
        waited: timeout,
    })
}

/// Waits up to `timeout` for a version after number `after` that is offered under the name. If the
/// keeper ends meanwhile, waits for the next one.
pub(super) fn wait_for_version(
    domain: &Domain,
    name: &EndpointName,
    after: u64,
    timeout: Duration,
) -> Result<(Held, Manifest)> {
    let mut clock = Stopwatch::default();
    loop {
        let left = timeout.saturating_sub(clock.elapsed());
        let keeper = KeeperSession::open(domain, name, left)?;
        match keeper.version_after(after, &mut clock, timeout) {
            Err(Error::PeerGone { .. }) if clock.elapsed() < timeout => {}
            other => return other,
        }
    }
}

/// A session with the keeper of a name.
pub(super) struct KeeperSession {
    session: ClientSession,
    news: Arc<NewsBoard>,
}

impl KeeperSession {
    /// Waits up to `timeout` for the keeper to exist.
    pub(super) fn open(
        domain: &Domain,
        name: &EndpointName,
        timeout: Duration,
    ) -> Result<KeeperSession> {
        let at = Address {
            domain,
            name,
            kind: Kind::Weights,
        };
        let (session, _) = ClientSession::attach(&at, None, &[], timeout)?;
        let news = Arc::new(NewsBoard::default());
        session.observe(news.clone())?;
        Ok(KeeperSession { session, news })
    }

    /// Sends a request, and waits for the reply.
    pub(super) fn request(&self, request: &KeeperRequest) -> Result<(KeeperReply, IncomingReply)> {
        let reply = self.session.request(&encode(request)?, REPLY_TIMEOUT)?;
        Ok((decode(&reply.body, self.session.name())?, reply))
    }

    /// A version of the keeper's, with the checked manifest; or the number of a candidate.
    pub(super) fn version(
        &self,
        request: &KeeperRequest,
    ) -> Result<std::result::Result<(Held, Manifest), Option<u64>>> {
        let name = self.session.name();
        match self.request(request)? {
            (KeeperReply::Version(version), incoming) => {
                Held::receive(name, &version, incoming.fds).map(Ok)
            }
            (KeeperReply::Nothing { candidate }, _) => Ok(Err(candidate)),
            (KeeperReply::Noted, _) => Err(Error::Protocol {
                name: name.to_string(),
                field: "reply",
                found: "Noted".into(),
                allowed: "Version or Nothing".into(),
            }),
        }
    }

    fn version_after(
        &self,
        after: u64,
        clock: &mut Stopwatch,
        timeout: Duration,
    ) -> Result<(Held, Manifest)> {
        loop {
            // Before the question, so that a version in between is not missed.
            let seen = self.news.lock().offered;
            let candidate = match self.version(&KeeperRequest::Offered)? {
                Ok(found) if found.0.version.number > after => return Ok(found),
                Ok(_) => None,
                Err(candidate) => candidate,
            };
            let left = timeout.saturating_sub(clock.elapsed());
            if left.is_zero() {
                return Err(self.none_in_time(after, candidate, timeout));
            }
            let news = self.news.wait(left, |news| news.offered != seen);
            if news.is_over {
                drop(news);
                return Err(self.session.owner_gone());
            }
        }
    }

    fn none_in_time(&self, after: u64, candidate: Option<u64>, waited: Duration) -> Error {
        let name = self.session.name();
        let what = match candidate {
            Some(number) => format!(
                "the check of version {number} of the weights {name:?}, which was taken over: \
                 it is offered once `verify` has compared its hashes"
            ),
            None if after == 0 => format!("a version of the weights {name:?}"),
            None => format!("a version of the weights {name:?} after {after}"),
        };
        Error::Timeout { what, waited }
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
    fn lock(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `is_there`, or the session is over, at most `timeout`.
    fn wait(&self, timeout: Duration, is_there: impl Fn(&News) -> bool) -> MutexGuard<'_, News> {
        let pending = |news: &mut News| !news.is_over && !is_there(news);
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), timeout, pending);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn change(&self, change: impl FnOnce(&mut News)) {
        change(&mut self.lock());
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
