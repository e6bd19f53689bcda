//! Shape, strides and address of a tensor, as DLPack or an array interface states them.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use warpipe::{DType, Layout, RANK_MAX};
use warpipe_dlpack::{Imported, row_major};

use super::Wanted;
use crate::dtype;
use crate::errors::{Fault, Outcome};

/// Shape, strides and address as an object states them.
pub(super) struct ArrayDescription {
    pub(super) dtype: DType,
    pub(super) shape: Vec<u64>,
    /// In elements.
    pub(super) strides: Vec<i64>,
    pub(super) address: u64,
}

/// The extent of a tensor's elements in memory.
struct ByteExtent {
    /// From the element with all indices 0 down to the lowest byte.
    below: u64,
    /// From the lowest byte to one past the highest.
    bytes: u64,
    /// It has gaps, runs backwards, or is not in the required order.
    must_gather: bool,
}

impl ArrayDescription {
    pub(super) fn new(
        dtype: DType,
        shape: Vec<u64>,
        mut strides: Vec<i64>,
        address: u64,
    ) -> ArrayDescription {
        // The stride of a dimension of length 1, or of an empty tensor, has no meaning: normalise it.
        let is_empty = shape.contains(&0);
        for ((stride, plain), &length) in strides.iter_mut().zip(row_major(&shape)).zip(&shape) {
            if is_empty || length == 1 {
                *stride = plain;
            }
        }
        ArrayDescription {
            dtype,
            shape,
            strides,
            address,
        }
    }

    pub(super) fn of_import(tensor: &Imported) -> ArrayDescription {
        ArrayDescription::new(
            tensor.dtype(),
            tensor.shape().to_vec(),
            tensor.strides().to_vec(),
            tensor.address(),
        )
    }

    /// Reads a buffer (PEP 3118).
    pub(super) fn of_buffer(
        py: Python<'_>,
        buffer: &PyUntypedBuffer,
    ) -> PyResult<ArrayDescription> {
        if buffer.suboffsets().is_some() {
            return Err(Fault::layout("its rows are pointers; copy it first").into());
        }
        let dtype = dtype::from_buffer_format(py, buffer.format(), buffer.item_size())?;
        let shape: Vec<u64> = buffer.shape().iter().map(|&length| length as u64).collect();
        let bytes: Vec<i64> = buffer.strides().iter().map(|&step| step as i64).collect();
        let address = buffer.buf_ptr().expose_provenance() as u64;
        if address == 0 && !shape.contains(&0) {
            return Err(Fault::layout("its data is null").into());
        }
        let strides = whole_elements(&bytes, &shape, dtype)?;
        Ok(ArrayDescription::new(dtype, shape, strides, address))
    }

    /// Reads `__array_interface__` or `__cuda_array_interface__`, versions 2 and 3: see `_tensors.py`.
    pub(super) fn of_interface(
        owner: &Bound<'_, PyAny>,
        interface: &Bound<'_, PyAny>,
    ) -> PyResult<ArrayDescription> {
        type Described<'py> = (Bound<'py, PyAny>, Vec<u64>, Option<Vec<i64>>, u64);
        let module = owner.py().import("warpipe._tensors")?;
        let described = module.call_method1("described", (owner, interface, RANK_MAX))?;
        let (name, shape, strides, address): Described<'_> = described.extract()?;
        let dtype = dtype::named(&name)?;
        let strides = match strides {
            Some(bytes) => whole_elements(&bytes, &shape, dtype)?,
            None => row_major(&shape),
        };
        Ok(ArrayDescription::new(dtype, shape, strides, address))
    }

    fn extent(&self, wanted: Wanted<'_>) -> Outcome<ByteExtent> {
        if self.shape.contains(&0) {
            return Ok(ByteExtent {
                below: 0,
                bytes: 0,
                must_gather: false,
            });
        }
        let too_far = || Fault::layout("it reaches further than an address can");
        let width = i128::from(self.dtype.bytes());
        let (mut low, mut high, mut elements) = (0i128, width, 1i128);
        for (&length, &stride) in self.shape.iter().zip(&self.strides) {
            let reach = (i128::from(length - 1) * i128::from(stride)).checked_mul(width);
            let reach = reach
                .filter(|reach| reach.unsigned_abs() < 1 << 62)
                .ok_or_else(too_far)?;
            if reach < 0 {
                low += reach
            } else {
                high += reach
            }
            elements = elements
                .checked_mul(i128::from(length))
                .filter(|&n| n < 1 << 62)
                .ok_or_else(too_far)?;
        }
        // A subscriber's DLPack has no negative strides: PyTorch ends the process that imports one.
        let is_reversed = !wanted.lasting
            && self
                .shape
                .iter()
                .zip(&self.strides)
                .any(|(&length, &stride)| length > 1 && stride < 0);
        let is_turned = wanted.packed && self.strides != row_major(&self.shape);
        let below = u64::try_from(-low).map_err(|_| too_far())?;
        let bytes = u64::try_from(high - low)
            .ok()
            .filter(|&bytes| bytes < 1 << 62)
            .ok_or_else(too_far)?;
        let lowest = self.address.checked_sub(below).ok_or_else(too_far)?;
        lowest.checked_add(bytes).ok_or_else(too_far)?;
        Ok(ByteExtent {
            below,
            bytes,
            must_gather: i128::from(bytes) > elements * width || is_reversed || is_turned,
        })
    }

    /// The layout of the tensor in a slot that begins with its lowest byte, the address of that,
    /// and whether it is to be gathered.
    pub(super) fn lie(&self, wanted: Wanted<'_>) -> Outcome<(Layout, u64, bool)> {
        let extent = self.extent(wanted)?;
        let layout = Layout::strided(self.dtype, &self.shape, &self.strides, extent.below)?;
        if layout.bytes() != extent.bytes {
            return Err(Fault::layout(format!(
                "{} bytes, or {}",
                layout.bytes(),
                extent.bytes
            )));
        }
        Ok((
            layout,
            self.address.wrapping_sub(extent.below),
            extent.must_gather,
        ))
    }
}

fn whole_elements(bytes: &[i64], shape: &[u64], dtype: DType) -> PyResult<Vec<i64>> {
    let width = dtype.bytes() as i64;
    // A stride along a length of 0 or 1 has no meaning.
    let is_stepped = |(stride, &length): (&i64, &u64)| stride % width != 0 && length > 1;
    let whole = shape.contains(&0) || !bytes.iter().zip(shape).any(is_stepped);
    if !whole {
        return Err(Fault::layout(format!(
            "strides of {bytes:?} bytes and elements of {width}; copy it first"
        ))
        .into());
    }
    Ok(bytes.iter().map(|stride| stride / width).collect())
}
