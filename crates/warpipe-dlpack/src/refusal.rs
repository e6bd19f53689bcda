//! The error of exports and imports.

use thiserror::Error;
use warpipe::RANK_MAX;

/// The reason why a tensor is not exported, or not imported.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// An export with a negative stride. DLPack allows one, but PyTorch 2.6 ends the process that
    /// imports it.
    #[error(
        "it runs backwards (strides {strides:?}), which DLPack's consumers do not take; \
         copy it, or have its sender make it contiguous first"
    )]
    Backwards {
        /// In elements.
        strides: Vec<i64>,
    },
    /// An export with a length that DLPack's signed numbers cannot hold. Only a tensor without
    /// elements has one.
    #[error("not a usable tensor layout: a dimension of {length}")]
    Length {
        /// In elements.
        length: u64,
    },
    /// An import with a negative number of dimensions, or more than [`RANK_MAX`].
    #[error("not a usable tensor layout: {ndim} dimensions; at most {RANK_MAX}")]
    Rank {
        /// As the tensor says it.
        ndim: i32,
    },
    /// An import with elements that are not of [`DType::ALL`](warpipe::DType::ALL), or have another
    /// number of lanes.
    #[error(
        "element type of DLPack code {code}, {bits} bits, {lanes} lanes is not one that can be sent{}",
        in_whole_bytes(*bits)
    )]
    ElementType {
        /// `DLDataTypeCode`.
        code: u8,
        /// The width of a lane in bits.
        bits: u8,
        /// The lanes of an element.
        lanes: u16,
    },
    /// An import with dimensions, but no shape.
    #[error("a DLPack tensor that cannot be: its shape is null")]
    NullShape,
    /// An import with a negative length.
    #[error("a DLPack tensor that cannot be: its shape is {shape:?}")]
    NegativeLength {
        /// As the tensor says it, in elements.
        shape: Vec<i64>,
    },
    /// An import with elements, but no memory.
    #[error("a DLPack tensor that cannot be: its data is null")]
    NullData,
    /// An import with a first element behind the last address.
    #[error("a DLPack tensor that cannot be: its offset")]
    Offset {
        /// The address of its memory.
        data: u64,
        /// As the tensor says it, in bytes.
        byte_offset: u64,
    },
    /// An import of another major version than [`VERSION`](crate::VERSION)'s.
    #[error("it speaks DLPack {major}.{minor}, this is 1.x")]
    Version {
        /// As the tensor says it.
        major: u32,
        /// As the tensor says it.
        minor: u32,
    },
}

/// The next step for values that are smaller than a byte.
fn in_whole_bytes(bits: u8) -> &'static str {
    match bits {
        4 => "; values of 4 bits are sent in pairs, 2 lanes, as torch.float4_e2m1fn_x2",
        1..8 => "; send the bytes that hold its values, as uint8",
        _ => "",
    }
}
