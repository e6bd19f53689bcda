//! `warpipe weights ls`.

use serde_json::{Value, json};
use warpipe::weights::{Hashing, NamedWeights};

use super::counted;
use crate::args::WeightsLsArgs;
use crate::exit::Exit;
use crate::observe::{existing_domain, missing};
use crate::output::{Output, Style, bytes, column, printable, styled};

/// A longer member of the metadata is for programs.
const TOLD_BYTES_MAX: usize = 120;

pub fn run(args: &WeightsLsArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let path = args.domain.or_environment()?;
    let Some(domain) = existing_domain(&path)? else {
        output.human(|| printable(&missing(&path)))?;
        return Ok(Exit::Done);
    };
    let listed = NamedWeights::list(&domain, None)?;
    output.human(|| {
        let names = counted(listed.len(), "name", "names");
        let title = format!("{}: {names} of weights", domain.path().display());
        styled(Style::Bold, &title)
    })?;
    let width = column(listed.iter().map(|weights| weights.name.as_str()));
    for weights in &listed {
        let (name, version) = (weights.name.as_str(), weights.version.as_ref());
        let metadata: Option<Value> =
            version.and_then(|version| serde_json::from_str(&version.metadata).ok());
        let told = metadata.as_ref().and_then(told);
        let told = told.map_or_else(String::new, |told| format!("\n    {told}"));
        let row = json!({
            "name": name,
            // `offered`, `unchecked` (a keeper has taken it over), `no keeper`, `none`, or
            // `no answer` (its process is stopped or slow, and may not be a keeper).
            "state": state_of(weights).0,
            "version": version.map(|version| version.number),
            "tensors": version.map(|version| version.tensors),
            "bytes": version.map(|version| version.bytes),
            "device": version.map(|version| version.device.to_string()),
            // When the publisher computes the content hashes: `device`, `later` or `none`.
            "hash": version.map(|version| version.hash.name()),
            // Whether each tensor has one.
            "hashed": version.map(|version| version.is_hashed),
            "keeper_pid": weights.keeper.as_ref().and_then(|keeper| keeper.pid),
            "holders": weights.holders,
            // By the publisher.
            "metadata": metadata,
        });
        let text = || format!("  {name:<width$}  {}{told}", line(weights));
        output.say(text, &row)?;
    }
    Ok(Exit::Done)
}

/// Metadata on one line: the members of an object that are short, `key=value`.
fn told(metadata: &Value) -> Option<String> {
    let members = metadata.as_object()?.iter();
    let short = members.filter_map(|(key, value)| {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Object(_) | Value::Null => return None,
            other => other.to_string(),
        };
        let part = format!("{key}={text}");
        (part.len() <= TOLD_BYTES_MAX).then(|| printable(&part))
    });
    let parts: Vec<String> = short.collect();
    (!parts.is_empty()).then(|| parts.join("  "))
}

fn state_of(weights: &NamedWeights) -> (&'static str, Style) {
    match (&weights.keeper, &weights.version) {
        (None, _) => ("no keeper", Style::Yellow),
        (_, None) if weights.is_silent => ("no answer", Style::Yellow),
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
        None if weights.is_silent => parts.push("no answer: stopped, or no keeper".to_owned()),
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
