//! Tensors to be sent: finds and checks the memory of any object with DLPack, an array interface or
//! the buffer protocol.
//! **This module is marked for unsafe**: it reads memory that such an object names.

use std::ffi::CString;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::call::PyCallArgs;
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyMemoryView, PyType};
use warpipe::Layout;
use warpipe::backend::{PointerKind, cuda};
use warpipe_dlpack::{CPU, CUDA, CUDA_HOST, CUDA_MANAGED, DLDevice, Elements, Imported, VERSION};

mod description;
mod plain_torch;

use self::description::ArrayDescription;
pub use self::plain_torch::PlainTorch;
use crate::buffer;
use crate::detached::call;
use crate::device::is_cuda;
use crate::dlpack;
use crate::dtype;
use crate::errors::Fault;
use crate::memory::Memory;
use crate::stream::{Consumer, cupy_stream, imported, torch_stream};
use crate::view::View;

/// A tensor to be sent.
#[derive(Debug)]
pub struct Source {
    pub layout: Layout,
    /// The address of its first byte.
    pub lowest: u64,
    /// How it lies, if it has gaps or is not in the order that is sent.
    pub rows: Option<Box<Elements>>,
    /// The stream that it is read on, in memory of the publisher's device; `None` if the CPU reads it,
    /// in memory of the host.
    pub reader: Option<Consumer>,
    pub owner: SourceOwner,
}

