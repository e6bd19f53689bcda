//! `cargo xtask wheel`, and the Python package's tests: maturin, the compiler it links with, and
//! what the tests use come into virtual environments under `target/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::Outcome;
use crate::c;
use crate::counts::{Counts, Dialect};
use crate::environment::{INSTALL_LIMIT, Packages, environment, pip};
use crate::process::Task;
use crate::suite;
use crate::workspace::{Workspace, cargo};

const CRATE: &str = "crates/warpipe-python";

/// The tool that builds the package for this machine.
const BUILDERS: &[&str] = &["maturin==1.16.0"];
/// The tool that builds the wheel for others: Zig binds to the C library of `manylinux2014` (glibc 2.17),
/// whatever this machine's.
const WHEEL_BUILDERS: &[&str] = &["maturin==1.16.0", "ziglang==0.17.0"];
const MANYLINUX: &str = "manylinux2014";

fn tools(workspace: &Workspace) -> Outcome<PathBuf> {
    let packages = Packages {
        with_requirements: BUILDERS,
        ..Packages::default()
    };
    environment(workspace, "python-build", &packages)
}

/// Makes the environments of [`tests`], which waits for the index most of its time.
pub fn environments(workspace: &Workspace) -> Outcome<Counts> {
    tools(workspace)?;
    TESTED.environment(workspace)?;
    Ok(Counts::default())
}

fn wheel_tools(workspace: &Workspace) -> Outcome<PathBuf> {
    let packages = Packages {
        with_requirements: WHEEL_BUILDERS,
        ..Packages::default()
    };
    environment(workspace, "python-wheel", &packages)
}

/// The packages that the tests use. PyTorch, CuPy and Numba are used if this machine has them already.
const TESTED_WITH: &[&str] = &[
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",
    "numpy>=2.1",
    "ml_dtypes>=0.5",
    "jax[cpu]>=0.6",
    "mypy>=2,<3",
    MPI4PY,
    MPICH,
];

/// The virtual environment of the tests, by its folder under `target/`.
pub struct Tested {
    folder: &'static str,
    /// Packages beside [`TESTED_WITH`].
    more: &'static [&'static str],
}

/// As every machine has it.
pub const TESTED: Tested = Tested {
    folder: "python-tests",
    more: &[],
};
/// PyTorch comes with CUDA's libraries, gigabytes in all: installed on demand. Without a GPU its
/// tensors of the host are tested.
pub const TESTED_WITH_TORCH: Tested = Tested {
    folder: "python-tests-torch",
    more: &["torch>=2.11,<3", "transformers>=5,<6", "safetensors"],
};

/// MPI for `examples/mpi`: the bindings, and a library with its launcher.
const MPI4PY: &str = "mpi4py==4.1.2";
const MPICH: &str = "mpich==5.0.2";
/// The Python versions for which a GPU machine gets the bindings.
const MPI_CARRIED_FOR: &[&str] = &["3.11", "3.12"];

/// pytest for a machine that has none and no network: pure Python, 2 MiB.
const CARRIED: &[&str] = &[
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",
    "execnet==2.1.2",
    "pluggy==1.7.0",
    "iniconfig==2.3.1",
    "packaging==26.3",
    "pygments==2.21.0",
];

const BUILD_LIMIT: Duration = Duration::from_secs(3600);
const TEST_LIMIT: Duration = Duration::from_secs(1800);

/// What a wheel is built for.
pub struct Platform {
    /// Rust's name; `None` is this machine.
    pub rust: Option<&'static str>,
    /// Zig's name, with the version of glibc.
    pub zig: &'static str,
}

const X86_64: Platform = Platform {
    rust: None,
    zig: "x86_64-linux-gnu.2.17",
};

/// Builds the wheel that is given away, in `target/wheels/`, and sees that a program with it ends
/// well. Returns its path.
pub fn wheel(workspace: &Workspace) -> Outcome<PathBuf> {
    let wheel = build_wheel(workspace, &X86_64, &workspace.target.join("wheels"))?;
    try_ends(workspace, &wheel)?;
    println!("{}", wheel.display());
    Ok(wheel)
}

/// Builds the wheel for a platform in `folder`.
pub fn build_wheel(workspace: &Workspace, platform: &Platform, folder: &Path) -> Outcome<PathBuf> {
    let tools = wheel_tools(workspace)?;
    let unwinder = unwinder(workspace, &tools, platform)?;
    let link = format!("link-arg={}", unwinder.display());
    let mut options = vec![
        "--profile",
        "bundle",
        "--strip",
        "--zig",
        "--features",
        "bridge",
    ];
    options.extend(["--compatibility", MANYLINUX]);
    options.extend(platform.rust.iter().flat_map(|rust| ["--target", *rust]));
    build(workspace, &tools, folder, &options, &["--", "-C", &link])
}

