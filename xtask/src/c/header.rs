//! `warpipe.h`, made from the crate by cbindgen and committed.

use std::fs;

use cbindgen::{Config, DocumentationStyle, Language, Style};

use crate::Outcome;
use crate::workspace::Workspace;

const CRATE: &str = "crates/warpipe-c";
/// The committed header.
pub const HEADER: &str = "crates/warpipe-c/include/warpipe.h";

const INTRODUCTION: &str = "\
/* warpipe: GPU memory and streams of tensors handed between processes without a copy, surviving the
 * death of any of them.
 *
 * Made by `cargo xtask c header`; do not edit.
 *
 * Every function that can fail returns a warpipe_status; warpipe_error_message() says more.
 *
 * Ownership. A function that gives an object to the caller says how it ends: warpipe_close ends every
 * object, and its type says what that means; closing null does nothing. A pointer that is null, was
 * closed, or is of another type is refused with WARPIPE_INVALID_OBJECT: the library never reads
 * memory at such a pointer. An output pointer is null unless the call succeeds. Texts and arrays are
 * copied during the call unless it says otherwise. An object that the program leaves open ends with
 * the process, and its peers see that.
 *
 * Threads. Every function may be called on any thread. A warpipe_subscriber, warpipe_worker,
 * warpipe_server, warpipe_sample, warpipe_loan or warpipe_lease is for one thread at
 * a time: a second one gets WARPIPE_INVALID_STATE. All others may be used by any number of threads
 * at once. warpipe_close may be called while another thread is in a call on the object, which ends
 * when that call does; every other end of an object is refused then, and it stays open.
 * The library calls no function of the caller but those that a call was given (release, deleters,
 * that of warpipe_stream_call), and holds no lock then.
 *
 * Streams are CUstream or cudaStream_t as they are (void *), of the device's primary context; null
 * is the default stream. Device addresses are uint64_t. Sizes are in bytes, times in nanoseconds.
 * A timeout of 0 does not wait; UINT64_MAX waits for 584 years. Sends, submissions and answers take
 * WARPIPE_USUAL_TIMEOUT, too: as long as the options of their endpoint say.
 *
 * A signal's handler runs while a call waits, and the call goes on: take short timeouts to look at
 * flags that a handler sets. A child of fork() may not use its parent's objects or streams
 * (WARPIPE_INVALID_STATE, WARPIPE_INVALID_INPUT); the host device may be opened anew there. Functions
 * of atexit, static destructors and destructors of thread-local values may call this library, but
 * the message of an error may be empty there.
 *
 * License: MIT OR Apache-2.0
 */
";

fn config() -> Config {
    let mut config = Config {
        header: Some(INTRODUCTION.trim_end().to_string()),
        include_guard: Some("WARPIPE_H".into()),
        language: Language::C,
        cpp_compat: true,
        style: Style::Type,
        usize_is_size_t: true,
        documentation_style: DocumentationStyle::C99,
        line_length: 100,
        no_includes: true,
        sys_includes: ["stdbool.h", "stddef.h", "stdint.h"]
            .map(String::from)
            .to_vec(),
        ..Config::default()
    };
    config.enumeration.prefix_with_name = false;
    // Structures of dlpack.h, which a program includes beside this header.
    for tensor in ["DLManagedTensor", "DLManagedTensorVersioned"] {
        let named = format!("struct {tensor}");
        config.export.rename.insert(tensor.into(), named);
    }
    config.after_includes =
        Some("\nstruct DLManagedTensor;\nstruct DLManagedTensorVersioned;".into());
    config.export.include = [
        "warpipe_access",
        "warpipe_change_kind",
        "warpipe_dtype",
        "warpipe_peer_state",
        "warpipe_policy",
        "warpipe_result_order",
    ]
    .map(String::from)
    .to_vec();
    config
}

/// The header, as the crate's sources make it.
fn generate(workspace: &Workspace) -> Outcome<String> {
    let bindings = cbindgen::Builder::new()
        .with_crate(workspace.root.join(CRATE))
        .with_config(config())
        .generate()
        .map_err(|error| format!("{HEADER}: {error}"))?;
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).map_err(|error| format!("{HEADER}: {error}"))?;
    Ok(in_words_of_c(&text))
}

/// Rust's heading for what the caller of an unsafe function promises.
fn in_words_of_c(text: &str) -> String {
    let mut lines = Vec::new();
    let mut promised = false;
    for line in text.lines() {
        if line.trim() == "// # Safety" {
            promised = true;
            continue;
        }
        if promised {
            let line = line.replacen("// As for", "// as for", 1);
            lines.push(line.replacen("// ", "// Requires: ", 1).replace('`', ""));
            promised = false;
        } else {
            lines.push(line.replace('`', ""));
        }
    }
    lines.join("\n") + "\n"
}

/// Writes the committed header.
pub fn write(workspace: &Workspace) -> Outcome<()> {
    let text = generate(workspace)?;
    fs::write(workspace.root.join(HEADER), text).map_err(|error| format!("{HEADER}: {error}"))
}

/// Compares the committed header with the sources.
pub fn check(workspace: &Workspace) -> Outcome<()> {
    let committed = fs::read_to_string(workspace.root.join(HEADER))
        .map_err(|error| format!("{HEADER}: {error}"))?;
    if committed == generate(workspace)? {
        return Ok(());
    }
    Err(format!(
        "{HEADER} is stale: run `cargo xtask c header`, and commit it"
    ))
}
