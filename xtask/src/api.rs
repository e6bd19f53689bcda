//! `cargo xtask api`: the library's public API as a committed list, so that a change of it is seen.
//!
//! The list is rustdoc's JSON output, which stable compilers give under `RUSTC_BOOTSTRAP`, rendered
//! by the crate `public-api`. Its format changes with the compiler: another one's is skipped.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use public_api::Builder;

use crate::Outcome;
use crate::counts::Counts;
use crate::process::Task;
use crate::workspace::{Workspace, cargo};

/// The list, in the order of its paths.
const LIST: &str = "crates/warpipe/public-api.txt";
/// The version of rustdoc's JSON that the pinned `public-api` reads.
const FORMAT: u64 = 57;
const BUILD_LIMIT: Duration = Duration::from_secs(1800);
/// Differences that are shown.
const SHOWN_MAX: usize = 40;

/// Compares the sources' public API with the list.
pub fn check(workspace: &Workspace) -> Outcome<Counts> {
    let Some(found) = list(workspace)? else {
        return Ok(Counts::ONE_SKIPPED);
    };
    let path = workspace.root.join(LIST);
    let committed = fs::read_to_string(path).map_err(|error| format!("{LIST}: {error}"))?;
    match differences(&committed, &found) {
        lines if lines.is_empty() => Ok(Counts::ONE_PASSED),
        lines => Err(format!(
            "the public API differs from {LIST}:\n{}\nif that is meant: cargo xtask api, and a \
             line in CHANGELOG.md",
            lines.join("\n")
        )),
    }
}

/// Writes the list.
pub fn write(workspace: &Workspace) -> Outcome<()> {
    let found = list(workspace)?.ok_or("the list was not made")?;
    fs::write(workspace.root.join(LIST), &found).map_err(|error| format!("{LIST}: {error}"))?;
    println!("{LIST}: {} lines", found.lines().count());
    Ok(())
}

/// The list; `None` if this compiler's JSON is of another format.
fn list(workspace: &Workspace) -> Outcome<Option<String>> {
    let target = workspace.target.join("api");
    let rustdoc = Task::new(cargo())
        .args(["rustdoc", "-p", "warpipe", "--lib", "--target-dir"])
        .args([&target])
        .args(["--", "-Zunstable-options", "--output-format", "json"])
        .env("RUSTC_BOOTSTRAP", "1");
    if !rustdoc.run(&workspace.root, BUILD_LIMIT)?.success {
        return Err("rustdoc failed; its messages are above".into());
    }
    let json = target.join("doc/warpipe.json");
    let format = format_of(&json)?;
    if format != FORMAT {
        println!(
            "skipped: this rustdoc's JSON has format {format}, the list's tool reads {FORMAT}"
        );
        return Ok(None);
    }
    let api = Builder::from_rustdoc_json(&json)
        .omit_blanket_impls(true)
        .omit_auto_derived_impls(true)
        .build()
        .map_err(|error| format!("{} not read: {error}", json.display()))?;
    let lines: BTreeSet<String> = api.items().map(ToString::to_string).collect();
    let kept = lines.iter().filter(|line| is_promise(line));
    Ok(Some(
        kept.fold(String::new(), |list, line| list + line + "\n"),
    ))
}

/// Of the traits that the compiler implements by itself, `Send` and `Sync` are promised.
fn is_promise(line: &str) -> bool {
    const OTHERS: &[&str] = &[
        "Freeze",
        "Unpin",
        "UnsafeUnpin",
        "UnwindSafe",
        "RefUnwindSafe",
    ];
    let Some((head, _)) = line.split_once(" for ") else {
        return true;
    };
    let name = head.rsplit("::").next().unwrap_or(head);
    !(head.starts_with("impl") && OTHERS.contains(&name))
}

fn format_of(json: &Path) -> Outcome<u64> {
    let text = fs::read(json).map_err(|error| format!("{}: {error}", json.display()))?;
    let json: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| format!("rustdoc's JSON: {error}"))?;
    json["format_version"]
        .as_u64()
        .ok_or_else(|| "rustdoc's JSON has no format_version".into())
}

fn differences(committed: &str, found: &str) -> Vec<String> {
    let (old, new): (BTreeSet<_>, BTreeSet<_>) =
        (committed.lines().collect(), found.lines().collect());
    let removed = old.difference(&new).map(|line| format!("- {line}"));
    let added = new.difference(&old).map(|line| format!("+ {line}"));
    removed.chain(added).take(SHOWN_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_and_an_added_item_are_both_shown() {
        let shown = differences("pub fn a()\npub fn b()\n", "pub fn b()\npub fn c()\n");
        assert_eq!(shown, ["- pub fn a()", "+ pub fn c()"]);
    }

    #[test]
    fn of_the_traits_that_the_compiler_implements_only_those_for_threads_are_listed() {
        assert!(is_promise("impl core::marker::Send for warpipe::Sample"));
        assert!(is_promise(
            "impl !core::marker::Sync for warpipe::Subscriber"
        ));
        assert!(is_promise("impl core::fmt::Debug for warpipe::Sample"));
        assert!(!is_promise("impl core::marker::Unpin for warpipe::Sample"));
        assert!(!is_promise(
            "impl !core::panic::unwind_safe::UnwindSafe for warpipe::Sample"
        ));
    }
}
