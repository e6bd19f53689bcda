//! `warpipe weights ls`.

use serde::Serialize;
use warpipe::weights::{Hashing, NamedWeights};

use super::counted;
use crate::args::WeightsLsArgs;
use crate::exit::Exit;
use crate::observe::{existing_domain, missing};
use crate::output::{Output, Style, bytes, printable, styled};

#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    /// `offered`, `unchecked` (a keeper has taken it over), `no keeper`, or `none`.
    state: &'static str,
    version: Option<u64>,
    tensors: Option<usize>,
    bytes: Option<u64>,
    device: Option<String>,
    /// When the publisher computes the content hashes: `device`, `later` or `none`.
    hash: Option<&'static str>,
    /// Whether each tensor has one.
    hashed: Option<bool>,
    keeper_pid: Option<i32>,
    holders: usize,
}

pub fn run(args: &WeightsLsArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let path = super::domain_path(&args.domain)?;
    let Some(domain) = existing_domain(&path)? else {
        output.human(|| printable(&missing(&path)))?;
        return Ok(Exit::Done);
    };
    let listed = NamedWeights::list(&domain)?;
    output.human(|| {
        let names = counted(listed.len(), "name", "names");
        let title = format!("{}: {names} of weights", domain.path().display());
        styled(Style::Bold, &title)
    })?;
    let names = listed.iter().map(|weights| weights.name.as_str().len());
    let width = names.max().unwrap_or(0);
    for weights in &listed {
        let (name, version) = (weights.name.as_str(), weights.version.as_ref());
        let row = Row {
            name,
            state: state_of(weights).0,
            version: version.map(|version| version.number),
            tensors: version.map(|version| version.tensors),
            bytes: version.map(|version| version.bytes),
            device: version.map(|version| version.device.to_string()),
            hash: version.map(|version| version.hash.name()),
            hashed: version.map(|version| version.is_hashed),
            keeper_pid: weights.keeper.as_ref().and_then(|keeper| keeper.pid),
            holders: weights.holders,
        };
        output.say(|| format!("  {name:<width$}  {}", line(weights)), &row)?;
    }
    Ok(Exit::Done)
}

fn state_of(weights: &NamedWeights) -> (&'static str, Style) {
    match (&weights.keeper, &weights.version) {
        (None, _) => ("no keeper", Style::Yellow),
        (_, None) => ("none", Style::Yellow),
        (_, Some(version)) if version.is_offered => ("offered", Style::Green),
        (_, Some(_)) => ("unchecked", Style::Yellow),
    }
}

fn line(weights: &NamedWeights) -> String {
    let (state, style) = state_of(weights);
    let mut parts = Vec::new();
    match &weights.version {
        Some(version) => {
            parts.push(format!("version {}", version.number));
            parts.push(counted(version.tensors, "tensor", "tensors"));
            parts.push(bytes(version.bytes));
            parts.push(format!("on {}", version.device));
            match version.hash {
                _ if version.is_hashed => {}
                Hashing::Later => parts.push(styled(Style::Yellow, "hashes come later")),
                _ => parts.push(styled(Style::Yellow, "no hashes")),
            }
        }
        None => parts.push("no version".to_owned()),
    }
    parts.push(match &weights.keeper {
        Some(keeper) => format!("keeper: {keeper}"),
        None => format!("{}: `serve` takes it over", styled(style, state)),
    });
    if weights.keeper.is_some() && state == "unchecked" {
        parts.push(styled(style, "unchecked"));
    }
    let holders = counted(weights.holders, "process has", "processes have");
    parts.push(format!("{holders} it open"));
    parts.join("  ")
}
