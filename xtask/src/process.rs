//! Running a program under a time limit while showing and keeping what it prints.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, PipeReader, Write};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::Outcome;
use crate::counts::{self, Counts};

/// Lines kept of one program: enough for the results of some thousand test programs.
const LINES_MAX: usize = 20_000;
/// How long output may go on after the program's end, if a process that it left behind holds the
/// pipe.
const DRAIN: Duration = Duration::from_secs(5);

thread_local! {
    /// The failures of this thread's step: what its programs have printed, and what checks have found.
    static FAILURES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// How far this thread's programs give way to others (nice(1)).
    static NICENESS: Cell<u8> = const { Cell::new(0) };
}

/// Whether cargo keeps what a later build of a changed crate uses again.
static IS_INCREMENTAL: AtomicBool = AtomicBool::new(true);

/// Has cargo build each crate once from here on. What it would keep is gigabytes, and a fifth of the
/// time of the workspace's crates.
pub fn build_once() {
    IS_INCREMENTAL.store(false, Ordering::Relaxed);
}

/// Has the programs that this thread runs from now on take what other programs leave of the CPUs.
pub fn give_way() {
    NICENESS.set(10);
}

/// Takes this thread's failures since the last call.
pub fn take_failures() -> Vec<String> {
    FAILURES.take()
}

/// Does the work for each item, two at a time. What fails there is among this thread's failures.
pub fn two_at_a_time<I: Sync, T: Send>(items: &[I], work: impl Fn(&I) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let lane = || {
        let following = || items.get(next.fetch_add(1, Ordering::Relaxed));
        let done: Vec<T> = std::iter::from_fn(|| following().map(&work)).collect();
        (done, take_failures())
    };
    let lanes = thread::scope(|scope| {
        [scope.spawn(lane), scope.spawn(lane)].map(|it| it.join().expect("no work panics"))
    });
    let done = lanes.into_iter().flat_map(|(done, failures)| {
        note_failures(failures);
        done
    });
    done.collect()
}

/// Says that a check has failed, now and in the report at the end.
pub fn check_failed(what: &str) -> Counts {
    println!("failed: {what}");
    note_failures([format!("failed: {what}")]);
    Counts::ONE_FAILED
}

fn note_failures(lines: impl IntoIterator<Item = String>) {
    FAILURES.with_borrow_mut(|failures| failures.extend(lines));
}

/// A program to run.
pub struct Task {
    program: OsString,
    arguments: Vec<OsString>,
    variables: Vec<(&'static str, OsString)>,
}

/// A program's result.
pub struct Finished {
    /// Whether its exit code was zero.
    pub success: bool,
    /// The last lines that it printed on either stream.
    pub lines: Vec<String>,
}

impl Task {
    /// A program, by name or path.
    pub fn new(program: impl Into<OsString>) -> Task {
        Task {
            program: program.into(),
            arguments: Vec::new(),
            variables: Vec::new(),
        }
    }

    /// Adds arguments.
    pub fn args<A: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = A>) -> Task {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Task {
        self.variables.push((name, value.into()));
        self
    }

    /// Runs in `folder`, killed with all its process group after `limit`. Its output is shown as it
    /// comes.
    pub fn run(self, folder: &Path, limit: Duration) -> Outcome<Finished> {
        let name = self.program.to_string_lossy().into_owned();
        let failed = |error: std::io::Error| {
            format!("{name} did not start under coreutils' `nice` and `timeout`: {error}")
        };
        let (reader, writer) = std::io::pipe().map_err(failed)?;
        // `timeout` rather than a kill of our own: it ends the whole process group, test programs
        // included.
        let mut command = Command::new("nice");
        command
            .arg(format!("--adjustment={}", NICENESS.get()))
            .args(["timeout", "--kill-after=10"])
            .arg(limit.as_secs().to_string())
            .arg(&self.program)
            .args(&self.arguments);
        command
            .envs(self.variables)
            .env("CARGO_TERM_COLOR", "never")
            .env("NO_COLOR", "1")
            .current_dir(folder);
        command
            .stdin(std::process::Stdio::null())
            .stdout(writer.try_clone().map_err(failed)?)
            .stderr(writer);
        if !IS_INCREMENTAL.load(Ordering::Relaxed) {
            command.env("CARGO_INCREMENTAL", "0");
        }
        let mut child = command.spawn().map_err(failed)?;
        drop(command);
        let (kept, ended) = show_and_keep(reader);
        let status = child.wait().map_err(failed)?;
        if ended.recv_timeout(DRAIN).is_err() {
            println!("(a process that {name} left behind still holds its output)");
        }
        if status.code() == Some(124) {
            println!("(ended: it ran longer than {} s)", limit.as_secs());
        }
        let lines: Vec<String> = kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .cloned()
            .collect();
        if !status.success() {
            // A program that a signal ended may have printed nothing.
            note_failures([format!("{name}: {status}")]);
            note_failures(counts::failures(&lines));
        }
        Ok(Finished {
            success: status.success(),
            lines,
        })
    }
}

type Kept = Arc<Mutex<VecDeque<String>>>;

fn show_and_keep(reader: PipeReader) -> (Kept, mpsc::Receiver<()>) {
    let kept = Kept::default();
    let (end, ended) = mpsc::channel();
    let keep = kept.clone();
    thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader
            .read_until(b'\n', &mut line)
            .is_ok_and(|bytes| bytes > 0)
        {
            let _ = std::io::stdout().write_all(&line);
            let mut lines = keep.lock().unwrap_or_else(PoisonError::into_inner);
            if lines.len() == LINES_MAX {
                lines.pop_front();
            }
            lines.push_back(String::from_utf8_lossy(&line).trim_end().to_owned());
            line.clear();
        }
        let _ = end.send(());
    });
    (kept, ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Finished {
        Task::new("sh")
            .args(["-c", script])
            .run(Path::new("/"), limit)
            .expect("sh starts")
    }

    #[test]
    fn both_streams_of_a_program_are_kept_in_order() {
        let finished = shell(
            "echo one; echo two >&2; printf three",
            Duration::from_secs(60),
        );
        assert!(finished.success);
        assert_eq!(finished.lines, ["one", "two", "three"]);
    }

    #[test]
    fn a_program_past_its_limit_is_ended_and_has_failed() {
        let finished = shell("echo begun; sleep 600", Duration::from_secs(1));
        assert!(!finished.success);
        assert_eq!(finished.lines, ["begun"]);
    }

    #[test]
    fn what_fails_beside_other_work_has_failed() {
        let passed = two_at_a_time(&["true", "false", "true"], |program| {
            shell(program, Duration::from_secs(60)).success
        });
        assert_eq!(passed.iter().filter(|passed| **passed).count(), 2);
        assert_eq!(take_failures(), ["sh: exit status: 1"]);
    }

    #[test]
    fn a_program_that_is_not_there_has_failed() {
        let finished =
            Task::new("no-such-program-here").run(Path::new("/"), Duration::from_secs(60));
        assert!(finished.is_ok_and(|finished| !finished.success));
    }
}
