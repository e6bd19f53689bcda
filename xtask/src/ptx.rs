//! The committed PTX: made by NVRTC from the CUDA source beside it, never stale, and of system
//! scope.
//!
//! NVRTC comes as a Python wheel of a fixed version, so that every machine makes the same bytes.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::Outcome;
use crate::environment::{Packages, environment};
use crate::process::Task;
use crate::workspace::Workspace;

const WHEEL: &str = "nvidia-cuda-nvrtc-cu12";
const WHEEL_VERSION: &str = "12.0.76";
const COMPILE: &str = include_str!("nvrtc.py");
const COMPILE_LIMIT: Duration = Duration::from_secs(300);

/// Compiles every CUDA source under `crates/` and writes the PTX beside it.
pub fn rewrite(workspace: &Workspace) -> Outcome<()> {
    for (source, fresh) in compile_all(workspace)? {
        let committed = source.with_extension("ptx");
        let same = fs::read(&committed).is_ok_and(|old| old == fresh);
        fs::write(&committed, &fresh)
            .map_err(|error| format!("{} not written: {error}", committed.display()))?;
        println!(
            "{}: {}",
            workspace.show(&committed),
            if same { "unchanged" } else { "rewritten" }
        );
    }
    Ok(())
}

/// Fails when a CUDA source under `crates/` has no PTX beside it, or one that NVRTC would not make
/// of it today.
pub fn check_fresh(workspace: &Workspace) -> Outcome<()> {
    let mut stale = Vec::new();
    for (source, fresh) in compile_all(workspace)? {
        let committed = source.with_extension("ptx");
        let same = fs::read(&committed).is_ok_and(|old| old == fresh);
        println!(
            "{}: {}",
            workspace.show(&committed),
            if same { "fresh" } else { "stale or missing" }
        );
        if !same {
            stale.push(workspace.show(&committed).to_string());
        }
    }
    if stale.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{} is not what its source compiles to; run `cargo xtask ptx` and commit the result",
        stale.join(", ")
    ))
}

/// Fails on an atomic of less than system scope in any PTX under `crates/`: another process would
/// not see it whole.
pub fn check_scope(workspace: &Workspace) -> Outcome<()> {
    let mut narrow = Vec::new();
    for path in workspace.sources("ptx")? {
        let text = fs::read_to_string(&path)
            .map_err(|error| format!("{} not read: {error}", path.display()))?;
        let found = narrow_atomics(&text);
        println!(
            "{}: {} atomics of narrow scope",
            workspace.show(&path),
            found.len()
        );
        narrow.extend(
            found
                .into_iter()
                .map(|(line, word)| format!("{}:{line}: {word}", workspace.show(&path))),
        );
    }
    if narrow.is_empty() {
        return Ok(());
    }
    Err(format!(
        "atomics without `.sys`; use `atomic*_system` in the source:\n{}",
        narrow.join("\n")
    ))
}

/// Line numbers and instructions of all `atom.` and `red.` that lack `.sys`.
fn narrow_atomics(ptx: &str) -> Vec<(usize, &str)> {
    let instructions = ptx.lines().enumerate().flat_map(|(index, line)| {
        let code = line.split("//").next().unwrap_or_default();
        let words =
            code.split(|character: char| character.is_whitespace() || ";{},".contains(character));
        words.map(move |word| (index + 1, word))
    });
    let atomics =
        instructions.filter(|(_, word)| word.starts_with("atom.") || word.starts_with("red."));
    atomics
        .filter(|(_, word)| !word.split('.').any(|part| part == "sys"))
        .collect()
}

/// Every CUDA source under `crates/` with the PTX that NVRTC makes of it.
fn compile_all(workspace: &Workspace) -> Outcome<Vec<(PathBuf, Vec<u8>)>> {
    let sources = workspace.sources("cu")?;
    if sources.is_empty() {
        return Err("there is no CUDA source under crates/; the search is broken".into());
    }
    let wheel = nvrtc(workspace)?;
    let folder = workspace.target.join("ptx-fresh");
    fs::create_dir_all(&folder)
        .map_err(|error| format!("{} not made: {error}", folder.display()))?;
    let outputs: Vec<PathBuf> = (0..sources.len())
        .map(|index| folder.join(format!("{index}.ptx")))
        .collect();
    let pairs = sources
        .iter()
        .zip(&outputs)
        .flat_map(|(source, output)| [source, output]);
    let task = Task::new("python3")
        .args(["-c", COMPILE])
        .args([&wheel])
        .args(pairs);
    if !task.run(&workspace.root, COMPILE_LIMIT)?.success {
        return Err("NVRTC did not compile the sources; its words are above".into());
    }
    let read = |output: &PathBuf| {
        fs::read(output).map_err(|error| format!("{} not read: {error}", output.display()))
    };
    sources
        .into_iter()
        .zip(&outputs)
        .map(|(source, output)| Ok((source, read(output)?)))
        .collect()
}

/// The folder that holds NVRTC, installed there first if need be.
fn nvrtc(workspace: &Workspace) -> Outcome<PathBuf> {
    let package = format!("{WHEEL}=={WHEEL_VERSION}");
    let packages = Packages {
        alone: &[&package],
        ..Packages::default()
    };
    environment(workspace, "nvrtc", &packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_atomic_of_device_scope_is_found_wherever_it_stands() {
        let ptx = "\tatom.global.add.u64 %rd1, [%rd2], 1;\n@%p1 red.global.gpu.add.u64 [%rd2], 1;\n{ mov.u32 %r1, 0; atom.cas.b32 %r1, [%rd1], 0, 1; }";
        let found: Vec<usize> = narrow_atomics(ptx)
            .into_iter()
            .map(|(line, _)| line)
            .collect();
        assert_eq!(found, [1, 2, 3]);
    }

    #[test]
    fn system_scope_and_other_instructions_pass() {
        let ptx = "atom.global.sys.add.u64 %rd1, [%rd2], 1;\nred.relaxed.sys.global.add.u64 [%rd2], 1;\n// atom.add\nredux.sync.add.s32 %r1, %r2, -1;\nld.global.u64 %atom, [%red];";
        assert_eq!(narrow_atomics(ptx), []);
    }

    #[test]
    fn a_name_that_merely_contains_sys_is_no_scope() {
        assert_eq!(
            narrow_atomics("atom.system_like.add.u64 %rd1, [%rd2], 1;").len(),
            1
        );
    }
}
