//! The commands of the pages are commands of the program.

use std::path::{Path, PathBuf};

use crate::support::World;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The lines of a page that run `warpipe`, without what stands before its arguments.
fn commands(page: &str) -> Vec<String> {
    let runs = ["$ warpipe ", "$ cargo run --release -- "];
    let arguments = |line: &str| {
        let line = line.split(" # ").next().unwrap_or(line);
        runs.iter()
            .find_map(|run| line.strip_prefix(run))
            .map(str::to_owned)
    };
    page.lines().filter_map(arguments).collect()
}

fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

#[test]
fn every_command_of_the_pages_and_each_of_its_options_exists() {
    let mut files = vec![root().join("README.md"), root().join("CONTRIBUTING.md")];
    pages(&root().join("docs"), &mut files);
    let world = World::new();
    let mut seen = 0;
    for file in files {
        for command in commands(&std::fs::read_to_string(&file).unwrap()) {
            let words: Vec<&str> = command.split_whitespace().collect();
            if words[0] == "bridge" && cfg!(not(feature = "bridge")) {
                continue;
            }
            // The options of a subcommand of a subcommand are in its own help.
            let depth = if words[0] == "weights" { 2 } else { 1 };
            let help = world.run(&[&words[..depth], &["--help"]].concat());
            assert_eq!(help.code, Some(0), "{}: {command}", file.display());
            for option in words.iter().filter(|word| word.starts_with("--")) {
                assert!(
                    help.out.contains(option),
                    "{}: `{command}`: there is no {option}",
                    file.display()
                );
            }
            seen += 1;
        }
    }
    assert!(seen >= 5, "the README's commands were found: {seen}");
}
