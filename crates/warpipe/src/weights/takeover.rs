//! The takeover: a new keeper asks every process that holds a version of its name.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::held::Held;
use super::holder::{held_prefix, number_of, offer_prefix};
use super::manifest::Manifest;
use crate::error::{Error, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{Address, ClientSession, Kind};

/// How many holders are asked at once: a stopped one occupies a thread for a whole handshake.
const ASKED_AT_ONCE: usize = 8;

/// From when on no further holder is asked.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(20);

/// What the holders of a name have.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Each version once, the newest last.
    pub(super) versions: Vec<Held>,
    /// The largest number in use, also by holders that did not answer and by dead ones.
    pub(super) last_number: u64,
    /// The holders that live and did not answer.
    pub(super) unanswered: usize,
}

/// Asks all holders. Removes the files of dead ones.
pub(super) fn find(domain: &Domain, weights: &EndpointName) -> Result<Found> {
    let mut found = Found::default();
    let mut living = VecDeque::new();
    for name in domain.names_after(&held_prefix(weights.as_str()))? {
        let Some(number) = number_of(weights.as_str(), &name) else {
            continue;
        };
        found.last_number = found.last_number.max(number);
        if !domain.clear_name(&name) {
            living.push_back((number, name));
        }
    }
    for name in domain.names_after(&offer_prefix(weights.as_str()))? {
        domain.clear_name(&name);
    }
    // The newest first: the timeout then costs the oldest.
    living.make_contiguous().sort_by(|a, b| b.cmp(a));
    let search = Search {
        domain,
        since: Instant::now(),
        living: Mutex::new(living),
        found: Mutex::new(found),
    };
    std::thread::scope(|scope| {
        for _ in 1..ASKED_AT_ONCE {
            let thread = std::thread::Builder::new().name("warpipe-weights".into());
            // Without more threads, those that run ask everyone.
            let _ = thread.spawn_scoped(scope, || search.ask_all());
        }
        search.ask_all();
    });
    let mut found = search
        .found
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    found.versions.sort_by_key(|held| held.version.number);
    Ok(found)
}

struct Search<'a> {
    domain: &'a Domain,
    since: Instant,
    living: Mutex<VecDeque<(u64, EndpointName)>>,
    found: Mutex<Found>,
}

impl Search<'_> {
    fn ask_all(&self) {
        loop {
            let next = self
                .living
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop_front();
            let Some((number, name)) = next else { return };
            let asked = if self.since.elapsed() < TAKEOVER_TIMEOUT {
                ask(self.domain, &name, number)
            } else {
                Err(Error::Timeout {
                    what: "the answers of all holders".into(),
                    waited: TAKEOVER_TIMEOUT,
                })
            };
            let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
            match asked {
                Ok(held)
                    if found
                        .versions
                        .iter()
                        .all(|known| known.version != held.version) =>
                {
                    found.versions.push(held);
                }
                Ok(_) => {}
                // It ended between the look at the directory and the question.
                Err(Error::NotFound { .. }) => {}
                Err(_) => found.unanswered += 1,
            }
        }
    }
}

/// Asks one holder for its version, which has to have the number in its name.
fn ask(domain: &Domain, name: &EndpointName, number: u64) -> Result<Held> {
    let (held, _) = fetch(domain, name)?;
    if held.version.number == number {
        return Ok(held);
    }
    Err(Error::Protocol {
        name: name.to_string(),
        field: "version",
        found: held.version.number.to_string(),
        allowed: number.to_string(),
    })
}

/// Gets a holder's descriptors, and the checked manifest.
pub(super) fn fetch(domain: &Domain, name: &EndpointName) -> Result<(Held, Manifest)> {
    let at = Address {
        domain,
        name,
        kind: Kind::WeightsHolder,
    };
    let (_session, reply) = ClientSession::attach(&at, None, &[], Duration::ZERO)?;
    Held::open(name.as_str(), reply)
}
