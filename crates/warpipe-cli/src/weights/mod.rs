//! `warpipe weights`: weights that outlive the processes that use them.

mod child;
mod drop;
mod list;
mod progress;
mod serve;
mod verify;

use warpipe::Domain;

use crate::args::{DomainArg, WeightsArgs, WeightsCommand};
use crate::exit::Exit;

pub use self::child::{ChildArgs, run as run_child};

pub fn run(args: &WeightsArgs) -> anyhow::Result<Exit> {
    match &args.command {
        WeightsCommand::Serve(args) => serve::run(args),
        WeightsCommand::Ls(args) => list::run(args),
        WeightsCommand::Drop(args) => drop::run(args),
        WeightsCommand::Verify(args) => verify::run(args),
    }
}

fn domain(chosen: &DomainArg) -> warpipe::Result<Domain> {
    match &chosen.path {
        Some(path) => Domain::at(path),
        None => Domain::from_environment(),
    }
}

/// A count of something, for people.
fn counted(number: usize, one: &str, many: &str) -> String {
    let noun = if number == 1 { one } else { many };
    format!("{} {noun}", crate::output::count(number as u64))
}
