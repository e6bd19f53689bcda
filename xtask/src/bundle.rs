//! `cargo xtask gpu-bundle`: one folder that tests a machine with a GPU and a driver, and no Rust.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Outcome;
use crate::c;
use crate::comparison;
use crate::python;
use crate::workspace::{Workspace, cargo};

/// Packages with test programs that are worth running on a GPU machine.
const TESTED_PACKAGES: &[&str] = &["warpipe", "warpipe-kernels"];
/// Programs that are run there, each with its package.
const PROGRAMS: &[(&str, &str)] = &[
    ("warpipe-cli", "warpipe"),
    ("warpipe-bench", "warpipe-bench"),
    ("warpipe-conformance", "conformance"),
];
/// The package with the examples that are carried along: its test program `examples` runs them, and
/// finds them in `examples/`.
const EXAMPLES_PACKAGE: &str = "warpipe";
/// The bridge beside Zenoh: an example of its crate, which no other program's build brings.
const BRIDGE_BENCH: (&str, &str) = ("warpipe-bridge", "bridge_bench");
/// The files that are written beside them.
const SCRIPTS: &[(&str, &str, u32)] = &[
    ("run", include_str!("../bundle/run"), 0o755),
    ("report.py", include_str!("../bundle/report.py"), 0o644),
];
/// Builds and runs the examples in C++ there.
const CPP_CHECK: &str = include_str!("../bundle/cpp");
/// The profile in the root manifest: release, stripped.
const PROFILE: &str = "bundle";
/// The archive travels with the checkout, and 64 MiB is what a machine lent for an hour may take.
const BYTES_MAX: u64 = 48 << 20;

/// A test program, or an example, that cargo built.
struct TestProgram {
    name: String,
    path: PathBuf,
}

/// Builds the programs and fills `target/gpu-bundle/`, and `target/gpu-bundle.tar.xz` with the same.
/// The comparisons with other libraries, whose build takes as long as all else, are left out if asked.
pub fn assemble(workspace: &Workspace, with_comparison: bool) -> Outcome<()> {
    let programs = build_programs(workspace)?;
    let tests = build_tests(workspace)?;
    let examples = build_examples(workspace)?;
    let comparisons = match with_comparison {
        true => vec![
            (comparison::PROGRAM, comparison::build(workspace)?),
            ("warpipe-bridge-bench", build_bridge_bench(workspace)?),
        ],
        false => vec![],
    };
    let folder = workspace.target.join("gpu-bundle");
    let _ = fs::remove_dir_all(&folder);
    make(&folder.join("tests"))?;
    make(&folder.join("examples"))?;
    for (name, path) in programs.iter().chain(&comparisons) {
        place(path, &folder.join(name))?;
    }
    for TestProgram { name, path } in &tests {
        place(path, &folder.join("tests").join(name))?;
    }
    for TestProgram { name, path } in &examples {
        place(path, &folder.join("examples").join(name))?;
    }
    for (name, text, mode) in SCRIPTS {
        write(&folder.join(name), text, *mode)?;
    }
    let commit = commit_of(&workspace.root)?;
    write(&folder.join("commit"), &format!("{commit}\n"), 0o644)?;
    python::carry(workspace, &folder.join("python"))?;
    let cpp = folder.join("cpp");
    c::carry(workspace, &cpp)?;
    write(&cpp.join("cpp"), CPP_CHECK, 0o755)?;
    let archive = folder.with_extension("tar.xz");
    pack(&folder, &archive)?;
    let bytes = fs::metadata(&archive)
        .map_err(|error| format!("{}: {error}", archive.display()))?
        .len();
    let count = programs.len() + comparisons.len() + tests.len() + examples.len();
    println!(
        "{}: {count} programs; {}: {:.1} MiB",
        folder.display(),
        archive.display(),
        mebibytes(bytes)
    );
    if bytes > BYTES_MAX {
        return Err(format!(
            "the archive is larger than {} MiB; drop test programs",
            BYTES_MAX >> 20
        ));
    }
    Ok(())
}

fn pack(folder: &Path, archive: &Path) -> Outcome<()> {
    let mut tar = Command::new("tar");
    // The programs share most of their code, and the usual 8 MiB reach no other one.
    tar.env("XZ_OPT", "--lzma2=preset=6,dict=256MiB");
    tar.arg("-cJf").arg(archive);
    tar.arg("-C").arg(folder.parent().unwrap_or(folder));
    let name = folder.file_name().unwrap_or_default();
    let status = tar.arg(name).stdin(Stdio::null()).status();
    let status = status.map_err(|error| format!("tar did not start: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{} was not written by tar", archive.display()))
    }
}

/// The commit that is built, for the head of each report; marked where the tree differs from it.
fn commit_of(root: &Path) -> Outcome<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git")
            .args(arguments)
            .current_dir(root)
            .output();
        let output = output.map_err(|error| format!("git did not start: {error}"))?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let failed = || format!("git {arguments:?} failed; build the bundle in a clone");
        output.status.success().then_some(said).ok_or_else(failed)
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let is_clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Ok(if is_clean {
        commit
    } else {
        format!("{commit}-modified")
    })
}

fn build_programs(workspace: &Workspace) -> Outcome<Vec<(&'static str, PathBuf)>> {
    let packages = PROGRAMS.iter().flat_map(|(package, _)| ["-p", package]);
    let messages = build(workspace, packages.chain(["--bins"]))?;
    let find = |name: &'static str| {
        let path = messages.iter().find_map(|message| program(message, name));
        Ok((
            name,
            path.ok_or_else(|| format!("no package builds the program {name}"))?,
        ))
    };
    PROGRAMS.iter().map(|(_, name)| find(name)).collect()
}

