//! Gives each case a process and a process group of its own, a folder, and a time limit.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::num::NonZeroUsize;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::Signal;
use warpipe_testkit::{ChildProcess, temporary_folder, this_program, wait_readable};

use crate::cases::{Case, Skip};
use crate::context::{Context, Settings};
use crate::process;
use crate::report::{CaseResult, Line, Outcome, Report};

/// Runs `cases`, `jobs` of them beside each other, reporting each as it ends.
///
/// # Errors
/// No folder can be made. A failed case is no error.
pub fn run(settings: &Settings, cases: &[Case], jobs: NonZeroUsize) -> Result<Report> {
    let home = temporary_folder().context("a folder for the run")?;
    let device = settings
        .backend
        .open(0)
        .map(|device| device.info().name.clone());
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    let mut report = Report {
        backend: settings.backend.name(),
        device: device.unwrap_or_else(|error| format!("none: {error}")),
        driver: crate::report::driver_version(),
        date: crate::report::utc(now.as_secs()),
        seed: settings.seed,
        long: settings.long,
        cases: Vec::new(),
    };
    println!(
        "{} on {}, seed {}",
        report.backend, report.device, report.seed
    );
    let next = AtomicUsize::new(0);
    let lines = Mutex::new(BTreeMap::new());
    let run_each = || {
        while let index = next.fetch_add(1, Ordering::Relaxed)
            && let Some(case) = cases.get(index)
        {
            let folder = home.path().join(index.to_string());
            let line = run_one(settings, case, &folder);
            let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
            // Under the lock: the lines of one case stand together.
            print(&line, &folder);
            lines.insert(index, line);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..jobs.get().min(cases.len()) {
            scope.spawn(run_each);
        }
    });
    let lines = lines.into_inner().unwrap_or_else(PoisonError::into_inner);
    report.cases = lines.into_values().collect();
    Ok(report)
}

fn run_one(settings: &Settings, case: &Case, folder: &Path) -> Line {
    let start = Instant::now();
    let result = make_private(folder)
        .and_then(|()| attempt(settings, case, folder))
        .unwrap_or_else(|error| CaseResult::failed(format!("{error:#}")));
    Line {
        name: case.name.to_string(),
        seconds: start.elapsed().as_secs_f64(),
        result,
    }
}

fn print(line: &Line, folder: &Path) {
    let CaseResult {
        outcome,
        reason,
        figures,
    } = &line.result;
    let word = match outcome {
        Outcome::Passed => "ok",
        Outcome::Failed => "FAILED",
        Outcome::Skipped => "skipped",
    };
    let reason = if reason.is_empty() {
        String::new()
    } else {
        format!(" ({reason})")
    };
    println!("{word:>7} {:>6.2} s  {}{reason}", line.seconds, line.name);
    for (key, value) in figures {
        println!("                  {key} = {value}");
    }
    if *outcome == Outcome::Failed {
        let words = std::fs::read(words_of(folder)).unwrap_or_default();
        let words = String::from_utf8_lossy(&words);
        words
            .lines()
            .for_each(|line| println!("                | {line}"));
    }
}

fn words_of(folder: &Path) -> PathBuf {
    folder.join("output")
}

