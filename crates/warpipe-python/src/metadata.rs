//! The metadata of a tensor: a JSON object of at most 4,096 bytes, readable from every language.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView};

use crate::errors::Fault;

/// The most bytes of metadata of a frame. A job's takes fewer: the queue's own takes a part.
const BYTES_MAX: usize = 4096;

/// The metadata of an argument: a dict as JSON, or the bytes of a buffer as they are.
#[derive(Debug, Clone)]
pub struct Metadata(pub Vec<u8>);

/// The library's refusal of metadata that is too long where it goes.
pub fn refused(error: impl std::fmt::Display) -> Fault {
    Fault::Own(
        "MetadataError",
        format!("{error}; send what is large as a tensor"),
    )
}

impl<'a, 'py> FromPyObject<'a, 'py> for Metadata {
    type Error = PyErr;

    fn extract(found: Borrowed<'a, 'py, PyAny>) -> PyResult<Metadata> {
        let bytes = match found.cast::<PyDict>() {
            Ok(dict) => dump(&dict)?.into_bytes(),
            Err(_) => bytes_of(&found)
                .map_err(|error| no_metadata(&found, error))?
                .as_bytes()
                .to_vec(),
        };
        if bytes.len() > BYTES_MAX {
            let found = format!("metadata is {} bytes", bytes.len());
            return Err(refused(format!("{found}; allowed is at most {BYTES_MAX} bytes")).into());
        }
        Ok(Metadata(bytes))
    }
}

/// The bytes of an object with the buffer protocol, in C order; a copy if they may change.
pub fn bytes_of<'py>(found: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    if let Ok(bytes) = found.cast::<PyBytes>() {
        return Ok(bytes.clone());
    }
    let copy = PyMemoryView::from(found)?.call_method0("tobytes")?;
    Ok(copy.cast_into()?)
}

/// The error for neither a dict nor a buffer; an exception that ends the program propagates.
fn no_metadata(found: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyException>(found.py()) {
        return error;
    }
    let said = |name| format!("the metadata is a {name}; give a dict, or bytes");
    match found.get_type().name() {
        Ok(name) => Fault::Own("MetadataError", said(name)).into(),
        Err(error) => error,
    }
}

fn dump(found: &Bound<'_, PyDict>) -> PyResult<String> {
    let py = found.py();
    let options = PyDict::new(py);
    options.set_item("separators", (",", ":"))?;
    options.set_item("ensure_ascii", false)?;
    options.set_item("allow_nan", false)?;
    let text = py
        .import("json")?
        .call_method("dumps", (found,), Some(&options));
    // A lone surrogate has no UTF-8 encoding.
    text.and_then(|text| text.extract())
        .map_err(|error| refusal(py, error))
}

/// The error for a dict that is no JSON; an exception that ends the program propagates.
fn refusal(py: Python<'_>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyException>(py) {
        return error;
    }
    let next = "use str, int, float, bool, None, list, dict";
    Fault::Own(
        "MetadataError",
        format!("the metadata cannot be JSON: {}; {next}", error.value(py)),
    )
    .into()
}

/// The dict of the bytes, which are untrusted: the sender states them.
pub fn decode<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    if bytes.is_empty() {
        return Ok(PyDict::new(py));
    }
    let parsed = match py
        .import("json")?
        .call_method1("loads", (PyBytes::new(py, bytes),))
    {
        Err(error) if !error.is_instance_of::<PyException>(py) => return Err(error),
        parsed => parsed.ok(),
    };
    let dict = parsed.and_then(|parsed| parsed.cast_into::<PyDict>().ok());
    let said = || {
        format!(
            "the metadata is {} bytes that are no JSON object; read metadata_bytes",
            bytes.len()
        )
    };
    dict.ok_or_else(|| Fault::Own("MetadataError", said()).into())
}
