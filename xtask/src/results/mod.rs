//! `cargo xtask results`: makes BENCHMARKS.md, the README's figures and its picture from the
//! reports of one commit under `results/<gpu>/`.
//!
//! `results/` holds one such folder. Everything else lies in `results/history/`: measurements of
//! other commits that a design document cites.

mod deciding;
mod page;
mod picture;
mod quotes;
mod report;
mod targets;

use std::fs;
use std::path::{Path, PathBuf};

use crate::Outcome;
use crate::workspace::Workspace;
use report::{Kind, Reports, is_picture};

const HISTORY: &str = "history";
const PICTURE: &str = "round-trip.svg";

/// Pages for users: they quote no figure but what is made here.
const PAGES: &[&str] = &["README.md", "crates/warpipe-python/README.md", "docs"];
/// Design documents give the measurements that a decision was made on, each with its date.
const EVIDENCE: &str = "docs/design";

/// A file that is made from the reports.
struct Made {
    path: PathBuf,
    text: String,
}

/// Writes all that is made from the reports; with `from`, takes those in first.
pub fn write(workspace: &Workspace, from: Option<&Path>) -> Outcome<()> {
    if let Some(from) = from {
        take_in(workspace, from)?;
    }
    for Made { path, text } in made(workspace)? {
        fs::write(&path, text)
            .map_err(|error| format!("{} not written: {error}", path.display()))?;
        println!("{}", workspace.show(&path));
    }
    Ok(())
}

/// Prints every figure, with its floor, its target and its distribution.
pub fn print(workspace: &Workspace) -> Outcome<()> {
    print!("{}", page::page(&Reports::read(&current(workspace)?)?)?);
    Ok(())
}

/// An error if a made file differs from the reports, if they are of several commits, or if a page
/// for users quotes another figure.
pub fn check(workspace: &Workspace) -> Outcome<()> {
    for Made { path, text } in made(workspace)? {
        if read(&path)? != text {
            return Err(format!(
                "{} differs from the reports; run `cargo xtask results`",
                workspace.show(&path)
            ));
        }
    }
    for path in workspace.pages(PAGES)? {
        if !path.starts_with(workspace.root.join(EVIDENCE)) {
            let name = workspace.show(&path).to_string();
            quotes::check_no_other_figure(&name, &read(&path)?)?;
        }
    }
    Ok(())
}

fn made(workspace: &Workspace) -> Outcome<Vec<Made>> {
    let reports = Reports::read(&current(workspace)?)?;
    let readme = workspace.root.join("README.md");
    Ok(vec![
        Made {
            path: reports.folder.join(PICTURE),
            text: picture::svg(&reports)?,
        },
        Made {
            path: workspace.root.join("BENCHMARKS.md"),
            text: deciding::page(&reports, PICTURE)?,
        },
        Made {
            text: quotes::readme(&read(&readme)?, &reports, PICTURE)?,
            path: readme,
        },
    ])
}

/// The one folder of `results/` beside the history.
fn current(workspace: &Workspace) -> Outcome<PathBuf> {
    let mut folders = report::files(&workspace.root.join("results"))?;
    folders.retain(|path| path.is_dir() && !path.ends_with(HISTORY));
    match folders.as_slice() {
        [folder] => Ok(folder.clone()),
        _ => Err(format!(
            "results/ holds {} folders beside results/{HISTORY}/; keep the one of the latest \
             measurements",
            folders.len()
        )),
    }
}

/// Replaces the reports in `results/<gpu>/` by those in `from`.
fn take_in(workspace: &Workspace, from: &Path) -> Outcome<()> {
    let new = Reports::read(from)?;
    let name = folder_of(&new.head()?.gpu);
    if let Ok(old) = current(workspace) {
        fs::remove_dir_all(&old).map_err(|error| format!("{}: {error}", old.display()))?;
    }
    let folder = workspace.root.join("results").join(name);
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for path in report::files(from)? {
        if (Kind::of(&path).is_some() || is_picture(&path))
            && let Some(name) = path.file_name()
        {
            fs::copy(&path, folder.join(name))
                .map_err(|error| format!("{} not copied: {error}", path.display()))?;
        }
    }
    Ok(())
}

/// `NVIDIA H100 80GB HBM3` has its reports in `h100`.
fn folder_of(gpu: &str) -> String {
    let model = gpu.trim_start_matches("NVIDIA ").split(' ').next();
    model.unwrap_or_default().to_lowercase()
}

fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(|error| format!("{} not read: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_named_for_the_model_of_the_gpu() {
        assert_eq!(folder_of("NVIDIA H200"), "h200");
        assert_eq!(folder_of("NVIDIA H100 80GB HBM3"), "h100");
    }
}
