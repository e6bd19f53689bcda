//! Every parser of what comes from outside, by name: the library's, and the command line's of
//! files.
//!
//! The library's targets are in `crates/warpipe/src/fuzzing.rs`. A new one goes there or into
//! [`targets`], and gets a program in `fuzz_targets/`, a `[[bin]]`, and its name in
//! `tests/corpus.rs`, which says so if one is missing.

use std::io::Cursor;

pub use warpipe::fuzzing::Target;

pub mod corpus;

#[path = "../../crates/warpipe-cli/src/image.rs"]
mod image;
#[path = "../../crates/warpipe-cli/src/npy/mod.rs"]
#[allow(
    dead_code,
    unused_imports,
    reason = "what writes files is not tried here"
)]
mod npy;

const NPY: Target = Target {
    name: "npy",
    parse: parse_npy,
    seeds: npy_seeds,
};
const PNG: Target = Target {
    name: "png",
    parse: parse_png,
    seeds: png_seeds,
};

/// All of them.
pub fn targets() -> impl Iterator<Item = Target> {
    warpipe::fuzzing::TARGETS.iter().copied().chain([NPY, PNG])
}

/// Tries the parser of that name.
///
/// # Panics
/// If there is none, or if it does what it may not.
pub fn parse(name: &str, bytes: &[u8]) {
    let target = targets().find(|target| target.name == name);
    (target.expect("one of `targets`").parse)(bytes);
}

fn parse_npy(bytes: &[u8]) {
    let mut reader = Cursor::new(bytes);
    if let Ok(header) = npy::read_header(&mut reader, bytes.len() as u64, None)
        && let Ok(data) = npy::read_data(&mut reader, &header)
    {
        assert_eq!(data.len() as u64, header.layout.bytes());
        assert!(data.len() <= bytes.len(), "no more than the file holds");
    }
}

fn npy_seeds() -> Vec<Vec<u8>> {
    let headers = [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }",
        "{'descr': '|u1', 'fortran_order': True, 'shape': (), }",
        "{'descr': '>i8', 'fortran_order': False, 'shape': (3L,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (0, 9223372036854775807), }",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }",
    ];
    let file = |version: u8, header: &str| {
        let length = header.len() as u32;
        let width = if version == 1 { 2 } else { 4 };
        [
            b"\x93NUMPY",
            &[version, 0][..],
            &length.to_le_bytes()[..width],
            header.as_bytes(),
            &[7; 24],
        ]
        .concat()
    };
    headers
        .iter()
        .flat_map(|header| [1, 2, 3].map(|version| file(version, header)))
        .collect()
}

fn parse_png(bytes: &[u8]) {
    if let Ok((layout, data)) = image::read(Cursor::new(bytes), bytes.len() as u64) {
        assert_eq!(layout.bytes(), data.len() as u64);
    }
}

fn png_seeds() -> Vec<Vec<u8>> {
    use png::{BitDepth, ColorType};
    let kinds = [
        (ColorType::Rgb, BitDepth::Eight, 12),
        (ColorType::GrayscaleAlpha, BitDepth::Sixteen, 16),
        (ColorType::Indexed, BitDepth::Two, 2),
        (ColorType::Grayscale, BitDepth::One, 2),
    ];
    let file = |(color, depth, bytes): (ColorType, BitDepth, usize)| {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 2, 2);
        encoder.set_color(color);
        encoder.set_depth(depth);
        if color == ColorType::Indexed {
            encoder.set_palette(vec![10, 20, 30, 40, 50, 60]);
            encoder.set_trns(vec![0]);
        }
        let mut writer = encoder.write_header().ok()?;
        writer.write_image_data(&vec![0x51; bytes]).ok()?;
        drop(writer);
        Some(file)
    };
    kinds.into_iter().filter_map(file).collect()
}