/// The owner that keeps a foreign tensor's memory.
#[derive(Debug)]
pub enum SourceOwner {
    /// Bytes of this package.
    Bytes(#[allow(dead_code, reason = "held, not used")] Vec<u8>),
    /// An imported capsule.
    Capsule(#[allow(dead_code, reason = "held, not used")] Box<Imported>),
    /// The object itself.
    Object(#[allow(dead_code, reason = "held, not used")] Py<PyAny>),
    /// Memory of this package, which is complete.
    Memory(#[allow(dead_code, reason = "held, not used")] Memory),
    /// None is needed: the owner orders the reading stream after its own work, and its reuse of the
    /// memory after the reading stream.
    Nothing,
}

/// The requirements of a search for a tensor.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// The publisher's device.
    pub device: &'a warpipe::Device,
    /// The stream to read it on, if the caller named one.
    pub stream: Option<&'a Consumer>,
    /// The publisher's stream.
    pub own: &'a warpipe::Stream,
    /// The result must be row-major and without gaps.
    pub packed: bool,
    /// The tensor is read in place, also if it runs backwards: it is always kept, even if its owner
    /// orders its reuse.
    pub lasting: bool,
}

impl<'a> Wanted<'a> {
    /// Any tensor of a device, or of the host, to be copied.
    pub fn on(device: &'a warpipe::Device, own: &'a warpipe::Stream) -> Wanted<'a> {
        Wanted {
            device,
            stream: None,
            own,
            packed: false,
            lasting: false,
        }
    }

    /// Finds the tensor behind `found`.
    pub fn find(self, found: &Bound<'_, PyAny>) -> PyResult<Source> {
        if let Ok(bytes) = found.cast::<PyBytes>() {
            return Source::of_bytes(bytes.as_bytes().to_vec());
        }
        if let Ok(bytes) = found.cast::<PyByteArray>() {
            return Source::of_bytes(bytes.to_vec());
        }
        if found.is_instance_of::<PyType>() {
            return Err(in_words(found.py(), "refusal", (found,)));
        }
        let prepared = prepared(found)?;
        if !prepared.is(found) {
            // Nothing else may hold it.
            return self.of_dlpack(&prepared, true);
        }
        if is_masked(found)? {
            let said = "it is masked, and a mask does not travel; fill it first, with `.filled()`";
            return Err(Fault::layout(said).into());
        }
        if let Some(source) = self.of_view(found)? {
            return Ok(source);
        }
        if let Some(interface) = found.getattr_opt("__array_interface__")? {
            return self.of_array(found, &interface);
        }
        if found.hasattr("__dlpack__")? && found.hasattr("__dlpack_device__")? {
            return self.of_dlpack(found, self.lasting);
        }
        if let Some(interface) = found.getattr_opt("__cuda_array_interface__")? {
            return self.of_cuda_interface(found, &interface);
        }
        match PyMemoryView::from(found) {
            Ok(view) => return self.of_buffer(&view),
            Err(error) if error.is_instance_of::<PyTypeError>(found.py()) => {}
            Err(error) => return Err(error),
        }
        if found.hasattr("__array__")? {
            return self.of_numpy(found);
        }
        Err(in_words(found.py(), "refusal", (found,)))
    }

    /// Of memory of this package, where the caller named a stream: read in its order, also on the
    /// host. Its users order their writes by streams, so the bytes may not be there yet.
    fn of_view(self, found: &Bound<'_, PyAny>) -> PyResult<Option<Source>> {
        let (Some(reader), Ok(view)) = (self.stream, found.cast::<View>()) else {
            return Ok(None);
        };
        let memory = view.get().tensor.memory()?;
        if self.lasting || memory.device.info().id != self.device.info().id {
            return Ok(None);
        }
        // From now on the owner keeps the memory until the stream is past the copy.
        view.get().owner()?.admit(found.py(), reader)?;
        Ok(Some(Source {
            layout: memory.layout,
            lowest: memory.lowest,
            rows: None,
            reader: Some(reader.clone()),
            owner: SourceOwner::Nothing,
        }))
    }

    /// Of a buffer, which keeps the memory where it is.
    fn of_buffer(self, view: &Bound<'_, PyMemoryView>) -> PyResult<Source> {
        if view.getattr("ndim")?.extract::<usize>()? == 0 {
            // Its shape may be null, which PyO3 takes for an error.
            let format = view.getattr("format")?.extract::<CString>()?;
            let bytes = view.call_method0("tobytes")?.extract::<Vec<u8>>()?;
            let dtype = dtype::from_buffer_format(view.py(), &format, bytes.len())?;
            let layout = Layout::contiguous(dtype, &[]).map_err(Fault::from)?;
            return Ok(Source::bytes(layout, bytes));
        }
        let described = ArrayDescription::of_buffer(view.py(), &PyUntypedBuffer::get(view)?)?;
        let owner = SourceOwner::Object(view.clone().into_any().unbind());
        self.of_memory(&described, None, owner)
    }

    /// Converts through NumPy, which knows element types that some objects' own protocols lack.
    fn of_numpy(self, found: &Bound<'_, PyAny>) -> PyResult<Source> {
        let numpy = found.py().import("numpy")?;
        let array = numpy.call_method1("asarray", (found,))?;
        let interface = array.getattr("__array_interface__")?;
        self.of_array(&array, &interface)
    }

    /// Of an array of the host, which most often has a buffer of an element type that it has a letter
    /// for.
    fn of_array(self, found: &Bound<'_, PyAny>, interface: &Bound<'_, PyAny>) -> PyResult<Source> {
        let buffer = PyUntypedBuffer::get(found)
            .ok()
            .filter(|buffer| buffer::from_format(buffer.format(), buffer.item_size()).is_some());
        let described = match buffer {
            Some(buffer) => ArrayDescription::of_buffer(found.py(), &buffer)?,
            None => ArrayDescription::of_interface(found, interface)?,
        };
        let owner = SourceOwner::Object(found.clone().unbind());
        self.of_memory(&described, None, owner)
    }

    fn of_dlpack(self, found: &Bound<'_, PyAny>, must_keep: bool) -> PyResult<Source> {
        let device = self.device;
        let said = found.call_method0("__dlpack_device__")?;
        let due = "a device type and a number are due";
        let words = || format!("`__dlpack_device__` gave {said}; {due}");
        let wrong = |_| Fault::Own("ExportError", words());
        let (device_type, device_id) = said.extract().map_err(wrong)?;
        let stated = DLDevice {
            device_type,
            device_id,
        };
        if is_host(stated) {
            let tensor = match capsule(found, None).and_then(|capsule| dlpack::import(&capsule)) {
                Ok(tensor) => tensor,
                // JAX has element types that it does not export, and NumPy gets them all.
                // An interrupt is none of its errors.
                Err(error)
                    if error.is_instance_of::<PyException>(found.py())
                        && is_from(found, "jax")? =>
                {
                    return self.of_numpy(found);
                }
                Err(error) => return Err(error),
            };
            if !is_host(tensor.device()) {
                return Err(self.elsewhere(&location_of(tensor.device())));
            }
            let described = ArrayDescription::of_import(&tensor);
            let owner = SourceOwner::Capsule(Box::new(tensor));
            return self.of_memory(&described, None, owner);
        }
        let is_here = is_cuda(device) && device_id == DLDevice::of(device).device_id;
        if !(is_here && matches!(device_type, CUDA | CUDA_MANAGED)) {
            return Err(self.elsewhere(&location_of(stated)));
        }
        let (reader, is_current) = self.reader(found)?;
        let tensor = dlpack::import(&capsule(found, Some(reader.number()))?)?;
        if tensor.device() != stated {
            return Err(self.elsewhere(&location_of(tensor.device())));
        }
        let array_description = ArrayDescription::of_import(&tensor);
        let keep = if is_current && !must_keep && is_from(found, "torch")? {
            SourceOwner::Nothing
        } else {
            SourceOwner::Capsule(Box::new(tensor))
        };
        self.of_memory(&array_description, Some(reader), keep)
    }

    fn of_cuda_interface(
        self,
        found: &Bound<'_, PyAny>,
        interface: &Bound<'_, PyAny>,
    ) -> PyResult<Source> {
        let device = self.device;
        if !is_cuda(device) {
            return Err(self.elsewhere("cuda:0"));
        }
        let array_description = ArrayDescription::of_interface(found, interface)?;
        self.check_owner(found.py(), &array_description)?;
        let (reader, _) = self.reader(found)?;
        let written_on = interface.call_method1("get", ("stream",))?;
        if !written_on.is_none() {
            let writer = Consumer::foreign(found.py(), device, written_on.extract()?)?;
            call(found.py(), || reader.stream.wait_for(&writer.stream))?;
        }
        let owner = SourceOwner::Object(found.clone().unbind());
        self.of_memory(&array_description, Some(reader), owner)
    }

    fn of_memory(
        self,
        described: &ArrayDescription,
        reader: Option<Consumer>,
        owner: SourceOwner,
    ) -> PyResult<Source> {
        let (elements, must_gather) = described.lie(self)?;
        let layout = match must_gather {
            true => elements.packed().map_err(Fault::from)?,
            false => *elements.layout(),
        };
        Ok(Source {
            layout,
            lowest: elements.lowest(),
            rows: must_gather.then(|| Box::new(elements)),
            reader,
            owner,
        })
    }

    /// The stream to read a GPU's tensor on, and whether it is its framework's current one: the
    /// named stream, else the framework's current one, else the publisher's own. The tensor's owner
    /// makes the publisher's stream wait for its work.
    fn reader(self, found: &Bound<'_, PyAny>) -> PyResult<(Consumer, bool)> {
        let (py, device) = (found.py(), self.device);
        let current = if is_from(found, "torch")? {
            torch_stream(py, device)?
        } else if is_from(found, "cupy")? {
            cupy_stream(py, device)?
        } else {
            None
        };
        let current = current.map(|raw| Consumer::foreign(py, device, raw));
        let current = current.transpose()?;
        Ok(match (self.stream, current) {
            (Some(asked), Some(current)) if asked.stream.raw() == current.stream.raw() => {
                (current, true)
            }
            (Some(asked), _) => (asked.clone(), false),
            (None, Some(current)) => (current, true),
            (None, None) => (Consumer::own(self.own), false),
        })
    }

    /// Refuses a tensor that an array interface, which names no device, places on another GPU: a
    /// kernel there does not reach it.
    fn check_owner(self, py: Python<'_>, array_description: &ArrayDescription) -> PyResult<()> {
        let device = self.device;
        if array_description.shape.contains(&0) {
            return Ok(());
        }
        let found = call(py, || device.backend().locate(array_description.address))?;
        match found.kind {
            PointerKind::Device | PointerKind::Pool if found.owner != device.info().id => {
                // Its ordinal, if this process has one. The device is not opened for that.
                let is_owner = |&ordinal: &u32| {
                    cuda::device_uuid(ordinal).is_ok_and(|uuid| uuid == found.owner.uuid)
                };
                let ordinal = py.detach(|| (0..cuda::device_count().unwrap_or(0)).find(is_owner));
                let place = ordinal.map_or_else(String::new, |ordinal| format!("cuda:{ordinal}, "));
                Err(self.elsewhere(&format!("{place}{}", found.owner)))
            }
            PointerKind::Unknown => {
                let at = array_description.address;
                let said = format!("its array interface gives {at:#x}, where there is no memory");
                Err(Fault::layout(said).into())
            }
            _ => Ok(()),
        }
    }

    fn elsewhere(self, place: &str) -> PyErr {
        let device = self.device;
        let here = if is_cuda(device) {
            format!("cuda:{}, {}", device.info().ordinal, device.info().id)
        } else {
            device.to_string()
        };
        let next = "copy it there first, or open the endpoint with device= of the tensor";
        let said = format!("the tensor lies on {place}, the publisher's memory on {here}; {next}");
        Fault::Own("WrongDeviceError", said).into()
    }
}

impl Source {
    fn of_bytes(bytes: Vec<u8>) -> PyResult<Source> {
        let layout = Layout::bytes_only(bytes.len() as u64).map_err(Fault::from)?;
        Ok(Source::bytes(layout, bytes))
    }

    fn bytes(layout: Layout, bytes: Vec<u8>) -> Source {
        Source {
            layout,
            lowest: bytes.as_ptr().expose_provenance() as u64,
            rows: None,
            reader: None,
            owner: SourceOwner::Bytes(bytes),
        }
    }

    /// The address of an array that lies as it is sent.
    pub fn address(&self) -> Option<u64> {
        let is_array = self.rows.is_none() && !matches!(self.owner, SourceOwner::Bytes(_));
        is_array.then_some(self.lowest)
    }

    /// Whether any of it may lie among the `bytes` from `lowest` on.
    pub fn meets(&self, lowest: u64, bytes: u64) -> bool {
        let rows = self.rows.as_deref();
        let length = rows.map_or(&self.layout, Elements::layout).bytes();
        self.lowest < lowest.saturating_add(bytes) && lowest < self.lowest.saturating_add(length)
    }

    /// Its bytes, if they are on the host as they are sent; else none.
    pub fn host_bytes(&self) -> &[u8] {
        if self.layout.bytes() == 0 || self.rows.is_some() || self.reader.is_some() {
            return &[];
        }
        // SAFETY: the object says that its tensor lies there, the extent was worked out from the same
        // shape and strides, and `owner` holds it. That nothing writes it during the call is the
        // caller's part, as with every array library.
        unsafe {
            std::slice::from_raw_parts(self.lowest as *const u8, self.layout.bytes() as usize)
        }
    }
}

/// An exception that a function of `_tensors.py` makes.
pub fn in_words<'py>(py: Python<'py>, function: &str, arguments: impl PyCallArgs<'py>) -> PyErr {
    let module = py.import("warpipe._tensors");
    let made = module.and_then(|module| module.call_method1(function, arguments));
    made.map_or_else(|error| error, PyErr::from_value)
}

/// What others read of a tensor of PyTorch's: see `_tensors.py`.
fn prepared<'py>(found: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    static PREPARED: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = found.py();
    if imported(py, "torch")?.is_none() {
        return Ok(found.clone());
    }
    let prepared = PREPARED.import(py, "warpipe._tensors", "prepared")?;
    prepared.call1((found,))
}

