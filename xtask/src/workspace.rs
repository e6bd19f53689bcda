//! Where things are: the workspace's root and its target folder, as cargo says.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::Outcome;
use crate::process::Task;

/// Folders deeper than this are no part of a crate's sources.
const DEPTH_MAX: u32 = 16;
const UNPACK_LIMIT: Duration = Duration::from_secs(60);

/// The workspace that this program was built in.
pub struct Workspace {
    /// The folder of the root manifest.
    pub root: PathBuf,
    /// Where cargo builds.
    pub target: PathBuf,
    /// Whether the tests of all crates lie there, and with them the C libraries.
    pub has_tests: bool,
}

impl Workspace {
    /// Asks `cargo metadata`.
    pub fn find() -> Outcome<Workspace> {
        let said = metadata()?;
        let folder = |key: &str| {
            said[key]
                .as_str()
                .map(PathBuf::from)
                .ok_or_else(|| format!("cargo metadata does not say its {key}"))
        };
        Ok(Workspace {
            root: folder("workspace_root")?,
            target: folder("target_directory")?,
            has_tests: false,
        })
    }

    /// Every package of the workspace, as `cargo metadata` describes it.
    pub fn packages(&self) -> Outcome<Vec<serde_json::Value>> {
        match metadata()?["packages"].take() {
            serde_json::Value::Array(packages) => Ok(packages),
            _ => Err("cargo metadata does not list the packages".into()),
        }
    }

    /// Every file below `crates/` with a name that ends in `.extension`, sorted.
    pub fn sources(&self, extension: &str) -> Outcome<Vec<PathBuf>> {
        let mut found = Vec::new();
        collect(&self.root.join("crates"), extension, DEPTH_MAX, &mut found)?;
        found.sort();
        Ok(found)
    }

    /// The Markdown pages among `paths` and below them, sorted.
    pub fn pages(&self, paths: &[&str]) -> Outcome<Vec<PathBuf>> {
        let mut found = Vec::new();
        for path in paths.iter().map(|path| self.root.join(path)) {
            if path.is_dir() {
                collect(&path, "md", DEPTH_MAX, &mut found)?;
            } else {
                found.push(path);
            }
        }
        found.sort();
        Ok(found)
    }

    /// A path as people write it: relative to the root.
    pub fn show<'a>(&self, path: &'a Path) -> std::path::Display<'a> {
        path.strip_prefix(&self.root).unwrap_or(path).display()
    }

    /// Unpacks an archive of sources into a folder, with more `options` of `tar`. The files get the
    /// time of now: a packer gives every file one time, and with it cargo would take an older run's
    /// result for this one's.
    pub fn unpack(&self, archive: &Path, folder: &Path, options: &[&str]) -> Outcome<()> {
        let tar = Task::new("tar")
            .args(["--touch", "-xzf"])
            .args([archive])
            .args([Path::new("-C"), folder])
            .args(options.iter().copied());
        match tar.run(&self.root, UNPACK_LIMIT)?.success {
            true => Ok(()),
            false => Err(format!("{} cannot be unpacked", archive.display())),
        }
    }
}

fn metadata() -> Outcome<serde_json::Value> {
    let output = Command::new(cargo())
        .args([
            "metadata",
            "--no-deps",
            "--format-version=1",
            "--manifest-path",
        ])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .output()
        .map_err(|error| format!("cargo metadata did not start: {error}"))?;
    serde_json::from_slice(&output.stdout).map_err(|_| {
        format!(
            "cargo metadata failed: {}",
            String::from_utf8_lossy(&output.stderr)
        )
    })
}

/// The cargo that runs this program.
pub fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

fn collect(folder: &Path, extension: &str, depth: u32, found: &mut Vec<PathBuf>) -> Outcome<()> {
    let unreadable =
        |error: std::io::Error| format!("{} cannot be read: {error}", folder.display());
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(unreadable)?);
        if kind.is_dir() && depth > 0 && entry.file_name() != "target" {
            collect(&path, extension, depth - 1, found)?;
        } else if kind.is_file() && path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    Ok(())
}
