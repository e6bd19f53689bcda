//! The command line `warpipe`, run inside the interpreter.

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;
use warpipe_cli::Program;

/// The exit code of a Rust program that panicked.
const PANICKED: u8 = 101;

/// Runs a command line and returns its exit code. ``executable`` starts this interpreter again, in
/// the children of ``demo`` and ``doctor``.
#[pyfunction]
pub fn _run_command(py: Python<'_>, arguments: Vec<OsString>, executable: OsString) -> u8 {
    // `-P`: a child imports the installed package, and not a folder `warpipe` of its directory.
    let options = ["-P", "-m", "warpipe"].map(OsString::from).to_vec();
    let program = Program::interpreter(executable, options);
    // A panic has printed its message already.
    py.detach(|| catch_unwind(AssertUnwindSafe(|| warpipe_cli::main(arguments, program))))
        .unwrap_or(PANICKED)
}
