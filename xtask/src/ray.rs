//! The tensor transport of Ray in `integrations/ray`, tested with Ray itself.

use std::time::Duration;

use crate::Outcome;
use crate::counts::Counts;
use crate::environment::{Packages, environment};
use crate::process::Task;
use crate::python;
use crate::suite::place_fake_driver;
use crate::workspace::Workspace;

const FOLDER: &str = "integrations/ray";
const TEST_LIMIT: Duration = Duration::from_secs(900);

/// Ray, and the libraries that its actors hand over.
const TESTED_WITH: &[&str] = &[
    "pytest==9.2.0",
    "numpy==2.4.6",
    "torch==2.11.0",
    "ray==2.60.0",
];

/// Builds the Python package and tests the transport with Ray's, which comes from the index, on the host
/// and over the fake driver, which is built before.
pub fn tests(workspace: &Workspace) -> Outcome<Counts> {
    let packages = Packages {
        with_requirements: TESTED_WITH,
        ..Packages::default()
    };
    let wheel = python::unoptimised_wheel(workspace)?;
    let environment = environment(workspace, "python-ray", &packages)?;
    python::install(workspace, &environment, &wheel)?;
    let pytest = Task::new(environment.join("bin/python"))
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"])
        .env("WARPIPE_FAKE_DRIVER", place_fake_driver(&workspace.target)?);
    python::counted_in(&workspace.root.join(FOLDER), pytest, TEST_LIMIT)
}
