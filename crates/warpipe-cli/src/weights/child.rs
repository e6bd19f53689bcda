//! The child process of `weights serve`: `warpipe weights-child`. It opens the device, so that the
//! keeper has none. It says its progress and its result as JSON lines on standard output.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use warpipe::weights::{NamedWeights, Source, Weights};
use warpipe::{Domain, Error};

use crate::args::WeightsServeArgs;
use crate::device_arg::DeviceArg;
use crate::exit::{Exit, fact_and_hint};
use crate::output::Output;
use crate::process::{child_of_this, follow_parent};
use crate::source::InputError;

/// How long the keeper may take to fetch a version.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a takeover waits for hashes that the publisher still computes: without them the version is
/// not offered.
const HASHES_TIMEOUT: Duration = Duration::from_secs(10);

/// The task of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// Load files, and publish them to the keeper.
    Load,
    /// Compare the content hashes of the keeper's candidate.
    Verify,
}

#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(long)]
    parent: i32,
    #[arg(long)]
    name: String,
    #[arg(long)]
    domain: PathBuf,
    #[arg(long)]
    device: DeviceArg,
    /// The files to load; without any, the candidate is verified.
    paths: Vec<PathBuf>,
}

/// A line of the child.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "snake_case")]
pub enum ChildLine {
    /// So many bytes of the files have been read.
    Progress { done: u64, total: u64 },
    /// The keeper offers this version.
    Offered(OfferedVersion),
    /// The candidate is not offered.
    NotTaken(NotTaken),
    /// The task failed. Nothing is offered.
    Failed {
        exit: Exit,
        fact: String,
        next: Option<String>,
    },
}

/// A candidate that is not offered, and why.
#[derive(Debug, Serialize, Deserialize)]
pub struct NotTaken {
    pub version: u64,
    pub reason: Refusal,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// These tensors differ from their hashes.
    Damaged { tensors: Vec<String> },
    /// It has no hashes to compare.
    Unhashed,
    /// It lies on another device than the one that was asked for.
    Elsewhere { device: String },
}

/// The version that a child has published or checked.
#[derive(Debug, Serialize, Deserialize)]
pub struct OfferedVersion {
    pub version: u64,
    pub tensors: usize,
    pub bytes: u64,
    pub device: String,
    /// How long the device took to open.
    pub open_seconds: f64,
    /// How long the files took to be read, hashed and copied, or the memory to be hashed.
    pub read_seconds: f64,
}

/// The command that starts such a child.
pub fn command(task: Task, args: &WeightsServeArgs, domain: &Domain) -> Command {
    let mut command = child_of_this("weights-child");
    command
        .args(["--name", &args.name])
        .arg("--domain")
        .arg(domain.path())
        .args(["--device", &args.device.to_string()]);
    if task == Task::Load {
        command.arg("--").args(&args.paths);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// In the child.
pub fn run(args: &ChildArgs) -> Exit {
    let done = follow_parent(args.parent).map_err(anyhow::Error::from);
    let line = done.and_then(|()| match args.paths.is_empty() {
        false => load(args),
        true => verify(args),
    });
    let (line, exit) = match line {
        Ok(line) => (line, Exit::Done),
        Err(error) => {
            let (exit, (fact, next)) = (Exit::of(&error), fact_and_hint(&error));
            (ChildLine::Failed { exit, fact, next }, exit)
        }
    };
    // Without a reader there is no parent, which ends this process.
    let _ = Output::new(true).json_only(&line);
    exit
}

fn load(args: &ChildArgs) -> anyhow::Result<ChildLine> {
    let domain = Domain::at(&args.domain)?;
    // Before the device: a damaged file costs no wait for it.
    let source = Source::open(&args.paths).map_err(unreadable)?;
    let start = Instant::now();
    let device = args.device.open()?.device;
    let open_seconds = start.elapsed().as_secs_f64();
    let total = source.bytes();
    let last_percent = Mutex::new(None);
    let start = Instant::now();
    let weights = Weights::load(&device, &source, |done| {
        let percent = done.saturating_mul(100) / total.max(1);
        // A panic of another reader ends the process.
        let Ok(mut last) = last_percent.lock() else {
            return;
        };
        if last.is_none_or(|last| percent > last) {
            *last = Some(percent);
            let _ = Output::new(true).json_only(&ChildLine::Progress { done, total });
        }
    });
    let weights = weights.map_err(unreadable)?;
    let read_seconds = start.elapsed().as_secs_f64();
    let published = weights.publish(&domain, &args.name, PUBLISH_TIMEOUT)?;
    Ok(ChildLine::Offered(OfferedVersion {
        version: published.version,
        tensors: weights.tensors().len(),
        bytes: weights.bytes(),
        device: device.to_string(),
        open_seconds,
        read_seconds,
    }))
}

/// A file that the system refuses is a fault of the input, as a damaged one is.
fn unreadable(error: Error) -> anyhow::Error {
    match error {
        shortage if shortage.is_descriptor_limit() => shortage.into(),
        Error::Os {
            call: "stat" | "open" | "fstat" | "pread" | "getdents",
            context,
            source,
        } => InputError::unreadable(context, source).into(),
        other => other.into(),
    }
}

fn verify(args: &ChildArgs) -> anyhow::Result<ChildLine> {
    let domain = Domain::at(&args.domain)?;
    let found = NamedWeights::list(&domain, &*args.name)?.pop();
    let candidate = found.and_then(|found| found.version);
    let candidate = candidate
        .ok_or_else(|| anyhow::anyhow!("the keeper has no version any more; serve again"))?;
    let start = Instant::now();
    let device = args.device.open_for(candidate.device)?;
    let open_seconds = start.elapsed().as_secs_f64();
    if device.info().id != candidate.device {
        let device = candidate.device.to_string();
        let (version, reason) = (candidate.number, Refusal::Elsewhere { device });
        return Ok(ChildLine::NotTaken(NotTaken { version, reason }));
    }
    let start = Instant::now();
    let (version, damaged) = super::compare(&args.name, domain.on(&device), HASHES_TIMEOUT)?;
    let reason = match damaged {
        Some(tensors) if tensors.is_empty() => {
            return Ok(ChildLine::Offered(OfferedVersion {
                version,
                tensors: candidate.tensors,
                bytes: candidate.bytes,
                device: device.to_string(),
                open_seconds,
                read_seconds: start.elapsed().as_secs_f64(),
            }));
        }
        Some(tensors) => Refusal::Damaged { tensors },
        None => Refusal::Unhashed,
    };
    Ok(ChildLine::NotTaken(NotTaken { version, reason }))
}
