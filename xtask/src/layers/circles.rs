//! Circles among the files of a module. A file and the folder of its name are one part, since a
//! folder holds the pieces of its file. The parts of one folder use each other without circles.

use std::collections::{BTreeMap, BTreeSet};

use super::production;

/// A module's path from the root, and the path of what it names.
type ModulePath = Vec<String>;

/// The library's modules: the production code of each, and the names that it imports.
#[derive(Default)]
pub(super) struct Modules(BTreeMap<ModulePath, Module>);

#[derive(Default)]
struct Module {
    /// The paths that the module's code names.
    named: BTreeSet<ModulePath>,
    /// The paths that its imports lead to, by the names that they get here.
    imports: BTreeMap<String, ModulePath>,
    /// The paths of its re-exports, which are no uses of its own.
    exported: BTreeSet<ModulePath>,
}

/// Which part uses which other one of the same folder, and a name that it uses.
type Uses = BTreeMap<String, BTreeMap<String, String>>;

impl Modules {
    /// Adds the module of the file at `path` (from the folder of the root, without its extension).
    pub(super) fn add(&mut self, path: &str, text: &str) {
        let mut at: ModulePath = path.split('/').map(str::to_owned).collect();
        at.pop_if(|last| last == "mod" || last == "lib");
        let code = production(text);
        let mut module = Module::default();
        let mut rest = String::new();
        for statement in code.split_inclusive(';') {
            match import(statement) {
                Some((before, tree, is_export)) => {
                    rest.push_str(before);
                    let mut leaves = Vec::new();
                    expand(tree, &[], &mut leaves);
                    for (path, name) in leaves {
                        if is_export {
                            module.exported.insert(path.clone());
                        } else {
                            module.named.insert(path.clone());
                        }
                        module.imports.insert(name, path);
                    }
                }
                None => rest.push_str(statement),
            }
        }
        let is_path = |character: char| character.is_alphanumeric() || "_:".contains(character);
        let paths = rest.split(|character| !is_path(character));
        let paths = paths.filter(|path| path.contains("::"));
        module
            .named
            .extend(paths.map(|path| path.split("::").map(str::to_owned).collect()));
        self.0.insert(at, module);
    }

    /// The modules that the one at `path` names.
    pub(super) fn used_by(&self, path: &str) -> Option<BTreeSet<String>> {
        let at: ModulePath = path.split('/').map(str::to_owned).collect();
        let named = self.0.get(&at)?.named.iter();
        let used = named.filter_map(|name| self.resolve(&at, name, 0));
        Some(used.map(|used| used.join("/")).collect())
    }

    /// The circles, one line for each folder that has one: the parts in it, and what they use.
    pub(super) fn circles(&self) -> Vec<String> {
        let mut folders: BTreeMap<&[String], Uses> = BTreeMap::new();
        for (at, module) in &self.0 {
            for path in &module.named {
                let Some(used) = self.resolve(at, path, 0) else {
                    continue;
                };
                let common = at.iter().zip(&used).take_while(|(a, b)| a == b).count();
                // The root's modules are in layers.
                if common == 0 || common == at.len() || common == used.len() {
                    continue;
                }
                let uses = folders.entry(&at[..common]).or_default();
                let parts = uses.entry(at[common].clone()).or_default();
                let name = path.join("::");
                parts.entry(used[common].clone()).or_insert(name);
            }
        }
        let circles = folders.into_iter().filter_map(|(folder, uses)| {
            let circle = circle(uses);
            (!circle.is_empty()).then(|| format!("{}: {}", folder.join("/"), circle.join(", ")))
        });
        circles.collect()
    }

    /// The module that a path named in the module `at` leads to, through the re-exports of others.
    fn resolve(&self, at: &[String], path: &[String], depth: usize) -> Option<ModulePath> {
        const DEPTH_MAX: usize = 8;
        let (mut module, mut rest) = match path.first()?.as_str() {
            "crate" => (Vec::new(), &path[1..]),
            "self" => (at.to_vec(), &path[1..]),
            "super" => {
                let ups = path.iter().take_while(|part| *part == "super").count();
                (at[..at.len().checked_sub(ups)?].to_vec(), &path[ups..])
            }
            child => {
                let is_child = self.0.contains_key(&[at, &[child.to_owned()]].concat());
                if !is_child {
                    return None;
                }
                (at.to_vec(), path)
            }
        };
        while let Some((name, after)) = rest.split_first() {
            let child = [&module[..], std::slice::from_ref(name)].concat();
            if self.0.contains_key(&child) {
                (module, rest) = (child, after);
                continue;
            }
            let imported = self
                .0
                .get(&module)
                .and_then(|known| known.imports.get(name));
            let imported = imported.filter(|_| depth < DEPTH_MAX);
            let found = imported.and_then(|path| self.resolve(&module, path, depth + 1));
            return Some(found.unwrap_or(module));
        }
        Some(module)
    }
}

