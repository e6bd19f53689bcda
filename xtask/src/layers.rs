//! The library's modules form layers, and a module uses its own layer and those below it. The table
//! is the block of ARCHITECTURE.md that begins with `error`. Inside a module there are no
//! [`circles`].

mod circles;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::Outcome;
use crate::style::is_test_module;
use crate::workspace::Workspace;

/// The modules of the crate's root that lie beside the layers: the root itself, tests, and what
/// reads all layers.
const BESIDE: &[&str] = &["lib", "hostile", "fuzzing", "interop_cudarc"];

/// What names that the root exports are counted as: they hide the module that is used.
const ROOT: &str = "lib";

/// The line of a layer in which no module uses another ends so.
const SEPARATE: &str = "(separate)";

/// The pure files: words in memory, and books. Time, links and devices are arguments there. They use
/// each other, the lowest layer, and [`MEMORY`].
const PURE: &[&str] = &[
    "atomic",
    "backend/cuda/shutdown_gate/entrances",
    "backend/word",
    "memory/free_ranges",
    "pool/last_writers",
    "pubsub/entry",
    "pubsub/publisher_link/monitor",
    "pubsub/ring",
    "queue/job_table",
    "queue/wire",
    "queue/worker_leases",
    "rings/host_ring",
    "rings/layout",
    "sync/semaphore/page",
];

/// Mapped memory, which holds the words.
const MEMORY: &[&str] = &["shm/fence_words", "shm/page", "shm/segment"];

/// Checks every file of the library against the table.
///
/// # Errors
/// An upward use, a circle, a pure file that uses others, or a module without a layer.
pub fn check(workspace: &Workspace) -> Outcome<()> {
    let map = workspace.root.join("ARCHITECTURE.md");
    let map = fs::read_to_string(&map).map_err(|error| format!("ARCHITECTURE.md: {error}"))?;
    let layers = Layers::parse(&map)?;
    let library = workspace.root.join("crates/warpipe/src");
    let mut found = BTreeSet::new();
    let mut modules = circles::Modules::default();
    for path in workspace.sources("rs")? {
        let Ok(file) = path.strip_prefix(&library) else {
            continue;
        };
        let of = module_of(file);
        if BESIDE.contains(&of.as_str()) || is_for_tests(&path, &library) {
            continue;
        }
        let text = fs::read_to_string(&path)
            .map_err(|error| format!("{} not read: {error}", path.display()))?;
        modules.add(&file.with_extension("").display().to_string(), &text);
        let file = file.display().to_string();
        for used in uses(&text) {
            if !layers.allow(&of, &used)? {
                found.insert(format!("{file} -> {used}"));
            }
        }
    }
    println!("modules in layers: {}", layers.0.len());
    if !found.is_empty() {
        let found: Vec<_> = found.into_iter().collect();
        return Err(format!("upward uses: {}", found.join(", ")));
    }
    let impure = impure(&layers, &modules)?;
    println!("uses of pure files: {} not pure", impure.len());
    if !impure.is_empty() {
        return Err(format!("not pure: {}", impure.join(", ")));
    }
    let circles = modules.circles();
    println!("circles of files: {}", circles.len());
    if !circles.is_empty() {
        return Err(format!("circles: {}", circles.join("; ")));
    }
    Ok(())
}

/// What the pure files use and may not.
fn impure(layers: &Layers, modules: &circles::Modules) -> Outcome<Vec<String>> {
    let mut found = Vec::new();
    for pure in PURE {
        let used = modules.used_by(pure);
        for used in used.ok_or_else(|| format!("{pure}: no such file"))? {
            let root = used.split('/').next().unwrap_or_default();
            let is_lowest = layers.0.get(root).is_some_and(|(height, _)| *height == 0);
            let is_pure = PURE.contains(&used.as_str()) || MEMORY.contains(&used.as_str());
            let is_around = pure.starts_with(&format!("{used}/"));
            if !is_lowest && !is_pure && !is_around {
                found.push(format!("{pure} -> {used}"));
            }
        }
    }
    Ok(found)
}

/// The table of ARCHITECTURE.md: each module's layer, from the bottom, and whether its neighbours
/// there are closed to it.
struct Layers(BTreeMap<String, (usize, bool)>);

impl Layers {
    fn parse(map: &str) -> Outcome<Layers> {
        let mut blocks = map.split("```text\n").skip(1);
        let table = blocks
            .find(|block| block.starts_with("error "))
            .ok_or("ARCHITECTURE.md has no block of layers that begins with `error`")?;
        let mut layers = BTreeMap::new();
        let lines = table.lines().take_while(|line| *line != "```");
        for (height, line) in lines.enumerate() {
            let (modules, is_separate) = match line.split_once(SEPARATE) {
                Some((modules, _)) => (modules, true),
                None => (line, false),
            };
            for module in modules.split_whitespace() {
                layers.insert(module.to_owned(), (height, is_separate));
            }
        }
        Ok(Layers(layers))
    }

