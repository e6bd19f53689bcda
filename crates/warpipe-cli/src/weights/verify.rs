//! `warpipe weights verify`.

use std::time::{Duration, Instant};

use serde_json::json;
use warpipe::OpenOptions;
use warpipe::weights::NamedWeights;

use super::{counted, names};
use crate::args::WeightsVerifyArgs;
use crate::exit::Exit;
use crate::output::{Output, Style, bytes, duration, styled};

pub fn run(args: &WeightsVerifyArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let domain = super::domain_of(&args.domain, &args.name)?;
    let found = NamedWeights::list(&domain, &*args.name)?
        .pop()
        .and_then(|found| found.version);
    let device = match &found {
        Some(version) => Some(args.device.open_for(version.device)?),
        // Without a keeper: the library says so.
        None => None,
    };
    let options = OpenOptions {
        domain: Some(domain),
        device,
    };
    let start = Instant::now();
    let (version, damaged) = super::compare(&args.name, options, Duration::ZERO)?;
    let hashed = damaged.is_some();
    let damaged = damaged.unwrap_or_default();
    let taken = start.elapsed();
    // The version may have been replaced since it was looked up.
    let found = found.as_ref().filter(|found| found.number == version);
    let name = &args.name;
    let text = || {
        let size = found.map_or_else(String::new, |found| {
            let tensors = counted(found.tensors, "tensor", "tensors");
            format!(" ({tensors}, {})", bytes(found.bytes))
        });
        let head = format!("{name}: version {version}{size}");
        let taken = duration(taken);
        if !damaged.is_empty() {
            let differ = counted(damaged.len(), "tensor differs", "tensors differ");
            return format!(
                "{head}: {} ({taken}){}",
                styled(Style::Red, &differ),
                names(&damaged)
            );
        }
        let verdict = match hashed {
            true => styled(Style::Green, "every content hash is right"),
            false => styled(Style::Yellow, "it has no content hashes to compare"),
        };
        format!("{head}: {verdict} ({taken})")
    };
    let row = json!({
        "event": "verified", "name": name, "version": version,
        "tensors": found.map(|found| found.tensors), "bytes": found.map(|found| found.bytes),
        // The names of the tensors that differ.
        "damaged": damaged,
        // Whether there were hashes to compare.
        "hashed": hashed,
        "seconds": taken.as_secs_f64(),
    });
    output.say(text, &row)?;
    Ok(if damaged.is_empty() && hashed {
        Exit::Done
    } else {
        Exit::Failed
    })
}
