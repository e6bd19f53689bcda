//! A manifest's bytes.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{
    ContentHash, Hashing, METADATA_BYTES_MAX, Manifest, PIECES_MAX, Part, TENSORS_MAX, TensorInfo,
    check_json,
};
use crate::tensor::{DType, Layout, RANK_MAX};

/// The format of the bytes, and the hash function of contents.
pub(super) const FORMAT: u32 = 5;

/// The beginning of a manifest. A [`Part`] follows for each part, then a [`Described`] for each
/// tensor, then the metadata.
#[derive(Serialize, Deserialize)]
pub(super) struct Head {
    pub(super) format: u32,
    pub(super) bytes: u64,
    pub(super) parts: u32,
    pub(super) tensors: u32,
    pub(super) hashing: Hashing,
    pub(super) metadata_bytes: u32,
}

/// A tensor as a manifest describes it. Shape and strides have a fixed size, so that no list of
/// lengths can be long.
#[derive(Serialize, Deserialize)]
struct Described<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    dtype: DType,
    rank: u8,
    shape: [u64; RANK_MAX],
    /// `None` if it is row-major.
    strides: Option<[i64; RANK_MAX]>,
    offset: u64,
    hash: Option<ContentHash>,
}

impl Described<'_> {
    fn of(tensor: &TensorInfo) -> Described<'_> {
        let layout = &tensor.layout;
        let (mut shape, mut strides) = ([0; RANK_MAX], [0; RANK_MAX]);
        let rank = layout.shape().len();
        shape[..rank].copy_from_slice(layout.shape());
        strides[..rank].copy_from_slice(layout.strides());
        Described {
            name: Cow::Borrowed(&tensor.name),
            dtype: layout.dtype(),
            rank: rank as u8,
            shape,
            strides: (!layout.is_contiguous()).then_some(strides),
            offset: tensor.offset,
            hash: tensor.hash,
        }
    }

    fn checked(self) -> Result<TensorInfo, String> {
        let rank = usize::from(self.rank);
        let lengths = self.shape.get(..rank).ok_or("a rank above the limit")?;
        let layout = match &self.strides {
            None => Layout::contiguous(self.dtype, lengths),
            Some(strides) => Layout::strided(self.dtype, lengths, &strides[..rank], 0),
        };
        let layout = layout.map_err(|error| error.to_string())?;
        if self.strides.is_some() && layout.is_contiguous() {
            return Err(format!(
                "strides of tensor {:?}, which is row-major",
                self.name
            ));
        }
        Ok(TensorInfo {
            name: Arc::from(&*self.name),
            layout,
            offset: self.offset,
            hash: self.hash,
        })
    }
}

fn write(bytes: Vec<u8>, value: &impl Serialize) -> Vec<u8> {
    // It cannot fail: no length is unknown, and a vector takes every byte.
    postcard::to_extend(value, bytes).unwrap_or_default()
}

/// Reads a value, and moves `rest` behind it.
fn read<'a, T: Deserialize<'a>>(rest: &mut &'a [u8]) -> Result<T, String> {
    let (value, after) =
        postcard::take_from_bytes(rest).map_err(|_| "garbled bytes".to_string())?;
    *rest = after;
    Ok(value)
}

impl Manifest {
    pub(in crate::weights) fn encode(&self) -> Vec<u8> {
        let head = Head {
            format: FORMAT,
            bytes: self.bytes,
            parts: self.parts.len() as u32,
            tensors: self.tensors.len() as u32,
            hashing: self.hashing,
            metadata_bytes: self.metadata.len() as u32,
        };
        let mut bytes = write(Vec::new(), &head);
        for part in &self.parts {
            bytes = write(bytes, part);
        }
        for tensor in &self.tensors {
            bytes = write(bytes, &Described::of(tensor));
        }
        bytes.extend_from_slice(&self.metadata);
        bytes
    }

    /// Reads and checks a manifest's bytes.
    pub(in crate::weights) fn decode(bytes: &[u8]) -> Result<Manifest, String> {
        let mut rest = bytes;
        let head: Head = read(&mut rest)?;
        if head.format != FORMAT {
            return Err(format!("format {}", head.format));
        }
        // Before room is made for them.
        if head.tensors as usize > TENSORS_MAX {
            return Err(format!("{} tensors", head.tensors));
        }
        if head.parts as usize > PIECES_MAX {
            return Err(format!("{} parts", head.parts));
        }
        if head.metadata_bytes as usize > METADATA_BYTES_MAX {
            return Err(format!("{} bytes of metadata", head.metadata_bytes));
        }
        let mut parts = Vec::new();
        for _ in 0..head.parts {
            parts.push(read::<Part>(&mut rest)?);
        }
        let mut tensors = Vec::new();
        for _ in 0..head.tensors {
            tensors.push(read::<Described<'_>>(&mut rest)?.checked()?);
        }
        if rest.len() != head.metadata_bytes as usize {
            let behind = rest.len();
            let allowed = head.metadata_bytes;
            return Err(format!(
                "{behind} bytes behind the last tensor, not {allowed}"
            ));
        }
        if !rest.is_empty() {
            check_json(rest).map_err(|found| format!("metadata that is no JSON text: {found}"))?;
        }
        let manifest = Manifest::new(head.bytes, parts, tensors)?;
        Ok(manifest
            .with_hashing(head.hashing)
            .with_metadata(rest.to_vec()))
    }
}
