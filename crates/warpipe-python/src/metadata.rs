//! The metadata of a tensor: a JSON object of at most 4,096 bytes, readable from every language.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::Fault;
use crate::thread_exit::prepare_exit;

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
        prepare_exit();
        let bytes = match found.cast::<PyBytes>() {
            Ok(bytes) => bytes.as_bytes().to_vec(),
            Err(_) => {
                let module = found.py().import("warpipe._metadata")?;
                module.call_method1("dump", (found,))?.extract()?
            }
        };
        if bytes.len() > BYTES_MAX {
            let found = format!("metadata is {} bytes", bytes.len());
            return Err(refused(format!("{found}; allowed is at most {BYTES_MAX} bytes")).into());
        }
        Ok(Metadata(bytes))
    }
}

/// The dict of the bytes, which are untrusted: the sender states them.
pub fn decode<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    if bytes.is_empty() {
        return Ok(PyDict::new(py));
    }
    let module = py.import("warpipe._metadata")?;
    let parsed = module.call_method1("load", (PyBytes::new(py, bytes),))?;
    Ok(parsed.cast_into()?)
}
