//! The header of a safetensors file, read strictly.
//!
//! Source: the format's specification (<https://github.com/huggingface/safetensors>, "Format"):
//! eight bytes with the header's length in little endian, the header as JSON, then the tensors'
//! bytes without a gap. Nothing of a header is believed before it is checked here: every tensor
//! lies inside the file, none overlaps another, and none has a name that another has.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use crate::error::WeightsFileFault;
use crate::tensor::{DType, Layout, RANK_MAX};

/// The most tensors under one name: twice those of the largest checkpoints. Few for unit tests, which
/// reach it without optimisation.
pub(super) const TENSORS_MAX: usize = if cfg!(test) { 1 << 16 } else { 1 << 20 };

/// The longest name of a tensor.
pub(super) const NAME_BYTES_MAX: usize = 1024;

/// The longest header, as the format limits it.
pub(super) const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The bytes before the header.
pub(super) const LENGTH_BYTES: u64 = 8;

/// The entry of a header that describes no tensor.
const METADATA: &str = "__metadata__";

/// A tensor of a file.
#[derive(Debug, Clone)]
pub(super) struct FileTensor {
    pub(super) name: String,
    pub(super) layout: Layout,
    /// Where its first byte lies in the file.
    pub(super) begin: u64,
}

/// The header's length, from the first eight bytes of a file of `file_bytes` bytes.
pub(super) fn header_bytes(first: [u8; 8], file_bytes: u64) -> Result<u64, WeightsFileFault> {
    let found = u64::from_le_bytes(first);
    let allowed = HEADER_BYTES_MAX.min(file_bytes.saturating_sub(LENGTH_BYTES));
    if (2..=allowed).contains(&found) {
        return Ok(found);
    }
    let swapped = found.swap_bytes();
    let detail = if (2..=allowed).contains(&swapped) {
        " (in big endian it would fit)"
    } else if (2..=HEADER_BYTES_MAX).contains(&found) {
        " (the file was cut short)"
    } else {
        " (it is no safetensors file)"
    };
    Err(WeightsFileFault::damaged(format!(
        "its header would have {found} bytes, allowed are 2 to {allowed}{detail}"
    )))
}

/// Reads and checks a header in front of `data_bytes` bytes of tensors, in the order of the file.
pub(super) fn parse(header: &[u8], data_bytes: u64) -> Result<Vec<FileTensor>, WeightsFileFault> {
    if header.first() != Some(&b'{') {
        return Err(garbled("it does not begin with an opening brace"));
    }
    let mut progress = Progress::default();
    let mut json = serde_json::Deserializer::from_slice(header);
    let read = (&mut progress)
        .deserialize(&mut json)
        .and_then(|()| json.end());
    if let (Ok(()), Some(what)) = (&read, progress.too_many) {
        let limit = TENSORS_MAX as u64;
        return Err(WeightsFileFault::limit(what, limit));
    }
    match (read, progress.current) {
        (Ok(()), _) => {}
        (Err(error), Some(name)) => return Err(of_tensor(&name, error)),
        (Err(error), None) => return Err(garbled(&shortened(&error.to_string()))),
    }
    let data_begin = LENGTH_BYTES + header.len() as u64;
    place(progress.tensors, data_begin, data_bytes)
}

/// Checks that the tensors' ranges cover the data exactly, once each.
fn place(
    mut tensors: Vec<NamedInfo>,
    data_begin: u64,
    data_bytes: u64,
) -> Result<Vec<FileTensor>, WeightsFileFault> {
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(of_tensor(&pair[0].name, "it is described twice"));
    }
    tensors.sort_by_key(|tensor| tensor.info.data_offsets);
    let mut end_of_last = 0;
    let mut placed = Vec::with_capacity(tensors.len());
    for NamedInfo { name, info } in tensors {
        let [begin, end] = info.data_offsets;
        let layout = layout_of(&info).map_err(|reason| of_tensor(&name, reason))?;
        let fault = if end < begin {
            Some(format!("its data_offsets {begin} and {end} are reversed"))
        } else if end - begin != layout.bytes() {
            let (found, needed) = (end - begin, layout.bytes());
            Some(format!(
                "{layout:?} has {needed} bytes, its data_offsets hold {found}"
            ))
        } else if begin < end_of_last {
            Some(format!(
                "its bytes {begin} to {end} overlap another tensor's"
            ))
        } else if end > data_bytes {
            Some(format!(
                "its bytes {begin} to {end} lie outside of the file's {data_bytes}"
            ))
        } else if begin > end_of_last {
            Some(format!(
                "{} bytes before it belong to no tensor",
                begin - end_of_last
            ))
        } else {
            None
        };
        if let Some(reason) = fault {
            return Err(of_tensor(&name, reason));
        }
        end_of_last = end;
        placed.push(FileTensor {
            name,
            layout,
            begin: data_begin + begin,
        });
    }
    if end_of_last != data_bytes {
        return Err(truncated(data_begin + data_bytes, data_begin + end_of_last));
    }
    Ok(placed)
}

fn layout_of(info: &RawInfo) -> Result<Layout, String> {
    let dtype = dtype_of(&info.dtype)?;
    let mut shape = info.shape.lengths;
    let shape = &mut shape[..info.shape.rank];
    // A file counts values; an element of this library, and of PyTorch, may hold two of them.
    let lanes = u64::from(dtype.lanes());
    if lanes > 1 {
        let last = shape.last_mut().filter(|last| last.is_multiple_of(lanes));
        let last = last.ok_or_else(|| {
            format!(
                "{} in rows of a length that {lanes} does not divide, which no {dtype} has",
                info.dtype
            )
        })?;
        *last /= lanes;
    }
    Layout::contiguous(dtype, shape).map_err(|error| error.to_string())
}

