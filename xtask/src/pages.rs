//! The Markdown pages: every relative link and anchor resolves, the book lists every page of
//! `docs/`, and a test compiles or runs every snippet. `cargo xtask book` makes the book.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use crate::Outcome;
use crate::process::Task;
use crate::workspace::{Workspace, cargo};

/// Pages, and folders of pages.
const PAGES: &[&str] = &[
    "ARCHITECTURE.md",
    "BENCHMARKS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "crates",
    "docs",
    "examples",
    "results",
];
const SUMMARY: &str = "docs/SUMMARY.md";
/// The crate of which the doc tests include pages.
const DOC_TESTS: &str = "crates/warpipe/src";
/// Runs or type-checks the Python snippets of the README, of `docs/` and of its own package.
const PYTHON_PAGES: &[&str] = &["README.md", "docs/", "crates/warpipe-python/README.md"];

/// Without `serve` and `watch`, which bring a web server.
const MDBOOK: &[&str] = &[
    "install",
    "mdbook",
    "--version",
    "0.5.4",
    "--locked",
    "--no-default-features",
    "--features",
    "search",
    "--root",
];
const INSTALL_LIMIT: Duration = Duration::from_secs(3600);
const BOOK_LIMIT: Duration = Duration::from_secs(300);

/// Compiles the snippets in C and C++ of these pages.
const C_PAGES: &str = "docs/";

/// A fenced block.
struct Snippet {
    line: usize,
    info: String,
    text: String,
}

impl Snippet {
    fn language(&self) -> &str {
        self.info.split([',', ' ']).next().unwrap_or_default()
    }
}

/// A snippet in C or C++, for the compiler.
pub struct CSnippet {
    /// Page and line.
    pub place: String,
    pub is_cpp: bool,
    pub text: String,
}

/// All snippets in C and C++.
pub fn c_snippets(workspace: &Workspace) -> Outcome<Vec<CSnippet>> {
    let mut found = Vec::new();
    for path in workspace.pages(&[C_PAGES])? {
        let text = fs::read_to_string(&path)
            .map_err(|error| format!("{} not read: {error}", path.display()))?;
        let name = workspace.show(&path).to_string();
        for snippet in parse(&text).snippets {
            let is_cpp = snippet.language() == "cpp";
            if is_cpp || snippet.language() == "c" {
                found.push(CSnippet {
                    place: format!("{name}:{}", snippet.line),
                    is_cpp,
                    text: snippet.text,
                });
            }
        }
    }
    Ok(found)
}

/// The parts of a page that are checked.
struct Page {
    anchors: BTreeSet<String>,
    /// With the line.
    links: Vec<(usize, String)>,
    snippets: Vec<Snippet>,
}

/// An error that lists all faults of all pages.
pub fn check(workspace: &Workspace) -> Outcome<()> {
    let mut pages = BTreeMap::new();
    for path in workspace.pages(PAGES)? {
        let text = fs::read_to_string(&path)
            .map_err(|error| format!("{} not read: {error}", path.display()))?;
        pages.insert(path, parse(&text));
    }
    let mut doc_tests = String::new();
    for path in workspace.sources("rs")? {
        if path.starts_with(workspace.root.join(DOC_TESTS)) {
            doc_tests += &fs::read_to_string(&path)
                .map_err(|error| format!("{} not read: {error}", path.display()))?;
        }
    }
    let mut faults = Vec::new();
    for (path, page) in &pages {
        let name = workspace.show(path).to_string();
        for (line, link) in &page.links {
            if let Err(fault) = follow(path, link, &pages) {
                faults.push(format!("{name}:{line}: {fault}"));
            }
        }
        for snippet in &page.snippets {
            if let Err(fault) = tested(&name, snippet, &doc_tests) {
                faults.push(format!("{name}:{}: {fault}", snippet.line));
            }
        }
    }
    faults.extend(not_in_the_book(workspace, &pages));
    if faults.is_empty() {
        return Ok(());
    }
    Err(faults.join("\n"))
}

