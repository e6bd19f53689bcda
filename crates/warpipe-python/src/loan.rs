//! A slot on loan as Python holds it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PySlice, PyTuple};
use warpipe::Layout;

use crate::array::{self, Request};
use crate::copies::Copies;
use crate::device::{Device, is_cuda};
use crate::dlpack;
use crate::errors::{Fault, Outcome};
use crate::memory::{Hold, Lease, Memory};
use crate::process::Home;
use crate::slot::Slot;
use crate::source::Wanted;
use crate::stream::{Consumer, imported};

/// Memory on loan that nobody reads yet, to be filled in place: see ``SampleMut``, ``Queue.loan`` and ``Output``.
///
/// Fill it through any array made of it (``torch()``, ``cupy()``, ``numpy()`` on the host, DLPack), with
/// ``out[...] = values``, or with ``out.copy_from(tensor)``. It is handed on behind the work of all streams that arrays of
/// it were made on. Its contents are whatever was there. Do not write once it is handed on. What is not handed on by the
/// end of a ``with`` block goes back.
#[pyclass(frozen, subclass, module = "warpipe", name = "Loan", weakref)]
#[derive(Debug)]
pub struct Loan {
    home: Home,
    state: Mutex<State>,
    device: warpipe::Device,
    /// The publisher's, for what no array was made of.
    stream: warpipe::Stream,
    copies: Arc<Copies>,
    layout: Layout,
    block: Option<Duration>,
}

#[derive(Debug)]
struct State {
    /// `None` once it is handed on or discarded.
    open: Option<Open>,
    /// Some array interface was asked for: whoever uses it holds this object, so the memory stays as long as that.
    pinned: Option<Arc<Lease>>,
}

#[derive(Debug)]
struct Open {
    slot: Slot,
    lease: Arc<Lease>,
}

impl Loan {
    /// Takes a loan over.
    pub fn new(
        slot: Slot,
        device: &warpipe::Device,
        stream: &warpipe::Stream,
        copies: &Arc<Copies>,
        block: Option<Duration>,
    ) -> Loan {
        let (layout, lease) = (*slot.layout(), Arc::new(Lease::new(slot.hold())));
        Loan {
            home: Home::here(),
            state: Mutex::new(State { open: Some(Open { slot, lease }), pinned: None }),
            device: device.clone(),
            stream: stream.clone(),
            copies: copies.clone(),
            layout,
            block,
        }
    }

    fn state(&self) -> Outcome<MutexGuard<'_, State>> {
        self.home.check()?;
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Its memory, while it is on loan.
    pub fn memory(&self) -> Outcome<Memory> {
        let state = self.state()?;
        let open = state.open.as_ref().ok_or_else(|| Fault::released("the loan"))?;
        Ok(Memory {
            layout: self.layout,
            address: open.slot.ptr(),
            lowest: open.slot.slot_ptr(),
            device: self.device.clone(),
            read_only: false,
            hold: Hold::Loan(open.lease.clone()),
        })
    }

    fn pinned(&self) -> Outcome<Memory> {
        let memory = self.memory()?;
        if let Hold::Loan(lease) = &memory.hold {
            self.state()?.pinned = Some(lease.clone());
        }
        Ok(memory)
    }

    /// Its slot for good, and a stream behind all that fills it.
    pub fn take_out(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<(Slot, warpipe::Stream)> {
        let consumer = self.stream_of(py, stream)?;
        let open = self.take()?;
        let stream = self.behind(&open, consumer.as_ref())?;
        Ok((open.slot, stream))
    }

    /// Whether it has neither been handed on nor discarded.
    pub fn is_open(&self) -> Outcome<bool> {
        Ok(self.state()?.open.is_some())
    }

    /// How long it may take to be handed on.
    pub fn patience(&self) -> Option<Duration> {
        self.block
    }

    /// For `__repr__`.
    pub fn described(&self) -> String {
        format!("{:?}, {}", self.layout, self.device)
    }

    fn take(&self) -> Outcome<Open> {
        self.state()?.open.take().ok_or_else(|| Fault::released("the loan"))
    }

    /// Behind all that fills it.
    fn behind(&self, open: &Open, stream: Option<&Consumer>) -> Outcome<warpipe::Stream> {
        if let Some(consumer) = stream {
            open.lease.consumers.note(consumer);
        }
        open.lease.consumers.join(&self.stream)
    }

    fn stream_of(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Consumer>> {
        stream.map(|stream| Consumer::from_argument(py, &self.device, stream)).transpose()
    }

    /// An array of whatever framework is at hand, for `out[...] = values`.
    fn array<'py>(slf: &Bound<'py, Loan>) -> PyResult<Bound<'py, PyAny>> {
        let (py, loan) = (slf.py(), slf.get());
        if !is_cuda(&loan.device) {
            return array::numpy(py, &loan.memory()?);
        }
        match framework(py)? {
            Some("torch") => crate::torch::tensor(py, &loan.memory()?),
            Some(_) => array::cupy(slf.as_any()),
            None => {
                let next = "import torch or cupy, or use out[...] = values or out.copy_from(tensor)";
                let said = format!("no framework that can write memory of a GPU is imported; {next}");
                Err(Fault::Own("ExportError", said).into())
            }
        }
    }
}

