//! `cargo xtask test`: every check that needs no GPU, and their sum. What builds for itself alone runs
//! beside the tests, which wait for half of their time.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::api;
use crate::c;
use crate::comparison;
use crate::counts::{Counts, Dialect};
use crate::environment::succeeds;
use crate::layers;
use crate::lmcache;
use crate::nixl;
use crate::packages;
use crate::pages;
use crate::process::{Task, build_once, give_way, take_failures};
use crate::ptx;
use crate::python;
use crate::ray;
use crate::results;
use crate::style;
use crate::verify;
use crate::workspace::{Workspace, cargo};

const BUILD_LIMIT: Duration = Duration::from_secs(3600);
const TEST_LIMIT: Duration = Duration::from_secs(3600);
const LONG_LIMIT: Duration = Duration::from_secs(4 * 3600);

/// What each step selects, so that all find the same crates with the same features: they are built
/// twice, their metadata for Clippy and rustdoc, their code for the tests. The bridge is not in the
/// default build of the command; the workspace has its 210 crates in any case.
const WORKSPACE: [&str; 3] = ["--workspace", "--features", "warpipe-cli/bridge"];

/// Tests that run at a time: two for each core that a machine has at least, as most of their time
/// is waiting.
pub const BESIDE_EACH_OTHER: &str = "4";

/// One line of the table.
struct Step {
    name: String,
    counts: Counts,
    took: Duration,
    /// What failed, in the words of the programs that failed.
    failures: Vec<String>,
}

/// The steps made so far.
struct Suite<'a> {
    workspace: &'a Workspace,
    steps: Vec<Step>,
}

/// Runs everything, also after a failure. Says whether all of it passed.
pub fn run(workspace: Workspace, long: bool) -> bool {
    let built = Workspace {
        has_tests: true,
        ..workspace
    };
    let mut suite = Suite {
        workspace: &built,
        steps: Vec::new(),
    };
    build_once();
    suite.beside(
        |suite| {
            suite.static_checks();
            suite.build();
        },
        |suite| suite.step("environments of Python", python::environments),
    );
    suite.beside(
        |suite| {
            suite.tests(long);
            suite.conformance(long);
            suite.step("C interface", c::test);
            suite.step("examples in C++", c::run_examples);
            suite.step("snippets in C and C++", c::check_snippets);
            suite.python();
        },
        |suite| {
            suite.step("build of the Python package", python::build_for_tests);
            suite.verify();
            suite.check("comparison with others, for a moment", comparison::check);
        },
    );
    suite.report()
}

/// Runs the tests of the Python package alone. Says whether all of them passed.
pub fn run_python(workspace: &Workspace) -> bool {
    let mut suite = Suite {
        workspace,
        steps: Vec::new(),
    };
    suite.cargo(
        "build of the fake driver",
        &["build", "-p", "fake-cuda"],
        Dialect::ExitCode,
    );
    suite.python();
    suite.report()
}

/// Runs the tests of the Python package with PyTorch, which is installed for them, on the host.
/// Says whether all of them passed.
pub fn run_python_with_torch(workspace: &Workspace) -> bool {
    let mut suite = Suite {
        workspace,
        steps: Vec::new(),
    };
    suite.step("tests of the Python package, with PyTorch", |workspace| {
        python::tests(workspace, &python::TESTED_WITH_TORCH)
    });
    suite.report()
}

/// Runs the tests of the plugins with the engines' own packages. Says whether all of them passed.
pub fn run_engines(workspace: &Workspace) -> bool {
    let mut suite = Suite {
        workspace,
        steps: Vec::new(),
    };
    suite.step("plugins in the engines themselves", python::engine_tests);
    for one in Integration::ALL {
        suite.integration(one);
    }
    suite.report()
}

/// Runs one of the integrations' tests. Says whether all of them passed.
pub fn run_integration(workspace: &Workspace, one: &Integration) -> bool {
    let mut suite = Suite {
        workspace,
        steps: Vec::new(),
    };
    suite.integration(one);
    suite.report()
}

/// A package in `integrations/`, tested with the project's own that it is for.
pub struct Integration {
    option: &'static str,
    step: &'static str,
    tests: fn(&Workspace) -> Outcome<Counts>,
}