fn parse(text: &str) -> Page {
    let mut page = Page {
        anchors: BTreeSet::new(),
        links: Vec::new(),
        snippets: Vec::new(),
    };
    let line_of = |offset: usize| text[..offset].matches('\n').count() + 1;
    let (mut heading, mut snippet) = (None::<String>, None::<Snippet>);
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let slug = slug(&heading.take().unwrap_or_default());
                let numbered = (1..).map(|number| format!("{slug}-{number}"));
                let mut names = std::iter::once(slug.clone()).chain(numbered);
                let free = names.find(|name| !page.anchors.contains(name));
                page.anchors.extend(free);
            }
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                page.links
                    .push((line_of(range.start), dest_url.into_string()));
            }
            Event::Start(Tag::CodeBlock(kind)) => {
                let info = match kind {
                    CodeBlockKind::Fenced(info) => info.into_string(),
                    CodeBlockKind::Indented => String::new(),
                };
                snippet = Some(Snippet {
                    line: line_of(range.start),
                    info,
                    text: String::new(),
                });
            }
            Event::End(TagEnd::CodeBlock) => page.snippets.extend(snippet.take()),
            Event::Text(part) | Event::Code(part) => {
                if let Some(snippet) = &mut snippet {
                    snippet.text += &part;
                } else if let Some(heading) = &mut heading {
                    *heading += &part;
                }
            }
            _ => {}
        }
    }
    page
}

