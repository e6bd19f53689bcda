//! What Python may close before it lets go of it.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::detached::DropDetached;
use crate::errors::{Fault, Outcome};
use crate::interpreter_exit::{self, Closable};
use crate::process::Home;

/// One of the library's handles, until it is closed. Who is using it meanwhile keeps it so long.
#[derive(Debug)]
pub struct CloseableHandle<T: Send> {
    home: Home,
    what: &'static str,
    name: String,
    inner: Arc<Closable<T>>,
}

impl<T: Send> CloseableHandle<T> {
    /// An open one. `what` and `name` are for the error of who comes too late.
    pub fn unlisted(what: &'static str, name: impl Into<String>, inner: T) -> CloseableHandle<T> {
        CloseableHandle {
            home: Home::here(),
            what,
            name: name.into(),
            inner: Arc::new(Closable::new(inner)),
        }
    }

    /// The same, closed when the program ends.
    pub fn new(what: &'static str, name: impl Into<String>, inner: T) -> CloseableHandle<T>
    where
        T: Sync + 'static,
    {
        let handle = CloseableHandle::unlisted(what, name, inner);
        interpreter_exit::close_at_exit(&handle.inner);
        handle
    }

    /// What is behind it.
    pub fn get(&self) -> Outcome<Arc<DropDetached<T>>> {
        self.home.check()?;
        self.inner
            .get()
            .ok_or_else(|| Fault::closed(self.what, &self.name))
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it has been closed.
    pub fn is_closed(&self) -> Outcome<bool> {
        self.home.check()?;
        Ok(self.inner.get().is_none())
    }

    /// Lets go of it without its end, which would wait for what does not come.
    pub fn abandon(&self) -> Outcome<()> {
        self.home.check()?;
        std::mem::forget(self.inner.take());
        Ok(())
    }

    /// Closes it, without the interpreter: what is dropped may have to wait a moment.
    pub fn close(&self, py: Python<'_>) -> PyResult<()>
    where
        T: Sync,
    {
        self.home.check()?;
        let inner = self.inner.take();
        py.detach(|| drop(inner));
        Ok(())
    }
}
