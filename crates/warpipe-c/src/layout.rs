//! Layouts of tensors.

use warpipe::{DType, Layout, RANK_MAX};

use crate::arguments::{out, slice};
use crate::{Failure, Result, run, warpipe_status};

/// The most dimensions that a tensor may have.
pub const WARPIPE_RANK_MAX: usize = 8;
const _: () = assert!(WARPIPE_RANK_MAX == RANK_MAX);

/// An element type: DLPack's type code times 256, plus the width of an element in bits.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum warpipe_dtype {
    /// `int8_t`.
    WARPIPE_INT8 = 0x0008,
    /// `int16_t`.
    WARPIPE_INT16 = 0x0010,
    /// `int32_t`.
    WARPIPE_INT32 = 0x0020,
    /// `int64_t`.
    WARPIPE_INT64 = 0x0040,
    /// `uint8_t`.
    WARPIPE_UINT8 = 0x0108,
    /// `uint16_t`.
    WARPIPE_UINT16 = 0x0110,
    /// `uint32_t`.
    WARPIPE_UINT32 = 0x0120,
    /// `uint64_t`.
    WARPIPE_UINT64 = 0x0140,
    /// `__half`.
    WARPIPE_FLOAT16 = 0x0210,
    /// `float`.
    WARPIPE_FLOAT32 = 0x0220,
    /// `double`.
    WARPIPE_FLOAT64 = 0x0240,
    /// `__nv_bfloat16`.
    WARPIPE_BFLOAT16 = 0x0410,
    /// Two `__half`.
    WARPIPE_COMPLEX32 = 0x0520,
    /// Two `float`.
    WARPIPE_COMPLEX64 = 0x0540,
    /// Two `double`.
    WARPIPE_COMPLEX128 = 0x0580,
    /// One byte, 0 or 1.
    WARPIPE_BOOL = 0x0608,
    /// 3 bits of exponent, 4 of mantissa.
    WARPIPE_FLOAT8_E3M4 = 0x0708,
    /// 4 bits of exponent, 3 of mantissa.
    WARPIPE_FLOAT8_E4M3 = 0x0808,
    /// As before, with a bias of 11, finite, and without a negative zero.
    WARPIPE_FLOAT8_E4M3B11FNUZ = 0x0908,
    /// 4 bits of exponent, 3 of mantissa, finite.
    WARPIPE_FLOAT8_E4M3FN = 0x0A08,
    /// As before, without a negative zero.
    WARPIPE_FLOAT8_E4M3FNUZ = 0x0B08,
    /// 5 bits of exponent, 2 of mantissa.
    WARPIPE_FLOAT8_E5M2 = 0x0C08,
    /// As before, finite, and without a negative zero.
    WARPIPE_FLOAT8_E5M2FNUZ = 0x0D08,
    /// 8 bits of exponent, and no sign.
    WARPIPE_FLOAT8_E8M0FNU = 0x0E08,
    /// Two values of 2 bits of exponent and 1 of mantissa, finite: one element of a byte, so
    /// lengths and strides count pairs. DLPack's 4 bits and 2 lanes.
    WARPIPE_FLOAT4_E2M1FN_X2 = 0x1108,
}

/// The layout of a tensor in its memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_layout {
    /// The element type, a `warpipe_dtype`.
    pub dtype: u32,
    /// The number of dimensions, 0 to `WARPIPE_RANK_MAX`. With 0 it is one element.
    pub rank: u32,
    /// The length of each dimension, in elements.
    pub shape: [u64; WARPIPE_RANK_MAX],
    /// The step of each dimension, in elements. May be negative.
    pub strides: [i64; WARPIPE_RANK_MAX],
    /// Bytes from the memory's first byte to the element with all indices 0.
    pub offset: u64,
    /// Bytes from the first to behind the last byte that the tensor, or its slot, takes.
    /// Computed; ignored in an argument.
    pub bytes: u64,
}