/// Builds the source distribution in `target/sdist/`, and sees that the package compiles from it
/// alone.
pub fn sdist(workspace: &Workspace) -> Outcome<()> {
    let tools = tools(workspace)?;
    let folder = workspace.target.join("sdist");
    let _ = fs::remove_dir_all(&folder);
    let maturin = Task::new(tools.join("bin/maturin"))
        .args(["sdist", "--out"])
        .args([&folder])
        .env("VIRTUAL_ENV", &tools);
    if !maturin
        .run(&workspace.root.join(CRATE), BUILD_LIMIT)?
        .success
    {
        return Err("maturin made no source distribution; its words are above".into());
    }
    let archive = left_by_maturin(&folder, "gz")?;
    // Its own manifest at its root is a workspace's, so cargo looks no further up.
    let unpacked = folder.join("unpacked");
    make(&unpacked)?;
    workspace.unpack(&archive, &unpacked, &["--strip-components=1"])?;
    let check = Task::new(cargo())
        .args(["check", "-p", "warpipe-python", "--target-dir"])
        // With the metadata of other crates that Clippy has left.
        .args([&workspace.target]);
    if !check.run(&unpacked, BUILD_LIMIT)?.success {
        return Err("the source distribution does not compile; cargo's messages are above".into());
    }
    println!("{}", archive.display());
    Ok(())
}

/// The version in a wheel's name.
pub fn version(wheel: &Path) -> Outcome<String> {
    let name = wheel.file_name().unwrap_or_default().to_string_lossy();
    let version = name.split('-').nth(1).map(str::to_owned);
    version.ok_or_else(|| format!("{name} is no name of a wheel"))
}

/// The system's unwinder to link with. Zig would put one of its own into the library; but a thread
/// that the interpreter's end unwinds (`pthread_exit`) is unwound by the system's, and two that
/// meet in one stack crash.
fn unwinder(workspace: &Workspace, tools: &Path, platform: &Platform) -> Outcome<PathBuf> {
    let (source, folder) = (
        workspace.root.join("xtask/wheel"),
        workspace.target.join("unwinder").join(platform.zig),
    );
    fs::create_dir_all(&folder)
        .map_err(|error| format!("{} not made: {error}", folder.display()))?;
    let made = folder.join("libgcc_s.so.1");
    let versions = format!(
        "-Wl,--version-script={}",
        source.join("unwinder.map").display()
    );
    let compile = Task::new(tools.join("bin/python"))
        .args([
            "-m",
            "ziglang",
            "cc",
            "-target",
            platform.zig,
            "-shared",
            "-nostdlib",
            "-Wl,-soname,libgcc_s.so.1",
        ])
        .args([versions.as_str(), "-o"])
        .args([&made, &source.join("unwinder.c")]);
    if !compile.run(&workspace.root, BUILD_LIMIT)?.success {
        return Err("Zig did not compile xtask/wheel/unwinder.c; its words are above".into());
    }
    Ok(made)
}

/// Runs the tests in which the interpreter ends with threads at work, on the host.
fn try_ends(workspace: &Workspace, wheel: &Path) -> Outcome<()> {
    let environment = TESTED.environment(workspace)?;
    install(workspace, &environment, wheel)?;
    let ends = ["exit", "interpreter_exit", "fork"].map(|name| format!("tests/test_{name}.py"));
    let counts = counted(
        workspace,
        pytest(&environment)
            .args(ends)
            .env("WARPIPE_TEST_DEVICE", "host"),
    )?;
    if counts.failed > 0 || counts.passed == 0 {
        return Err(format!(
            "{} does not end well; what pytest said is above",
            wheel.display()
        ));
    }
    Ok(())
}

/// Builds the package as it stands, without optimisation, and installs it in the environment of its
/// tests.
fn installed(workspace: &Workspace, tested: &Tested) -> Outcome<PathBuf> {
    let wheel = unoptimised_wheel(workspace)?;
    let environment = tested.environment(workspace)?;
    install(workspace, &environment, &wheel)?;
    Ok(environment)
}

/// Builds the package for [`tests`], which then find it.
pub fn build_for_tests(workspace: &Workspace) -> Outcome<Counts> {
    unoptimised_wheel(workspace).map(|_| Counts::default())
}

/// The package as it stands, built without optimisation, once.
pub fn unoptimised_wheel(workspace: &Workspace) -> Outcome<PathBuf> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(wheel) = &*built {
        return Ok(wheel.clone());
    }
    let (tools, folder) = (tools(workspace)?, workspace.target.join("python-dev"));
    let options = ["--profile", "dev", "--compatibility", "linux"];
    let wheel = build(workspace, &tools, &folder, &options, &[])?;
    Ok(built.insert(wheel).clone())
}

