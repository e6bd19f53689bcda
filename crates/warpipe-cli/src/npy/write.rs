//! Writing a tensor as a `.npy` file, byte for byte what NumPy's `save` writes.

use std::io::{self, Write};

use warpipe::Layout;

use super::{dtype, fortran_strides};

/// Overlapping strides (a broadcast) may make a file larger than the slot that it came from; past
/// this it is refused.
const EXPANDED_MAX: u64 = 1 << 30;

/// Writes the tensor of `layout` in the slot's bytes. Row-major and column-major data go out as
/// they lie; any other strides are gathered into row-major order.
pub fn write(out: &mut impl Write, layout: &Layout, slot: &[u8]) -> io::Result<()> {
    let dense = dense_bytes(layout)
        .filter(|&dense| dense <= EXPANDED_MAX.max(slot.len() as u64))
        .ok_or_else(|| {
            io::Error::other(format!("{layout:?} would expand past {EXPANDED_MAX} bytes"))
        })?;
    if layout.bytes() > slot.len() as u64 {
        return Err(io::Error::other(format!(
            "{layout:?} needs {} bytes, {} came",
            layout.bytes(),
            slot.len()
        )));
    }
    let fortran_order = !is_row_major(layout) && is_column_major(layout);
    out.write_all(&header(layout, fortran_order))?;
    if dense == 0 {
        return Ok(());
    }
    if fortran_order || is_row_major(layout) {
        let from = layout.offset() as usize;
        return out.write_all(&slot[from..from + dense as usize]);
    }
    let width = layout.dtype().bytes() as usize;
    layout
        .offsets()
        .try_for_each(|at| out.write_all(&slot[at as usize..][..width]))
}

/// The tensor's size without gaps, or none past 64 bits.
fn dense_bytes(layout: &Layout) -> Option<u64> {
    if layout.shape().contains(&0) {
        return Some(0);
    }
    layout
        .shape()
        .iter()
        .try_fold(layout.dtype().bytes(), |bytes, &length| {
            bytes.checked_mul(length)
        })
}

fn is_row_major(layout: &Layout) -> bool {
    layout.shape().contains(&0) || layout.is_contiguous()
}

fn is_column_major(layout: &Layout) -> bool {
    let due = fortran_strides(layout.shape());
    let mut dimensions = layout.shape().iter().zip(layout.strides()).zip(due);
    dimensions.all(|((&length, &stride), due)| length == 1 || stride == due)
}

/// Version 1.0, padded to 64 bytes, with room for the outermost dimension to grow, as NumPy leaves
/// it.
fn header(layout: &Layout, fortran_order: bool) -> Vec<u8> {
    const GROWTH_DIGITS: usize = 21;
    let shape: Vec<String> = layout.shape().iter().map(u64::to_string).collect();
    let tuple = match shape.as_slice() {
        [one] => format!("({one},)"),
        many => format!("({})", many.join(", ")),
    };
    let order = if fortran_order { "True" } else { "False" };
    let descr = dtype::descr(layout.dtype());
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {tuple}, }}");
    let growing = if fortran_order {
        shape.last()
    } else {
        shape.first()
    };
    if let Some(digits) = growing {
        text.push_str(&" ".repeat(GROWTH_DIGITS - digits.len().min(GROWTH_DIGITS)));
    }
    let prefix = 10;
    let total = (prefix + text.len() + 1).next_multiple_of(64);
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend_from_slice(&((total - prefix) as u16).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(total - 1, b' ');
    bytes.push(b'\n');
    bytes
}
