//! Virtual environments of Python under `target/`: where the tools come from that are on PyPI.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::Outcome;
use crate::process::Task;
use crate::workspace::Workspace;

pub const INSTALL_LIMIT: Duration = Duration::from_secs(1800);
/// Installs pip where Python comes without `ensurepip`, as Debian's `python3` alone.
const BRING_PIP: &str = include_str!("pip.py");

/// The content of a virtual environment.
#[derive(Default)]
pub struct Packages<'a> {
    /// With what they require.
    pub with_requirements: &'a [&'a str],
    /// Without.
    pub alone: &'a [&'a str],
    /// Whether it also has the packages of the interpreter that makes it.
    pub with_system: bool,
}

/// The virtual environment `target/NAME` with these packages; made anew when they change.
pub fn environment(workspace: &Workspace, name: &str, packages: &Packages<'_>) -> Outcome<PathBuf> {
    let folder = workspace.target.join(name);
    let complete = folder.join("complete");
    let wanted = [packages.with_requirements, packages.alone].concat();
    let text = wanted.join("\n");
    if fs::read_to_string(&complete).is_ok_and(|found| found == text) {
        return Ok(folder);
    }
    let _ = fs::remove_dir_all(&folder);
    println!(
        "installing {} in {}",
        wanted.join(", "),
        workspace.show(&folder)
    );
    make(workspace, &folder, packages.with_system)?;
    for (names, options) in [
        (packages.with_requirements, &[][..]),
        (packages.alone, &["--no-deps"]),
    ] {
        let install = pip(&folder)
            .args(options.iter().copied())
            .args(names.iter().copied());
        if !names.is_empty() && !install.run(&workspace.root, INSTALL_LIMIT)?.success {
            return Err(format!(
                "pip did not install {}; see that it reaches its index (pip config list)",
                names.join(", ")
            ));
        }
    }
    fs::write(&complete, text)
        .map_err(|error| format!("{} not written: {error}", complete.display()))?;
    Ok(folder)
}

fn make(workspace: &Workspace, folder: &Path, with_system: bool) -> Outcome<()> {
    let has_pip = succeeds("python3", &["-c", "import ensurepip"]);
    let venv = Task::new("python3")
        .args(["-m", "venv"])
        .args(with_system.then_some("--system-site-packages"))
        .args((!has_pip).then_some("--without-pip"))
        .args([folder]);
    if !venv.run(&workspace.root, INSTALL_LIMIT)?.success {
        return Err("python3 makes no virtual environment; its words are above".into());
    }
    let bring = Task::new(folder.join("bin/python")).args(["-c", BRING_PIP]);
    if !has_pip && !bring.run(&workspace.root, INSTALL_LIMIT)?.success {
        return Err(
            "python3 has no ensurepip, and pip could not be downloaded; see above, or install it \
             (Debian: apt-get install python3-venv)"
                .into(),
        );
    }
    Ok(())
}

/// `pip install` of an environment.
pub fn pip(environment: &Path) -> Task {
    let quiet = ["--quiet", "--disable-pip-version-check", "--no-input"];
    Task::new(environment.join("bin/python"))
        .args(["-m", "pip", "install"])
        .args(quiet)
}

/// Whether a program is here and does this without an error.
pub fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
