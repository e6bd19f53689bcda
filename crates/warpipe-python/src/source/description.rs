//! Shape, strides and address of a tensor, as DLPack or an array interface states them.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyIndexError, PyOverflowError, PyTypeError, PyUnicodeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use warpipe::{DType, Layout};
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

    /// Reads `__array_interface__` or `__cuda_array_interface__`, versions 2 and 3.
    pub(super) fn of_interface(
        owner: &Bound<'_, PyAny>,
        interface: &Bound<'_, PyDict>,
    ) -> PyResult<ArrayDescription> {
        let missing = |key: &str| Fault::layout(format!("its array interface has no {key}"));
        let get = |key: &str| {
            interface
                .get_item(key)
                .map(|found| found.filter(|value| !value.is_none()))
        };
        if get("mask")?.is_some() {
            return Err(Fault::layout("it is masked; fill it first").into());
        }
        let typestr = get("typestr")?.ok_or_else(|| missing("typestr"))?;
        let typestr: String = array_description("typestr", &typestr, typestr.extract())?;
        let named = || {
            owner
                .getattr("dtype")
                .and_then(|dtype| dtype.getattr("name"))
                .and_then(|name| name.extract())
                .ok()
        };
        let dtype = dtype::from_typestr(&typestr, named)?;
        let shape = get("shape")?.ok_or_else(|| missing("shape"))?;
        let shape = array_description("shape", &shape, dtype::shape(&shape))?;
        let data = get("data")?.ok_or_else(|| missing("data"))?;
        let Ok(data) = data.cast::<PyTuple>() else {
            return Err(Fault::layout(
                "its array interface gives a buffer and no address; send numpy.asarray(it)",
            )
            .into());
        };
        let address = data.get_item(0).and_then(|address| address.extract());
        let address: Option<u64> = array_description("data", data, address)?;
        let strides = match get("strides")? {
            None => row_major(&shape),
            Some(strides) => {
                array_description("strides", &strides, in_elements(&strides, &shape, dtype))?
            }
        };
        if strides.len() != shape.len() {
            return Err(Fault::layout(format!(
                "{} dimensions but {} strides",
                shape.len(),
                strides.len()
            ))
            .into());
        }
        let address = address.unwrap_or(0);
        if address == 0 && !shape.contains(&0) {
            return Err(Fault::layout("its data is null").into());
        }
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

/// The value of an interface's key. A value of a wrong type becomes a layout error.
fn array_description<T>(key: &str, value: &Bound<'_, PyAny>, read: PyResult<T>) -> PyResult<T> {
    let py = value.py();
    read.map_err(|error| {
        let wrong = error.is_instance_of::<PyTypeError>(py)
            || error.is_instance_of::<PyOverflowError>(py)
            || error.is_instance_of::<PyIndexError>(py)
            || error.is_instance_of::<PyUnicodeError>(py);
        if wrong {
            Fault::layout(format!("its array interface gives {value} as {key}")).into()
        } else {
            error
        }
    })
}

fn in_elements(strides: &Bound<'_, PyAny>, shape: &[u64], dtype: DType) -> PyResult<Vec<i64>> {
    whole_elements(&strides.extract::<Vec<i64>>()?, shape, dtype)
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

/// The dict of an array interface, if the object has one.
pub(super) fn interface<'py>(
    found: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    match found.getattr(name) {
        Ok(interface) => Ok(interface.cast_into::<PyDict>().ok()),
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyAttributeError>(found.py()) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
