//! The methods of `cargo xtask verify` that need a nightly toolchain. Where it is not there they
//! are skipped, and say why.

mod c_threads;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::Outcome;
use crate::counts::{Counts, Dialect};
use crate::process::{Finished, Task};
use crate::workspace::{Workspace, cargo};

pub use c_threads::run as c_threads;

const BUILD_LIMIT: Duration = Duration::from_secs(1800);
/// How long each parser is fuzzed where nobody says.
const FUZZ_TIME: Duration = Duration::from_secs(20);
/// A fuzzer's time beside its limit: reading what it found before.
const FUZZ_SPARE: Duration = Duration::from_secs(300);

/// Each of Miri's runs, at most a few minutes on an idle machine.
const MIRI_LIMIT: Duration = Duration::from_secs(3600);

/// The host's cases under ThreadSanitizer.
const TSAN_LIMIT: Duration = Duration::from_secs(7200);

const INSTALL: &str = "rustup toolchain install nightly --profile minimal -c miri,rust-src";

/// A program of the nightly toolchain.
fn nightly(program: &str) -> Task {
    Task::new("rustup").args(["run", "nightly", program])
}

/// Whether a program of the nightly toolchain starts.
fn has(arguments: &[&str]) -> bool {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly"]).args(arguments);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// This machine, as the compiler names it.
fn triple() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// One check that is not made, and why.
fn skipped(reason: &str) -> Outcome<Counts> {
    println!("declared skip: {reason}");
    Ok(Counts::ONE_SKIPPED)
}

/// Fuzzes each parser of `fuzz/` for its share of `time`, from its seeds and from what earlier runs
/// found.
pub fn fuzz(workspace: &Workspace, time: Option<Duration>) -> Outcome<Counts> {
    if !has(&["rustc", "--version"]) {
        return skipped(&format!("no nightly toolchain; {INSTALL}"));
    }
    if !has(&["cargo", "fuzz", "--version"]) {
        return skipped("no cargo-fuzz; cargo install cargo-fuzz --version 0.13.1 --locked");
    }
    let (folder, target) = (workspace.root.join("fuzz"), workspace.target.join("verify"));
    let names = targets(&folder)?;
    let seeds = target.join("seeds");
    let task = Task::new(cargo())
        .args(["run", "--locked", "--example", "seeds", "--"])
        .args([&seeds]);
    if !task.run(&folder, BUILD_LIMIT)?.success {
        return Err("fuzz/ does not compile, or wrote no seeds".into());
    }
    let built = target.join("fuzz");
    let build = nightly("cargo").args(["fuzz", "build", "--features", "libfuzzer", "--target"]);
    let build = build.args([triple()]).args(["--target-dir"]).args([&built]);
    if !build.run(&folder, BUILD_LIMIT)?.success {
        return Err("the fuzz targets do not compile with the nightly toolchain".into());
    }
    let programs = built.join(format!("{}/release", triple()));
    let share = time.map_or(FUZZ_TIME, |time| {
        (time / names.len() as u32).max(Duration::from_secs(1))
    });
    let mut counts = Counts::default();
    for name in &names {
        println!("\n--- {name}, {} s", share.as_secs());
        let passed = fuzz_one(
            &programs.join(name),
            &target,
            &seeds.join(name),
            name,
            share,
        )?;
        counts += if passed {
            Counts::ONE_PASSED
        } else {
            Counts::ONE_FAILED
        };
    }
    Ok(counts)
}

/// Units of the library that need no system call but a few, by the beginnings of their names.
const UNITS: &[&str] = &[
    "tensor::tests",
    "pool::last_writers",
    "queue::wire",
    "rows::",
    "backend::pointer::tests::a_line",
];

/// Runs under Miri: histories of entries, the tests of DLPack's structures, and [`UNITS`].
pub fn miri(workspace: &Workspace) -> Outcome<Counts> {
    if !has(&["cargo", "miri", "--version"]) {
        return skipped(&format!("no nightly toolchain with Miri; {INSTALL}"));
    }
    let built = workspace.target.join("verify/miri");
    let miri = || {
        nightly("cargo")
            .args(["miri", "test", "--locked", "--target-dir"])
            .args([&built])
    };
    let models = miri().args(["--test", "histories"]);
    let mut counts = counted(&models.run(&workspace.root.join("verify"), MIRI_LIMIT)?);
    let dlpack = miri().args(["-p", "warpipe-dlpack", "--test", "dlpack"]);
    counts += counted(&dlpack.run(&workspace.root, MIRI_LIMIT)?);
    let units = miri().args(["-p", "warpipe", "--lib", "--"]).args(UNITS);
    counts += counted(
        &units
            .env("MIRIFLAGS", "-Zmiri-disable-isolation")
            .run(&workspace.root, MIRI_LIMIT)?,
    );
    Ok(counts)
}

/// Runs the conformance cases on the host under ThreadSanitizer, with the standard library compiled
/// for it, too.
pub fn tsan(workspace: &Workspace) -> Outcome<Counts> {
    if let Some(reason) = no_tsan() {
        return skipped(&reason);
    }
    let logs = workspace.target.join("verify/races");
    make_empty(&logs)?;
    let built = build_for_tsan(workspace, &["build", "-p", "warpipe-conformance"])?;
    // Cases fork beside threads, and want processes that end by their faults.
    let options = format!(
        "die_after_fork=0 handle_segv=0 handle_sigbus=0 handle_abort=0 suppressions={} log_path={}",
        workspace.root.join("verify/tsan.supp").display(),
        logs.join("race").display()
    );
    let program = built.join("conformance");
    let task = Task::new(program)
        .args(["--backend", "host"])
        .env("TSAN_OPTIONS", options);
    let finished = task.run(&workspace.root, TSAN_LIMIT)?;
    let mut counts = Counts::of(Dialect::LastLine, &finished.lines, finished.success);
    let races = reports(&logs)?;
    counts.failed += races;
    Ok(counts)
}

/// How many files of reports there are: one for each process that told of something. Prints them.
fn reports(logs: &Path) -> Outcome<u64> {
    let mut count = 0;
    let entries =
        fs::read_dir(logs).map_err(|error| format!("{} not read: {error}", logs.display()))?;
    for entry in entries.flatten() {
        println!(
            "{}",
            String::from_utf8_lossy(&fs::read(entry.path()).unwrap_or_default())
        );
        count += 1;
    }
    Ok(count)
}

/// The reason why nothing can be compiled for ThreadSanitizer here.
fn no_tsan() -> Option<String> {
    let has_source = || {
        sysroot().is_some_and(|root| {
            root.join("lib/rustlib/src/rust/library/Cargo.toml")
                .exists()
        })
    };
    (!has(&["cargo", "--version"]) || !has_source())
        .then(|| format!("no nightly toolchain with the standard library's source; {INSTALL}"))
}

/// The folder of the nightly toolchain.
fn sysroot() -> Option<PathBuf> {
    let printed = Command::new("rustup")
        .args(["run", "nightly", "rustc", "--print", "sysroot"])
        .output()
        .ok()?;
    Some(String::from_utf8_lossy(&printed.stdout).trim().into())
}

/// Runs cargo with these arguments, which compiles for ThreadSanitizer. Returns the folder of what
/// it compiles.
fn build_for_tsan(workspace: &Workspace, arguments: &[&str]) -> Outcome<PathBuf> {
    let built = workspace.target.join("verify/tsan");
    let build = nightly("cargo")
        .args(arguments.iter().copied())
        .args(["--locked", "-Zbuild-std", "--target", &triple()])
        .args(["--target-dir".as_ref(), built.as_os_str()]);
    let flags = "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer";
    let built = built.join(format!("{}/debug", triple()));
    if build
        .env("RUSTFLAGS", flags)
        .run(&workspace.root, BUILD_LIMIT)?
        .success
    {
        Ok(built)
    } else {
        Err("the library does not compile with ThreadSanitizer".into())
    }
}

/// Makes an empty folder: an earlier run's files are not this one's.
fn make_empty(folder: &Path) -> Outcome<()> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).map_err(|error| format!("{} not made: {error}", folder.display()))
}

