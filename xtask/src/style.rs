//! Facts about the sources that the project's rules name. A report: it fails nothing.

use std::fs;
use std::path::PathBuf;

use crate::Outcome;
use crate::workspace::Workspace;

/// The longest file, and the longest line of new code.
const LINES_MAX: usize = 600;
const COLUMNS_MAX: usize = 100;

/// Words that are for people and not for code.
const PERSONS: &[&str] = &["who", "whose", "whoever", "whom"];

/// Prints what is found.
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
        globs.extend(globs_of(&text).map(|line| format!("{}:{line}", workspace.show(&path))));
    }
    println!("files over {LINES_MAX} lines: {}", list(&long_files));
    println!("lines over {COLUMNS_MAX} columns: {long_lines}");
    println!("comments with who, whose or whoever: {persons}");
    println!("glob imports of a parent, outside tests: {}", list(&globs));
    Ok(())
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

/// The lines of `use super::*` that stand before the file's tests.
fn globs_of(text: &str) -> impl Iterator<Item = usize> {
    let code = text
        .lines()
        .enumerate()
        .take_while(|(_, line)| !line.starts_with("#[cfg(test)]"));
    code.filter(|(_, line)| line.trim_start().starts_with("use super::*"))
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
    fn a_glob_of_the_parent_is_found_outside_tests_alone() {
        let text = "use super::*;\n#[cfg(test)]\nmod tests {\n    use super::*;\n}";
        assert_eq!(globs_of(text).collect::<Vec<_>>(), [1]);
    }
}
