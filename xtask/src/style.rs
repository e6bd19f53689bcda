//! Facts about the sources that the project's rules name. A report, but for one rule that fails:
//! outside tests no module imports all names of its parent.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Outcome;
use crate::workspace::Workspace;

/// The longest file, and the longest line of new code.
const LINES_MAX: usize = 600;
const COLUMNS_MAX: usize = 100;

/// Words that are for people and not for code.
const PERSONS: &[&str] = &["who", "whose", "whoever", "whom"];

/// Prints what is found.
///
/// # Errors
/// A glob import of a parent outside tests.
pub fn report(workspace: &Workspace) -> Outcome<()> {
    let (mut long_files, mut long_lines, mut persons, mut globs) =
        (Vec::new(), 0u64, 0u64, Vec::new());
    for path in sources(workspace)? {
        let text = fs::read_to_string(&path)
            .map_err(|error| format!("{} not read: {error}", path.display()))?;
        let count = text.lines().count();
        if count > LINES_MAX {
            long_files.push(format!("{} ({count})", workspace.show(&path)));
        }
        long_lines += text
            .lines()
            .filter(|line| line.chars().count() > COLUMNS_MAX)
            .count() as u64;
        persons += text.lines().filter(|line| speaks_of_persons(line)).count() as u64;
        if !is_test_module(&path) {
            globs.extend(globs_of(&text).map(|line| format!("{}:{line}", workspace.show(&path))));
        }
    }
    println!("files over {LINES_MAX} lines: {}", list(&long_files));
    println!("lines over {COLUMNS_MAX} columns: {long_lines}");
    println!("comments with who, whose or whoever: {persons}");
    println!("glob imports of a parent, outside tests: {}", list(&globs));
    if globs.is_empty() {
        Ok(())
    } else {
        Err("import a parent's names one by one: what a module needs is seen at its head".into())
    }
}

fn sources(workspace: &Workspace) -> Outcome<Vec<PathBuf>> {
    let mut sources = workspace.sources("rs")?;
    sources.extend(workspace.sources("py")?);
    Ok(sources)
}

fn list(found: &[String]) -> String {
    if found.is_empty() {
        "none".into()
    } else {
        format!("{}: {}", found.len(), found.join(", "))
    }
}

/// Whether a comment speaks of code as of a person.
fn speaks_of_persons(line: &str) -> bool {
    let Some((_, comment)) = line.split_once("//") else {
        return false;
    };
    let mut words = comment.split(|character: char| !character.is_alphabetic());
    words.any(|word| PERSONS.contains(&word.to_lowercase().as_str()))
}

/// Whether the file is a module that its parent declares for tests alone.
pub fn is_test_module(path: &Path) -> bool {
    let (Some(folder), Some(stem)) = (path.parent(), path.file_stem()) else {
        return false;
    };
    let parents = [
        folder.with_extension("rs"),
        folder.join("mod.rs"),
        folder.join("lib.rs"),
        folder.join("main.rs"),
    ];
    let declares = |parent: &PathBuf| {
        fs::read_to_string(parent)
            .is_ok_and(|text| declares_for_tests(&text, &stem.to_string_lossy()))
    };
    parents.iter().any(declares)
}

/// Whether a module's text declares `module` behind `#[cfg(test)]`.
fn declares_for_tests(text: &str, module: &str) -> bool {
    let mut is_for_tests = false;
    for line in text.lines().map(str::trim) {
        let item = line.strip_prefix("pub(crate) ").unwrap_or(line);
        if is_for_tests && item.strip_prefix("mod ") == Some(&format!("{module};")) {
            return true;
        }
        is_for_tests = line == "#[cfg(test)]" || is_for_tests && line.starts_with("#[");
    }
    false
}

/// The lines of a file's own `use super::*`. A module inside a file has its parent in sight.
fn globs_of(text: &str) -> impl Iterator<Item = usize> {
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| {
            line.starts_with("use super::*") || line.starts_with("use super::super::*")
        })
        .map(|(index, _)| index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_that_speaks_of_a_person_is_found() {
        assert!(speaks_of_persons("let a = 1; // Whoever asks."));
        assert!(!speaks_of_persons("let whose = 1; // the whole"));
    }

    #[test]
    fn a_module_is_for_tests_alone_if_its_parent_says_so() {
        let text = "mod a;\n#[cfg(test)]\n#[path = \"x.rs\"]\nmod b;\nmod c;\n";
        let found = ["a", "b", "c"].map(|module| declares_for_tests(text, module));
        assert_eq!(found, [false, true, false]);
    }

    #[test]
    fn a_files_glob_of_its_parent_is_found_and_that_of_a_module_inside_it_is_not() {
        let text = "use super::*;\n#[cfg(test)]\nmod tests {\n    use super::*;\n}";
        assert_eq!(globs_of(text).collect::<Vec<_>>(), [1]);
    }
}
