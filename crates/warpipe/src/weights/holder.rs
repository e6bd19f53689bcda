//! The endpoint of a process that holds a version of weights. A keeper connects to it and gets the
//! descriptors: a publisher's offer, or after the previous keeper's death what a worker holds.
//!
//! A request carries no descriptors, so the process that has them serves, and the one that wants
//! them connects. A holder's name contains the version's number: a new keeper knows from the
//! directory which numbers are in use, also by processes that are stopped and answer nothing.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::held::{Held, NUMBER_MAX};
use crate::error::{Error, NameFault, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    AccessPolicy, Address, ClientInfo, IpcServer, Kind, OutgoingReply, Rejection, RequestHandler,
    ServerCore, decode,
};
use crate::runtime::reactor::new_generation;

/// A keeper's request, if the first reply did not have all pieces.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct HolderRequest {
    /// The number of the first piece that is asked for. The reply has the descriptors alone.
    pub(super) first: u32,
}

/// The prefix of the names of holders of numbered versions.
pub(super) fn held_prefix(weights: &str) -> String {
    format!("{weights}/held-")
}

/// The prefix of the names of publishers with a version that has no number yet.
pub(super) fn offer_prefix(weights: &str) -> String {
    format!("{weights}/offer-")
}

/// The weights that an endpoint's name says it holds a version of.
pub(super) fn weights_of(holder: &EndpointName) -> Option<&str> {
    let (weights, _) = holder.as_str().rsplit_once("/held-")?;
    number_of(weights, holder).map(|_| weights)
}

/// The number of the version that a holder's name says.
pub(super) fn number_of(weights: &str, holder: &EndpointName) -> Option<u64> {
    let rest = holder.as_str().strip_prefix(&held_prefix(weights))?;
    let (number, _) = rest.split_once('-')?;
    let number = u64::from_str_radix(number, 16).ok()?;
    (1..=NUMBER_MAX).contains(&number).then_some(number)
}

/// The holders of these weights, numbered ones and offers, living and dead. Also those with a lock
/// file alone: a process may die before it has made its socket, or while it removes its files.
pub(super) fn holders(domain: &Domain, weights: &str) -> Result<Vec<EndpointName>> {
    let prefixes = [held_prefix(weights), offer_prefix(weights)];
    let mut names = domain.names()?;
    names.retain(|name| {
        let rest = |prefix: &String| name.as_str().strip_prefix(prefix.as_str());
        let rest = prefixes.iter().find_map(rest);
        rest.is_some_and(|rest| !rest.contains('/'))
    });
    Ok(names)
}

/// Removes the files of dead holders of these weights.
pub(super) fn clear_dead(domain: &Domain, weights: &str) {
    // The directory may be unreadable: the files stay until the next call.
    for name in holders(domain, weights).unwrap_or_default() {
        domain.clean_name(&name);
    }
}

/// Serves a numbered version to later keepers, until the endpoint is dropped.
pub(super) fn serve(domain: &Domain, weights: &str, held: Arc<Held>) -> Result<IpcServer> {
    let prefix = format!("{}{:x}-", held_prefix(weights), held.version.number);
    Ok(open(domain, &prefix, held)?.0)
}

/// Serves a version that has no number, and returns the endpoint's name, too.
pub(super) fn offer(
    domain: &Domain,
    weights: &str,
    held: Arc<Held>,
) -> Result<(IpcServer, EndpointName)> {
    open(domain, &offer_prefix(weights), held)
}

fn open(domain: &Domain, prefix: &str, held: Arc<Held>) -> Result<(IpcServer, EndpointName)> {
    loop {
        let [a, b, c, d, e, f, g, h, ..] = new_generation();
        let random = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let name = EndpointName::of_endpoint(&format!("{prefix}{random:016x}"))?;
        let at = Address {
            domain,
            name: &name,
            kind: Kind::WeightsHolder,
        };
        match IpcServer::open(&at, AccessPolicy::default(), held.clone()) {
            Ok(server) => return Ok((server, name)),
            // Another holder drew the same number.
            Err(Error::Name(NameFault::Taken { .. })) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Gives the descriptors to each client that is admitted.
impl RequestHandler for Held {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        self.reply(&self.describe())
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        _: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let HolderRequest { first } = decode(body, server_core.name())?;
        self.reply_pieces(&(), first)
    }

    fn runs_on_reactor(&self) -> bool {
        true
    }
}
