//! What Python may close before it lets go of it, and the wait for what somebody else has yet to open.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use warpipe::Error;

use crate::errors::{Fault, Outcome};
use crate::process::Home;
use crate::wait::{in_slices, late};

/// One of the library's handles, until it is closed. Who is using it meanwhile keeps it so long.
#[derive(Debug)]
pub struct Door<T> {
    home: Home,
    what: &'static str,
    name: String,
    /// `None` once it is closed.
    inner: Mutex<Option<Arc<T>>>,
}

impl<T> Door<T> {
    /// An open one. `what` and `name` are for the error of who comes too late.
    pub fn new(what: &'static str, name: impl Into<String>, inner: T) -> Door<T> {
        Door { home: Home::here(), what, name: name.into(), inner: Mutex::new(Some(Arc::new(inner))) }
    }

    fn lock(&self) -> Outcome<MutexGuard<'_, Option<Arc<T>>>> {
        self.home.check()?;
        Ok(self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What is behind it.
    pub fn get(&self) -> Outcome<Arc<T>> {
        self.lock()?.clone().ok_or_else(|| Fault::closed(self.what, &self.name))
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it has been closed.
    pub fn is_closed(&self) -> Outcome<bool> {
        Ok(self.lock()?.is_none())
    }

    /// Lets go of it without its end, which would wait for what does not come.
    pub fn abandon(&self) -> Outcome<()> {
        std::mem::forget(self.lock()?.take());
        Ok(())
    }

    /// Closes it, without the interpreter: what is dropped may have to wait a moment.
    pub fn close(&self, py: Python<'_>) -> PyResult<()>
    where
        T: Send + Sync,
    {
        let inner = self.lock()?.take();
        py.detach(|| drop(inner));
        Ok(())
    }
}

/// Opens what another process keeps, waiting up to `wait` (None: as long as it takes) for that to be there.
pub fn attach<T: Send>(
    py: Python<'_>,
    wait: Option<Duration>,
    mut open: impl FnMut(Duration) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let mut absent = None;
    let found = in_slices(py, wait, |slice| match open(slice) {
        Ok(found) => Ok(Some(found)),
        Err(error @ (Error::NoOwner { .. } | Error::NoPublisher { .. })) => {
            absent = Some(error);
            Ok(None)
        }
        Err(error) => Err(error.into()),
    })?;
    Ok(found.ok_or_else(|| absent.map_or_else(|| late("its owner".into(), wait), Fault::from))?)
}
