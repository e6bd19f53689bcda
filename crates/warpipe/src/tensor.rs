//! The tensor in a slot: element type, shape, strides, offset, in DLPack's terms.
//!
//! Source: the DLPack specification (`DLDataType`, `DLTensor`). Plain, fixed-size values: no heap.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The most dimensions that a tensor may have.
pub const RANK_MAX: usize = 8;

/// An element type: DLPack's type code and the width in bits. Elements are whole bytes: a type of
/// values that are smaller has several of them in one element, its [lanes](DType::lanes), and
/// shapes, strides and offsets count elements. So a row of 64 values of 4 bits is 32 elements of
/// [`DType::F4_E2M1FN_X2`], as in PyTorch (`torch.float4_e2m1fn_x2`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Said")]
pub struct DType {
    code: u8,
    bits: u8,
}

/// A type as serde reads it, before it is checked against [`DType::ALL`].
#[derive(Deserialize)]
#[serde(rename = "DType")]
struct Said {
    code: u8,
    bits: u8,
}

impl TryFrom<Said> for DType {
    type Error = String;

    fn try_from(Said { code, bits }: Said) -> Result<DType, String> {
        let said = || format!("DLPack code {code} with {bits} bits is not one of DType::ALL");
        DType::from_dlpack(code, bits).ok_or_else(said)
    }
}

macro_rules! dtypes {
    ($($constant:ident $name:literal = $code:literal, $bits:literal;)*) => {
        impl DType {
            $(#[doc = concat!("`", $name, "`: DLPack code ", $code, ", ", $bits, " bits.")]
            pub const $constant: DType = DType { code: $code, bits: $bits };)*

            /// Every element type.
            pub const ALL: &'static [DType] = &[$(DType::$constant),*];

            /// The type's name, as NumPy, `ml_dtypes` and PyTorch write it.
            pub fn name(self) -> &'static str {
                match (self.code, self.bits) {
                    $(($code, $bits) => $name,)*
                    _ => unreachable!("a DType is made of listed codes only"),
                }
            }

            /// The type with this DLPack code and width of an element, all its
            /// [lanes](DType::lanes) together, if it is one of [`DType::ALL`].
            #[doc(hidden)] // For DLPack.
            #[inline]
            pub fn from_dlpack(code: u8, bits: u8) -> Option<DType> {
                match (code, bits) {
                    $(($code, $bits) => Some(DType::$constant),)*
                    _ => None,
                }
            }
        }
    };
}

dtypes! {
    I8 "int8" = 0, 8; I16 "int16" = 0, 16; I32 "int32" = 0, 32; I64 "int64" = 0, 64;
    U8 "uint8" = 1, 8; U16 "uint16" = 1, 16; U32 "uint32" = 1, 32; U64 "uint64" = 1, 64;
    F16 "float16" = 2, 16; F32 "float32" = 2, 32; F64 "float64" = 2, 64;
    BF16 "bfloat16" = 4, 16;
    C32 "complex32" = 5, 32; C64 "complex64" = 5, 64; C128 "complex128" = 5, 128;
    BOOL "bool" = 6, 8;
    F8_E3M4 "float8_e3m4" = 7, 8; F8_E4M3 "float8_e4m3" = 8, 8; F8_E4M3B11FNUZ "float8_e4m3b11fnuz" = 9, 8;
    F8_E4M3FN "float8_e4m3fn" = 10, 8; F8_E4M3FNUZ "float8_e4m3fnuz" = 11, 8; F8_E5M2 "float8_e5m2" = 12, 8;
    F8_E5M2FNUZ "float8_e5m2fnuz" = 13, 8; F8_E8M0FNU "float8_e8m0fnu" = 14, 8;
    F4_E2M1FN_X2 "float4_e2m1fn_x2" = 17, 8;
}