fn dtype_of(dtype: u32) -> Result<DType> {
    let known = u16::try_from(dtype)
        .ok()
        .and_then(|number| DType::from_dlpack((number >> 8) as u8, number as u8));
    known.ok_or_else(|| Failure::argument("dtype", format!("{dtype:#x}"), "a warpipe_dtype"))
}

impl warpipe_layout {
    #[inline]
    pub(crate) fn of(layout: &Layout) -> warpipe_layout {
        let (shape, strides) = (layout.shape(), layout.strides());
        warpipe_layout {
            dtype: u32::from(layout.dtype().code()) << 8 | u32::from(layout.dtype().bits()),
            rank: shape.len() as u32,
            shape: std::array::from_fn(|axis| shape.get(axis).copied().unwrap_or(0)),
            strides: std::array::from_fn(|axis| strides.get(axis).copied().unwrap_or(0)),
            offset: layout.offset(),
            bytes: layout.bytes(),
        }
    }

    pub(crate) fn check(&self) -> Result<Layout> {
        self.checked(|layout| Ok(*layout))
    }

    /// Checks it, and passes it to `work` where it was written: a move right after that is slow.
    #[inline(always)]
    pub(crate) fn checked<R>(&self, work: impl FnOnce(&Layout) -> Result<R>) -> Result<R> {
        let rank = self.rank as usize;
        if rank > WARPIPE_RANK_MAX {
            let allowed = format!("0 to {WARPIPE_RANK_MAX}");
            return Err(Failure::argument("layout->rank", rank, allowed));
        }
        let (shape, strides) = (&self.shape[..rank], &self.strides[..rank]);
        match Layout::strided(dtype_of(self.dtype)?, shape, strides, self.offset) {
            Ok(ref layout) => work(layout),
            Err(error) => Err(error.into()),
        }
    }
}

/// A copy of the caller's layout.
///
/// # Safety
/// `layout` is null or the address of one.
#[inline(always)]
pub(crate) unsafe fn layout_copy(layout: *const warpipe_layout) -> Result<warpipe_layout> {
    if layout.is_null() {
        return Err(Failure::null("layout"));
    }
    // SAFETY: not null; every field is a number, so that any bytes are valid.
    Ok(unsafe { layout.read_unaligned() })
}

/// A checked copy of the caller's layout.
///
/// # Safety
/// As for [`layout_copy`].
pub(crate) unsafe fn layout_of(layout: *const warpipe_layout) -> Result<Layout> {
    // SAFETY: the caller's promise.
    unsafe { layout_copy(layout) }?.check()
}

/// Fills in the layout of a tensor in row-major order without gaps.
///
/// `shape` has `rank` lengths; it may be null if `rank` is 0.
///
/// `WARPIPE_INVALID_INPUT`: too many dimensions, an unknown element type, or more bytes than
/// `INT64_MAX`.
///
/// # Safety
/// `shape` is the address of `rank` numbers, `layout` that of a layout.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_layout_contiguous(
    dtype: u32,
    shape: *const u64,
    rank: u32,
    layout: *mut warpipe_layout,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promises.
        let shape = unsafe { slice("shape", shape, rank as usize) }?;
        // SAFETY: the caller's promise.
        let place = unsafe { out("layout", layout) }?;
        let layout = Layout::contiguous(dtype_of(dtype)?, shape)?;
        place.put(warpipe_layout::of(&layout));
        Ok(())
    })
}

/// Checks a layout that the caller has filled in, and computes its `bytes`.
///
/// `WARPIPE_INVALID_INPUT`: it names no tensor, or reaches before the memory's first byte.
///
/// # Safety
/// `layout` is the address of a layout.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_layout_check(layout: *mut warpipe_layout) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let (checked, place) = unsafe { (layout_of(layout)?, out("layout", layout)?) };
        place.put(warpipe_layout::of(&checked));
        Ok(())
    })
}
