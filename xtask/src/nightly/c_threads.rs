//! The C interface's rules for threads under ThreadSanitizer: a program in C over the library, both
//! compiled for it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{build_for_tsan, make_empty, no_tsan, reports, skipped, sysroot, triple};
use crate::Outcome;
use crate::c;
use crate::counts::Counts;
use crate::environment::succeeds;
use crate::process::{Task, check_failed};
use crate::workspace::Workspace;

const SOURCE: &str = "crates/warpipe-c/tests/c/threads.c";
const COMPILE_LIMIT: Duration = Duration::from_secs(300);
const RUN_LIMIT: Duration = Duration::from_secs(300);

/// How `threads.c` is compiled: as it is, or with a race that must be reported.
const VARIANTS: &[(&str, &str, bool)] = &[
    ("0", "as it is", false),
    ("1", "with a race in the program, to be reported", true),
    (
        "2",
        "with a race of the library's writes, to be reported",
        true,
    ),
];

/// Runs `threads.c` as it is, and with each planted race.
pub fn run(workspace: &Workspace) -> Outcome<Counts> {
    if let Some(reason) = no_tsan() {
        return skipped(&reason);
    }
    if !succeeds("cc", &["--version"]) {
        return skipped("no C compiler, cc (Debian's package gcc)");
    }
    let library = [
        "rustc",
        "-p",
        "warpipe-c",
        "--lib",
        "--crate-type",
        "staticlib",
    ];
    let built = build_for_tsan(workspace, &library)?;
    let place = workspace.target.join("verify/c-threads");
    let mut counts = Counts::default();
    for &(race, name, is_racy) in VARIANTS {
        println!("--- threads.c, {name}");
        make_empty(&place)?;
        let program = compile(workspace, &built, &place, race)?;
        let (success, found) = run_program(workspace, &program, &place)?;
        counts += if (success, found > 0) == (!is_racy, is_racy) {
            Counts::ONE_PASSED
        } else {
            check_failed(&format!(
                "threads.c, {name}: {found} reports, and its end is above"
            ))
        };
    }
    Ok(counts)
}

/// Compiles the program. The sanitizer's runtime is the nightly toolchain's: gcc's lacks functions
/// that LLVM calls, and `-fsanitize=thread` at the link would add it.
fn compile(workspace: &Workspace, built: &Path, place: &Path, race: &str) -> Outcome<PathBuf> {
    let sysroot = sysroot().ok_or("the nightly toolchain has no sysroot")?;
    let runtime = sysroot.join(format!(
        "lib/rustlib/{}/lib/librustc-nightly_rt.tsan.a",
        triple()
    ));
    let (object, program) = (place.join("threads.o"), place.join("threads"));
    let include = workspace.root.join("crates/warpipe-c/include");
    let task = Task::new("cc")
        .args(["-std=c11", "-g", "-D_GNU_SOURCE", "-fsanitize=thread"])
        .args(c::WARNINGS.iter().copied())
        .args([format!("-DWARPIPE_RACE={race}")])
        .args(["-I".as_ref(), include.as_os_str()])
        .args(["-c", SOURCE, "-o"])
        .args([&object]);
    let link = Task::new("cc")
        .args([&object, &built.join("libwarpipe_c.a")])
        .args(["-Wl,--whole-archive".as_ref(), runtime.as_os_str()])
        .args(["-Wl,--no-whole-archive", "-Wl,--export-dynamic"])
        .args([
            "-lgcc_s",
            "-lutil",
            "-lrt",
            "-lpthread",
            "-lm",
            "-ldl",
            "-lc",
        ])
        .args(["-o".as_ref(), program.as_os_str()]);
    let is_built = task.run(&workspace.root, COMPILE_LIMIT)?.success
        && link.run(&workspace.root, COMPILE_LIMIT)?.success;
    if is_built {
        Ok(program)
    } else {
        Err(format!("{SOURCE} does not compile with ThreadSanitizer"))
    }
}

/// Whether the program succeeded, and how many processes reported something.
fn run_program(workspace: &Workspace, program: &Path, place: &Path) -> Outcome<(bool, u64)> {
    let (domain, logs) = (place.join("domain"), place.join("races"));
    c::make_domain(&domain)?;
    make_empty(&logs)?;
    let options = format!(
        "suppressions={} log_path={}",
        workspace.root.join("verify/tsan.supp").display(),
        logs.join("race").display()
    );
    let finished = Task::new(program)
        .env("TSAN_OPTIONS", options)
        .env("WARPIPE_DOMAIN", &domain)
        .env("WARPIPE_TEST_DEVICE", "host")
        .run(place, RUN_LIMIT)?;
    Ok((finished.success, reports(&logs)?))
}