/// The element type that a file names. `F8_E4M3` is PyTorch's `float8_e4m3fn`, which the format
/// writes under this name.
fn dtype_of(name: &str) -> Result<DType, String> {
    Ok(match name {
        "BOOL" => DType::BOOL,
        "U8" => DType::U8,
        "I8" => DType::I8,
        "F8_E5M2" => DType::F8_E5M2,
        "F8_E4M3" => DType::F8_E4M3FN,
        "F8_E8M0" => DType::F8_E8M0FNU,
        "F8_E4M3FNUZ" => DType::F8_E4M3FNUZ,
        "F8_E5M2FNUZ" => DType::F8_E5M2FNUZ,
        "I16" => DType::I16,
        "U16" => DType::U16,
        "F16" => DType::F16,
        "BF16" => DType::BF16,
        "I32" => DType::I32,
        "U32" => DType::U32,
        "F32" => DType::F32,
        "C64" => DType::C64,
        "I64" => DType::I64,
        "U64" => DType::U64,
        "F64" => DType::F64,
        "F4" => DType::F4_E2M1FN_X2,
        "F6_E2M3" | "F6_E3M2" => {
            return Err(format!(
                "elements of {name} are smaller than a byte, and no framework has a type for them"
            ));
        }
        _ => {
            let name: String = name.chars().take(32).collect();
            return Err(format!(
                "{name:?} is no element type that this library knows"
            ));
        }
    })
}

/// The file is shorter than its own header says, or longer.
pub(super) fn truncated(found: u64, described: u64) -> WeightsFileFault {
    WeightsFileFault::damaged(format!(
        "it has {found} bytes, and its header describes {described}"
    ))
}

fn garbled(reason: &str) -> WeightsFileFault {
    WeightsFileFault::damaged(format!("its header is garbled: {reason}"))
}

fn of_tensor(name: &str, reason: impl ToString) -> WeightsFileFault {
    let (name, reason) = (shortened(name), shortened(&reason.to_string()));
    let next = "save the tensors again with the safetensors library, or copy the file again";
    WeightsFileFault::new(format!("tensor {name:?}: {reason}"), next)
}

/// A text of a file for a message: it may have megabytes.
pub(super) fn shortened(name: &str) -> String {
    name.chars().take(NAME_BYTES_MAX).collect()
}

/// A tensor's name and description, not yet checked.
#[derive(Debug)]
struct NamedInfo {
    name: String,
    info: RawInfo,
}

/// A tensor's description, as a header gives it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawInfo {
    dtype: String,
    shape: Shape,
    data_offsets: [u64; 2],
}

/// The lengths of at most [`RANK_MAX`] dimensions.
#[derive(Debug, Default)]
struct Shape {
    rank: usize,
    lengths: [u64; RANK_MAX],
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Shape, D::Error> {
        from.deserialize_seq(Shape::default())
    }
}

impl<'de> Visitor<'de> for Shape {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "up to {RANK_MAX} lengths")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut from: A) -> Result<Shape, A::Error> {
        while let Some(length) = from.next_element()? {
            if self.rank == RANK_MAX {
                return Err(A::Error::custom(format_args!(
                    "more than {RANK_MAX} dimensions"
                )));
            }
            self.lengths[self.rank] = length;
            self.rank += 1;
        }
        Ok(self)
    }
}

/// The tensors read so far, and the name of the one being read.
#[derive(Default)]
struct Progress {
    tensors: Vec<NamedInfo>,
    current: Option<String>,
    has_metadata: bool,
    /// What there is more of than the limit. No more than the limit is kept.
    too_many: Option<&'static str>,
}

/// The entry that describes no tensor: texts by names, each name once. None is kept.
struct Metadata<'a> {
    too_many: &'a mut Option<&'static str>,
}

impl<'de> DeserializeSeed<'de> for Metadata<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Metadata<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<(), A::Error> {
        let mut names = HashSet::new();
        while let Some((name, _)) = from.next_entry::<String, String>()? {
            if names.len() == TENSORS_MAX {
                *self.too_many = Some("entries of metadata");
                continue;
            }
            if let Some(name) = names.replace(name) {
                let name = shortened(&name);
                return Err(A::Error::custom(format_args!("{name:?} is there twice")));
            }
        }
        Ok(())
    }
}

/// Reads a header's map. A `HashMap` would keep the last of two equal names, without a word.
impl<'de> DeserializeSeed<'de> for &mut Progress {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Progress {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<(), A::Error> {
        let progress = self;
        while let Some(name) = from.next_key::<String>()? {
            let name = progress.current.insert(name);
            if name == METADATA {
                if std::mem::replace(&mut progress.has_metadata, true) {
                    return Err(A::Error::custom("it is there twice"));
                }
                let too_many = &mut progress.too_many;
                from.next_value_seed(Metadata { too_many })?;
                progress.current = None;
                continue;
            }
            check_name(name).map_err(A::Error::custom)?;
            if progress.tensors.len() == TENSORS_MAX {
                progress.too_many = Some("tensors");
                from.next_value::<IgnoredAny>()?;
                continue;
            }
            let info = from.next_value()?;
            if let Some(name) = progress.current.take() {
                progress.tensors.push(NamedInfo { name, info });
            }
        }
        Ok(())
    }
}

/// Checks the length of a tensor's name.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    if (1..=NAME_BYTES_MAX).contains(&name.len()) {
        return Ok(());
    }
    let found = name.len();
    Err(format!(
        "its name has {found} bytes, allowed are 1 to {NAME_BYTES_MAX}"
    ))
}

#[cfg(test)]
mod tests;