/// Writes the stub of the native half, `_warpipe.pyi`, from its types and the texts as built now.
pub fn stubs(workspace: &Workspace) -> Outcome<()> {
    let generate =
        Task::new(installed(workspace, &TESTED)?.join("bin/python")).args(["stubs/generate.py"]);
    if !generate
        .run(&workspace.root.join(CRATE), INSTALL_LIMIT)?
        .success
    {
        return Err("stubs/generate.py wrote no stub; its words are above".into());
    }
    Ok(())
}

/// Builds and installs the package, and runs its tests.
pub fn tests(workspace: &Workspace, tested: &Tested) -> Outcome<Counts> {
    let environment = installed(workspace, tested)?;
    counted(
        workspace,
        pytest(&environment)
            .args(["tests"])
            .env("WARPIPE_TEST_DEVICE", "host")
            // For the C++ program of `examples/mpi`.
            .env("WARPIPE_TEST_C_TREE", c::tree_for_tests(workspace)?),
    )
}

/// Files of tests whose outcome no device changes, and of the benchmark, which needs PyTorch there.
const ON_HOST_ALONE: [&str; 9] = [
    "arguments",
    "bench",
    "command",
    "conventions",
    "examples",
    "kinds",
    "package",
    "workers",
    "workers_programs",
];

/// Runs the tests again on the fake driver in `folder`, after [`tests`], but for
/// [`ON_HOST_ALONE`].
pub fn tests_on_fake_driver(workspace: &Workspace, folder: &Path) -> Outcome<Counts> {
    let environment = TESTED.environment(workspace)?;
    let left_out = ON_HOST_ALONE.map(|name| format!("--ignore=tests/test_{name}.py"));
    let pytest = pytest(&environment)
        .args(["tests"])
        .args(left_out)
        .env("LD_LIBRARY_PATH", folder)
        .env("JAX_PLATFORMS", "cpu")
        .env("WARPIPE_TEST_DEVICE", "cuda")
        .env("WARPIPE_TEST_C_TREE", c::tree_for_tests(workspace)?)
        // A stream of the fake driver is a thread, and each word of it costs a switch.
        .env("WARPIPE_TEST_FRAMES", "5000");
    counted(workspace, pytest)
}

/// Tests the plugins with the engines' own packages, which come from the index: gigabytes. What they
/// import comes with them; kernels and CUDA, which a CPU cannot use, do not.
pub fn engine_tests(workspace: &Workspace) -> Outcome<Counts> {
    let folder = workspace.root.join(CRATE).join("tests/engines");
    let (required, alone) = (
        lines(&folder.join("requirements.txt"))?,
        lines(&folder.join("alone.txt"))?,
    );
    let [required, alone] =
        [&required, &alone].map(|names| names.iter().map(String::as_str).collect::<Vec<_>>());
    let wheel = unoptimised_wheel(workspace)?;
    let packages = Packages {
        with_requirements: &required,
        alone: &alone,
        ..Packages::default()
    };
    let environment = environment(workspace, "python-engines", &packages)?;
    install(workspace, &environment, &wheel)?;
    counted(
        workspace,
        pytest(&environment)
            .args(["tests/engines"])
            .env("WARPIPE_TEST_DEVICE", "host")
            // A package that is not there is a failure.
            .env("WARPIPE_TEST_ENGINES", "1"),
    )
}

/// The lines of a list of packages, without its comments.
fn lines(path: &Path) -> Outcome<Vec<String>> {
    let text = fs::read_to_string(path)
        .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    Ok(lines.map(str::to_owned).collect())
}

impl Tested {
    fn environment(&self, workspace: &Workspace) -> Outcome<PathBuf> {
        let packages = Packages {
            with_requirements: &[TESTED_WITH, self.more].concat(),
            with_system: true,
            ..Packages::default()
        };
        environment(workspace, self.folder, &packages)
    }
}

/// Installs a wheel in an environment, without what it requires.
pub fn install(workspace: &Workspace, environment: &Path, wheel: &Path) -> Outcome<()> {
    let install = pip(environment)
        .args(["--force-reinstall", "--no-deps"])
        .args([wheel]);
    if !install.run(&workspace.root, INSTALL_LIMIT)?.success {
        return Err(format!("pip did not install {}", wheel.display()));
    }
    Ok(())
}