/// How long one kill may take, all in all.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// Runs one case in a process of its own.
fn attempt(settings: &Settings, case: &Case, folder: &Path) -> Result<CaseResult> {
    if settings.mps && case.ends_clients {
        return Ok(CaseResult::skipped(
            "under MPS a client that faults or is killed ends the others",
        ));
    }
    let words = File::create(words_of(folder))?;
    let result = folder.join("result");
    let mut command = this_program();
    command
        .arg("--case")
        .arg(case.name)
        .arg("--folder")
        .arg(folder)
        .arg("--result")
        .arg(&result);
    command.args([
        "--backend",
        settings.backend.name(),
        "--seed",
        &settings.seed.to_string(),
    ]);
    for (option, value) in [
        ("--kills", settings.kills.map(u64::from)),
        ("--patience", settings.patience),
    ] {
        if let Some(value) = value {
            command.args([option, &value.to_string()]);
        }
    }
    command
        .args(["--devices", &settings.devices.to_string()])
        .args(settings.long.then_some("--long"));
    if settings.mps && case.needs_queues {
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", "8");
    }
    command
        .stdin(Stdio::null())
        .stdout(words.try_clone()?)
        .stderr(words)
        .process_group(0);
    let mut child = ChildProcess::start(&mut command).context("starting a case")?;
    let limit = if settings.long {
        case.limit_long
    } else {
        case.limit
    };
    // A kill takes some hundred milliseconds; on a GPU, where a context is made each time, some
    // seconds.
    let limit = settings
        .kills
        .map_or(limit, |kills| limit.max(KILL_LIMIT * (kills + 60)));
    // Until it is reaped, no other process can have its group's number.
    let has_ended = wait_readable(child.pidfd()?, limit)?;
    let strays = end_group(&child);
    let status = child.wait(limit)?;
    if !has_ended {
        return Ok(CaseResult::failed(format!(
            "it did not end within {limit:?}"
        )));
    }
    let result = match std::fs::read(&result) {
        Ok(bytes) if status.success() => {
            serde_json::from_slice(&bytes).context("a case's result")?
        }
        _ => CaseResult::failed(format!("its process ended with {}", explain(status))),
    };
    if strays > 0 && result.outcome == Outcome::Passed {
        return Ok(CaseResult::failed(format!(
            "it left {strays} processes behind"
        )));
    }
    Ok(result)
}

/// Kills whatever is left of the case's process group. Returns how many processes that were, beside
/// the case.
fn end_group(child: &ChildProcess) -> usize {
    let strays = process::group_members(child.pid()).len();
    // No such group any more is the usual answer.
    let _ = rustix::process::kill_process_group(child.pid(), Signal::KILL);
    strays
}

fn explain(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (_, Some(signal)) => format!("signal {signal}"),
        (code, None) => format!("exit code {}", code.unwrap_or(-1)),
    }
}

/// The case's own process: runs it, sees that nothing is left behind, and writes what it found to
/// `result`.
///
/// # Errors
/// The result cannot be written.
pub fn run_here(settings: Settings, case: &Case, folder: &Path, result: &Path) -> Result<()> {
    let (mut outcome, mut reason, mut figures) =
        (Outcome::Passed, String::new(), Default::default());
    match Context::open(settings, folder, 0).and_then(|context| context.warm_up().map(|()| context))
    {
        Err(error) => (outcome, reason) = (Outcome::Failed, format!("{error:#}")),
        Ok(context) => {
            let names = crate::guard::by_name();
            let outcome_of = guarded(case, &context);
            for (what, count) in crate::guard::by_name() {
                let before = names.get(&what).copied().unwrap_or(0);
                if count > before {
                    context.figure(&format!("grown: {what}"), format!("{before} to {count}"));
                }
            }
            if let Err(error) = outcome_of {
                let skip = error
                    .downcast_ref::<Skip>()
                    .map(|Skip(reason)| reason.clone());
                outcome = if skip.is_some() {
                    Outcome::Skipped
                } else {
                    Outcome::Failed
                };
                reason = skip.unwrap_or_else(|| format!("{error:#}"));
            }
            figures = context.take_figures();
        }
    }
    std::fs::write(
        result,
        serde_json::to_vec(&CaseResult {
            outcome,
            reason,
            figures,
        })?,
    )?;
    // Without running destructors: what a failed case left stuck must not keep its process.
    std::process::exit(0)
}

fn guarded(case: &Case, context: &Context) -> Result<()> {
    let guard = context.guard();
    match std::panic::catch_unwind(AssertUnwindSafe(|| (case.run)(context))) {
        Ok(result) => result?,
        Err(panic) => {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            bail!(
                "it panicked: {}",
                words
                    .or(panic.downcast_ref::<&str>().copied())
                    .unwrap_or("?")
            );
        }
    }
    // A killed publisher's socket and lock stay until a process cleans the domain.
    context.domain.clean()?;
    guard.settles()
}

fn make_private(path: &Path) -> Result<()> {
    DirBuilder::new()
        .mode(0o700)
        .create(path)
        .with_context(|| format!("making {}", path.display()))
}