/// Whether some of an array's elements are masked. NumPy's array interface does not report that.
fn is_masked(found: &Bound<'_, PyAny>) -> PyResult<bool> {
    let Some(masks) = imported(found.py(), "numpy.ma")? else {
        return Ok(false);
    };
    // It has no such class yet while another thread is in the middle of importing it.
    let class = masks.getattr("MaskedArray");
    if !class.is_ok_and(|class| found.is_instance(&class).unwrap_or(false)) {
        return Ok(false);
    }
    masks.call_method1("is_masked", (found,))?.is_truthy()
}

/// The tensor's capsule, of the newest version that its owner supports.
fn capsule<'py>(found: &Bound<'py, PyAny>, stream: Option<usize>) -> PyResult<Bound<'py, PyAny>> {
    let py = found.py();
    let options = PyDict::new(py);
    if let Some(stream) = stream {
        options.set_item("stream", stream)?;
    }
    options.set_item("max_version", (VERSION.major, VERSION.minor))?;
    let capsule = match found.call_method("__dlpack__", (), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item("max_version")?;
            found.call_method("__dlpack__", (), Some(&options))
        }
        other => other,
    };
    capsule.map_err(|error| in_words(py, "refusal", (found, error)))
}

/// Whether the object's class belongs to a package.
fn is_from(found: &Bound<'_, PyAny>, package: &str) -> PyResult<bool> {
    let module = found.get_type().getattr("__module__")?;
    let module: String = module.extract().unwrap_or_default();
    let root = module.split('.').next().unwrap_or_default();
    Ok(root == package || (package == "jax" && root == "jaxlib"))
}

/// A DLPack device, for messages.
fn location_of(found: DLDevice) -> String {
    match (found.device_type, found.device_id) {
        (CPU, _) => "the host".to_owned(),
        (CUDA | CUDA_MANAGED, id) => format!("cuda:{id}"),
        other => format!("DLPack device {other:?}"),
    }
}

/// Whether the CPU reads memory of a DLPack device.
fn is_host(device: DLDevice) -> bool {
    matches!(device.device_type, CPU | CUDA_HOST)
}
