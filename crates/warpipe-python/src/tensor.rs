//! Common to samples, loans and views: a tensor in held memory, as an array of any framework.
//! **This module is marked for unsafe**: it passes on buffers that the interpreter wants filled.

use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::exceptions::PyBaseException;
use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use warpipe::Layout;

use crate::array::{self, HostView};
use crate::buffer;
use crate::device::Device;
use crate::dlpack;
use crate::errors::{Fault, Outcome};
use crate::exclusive::locked;
use crate::memory::Memory;
use crate::process::Home;
use crate::stream::Consumer;
use crate::torch;
use crate::wait::Given;

/// A tensor's memory, until it is released.
#[derive(Debug)]
pub struct Holding {
    pub home: Home,
    /// For the error of a use after the release.
    pub what: &'static str,
    number: Option<u64>,
    /// The loan that this is a part of, which ends with it.
    loan: Option<Arc<Holding>>,
    pub device: warpipe::Device,
    pub layout: Layout,
    pub read_only: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` once it is released.
    memory: Option<Memory>,
    /// Some array interface was used. Its user references this object, so the memory stays as long
    /// as this object.
    pinned: Option<Memory>,
    /// The error of the last buffer. NumPy discards it and asks for the array interface next, which
    /// raises it: else a Ctrl-C would be lost, and a wait that ran out would begin again.
    discarded: Option<Py<PyBaseException>>,
}

impl Holding {
    /// For the `number`th of its kind, if they are counted; for a part of a `loan`.
    pub fn new(
        what: &'static str,
        number: Option<u64>,
        loan: Option<Arc<Holding>>,
        memory: Memory,
    ) -> Arc<Holding> {
        Arc::new(Holding {
            home: Home::here(),
            what,
            number,
            loan,
            device: memory.device.clone(),
            layout: memory.layout,
            read_only: memory.read_only,
            state: Mutex::new(State {
                memory: Some(memory),
                pinned: None,
                discarded: None,
            }),
        })
    }

    fn state(&self) -> Outcome<MutexGuard<'_, State>> {
        self.home.check()?;
        Ok(locked(&self.state))
    }

    /// The memory, while it is held.
    pub fn memory(&self) -> Outcome<Memory> {
        let memory = self.state()?.memory.clone();
        memory
            .filter(|_| !self.has_loan_ended())
            .ok_or_else(|| self.released())
    }

    /// The memory, for a user that references this object instead of a hold.
    fn pinned(&self) -> Outcome<Memory> {
        let memory = self.memory()?;
        let before = self.state()?.pinned.replace(memory.clone());
        // Without the lock, as any value that may have to be dropped.
        drop(before);
        Ok(memory)
    }

    /// Prepares `memory` for a buffer.
    fn settle_buffer(&self, py: Python<'_>, memory: &Memory) -> PyResult<()> {
        let settled = memory.settle(py);
        let failure = settled.as_ref().err();
        let failure = failure.map(|error| error.value(py).clone().unbind());
        let before = std::mem::replace(&mut self.state()?.discarded, failure);
        drop(before);
        settled
    }

    /// Gives up the object's part of the memory; `None` if that was done before.
    pub fn let_go(&self) -> Outcome<Option<Memory>> {
        Ok(self.state()?.memory.take())
    }

    /// Whether it is released.
    pub fn is_released(&self) -> Outcome<bool> {
        Ok(self.state()?.memory.is_none() || self.has_loan_ended())
    }

    fn has_loan_ended(&self) -> bool {
        let loan = self.loan.as_ref();
        loan.is_some_and(|loan| loan.is_released().unwrap_or(true))
    }

    /// The error of a use after the release.
    pub fn released(&self) -> Fault {
        match self.number {
            Some(number) => Fault::released(&format!("{} {number}", self.what)),
            None => Fault::released(self.what),
        }
    }

    /// Gives up the object's part of the memory, not before the work of `stream` so far.
    pub fn release(&self, py: Python<'_>, stream: Given<'_, '_>) -> PyResult<()> {
        let consumer = Consumer::optional(py, &self.device, stream)?;
        let memory = self.let_go()?;
        if let (Some(memory), Some(consumer)) = (&memory, &consumer) {
            memory.hold.note(py, consumer)?;
        }
        py.detach(|| drop(memory));
        Ok(())
    }

    /// The elements as bytes in row-major order, copied once no work writes them any more.
    pub fn bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.memory()?.packed(py)?.1))
    }
}

/// A tensor in memory that warpipe holds: the base of ``Sample``, ``Loan`` and ``View``.
///
/// It is an array of any framework, in place: ``torch()``, ``cupy()``, ``numpy()``, or any consumer
/// of DLPack, ``__cuda_array_interface__`` or, on the host, ``__array_interface__`` and Python's
/// buffer protocol (``memoryview``). The memory stays while this object, or any array made of it,
/// lives.
#[pyclass(frozen, subclass, module = "warpipe", name = "_Tensor", weakref)]
#[derive(Debug)]
pub struct Tensor {
    owner: Arc<Holding>,
}

impl Tensor {
    /// The base object of a holder.
    pub fn of(owner: &Arc<Holding>) -> PyClassInitializer<Tensor> {
        PyClassInitializer::from(Tensor {
            owner: owner.clone(),
        })
    }
}

#[pymethods]
impl Tensor {
    /// The dimensions, outermost first, in elements.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.owner.layout.shape())
    }

    /// The strides, in elements.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.owner.layout.strides())
    }

    /// The element type's name, as NumPy and ml_dtypes write it: ``"float32"``, ``"bfloat16"``.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.owner.layout.dtype().name()
    }

    /// The size of the elements, in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        let layout = &self.owner.layout;
        layout.elements().saturating_mul(layout.dtype().bytes())
    }

    /// The device that it is used with.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.owner.device)
    }

    /// The device address of the element with all indices 0, while it is held.
    ///
    /// Raises ``ReleasedError``.
    #[getter]
    fn ptr(&self) -> PyResult<u64> {
        Ok(self.owner.memory()?.address())
    }

    /// Whether it is released: by a call, handed on or discarded, or by the end of its ``with``
    /// block.
    #[getter]
    fn released(&self) -> PyResult<bool> {
        Ok(self.owner.is_released()?)
    }

    /// Its layout, for ``repr``.
    #[getter]
    fn _layout(&self) -> String {
        format!("{:?}", self.owner.layout)
    }

    /// What ``numpy()`` makes an array of.
    fn _host_view(&self, py: Python<'_>) -> PyResult<HostView> {
        array::host_view(py, &self.owner.memory()?)
    }

    /// A PyTorch tensor in place; PyTorch's current stream waits for the data. Work that this
    /// stream is given from then on comes before the memory is handed on, or goes back.
    ///
    /// Raises ``SampleLostError``, ``ReleasedError``, ``ImportError``.
    fn torch<'py>(slf: &Bound<'py, Tensor>) -> PyResult<Bound<'py, PyAny>> {
        torch::tensor(slf, &slf.get().owner.memory()?)
    }

    /// DLPack: a capsule of this memory; see the array API standard. ``stream`` (1, 2, a CUstream;
    /// None is 1; -1: none) waits for the data. ``dl_device=(1, 0)`` or ``copy=True`` gives a copy
    /// on the host.
    ///
    /// Raises ``ExportError`` (a BufferError) for an unsupported request, ``SampleLostError``,
    /// ``ReleasedError``.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Given<'_, '_>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let memory = self.owner.memory()?;
        array::dlpack(py, &memory, stream, max_version, dl_device, copy)
    }

    /// DLPack: ``(1, 0)`` for the host, ``(2, ordinal)`` for a GPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::device_of(&self.owner.device)
    }

    /// NumPy's array interface, on the host only; waits for the data. The array references this
    /// object.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if let Some(error) = self.owner.state()?.discarded.take() {
            return Err(PyErr::from_value(error.into_bound(py).into_any()));
        }
        array::array_interface(py, &self.owner.pinned()?)
    }

    /// The CUDA array interface, version 3, on a GPU only. The array references this object.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        array::cuda_array_interface(py, &self.owner.pinned()?)
    }

    /// Python's buffer protocol, on the host only; waits for the data.
    ///
    /// # Safety
    /// `view` is a buffer to be filled, as the interpreter's protocol says.
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Tensor>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        // SAFETY: the caller's promise; the protocol asks for null where an exception is raised.
        unsafe { (*view).obj = ptr::null_mut() };
        let owner = &slf.get().owner;
        let memory = owner.memory()?;
        buffer::check(&memory, flags)?;
        owner.settle_buffer(slf.py(), &memory)?;
        // SAFETY: the caller's promise.
        unsafe { buffer::export(slf.as_any(), memory, view, flags) };
        Ok(())
    }

    /// # Safety
    /// `view` was filled by `__getbuffer__`, and is given back once.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: the caller's promise.
        unsafe { buffer::release(view) };
    }

    fn __enter__(slf: Py<Tensor>) -> PyResult<Py<Tensor>> {
        slf.get().owner.memory()?;
        Ok(slf)
    }

    /// An error references frames, and they this object.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let state = self.owner.state.try_lock();
        state.map_or(Ok(()), |state| visit.call(&state.discarded))
    }

    fn __clear__(&self) {
        if let Ok(mut state) = self.owner.state() {
            let error = state.discarded.take();
            drop(state);
            drop(error);
        }
    }
}

/// A tensor of memory given up by a call, or at the end of a ``with`` block: the base of
/// ``Sample``, ``Part`` and ``View``.
#[pyclass(frozen, subclass, extends = Tensor, module = "warpipe", name = "_Held")]
#[derive(Debug)]
pub struct Held;

impl Held {
    /// The base object of a holder.
    pub fn of(owner: &Arc<Holding>) -> PyClassInitializer<Held> {
        Tensor::of(owner).add_subclass(Held)
    }
}

#[pymethods]
impl Held {
    /// Gives up this object's part of the memory, which goes back when no object or array of it is
    /// left. With ``stream``, not before the work enqueued there so far is done. Releasing twice is
    /// no error.
    ///
    /// Raises ``ArgumentError`` for a stream of another device.
    #[pyo3(signature = (*, stream = None))]
    fn release(slf: &Bound<'_, Held>, stream: Given<'_, '_>) -> PyResult<()> {
        slf.as_super().get().owner.release(slf.py(), stream)
    }

    /// The elements as bytes in row-major order, as ``numpy().tobytes()`` gives them, copied once
    /// the data is complete, and the streams that were given work on it are past it.
    ///
    /// Raises ``SampleLostError``, ``TimeoutError``, ``ReleasedError``, ``DriverError``;
    /// ``ExportError`` for a part of a loan.
    fn tobytes<'py>(slf: &Bound<'py, Held>) -> PyResult<Bound<'py, PyBytes>> {
        slf.as_super().get().owner.bytes(slf.py())
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(slf: &Bound<'_, Held>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        Held::release(slf, None)
    }
}
