//! Devices, and the arguments that name one.

use std::ops::Deref;

use pyo3::prelude::*;
use pyo3::types::PyString;
use warpipe::backend::DeviceKind;
use warpipe::{DeviceFault, Error};

use crate::detached::call;
use crate::errors::Fault;
use crate::shared_memory::device_id;
use crate::thread_exit;

/// A device and the backend that drives it: a GPU (``cuDeviceGet``), or the host.
///
/// ``Device()`` is the first GPU if there is one, else the host; ``Device("host")``,
/// ``Device("cuda:1")`` and ``Device(1)`` ask for one, and ``Device("GPU-...")`` for the one with this
/// ``uuid``. ``why`` says in words why it was taken. Everything that takes a device also takes
/// these, and a ``torch.device``. Pickled, a device is its ``uuid``.
///
/// Raises ``DeviceError`` when there is no such device.
#[pyclass(frozen, module = "warpipe", eq, hash)]
#[derive(Debug, Clone)]
pub struct Device {
    pub inner: warpipe::Device,
    /// Why this device was chosen, in words.
    #[pyo3(get)]
    why: String,
}

impl Deref for Device {
    type Target = warpipe::Device;

    fn deref(&self) -> &warpipe::Device {
        &self.inner
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        self.inner.info().id == other.inner.info().id
    }
}

impl std::hash::Hash for Device {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.inner.info().id.hash(state);
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Device {
    type Error = PyErr;

    /// See `_devices.py`.
    fn extract(found: Borrowed<'a, 'py, PyAny>) -> PyResult<Device> {
        thread_exit::prepare_exit();
        if let Ok(device) = found.cast::<Device>() {
            return Ok(device.get().clone());
        }
        let module = found.py().import("warpipe._devices")?;
        let name = module.call_method1("name_of", (found,))?;
        Device::named(name.cast::<PyString>()?.to_str()?)
    }
}

impl Device {
    /// Wraps a device that is known already.
    pub fn of(inner: &warpipe::Device) -> Device {
        Device {
            inner: inner.clone(),
            why: "as asked".into(),
        }
    }

    /// The device of an argument that may be left out: then the preferred one.
    pub fn or_preferred(device: Option<Device>) -> warpipe::Device {
        device.unwrap_or_else(Device::preferred).inner
    }

    /// The preferred one.
    pub fn preferred() -> Device {
        thread_exit::prepare_exit();
        let preferred = Python::attach(|py| py.detach(warpipe::Device::preferred));
        Device {
            inner: preferred.device,
            why: preferred.why,
        }
    }

    /// `name` is `host`, `cuda:` with a number, or a UUID.
    fn named(name: &str) -> PyResult<Device> {
        if name == "host" {
            return Ok(Device::of(&warpipe::Device::host()));
        }
        let Some(Ok(ordinal)) = name.strip_prefix("cuda:").map(str::parse) else {
            return Device::identified(name);
        };
        let opened = Python::attach(|py| call(py, || warpipe::Device::cuda(ordinal)))?;
        Ok(Device::of(&opened))
    }
}

impl Device {
    /// The GPU of this process with a UUID, which is the same in every process.
    fn identified(name: &str) -> PyResult<Device> {
        let missing = || {
            let next = "a GPU that this process sees; look at CUDA_VISIBLE_DEVICES";
            Fault::argument("device", format!("{name:?}"), next)
        };
        let uuid = device_id(name).ok_or_else(missing)?.uuid;
        let found = Python::attach(|py| py.detach(|| warpipe::Device::by_uuid(uuid)));
        Ok(Device::of(&found.map_err(|error| match error {
            Error::Device {
                fault: DeviceFault::NoSuchDevice,
                ..
            } => missing(),
            other => other.into(),
        })?))
    }
}

/// Whether a device is a GPU.
pub fn is_cuda(device: &warpipe::Device) -> bool {
    device.info().id.kind == DeviceKind::Cuda
}

#[pymethods]
impl Device {
    #[new]
    #[pyo3(signature = (device = None, /))]
    fn new(device: Option<Device>) -> Device {
        device.unwrap_or_else(Device::preferred)
    }

    /// The values of ``_FACTS`` of `_objects.py`.
    #[getter]
    fn _facts(&self) -> (&'static str, u32, &str, String, u64) {
        let info = self.inner.info();
        let kind = if is_cuda(&self.inner) { "cuda" } else { "host" };
        let uuid = info.id.to_string();
        (kind, info.ordinal, &info.name, uuid, info.memory_bytes)
    }

    /// Bytes of memory that this process holds through warpipe: allocated and imported, not yet
    /// released.
    #[getter]
    fn bytes_held(&self) -> u64 {
        self.inner.backend().bytes_held()
    }

    fn __getnewargs__(&self) -> (String,) {
        (self.info().id.to_string(),)
    }
}
