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
use crate::output::counted;

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