impl DType {
    /// The type of this [name](DType::name).
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL
            .iter()
            .copied()
            .find(|dtype| dtype.name() == name)
    }

    /// DLPack's `DLDataTypeCode`.
    #[doc(hidden)] // For DLPack.
    pub fn code(self) -> u8 {
        self.code
    }

    /// The width of one element in bits.
    #[doc(hidden)] // For DLPack.
    pub fn bits(self) -> u8 {
        self.bits
    }

    /// How many values an element holds, side by side: DLPack's `lanes`, of `bits() / lanes()` bits
    /// each. 2 for [`DType::F4_E2M1FN_X2`], in the order in which their maker packs them; else 1.
    #[doc(hidden)] // For DLPack.
    pub fn lanes(self) -> u16 {
        match self {
            DType::F4_E2M1FN_X2 => 2,
            _ => 1,
        }
    }

    /// The width of one element in bytes.
    pub fn bytes(self) -> u64 {
        u64::from(self.bits / 8)
    }
}

impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tensor's layout inside its slot.
///
/// ```
/// use warpipe::{DType, Layout};
/// let image = Layout::contiguous(DType::U8, &[720, 1280, 3])?;
/// assert_eq!(image.bytes(), 720 * 1280 * 3);
/// let transposed = Layout::strided(DType::F32, &[3, 4], &[1, 3], 0)?;
/// assert!(!transposed.is_contiguous());
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    dtype: DType,
    rank: u8,
    /// Follows from the shape and the strides. A publisher asks it for each subscriber.
    is_contiguous: bool,
    shape: [u64; RANK_MAX],
    strides: [i64; RANK_MAX],
    offset: u64,
    bytes: u64,
}

impl Layout {
    /// Row-major, without gaps. An empty `shape` is one element (rank 0); a dimension of 0 is an
    /// empty tensor.
    ///
    /// # Errors
    /// [`Error::Argument`]: more than [`RANK_MAX`] dimensions, or more than `i64::MAX` bytes.
    #[inline]
    pub fn contiguous(dtype: DType, shape: &[u64]) -> Result<Layout> {
        check_rank(shape.len())?;
        match Layout::contiguous_small(dtype, shape) {
            Some(layout) => Ok(layout),
            None => Layout::contiguous_large(dtype, shape),
        }
    }

    #[cold]
    fn contiguous_large(dtype: DType, shape: &[u64]) -> Result<Layout> {
        let mut strides = [0i64; RANK_MAX];
        let mut step: i128 = 1;
        for (index, &length) in shape.iter().enumerate().rev() {
            strides[index] = i64::try_from(step).map_err(|_| too_large())?;
            step = step
                .checked_mul(i128::from(length.max(1)))
                .filter(|&step| step <= i128::from(i64::MAX))
                .ok_or_else(too_large)?;
        }
        Layout::strided(dtype, shape, &strides[..shape.len()], 0)
    }

    /// [`contiguous`](Self::contiguous) in 32-bit lengths, of which no product overflows, without
    /// empty dimensions: this is computed for each sample, at both ends. `None` for all other
    /// shapes.
    #[inline]
    fn contiguous_small(dtype: DType, shape: &[u64]) -> Option<Layout> {
        let mut layout = Layout {
            dtype,
            rank: shape.len() as u8,
            is_contiguous: true,
            shape: [0; RANK_MAX],
            strides: [0; RANK_MAX],
            offset: 0,
            bytes: dtype.bytes(),
        };
        let mut step = 1u64;
        for (index, &length) in shape.iter().enumerate().rev() {
            if length == 0 || length > u64::from(u32::MAX) || step > 1 << 26 {
                return None;
            }
            (layout.shape[index], layout.strides[index]) = (length, step as i64);
            step *= length;
        }
        layout.bytes = step
            .checked_mul(dtype.bytes())
            .filter(|&bytes| bytes <= i64::MAX as u64)?;
        Some(layout)
    }

