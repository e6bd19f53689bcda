//! Futures as tasks of asyncio.

use std::sync::{Mutex, PoisonError};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// The coroutines in which tasks wait for one outcome. They let a future be a task, too: it is a
/// coroutine to ``asyncio.create_task``.
#[derive(Debug, Default)]
pub struct Waits(Mutex<Option<Py<PyDict>>>);

impl Waits {
    fn table<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table
            .get_or_insert_with(|| PyDict::new(py).unbind())
            .bind(py)
            .clone()
    }

    /// Forwards one step of the running task: `how` is ``"send"``, ``"throw"`` or ``"close"``.
    pub fn step<'py>(
        &self,
        awaited: &Bound<'py, PyAny>,
        how: &str,
        arguments: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = awaited.py();
        py.import("warpipe._queue")?
            .call_method1("step", (self.table(py), awaited, how, arguments))
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.0
            .try_lock()
            .map_or(Ok(()), |table| visit.call(&*table))
    }

    /// For the garbage collector.
    pub fn clear(&self) {
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(table);
    }
}
