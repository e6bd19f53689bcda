//! `Closeable`: the base of the classes that Python closes.

use std::sync::{Arc, Weak};

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors::{Fault, Outcome};
use crate::handle::CloseableHandle;
use crate::interpreter_exit::Endpoint;
use crate::process::Home;

/// The base of every class with ``closed``: ``Publisher``, ``Queue``, ``Timeline`` and others. The
/// end of a ``with`` block closes it, and so does dropping it.
#[pyclass(frozen, subclass, module = "warpipe", weakref)]
#[derive(Debug)]
pub struct Closeable {
    home: Home,
    /// The subclass holds it, and drops it in its own order.
    endpoint: Weak<dyn Endpoint>,
}

impl Closeable {
    /// The base of a class that holds `endpoint`, for `add_subclass`.
    pub fn of<E: Endpoint + 'static>(endpoint: &Arc<E>) -> PyClassInitializer<Closeable> {
        let endpoint: Weak<E> = Arc::downgrade(endpoint);
        PyClassInitializer::from(Closeable {
            home: Home::here(),
            endpoint,
        })
    }
}

#[pymethods]
impl Closeable {
    /// Whether it is closed in this process.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        self.home.check()?;
        let endpoint = self.endpoint.upgrade();
        Ok(endpoint.is_none_or(|endpoint| endpoint.is_closed()))
    }

    /// Closes it in this process. Closing twice is no error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.home.check()?;
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.end(py);
        }
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Closeable>) -> PyResult<Bound<'_, Closeable>> {
        if slf.get().closed()? {
            return Err(Fault::closed(&slf.get_type().name()?.to_string_lossy(), "").into());
        }
        Ok(slf)
    }

    /// Calls the class's own ``close``, which may do more.
    #[pyo3(signature = (*_exception))]
    fn __exit__(slf: &Bound<'_, Closeable>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        slf.call_method0("close").map(drop)
    }
}

/// The base of those of them that have a name in a domain.
#[pyclass(frozen, subclass, extends = Closeable, module = "warpipe", name = "_Named")]
#[derive(Debug)]
pub struct Named {
    /// Its name.
    #[pyo3(get)]
    name: String,
}

impl Named {
    /// The base of a class that holds `endpoint`, for `add_subclass`.
    pub fn of<E: Endpoint + 'static>(endpoint: &Arc<E>, name: &str) -> PyClassInitializer<Named> {
        Closeable::of(endpoint).add_subclass(Named {
            name: name.to_owned(),
        })
    }
}

/// The base of a watch that Python makes of other calls.
#[pyclass(frozen, subclass, extends = Named, module = "warpipe", name = "_Bare")]
#[derive(Debug)]
pub struct Bare {
    handle: CloseableHandle<()>,
}

impl Bare {
    /// An error once it is closed.
    pub fn check(&self) -> Outcome<()> {
        self.handle.get().map(drop)
    }
}

#[pymethods]
impl Bare {
    #[new]
    fn new(name: &str) -> PyResult<PyClassInitializer<Bare>> {
        let handle = CloseableHandle::new("watch", name, ())?;
        Ok(handle.named().add_subclass(Bare { handle }))
    }

    /// Raises ``ClosedError``.
    fn _check(&self) -> PyResult<()> {
        Ok(self.check()?)
    }
}
