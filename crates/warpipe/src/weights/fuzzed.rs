//! What the fuzz target `weights` reads, and its seeds.

use super::manifest::{Hashing, Manifest, Part, TensorInfo};
use super::safetensors;
use crate::tensor::{DType, Layout};

/// Reads and checks a manifest's bytes, for `fuzzing`. An accepted manifest is the same when it is
/// encoded once more.
pub(crate) fn try_manifest(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::decode(bytes) {
        let again = Manifest::decode(&manifest.encode());
        assert_eq!(again.map(|again| again == manifest), Ok(true));
    }
}

/// Reads and checks a safetensors file's header, for `fuzzing`. The tensors of an accepted header
/// fill the data.
pub(crate) fn try_header(bytes: &[u8]) {
    if let Ok(tensors) = safetensors::parse(bytes, FUZZED_DATA_BYTES) {
        let filled: u64 = tensors.iter().map(|tensor| tensor.layout.bytes()).sum();
        assert_eq!(filled, FUZZED_DATA_BYTES);
    }
}

/// The length of the data behind a header in `fuzzing`.
const FUZZED_DATA_BYTES: u64 = 28;

/// A header and a manifest, for `fuzzing`.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2],
        "data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[4,28]}}"#;
    let Ok(layout) = Layout::contiguous(DType::F32, &[2, 3]) else {
        return Vec::new();
    };
    let tensor = |name: &str, offset| TensorInfo {
        name: name.into(),
        layout,
        offset,
        hash: Some([7; 16]),
    };
    let tensors = vec![tensor("a", 0), tensor("a, tied", 0), tensor("b", 512)];
    let parts = vec![Part::whole(512), Part::whole(4096)];
    let manifest = Manifest::new(1024, parts, tensors);
    let manifest = manifest.map(|manifest| manifest.with_metadata(b"{}".into()).encode());
    // Of another version and of a publisher's allocator, not row-major, without a hash.
    let Ok(layout) = Layout::strided(DType::F32, &[2, 3], &[1, 2], 0) else {
        return Vec::new();
    };
    let turned = TensorInfo {
        layout,
        hash: None,
        ..tensor("turned", 512)
    };
    let part = Part {
        pieces: 2,
        lease: 1,
        base: Some(([3; 16], 9)),
        ..Part::whole(512)
    };
    let partial = Manifest::new(1024, vec![part], vec![turned]);
    let partial = partial.map(|manifest| manifest.with_hashing(Hashing::Later).encode());
    vec![
        header.into(),
        manifest.unwrap_or_default(),
        partial.unwrap_or_default(),
    ]
}
