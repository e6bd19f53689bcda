//! `warpipe weights`: weights that outlive the processes that use them.

mod child;
mod drop;
mod list;
mod progress;
mod serve;
mod verify;

use std::time::Duration;

use warpipe::weights::SharedWeights;
use warpipe::{Domain, Error, Kind, OpenOptions, WeightsFault};

use crate::args::{DomainArg, WeightsArgs, WeightsCommand};
use crate::exit::Exit;
use crate::observe::existing_domain;
use crate::output::{counted, printable};

pub use self::child::{ChildArgs, run as run_child};

pub fn run(args: &WeightsArgs) -> anyhow::Result<Exit> {
    match &args.command {
        WeightsCommand::Serve(args) => serve::run(args),
        WeightsCommand::Ls(args) => list::run(args),
        WeightsCommand::Drop(args) => drop::run(args),
        WeightsCommand::Verify(args) => verify::run(args),
    }
}

/// The domain in which a name of weights is looked for. Without its directory, which is not made,
/// there is no such name.
fn domain_of(chosen: &DomainArg, name: &str) -> warpipe::Result<Domain> {
    let path = chosen.or_environment()?;
    existing_domain(&path)?.ok_or_else(|| Error::NotFound {
        kind: Kind::Weights,
        name: name.to_string(),
        domain: path,
        was_there: false,
    })
}

/// Compares the content hashes of a version, which may take a while to be there. Its number, and
/// the names of the tensors that differ; none where there are no hashes.
fn compare(
    name: &str,
    options: OpenOptions,
    hashes_timeout: Duration,
) -> warpipe::Result<(u64, Option<Vec<String>>)> {
    match SharedWeights::verify(name, options, hashes_timeout) {
        Ok(version) => Ok((version, Some(Vec::new()))),
        Err(Error::Weights(WeightsFault::Unverified {
            version, tensors, ..
        })) => Ok((version, (!tensors.is_empty()).then_some(tensors))),
        Err(error) => Err(error),
    }
}

/// The names of tensors that differ from their hashes, a line each.
fn names(tensors: &[String]) -> String {
    let lines = tensors
        .iter()
        .map(|name| format!("\n  {}", printable(name)));
    lines.collect()
}
