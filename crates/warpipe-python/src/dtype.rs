//! Element types and shapes as Python's frameworks write them.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyString, PyType};
use warpipe::DType;
use warpipe::tensor::RANK_MAX;

use crate::errors::Fault;

/// What an argument names: `"float32"`, `np.float32`, `np.dtype("f4")`, `torch.float32`, `ml_dtypes.bfloat16`, `float`.
pub fn from_argument(found: &Bound<'_, PyAny>) -> PyResult<DType> {
    let name = name_of(found)?;
    let bare = name.strip_prefix("torch.").unwrap_or(&name);
    DType::from_name(bare).ok_or_else(|| {
        let known = DType::ALL.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
        Fault::dtype(format!("{name:?}"), &format!("is not one that can be sent; there are {known}")).into()
    })
}

fn name_of(found: &Bound<'_, PyAny>) -> PyResult<String> {
    let py = found.py();
    if let Ok(name) = found.cast::<PyString>() {
        return Ok(name.to_str()?.to_owned());
    }
    for (class, name) in
        [(py.get_type::<PyBool>(), "bool"), (py.get_type::<PyInt>(), "int64"), (py.get_type::<PyFloat>(), "float64")]
    {
        if found.is(&class) {
            return Ok(name.to_owned());
        }
    }
    // `np.dtype`, and JAX's scalar types, which are classes with a `dtype` of their own.
    let holder = found.getattr("dtype").unwrap_or_else(|_| found.clone());
    if let Ok(name) = holder.getattr("name").and_then(|name| name.extract::<String>()) {
        return Ok(name);
    }
    match found.cast::<PyType>() {
        Ok(class) => Ok(class.name()?.to_str()?.trim_end_matches('_').to_owned()),
        Err(_) => Ok(found.str()?.to_str()?.to_owned()),
    }
}

/// The type of an array interface's `typestr`; `name` is the element type's own where the string cannot say it.
pub fn from_typestr(typestr: &str, name: impl FnOnce() -> Option<String>) -> PyResult<DType> {
    let unknown = |next: &str| Fault::dtype(format!("{typestr:?}"), next);
    let mut letters = typestr.chars();
    let (order, kind) = (letters.next(), letters.next());
    let bytes: Option<u16> = letters.as_str().parse().ok();
    let (Some(order), Some(kind), Some(bytes)) = (order, kind, bytes) else {
        return Err(unknown("is no type string of the array interface").into());
    };
    if order == '>' && bytes > 1 {
        return Err(unknown("is big-endian, and no device computes with that; convert it with `.astype`").into());
    }
    let code = match kind {
        'i' => 0,
        'u' => 1,
        'f' => 2,
        'c' => 5,
        'b' => 6,
        'V' => u8::MAX,
        _ => return Err(unknown("has no numbers that a device knows; convert it with `.astype`").into()),
    };
    let bits = u8::try_from(bytes.saturating_mul(8)).ok();
    let known = bits.and_then(|bits| DType::from_dlpack(code, bits));
    // What NumPy has from elsewhere is a structure to the letters, or a float of one byte.
    let named = || name().and_then(|name| DType::from_name(&name)).filter(|named| named.bytes() == u64::from(bytes));
    Ok(known.or_else(named).ok_or_else(|| unknown("is not one that can be sent; convert it with `.astype`"))?)
}

/// The array interface's `typestr`; `None` for what it has no letter for.
pub fn typestr(dtype: DType) -> Option<String> {
    let kind = match dtype.code() {
        0 => 'i',
        1 => 'u',
        2 => 'f',
        5 if dtype.bits() > 32 => 'c',
        6 => 'b',
        _ => return None,
    };
    let order = if dtype.bytes() == 1 { '|' } else { '<' };
    Some(format!("{order}{kind}{}", dtype.bytes()))
}

/// A shape: one length, or a sequence of them.
pub fn shape(found: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Ok(length) = found.cast::<PyInt>() {
        return Ok(vec![dimension(length.as_any())?]);
    }
    let mut shape = Vec::new();
    for length in found.try_iter()? {
        if shape.len() == RANK_MAX {
            return Err(Fault::layout(format!("more than {RANK_MAX} dimensions")).into());
        }
        shape.push(dimension(&length?)?);
    }
    Ok(shape)
}

fn dimension(found: &Bound<'_, PyAny>) -> PyResult<u64> {
    let length: i64 = found.extract()?;
    u64::try_from(length).map_err(|_| Fault::layout(format!("a dimension of {length}; it must be 0 or more")).into())
}

/// The layout of a row-major tensor.
pub fn layout(shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<warpipe::Layout> {
    Ok(warpipe::Layout::contiguous(from_argument(dtype)?, &self::shape(shape)?).map_err(crate::errors::Fault::from)?)
}
