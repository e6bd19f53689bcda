//! `cargo xtask comparison`: the host path beside iceoryx2, which is no dependency of the workspace.

use std::path::PathBuf;
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
    let task = Task::new(cargo()).args(["build", "--locked", "--release", "--target-dir"]);
    let folder = workspace.root.join("comparison");
    if !task.args([&target]).run(&folder, BUILD_LIMIT)?.success {
        return Err("comparison/ does not compile; its words are above".into());
    }
    Ok(target.join("release").join(PROGRAM))
}

/// Builds the program and runs it with `options`.
pub fn run(workspace: &Workspace, options: &[&str]) -> Outcome<bool> {
    let task = Task::new(build(workspace)?).args(options);
    Ok(task.run(&workspace.root, RUN_LIMIT)?.success)
}

/// Every case for a moment.
pub fn check(workspace: &Workspace) -> Outcome<()> {
    match run(workspace, &["--quick"])? {
        true => Ok(()),
        false => Err(format!("{PROGRAM} --quick failed; its words are above")),
    }
}