    /// Any strides, in elements, the first element `offset` bytes into the slot. Negative and zero
    /// strides are allowed as long as every element lies inside the slot.
    ///
    /// # Errors
    /// [`Error::Argument`]: ranks differ or are too high, an element before the slot, or sizes past
    /// `i64::MAX`.
    pub fn strided(dtype: DType, shape: &[u64], strides: &[i64], offset: u64) -> Result<Layout> {
        check_rank(shape.len())?;
        if shape.len() != strides.len() {
            return Err(Error::layout(format!(
                "{} dimensions but {} strides",
                shape.len(),
                strides.len()
            )));
        }
        let (lowest, highest) = extent(dtype, shape, strides)?;
        let first = i128::from(offset) + lowest;
        if first < 0 {
            return Err(Error::layout(format!(
                "its first byte would lie {} bytes before the slot",
                -first
            )));
        }
        let bytes = to_bytes(i128::from(offset) + highest)?;
        let mut layout = Layout {
            dtype,
            rank: shape.len() as u8,
            is_contiguous: follow_row_major(shape, strides),
            shape: [0; RANK_MAX],
            strides: [0; RANK_MAX],
            offset,
            bytes,
        };
        layout.shape[..shape.len()].copy_from_slice(shape);
        layout.strides[..shape.len()].copy_from_slice(strides);
        Ok(layout)
    }

    /// `bytes` plain bytes: a one-dimensional `uint8` tensor.
    ///
    /// # Errors
    /// [`Error::Argument`] past `i64::MAX`.
    #[inline]
    pub fn bytes_only(bytes: u64) -> Result<Layout> {
        Layout::contiguous(DType::U8, &[bytes])
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions, outermost first, in elements.
    pub fn shape(&self) -> &[u64] {
        &self.shape[..usize::from(self.rank)]
    }

    /// The strides, in elements.
    pub fn strides(&self) -> &[i64] {
        &self.strides[..usize::from(self.rank)]
    }

    /// The offset of the element with all indices 0, in bytes from the slot's start.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The length of the slot in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Memory of the host that a whole slot is copied to or from has to be as long.
    pub(crate) fn check_length(&self, bytes: usize) -> Result<()> {
        if bytes as u64 == self.bytes {
            return Ok(());
        }
        let allowed = format!("exactly the {} of {self:?}", self.bytes);
        let found = format!("{bytes} bytes");
        Err(Error::argument("the data", found, allowed))
    }

    /// The number of elements.
    pub fn elements(&self) -> u64 {
        // If one length is 0 the others are unlimited, and their product may overflow.
        if self.shape().contains(&0) {
            0
        } else {
            self.shape().iter().product()
        }
    }

    /// The offset of each element's first byte from the slot's start, in row-major order.
    pub fn offsets(&self) -> impl Iterator<Item = u64> + use<> {
        let (layout, mut index, mut at) = (*self, [0u64; RANK_MAX], self.offset as i64);
        (0..self.elements()).map(move |_| {
            let here = at as u64;
            layout.step(&mut index, &mut at);
            here
        })
    }

    /// Advances to the next element.
    fn step(&self, index: &mut [u64; RANK_MAX], at: &mut i64) {
        let width = self.dtype.bytes() as i64;
        for axis in (0..usize::from(self.rank)).rev() {
            // A step is taken only where another element follows: the stride of a lone element may
            // be anything.
            if index[axis] + 1 < self.shape[axis] {
                index[axis] += 1;
                *at += self.strides[axis] * width;
                return;
            }
            *at -= index[axis] as i64 * self.strides[axis] * width;
            index[axis] = 0;
        }
    }

    /// Whether the elements lie in row-major order without gaps.
    #[inline]
    pub fn is_contiguous(&self) -> bool {
        self.is_contiguous
    }

    /// Whether the elements lie without gaps and overlaps, forwards in each dimension, whatever the
    /// order of the dimensions: as those of a transposed tensor do.
    pub fn is_dense(&self) -> bool {
        if self.is_contiguous || self.shape().contains(&0) {
            return true;
        }
        let mut steps: [(i64, u64); RANK_MAX] = [(0, 1); RANK_MAX];
        let dimensions = self.strides().iter().zip(self.shape());
        for (step, (&stride, &length)) in steps.iter_mut().zip(dimensions) {
            // The stride of a lone element may be anything.
            *step = if length == 1 {
                (0, 1)
            } else {
                (stride, length)
            };
        }
        steps.sort_unstable();
        let mut wanted = 1i64;
        steps
            .iter()
            .filter(|(_, length)| *length > 1)
            .all(|&(stride, length)| {
                let is_next = stride == wanted;
                wanted = wanted.wrapping_mul(length as i64);
                is_next
            })
    }
}

/// Whether elements of these strides lie in row-major order without gaps.
fn follow_row_major(shape: &[u64], strides: &[i64]) -> bool {
    let mut step = 1i64;
    for (&length, &stride) in shape.iter().zip(strides).rev() {
        if length == 0 {
            return true;
        }
        if length > 1 && stride != step {
            return false;
        }
        step = step.wrapping_mul(length as i64);
    }
    true
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape())?;
        if !self.is_contiguous() {
            write!(f, " strides {:?}", self.strides())?;
        }
        Ok(())
    }
}