    /// Whether a module may use another.
    fn allow(&self, of: &str, used: &str) -> Outcome<bool> {
        if of == used || used == ROOT {
            return Ok(of == used);
        }
        let layer = |module: &str| {
            let layer = self.0.get(module).copied();
            layer.ok_or_else(|| format!("the module `{module}` has no layer in ARCHITECTURE.md"))
        };
        let (own, is_separate) = layer(of)?;
        let (other, _) = layer(used)?;
        Ok(other < own || other == own && !is_separate)
    }
}

/// The root's module that a file belongs to.
fn module_of(file: &Path) -> String {
    let first = file.iter().next().unwrap_or_default().to_string_lossy();
    first.trim_end_matches(".rs").to_owned()
}

/// Whether the file, or a folder it lies in, is a module for tests alone.
fn is_for_tests(path: &Path, library: &Path) -> bool {
    let inside = |path: &&Path| path.starts_with(library) && *path != library;
    path.ancestors().take_while(inside).any(is_test_module)
}

/// The modules of the root that a file's production code names by `crate::`. A name of the root's
/// own (a type that it exports) counts as a use of the root, which no layer may use.
fn uses(text: &str) -> BTreeSet<String> {
    let code = production(text);
    let mut found = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        let names: Vec<&str> = match rest.strip_prefix('{') {
            Some(group) => heads(group),
            None => vec![rest],
        };
        for name in names {
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_');
            let name = &name[..end.unwrap_or(name.len())];
            let is_module = name.starts_with(|c: char| c.is_lowercase());
            if !name.is_empty() {
                found.insert(if is_module { name } else { ROOT }.to_owned());
            }
        }
    }
    found
}

/// The beginnings of a group's members: `a::b, c` of `a::b, c}`.
fn heads(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut heads) = (0, 0, Vec::new());
    for (index, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                heads.push(group[start..index].trim());
                start = index + 1;
                if character == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    heads
}

/// What begins an item of tests, or of the models in `verify/`.
const OTHERS: &[&str] = &[
    "#[cfg(test)]",
    "#[cfg(any(test",
    "#[cfg(loom)]",
    "#[cfg(all(loom",
];

/// The text without comments and without the items of [`OTHERS`].
fn production(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let item = line.trim_start();
        if OTHERS.iter().any(|other| item.starts_with(other)) {
            skip_item(&mut lines, line.len() - item.len());
            continue;
        }
        code.push_str(line.split("//").next().unwrap_or(line));
        code.push('\n');
    }
    code
}

/// Skips the item that follows an attribute: to the line that closes it at the attribute's
/// indentation, as rustfmt writes it.
fn skip_item<'a>(lines: &mut impl Iterator<Item = &'a str>, indentation: usize) {
    for line in lines {
        let item = line.trim_start();
        let closes = item.starts_with('}') || item.ends_with(';') || item.ends_with("{}");
        let ends = closes || item.ends_with(',');
        if line.len() - item.len() == indentation && ends && !item.starts_with("#[") {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "```text\nerror fork\nbackend\nsync pool (separate)\n```\n";

    #[test]
    fn a_module_uses_its_own_layer_and_those_below_it() {
        let layers = Layers::parse(MAP).unwrap();
        assert!(layers.allow("backend", "fork").unwrap());
        assert!(layers.allow("fork", "error").unwrap());
        assert!(!layers.allow("error", "backend").unwrap());
    }

    #[test]
    fn the_modules_of_a_separate_layer_do_not_use_each_other() {
        let layers = Layers::parse(MAP).unwrap();
        assert!(!layers.allow("sync", "pool").unwrap());
        assert!(layers.allow("sync", "sync").unwrap());
    }

    #[test]
    fn a_module_without_a_layer_is_an_error() {
        let layers = Layers::parse(MAP).unwrap();
        assert!(layers.allow("queue", "error").is_err());
    }

    #[test]
    fn uses_are_found_in_imports_paths_and_groups() {
        let text = "use crate::a::B;\nuse crate::{c::{D, E}, f};\nfn g() { crate::h::i() }\n";
        let found: Vec<_> = uses(text).into_iter().collect();
        assert_eq!(found, ["a", "c", "f", "h"]);
    }

    #[test]
    fn a_name_of_the_root_is_a_use_of_the_root() {
        assert_eq!(
            uses("use crate::Publisher;")
                .into_iter()
                .collect::<Vec<_>>(),
            ["lib"]
        );
    }

    #[test]
    fn comments_and_tests_are_no_uses() {
        let text = "// crate::a\n#[cfg(test)]\nuse crate::b::C;\n#[cfg(test)]\nmod tests {\n    \
            use crate::d::E;\n}\nuse crate::f::G;\n";
        assert_eq!(uses(text).into_iter().collect::<Vec<_>>(), ["f"]);
    }

    #[test]
    fn a_file_belongs_to_the_first_part_of_its_path() {
        assert_eq!(module_of(Path::new("ipc/server/accept.rs")), "ipc");
        assert_eq!(module_of(Path::new("stream.rs")), "stream");
    }
}
