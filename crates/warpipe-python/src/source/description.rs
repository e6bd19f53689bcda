//! Shape, strides and address of a tensor, as DLPack or an array interface states them.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use warpipe::{DType, RANK_MAX};
use warpipe_dlpack::{Elements, Imported, row_major};

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
        let (shape, strides) = (tensor.shape().to_vec(), tensor.strides().to_vec());
        ArrayDescription::new(tensor.dtype(), shape, strides, tensor.address())
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

    /// The elements, and whether they are to be gathered: they have gaps, run backwards, or are not
    /// in the required order.
    pub(super) fn lie(&self, wanted: Wanted<'_>) -> Outcome<(Elements, bool)> {
        let elements = Elements::of(self.dtype, &self.shape, &self.strides, self.address)?;
        let layout = elements.layout();
        let whole = u128::from(layout.elements()) * u128::from(self.dtype.bytes());
        // A subscriber's DLPack has no negative strides: PyTorch ends the process that imports one.
        let mut steps = self.shape.iter().zip(&self.strides);
        let is_reversed = steps.any(|(&length, &stride)| length > 1 && stride < 0);
        let must_gather = u128::from(layout.bytes()) > whole
            || is_reversed && !wanted.lasting
            || wanted.packed && !layout.is_contiguous();
        Ok((elements, must_gather))
    }
}

fn whole_elements(bytes: &[i64], shape: &[u64], dtype: DType) -> PyResult<Vec<i64>> {
    let width = dtype.bytes() as i64;
    // A stride along a length of 0 or 1 has no meaning.
    let is_stepped = |(stride, &length): (&i64, &u64)| stride % width != 0 && length > 1;
    let whole = shape.contains(&0) || !bytes.iter().zip(shape).any(is_stepped);
    if !whole {
        let said = format!("strides of {bytes:?} bytes and elements of {width}; copy it first");
        return Err(Fault::layout(said).into());
    }
    Ok(bytes.iter().map(|stride| stride / width).collect())
}
