//! The child process of `weights serve`: `warpipe weights-child`. It opens the device, so that the
//! keeper has none. It says its progress and its result as JSON lines on standard output.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use warpipe::weights::{NamedWeights, SharedWeights, Source, Weights};
use warpipe::{Domain, Error};

use crate::args::WeightsServeArgs;
use crate::device_arg::DeviceArg;
use crate::exit::{Exit, fact_and_hint};
use crate::process::{follow_parent, this_program};
use crate::source::InputError;

/// How long the keeper may take to fetch a version.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a takeover waits for hashes that the publisher still computes: without them the version is
/// not offered.
const HASHES_TIMEOUT: Duration = Duration::from_secs(10);

/// The task of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Task {
    /// Load files, and publish them to the keeper.
    Load,
    /// Compare the content hashes of the keeper's candidate.
    Verify,
}

#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(value_enum)]
    task: Task,
    #[arg(long)]
    parent: i32,
    #[arg(long)]
    name: String,
    #[arg(long)]
    domain: PathBuf,
    #[arg(long)]
    device: DeviceArg,
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
    /// The candidate was damaged, and is dropped.
    Damaged { version: u64, tensors: Vec<String> },
    /// The candidate has no hashes to compare, and is dropped.
    Unhashed { version: u64 },
    /// The candidate lies on another device than the one that was asked for.
    Elsewhere { version: u64, device: String },
    /// The task failed. Nothing is offered.
    Failed {
        exit: u8,
        fact: String,
        next: Option<String>,
    },
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
    let mut command = this_program();
    let task_name = task.to_possible_value();
    command
        .arg("weights-child")
        .arg(task_name.map_or_else(String::new, |value| value.get_name().to_owned()))
        .args(["--parent", &std::process::id().to_string()])
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
    let line = done.and_then(|()| match args.task {
        Task::Load => load(args),
        Task::Verify => verify(args),
    });
    let (line, exit) = match line {
        Ok(line) => (line, Exit::Done),
        Err(error) => {
            let (exit, (fact, next)) = (Exit::of(&error), fact_and_hint(&error));
            let exit_code = exit as u8;
            let line = ChildLine::Failed {
                exit: exit_code,
                fact,
                next,
            };
            (line, exit)
        }
    };
    // Without a reader there is no parent, which ends this process.
    let _ = say(&line);
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
    let weights = Weights::load_with_progress(&device, &source, |done| {
        let percent = done.saturating_mul(100) / total.max(1);
        // A panic of another reader ends the process.
        let Ok(mut last) = last_percent.lock() else {
            return;
        };
        if last.is_none_or(|last| percent > last) {
            *last = Some(percent);
            let _ = say(&ChildLine::Progress { done, total });
        }
    });
    let weights = weights.map_err(unreadable)?;
    let read_seconds = start.elapsed().as_secs_f64();
    let published = weights.publish(&domain, &args.name, PUBLISH_TIMEOUT)?;
    Ok(ChildLine::Offered(OfferedVersion {
        version: published.version(),
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
    let found = NamedWeights::find(&domain, &args.name)?;
    let candidate = found.and_then(|found| found.version);
    let candidate = candidate
        .ok_or_else(|| anyhow::anyhow!("the keeper has no version any more; serve again"))?;
    let start = Instant::now();
    let device = args.device.open_for(candidate.device)?;
    let open_seconds = start.elapsed().as_secs_f64();
    if device.info().id != candidate.device {
        return Ok(ChildLine::Elsewhere {
            version: candidate.number,
            device: candidate.device.to_string(),
        });
    }
    let start = Instant::now();
    let opener = SharedWeights::opener(&args.name).domain(&domain);
    match opener.device(&device).wait(HASHES_TIMEOUT).verify() {
        Ok(version) => Ok(ChildLine::Offered(OfferedVersion {
            version,
            tensors: candidate.tensors,
            bytes: candidate.bytes,
            device: device.to_string(),
            open_seconds,
            read_seconds: start.elapsed().as_secs_f64(),
        })),
        Err(Error::WeightsDamaged {
            version, tensors, ..
        }) => Ok(ChildLine::Damaged { version, tensors }),
        Err(Error::WeightsUnhashed { version, .. }) => Ok(ChildLine::Unhashed { version }),
        Err(error) => Err(error.into()),
    }
}

fn say(line: &ChildLine) -> io::Result<()> {
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
