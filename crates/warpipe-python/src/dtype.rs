//! Element types and shapes as Python's frameworks write them.

use std::ffi::CStr;
use std::sync::Mutex;

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyString};
use warpipe::{DType, RANK_MAX};

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
    let unknown = |next: &str| Fault::dtype(format!("{typestr:?}"), next);
    let malformed = || unknown("is no type string of the array interface");
    let mut letters = typestr.chars();
    let (Some(order), Some(kind)) = (letters.next(), letters.next()) else {
        return Err(malformed().into());
    };
    let code = match kind {
        'i' => 0,
        'u' => 1,
        'f' => 2,
        'c' => 5,
        'b' => 6,
        // Objects, texts and times.
        'O' | 'S' | 'U' | 'a' | 't' | 'M' | 'm' => {
            return Err(
                unknown("is of objects, texts or times, and has no numbers that a device knows; convert it with `.astype`").into(),
            );
        }
        // Structures, and what has a letter of its own.
        _ => u8::MAX,
    };
    let bytes: u16 = letters.as_str().parse().map_err(|_| malformed())?;
    if order == '>' && bytes > 1 {
        return Err(unknown(
            "has the byte order of big-endian machines, and no device computes with that; convert it with `.astype`",
        )
        .into());
    }
    let bits = u8::try_from(bytes.saturating_mul(8)).ok();
    let known = bits.and_then(|bits| DType::from_dlpack(code, bits));
    // NumPy's array interface describes a type from another package as a structure, or as a float
    // of one byte.
    if let Some(known) = known {
        return Ok(known);
    }
    let name = name();
    let named = name
        .as_deref()
        .and_then(DType::from_name)
        .filter(|named| named.bytes() == u64::from(bytes));
    let found = format!("{:?}", name.as_deref().unwrap_or(typestr));
    Ok(named.ok_or_else(|| {
        Fault::dtype(
            found,
            "is not one that can be sent; convert it with `.astype`",
        )
    })?)
}

/// The type of a buffer's `format` (PEP 3118). The letter says the kind and `bytes` the width:
/// ctypes writes its `long` as a letter of four bytes.
pub fn from_buffer_format(format: &CStr, bytes: usize) -> PyResult<DType> {
    let format = format.to_string_lossy();
    let (order, letter) = match format.strip_prefix(['<', '>', '!', '=', '@']) {
        Some(letter) if format.starts_with(['>', '!']) => ('>', letter),
        Some(letter) => ('<', letter),
        None => ('<', &*format),
    };
    let kind = match letter {
        "b" | "h" | "i" | "l" | "q" | "n" => 'i',
        "B" | "H" | "I" | "L" | "Q" | "N" | "c" => 'u',
        "e" | "f" | "d" => 'f',
        "Zf" | "Zd" => 'c',
        "?" => 'b',
        _ => {
            let next = "is no number that a device knows; send an array of numbers";
            return Err(Fault::dtype(format!("{format:?}"), next).into());
        }
    };
    from_typestr(&format!("{order}{kind}{bytes}"), || None)
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
    if found.is_instance_of::<PyInt>() {
        return Ok(vec![dimension(found)?]);
    }
    // Strings and bytes can be iterated, but are no lengths.
    if found.is_instance_of::<PyString>() || found.is_instance_of::<PyBytes>() {
        return Err(Fault::layout(format!(
            "a shape of {}; give a tuple of lengths",
            found.repr()?
        ))
        .into());
    }
    let lengths = match found.try_iter() {
        Ok(lengths) => lengths,
        // An integer of another kind, NumPy's for example.
        Err(error) => {
            return found
                .extract::<i64>()
                .map_err(|_| error)
                .and_then(|_| Ok(vec![dimension(found)?]));
        }
    };
    let mut shape = Vec::new();
    for length in lengths {
        if shape.len() == RANK_MAX {
            return Err(Fault::layout(format!("more than {RANK_MAX} dimensions")).into());
        }
        shape.push(dimension(&length?)?);
    }
    Ok(shape)
}

fn dimension(found: &Bound<'_, PyAny>) -> PyResult<u64> {
    let said = || Fault::layout(format!("a dimension of {found}; it must be 0 to 2^63 - 1"));
    let length: i64 = found.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(found.py()) {
            said().into()
        } else {
            error
        }
    })?;
    Ok(u64::try_from(length).map_err(|_| said())?)
}

/// The layout of a row-major tensor.
pub fn layout(shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<warpipe::Layout> {
    Ok(
        warpipe::Layout::contiguous(from_argument(dtype)?, &self::shape(shape)?)
            .map_err(crate::errors::Fault::from)?,
    )
}