impl Integration {
    const ALL: &[Integration] = &[
        Integration {
            option: "--nixl",
            step: "backend in NIXL itself",
            tests: nixl::tests,
        },
        Integration {
            option: "--lmcache",
            step: "package in LMCache itself",
            tests: lmcache::tests,
        },
        Integration {
            option: "--ray",
            step: "transport in Ray itself",
            tests: ray::tests,
        },
    ];

    /// The one that an option of `cargo xtask engines` names.
    pub fn of(option: &str) -> Option<&'static Integration> {
        Integration::ALL.iter().find(|one| one.option == option)
    }
}

impl Suite<'_> {
    /// Makes the first steps, and beside them the second, with what the first leave of the CPUs.
    fn beside(&mut self, first: impl FnOnce(&mut Self), second: impl FnOnce(&mut Self) + Send) {
        let mut beside = Suite {
            workspace: self.workspace,
            steps: Vec::new(),
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                give_way();
                second(&mut beside);
            });
            first(self);
        });
        self.steps.append(&mut beside.steps);
    }

    fn static_checks(&mut self) {
        self.step("formatter and linter of Rust", bring_components);
        self.cargo("fmt", &["fmt", "--all", "--check"], Dialect::ExitCode);
        self.cargo(
            "clippy",
            &of_workspace(
                "clippy",
                &[
                    "--features",
                    "warpipe/cudarc",
                    "--all-targets",
                    "--",
                    "-D",
                    "warnings",
                ],
            ),
            Dialect::ExitCode,
        );
        let docs = Task::new(cargo())
            .args([
                "doc",
                "-p",
                "warpipe",
                "-p",
                "warpipe-bridge",
                "-p",
                "warpipe-dlpack",
                // For the features that they give to shared crates: so Zenoh's metadata is Clippy's,
                // and not built again.
                "-p",
                "warpipe-cli",
                "-p",
                "xtask",
                "--features",
                "warpipe-cli/bridge",
                "--no-deps",
            ])
            .env("RUSTDOCFLAGS", "-D warnings");
        self.program("documentation", docs, BUILD_LIMIT, Dialect::ExitCode);
        self.check("figures are those of the reports", results::check);
        self.check("no file imports all names of its parent", style::report);
        self.check("a module uses its layer and those below", layers::check);
        self.check("links and snippets of the pages", pages::check);
        self.step("public API is the list's", api::check);
        self.check("the C header is the sources'", c::check_header);
        self.check("PTX is fresh", ptx::check_fresh);
        self.check("PTX atomics are .sys", ptx::check_scope);
        self.check("packages for a registry", packages::check);
    }

    /// In one command, so that no core waits for the last of one kind.
    fn build(&mut self) {
        self.cargo(
            "build of the tests and examples",
            &of_workspace("build", &["--bins", "--tests", "--examples"]),
            Dialect::ExitCode,
        );
    }

    fn tests(&mut self, long: bool) {
        if succeeds(&cargo(), &["nextest", "--version"]) {
            let arguments = [
                "nextest",
                "run",
                "--no-fail-fast",
                "--no-tests=pass",
                "--test-threads",
                BESIDE_EACH_OTHER,
            ];
            let tests = Task::new(cargo()).args(arguments).args(WORKSPACE);
            let tests = with_kills(tests, long);
            self.program("tests (nextest)", tests, BUILD_LIMIT, Dialect::Nextest);
        } else {
            let arguments = of_workspace("test", &["--no-fail-fast", "--lib", "--bins", "--tests"]);
            let tests = with_kills(Task::new(cargo()).args(arguments), long);
            self.program("tests (cargo test)", tests, BUILD_LIMIT, Dialect::CargoTest);
        }
        self.cargo(
            "doc tests",
            &of_workspace("test", &["--no-fail-fast", "--doc"]),
            Dialect::CargoTest,
        );
    }

    fn integration(&mut self, one: &Integration) {
        self.cargo(
            "build of the fake driver",
            &["build", "-p", "fake-cuda"],
            Dialect::ExitCode,
        );
        self.step(one.step, one.tests);
    }

    /// The conformance suite on the host, and on the CUDA backend over the fake driver.
    fn conformance(&mut self, long: bool) {
        self.cargo(
            "build of the conformance suite",
            &of_workspace(
                "build",
                // With what the tests need: else its features differ from theirs.
                &["--lib", "--bins", "--tests", "--exclude", "warpipe-python"],
            ),
            Dialect::ExitCode,
        );
        self.run_conformance("conformance, host", "host", None, long);
        match place_fake_driver(&self.workspace.target) {
            Ok(folder) => {
                self.run_conformance(
                    "conformance, cuda over the fake driver",
                    "cuda",
                    Some(&folder),
                    long,
                );
                let sliced = ("FAKE_CUDA_NO_MPS", "1");
                // A peer may die, and its memory go, while the driver is being called.
                let slow = ("FAKE_CUDA_CALL_US", "10000");
                for (name, only, (variable, value)) in [
                    ("rings", "refused in time slices", sliced),
                    ("copies", "copies from and to the host", sliced),
                    ("deaths", "killed", slow),
                ] {
                    let some = Task::new(self.workspace.target.join("debug/conformance"))
                        .args(["--backend", "cuda", "--only", only])
                        .env("LD_LIBRARY_PATH", &folder)
                        .env(variable, value);
                    self.program(
                        &format!("{name}, cuda over the fake driver, {variable}={value}"),
                        some,
                        TEST_LIMIT,
                        Dialect::LastLine,
                    );
                }
                let board = Task::new(self.workspace.target.join("debug/conformance"))
                    .args([
                        "--backend",
                        "cuda",
                        "--devices",
                        "8",
                        "--only",
                        "each other device",
                    ])
                    .env("LD_LIBRARY_PATH", &folder)
                    .env("FAKE_CUDA_DEVICES", "8");
                self.program(
                    "a board with 8 GPUs, cuda over the fake driver",
                    board,
                    TEST_LIMIT,
                    Dialect::LastLine,
                );
                // Graphs are measured on a GPU alone.
                let rings = Task::new(self.workspace.target.join("debug/warpipe-bench"))
                    .args(["kernel-ring", "--quick", "--device", "cuda"])
                    .env("LD_LIBRARY_PATH", &folder);
                self.program(
                    "benchmark of kernel rings, cuda over the fake driver",
                    rings,
                    TEST_LIMIT,
                    Dialect::ExitCode,
                );
                let examples = Task::new(cargo())
                    .args(of_workspace("test", &["--test", "examples"]))
                    .env("LD_LIBRARY_PATH", &folder)
                    .env("WARPIPE_TEST_DEVICE", "cuda");
                let bridge = Task::new(cargo())
                    .args(of_workspace(
                        "test",
                        &["--test", "bridge", "--", "batches::"],
                    ))
                    .env("LD_LIBRARY_PATH", &folder)
                    .env("FAKE_CUDA_NO_MPS", "1")
                    .env("WARPIPE_TEST_DEVICE", "cuda");
                self.program(
                    "bridge, cuda over the fake driver without MPS",
                    bridge,
                    TEST_LIMIT,
                    Dialect::CargoTest,
                );
                self.program(
                    "examples, cuda over the fake driver",
                    examples,
                    TEST_LIMIT,
                    Dialect::CargoTest,
                );
            }
            Err(message) => self.check("conformance, cuda over the fake driver", |_| Err(message)),
        }
    }

    /// The bounded part of `cargo xtask verify`.
    fn verify(&mut self) {
        for &(name, method) in verify::Method::BOUNDED {
            self.step(&format!("verify, {name}"), |workspace| {
                verify::apply(workspace, method, None)
            });
        }
    }

    /// The Python package's tests on the host, and what a GPU needs no framework for over the fake
    /// driver.
    fn python(&mut self) {
        self.step("tests of the Python package", |workspace| {
            python::tests(workspace, &python::TESTED)
        });
        self.step("the same, cuda over the fake driver", |workspace| {
            python::tests_on_fake_driver(workspace, &place_fake_driver(&workspace.target)?)
        });
        self.check("source distribution of the Python package", python::sdist);
    }

    fn run_conformance(&mut self, name: &str, backend: &str, library: Option<&Path>, long: bool) {
        let program = self.workspace.target.join("debug/conformance");
        let mut task = Task::new(program)
            .args(["--backend", backend, "--jobs", BESIDE_EACH_OTHER])
            .args(long.then_some("--long"));
        if let Some(folder) = library {
            task = task.env("LD_LIBRARY_PATH", folder);
        }
        self.program(
            name,
            task,
            if long { LONG_LIMIT } else { TEST_LIMIT },
            Dialect::LastLine,
        );
    }

    fn cargo(&mut self, name: &str, arguments: &[&str], dialect: Dialect) {
        self.program(
            name,
            Task::new(cargo()).args(arguments),
            BUILD_LIMIT,
            dialect,
        );
    }

    fn program(&mut self, name: &str, task: Task, limit: Duration, dialect: Dialect) {
        self.step(name, |workspace| {
            let finished = task.run(&workspace.root, limit)?;
            Ok(Counts::of(dialect, &finished.lines, finished.success))
        });
    }

    fn check(&mut self, name: &str, check: impl FnOnce(&Workspace) -> Outcome<()>) {
        self.step(name, |workspace| {
            check(workspace).map(|()| Counts::ONE_PASSED)
        });
    }

    fn step(&mut self, name: &str, work: impl FnOnce(&Workspace) -> Outcome<Counts>) {
        println!("\n=== {name}");
        let start = Instant::now();
        let result = work(self.workspace);
        let mut failures = take_failures();
        let counts = result.unwrap_or_else(|message| {
            println!("error: {message}");
            failures.push(format!("error: {message}"));
            Counts::ONE_FAILED
        });
        self.steps.push(Step {
            name: name.into(),
            counts,
            took: start.elapsed(),
            failures,
        });
    }

    fn report(&self) -> bool {
        let mut total = Counts::default();
        println!(
            "\n{:<36} {:>7} {:>7} {:>7} {:>8}",
            "step", "passed", "failed", "skipped", "seconds"
        );
        for Step {
            name, counts, took, ..
        } in &self.steps
        {
            let Counts {
                passed,
                failed,
                skipped,
            } = counts;
            println!(
                "{name:<36} {passed:>7} {failed:>7} {skipped:>7} {:>8.1}",
                took.as_secs_f64()
            );
            total += *counts;
        }
        for step in self.steps.iter().filter(|step| step.counts.failed > 0) {
            println!("\nfailed in {}:", step.name);
            step.failures.iter().for_each(|line| println!("  {line}"));
        }
        println!("\n{total}");
        total.failed == 0
    }
}

