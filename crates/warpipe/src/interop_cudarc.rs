//! Conversions from streams and slices of the `cudarc` crate (feature `cudarc`).
//!
//! Both crates use the device's primary context, so a handle of one means the same to the other.

use std::sync::Arc;

use cudarc::driver::{CudaStream, SyncOnDrop};

use crate::backend::cuda::shutdown_gate;
use crate::backend::{DeviceId, DeviceKind, DevicePtr, RawStream};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stream::Stream;

impl Stream {
    /// `CudaStream::cu_stream`: a stream of cudarc, kept alive by the result.
    ///
    /// # Errors
    /// [`Error::Argument`] when the stream belongs to another device than `device`, or when cudarc
    /// cannot tell its device.
    pub fn from_cudarc(device: &Device, stream: &Arc<CudaStream>) -> Result<Stream> {
        let id = device_of(stream)?;
        let wanted = device.info().id;
        if id != wanted {
            let found = format!("a stream of {id}");
            let allowed = format!("a stream of {wanted}");
            return Err(Error::argument("cudarc stream", found, allowed));
        }
        let kept = Arc::new(Kept(Some(stream.clone())));
        Ok(Stream::borrow_kept(
            device,
            RawStream(stream.cu_stream().cast()),
            kept,
        ))
    }
}

/// A thread of this library may drop the last reference to a cudarc stream, which then calls the
/// driver.
struct Kept(Option<Arc<CudaStream>>);

impl Drop for Kept {
    fn drop(&mut self) {
        let _guard = shutdown_gate::enter();
        drop(self.0.take());
    }
}

fn device_of(stream: &CudaStream) -> Result<DeviceId> {
    let uuid = stream.context().uuid().map_err(|error| {
        Error::argument(
            "cudarc stream",
            format!("unusable ({error})"),
            "a stream with a working context",
        )
    })?;
    Ok(DeviceId {
        kind: DeviceKind::Cuda,
        uuid: uuid.bytes.map(|byte| byte as u8),
    })
}

/// A slice of cudarc as a range of device memory, for work on `stream`.
#[derive(Debug)]
pub struct CudarcRange<'a> {
    /// The address of the slice.
    pub ptr: DevicePtr,
    /// The length of the slice in bytes.
    pub bytes: u64,
    /// Tells cudarc, when dropped, that `stream` has read the slice up to here: keep it until the
    /// work is enqueued.
    pub in_use: SyncOnDrop<'a>,
}

/// `DevicePtr::device_ptr`: a `CudaSlice` or `CudaView` as address and bytes, to be read by work on
/// `stream`.
pub fn device_range<'a, T>(
    slice: &'a impl cudarc::driver::DevicePtr<T>,
    stream: &'a CudaStream,
) -> CudarcRange<'a> {
    let (ptr, in_use) = slice.device_ptr(stream);
    CudarcRange {
        ptr,
        bytes: slice.num_bytes() as u64,
        in_use,
    }
}
