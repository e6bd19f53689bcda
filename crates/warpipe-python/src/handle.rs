//! Handles that Python may close before it drops them, and the base of their classes.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use warpipe::Wait;

use crate::detached::DropDetached;
use crate::errors::{Fault, Outcome};
use crate::exclusive::locked;
use crate::interpreter_exit::{self, Endpoint};
use crate::process::Home;
use crate::wait::waiting;

/// A handle of the library, until it is closed. A call in progress keeps it alive.
#[derive(Debug)]
pub struct CloseableHandle<T: Send>(Arc<Handle<T>>);

#[derive(Debug)]
struct Handle<T: Send> {
    home: Home,
    what: &'static str,
    name: String,
    /// `None` once it is closed.
    open: Mutex<Option<Arc<DropDetached<T>>>>,
    used: Weak<DropDetached<T>>,
}

impl<T: Send + Sync> Endpoint for Handle<T> {
    fn end(&self, py: Python<'_>) {
        let inner = locked(&self.open).take();
        py.detach(|| drop(inner));
    }

    fn is_closed(&self) -> bool {
        locked(&self.open).is_none()
    }

    fn is_over(&self) -> bool {
        self.used.strong_count() == 0
    }
}

impl<T: Send + Sync + 'static> CloseableHandle<T> {
    /// Wraps an open handle. `what` and `name` are for the error after `close`.
    pub fn unlisted(what: &'static str, name: impl Into<String>, inner: T) -> CloseableHandle<T> {
        let open = Arc::new(DropDetached::new(inner));
        CloseableHandle(Arc::new(Handle {
            home: Home::here(),
            what,
            name: name.into(),
            used: Arc::downgrade(&open),
            open: Mutex::new(Some(open)),
        }))
    }

    /// The same, closed when the program ends.
    pub fn new(
        what: &'static str,
        name: impl Into<String>,
        inner: T,
    ) -> PyResult<CloseableHandle<T>> {
        let handle = CloseableHandle::unlisted(what, name, inner);
        interpreter_exit::close_at_exit(&handle.0)?;
        Ok(handle)
    }

    /// The library's handle.
    pub fn get(&self) -> Outcome<Arc<DropDetached<T>>> {
        self.open()?
            .ok_or_else(|| Fault::closed(self.0.what, &self.0.name))
    }

    /// The library's handle; `None` once it is closed.
    pub fn open(&self) -> Outcome<Option<Arc<DropDetached<T>>>> {
        self.0.home.check()?;
        Ok(locked(&self.0.open).clone())
    }

    /// A call of the library that waits at most `limit`, and until it is closed.
    pub fn wait<A: Send, E>(
        &self,
        py: Python<'_>,
        limit: Option<Duration>,
        call: impl FnOnce(&T, Wait<'_>) -> Result<A, E> + Send,
    ) -> PyResult<A>
    where
        Fault: From<E>,
    {
        let inner = self.get()?;
        let goes_on = || self.get().map(drop);
        waiting(py, limit, goes_on, |wait| Ok(call(&inner, wait)?))
    }

    /// The base of the class that holds it.
    pub fn base(&self) -> PyClassInitializer<Closeable> {
        let endpoint: Weak<Handle<T>> = Arc::downgrade(&self.0);
        PyClassInitializer::from(Closeable {
            home: self.0.home,
            endpoint,
        })
    }

    /// The base of the class that holds it, with its name.
    pub fn named(&self) -> PyClassInitializer<Named> {
        let name = self.0.name.clone();
        self.base().add_subclass(Named { name })
    }

    /// An object of Python that holds a new handle.
    pub fn object<C: PyClass<BaseType = Named>>(
        py: Python<'_>,
        what: &'static str,
        name: &str,
        inner: T,
        class: impl FnOnce(CloseableHandle<T>) -> C,
    ) -> PyResult<Py<C>> {
        let handle = CloseableHandle::new(what, name, inner)?;
        let base = handle.named();
        Py::new(py, base.add_subclass(class(handle)))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Whether it has been closed.
    pub fn is_closed(&self) -> Outcome<bool> {
        Ok(self.open()?.is_none())
    }

    /// Takes it out, to be dropped without the interpreter; `None` once it is closed.
    pub fn take(&self) -> Outcome<Option<Arc<DropDetached<T>>>> {
        self.0.home.check()?;
        Ok(locked(&self.0.open).take())
    }

    /// An error in a forked child.
    pub fn check(&self) -> Outcome<()> {
        self.0.home.check()
    }

    /// Closes it, without the interpreter: the drop may have to wait a moment.
    pub fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.take()?;
        py.detach(|| drop(inner));
        Ok(())
    }
}

/// The base of every class with ``closed``: ``Publisher``, ``Queue``, ``Timeline`` and others. The
/// end of a ``with`` block closes it, and so does dropping it.
#[pyclass(frozen, subclass, module = "warpipe", weakref)]
#[derive(Debug)]
pub struct Closeable {
    home: Home,
    /// The subclass holds it, and drops it in its own order.
    endpoint: Weak<dyn Endpoint>,
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

/// The base of a watch that Python makes of other calls.
#[pyclass(frozen, subclass, extends = Named, module = "warpipe", name = "_Bare")]
#[derive(Debug)]
pub struct Bare {
    handle: CloseableHandle<()>,
    /// The number that it begins after.
    #[pyo3(get, name = "_after")]
    after: u64,
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
    fn new(name: &str, after: u64) -> PyResult<PyClassInitializer<Bare>> {
        let handle = CloseableHandle::new("watch", name, ())?;
        Ok(handle.named().add_subclass(Bare { handle, after }))
    }

    /// Raises ``ClosedError``.
    fn _check(&self) -> PyResult<()> {
        Ok(self.check()?)
    }
}
