//! Element types and shapes as Python's frameworks write them.

use std::ffi::CStr;
use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use warpipe::{DType, RANK_MAX};

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
    let (name, is_constant) = module
        .call_method1("name_of", (found,))?
        .extract::<(String, bool)>()?;
    let dtype = match DType::from_name(&name) {
        Some(dtype) => dtype,
        None => from_typestr(&name, || None)?,
    };
    if is_constant {
        remember(found, dtype);
    }
    Ok(dtype)
}

/// Never blocks on the table: a forked child may find its lock held for ever, and the table only
/// saves time.
fn known(found: &Bound<'_, PyAny>) -> Option<DType> {
    let table = KNOWN.try_lock().ok()?;
    table
        .iter()
        .find(|(known, _)| known.is(found))
        .map(|(_, dtype)| *dtype)
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

/// The type of an array interface's `typestr`; `name` is the element type's own where the string
/// cannot say it.
pub fn from_typestr(typestr: &str, name: impl FnOnce() -> Option<String>) -> PyResult<DType> {
    let parsed = typestr.split_at_checked(2).and_then(|(head, bytes)| {
        let code = match &head[1..] {
            "i" => 0,
            "u" => 1,
            "f" => 2,
            "c" => 5,
            "b" => 6,
            // Structures, and what has a letter of its own.
            _ => u8::MAX,
        };
        let bytes: u16 = bytes.parse().ok()?;
        (bytes == 1 || !head.starts_with('>')).then_some((code, bytes))
    });
    let known = parsed.and_then(|(code, bytes)| {
        DType::from_dlpack(code, u8::try_from(bytes.saturating_mul(8)).ok()?)
    });
    if let Some(known) = known {
        return Ok(known);
    }
    // NumPy's array interface describes a type from another package as a structure, or as a float
    // of one byte.
    let name = name();
    let named = name.as_deref().and_then(DType::from_name);
    let is_as_wide = |named: &DType| parsed.is_some_and(|(_, n)| named.bytes() == u64::from(n));
    if let Some(named) = named.filter(is_as_wide) {
        return Ok(named);
    }
    Python::attach(|py| {
        let module = py.import("warpipe._dtypes")?;
        Err(PyErr::from_value(
            module.call_method1("refusal", (typestr, name))?,
        ))
    })
}

/// The type of a buffer's `format` (PEP 3118), of which each element takes so many bytes.
pub fn from_buffer_format(py: Python<'_>, format: &CStr, bytes: usize) -> PyResult<DType> {
    let module = py.import("warpipe._dtypes")?;
    let typestr = module.call_method1("of_format", (format.to_string_lossy(), bytes))?;
    from_typestr(typestr.cast::<PyString>()?.to_str()?, || None)
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
    module
        .call_method1("shape_of", (found, RANK_MAX))?
        .extract()
}

/// The layout of a row-major tensor.
pub fn layout(shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<warpipe::Layout> {
    Ok(
        warpipe::Layout::contiguous(from_argument(dtype)?, &self::shape(shape)?)
            .map_err(crate::errors::Fault::from)?,
    )
}
