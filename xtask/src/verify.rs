//! `cargo xtask verify`: the methods that find what tests cannot, and a bounded part of them for
//! `cargo xtask test`. `docs/design/verification.md` explains each.

use std::time::{Duration, Instant};

use crate::Outcome;
use crate::cases;
use crate::counts::{Counts, Dialect};
use crate::nightly;
use crate::process::{Finished, Task};
use crate::style;
use crate::workspace::{Workspace, cargo};

const BUILD_LIMIT: Duration = Duration::from_secs(1800);
/// How long one method may take where nobody says.
const LIMIT: Duration = Duration::from_secs(1200);
/// So many histories of each kind are tried in less than a second.
const HISTORIES_PER_SECOND: u64 = 2_000;
/// From here on the models look further.
const DEEP: Duration = Duration::from_secs(1200);

pub const USAGE: &str = "usage: cargo xtask verify [--for DURATION] [--only METHOD]

Runs the methods one after the other, also behind one that found something. The last line holds
the counts; the exit code is 0 if nothing was found. What cannot run here is skipped, and says what
to install. docs/design/verification.md says what each finds.

  style    facts about the sources; fails only for a glob import of a parent
  model    models of the lock-free code and of the books, with deaths    deeper from 20m on
  history  rows of acts by chance, with devices that write late          as many as fit
  corpus   every parser takes known inputs and changes of them           more from 20m on
  calls    calls of the driver hang in turn, and are refused once each   every call from 10m on
  hostile  peers that lie, and send descriptors that do harm             -
  storm    processes are killed at random moments                        more kills
  fuzz     every parser under libFuzzer; nightly and cargo-fuzz          as long as said
  miri     histories, DLPack and units under Miri; nightly               -
  tsan     the host's conformance cases under ThreadSanitizer; nightly   -
  c-tsan   threads over the C interface under ThreadSanitizer; nightly   -

  --for DURATION  90s, 10m or 2h, shared equally by the methods that run; the last column says what
                  each does with its share. Without it each runs for seconds or minutes, miri about
                  10 minutes, and tsan 20
  --only METHOD   this one alone";

/// A way to find faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Style,
    Model,
    History,
    Corpus,
    Calls,
    Hostile,
    Storm,
    Fuzz,
    Miri,
    Tsan,
    CTsan,
}

impl Method {
    const ALL: &[(&str, Method)] = &[
        ("style", Method::Style),
        ("model", Method::Model),
        ("history", Method::History),
        ("corpus", Method::Corpus),
        ("calls", Method::Calls),
        ("hostile", Method::Hostile),
        ("storm", Method::Storm),
        ("fuzz", Method::Fuzz),
        ("miri", Method::Miri),
        ("tsan", Method::Tsan),
        ("c-tsan", Method::CTsan),
    ];

    /// Those that `cargo xtask test` runs, beside all conformance cases and tests: the methods
    /// `calls`, `hostile` and `storm` are more rounds of those.
    pub const BOUNDED: &[(&str, Method)] = &[
        ("model", Method::Model),
        ("history", Method::History),
        ("corpus", Method::Corpus),
    ];
}

/// The methods to run.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// For how long, together.
    time: Option<Duration>,
    /// One method alone.
    only: Option<Method>,
}

impl Options {
    /// Reads `[--for DURATION] [--only METHOD]`.
    pub fn parse(words: &[&str]) -> Option<Options> {
        let mut options = Options::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let value = words.next()?;
            match *word {
                "--for" => options.time = Some(duration(value)?),
                "--only" => {
                    options.only = Some(Method::ALL.iter().find(|(name, _)| name == value)?.1)
                }
                _ => return None,
            }
        }
        Some(options)
    }
}

/// `90s`, `10m` or `2h`.
fn duration(text: &str) -> Option<Duration> {
    let unit = match text.chars().last()? {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        _ => return None,
    };
    let number: u64 = text[..text.len() - 1].parse().ok()?;
    number
        .checked_mul(unit)
        .filter(|&seconds| seconds > 0)
        .map(Duration::from_secs)
}

