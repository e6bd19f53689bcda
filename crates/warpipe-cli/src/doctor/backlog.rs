//! Jobs that wait for a worker that nobody has started.

use warpipe::Domain;

use super::report::Check;
use crate::observe::Source;

const NAME: &str = "queues with workers";

/// Looks at the domain's queues.
pub fn check(domain: Option<&Domain>) -> Check {
    let looked = domain.map(|domain| Source::new(domain.path().to_owned())?.look());
    let snapshot = match looked {
        None => return Check::ok(NAME, "no domain, so no queues"),
        Some(Err(error)) => return Check::no(NAME, format!("{error:#}"), "see `warpipe ls -v`"),
        Some(Ok(snapshot)) => snapshot,
    };
    let without = snapshot.endpoints.iter().filter(|it| it.peers == 0);
    let said: Vec<String> = without
        .filter_map(|it| Some(format!("{}: {}", it.name, it.backlog()?.0)))
        .collect();
    match said.is_empty() {
        true => Check::ok(NAME, "no jobs wait without a worker"),
        false => Check::no(NAME, said.join("; "), "start a worker of it"),
    }
}
