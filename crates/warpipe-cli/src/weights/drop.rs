//! `warpipe weights drop`.

use serde_json::json;
use warpipe::weights::{Keeper, NamedWeights};

use super::counted;
use crate::args::WeightsDropArgs;
use crate::exit::Exit;
use crate::output::Output;

pub fn run(args: &WeightsDropArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let domain = super::domain_of(&args.domain, &args.name)?;
    // Before its end: the process that keeps the name, and how many have a version open.
    let found = NamedWeights::list(&domain, &*args.name)?.pop();
    Keeper::end(&domain, &args.name, args.timeout)?;
    let (keeper, holders) = found.map_or((None, 0), |found| (found.keeper, found.holders));
    let text = || {
        let of = keeper
            .as_ref()
            .map_or_else(String::new, |keeper| format!(" ({keeper})"));
        let rest = match holders {
            0 => "no process has the weights open: their memory is free".to_owned(),
            _ => {
                let holders = counted(holders, "process still has", "processes still have");
                format!("{holders} the weights open")
            }
        };
        format!("{}: the keeper{of} has ended; {rest}", args.name)
    };
    let dropped = json!({
        "event": "dropped", "name": args.name, "holders": holders,
        "keeper_pid": keeper.as_ref().and_then(|keeper| keeper.pid),
    });
    output.say(text, &dropped)?;
    Ok(Exit::Done)
}
