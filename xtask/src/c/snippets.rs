//! The snippets in C and C++ of the pages. A whole program, which has a `main`, is compiled and run
//! on the host device; any other one is compiled inside a function, where it finds a device, a
//! stream, and the two ends of a channel.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::{dist, tests};
use crate::Outcome;
use crate::counts::Counts;
use crate::pages::{self, CSnippet};
use crate::process::{Task, check_failed};
use crate::workspace::Workspace;

const LIMIT: Duration = Duration::from_secs(120);

const C_FUNCTION: &str = "\
#include <stdio.h>
#include <warpipe.h>
void snippet(warpipe_device *device, void *stream, warpipe_publisher *publisher,
             warpipe_subscriber *subscriber);
void snippet(warpipe_device *device, void *stream, warpipe_publisher *publisher,
             warpipe_subscriber *subscriber) {
  (void)device, (void)stream, (void)publisher, (void)subscriber;
  {
";

/// With the declarations of `ATen/DLConvertor.h`, which the example `libtorch_pipes` compiles
/// itself where LibTorch is.
const CPP_FUNCTION: &str = "\
#include <chrono>
#include <iostream>
#include <optional>
#include <poll.h>
#include <warpipe.hpp>
using namespace std::chrono_literals;
struct DLManagedTensor {
  void (*deleter)(DLManagedTensor *);
};
namespace at {
class Tensor {};
Tensor fromDLPack(DLManagedTensor *src);
DLManagedTensor *toDLPack(const Tensor &src);
} // namespace at
void snippet([[maybe_unused]] const warpipe::Device &device,
             [[maybe_unused]] const warpipe::Stream &stream,
             [[maybe_unused]] const warpipe::Publisher &publisher,
             [[maybe_unused]] warpipe::Subscriber &subscriber,
             [[maybe_unused]] const at::Tensor &tensor) {
  {
";

/// The number of snippets that held.
pub fn check(workspace: &Workspace) -> Outcome<Counts> {
    let tree = dist::for_tests(workspace)?;
    let folder = workspace.target.join("c-tests/snippets");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut counts = Counts::default();
    let has_cpp = super::has_cpp();
    for (number, snippet) in pages::c_snippets(workspace)?.iter().enumerate() {
        if snippet.is_cpp && !has_cpp {
            println!(
                "declared skip: {}: no c++ (Debian's package g++)",
                snippet.place
            );
            counts += Counts::ONE_SKIPPED;
            continue;
        }
        match hold(snippet, &folder.join(number.to_string()), &tree) {
            Ok(()) => counts += Counts::ONE_PASSED,
            Err(message) => counts += check_failed(&format!("{}: {message}", snippet.place)),
        }
    }
    Ok(counts)
}

/// Compiles a snippet as `program`, and runs it if it is a whole one.
fn hold(snippet: &CSnippet, program: &Path, tree: &Path) -> Outcome<()> {
    let is_whole = snippet.text.contains("int main(");
    let (compiler, standard, end) = if snippet.is_cpp {
        ("c++", "-std=c++17", "cpp")
    } else {
        ("cc", "-std=c11", "c")
    };
    let text = match (is_whole, snippet.is_cpp) {
        (true, _) => snippet.text.clone(),
        (false, true) => format!("{CPP_FUNCTION}{}  }}\n}}\n", snippet.text),
        (false, false) => format!("{C_FUNCTION}{}  }}\n}}\n", snippet.text),
    };
    let source = program.with_extension(end);
    fs::write(&source, text).map_err(|error| format!("{}: {error}", source.display()))?;
    let library = tree.join("lib");
    let mut compile = Task::new(compiler)
        .args([standard])
        .args(tests::WARNINGS.iter().copied())
        .args(["-Wno-unused-variable", "-Wno-unused-but-set-variable"])
        .args([source.as_os_str()])
        .args(["-I".as_ref(), tree.join("include").as_os_str()]);
    compile = if is_whole {
        compile
            .args(["-o".as_ref(), program.as_os_str()])
            .args(["-L".as_ref(), library.as_os_str()])
            .args([
                "-lwarpipe".into(),
                format!("-Wl,-rpath,{}", library.display()),
            ])
    } else {
        compile.args(["-fsyntax-only"])
    };
    let folder = program.parent().unwrap_or(program);
    if !compile.run(folder, LIMIT)?.success {
        return Err("it does not compile".into());
    }
    if !is_whole {
        return Ok(());
    }
    let domain = program.with_extension("domain");
    tests::make_domain(&domain)?;
    let run = Task::new(program).env("WARPIPE_DOMAIN", &domain);
    if run.run(folder, LIMIT)?.success {
        Ok(())
    } else {
        Err("it failed; its output is above".into())
    }
}
