//! Which crates a registry gets, and that their packages are complete.

use std::fs;
use std::path::{Path, PathBuf};
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
/// The published crate that is not built from its package. Its 210 crates would be built a third
/// time, beside those for Clippy and for the tests. Its package is made and resolved, and a source
/// file that it lacks would have to lie outside `src/`, which its manifest includes whole.
const NOT_BUILT: &str = "warpipe-bridge";
const BUILD_LIMIT: Duration = Duration::from_secs(3600);

/// Packages every published crate and builds each but [`NOT_BUILT`] from its package alone, as
/// `cargo publish` does before an upload.
pub fn check(workspace: &Workspace) -> Outcome<()> {
    check_manifests(&workspace.packages()?)?;
    forget_unpacked(&registry_sources())?;
    // Nor does it build a package of a registry again: what an earlier dry run built would do.
    let target = workspace.target.join("publish");
    if target.exists() {
        fs::remove_dir_all(&target)
            .map_err(|error| format!("{} not removed: {error}", target.display()))?;
    }
    publish(workspace, &target, &["--no-verify".into()])?;
    // `warpipe-cli` names it as an optional dependency, so it has to be found, but is not compiled.
    let folder = workspace.root.join("crates").join(NOT_BUILT);
    let found = format!(
        "patch.crates-io.{NOT_BUILT}.path={:?}",
        folder.display().to_string()
    );
    let built = ["--exclude", NOT_BUILT, "--config", &found].map(String::from);
    publish(workspace, &target, &built)
}

fn publish(workspace: &Workspace, target: &Path, arguments: &[String]) -> Outcome<()> {
    let publish = Task::new(cargo())
        .args([
            "publish",
            "--workspace",
            "--dry-run",
            "--locked",
            // CI may run in a tree with changes.
            "--allow-dirty",
            "--target-dir",
        ])
        .args([target])
        .args(arguments);
    if publish.run(&workspace.root, BUILD_LIMIT)?.success {
        Ok(())
    } else {
        Err("cargo would not publish the packages; its messages are above".into())
    }
}

/// The folder in which cargo keeps the unpacked packages of every registry.
fn registry_sources() -> PathBuf {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(std::env::home_dir()?.join(".cargo")));
    home.unwrap_or_default().join("registry/src")
}

/// Removes what earlier dry runs unpacked. For a dry run cargo makes a registry of the folder
/// `target/package`, which has no host and so a name that begins with `-`, and it does not unpack a
/// package again that has the same version.
fn forget_unpacked(sources: &Path) -> Outcome<()> {
    let Ok(registries) = fs::read_dir(sources) else {
        return Ok(());
    };
    let local = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with('-');
    for registry in registries.flatten().filter(local) {
        for package in fs::read_dir(registry.path())
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = package.file_name().to_string_lossy().into_owned();
            let is_ours = name
                .rsplit_once('-')
                .is_some_and(|(name, _)| PUBLISHED.contains(&name));
            if is_ours {
                fs::remove_dir_all(package.path()).map_err(|error| {
                    format!("{} not removed: {error}", package.path().display())
                })?;
            }
        }
    }
    Ok(())
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
    fn packages_of_an_earlier_dry_run_are_removed_and_those_of_registries_stay() {
        let sources = std::env::temp_dir().join(format!("warpipe-unpacked-{}", std::process::id()));
        let folders = [
            "-7d/warpipe-0.1.0",
            "-7d/warp-0.1.0",
            "index.io-1/warpipe-0.1.0",
        ];
        for folder in folders {
            fs::create_dir_all(sources.join(folder)).unwrap();
        }
        forget_unpacked(&sources).unwrap();
        let left = folders.map(|folder| sources.join(folder).exists());
        fs::remove_dir_all(&sources).unwrap();
        assert_eq!(left, [false, true, true]);
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
