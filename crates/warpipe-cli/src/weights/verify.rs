//! `warpipe weights verify`.

use std::time::Instant;

use serde::Serialize;
use warpipe::Error;
use warpipe::weights::{NamedWeights, SharedWeights};

use super::counted;
use crate::args::WeightsVerifyArgs;
use crate::exit::Exit;
use crate::output::{Output, Style, bytes, duration, printable, styled};

#[derive(Serialize)]
struct Verified<'a> {
    event: &'static str,
    name: &'a str,
    version: u64,
    tensors: Option<usize>,
    bytes: Option<u64>,
    /// The names of the tensors that differ.
    damaged: &'a [String],
    /// Whether there were hashes to compare.
    hashed: bool,
    seconds: f64,
}

pub fn run(args: &WeightsVerifyArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let domain = super::domain_of(&args.domain, &args.name)?;
    let found = NamedWeights::find(&domain, &args.name)?.and_then(|found| found.version);
    let opener = SharedWeights::opener(&args.name).domain(&domain);
    let opener = match &found {
        Some(version) => opener.device(&args.device.open_for(version.device)?),
        // Without a keeper: the library says so.
        None => opener,
    };
    let start = Instant::now();
    let (version, damaged, hashed) = match opener.verify() {
        Ok(version) => (version, Vec::new(), true),
        Err(Error::WeightsDamaged {
            version, tensors, ..
        }) => (version, tensors, true),
        Err(Error::WeightsUnhashed { version, .. }) => (version, Vec::new(), false),
        Err(error) => return Err(error.into()),
    };
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
        if !hashed {
            let verdict = styled(Style::Yellow, "it has no content hashes to compare");
            return format!("{head}: {verdict} ({taken})");
        }
        if damaged.is_empty() {
            let verdict = styled(Style::Green, "every content hash is right");
            return format!("{head}: {verdict} ({taken})");
        }
        let differ = counted(damaged.len(), "tensor differs", "tensors differ");
        let lines = damaged
            .iter()
            .map(|name| format!("\n  {}", printable(name)));
        let lines: String = lines.collect();
        format!("{head}: {} ({taken}){lines}", styled(Style::Red, &differ))
    };
    let row = Verified {
        event: "verified",
        name,
        version,
        tensors: found.map(|found| found.tensors),
        bytes: found.map(|found| found.bytes),
        damaged: &damaged,
        hashed,
        seconds: taken.as_secs_f64(),
    };
    output.say(text, &row)?;
    Ok(if damaged.is_empty() && hashed {
        Exit::Done
    } else {
        Exit::Failed
    })
}
