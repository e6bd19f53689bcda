//! Tensors of other frameworks, read and checked. **This module is marked for unsafe**: it reads
//! structures by their address, and calls their deleters.

use std::ptr::NonNull;

use warpipe::{DType, RANK_MAX};

use crate::abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor, FLAG_IS_COPIED,
    FLAG_READ_ONLY, VERSION,
};
use crate::refusal::Refusal;

/// A tensor of another framework: a checked copy of its fields, and its memory until this is
/// dropped, which calls the deleter.
///
/// The checks are of the fields alone. [`Layout::strided`](warpipe::Layout::strided) refuses shapes
/// and strides that reach further than memory can.
#[derive(Debug)]
pub struct Imported {
    device: DLDevice,
    dtype: DType,
    rank: usize,
    shape: [u64; RANK_MAX],
    strides: [i64; RANK_MAX],
    address: u64,
    flags: u64,
    _deletion: Deletion,
}

/// The call of the deleter that a tensor is owed.
#[derive(Debug)]
#[expect(dead_code, reason = "held until they are dropped")]
enum Deletion {
    Legacy(Deleter<DLManagedTensor>),
    Versioned(Deleter<DLManagedTensorVersioned>),
}

/// Calls a tensor's deleter when dropped.
#[derive(Debug)]
struct Deleter<Managed> {
    tensor: NonNull<Managed>,
    function: Option<unsafe extern "C" fn(*mut Managed)>,
}

// SAFETY: DLPack lets any thread call the deleter, and nothing else is done with the pointer.
unsafe impl<Managed> Send for Deleter<Managed> {}
// SAFETY: nothing is done through a shared reference.
unsafe impl<Managed> Sync for Deleter<Managed> {}

impl<Managed> Drop for Deleter<Managed> {
    fn drop(&mut self) {
        if let Some(function) = self.function {
            // SAFETY: made by `Imported::from_versioned` or `Imported::from_legacy`, to which the
            // caller gave the tensor and this one call.
            unsafe { function(self.tensor.as_ptr()) };
        }
    }
}

impl Imported {
    /// Takes a tensor. On a refusal its deleter is not called: the tensor is still the caller's.
    ///
    /// # Errors
    /// [`Refusal::Version`], for which only `version` is read; otherwise as
    /// [`from_legacy`](Self::from_legacy).
    ///
    /// # Safety
    /// * `tensor` is a structure of DLPack that the caller owns: no one else calls its deleter or
    ///   changes it during this call, nor afterwards unless it was refused.
    /// * Of major version 1, its `shape` and `strides` are null or point to `ndim` numbers each, if
    ///   `ndim` is 1 to [`RANK_MAX`]. All other values are checked.
    /// * Its deleter may be called on any thread, as DLPack says.
    pub unsafe fn from_versioned(
        tensor: NonNull<DLManagedTensorVersioned>,
    ) -> Result<Imported, Refusal> {
        // SAFETY: the caller's promise. The version comes first in every version.
        let version = unsafe { (&raw const (*tensor.as_ptr()).version).read() };
        if version.major != VERSION.major {
            return Err(Refusal::Version {
                major: version.major,
                minor: version.minor,
            });
        }
        // SAFETY: of this major version it has all these fields.
        let copy = unsafe { tensor.read() };
        let deletion = || {
            Deletion::Versioned(Deleter {
                tensor,
                function: copy.deleter,
            })
        };
        // SAFETY: the caller's promise of shape and strides.
        unsafe { Imported::check(&copy.dl_tensor, copy.flags, deletion) }
    }

    /// Takes a tensor without a version. It has no flags, so it says neither
    /// [`is_read_only`](Self::is_read_only) nor [`is_copied`](Self::is_copied). On a refusal its
    /// deleter is not called: the tensor is still the caller's.
    ///
    /// # Errors
    /// [`Refusal::Rank`], [`ElementType`](Refusal::ElementType),
    /// [`NullShape`](Refusal::NullShape), [`NegativeLength`](Refusal::NegativeLength),
    /// [`NullData`](Refusal::NullData) and [`Offset`](Refusal::Offset).
    ///
    /// # Safety
    /// As [`from_versioned`](Self::from_versioned), of major version 1.
    pub unsafe fn from_legacy(tensor: NonNull<DLManagedTensor>) -> Result<Imported, Refusal> {
        // SAFETY: the caller's promise.
        let copy = unsafe { tensor.read() };
        let deletion = || {
            Deletion::Legacy(Deleter {
                tensor,
                function: copy.deleter,
            })
        };
        // SAFETY: the caller's promise of shape and strides.
        unsafe { Imported::check(&copy.dl_tensor, 0, deletion) }
    }