/// Runs the methods, a line for each. Says whether nothing was found.
pub fn run(workspace: &Workspace, options: &Options) -> bool {
    let mut total = Counts::default();
    let mut lines = Vec::new();
    let methods: Vec<_> = Method::ALL
        .iter()
        .filter(|(_, method)| options.only.is_none_or(|only| only == *method))
        .collect();
    let share = options.time.map(|time| time / methods.len() as u32);
    for &&(name, method) in &methods {
        let start = Instant::now();
        let counts = apply(workspace, method, share).unwrap_or_else(|message| {
            println!("error: {message}");
            Counts::ONE_FAILED
        });
        lines.push(format!(
            "{name:<12} {counts}, {:.0} s",
            start.elapsed().as_secs_f64()
        ));
        total += counts;
    }
    println!("\n{}\n\n{total}", lines.join("\n"));
    total.failed == 0
}

/// Runs one method, for about `time` where it has no end of its own.
pub fn apply(workspace: &Workspace, method: Method, time: Option<Duration>) -> Outcome<Counts> {
    match method {
        Method::Style => style::report(workspace).map(|()| Counts::ONE_PASSED),
        Method::Model => tests(workspace, "verify", &["loom", "states"], time),
        Method::History => tests(workspace, "verify", &["histories"], time),
        Method::Corpus => tests(workspace, "fuzz", &["corpus"], time),
        Method::Calls => cases::calls(workspace, time),
        Method::Hostile => cases::hostile(workspace),
        Method::Storm => cases::storm(workspace, time),
        Method::Fuzz => nightly::fuzz(workspace, time),
        Method::Miri => nightly::miri(workspace),
        Method::Tsan => nightly::tsan(workspace),
        Method::CTsan => nightly::c_threads(workspace),
    }
}

/// Runs test programs of `verify/` or `fuzz/`. A test that says `declared skip` was none.
fn tests(
    workspace: &Workspace,
    package: &str,
    programs: &[&str],
    time: Option<Duration>,
) -> Outcome<Counts> {
    let folder = workspace.root.join(package);
    let programs = programs.iter().flat_map(|program| ["--test", program]);
    let build = Task::new(cargo())
        .args(["test", "--locked", "--no-run"])
        .args(programs.clone());
    if !build.run(&folder, BUILD_LIMIT)?.success {
        return Err(format!("{package}/ does not compile"));
    }
    let mut task = Task::new(cargo())
        .args(["test", "--locked", "--no-fail-fast"])
        .args(programs);
    task = task
        .args(["--", "--show-output"])
        .env("RUST_BACKTRACE", "0");
    if let Some(time) = time {
        task = task.env(
            "VERIFY_HISTORIES",
            time.as_secs()
                .saturating_mul(HISTORIES_PER_SECOND)
                .to_string(),
        );
    }
    if time.is_some_and(|time| time >= DEEP) {
        task = task
            .env("VERIFY_DEEPER", "1")
            .env("VERIFY_ROUNDS", "2000000");
    }
    let finished = task.run(&folder, time.unwrap_or_default().max(LIMIT) * 2)?;
    Ok(counted(&finished))
}

fn counted(finished: &Finished) -> Counts {
    let mut counts = Counts::of(Dialect::CargoTest, &finished.lines, finished.success);
    let skipped = finished
        .lines
        .iter()
        .filter(|line| line.starts_with("declared skip: "))
        .count() as u64;
    counts.passed = counts.passed.saturating_sub(skipped);
    counts.skipped += skipped;
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_a_time_and_a_method() {
        let options = Options {
            time: Some(Duration::from_secs(600)),
            only: Some(Method::Model),
        };
        assert_eq!(
            Options::parse(&["--for", "10m", "--only", "model"]),
            Some(options)
        );
        assert_eq!(Options::parse(&[]), Some(Options::default()));
        for wrong in [
            &["--for"][..],
            &["--for", "10"],
            &["--for", "0s"],
            &["--only", "luck"],
            &["--fast", "1s"],
        ] {
            assert_eq!(Options::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn the_help_says_of_every_method_what_it_does() {
        for (name, _) in Method::ALL {
            let says = |line: &str| line.starts_with(&format!("  {name} "));
            assert_eq!(USAGE.lines().filter(|line| says(line)).count(), 1, "{name}");
        }
    }

    #[test]
    fn a_test_that_declares_a_skip_counts_as_skipped() {
        let lines = [
            "declared skip: a line is gone",
            "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured;",
        ];
        let finished = Finished {
            success: true,
            lines: lines.map(str::to_owned).to_vec(),
        };
        assert_eq!(
            counted(&finished),
            Counts {
                passed: 2,
                failed: 0,
                skipped: 1
            }
        );
    }
}
