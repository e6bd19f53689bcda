//! The committed inputs: a file for each target, an input in hexadecimal digits on each line. A
//! line that begins with `#` says why the next one is there.

use std::fs;
use std::path::{Path, PathBuf};

use warpipe::fuzzing::Target;

/// Where the committed inputs of a target are.
pub fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(format!("{name}.hex"))
}

/// The seeds of a target, and its committed inputs.
///
/// # Panics
/// If a line of them is no input.
pub fn of(target: &Target) -> Vec<Vec<u8>> {
    let mut all = (target.seeds)();
    let text = fs::read_to_string(path(target.name)).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    all.extend(
        lines.map(|line| bytes_of(line).unwrap_or_else(|| panic!("{}: {line:?}", target.name))),
    );
    all
}

fn bytes_of(line: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = line.as_bytes().as_chunks::<2>();
    let digit = |digit: u8| char::from(digit).to_digit(16).map(|digit| digit as u8);
    let bytes = pairs
        .iter()
        .map(|&[high, low]| Some(digit(high)? << 4 | digit(low)?));
    if rest.is_empty() {
        bytes.collect()
    } else {
        None
    }
}
