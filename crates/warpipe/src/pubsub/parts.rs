//! Several tensors in one sample: its *parts*, each with a name. In the slot they lie one behind
//! another, each at the next multiple of 256 bytes; others lie where their sender has them. Their
//! list comes in front of the user's metadata, by `postcard`. It is untrusted: a receiver reads it
//! once, and computes where in the slot they lie.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::entry::{Metadata, Violation, violation};
use super::place::Place;
use crate::backend::DevicePtr;
use crate::error::{Error, Result};
use crate::tensor::{DType, Layout};

/// The most parts of a sample.
pub const PARTS_MAX: usize = 127;

/// The longest name of a part, in bytes.
pub const PART_NAME_BYTES_MAX: usize = 128;

/// Whether a part may have this name. C names it by a text, which ends at a 0.
pub(crate) fn is_name(name: &str) -> bool {
    (1..=PART_NAME_BYTES_MAX).contains(&name.len()) && !name.contains('\0')
}

/// Parts in a slot begin at multiples of this: what the widest accesses of kernels want.
const ALIGNMENT: u64 = 256;

/// One tensor of a sample that has several.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Part {
    /// Its name, of 1 to [`PART_NAME_BYTES_MAX`] bytes: no other part of the sample has it.
    pub name: Box<str>,
    /// Its layout, from [`slot_ptr`](Self::slot_ptr) on.
    pub layout: Layout,
    /// The device address of the element with all indices 0.
    pub ptr: DevicePtr,
    /// The device address of its first byte; it is `layout.bytes()` long.
    pub slot_ptr: DevicePtr,
    /// Whether it lies in memory of its sender's own: see
    /// [`SampleMut::add_part_in`](crate::SampleMut::add_part_in).
    pub is_in_place: bool,
}

impl Part {
    pub(super) fn new(name: &str, layout: &Layout, address: DevicePtr, is_in_place: bool) -> Part {
        Part {
            name: name.into(),
            layout: *layout,
            ptr: address + layout.offset(),
            slot_ptr: address,
            is_in_place,
        }
    }
}

/// The part of this name.
pub(super) fn find<'p>(parts: &'p [Part], name: &str) -> Result<&'p Part> {
    parts
        .iter()
        .find(|part| *part.name == *name)
        .ok_or_else(|| {
            let known: Vec<&str> = parts.iter().map(|part| &*part.name).collect();
            Error::argument("part", format!("{name:?}"), format!("one of {known:?}"))
        })
}

/// Where a part of so many bytes lies behind the others, which end at `end`.
fn behind(end: &mut u64, bytes: u64) -> Option<u64> {
    let offset = end.checked_next_multiple_of(ALIGNMENT)?;
    *end = offset
        .checked_add(bytes)
        .filter(|&end| end <= i64::MAX as u64)?;
    Some(offset)
}

/// Where tensors of these layouts lie in the slot of [`Publisher::loan_parts`](crate::Publisher), in
/// bytes, and how long that is.
///
/// # Errors
/// [`Error::Argument`] for more than `i64::MAX` bytes.
pub fn lay_out_parts<'l>(layouts: impl Iterator<Item = &'l Layout>) -> Result<(Vec<u64>, u64)> {
    let mut end = 0;
    let offsets: Option<Vec<u64>> = layouts.map(|it| behind(&mut end, it.bytes())).collect();
    let offsets = offsets.ok_or_else(|| Error::layout("parts of more than 2^63 - 1 bytes"))?;
    Ok((offsets, end))
}

/// A part as the list has it.
#[derive(Serialize, Deserialize)]
struct ListedPart<'a> {
    name: &'a str,
    dtype: DType,
    shape: Cow<'a, [u64]>,
    /// The strides and the offset of a layout that is not contiguous.
    strides: Option<(Cow<'a, [i64]>, u64)>,
    /// Where it lies, unless in the slot.
    #[serde(borrow)]
    place: Option<Place<'a>>,
}

impl ListedPart<'_> {
    fn layout(&self) -> Result<Layout> {
        match &self.strides {
            None => Layout::contiguous(self.dtype, &self.shape),
            Some((strides, offset)) => Layout::strided(self.dtype, &self.shape, strides, *offset),
        }
    }
}

/// A part in a list, encoded.
pub(crate) fn listed(name: &str, layout: &Layout, place: Option<Place<'_>>) -> Vec<u8> {
    let is_plain = layout.is_contiguous() && layout.offset() == 0;
    let strides = || (layout.strides().into(), layout.offset());
    let listed = ListedPart {
        name,
        dtype: layout.dtype(),
        shape: layout.shape().into(),
        strides: (!is_plain).then(strides),
        place,
    };
    // Numbers and texts can always be serialized.
    postcard::to_stdvec(&listed).unwrap_or_default()
}

/// A list of parts that was read from a peer's metadata.
pub(crate) struct PartList<'a> {
    /// With address 0 those that have a place.
    pub(crate) parts: Vec<Part>,
    /// Of each part.
    pub(crate) places: Vec<Option<Place<'a>>>,
    rest: &'a [u8],
}

impl PartList<'_> {
    /// The user's, behind the list.
    pub(crate) fn metadata(&self) -> Metadata {
        Metadata::new(self.rest).unwrap_or_default()
    }
}

/// Reads the list in front of the metadata of a sample, of which the slot has `slot_bytes` bytes
/// from `slot` on.
pub(crate) fn read(
    metadata: &[u8],
    slot: DevicePtr,
    slot_bytes: u64,
) -> Result<PartList<'_>, Violation> {
    let wrong = |found: String| {
        let allowed = format!(
            "1 to {PARTS_MAX} parts, of different names of 1 to {PART_NAME_BYTES_MAX} bytes, \
             which fill the slot's {slot_bytes} bytes"
        );
        violation("parts", found, allowed)
    };
    let (listed, rest) = postcard::take_from_bytes::<Vec<ListedPart<'_>>>(metadata)
        .map_err(|error| wrong(format!("{metadata:02x?} ({error})")))?;
    let (mut parts, mut places): (Vec<Part>, _) = (Vec::new(), Vec::new());
    let mut end = 0;
    for one in listed {
        let name = one.name;
        let layout = one
            .layout()
            .map_err(|error| wrong(format!("{name:?}: {error}")))?;
        let address = match &one.place {
            Some(_) => Some(0),
            None => behind(&mut end, layout.bytes()).filter(|_| end <= slot_bytes),
        };
        let is_new = parts.iter().all(|part| *part.name != *name);
        let is_named = is_new && is_name(name);
        let (Some(offset), true) = (address, is_named && parts.len() < PARTS_MAX) else {
            return Err(wrong(format!(
                "{layout:?} {name:?} behind {} others",
                parts.len()
            )));
        };
        let is_in_place = one.place.is_some();
        let address = if is_in_place { 0 } else { slot + offset };
        parts.push(Part::new(name, &layout, address, is_in_place));
        places.push(one.place);
    }
    match parts.is_empty() || end != slot_bytes {
        true => Err(wrong(format!("{} parts of {end} bytes", parts.len()))),
        false => Ok(PartList {
            parts,
            places,
            rest,
        }),
    }
}

#[cfg(test)]
mod tests;
