//! `warpipe ls`: the names in the domain, and their holders.

use serde::Serialize;
use warpipe::Domain;

use crate::args::LsArgs;
use crate::exit::Exit;
use crate::output::{Output, Style, styled};

#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    live: bool,
    pid: Option<i32>,
}

/// Lists them, living or left by the dead.
pub fn run(args: &LsArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let domain = Domain::from_environment()?;
    let endpoints = domain.endpoints()?;
    output.human(|| {
        styled(
            Style::Bold,
            &format!("{}: {} names", domain.path().display(), endpoints.len()),
        )
    })?;
    let width = endpoints
        .iter()
        .map(|endpoint| endpoint.name.as_str().len())
        .max()
        .unwrap_or(0);
    for endpoint in &endpoints {
        let (name, holder) = (endpoint.name.as_str(), endpoint.holder.as_ref());
        let text = || match holder {
            Some(holder) => format!(
                "  {name:<width$}  {}   {holder}",
                styled(Style::Green, "live")
            ),
            None => format!(
                "  {name:<width$}  {}  left by a dead process; the next publisher takes it over",
                styled(Style::Yellow, "stale")
            ),
        };
        output.say(
            text,
            &Row {
                name,
                live: holder.is_some(),
                pid: holder.and_then(|holder| holder.pid),
            },
        )?;
    }
    Ok(Exit::Done)
}