/// The arguments of a cargo command for the whole workspace.
fn of_workspace<'a>(command: &'a str, options: &[&'a str]) -> Vec<&'a str> {
    [&[command], &WORKSPACE[..], options].concat()
}

/// The storms of the bridge's tests kill 20 processes each, or hundreds.
fn with_kills(tests: Task, long: bool) -> Task {
    match long {
        true => tests.env("WARPIPE_TEST_KILLS", "200"),
        false => tests,
    }
}

/// Rustup's minimal profile has neither.
fn bring_components(workspace: &Workspace) -> Outcome<Counts> {
    if ["fmt", "clippy"]
        .iter()
        .all(|name| succeeds(&cargo(), &[name, "--version"]))
    {
        return Ok(Counts::default());
    }
    let add = Task::new("rustup").args(["component", "add", "rustfmt", "clippy"]);
    match add.run(&workspace.root, BUILD_LIMIT)?.success {
        true => Ok(Counts::default()),
        false => Err("install rustfmt and clippy (rustup component add rustfmt clippy)".into()),
    }
}

/// Puts the fake driver where the loader finds it under the driver's name. Returns that folder.
pub fn place_fake_driver(target: &Path) -> Outcome<std::path::PathBuf> {
    let (built, folder) = (
        target.join("debug/libfake_cuda.so"),
        target.join("fake-cuda"),
    );
    fs::create_dir_all(&folder)
        .map_err(|error| format!("{} not made: {error}", folder.display()))?;
    let placed = folder.join("libcuda.so.1");
    // A new file, not new bytes in the old one, which a program that is still running may have
    // mapped.
    let _ = fs::remove_file(&placed);
    let next = "see whether the build above made it (`cargo build -p fake-cuda`)";
    fs::copy(&built, &placed)
        .map_err(|error| format!("{} not copied: {error}; {next}", built.display()))?;
    Ok(folder)
}
