//! Which crates a registry gets, and that their packages are complete.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::Outcome;
use crate::process::Task;
use crate::workspace::{Workspace, cargo};

/// The crates for a registry; all others say `publish = false`.
const PUBLISHED: &[&str] = &[
    "warpipe",
    "warpipe-bridge",
    "warpipe-cli",
    "warpipe-dlpack",
    "warpipe-kernels",
];
/// The package of this crate is made and resolved, but not compiled: its 210 crates would be
/// compiled a third time, beside those for Clippy and for the tests. A source file that the package
/// lacks would have to lie outside `src/`, which its manifest includes whole.
const NOT_COMPILED: &str = "warpipe-bridge";
const BUILD_LIMIT: Duration = Duration::from_secs(3600);

/// Makes the package of every published crate, as `cargo publish` does, and compiles each but
/// [`NOT_COMPILED`] from its package alone.
pub fn check(workspace: &Workspace) -> Outcome<()> {
    check_manifests(&workspace.packages()?)?;
    let target = workspace.target.join("publish");
    if target.exists() {
        fs::remove_dir_all(&target)
            .map_err(|error| format!("{} not removed: {error}", target.display()))?;
    }
    let package = Task::new(cargo())
        .args(["package"])
        .args(PUBLISHED.iter().flat_map(|name| ["-p", *name]))
        // It would compile each package for itself, with all that it needs.
        .args(["--no-verify", "--locked"])
        // CI may run in a tree with changes.
        .args(["--allow-dirty", "--target-dir"])
        .args([&target]);
    if !package.run(&workspace.root, BUILD_LIMIT)?.success {
        return Err("cargo would not package the crates; its messages are above".into());
    }
    compile(workspace, &target.join("package"))
}

/// Compiles the packages that lie in `folder`, as one workspace of its own, with the metadata of
/// other crates that Clippy has left.
fn compile(workspace: &Workspace, folder: &Path) -> Outcome<()> {
    let version = env!("CARGO_PKG_VERSION");
    let unpacked = folder.join("unpacked");
    fs::create_dir_all(&unpacked)
        .map_err(|error| format!("{} not made: {error}", unpacked.display()))?;
    for name in PUBLISHED {
        let archive = folder.join(format!("{name}-{version}.crate"));
        workspace.unpack(&archive, &unpacked, &[])?;
    }
    let written = fs::write(unpacked.join("Cargo.toml"), manifest(version)).and_then(|()| {
        let lock = "Cargo.lock";
        fs::copy(workspace.root.join(lock), unpacked.join(lock))
    });
    written.map_err(|error| format!("{} not written: {error}", unpacked.display()))?;
    let check = Task::new(cargo())
        .args(["check", "--workspace", "--exclude", NOT_COMPILED])
        .args(["--offline", "--target-dir"])
        .args([&workspace.target]);
    if check.run(&unpacked, BUILD_LIMIT)?.success {
        Ok(())
    } else {
        Err("a package does not compile; cargo's messages are above".into())
    }
}

/// A workspace of the unpacked packages, which find each other there and not in a registry. It
/// compiles as the repository's does.
fn manifest(version: &str) -> String {
    let mut manifest = String::from(
        "[workspace]\nresolver = \"3\"\nmembers = [\"*-*\"]\n\n\
         [profile.dev]\ndebug = \"line-tables-only\"\n\n\
         [profile.dev.package.\"*\"]\ndebug = false\n\n\
         [patch.crates-io]\n",
    );
    for name in PUBLISHED {
        manifest.push_str(&format!("{name}.path = \"{name}-{version}\"\n"));
    }
    manifest
}

/// The crates are of one version, and those that are published have a full description.
fn check_manifests(packages: &[serde_json::Value]) -> Outcome<()> {
    let name = |package: &serde_json::Value| package["name"].as_str().unwrap_or("").to_owned();
    // `publish = false` is an empty list of registries.
    let published = packages.iter().filter(|package| {
        package["publish"]
            .as_array()
            .is_none_or(|to| !to.is_empty())
    });
    let mut names: Vec<String> = published.clone().map(name).collect();
    names.sort();
    if names != PUBLISHED {
        return Err(format!(
            "cargo would publish {names:?}, and not {PUBLISHED:?}; say `publish = false` in the \
             others, or correct the list in xtask/src/packages.rs"
        ));
    }
    let version = &packages.first().ok_or("there are no packages")?["version"];
    if let Some(other) = packages.iter().find(|other| other["version"] != *version) {
        return Err(format!(
            "{} has not version {version}; use `version.workspace = true`",
            name(other)
        ));
    }
    for package in published {
        for field in ["description", "license", "readme", "keywords", "categories"] {
            let value = &package[field];
            if value.is_null() || value.as_array().is_some_and(Vec::is_empty) {
                return Err(format!("{} lacks {field} in its Cargo.toml", name(package)));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn packages() -> Vec<Value> {
        let full = |name: &str| {
            json!({ "name": name, "version": "1.0.0", "publish": null, "description": "d",
                    "license": "l", "readme": "r", "keywords": ["k"], "categories": ["c"] })
        };
        let mut packages: Vec<Value> = PUBLISHED.iter().map(|name| full(name)).collect();
        packages.push(json!({ "name": "fake", "version": "1.0.0", "publish": [] }));
        packages
    }

    #[test]
    fn a_crate_that_lacks_a_field_a_version_or_its_place_is_named() {
        assert_eq!(check_manifests(&packages()), Ok(()));
        let fake = PUBLISHED.len();
        for (index, field, value, expected) in [
            (0, "readme", Value::Null, "warpipe lacks readme"),
            (2, "keywords", json!([]), "warpipe-cli lacks keywords"),
            (fake, "version", json!("1.0.1"), "fake has not version"),
            (fake, "publish", Value::Null, "cargo would publish"),
            (2, "publish", json!([]), "cargo would publish"),
        ] {
            let mut packages = packages();
            packages[index][field] = value;
            let said = check_manifests(&packages).unwrap_err();
            assert!(said.contains(expected), "{said}");
        }
    }
}
