//! The C interface's tests: programs in C and C++, compiled against the install tree and run on the
//! host backend, over the fake driver, under sanitizers and under valgrind.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::dist;
use crate::Outcome;
use crate::counts::Counts;
use crate::environment::succeeds;
use crate::process::{Task, check_failed, two_at_a_time};
use crate::suite::place_fake_driver;
use crate::workspace::Workspace;

const SOURCES: &str = "crates/warpipe-c/tests/c";
const COMPILE_LIMIT: Duration = Duration::from_secs(300);
const RUN_LIMIT: Duration = Duration::from_secs(300);

pub const WARNINGS: &[&str] = &["-Wall", "-Wextra", "-Werror", "-pedantic"];
const SANITIZERS: &[&str] = &[
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
];

/// How programs are compiled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Variant {
    Shared,
    Static,
    Sanitized,
}

impl Variant {
    fn name(self) -> &'static str {
        match self {
            Variant::Shared => "shared",
            Variant::Static => "static",
            Variant::Sanitized => "sanitized",
        }
    }
}

/// Where and under what a program runs.
#[derive(Clone, Copy)]
enum Place<'a> {
    Host,
    FakeDriver(&'a Path),
    Valgrind,
}

impl Place<'_> {
    fn name(self) -> &'static str {
        match self {
            Place::Host => "host",
            Place::FakeDriver(_) => "cuda over the fake driver",
            Place::Valgrind => "host, under valgrind",
        }
    }
}

/// Compiles and runs everything; the number of programs that held.
pub fn run(workspace: &Workspace) -> Outcome<Counts> {
    let root = workspace.target.join("c-tests");
    let tree = dist::for_tests(workspace)?;
    let fake = place_fake_driver(&workspace.target)?;
    let tests = Tests {
        sources: workspace.root.join(SOURCES),
        built: root.join("programs"),
        tree,
    };
    fs::create_dir_all(&tests.built).map_err(|error| format!("{}: {error}", root.display()))?;
    let has_valgrind = succeeds("valgrind", &["--version"]);
    if !has_valgrind {
        println!("declared skip: no valgrind (Debian's package valgrind)");
    }
    let programs = tests.programs()?;
    let mut counts = Counts::default();
    two_at_a_time(&programs, |source| tests.apply(source, &fake, has_valgrind))
        .into_iter()
        .for_each(|of_one| counts += of_one);
    Ok(counts)
}

/// Makes an empty directory for the names of one program.
pub fn make_domain(domain: &Path) -> Outcome<()> {
    let _ = fs::remove_dir_all(domain);
    fs::DirBuilder::new()
        .mode(0o700)
        .create(domain)
        .map_err(|error| format!("{}: {error}", domain.display()))
}

fn sanitized<'a>(options: &[&'a str]) -> Vec<&'a str> {
    [SANITIZERS, options].concat()
}

fn is_cpp(source: &Path) -> bool {
    source.extension().is_some_and(|end| end == "cpp")
}

struct Tests {
    sources: PathBuf,
    built: PathBuf,
    /// The install tree.
    tree: PathBuf,
}