/// Several tests at a time, as this takes long.
fn pytest(environment: &Path) -> Task {
    Task::new(environment.join("bin/python"))
        .args([
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "xdist",
            "-n",
            suite::BESIDE_EACH_OTHER,
            "--dist",
            "worksteal",
        ])
        .env("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        // Hundreds of processes import the same modules.
        .env("PYTHONDONTWRITEBYTECODE", "")
}

fn counted(workspace: &Workspace, pytest: Task) -> Outcome<Counts> {
    counted_in(&workspace.root.join(CRATE), pytest, TEST_LIMIT)
}

/// Runs a pytest of this project's in `folder`: its last line holds the counts.
pub fn counted_in(folder: &Path, pytest: Task, limit: Duration) -> Outcome<Counts> {
    let finished = pytest.run(folder, limit)?;
    Ok(Counts::of(
        Dialect::LastLine,
        &finished.lines,
        finished.success,
    ))
}

/// Puts the wheel, the tests, and what they need into `folder`.
pub fn carry(workspace: &Workspace, folder: &Path) -> Outcome<()> {
    let wheel = wheel(workspace)?;
    copy_scripts(
        &workspace.root.join(CRATE).join("tests"),
        &folder.join("tests"),
    )?;
    copy_scripts(
        &workspace.root.join("examples/python"),
        &folder.join("examples"),
    )?;
    copy_scripts(&workspace.root.join("examples/mpi"), &folder.join("mpi"))?;
    copy(&wheel, folder)?;
    download(workspace, &folder.join("pytest"), CARRIED, &[])?;
    let wheels = folder.join("mpi-wheels");
    download(workspace, &wheels, &[MPICH], &[])?;
    for version in MPI_CARRIED_FOR {
        let options = ["--only-binary=:all:", "--python-version", version];
        download(workspace, &wheels, &[MPI4PY], &options)?;
    }
    Ok(())
}

/// Downloads the packages' wheels, without those that they need.
fn download(
    workspace: &Workspace,
    folder: &Path,
    packages: &[&str],
    options: &[&str],
) -> Outcome<()> {
    let tools = wheel_tools(workspace)?;
    let quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"];
    let download = Task::new(tools.join("bin/python"))
        .args(["-m", "pip", "download"])
        .args(quiet)
        .args(options.iter().copied())
        .args(["--dest"])
        .args([folder])
        .args(packages.iter().copied());
    if !download.run(&workspace.root, INSTALL_LIMIT)?.success {
        return Err(format!(
            "pip did not download {}; see that it reaches its index (pip config list)",
            packages.join(", ")
        ));
    }
    Ok(())
}

/// Runs the maturin of `tools` with `options`, and `last` for the compiler, and leaves one wheel in
/// `folder`.
fn build(
    workspace: &Workspace,
    tools: &Path,
    folder: &Path,
    options: &[&str],
    last: &[&str],
) -> Outcome<PathBuf> {
    let _ = fs::remove_dir_all(folder);
    let path = std::env::var("PATH").unwrap_or_default();
    let maturin = Task::new(tools.join("bin/maturin"))
        .args(["build", "--quiet", "--locked"])
        .args(options.iter().copied())
        .args(["--out"])
        .args([folder])
        .args(last.iter().copied())
        .env("VIRTUAL_ENV", tools)
        // maturin finds Zig by the python of the search path.
        .env("PATH", format!("{}:{path}", tools.join("bin").display()));
    if !maturin
        .run(&workspace.root.join(CRATE), BUILD_LIMIT)?
        .success
    {
        return Err("maturin built no wheel; its words are above".into());
    }
    left_by_maturin(folder, "whl")
}

/// The file with this extension that maturin wrote into the folder.
fn left_by_maturin(folder: &Path, extension: &str) -> Outcome<PathBuf> {
    let files = fs::read_dir(folder)
        .map_err(|error| format!("{} cannot be read: {error}", folder.display()))?;
    let mut files = files.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let file = files.find(|path| path.extension().is_some_and(|found| found == extension));
    file.ok_or_else(|| format!("maturin left no .{extension} in {}", folder.display()))
}

/// Copies every Python file of one folder to another.
fn copy_scripts(from: &Path, to: &Path) -> Outcome<()> {
    make(to)?;
    let unreadable = |error: std::io::Error| format!("{} cannot be read: {error}", from.display());
    for entry in fs::read_dir(from).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == "py") {
            copy(&path, to)?;
        }
    }
    Ok(())
}

fn make(folder: &Path) -> Outcome<()> {
    fs::create_dir_all(folder).map_err(|error| format!("{} not made: {error}", folder.display()))
}

fn copy(file: &Path, folder: &Path) -> Outcome<()> {
    let name = file
        .file_name()
        .ok_or_else(|| format!("{} has no name", file.display()))?;
    fs::copy(file, folder.join(name))
        .map(drop)
        .map_err(|error| format!("{} not copied: {error}", file.display()))
}