/// A heading's anchor, as the forges and mdBook make it.
fn slug(heading: &str) -> String {
    let kept = heading.chars().filter_map(|character| match character {
        ' ' => Some('-'),
        '-' | '_' => Some(character),
        _ if character.is_alphanumeric() => Some(character.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}

/// Whether a link of the page `from` leads to a file that is there, and to an anchor in it.
fn follow(from: &Path, link: &str, pages: &BTreeMap<PathBuf, Page>) -> Outcome<()> {
    if link.contains("://") || link.starts_with("mailto:") {
        return Ok(());
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = match path {
        "" => from.to_owned(),
        _ => plain(&from.parent().unwrap_or(from).join(path)),
    };
    if !target.exists() {
        return Err(format!("the link {link} leads to no file"));
    }
    match pages.get(&target) {
        Some(page) if !anchor.is_empty() && !page.anchors.contains(anchor) => {
            Err(format!("the link {link} leads to no heading"))
        }
        _ => Ok(()),
    }
}

/// A path without `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(plain.pop()),
            component => plain.push(component),
        }
    }
    plain
}

/// Whether a test compiles, runs or checks a snippet; `text` is for diagrams and output.
fn tested(name: &str, snippet: &Snippet, doc_tests: &str) -> Outcome<()> {
    match snippet.language() {
        "text" => Ok(()),
        "console" => commands_exist(&snippet.text),
        "rust" if doc_tests.contains(&format!("/{name}\")]")) => Ok(()),
        "rust" => Err(format!(
            "no test runs this snippet; include the page in {DOC_TESTS}/lib.rs"
        )),
        "python" if PYTHON_PAGES.iter().any(|page| name.starts_with(page)) => Ok(()),
        "python" => Err("no test runs this snippet: see tests/test_pages.py of the package".into()),
        // `c::check_snippets` compiles them.
        "c" | "cpp" if name.starts_with(C_PAGES) => Ok(()),
        other => Err(format!(
            "a block is rust, python, c, cpp, console or text, and not '{other}'"
        )),
    }
}

/// The commands of this program; `crates/warpipe-cli/tests/pages.rs` looks at those of `warpipe`.
fn commands_exist(text: &str) -> Outcome<()> {
    for line in text.lines() {
        let Some((_, command)) = line.split_once("cargo xtask ") else {
            continue;
        };
        let name = command.split_whitespace().next().unwrap_or_default();
        if !crate::USAGE.contains(&format!("\n  {name} ")) {
            return Err(format!("there is no `cargo xtask {name}`"));
        }
    }
    Ok(())
}

/// The pages of `docs/` that the table of contents leaves out.
fn not_in_the_book(workspace: &Workspace, pages: &BTreeMap<PathBuf, Page>) -> Vec<String> {
    let (summary, docs) = (workspace.root.join(SUMMARY), workspace.root.join("docs"));
    let Some(contents) = pages.get(&summary) else {
        return vec![format!("{SUMMARY} is missing")];
    };
    let listed: BTreeSet<PathBuf> = contents
        .links
        .iter()
        .map(|(_, link)| plain(&docs.join(link)))
        .collect();
    pages
        .keys()
        .filter(|path| path.starts_with(&docs) && **path != summary && !listed.contains(*path))
        .map(|path| format!("{SUMMARY} does not list {}", workspace.show(path)))
        .collect()
}

/// Makes the book in `target/book/`. Its source is a copy of all files that git knows, so that the
/// links between pages, pictures and sources lead to the same files as on a forge.
pub fn book(workspace: &Workspace) -> Outcome<()> {
    let tool = installed(workspace)?;
    let source = workspace.target.join("book-source");
    let _ = fs::remove_dir_all(&source);
    for file in tracked(workspace)? {
        let to = source.join(&file);
        fs::create_dir_all(to.parent().unwrap_or(&source))
            .and_then(|()| fs::copy(workspace.root.join(&file), &to))
            .map_err(|error| format!("{} not copied: {error}", to.display()))?;
    }
    let summary = fs::read_to_string(workspace.root.join(SUMMARY))
        .map_err(|error| format!("{SUMMARY} not read: {error}"))?;
    let summary = summary.replace("](", "](docs/").replace("](docs/../", "](");
    // The default preprocessors would rename each README.md to index.html.
    let book = "[book]\ntitle = \"warpipe\"\nsrc = \".\"\n[build]\nbuild-dir = \"../book\"\n\
                use-default-preprocessors = false\n";
    for (name, text) in [("SUMMARY.md", summary.as_str()), ("book.toml", book)] {
        fs::write(source.join(name), text)
            .map_err(|error| format!("{name} not written: {error}"))?;
    }
    let build = Task::new(tool).args(["build"]).args([&source]);
    if !build.run(&workspace.root, BOOK_LIMIT)?.success {
        return Err("mdbook made no book; its words are above".into());
    }
    println!("{}", workspace.target.join("book/index.html").display());
    Ok(())
}

/// mdBook in `target/book-tool/`, built once.
fn installed(workspace: &Workspace) -> Outcome<PathBuf> {
    let root = workspace.target.join("book-tool");
    let tool = root.join("bin/mdbook");
    if !tool.exists() {
        let install = Task::new(cargo())
            .args(MDBOOK.iter().copied())
            .args([&root]);
        if !install.run(&workspace.root, INSTALL_LIMIT)?.success {
            return Err("cargo did not install mdbook; its words are above".into());
        }
    }
    Ok(tool)
}

fn tracked(workspace: &Workspace) -> Outcome<Vec<PathBuf>> {
    let output = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(&workspace.root)
        .output()
        .map_err(|error| format!("git did not start: {error}"))?;
    let names = String::from_utf8_lossy(&output.stdout);
    let files = names.split('\0').filter(|name| !name.is_empty());
    // A file that git knows may be gone from the tree.
    Ok(files
        .map(PathBuf::from)
        .filter(|file| workspace.root.join(file).is_file())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_have_the_anchors_of_the_forges() {
        let page = parse("# A `Queue`: jobs, done once\n## Same\n## Same\n");
        let anchors: Vec<&str> = page.anchors.iter().map(String::as_str).collect();
        assert_eq!(anchors, ["a-queue-jobs-done-once", "same", "same-1"]);
    }

    #[test]
    fn a_link_to_a_missing_file_or_heading_is_found() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let pages = BTreeMap::from([(here.clone(), parse("# There\n"))]);
        assert!(follow(&here, "src/main.rs", &pages).is_ok());
        assert!(follow(&here, "../xtask/Cargo.toml#there", &pages).is_ok());
        assert!(follow(&here, "#elsewhere", &pages).is_err());
        assert!(follow(&here, "src/nothing.rs", &pages).is_err());
        assert!(follow(&here, "https://example.org/nothing", &pages).is_ok());
    }

    #[test]
    fn a_snippet_that_no_test_runs_is_found() {
        let page =
            parse("```rust,no_run\na\n```\n```go\na\n```\n```console\n$ cargo xtask no\n```\n");
        let is_tested = |page: &Page, doc_tests: &str| -> Vec<bool> {
            let snippets = page.snippets.iter();
            snippets
                .map(|snippet| tested("docs/x.md", snippet, doc_tests).is_ok())
                .collect()
        };
        let doc_tests = "#[doc = include_str!(\"../../../docs/x.md\")]";
        assert_eq!(is_tested(&page, doc_tests), [true, false, false]);
        assert_eq!(is_tested(&page, ""), [false, false, false]);
        let page = parse(
            "```text\na\n```\n```console\n$ cargo xtask test --long\n```\n```python\na\n```\n",
        );
        assert_eq!(is_tested(&page, ""), [true, true, true]);
    }
}
