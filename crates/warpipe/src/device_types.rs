//! The plain data of devices: identities, addresses, and the driver's handles. **This module is
//! marked for unsafe**: a handle is a token, which any thread may use.

use std::ffi::c_void;
use std::fmt;

use serde::{Deserialize, Serialize};

/// An address that the device's work can use: a `CUdeviceptr`, or on the host backend an address of
/// this process.
pub type DevicePtr = u64;

/// The backend of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The host backend: memfd memory, threads as streams.
    Host,
    /// An NVIDIA GPU through the CUDA driver API.
    Cuda,
}

/// A device's identity, the same in every process (a GPU's ordinal is not).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceId {
    /// The device's backend.
    pub kind: DeviceKind,
    /// The GPU's UUID; zeros for the host.
    pub uuid: [u8; 16],
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == DeviceKind::Host {
            return f.write_str("host");
        }
        f.write_str("GPU-")?;
        for (index, byte) in self.uuid.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// The properties of a device, read when it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The identity to compare across processes.
    pub id: DeviceId,
    /// The device's ordinal in this process (0 for the host).
    pub ordinal: u32,
    /// The name for people: the GPU's product name, or `host`.
    pub name: String,
    /// Total memory in bytes.
    pub memory_bytes: u64,
}

/// The access of an importer to a region.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Loads only; a store faults in the importer, enforced by the MMU.
    #[default]
    Read,
    /// Loads and stores.
    ReadWrite,
}

/// A stream: a `CUstream`, or the host backend's own pointer. Null is the device's default stream
/// on CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawStream(pub *mut c_void);

// SAFETY: a stream handle is an opaque token; both backends allow its use from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above, including concurrent use.
unsafe impl Sync for RawStream {}

/// An event: a `CUevent`, or the host backend's own pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawEvent(pub *mut c_void);

// SAFETY: an event handle is an opaque token; both backends allow its use from any thread.
unsafe impl Send for RawEvent {}
// SAFETY: as above, including concurrent use.
unsafe impl Sync for RawEvent {}