    /// Checks a copy of the tensor; asks for the `deletion` only if it is taken.
    ///
    /// # Safety
    /// As [`from_versioned`](Self::from_versioned) has it of shape and strides.
    unsafe fn check(
        tensor: &DLTensor,
        flags: u64,
        deletion: impl FnOnce() -> Deletion,
    ) -> Result<Imported, Refusal> {
        let rank = usize::try_from(tensor.ndim)
            .ok()
            .filter(|&rank| rank <= RANK_MAX)
            .ok_or(Refusal::Rank { ndim: tensor.ndim })?;
        let dtype = element_type(tensor.dtype)?;
        if rank > 0 && tensor.shape.is_null() {
            return Err(Refusal::NullShape);
        }
        // SAFETY: not null unless `rank` is 0; the caller's promise.
        let lengths = unsafe { numbers(tensor.shape, rank) };
        let mut shape = [0; RANK_MAX];
        for (to, &length) in shape.iter_mut().zip(&lengths[..rank]) {
            *to = u64::try_from(length).map_err(|_| Refusal::NegativeLength {
                shape: lengths[..rank].to_vec(),
            })?;
        }
        let strides = if tensor.strides.is_null() {
            let mut strides = [0; RANK_MAX];
            write_row_major(&shape[..rank], &mut strides[..rank]);
            strides
        } else {
            // SAFETY: not null; the caller's promise.
            unsafe { numbers(tensor.strides, rank) }
        };
        if tensor.data.is_null() && !shape[..rank].contains(&0) {
            return Err(Refusal::NullData);
        }
        let data = tensor.data.expose_provenance() as u64;
        let byte_offset = tensor.byte_offset;
        let address = data
            .checked_add(byte_offset)
            .ok_or(Refusal::Offset { data, byte_offset })?;
        Ok(Imported {
            device: tensor.device,
            dtype,
            rank,
            shape,
            strides,
            address,
            flags,
            _deletion: deletion(),
        })
    }

    /// The device that the tensor says; any number is possible.
    pub fn device(&self) -> DLDevice {
        self.device
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions, outermost first, in elements. At most [`RANK_MAX`].
    pub fn shape(&self) -> &[u64] {
        &self.shape[..self.rank]
    }

    /// The strides, in elements, as many as [`shape`](Self::shape) has lengths; any number is
    /// possible.
    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.rank]
    }

    /// The address of the element with all indices 0. Not null if the tensor has elements. The
    /// provenance of the memory is exposed.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Whether the memory must not be written.
    pub fn is_read_only(&self) -> bool {
        self.flags & FLAG_READ_ONLY != 0
    }

    /// Whether the memory is a copy that was made for this import.
    pub fn is_copied(&self) -> bool {
        self.flags & FLAG_IS_COPIED != 0
    }
}

fn element_type(dtype: DLDataType) -> Result<DType, Refusal> {
    let DLDataType { code, bits, lanes } = dtype;
    let width = u8::try_from(lanes)
        .ok()
        .and_then(|lanes| bits.checked_mul(lanes));
    width
        .and_then(|width| DType::from_dlpack(code, width))
        .filter(|dtype| dtype.lanes() == lanes)
        .ok_or(Refusal::ElementType { code, bits, lanes })
}

/// The first `count` numbers from an address on, which need not be aligned.
///
/// # Safety
/// They are there, and `count` is at most [`RANK_MAX`].
unsafe fn numbers(from: *const i64, count: usize) -> [i64; RANK_MAX] {
    let mut numbers = [0; RANK_MAX];
    for (index, number) in numbers[..count].iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *number = unsafe { from.add(index).read_unaligned() };
    }
    numbers
}

/// The strides of a tensor in row-major order without gaps, in elements. One that no address can
/// reach is cut to `i64::MAX`, and [`Layout`](warpipe::Layout) refuses it.
pub fn row_major(shape: &[u64]) -> Vec<i64> {
    let mut strides = vec![0; shape.len()];
    write_row_major(shape, &mut strides);
    strides
}

fn write_row_major(shape: &[u64], strides: &mut [i64]) {
    let mut step = 1i64;
    for (stride, &length) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.saturating_mul(i64::try_from(length.max(1)).unwrap_or(i64::MAX));
    }
}
