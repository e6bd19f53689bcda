//! `cargo xtask wheel --target aarch64`: builds the wheel for 64-bit ARM, and tries it under
//! qemu-user with Debian's Python. All of it lies in `target/aarch64`; the system is not changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::Outcome;
use crate::counts::{Counts, Dialect};
use crate::process::Task;
use crate::python::{self, Platform};
use crate::workspace::Workspace;

const PLATFORM: Platform = Platform {
    rust: Some("aarch64-unknown-linux-gnu"),
    zig: "aarch64-linux-gnu.2.17",
};
const SUITE: &str = "bookworm";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// An emulator for x86-64, and what Python needs without its network and database modules.
const PACKAGES: &[&str] = &[
    "qemu-user-static:amd64",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libc6",
    "libgcc-s1",
    "libexpat1",
    "zlib1g",
];
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(900);
const CHECK_LIMIT: Duration = Duration::from_secs(600);

/// Builds the wheel and tries it. Says whether it works.
pub fn wheel(workspace: &Workspace) -> Outcome<bool> {
    check_target(workspace)?;
    let folder = workspace.target.join("wheels-aarch64");
    let wheel = python::build_wheel(workspace, &PLATFORM, &folder)?;
    let counts = check(workspace, &wheel)?;
    println!("{}", wheel.display());
    Ok(counts.failed == 0 && counts.passed > 0)
}

fn check_target(workspace: &Workspace) -> Outcome<()> {
    let target = PLATFORM.rust.unwrap_or_default();
    let asked = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", target])
        .current_dir(&workspace.root)
        .output()
        .map_err(|error| format!("rustc did not start: {error}"))?;
    let folder = String::from_utf8_lossy(&asked.stdout);
    if Path::new(folder.trim()).is_dir() {
        return Ok(());
    }
    Err(format!(
        "Rust's library for {target} is missing; run `rustup target add {target}`"
    ))
}

/// Unpacks the wheel and runs `xtask/wheel/aarch64_check.py` with it.
fn check(workspace: &Workspace, wheel: &Path) -> Outcome<Counts> {
    let folder = workspace.target.join("aarch64");
    prepare_root(workspace, &folder)?;
    let site = folder.join("site");
    let _ = fs::remove_dir_all(&site);
    let unpack = Task::new("python3")
        .args(["-m", "zipfile", "-e"])
        .args([wheel, &site]);
    run(
        unpack,
        &workspace.root,
        DOWNLOAD_LIMIT,
        "unpacking the wheel",
    )?;
    let root = folder.join("root");
    let qemu = root.join("usr/bin/qemu-aarch64-static");
    let interpreter = [
        qemu.clone().into_os_string(),
        "-L".into(),
        root.clone().into_os_string(),
        root.join("usr/bin/python3.11").into_os_string(),
    ];
    let check = Task::new(qemu)
        .args(interpreter[1..].iter().cloned())
        .args([workspace.root.join("xtask/wheel/aarch64_check.py")])
        .args([python::version(wheel)?])
        .args(interpreter)
        .env("PYTHONPATH", site);
    let finished = check.run(&workspace.root, CHECK_LIMIT)?;
    Ok(Counts::of(
        Dialect::LastLine,
        &finished.lines,
        finished.success,
    ))
}

/// Downloads Debian's packages with an APT configuration of its own, and unpacks them.
fn prepare_root(workspace: &Workspace, folder: &Path) -> Outcome<()> {
    let (complete, wanted) = (folder.join("complete"), PACKAGES.join("\n"));
    if fs::read_to_string(&complete).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    let _ = fs::remove_dir_all(folder);
    let packages = folder.join("packages");
    let configuration = write_configuration(folder)?;
    make(&packages)?;
    println!(
        "downloading {} to {}",
        PACKAGES.join(", "),
        workspace.show(folder)
    );
    let apt = |arguments: &[&str]| {
        Task::new("apt-get")
            .args(["-qq"])
            .args(arguments.iter().copied())
            .env("APT_CONFIG", &configuration)
    };
    let next = "apt-get (it needs Debian's archive and its keyring)";
    run(apt(&["update"]), &packages, DOWNLOAD_LIMIT, next)?;
    run(
        apt(&[&["download"], PACKAGES].concat()),
        &packages,
        DOWNLOAD_LIMIT,
        next,
    )?;
    let root = folder.join("root");
    for package in files(&packages)? {
        let unpack = Task::new("dpkg-deb").args(["-x"]).args([&package, &root]);
        run(unpack, folder, DOWNLOAD_LIMIT, "dpkg-deb")?;
    }
    fs::write(&complete, wanted)
        .map_err(|error| format!("{} not written: {error}", complete.display()))
}

/// An APT configuration with its lists, cache and state in `folder`.
fn write_configuration(folder: &Path) -> Outcome<PathBuf> {
    let apt = folder.join("apt");
    for name in ["state/lists/partial", "cache/archives/partial"] {
        make(&apt.join(name))?;
    }
    let (path, sources) = (apt.join("apt.conf"), apt.join("sources.list"));
    let (state, shown) = (apt.join("state/status"), apt.display());
    let text = format!(
        "Dir::State \"{shown}/state\";\nDir::Cache \"{shown}/cache\";\n\
         Dir::State::status \"{}\";\nDir::Etc::sourcelist \"{}\";\nDir::Etc::sourceparts \"-\";\n\
         APT::Architecture \"arm64\";\nAPT::Architectures {{ \"arm64\"; \"amd64\"; }};\n\
         APT::Sandbox::User \"\";\nAcquire::Languages \"none\";\n",
        state.display(),
        sources.display(),
    );
    let source = format!("deb [signed-by={KEYRING}] http://deb.debian.org/debian {SUITE} main\n");
    for (path, text) in [(&path, text), (&sources, source), (&state, String::new())] {
        fs::write(path, text)
            .map_err(|error| format!("{} not written: {error}", path.display()))?;
    }
    Ok(path)
}

fn files(folder: &Path) -> Outcome<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)
        .map_err(|error| format!("{} cannot be read: {error}", folder.display()))?;
    Ok(entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .collect())
}

fn make(folder: &Path) -> Outcome<()> {
    fs::create_dir_all(folder).map_err(|error| format!("{} not made: {error}", folder.display()))
}

fn run(task: Task, folder: &Path, limit: Duration, what: &str) -> Outcome<()> {
    if task.run(folder, limit)?.success {
        Ok(())
    } else {
        Err(format!("{what} failed; its messages are above"))
    }
}