fn check_rank(rank: usize) -> Result<()> {
    if rank > RANK_MAX {
        Err(Error::layout(format!(
            "{rank} dimensions; at most {RANK_MAX}"
        )))
    } else {
        Ok(())
    }
}

fn too_large() -> Error {
    Error::layout("more than 2^63 - 1 bytes")
}

fn to_bytes(value: i128) -> Result<u64> {
    i64::try_from(value)
        .map(|bytes| bytes as u64)
        .map_err(|_| too_large())
}

/// The lowest and one past the highest byte that the elements touch, relative to the element with
/// all indices 0. Lengths and strides may come from a peer.
fn extent(dtype: DType, shape: &[u64], strides: &[i64]) -> Result<(i128, i128)> {
    let width = dtype.bytes() as i64;
    let (mut lowest, mut highest) = (0i128, i128::from(width));
    if shape.contains(&0) {
        return Ok((0, 0));
    }
    let mut elements = 1i64;
    for (&length, &stride) in shape.iter().zip(strides) {
        let length = i64::try_from(length).map_err(|_| too_large())?;
        elements = elements.checked_mul(length).ok_or_else(too_large)?;
        // No tensor reaches further than its slot is long.
        let reach = (length - 1)
            .checked_mul(stride)
            .and_then(|reach| reach.checked_mul(width))
            .ok_or_else(too_large)?;
        if reach < 0 {
            lowest += i128::from(reach)
        } else {
            highest += i128::from(reach)
        }
    }
    Ok((lowest, highest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serde_makes_types_that_are_listed_and_no_others() {
        for code in (0..=20).chain([127, 128, 255]) {
            for bits in [0, 1, 4, 7, 8, 9, 16, 32, 64, 128, 255] {
                let read = postcard::from_bytes::<DType>(&[code, bits]).ok();
                assert_eq!(
                    read,
                    DType::from_dlpack(code, bits),
                    "code {code}, {bits} bits"
                );
                assert!(
                    read.is_none_or(|dtype| postcard::to_stdvec(&dtype) == Ok(vec![code, bits]))
                );
            }
        }
    }

    #[test]
    fn a_dense_layout_has_each_byte_once_in_whatever_order_of_dimensions() {
        let strided = |shape: &[u64], strides: &[i64], offset| {
            Layout::strided(DType::F32, shape, strides, offset).unwrap()
        };
        let dense = [
            strided(&[3, 4], &[4, 1], 0),
            strided(&[3, 4], &[1, 3], 0),
            strided(&[2, 3, 4], &[4, 8, 1], 0),
            strided(&[2, 1, 4], &[1, -7, 2], 7 * 4),
            strided(&[], &[], 0),
            strided(&[0, 4], &[9, 9], 0),
        ];
        for layout in dense {
            assert!(layout.is_dense(), "{layout:?}");
        }
        let others = [
            strided(&[3, 4], &[5, 1], 0),
            strided(&[3, 4], &[1, 4], 0),
            strided(&[3, 4], &[0, 1], 0),
            strided(&[3, 4], &[1, 1], 0),
            strided(&[4], &[-1], 12),
            strided(&[4], &[2], 0),
        ];
        for layout in others {
            assert!(!layout.is_dense(), "{layout:?}");
        }
    }

    #[test]
    fn two_values_of_four_bits_are_one_element_of_a_byte() {
        let layout = Layout::contiguous(DType::F4_E2M1FN_X2, &[3, 32]).unwrap();
        assert_eq!((layout.bytes(), layout.elements()), (96, 96));
        assert_eq!(DType::from_dlpack(17, 4), None, "a lone one");
        for &dtype in DType::ALL {
            let is_pair = dtype == DType::F4_E2M1FN_X2;
            assert_eq!(dtype.lanes(), if is_pair { 2 } else { 1 }, "{dtype}");
        }
    }

    #[test]
    fn a_scalar_has_rank_zero_and_one_element() {
        let layout = Layout::contiguous(DType::F64, &[]).unwrap();
        assert_eq!((layout.elements(), layout.bytes()), (1, 8));
    }

    #[test]
    fn a_dimension_of_zero_needs_no_bytes() {
        let layout = Layout::contiguous(DType::F32, &[4, 0, u64::MAX]).err();
        assert!(
            layout.is_some(),
            "u64::MAX rows of nothing still overflow a stride"
        );
        assert_eq!(
            Layout::contiguous(DType::F32, &[4, 0, 7]).unwrap().bytes(),
            0
        );
    }

    #[test]
    fn negative_strides_must_stay_inside_the_slot() {
        assert!(matches!(
            Layout::strided(DType::I16, &[4], &[-1], 0),
            Err(Error::Argument {
                argument: "tensor layout",
                ..
            })
        ));
        assert_eq!(
            Layout::strided(DType::I16, &[4], &[-1], 6).unwrap().bytes(),
            8
        );
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        for shape in [&[u64::MAX][..], &[1 << 32, 1 << 32], &[1 << 62, 2]] {
            assert!(
                matches!(
                    Layout::contiguous(DType::C128, shape),
                    Err(Error::Argument {
                        argument: "tensor layout",
                        ..
                    })
                ),
                "{shape:?}"
            );
        }
        assert!(matches!(
            Layout::strided(DType::U8, &[u64::MAX, 2], &[0, 1], 0),
            Err(Error::Argument {
                argument: "tensor layout",
                ..
            })
        ));
    }

    #[test]
    fn offsets_are_those_of_the_elements_in_row_major_order() {
        let offsets = |layout: Layout| layout.offsets().collect::<Vec<_>>();
        assert_eq!(
            offsets(Layout::contiguous(DType::F32, &[2, 2]).unwrap()),
            [0, 4, 8, 12]
        );
        assert_eq!(
            offsets(Layout::strided(DType::I16, &[2, 3], &[1, -4], 16).unwrap()),
            [16, 8, 0, 18, 10, 2]
        );
        let lone = Layout::strided(DType::F64, &[2, 1, 2], &[0, i64::MAX, 1], 8).unwrap();
        assert_eq!(offsets(lone), [8, 16, 8, 16]);
        assert_eq!(offsets(Layout::contiguous(DType::U8, &[]).unwrap()), [0]);
        assert_eq!(
            offsets(Layout::contiguous(DType::U8, &[3, 0]).unwrap()),
            [0; 0]
        );
    }

    #[test]
    fn nine_dimensions_are_refused() {
        assert!(Layout::contiguous(DType::U8, &[1; 9]).is_err());
        assert!(Layout::contiguous(DType::U8, &[1; 8]).is_ok());
    }

    #[test]
    fn every_dtype_survives_its_name_and_its_code() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
            assert_eq!(DType::from_dlpack(dtype.code(), dtype.bits()), Some(dtype));
        }
        assert_eq!(DType::from_dlpack(2, 8), None);
    }
}
