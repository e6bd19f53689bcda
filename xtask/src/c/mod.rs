//! `cargo xtask c`: the C interface's header, its install tree, its tests and examples.

mod dist;
mod examples;
mod header;
mod snippets;
mod tests;

use crate::Outcome;
use crate::environment::succeeds;
use crate::workspace::Workspace;

pub use dist::for_tests as tree_for_tests;
pub use examples::{carry, run as run_examples};
pub use header::{check as check_header, write as write_header};
pub use snippets::check as check_snippets;
pub use tests::{WARNINGS, make_domain, run as test};

/// Makes the install tree of a release.
pub fn dist(workspace: &Workspace) -> Outcome<()> {
    let place = workspace.target.join("c-dist");
    let tree = dist::lay_out(workspace, &dist::RELEASE, &place)?;
    println!(
        "{}: libraries, headers, pkg-config and CMake packages",
        tree.display()
    );
    Ok(())
}

/// Whether there is a compiler for C++. A machine with Rust has one for C.
fn has_cpp() -> bool {
    succeeds("c++", &["--version"])
}