fn counted(finished: &Finished) -> Counts {
    Counts::of(Dialect::CargoTest, &finished.lines, finished.success)
}

/// The targets by name, in order.
fn targets(folder: &Path) -> Outcome<Vec<String>> {
    let folder = folder.join("fuzz_targets");
    let entries =
        fs::read_dir(&folder).map_err(|error| format!("{} not read: {error}", folder.display()))?;
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names
        .filter_map(|name| name.strip_suffix(".rs").map(str::to_owned))
        .collect();
    names.sort();
    if names.is_empty() {
        Err(format!("{} has no targets", folder.display()))
    } else {
        Ok(names)
    }
}

fn fuzz_one(
    program: &Path,
    target: &Path,
    seeds: &Path,
    name: &str,
    time: Duration,
) -> Outcome<bool> {
    let (grown, found) = (
        target.join("grown").join(name),
        target.join("found").join(name),
    );
    for folder in [&grown, &found] {
        fs::create_dir_all(folder)
            .map_err(|error| format!("{} not made: {error}", folder.display()))?;
    }
    let options = [
        format!("-max_total_time={}", time.as_secs()),
        format!("-artifact_prefix={}/", found.display()),
        "-max_len=4096".into(),
        "-timeout=30".into(),
        "-rss_limit_mb=2048".into(),
        "-verbosity=0".into(),
        "-print_final_stats=1".into(),
    ];
    let task = Task::new("nice")
        .args(["-n", "19"])
        .args([program])
        .args(options)
        .args([&grown, seeds]);
    let finished = task.run(target, time + FUZZ_SPARE)?;
    if !finished.success {
        println!(
            "what it found is in {}; add it to fuzz/corpus/{name}.hex with the mend",
            found.display()
        );
    }
    Ok(finished.success)
}
