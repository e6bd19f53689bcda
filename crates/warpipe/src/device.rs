//! Devices: how one is chosen, and its properties.

use std::fmt;
use std::sync::Arc;

use crate::backend::{Backend, DeviceId, DeviceInfo, DeviceKind, cuda, host};
use crate::error::{DeviceFault, Error, Result};

/// A device and the backend that drives it. Cheap to clone.
///
/// ```
/// let device = warpipe::Device::host();
/// assert_eq!(device.info().name, "host");
/// ```
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn Backend>,
}

/// The device that [`Device::preferred`] took, and why.
#[derive(Debug)]
#[non_exhaustive]
pub struct PreferredDevice {
    /// The device.
    pub device: Device,
    /// For messages to people: `first GPU`, or why there is none.
    pub why: String,
}

impl Device {
    /// The first GPU if there is one, else the host, and the reason. The driver honours
    /// `CUDA_VISIBLE_DEVICES`.
    pub fn preferred() -> PreferredDevice {
        match Device::cuda(0) {
            Ok(device) => {
                let why = format!("first GPU: {}, {}", device.info().name, device.info().id);
                PreferredDevice { device, why }
            }
            Err(error) => PreferredDevice {
                device: Device::host(),
                why: error.to_string(),
            },
        }
    }

    /// The host backend: memfd memory, threads as streams. Always available.
    pub fn host() -> Device {
        Device {
            backend: host::HostBackend::shared(),
        }
    }

    /// The GPU with this ordinal among those that `CUDA_VISIBLE_DEVICES` leaves (`cuDeviceGet`).
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::Driver`]; never a panic.
    pub fn cuda(ordinal: u32) -> Result<Device> {
        Ok(Device {
            backend: cuda::CudaBackend::open(ordinal)?,
        })
    }

    /// The GPU with this UUID, whatever its ordinal here (`cuDeviceGetUuid`).
    ///
    /// # Errors
    /// As for [`Device::cuda`].
    pub fn by_uuid(uuid: [u8; 16]) -> Result<Device> {
        let wanted = DeviceId {
            kind: DeviceKind::Cuda,
            uuid,
        };
        let count = cuda::device_count()?;
        for ordinal in 0..count {
            if cuda::device_uuid(ordinal)? == uuid {
                return Device::cuda(ordinal);
            }
        }
        let text = format!("no device {wanted}; there are {count} visible GPUs, none of that UUID");
        Err(Error::device(DeviceFault::NoSuchDevice, text))
    }

    /// A device with a backend of [`crate::backend::testing`].
    #[cfg(any(test, feature = "testing"))]
    pub fn from_backend(backend: Arc<dyn Backend>) -> Device {
        Device { backend }
    }

    /// Name, identity, memory.
    pub fn info(&self) -> &DeviceInfo {
        self.backend.info()
    }

    pub(crate) fn is_gpu(&self) -> bool {
        self.info().id.kind != DeviceKind::Host
    }

    /// The backend that drives this device: the calls behind this library, most of them unsafe. For
    /// this workspace's tools alone: it may change in any version.
    #[doc(hidden)]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// A new stream of this device (`cuStreamCreate`, non-blocking).
    ///
    /// # Errors
    /// [`Error::Driver`] or [`Error::Os`].
    pub fn stream(&self) -> Result<crate::stream::Stream> {
        crate::stream::Stream::new(self)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.info().name, self.info().id)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.info().name)
    }
}
