//! Element types and shapes as Python's frameworks write them.

use std::ffi::CStr;
use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use warpipe::{DType, RANK_MAX};

use crate::buffer;
use crate::errors::Fault;

/// The most objects remembered: beyond it the table starts anew.
const KNOWN_MAX: usize = 32;

/// Element types by their object. The table holds the object, so its address is not reused. It is
/// small, so a lookup scans it.
static KNOWN: Mutex<Vec<(Py<PyAny>, DType)>> = Mutex::new(Vec::new());

/// What an argument names: `"float32"`, `"f4"`, `np.float32`, `np.dtype("f4")`, `torch.float32`,
/// `ml_dtypes.bfloat16`, `float`.
pub fn from_argument(found: &Bound<'_, PyAny>) -> PyResult<DType> {
    let exact = found.cast::<PyString>().ok();
    let exact = exact.and_then(|name| DType::from_name(name.to_str().ok()?));
    if let Some(dtype) = exact.or_else(|| known(found)) {
        return Ok(dtype);
    }
    let module = found.py().import("warpipe._dtypes")?;
    let named = module.call_method1("name_of", (found,))?;
    let (name, is_constant) = named.extract::<(Bound<'_, PyAny>, bool)>()?;
    let dtype = self::named(&name)?;
    if is_constant {
        remember(found, dtype);
    }
    Ok(dtype)
}

/// Never blocks on the table: a forked child may find its lock held for ever, and the table only
/// saves time.
fn known(found: &Bound<'_, PyAny>) -> Option<DType> {
    let table = KNOWN.try_lock().ok()?;
    let known = table.iter().find(|(known, _)| known.is(found));
    known.map(|(_, dtype)| *dtype)
}

fn remember(found: &Bound<'_, PyAny>, dtype: DType) {
    let Ok(mut table) = KNOWN.try_lock() else {
        return;
    };
    let before = if table.len() >= KNOWN_MAX {
        std::mem::take(&mut *table)
    } else {
        Vec::new()
    };
    table.push((found.clone().unbind(), dtype));
    drop(table);
    // Without the lock: dropping an object may run Python code.
    drop(before);
}

/// The type of this name, which Python has given.
pub fn named(name: &Bound<'_, PyAny>) -> PyResult<DType> {
    let name = name.cast::<PyString>()?.to_str()?;
    let unknown = || Fault::Own("DTypeError", format!("element type {name} is not known"));
    Ok(DType::from_name(name).ok_or_else(unknown)?)
}

/// The type of a buffer's `format` (PEP 3118), of which each element takes so many bytes.
pub fn from_buffer_format(py: Python<'_>, format: &CStr, bytes: usize) -> PyResult<DType> {
    if let Some(known) = buffer::from_format(format, bytes) {
        return Ok(known);
    }
    let module = py.import("warpipe._dtypes")?;
    named(&module.call_method1("of_format", (format.to_string_lossy(), bytes))?)
}

/// The array interface's `typestr`; `None` for a type that it has no letter for.
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
    if let Ok(lengths) = found.cast::<PyTuple>()
        && lengths.len() <= RANK_MAX
        && let Ok(shape) = lengths.extract::<Vec<u64>>()
    {
        return Ok(shape);
    }
    let module = found.py().import("warpipe._dtypes")?;
    let shape = module.call_method1("shape_of", (found, RANK_MAX))?;
    shape.extract()
}

/// The layout of a row-major tensor.
pub fn layout(shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<warpipe::Layout> {
    let layout = warpipe::Layout::contiguous(from_argument(dtype)?, &self::shape(shape)?);
    Ok(layout.map_err(Fault::from)?)
}
