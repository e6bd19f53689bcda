//! The part of `device.cuh` that comes from the library's table of a ring's layout.

use std::fs;

use crate::Outcome;
use crate::workspace::Workspace;

#[path = "../../crates/warpipe/src/rings/layout.rs"]
#[allow(dead_code, reason = "the library uses all of it")]
mod layout;

const HEADER: &str = "crates/warpipe/include/warpipe/device.cuh";
/// The Python package's copy, for `warpipe.include_dir()`.
const COPY: &str = "crates/warpipe-python/python/warpipe/include/warpipe/device.cuh";
const BEGIN: &str = "/* Made by `cargo xtask ring-header`; do not edit. */\n";
const END: &str = "/* End of what is made. */\n";

/// Writes that part, and the copy. Unit tests see that neither is stale.
pub fn write(workspace: &Workspace) -> Outcome<()> {
    let path = workspace.root.join(HEADER);
    let text = fs::read_to_string(&path).map_err(|error| format!("{HEADER}: {error}"))?;
    let parts = text
        .split_once(BEGIN)
        .and_then(|(head, rest)| Some((head, rest.split_once(END)?.1)));
    let (head, tail) = parts.ok_or_else(|| format!("{HEADER} lacks its two marks"))?;
    let text = format!("{head}{BEGIN}{}{END}{tail}", layout::header());
    for header in [HEADER, COPY] {
        fs::write(workspace.root.join(header), &text)
            .map_err(|error| format!("{header}: {error}"))?;
    }
    Ok(())
}
