//! NumPy's `.npy` files: read with distrust, written bit-exactly.
//!
//! Source: NumPy's `numpy.lib.format`, versions 1.0, 2.0 and 3.0. A file is checked whole (magic,
//! header, element type, shape against the file's length) before a byte of its data is read or
//! memory for it is taken.

mod dtype;
mod header;
mod write;

use std::io::{self, Read};

use warpipe::{DType, Layout};

pub use write::write;

/// A fault of a `.npy` file.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// It does not begin as one.
    #[error(
        "it does not begin with the .npy magic bytes \\x93NUMPY; give it another extension to send it as raw bytes"
    )]
    Magic,
    /// A version nobody has defined.
    #[error(
        "its format version is {0}.{1}; 1.0, 2.0 and 3.0 are known: save it again with a released NumPy"
    )]
    Version(u8, u8),
    /// Its header says that it is longer than any header is.
    #[error("its header claims {0} bytes, at most {max} are read", max = header::LENGTH_MAX)]
    HeaderLength(u64),
    /// Its header is not the literal that NumPy writes.
    #[error("its header is damaged at byte {at}: {reason}")]
    Header {
        /// Bytes into the header.
        at: usize,
        /// The bytes that were expected there.
        reason: String,
    },
    /// A key that must be there is not.
    #[error("its header has no {0:?}")]
    Missing(&'static str),
    /// Records and sub-arrays.
    #[error("its elements are records; publish each field as an array of its own")]
    Structured,
    /// Python objects.
    #[error(
        "its elements are Python objects, which are never unpickled; save it with a numeric dtype"
    )]
    Object,
    /// An element type that warpipe does not have.
    #[error(
        "its dtype {0:?} has no counterpart here; convert it to one of bool, int8-64, uint8-64, float16-64, complex64-128"
    )]
    Dtype(String),
    /// Bytes without a type.
    #[error(
        "its dtype {0:?} does not say what the bytes are; say it with --void-as (for example --void-as bfloat16)"
    )]
    Void(String),
    /// `--void-as` names a type of another width.
    #[error("its elements have {found} bytes, --void-as {wanted} has {}", wanted.bytes())]
    VoidWidth {
        /// In the file.
        found: u64,
        /// On the command line.
        wanted: DType,
    },
    /// A dimension below zero.
    #[error("its shape has the dimension {0}; none can be negative")]
    Negative(String),
    /// A shape that no tensor here can have.
    #[error("its shape cannot be used: {0}")]
    Shape(String),
    /// Less data than the shape needs.
    #[error("it is cut short: {needed} bytes are due, {found} are there")]
    Short {
        /// By the header.
        needed: u64,
        /// In the file.
        found: u64,
    },
    /// More data than the shape needs.
    #[error("{extra} bytes follow the data, which has {needed}")]
    Trailing {
        /// Bytes beyond.
        extra: u64,
        /// By the header.
        needed: u64,
    },
    /// No room to load it.
    #[error("there is no memory for its {0} bytes")]
    Memory(u64),
    /// It cannot be read.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// A checked header: what the data is, and how it lies in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The tensor, as it is published.
    pub layout: Layout,
    /// The width in bytes of what has to be reversed, or 1 for a little-endian file.
    swap: usize,
}

/// Reads and checks the header of a file that is `length` bytes long, and leaves `reader` at the
/// data.
///
/// Data in Fortran order gets strides in that order. `void_as` is the type of elements that the
/// file calls void.
pub fn read_header(
    reader: &mut impl Read,
    length: u64,
    void_as: Option<DType>,
) -> Result<Header, Fault> {
    let (text, start) = header::read(reader, length)?;
    let fields = header::parse(&text)?;
    let element = dtype::parse(&fields.descr, void_as)?;
    let layout = layout(element.dtype, &fields.shape, fields.fortran_order)?;
    match (length - start).checked_sub(layout.bytes()) {
        None => Err(Fault::Short {
            needed: layout.bytes(),
            found: length - start,
        }),
        Some(0) => Ok(Header {
            layout,
            swap: element.swap,
        }),
        Some(extra) => Err(Fault::Trailing {
            extra,
            needed: layout.bytes(),
        }),
    }
}

/// Reads the data behind a header, little-endian whatever the file holds.
pub fn read_data(reader: &mut impl Read, header: &Header) -> Result<Vec<u8>, Fault> {
    let mut data = read_exactly(reader, header.layout.bytes())?;
    if header.swap > 1 {
        data.chunks_exact_mut(header.swap).for_each(<[u8]>::reverse);
    }
    Ok(data)
}

/// The rest of `reader`, which must be `length` bytes: a file may have changed since it was
/// checked.
pub fn read_exactly(reader: &mut impl Read, length: u64) -> Result<Vec<u8>, Fault> {
    let mut data = Vec::new();
    usize::try_from(length)
        .ok()
        .and_then(|length| data.try_reserve_exact(length).ok())
        .ok_or(Fault::Memory(length))?;
    reader.by_ref().take(length).read_to_end(&mut data)?;
    if (data.len() as u64) < length {
        return Err(Fault::Short {
            needed: length,
            found: data.len() as u64,
        });
    }
    if reader.read(&mut [0])? != 0 {
        return Err(Fault::Trailing {
            extra: 1,
            needed: length,
        });
    }
    Ok(data)
}

fn layout(dtype: DType, shape: &[u64], fortran_order: bool) -> Result<Layout, Fault> {
    let refused = |error: warpipe::Error| Fault::Shape(error.to_string());
    let contiguous = Layout::contiguous(dtype, shape).map_err(refused)?;
    if !fortran_order || contiguous.bytes() == 0 {
        return Ok(contiguous);
    }
    Layout::strided(dtype, shape, &fortran_strides(shape), 0).map_err(refused)
}

/// Column-major strides, in elements. The shape's size is known to fit in an `i64`.
fn fortran_strides(shape: &[u64]) -> Vec<i64> {
    let mut step = 1i64;
    shape
        .iter()
        .map(|&length| {
            let stride = step;
            step = step.saturating_mul(length.max(1) as i64);
            stride
        })
        .collect()
}

#[cfg(test)]
mod tests;
