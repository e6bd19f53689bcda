//! `cargo xtask comparison`: the host path beside iceoryx2, which is no dependency of the workspace.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Outcome;
use crate::process::Task;
use crate::workspace::{Workspace, cargo};

/// The program of `comparison/`.
pub const PROGRAM: &str = "warpipe-comparison";

const BUILD_LIMIT: Duration = Duration::from_secs(1800);
const RUN_LIMIT: Duration = Duration::from_secs(1200);

/// Builds the program as it is measured.
pub fn build(workspace: &Workspace) -> Outcome<PathBuf> {
    let target = workspace.target.join("comparison");
    build_in(workspace, &target, "release", &["--release"])
}

/// Builds the program in `target`, where cargo puts it into `folder`.
fn build_in(
    workspace: &Workspace,
    target: &Path,
    folder: &str,
    options: &[&str],
) -> Outcome<PathBuf> {
    let task = Task::new(cargo())
        .args(["build", "--locked", "--target-dir"])
        .args([target])
        .args(options.iter().copied());
    if !task
        .run(&workspace.root.join("comparison"), BUILD_LIMIT)?
        .success
    {
        return Err("comparison/ does not compile; its words are above".into());
    }
    Ok(target.join(folder).join(PROGRAM))
}

/// Builds the program and runs it with `options`.
pub fn run(workspace: &Workspace, options: &[&str]) -> Outcome<bool> {
    let task = Task::new(build(workspace)?).args(options);
    Ok(task.run(&workspace.root, RUN_LIMIT)?.success)
}

/// Every case for a moment, without optimisation, which takes most of the time to build it, and
/// with what the tests have built.
pub fn check(workspace: &Workspace) -> Outcome<()> {
    let program = build_in(workspace, &workspace.target, "debug", &[])?;
    let quick = Task::new(program).args(["--quick"]);
    match quick.run(&workspace.root, RUN_LIMIT)?.success {
        true => Ok(()),
        false => Err(format!("{PROGRAM} --quick failed; its words are above")),
    }
}
