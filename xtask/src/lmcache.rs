//! The package for LMCache in `integrations/lmcache`, tested with LMCache's own server and adapter.

use std::time::Duration;

use crate::Outcome;
use crate::counts::Counts;
use crate::environment::{INSTALL_LIMIT, Packages, environment, pip};
use crate::process::Task;
use crate::python;
use crate::suite::place_fake_driver;
use crate::workspace::Workspace;

const FOLDER: &str = "integrations/lmcache";
const TEST_LIMIT: Duration = Duration::from_secs(1800);

/// What LMCache's server and its adapter for vLLM import on a CPU, without vLLM; LMCache itself comes
/// without the rest of its requirements.
const TESTED_WITH: &[&str] = &[
    "pytest==9.2.0",
    "torch==2.11.0",
    "numpy==2.2.6",
    "numba==0.68.1",
    "setuptools==80.9.0",
    "msgspec==0.22.0",
    "pyzmq==27.3.0",
    "grpcio==1.78.0",
    "grpcio-observability==1.78.0",
    "aiofiles==25.1.0",
    "aiohttp==3.14.5",
    "blake3==1.0.11",
    "cachetools==8.0.2",
    "cryptography",
    "httpx==0.28.1",
    "opentelemetry-sdk==1.40.0",
    "opentelemetry-exporter-prometheus==0.61b0",
    "prometheus-client==0.24.1",
    "protobuf==6.33.6",
    "psutil==7.2.2",
    "py-cpuinfo==9.0.0",
    "pyyaml==6.0.4",
    "requests==2.34.2",
    "sortedcontainers==2.4.0",
];
const LMCACHE: &[&str] = &["lmcache==0.5.6"];

/// Tests the package with LMCache, which comes from the index with PyTorch (gigabytes), over the fake
/// driver, which is built before.
pub fn tests(workspace: &Workspace) -> Outcome<Counts> {
    let folder = workspace.root.join(FOLDER);
    let packages = Packages {
        with_requirements: TESTED_WITH,
        alone: LMCACHE,
        ..Packages::default()
    };
    let wheel = python::unoptimised_wheel(workspace)?;
    let environment = environment(workspace, "python-lmcache", &packages)?;
    python::install(workspace, &environment, &wheel)?;
    let package = pip(&environment)
        .args(["--force-reinstall", "--no-deps", "--no-build-isolation"])
        .args([&folder]);
    if !package.run(&workspace.root, INSTALL_LIMIT)?.success {
        return Err(format!("pip did not install {FOLDER}; its words are above"));
    }
    let pytest = Task::new(environment.join("bin/python"))
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"])
        .env("LD_LIBRARY_PATH", place_fake_driver(&workspace.target)?);
    python::counted_in(&folder, pytest, TEST_LIMIT)
}