/// Who can write memory of a GPU: what the program has imported.
fn framework(py: Python<'_>) -> PyResult<Option<&'static str>> {
    for name in ["torch", "cupy"] {
        if imported(py, name)?.is_some() {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Whether a key is ``...`` or ``:``.
fn is_everything(key: &Bound<'_, PyAny>) -> PyResult<bool> {
    if key.is(key.py().Ellipsis()) {
        return Ok(true);
    }
    let none = |name: &str| key.getattr(name).map(|end| end.is_none());
    Ok(key.is_instance_of::<PySlice>() && none("start")? && none("stop")? && none("step")?)
}

impl Drop for Loan {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(Open { slot, lease }) = state.open.take() else { return };
        if self.home.is_here() {
            match lease.consumers.join(&self.stream) {
                // If it cannot be enqueued, the slot is back all the same.
                Ok(stream) => drop(slot.discard(&stream)),
                // The device does not say when it is done: the slot must not be used again.
                Err(_) => std::mem::forget(slot),
            }
        }
    }
}

#[pymethods]
impl Loan {
    /// The dimensions, outermost first, in elements.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.layout.shape())
    }

    /// The strides, in elements.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.layout.strides())
    }

    /// The element type's name, as NumPy and ml_dtypes write it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.layout.dtype().name()
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.layout.shape().len()
    }

    /// The number of elements.
    #[getter]
    fn size(&self) -> u64 {
        self.layout.elements()
    }

    /// What the elements take, in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// The device whose memory it is.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.device)
    }

    /// The device address of the element with all indices 0, to be written until it is handed on.
    ///
    /// Raises ``ReleasedError``.
    #[getter]
    fn ptr(&self) -> PyResult<u64> {
        Ok(self.memory()?.address)
    }

    /// Whether it has been handed on or discarded.
    #[getter]
    fn released(&self) -> PyResult<bool> {
        Ok(self.state()?.open.is_none())
    }

    /// Sets what travels with it: a dict (as JSON), or bytes; at most 256 bytes beside a frame, 200 beside a job.
    ///
    /// Raises ``MetadataError``, ``ReleasedError``.
    fn set_metadata(&self, metadata: &Bound<'_, PyAny>) -> PyResult<()> {
        // Taken out meanwhile: the interpreter runs in between.
        let mut open = self.take()?;
        let set = open.slot.set_metadata(Some(metadata));
        self.state()?.open = Some(open);
        set
    }

    /// Gives the slot back unused, behind the work of all streams that arrays of it were made on, and of ``stream``.
    /// Discarding twice, or what was handed on, is no error.
    ///
    /// Raises ``DriverError``.
    #[pyo3(signature = (stream = None))]
    pub fn discard(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let consumer = self.stream_of(py, stream)?;
        let Some(open) = self.state()?.open.take() else { return Ok(()) };
        let stream = self.behind(&open, consumer.as_ref())?;
        Ok(open.slot.discard(&stream)?)
    }

    /// Copies a tensor of the same shape and element type in, as ``Publisher.send`` would.
    ///
    /// Raises ``LayoutError``, ``DTypeError``, ``WrongDeviceError``, ``ReleasedError``.
    fn copy_from(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let source = Wanted { device: &self.device, stream: None, own: &self.stream, packed: true, lasting: false }
            .find(tensor)?;
        if source.layout != self.layout {
            let said = format!("{:?} does not fit {:?}", source.layout, self.layout);
            return Err(Fault::layout(said).into());
        }
        // Taken out meanwhile: a lock is not held while the interpreter is let go.
        let mut open = self.take()?;
        let filled = self.copies.fill(py, &mut open.slot, source, &self.stream, self.block);
        if let Ok(stream) = &filled {
            open.lease.consumers.note(&Consumer::own(stream));
        }
        self.state()?.open = Some(open);
        filled.map(drop)
    }

    fn __setitem__(slf: &Bound<'_, Loan>, key: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, loan) = (slf.py(), slf.get());
        if is_cuda(&loan.device) && is_everything(key)? && framework(py)?.is_none() {
            // The values are the host's, and no kernel is at hand that could spread them on the GPU.
            return loan.copy_from(py, &array::full(py, &loan.layout, value)?);
        }
        Loan::array(slf)?.set_item(key, value)
    }

    fn __getitem__<'py>(slf: &Bound<'py, Loan>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        Loan::array(slf)?.get_item(key)
    }

    /// A writable NumPy array in place, on the host only. Element types that NumPy lacks are those of ml_dtypes.
    ///
    /// Raises ``ReleasedError``, ``DTypeError``, ``ExportError`` on a GPU.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array::numpy(py, &self.memory()?)
    }

    /// A PyTorch tensor in place; the loan is handed on behind PyTorch's current stream of now.
    ///
    /// Raises ``ReleasedError``, ``ImportError``.
    fn torch<'py>(slf: &Bound<'py, Loan>) -> PyResult<Bound<'py, PyAny>> {
        crate::torch::tensor(slf.py(), &slf.get().memory()?)
    }

    /// A CuPy array in place; the loan is handed on behind CuPy's current stream of now.
    ///
    /// Raises ``ReleasedError``, ``ImportError``.
    fn cupy<'py>(slf: &Bound<'py, Loan>) -> PyResult<Bound<'py, PyAny>> {
        array::cupy(slf.as_any())
    }

    /// DLPack: a capsule of this memory, writable; see the array API standard. The loan is handed on behind ``stream``.
    ///
    /// Raises ``ExportError`` (a BufferError) for what cannot be, ``ReleasedError``.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        array::dlpack(py, &self.memory()?, Request { stream, max_version, dl_device, copy })
    }

    /// DLPack: ``(1, 0)`` for the host, ``(2, ordinal)`` for a GPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::device_of(&self.device)
    }

    /// NumPy's array interface, on the host only. Who uses it keeps this object.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        array::array_interface(py, &self.pinned()?)
    }

    /// The CUDA array interface, version 3, on a GPU only. Who uses it keeps this object.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        array::cuda_array_interface(py, &self.pinned()?)
    }

    fn __enter__(slf: Py<Loan>) -> Py<Loan> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.discard(py, None)
    }

    fn __repr__(&self) -> String {
        format!("Loan({:?}, {})", self.layout, self.device)
    }
}