/// The uses that lie on circles, or between two of them.
fn circle(mut uses: Uses) -> Vec<String> {
    loop {
        let used: BTreeSet<String> = uses
            .values()
            .flat_map(|used| used.keys().cloned())
            .collect();
        let count: usize = uses.values().map(BTreeMap::len).sum();
        let parts: BTreeSet<String> = uses.keys().cloned().collect();
        uses.retain(|part, _| used.contains(part));
        for used in uses.values_mut() {
            used.retain(|part, _| parts.contains(part));
        }
        uses.retain(|_, used| !used.is_empty());
        if count == uses.values().map(BTreeMap::len).sum::<usize>() {
            break;
        }
    }
    let all = uses.iter().flat_map(|(part, used)| {
        used.iter()
            .map(move |(other, name)| format!("{part} -> {other} ({name})"))
    });
    all.collect()
}

/// The text before an import, its tree, and whether it is a re-export.
fn import(statement: &str) -> Option<(&str, &str, bool)> {
    let at = match statement.find("\nuse ").map(|at| at + 1) {
        Some(at) => at,
        None if statement.starts_with("use ") => 0,
        None => {
            let at = statement.find("use ")?;
            let line = statement[..at].rfind('\n').map_or(0, |line| line + 1);
            let visibility = statement[line..at].trim();
            let is_import = visibility.is_empty() || visibility.starts_with("pub");
            return is_import.then(|| {
                let tree = statement[at + "use ".len()..].trim_end_matches(';');
                (&statement[..line], tree, !visibility.is_empty())
            });
        }
    };
    let tree = statement[at + "use ".len()..].trim_end_matches(';');
    Some((&statement[..at], tree, false))
}

/// The paths of an import's tree, each with the name that it gets.
fn expand(tree: &str, before: &[String], leaves: &mut Vec<(ModulePath, String)>) {
    let tree = tree.trim();
    if let Some(group) = tree.strip_prefix('{') {
        super::heads(group)
            .into_iter()
            .for_each(|member| expand(member, before, leaves));
        return;
    }
    if let Some((head, rest)) = tree.split_once("::")
        && head
            .chars()
            .all(|character| character.is_alphanumeric() || character == '_')
    {
        return expand(rest, &[before, &[head.to_owned()]].concat(), leaves);
    }
    let (name, alias) = tree.split_once(" as ").unwrap_or((tree, tree));
    if name.is_empty() {
        return;
    }
    let path = match name {
        "self" => before.to_vec(),
        name => [before, &[name.to_owned()]].concat(),
    };
    let own = path.last().cloned().unwrap_or_default();
    let alias = if alias == "self" {
        own
    } else {
        alias.to_owned()
    };
    leaves.push((path, alias));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        let mut modules = Modules::default();
        files
            .iter()
            .for_each(|(path, text)| modules.add(path, text));
        modules.circles()
    }

    #[test]
    fn two_files_of_a_folder_that_use_each_other_are_a_circle() {
        let found = circles(&[
            ("m/mod", "mod a;\nmod b;\n"),
            ("m/a", "use super::b::B;\n"),
            ("m/b", "fn f() { super::a::g() }\n"),
        ]);
        assert_eq!(found, ["m: a -> b (super::b::B), b -> a (super::a::g)"]);
    }

    #[test]
    fn a_circle_over_a_re_export_and_one_over_a_nested_file_are_found() {
        let export = [
            ("m/mod", "mod a;\nmod b;\npub use a::A;\n"),
            ("m/a", "use crate::m::{b::{self, B}, c};\n"),
            ("m/b", "use super::A;\n"),
        ];
        assert_eq!(circles(&export).len(), 1);
        let nested = [
            ("m/a", "mod x;\n"),
            ("m/a/x", "use super::super::b::B;\n"),
            ("m/b", "use super::a::A;\n"),
        ];
        assert_eq!(circles(&nested).len(), 1);
    }

    #[test]
    fn a_file_and_its_folder_are_one_part_and_uses_in_one_direction_are_no_circle() {
        let found = circles(&[
            ("m/a", "mod x;\nuse self::x::X;\nuse super::b::B;\n"),
            ("m/a/x", "use super::A;\n"),
            (
                "m/b",
                "use super::c::C;\n#[cfg(test)]\nmod tests {\n    use super::super::a::A;\n}\n",
            ),
            ("m/c", "// super::a::A\n"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }
}
