//! `conformance`: runs every required behaviour of a backend of warpipe, each in processes of its
//! own.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;
use warpipe_conformance::cases::{self, Case};
use warpipe_conformance::context::{Backend, Settings};
use warpipe_conformance::report::Outcome;
use warpipe_conformance::{peer, runner};

/// Tries every behaviour that a backend of warpipe must have. Exits with 0 if none failed.
#[derive(Debug, Parser)]
#[command(name = "conformance", version)]
struct Arguments {
    /// The backend to try; `cuda` is a GPU, or whatever libcuda.so.1 the loader finds.
    #[arg(long, value_enum, default_value = "host")]
    backend: Backend,
    /// How many GPUs the cases may use.
    #[arg(long, default_value_t = 1)]
    devices: u32,
    /// Hundreds of kills instead of a few.
    #[arg(long)]
    long: bool,
    /// This many kills in each storm, whatever the mode, and a time limit to match.
    #[arg(long, value_name = "N")]
    kills: Option<u32>,
    /// How long the survivors of a storm wait for what is to come.
    #[arg(long, value_name = "SECONDS")]
    patience: Option<u64>,
    /// The GPU is shared through MPS: leave out what would end the other clients.
    #[arg(long)]
    mps: bool,
    /// Write a report, as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Only the cases with this text in their names.
    #[arg(long, value_name = "SUBSTRING")]
    only: Option<String>,
    /// Of these, each N-th alone, from the K-th on: for several GPUs beside each other.
    #[arg(long, value_name = "K/N", value_parser = shard)]
    shard: Option<(usize, usize)>,
    /// This many cases beside each other. What they measure then says little.
    #[arg(long, value_name = "N", default_value = "1")]
    jobs: NonZeroUsize,
    /// Print the names of the cases and run none.
    #[arg(long)]
    list: bool,
    /// Decides all chance; by default another number each time.
    #[arg(long)]
    seed: Option<u64>,
    #[arg(long, hide = true)]
    case: Option<String>,
    #[arg(long, hide = true)]
    peer: bool,
    #[arg(long, hide = true, default_value = ".")]
    folder: PathBuf,
    #[arg(long, hide = true, default_value = "result")]
    result: PathBuf,
    #[arg(long, hide = true, default_value_t = 0)]
    ordinal: u32,
}

impl Arguments {
    fn settings(&self) -> Settings {
        let Arguments {
            backend,
            devices,
            long,
            kills,
            patience,
            mps,
            seed,
            ..
        } = *self;
        Settings {
            backend,
            devices,
            long,
            kills,
            patience,
            mps,
            seed: seed.unwrap_or_else(|| std::process::id().into()),
        }
    }

    fn chosen(&self) -> Vec<Case> {
        let mut cases = cases::all();
        cases.retain(|case| {
            self.only
                .as_ref()
                .is_none_or(|only| case.name.contains(only.as_str()))
        });
        let (first, step) = self.shard.unwrap_or((1, 1));
        cases.into_iter().skip(first - 1).step_by(step).collect()
    }
}

fn shard(text: &str) -> Result<(usize, usize), String> {
    let parts = text
        .split_once('/')
        .and_then(|(first, step)| Some((first.parse().ok()?, step.parse().ok()?)));
    parts
        .filter(|&(first, step)| 1 <= first && first <= step)
        .ok_or_else(|| "expected K/N with 1 <= K <= N".into())
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether nothing failed.
fn run(arguments: &Arguments) -> Result<bool> {
    let settings = arguments.settings();
    if arguments.peer {
        return peer::act(settings, &arguments.folder, arguments.ordinal).map(|()| true);
    }
    if let Some(name) = &arguments.case {
        let case = cases::all()
            .into_iter()
            .find(|case| case.name == name)
            .context("no such case")?;
        return runner::run_here(settings, &case, &arguments.folder, &arguments.result)
            .map(|()| true);
    }
    let chosen = arguments.chosen();
    if arguments.list {
        chosen.iter().for_each(|case| println!("{}", case.name));
        return Ok(true);
    }
    let report = runner::run(&settings, &chosen, arguments.jobs)?;
    if let Some(path) = &arguments.report {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    println!("{}", report.summary());
    Ok(report.count(Outcome::Failed) == 0 && !chosen.is_empty())
}
