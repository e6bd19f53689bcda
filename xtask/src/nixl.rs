//! The backend of NIXL in `integrations/nixl`: built against NIXL's headers, tested with its agents.

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use crate::Outcome;
use crate::c;
use crate::counts::Counts;
use crate::environment::{Packages, environment};
use crate::process::Task;
use crate::python;
use crate::suite::place_fake_driver;
use crate::workspace::Workspace;

const FOLDER: &str = "integrations/nixl";
const BUILD_LIMIT: Duration = Duration::from_secs(600);
const TEST_LIMIT: Duration = Duration::from_secs(900);

/// What the agents need on a CPU; NIXL itself comes without PyTorch, which it requires.
const TESTED_WITH: &[&str] = &["pytest==9.2.0", "numpy==2.4.6"];
const NIXL: &[&str] = &["nixl-cu12==1.5.1"];

/// Builds the backend and tests it with NIXL's package, which comes from the index, on the host and
/// over the fake driver, which is built before. Skipped where `NIXL_INCLUDE_DIR` does not name NIXL's
/// headers, since the package has none.
pub fn tests(workspace: &Workspace) -> Outcome<Counts> {
    let Some(headers) = env::var_os("NIXL_INCLUDE_DIR") else {
        println!("declared skip: no NIXL_INCLUDE_DIR (the folder src of NIXL's sources)");
        return Ok(Counts::ONE_SKIPPED);
    };
    let folder = workspace.root.join(FOLDER);
    let plugins = workspace.target.join("nixl");
    let tree = c::tree_for_tests(workspace)?;
    let make = Task::new("make").args([
        assignment("BUILD", &plugins),
        assignment("NIXL_INCLUDE_DIR", Path::new(&headers)),
        assignment("WARPIPE_DIR", &tree),
        "all".into(),
        "check".into(),
    ]);
    if !make.run(&folder, BUILD_LIMIT)?.success {
        return Err("the NIXL backend does not compile".into());
    }
    let packages = Packages {
        with_requirements: TESTED_WITH,
        alone: NIXL,
        ..Packages::default()
    };
    let python = environment(workspace, "python-nixl", &packages)?.join("bin/python");
    let pytest = Task::new(python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"])
        .env("NIXL_PLUGIN_DIR", plugins)
        .env("LD_LIBRARY_PATH", place_fake_driver(&workspace.target)?);
    python::counted_in(&folder, pytest, TEST_LIMIT)
}

/// A variable for `make`.
fn assignment(name: &str, value: &Path) -> OsString {
    let mut text = OsString::from(name);
    text.push("=");
    text.push(value);
    text
}