fn build_tests(workspace: &Workspace) -> Outcome<Vec<TestProgram>> {
    let packages = TESTED_PACKAGES.iter().flat_map(|package| ["-p", package]);
    let messages = build(workspace, packages.chain(["--tests"]))?;
    let tests: Vec<TestProgram> = messages
        .iter()
        .filter(|message| is_test(message))
        .filter_map(test_program)
        .collect();
    if tests.is_empty() {
        return Err(
            "cargo built no test program; see TESTED_PACKAGES in xtask/src/bundle.rs".into(),
        );
    }
    Ok(tests)
}

fn build_examples(workspace: &Workspace) -> Outcome<Vec<TestProgram>> {
    let messages = build(
        workspace,
        ["-p", EXAMPLES_PACKAGE, "--examples"].into_iter(),
    )?;
    let examples: Vec<TestProgram> = messages.iter().filter_map(example).collect();
    if examples.is_empty() {
        return Err("cargo built no example; see EXAMPLES_PACKAGE in xtask/src/bundle.rs".into());
    }
    Ok(examples)
}

fn build_bridge_bench(workspace: &Workspace) -> Outcome<PathBuf> {
    let (package, name) = BRIDGE_BENCH;
    let messages = build(workspace, ["-p", package, "--example", name].into_iter())?;
    let built = messages.iter().find_map(|message| program(message, name));
    built.ok_or_else(|| format!("{package} has no example {name}"))
}

/// Runs `cargo build` and returns its message for each artifact.
fn build<'a>(
    workspace: &Workspace,
    arguments: impl Iterator<Item = &'a str>,
) -> Outcome<Vec<serde_json::Value>> {
    let mut command = Command::new(cargo());
    command
        .args([
            "build",
            "--profile",
            PROFILE,
            "--message-format=json-render-diagnostics",
        ])
        .args(arguments);
    command
        .current_dir(&workspace.root)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = command
        .output()
        .map_err(|error| format!("cargo build did not start: {error}"))?;
    if !output.status.success() {
        return Err("cargo build failed; its words are above".into());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    Ok(messages
        .filter(|message| message["reason"] == "compiler-artifact")
        .collect())
}

fn is_test(message: &serde_json::Value) -> bool {
    message["profile"]["test"] == true
}

fn executable(message: &serde_json::Value) -> Option<PathBuf> {
    message["executable"].as_str().map(PathBuf::from)
}

/// Where the program `name` was built, if this message is of it; a library of the same name has no
/// executable.
fn program(message: &serde_json::Value, name: &str) -> Option<PathBuf> {
    (!is_test(message) && message["target"]["name"] == name).then(|| executable(message))?
}

/// A test's name in the bundle: the target's, and `-unit` behind it for the tests inside a library.
fn test_program(message: &serde_json::Value) -> Option<TestProgram> {
    let name = message["target"]["name"].as_str()?;
    let inside = message["target"]["kind"]
        .as_array()?
        .iter()
        .any(|kind| kind != "test");
    let name = if inside {
        format!("{name}-unit")
    } else {
        name.to_owned()
    };
    Some(TestProgram {
        name,
        path: executable(message)?,
    })
}

fn example(message: &serde_json::Value) -> Option<TestProgram> {
    let is_example =
        !is_test(message) && message["target"]["kind"] == serde_json::json!(["example"]);
    let name = message["target"]["name"].as_str()?.to_owned();
    is_example.then(|| {
        Some(TestProgram {
            name,
            path: executable(message)?,
        })
    })?
}

fn make(folder: &Path) -> Outcome<()> {
    fs::create_dir_all(folder).map_err(|error| format!("{} not made: {error}", folder.display()))
}

fn place(from: &Path, to: &Path) -> Outcome<()> {
    if to.exists() {
        return Err(format!(
            "two programs of the bundle are called {}; rename one",
            to.display()
        ));
    }
    fs::copy(from, to)
        .map(drop)
        .map_err(|error| format!("{} not copied: {error}", from.display()))
}

fn write(path: &Path, text: &str, mode: u32) -> Outcome<()> {
    fs::write(path, text)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)))
        .map_err(|error| format!("{} not written: {error}", path.display()))
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(kind: &str, test: bool, executable: Option<&str>) -> serde_json::Value {
        serde_json::json!({
            "reason": "compiler-artifact",
            "target": { "name": "warpipe", "kind": [kind] },
            "profile": { "test": test },
            "executable": executable,
        })
    }

    #[test]
    fn the_tests_inside_a_library_and_a_test_program_of_one_name_are_told_apart() {
        let name =
            |kind| test_program(&artifact(kind, true, Some("/p"))).map(|program| program.name);
        assert_eq!(name("lib").as_deref(), Some("warpipe-unit"));
        assert_eq!(name("test").as_deref(), Some("warpipe"));
    }

    #[test]
    fn an_example_is_one_of_that_kind_that_is_no_test() {
        let name =
            |kind, test| example(&artifact(kind, test, Some("/p"))).map(|example| example.name);
        assert_eq!(name("example", false).as_deref(), Some("warpipe"));
        assert_eq!((name("bin", false), name("example", true)), (None, None));
    }

    #[test]
    fn an_artifact_that_cannot_be_run_is_no_test_program() {
        assert!(test_program(&artifact("lib", true, None)).is_none());
        assert!(!is_test(&artifact("bin", false, Some("/p"))));
    }

    #[test]
    fn a_program_is_found_beside_a_library_of_its_name() {
        assert_eq!(program(&artifact("lib", false, None), "warpipe"), None);
        assert_eq!(program(&artifact("bin", true, Some("/p")), "warpipe"), None);
        assert_eq!(
            program(&artifact("bin", false, Some("/p")), "warpipe"),
            Some("/p".into())
        );
    }
}