impl Tests {
    /// The programs' sources, sorted.
    fn programs(&self) -> Outcome<Vec<PathBuf>> {
        let unreadable = |error| format!("{}: {error}", self.sources.display());
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.sources).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            if path
                .extension()
                .is_some_and(|end| end == "c" || end == "cpp")
            {
                found.push(path);
            }
        }
        found.sort();
        if found.is_empty() {
            return Err(format!("{} holds no program", self.sources.display()));
        }
        Ok(found)
    }

    /// Compiles a program in each way, and runs it in each place: a check for each.
    fn apply(&self, source: &Path, fake: &Path, has_valgrind: bool) -> Counts {
        let name = source.file_name().unwrap_or_default().to_string_lossy();
        if is_cpp(source) && !super::has_cpp() {
            println!("declared skip: {name}: no c++ (Debian's package g++)");
            return Counts::ONE_SKIPPED;
        }
        let object = self.compile(source, "o", &["-c"]);
        let mut counts = Counts::default();
        for (variant, places) in [
            (
                Variant::Shared,
                &[Place::Host, Place::FakeDriver(fake), Place::Valgrind][..],
            ),
            (Variant::Static, &[Place::Host]),
            (Variant::Sanitized, &[Place::Host]),
        ] {
            let program = match variant {
                Variant::Sanitized => self.compile(source, "sanitized.o", &sanitized(&["-c"])),
                Variant::Shared | Variant::Static => object.clone(),
            };
            let program = program.and_then(|object| self.link(source, &object, variant));
            for &place in places {
                if matches!(place, Place::Valgrind) && !has_valgrind {
                    counts += Counts::ONE_SKIPPED;
                    continue;
                }
                println!("--- {name}, {}, {}", variant.name(), place.name());
                let ran = program.clone().and_then(|it| self.run_program(&it, place));
                counts += match ran {
                    Ok(()) => Counts::ONE_PASSED,
                    Err(message) => {
                        let (variant, place) = (variant.name(), place.name());
                        check_failed(&format!("{name}, {variant}, {place}: {message}"))
                    }
                };
            }
        }
        counts
    }

    /// Compiles a source with more `options` into an object with this end of its name.
    fn compile(&self, source: &Path, end: &str, options: &[&str]) -> Outcome<PathBuf> {
        let stem = source.file_stem().unwrap_or_default();
        let object = self.built.join(stem).with_extension(end);
        let (compiler, standard) = if is_cpp(source) {
            ("c++", "-std=c++17")
        } else {
            ("cc", "-std=c11")
        };
        let task = Task::new(compiler)
            .args([standard, "-g", "-D_GNU_SOURCE"])
            .args(WARNINGS.iter().copied())
            .args(options.iter().copied())
            .args([source.as_os_str()])
            .args(["-o".as_ref(), object.as_os_str()])
            .args(["-I".as_ref(), self.tree.join("include").as_os_str()]);
        if task.run(&self.sources, COMPILE_LIMIT)?.success {
            Ok(object)
        } else {
            Err("it does not compile".into())
        }
    }

    fn link(&self, source: &Path, object: &Path, variant: Variant) -> Outcome<PathBuf> {
        let stem = source.file_stem().unwrap_or_default().to_string_lossy();
        let program = self.built.join(format!("{stem}-{}", variant.name()));
        let library = self.tree.join("lib");
        let mut task = Task::new(if is_cpp(source) { "c++" } else { "cc" })
            .args([object.as_os_str()])
            .args(["-o".as_ref(), program.as_os_str()]);
        if variant == Variant::Sanitized {
            task = task.args(sanitized(&[]));
        }
        task = if variant == Variant::Static {
            task.args([library.join("libwarpipe.a")])
                .args(dist::PRIVATE_LIBRARIES.split(' '))
        } else {
            task.args(["-L".as_ref(), library.as_os_str()])
                .args(["-lwarpipe", "-lpthread"])
                .args([format!("-Wl,-rpath,{}", library.display())])
        };
        if task.run(&self.sources, COMPILE_LIMIT)?.success {
            Ok(program)
        } else {
            Err("it does not link".into())
        }
    }

    fn run_program(&self, program: &Path, place: Place) -> Outcome<()> {
        let domain = program.with_extension("domain");
        make_domain(&domain)?;
        let task = match place {
            Place::Valgrind => Task::new("valgrind")
                .args(["--quiet", "--error-exitcode=9", "--trace-children=yes"])
                // One thread runs at a time. Without turns, one that polls can keep the others from
                // running for minutes.
                .args(["--fair-sched=try"])
                .args([program]),
            Place::Host | Place::FakeDriver(_) => Task::new(program),
        };
        let task = match place {
            Place::FakeDriver(folder) => task
                .env("LD_LIBRARY_PATH", folder)
                .env("WARPIPE_TEST_DEVICE", "cuda"),
            Place::Host | Place::Valgrind => task.env("WARPIPE_TEST_DEVICE", "host"),
        };
        let finished = task
            .env("WARPIPE_DOMAIN", &domain)
            .run(&self.built, RUN_LIMIT)?;
        if !finished.success {
            return Err("it failed; its output is above".into());
        }
        let unreadable = |error| format!("{}: {error}", domain.display());
        let entries = fs::read_dir(&domain).map_err(unreadable)?;
        let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
        let left = names.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
        match left.is_empty() {
            true => Ok(()),
            false => Err(format!("it left files in its domain: {left:?}")),
        }
    }
}
