//! The methods of `cargo xtask verify` that are conformance cases, on the host and over the
//! fake driver, and the tests of hostile peers.

use std::path::Path;
use std::time::Duration;

use crate::Outcome;
use crate::counts::{Counts, Dialect};
use crate::process::Task;
use crate::suite::place_fake_driver;
use crate::workspace::{Workspace, cargo};

const BUILD_LIMIT: Duration = Duration::from_secs(1800);
/// The time limit of one selection of cases.
const LIMIT: Duration = Duration::from_secs(3600);

/// Parts of the names of the cases in which every call of the driver hangs in turn.
const HANGS: &[&str] = &["is one that the next case blocks", "of the driver hangs"];
/// Of those in which every call is refused once.
const REFUSALS: &[&str] = &["refuses any one call"];
/// Of those in which a peer sends descriptors that do harm, or removes pages of what it shares.
const DESCRIPTORS: &[&str] = &[
    "does not return",
    "a file of a file system that does not answer",
    "is no memory of the device",
    "pages and",
    "removes all pages",
];
/// Of those that kill processes at random moments.
const STORMS: &[&str] = &["killed at", "storm of", "random kills", "while they begin"];

/// From here on every call is refused, which takes about so long.
const EVERY_CALL: Duration = Duration::from_secs(600);
/// How many processes each storm kills where nobody says for how long to run.
const KILLS: u64 = 100;
/// How many seconds all storms take for each kill that each of them makes.
const SECONDS_PER_KILL: u64 = 1;

/// Every function of the driver hangs in turn, and some calls of it are refused once each; every
/// call where there is time.
pub fn calls(workspace: &Workspace, time: Option<Duration>) -> Outcome<Counts> {
    build(workspace)?;
    let double = place_fake_driver(&workspace.target)?;
    let mut counts = cases(workspace, Some(&double), HANGS, &[])?;
    let long = time
        .is_some_and(|time| time >= EVERY_CALL)
        .then_some("--long");
    counts += cases(workspace, Some(&double), REFUSALS, long.as_slice())?;
    Ok(counts)
}

/// Peers that break the protocol, lie in shared memory, and send descriptors that do harm.
pub fn hostile(workspace: &Workspace) -> Outcome<Counts> {
    build(workspace)?;
    let double = place_fake_driver(&workspace.target)?;
    let mut counts = cases(workspace, None, DESCRIPTORS, &[])?;
    counts += cases(workspace, Some(&double), DESCRIPTORS, &[])?;
    let tests = Task::new(cargo()).args(["test", "-p", "warpipe", "--lib", "--", "hostile::"]);
    let tests = tests.run(&workspace.root, LIMIT)?;
    counts += Counts::of(Dialect::CargoTest, &tests.lines, tests.success);
    Ok(counts)
}

/// The owners and partners of every primitive are killed at random moments, on the host.
pub fn storm(workspace: &Workspace, time: Option<Duration>) -> Outcome<Counts> {
    build(workspace)?;
    let kills = time.map_or(KILLS, |time| (time.as_secs() / SECONDS_PER_KILL).max(1));
    cases(workspace, None, STORMS, &["--kills", &kills.to_string()])
}

fn build(workspace: &Workspace) -> Outcome<()> {
    let packages = [
        "build",
        "-p",
        "warpipe-conformance",
        "-p",
        "fake-cuda",
        "-p",
        "warpipe-cli",
    ];
    let finished = Task::new(cargo())
        .args(packages)
        .run(&workspace.root, BUILD_LIMIT)?;
    if finished.success {
        Ok(())
    } else {
        Err("the conformance suite does not compile".into())
    }
}

/// Runs the cases with one of `texts` in their names: over the fake driver, or on the host.
fn cases(on: &Workspace, double: Option<&Path>, texts: &[&str], more: &[&str]) -> Outcome<Counts> {
    let program = on.target.join("debug/conformance");
    let backend = if double.is_some() { "cuda" } else { "host" };
    let mut counts = Counts::default();
    for text in texts {
        let mut task = Task::new(&program)
            .args(["--backend", backend, "--only", text])
            .args(more);
        if let Some(folder) = double {
            task = task.env("LD_LIBRARY_PATH", folder);
        }
        let finished = task.run(&on.root, LIMIT)?;
        counts += Counts::of(Dialect::LastLine, &finished.lines, finished.success);
    }
    Ok(counts)
}
