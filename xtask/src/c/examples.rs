//! The example programs in C++: configured and built with CMake against the tests' install tree, and
//! run on the host backend, over the fake driver if they need no kernel, and with mistakes on the
//! command line.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::dist;
use crate::Outcome;
use crate::counts::Counts;
use crate::environment::{Packages, environment, succeeds};
use crate::process::{Task, check_failed};
use crate::suite::place_fake_driver;
use crate::workspace::Workspace;

const SOURCES: &str = "examples/cpp";
const BUILD_LIMIT: Duration = Duration::from_secs(600);
const RUN_LIMIT: Duration = Duration::from_secs(300);

/// A program, and whether it launches kernels, of which the fake driver runs none.
struct Example {
    name: &'static str,
    has_kernels: bool,
}

const EXAMPLES: &[Example] = &[
    Example {
        name: "producer_consumer",
        has_kernels: true,
    },
    Example {
        name: "opencv_free_camera",
        has_kernels: true,
    },
    Example {
        name: "work_queue",
        has_kernels: false,
    },
    Example {
        name: "libtorch_pipes",
        has_kernels: false,
    },
];
/// CMake leaves it out where it finds no LibTorch.
const NEEDS_LIBTORCH: &str = "libtorch_pipes";

/// Builds and runs all of them; the number of runs that held.
pub fn run(workspace: &Workspace) -> Outcome<Counts> {
    if !super::has_cpp() {
        println!("declared skip: no c++ (Debian's package g++)");
        return Ok(Counts::ONE_SKIPPED);
    }
    let tree = dist::for_tests(workspace)?;
    let fake = place_fake_driver(&workspace.target)?;
    let built = build(workspace, &tree)?;
    let mut counts = Counts::default();
    for example in EXAMPLES {
        let program = built.join(example.name);
        if example.name == NEEDS_LIBTORCH && !program.exists() {
            println!("declared skip: {}: no LibTorch", example.name);
            counts += Counts::ONE_SKIPPED;
            continue;
        }
        counts += refuse(&program);
        counts += apply(&program, "host", None);
        if !example.has_kernels {
            counts += apply(&program, "cuda", Some(&fake));
        }
    }
    Ok(counts)
}

/// Copies what a machine without Rust needs to build them: the sources, and a release's install tree
/// without the static library.
pub fn carry(workspace: &Workspace, folder: &Path) -> Outcome<()> {
    let tree = dist::lay_out(workspace, &dist::RELEASE, &folder.join("warpipe"))?;
    let archive = tree.join("lib/libwarpipe.a");
    fs::remove_file(&archive).map_err(|error| format!("{}: {error}", archive.display()))?;
    let (from, to) = (workspace.root.join(SOURCES), folder.join("examples"));
    let failed = |error: std::io::Error| format!("{SOURCES} not copied: {error}");
    fs::create_dir_all(&to).map_err(failed)?;
    for entry in fs::read_dir(&from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        fs::copy(entry.path(), to.join(entry.file_name())).map_err(failed)?;
    }
    Ok(())
}

/// Returns the folder of the programs.
fn build(workspace: &Workspace, tree: &Path) -> Outcome<PathBuf> {
    let built = workspace.target.join("c-tests/examples");
    let tools = cmake(workspace)?;
    let configure = Task::new(tools.cmake.as_os_str())
        .args(["-S".as_ref(), workspace.root.join(SOURCES).as_os_str()])
        .args(["-B".as_ref(), built.as_os_str()])
        .args([format!("-DCMAKE_PREFIX_PATH={}", tree.display())])
        .args(tools.generator);
    let make = Task::new(tools.cmake)
        .args(["--build".as_ref(), built.as_os_str()])
        .args(["--parallel", "2"]);
    if configure.run(&workspace.root, BUILD_LIMIT)?.success
        && make.run(&workspace.root, BUILD_LIMIT)?.success
    {
        Ok(built)
    } else {
        Err(format!("{SOURCES} does not build; CMake's words are above"))
    }
}

/// CMake, and the options that name what it builds with.
struct CMake {
    cmake: PathBuf,
    generator: Vec<String>,
}

/// The machine's CMake and Make, or those of PyPI.
fn cmake(workspace: &Workspace) -> Outcome<CMake> {
    if ["cmake", "make"]
        .iter()
        .all(|name| succeeds(name, &["--version"]))
    {
        return Ok(CMake {
            cmake: "cmake".into(),
            generator: Vec::new(),
        });
    }
    let packages = Packages {
        alone: &["cmake>=4,<5", "ninja>=1.11,<2"],
        ..Packages::default()
    };
    let tools = environment(workspace, "cmake", &packages)?.join("bin");
    let ninja = tools.join("ninja");
    Ok(CMake {
        cmake: tools.join("cmake"),
        generator: vec![
            "-GNinja".into(),
            format!("-DCMAKE_MAKE_PROGRAM={}", ninja.display()),
        ],
    })
}

/// Gives a program an option that it does not have, and a role: one check. Neither starts anything.
fn refuse(program: &Path) -> Counts {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    println!("--- {name}, a mistake on the command line");
    for mistake in [["--devise", "host"], ["--role", "nobody"]] {
        let task = Task::new(program).args(mistake);
        let finished = task.run(program.parent().unwrap_or(program), RUN_LIMIT);
        let usage = format!("usage: {name} [--device host|cuda]");
        let is_refused = finished.as_ref().is_ok_and(|finished| {
            let last = finished.lines.last();
            !finished.success && last.is_some_and(|line| line.starts_with(&usage))
        });
        if !is_refused {
            let message = finished.err().unwrap_or("its output is above".into());
            return check_failed(&format!("{name} {}: {message}", mistake.join(" ")));
        }
    }
    Counts::ONE_PASSED
}

/// Runs a program: one check.
fn apply(program: &Path, device: &str, driver: Option<&Path>) -> Counts {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    println!("--- {name}, {device}");
    let mut task = Task::new(program).args(["--device", device]);
    if let Some(folder) = driver {
        task = task.env("LD_LIBRARY_PATH", folder);
    }
    let finished = task.run(program.parent().unwrap_or(program), RUN_LIMIT);
    let ended_well = finished.as_ref().is_ok_and(|finished| {
        let last = finished.lines.last();
        finished.success && last.is_some_and(|line| line.starts_with("ok: "))
    });
    if ended_well {
        return Counts::ONE_PASSED;
    }
    let message = finished.err().unwrap_or("its output is above".into());
    check_failed(&format!("{name}, {device}: {message}"))
}
