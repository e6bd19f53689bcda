//! Library calls and drops that run without the interpreter.
//! **This module is marked for unsafe**: it asks the interpreter whether this thread has it.
//!
//! A full launch queue blocks every call that gives its stream work, or queries it, for as long as
//! that stream waits; and the stream may wait for another thread of this program. So no call that
//! may enter the driver holds the interpreter. Methods release it (`py.detach`); [`detached`] and
//! [`DropDetached`] release it for drops.

use std::ffi::c_int;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use pyo3::prelude::*;

use crate::errors::Fault;

unsafe extern "C" {
    /// In every CPython, but not in its limited interface.
    safe fn PyGILState_Check() -> c_int;
}

/// Runs `work` without the interpreter, whether this thread holds it or not: another framework's
/// deleter may run on any thread.
pub fn detached<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    if PyGILState_Check() == 0 {
        return work();
    }
    let mut work = Some(work);
    let done = Python::try_attach(|py| work.take().map(|work| py.detach(work))).flatten();
    // A finalized interpreter is held by no thread.
    done.or_else(|| work.map(|work| work()))
        .expect("done once, here or there")
}

/// A call of the library without the interpreter.
pub fn call<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> warpipe::Result<T> + Send,
) -> PyResult<T> {
    Ok(py.detach(work).map_err(Fault::from)?)
}

/// A value of the library that is dropped without the interpreter.
#[derive(Debug)]
pub struct DropDetached<T: Send>(Option<T>);

impl<T: Send> DropDetached<T> {
    /// Wraps the value.
    pub fn new(inner: T) -> DropDetached<T> {
        DropDetached(Some(inner))
    }

    /// Takes the value out.
    pub fn into_inner(mut self) -> T {
        self.0.take().expect("present until dropped")
    }
}

impl<T: Send> Deref for DropDetached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("present until dropped")
    }
}

impl<T: Send> DerefMut for DropDetached<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("present until dropped")
    }
}

impl<T: Send> Drop for DropDetached<T> {
    fn drop(&mut self) {
        if let Some(inner) = self.0.take() {
            detached(|| drop(inner));
        }
    }
}

/// A stream of this package: the last reference destroys it.
#[derive(Debug, Clone)]
pub struct OwnStream(Arc<DropDetached<warpipe::Stream>>);

impl OwnStream {
    /// A new one.
    pub fn new(py: Python<'_>, device: &warpipe::Device) -> PyResult<OwnStream> {
        call(py, || device.stream()).map(OwnStream::of)
    }

    /// Wraps an existing one.
    pub fn of(stream: warpipe::Stream) -> OwnStream {
        OwnStream(Arc::new(DropDetached::new(stream)))
    }
}

impl Deref for OwnStream {
    type Target = warpipe::Stream;

    fn deref(&self) -> &warpipe::Stream {
        &self.0
    }
}
