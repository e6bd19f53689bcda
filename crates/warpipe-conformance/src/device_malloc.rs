//! Memory of another allocator, and legacy handles to it. **This module is marked for unsafe**: it
//! exports addresses and launches kernels on them.

use std::time::Duration;

use anyhow::{Result, ensure};
use warpipe::{Device, DevicePtr, LegacyHandle, LegacyMemory, Stream};

use crate::PATIENCE;
use crate::payload::{ErrorCounters, fill_words};

/// Where the words begin: anywhere but at the allocation's first byte.
pub const OFFSET: u64 = 4096 + 8;

/// An allocation of `cuMemAlloc`, freed with this.
#[derive(Debug)]
pub struct DeviceMalloc {
    device: Device,
    /// Its first byte.
    pub ptr: DevicePtr,
    words: u64,
}

impl DeviceMalloc {
    /// Memory in which `words` words of the pattern of `seed` stand, from [`OFFSET`] on.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(device: &Device, words: u64, seed: u64) -> Result<DeviceMalloc> {
        let ptr = device.backend().allocate_plain(OFFSET + 8 * words)?;
        let plain = DeviceMalloc {
            device: device.clone(),
            ptr,
            words,
        };
        let stream = device.stream()?;
        // SAFETY: the words lie in the allocation, which outlives the kernel: it is waited for.
        unsafe { fill_words(&stream, ptr + OFFSET, words, seed, Duration::ZERO)? };
        stream.synchronize(PATIENCE)?;
        Ok(plain)
    }

    /// A handle of its words.
    ///
    /// # Errors
    /// Those of [`LegacyHandle::export`].
    pub fn export(&self) -> warpipe::Result<LegacyHandle> {
        // SAFETY: the memory lives as long as self; every case that frees it while it is open says
        // so and reads no more.
        unsafe { LegacyHandle::export(&self.device, self.ptr + OFFSET, 8 * self.words) }
    }
}

impl Drop for DeviceMalloc {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed here only; the caller that enqueued work on it has
        // waited for that.
        let _ = unsafe { self.device.backend().free_plain(self.ptr) };
    }
}

/// Exports any address.
///
/// # Errors
/// Those of [`LegacyHandle::export`].
pub fn export(device: &Device, ptr: DevicePtr) -> warpipe::Result<LegacyHandle> {
    // SAFETY: it is refused, or the case drops the handle unopened.
    unsafe { LegacyHandle::export(device, ptr, 8) }
}

/// That all of an open range holds the pattern of `seed`, as the device sees it.
///
/// # Errors
/// Wrong words, or those of the device.
pub fn check(memory: &LegacyMemory, seed: u64, error_counters: &mut ErrorCounters) -> Result<()> {
    let stream = memory.device().stream()?;
    memory.used_on(&stream);
    // SAFETY: the range stays mapped until the stream is past its work (`used_on`), and it is
    // waited for.
    let check = unsafe { error_counters.check(&stream, memory.ptr(), memory.bytes() / 8, seed)? };
    stream.synchronize(PATIENCE)?;
    let wrong = error_counters.wrong_words(check);
    ensure!(wrong == 0, "{wrong} wrong words in legacy memory");
    Ok(())
}

/// Fills an open range late, on a stream that is not waited for.
///
/// # Errors
/// Those of a launch.
pub fn fill_late(memory: &LegacyMemory, stream: &Stream, seed: u64, late: Duration) -> Result<()> {
    memory.used_on(stream);
    // SAFETY: the range is writable and stays mapped until the stream is past its work (`used_on`).
    unsafe { fill_words(stream, memory.ptr(), memory.bytes() / 8, seed, late)? };
    Ok(())
}

/// Frees an allocation, and says where it was.
///
/// # Errors
/// Those of the device.
pub fn freed(device: &Device) -> Result<DevicePtr> {
    // Large enough to be an allocation of the driver's own, and no part of one that stays.
    let plain = DeviceMalloc::new(device, 8 << 20 >> 3, 1)?;
    Ok(plain.ptr)
}

/// Memory by a function of the driver that the backend does not call (`cuMemAllocManaged`,
/// `cuMemAllocAsync`), for as long as `try_it` runs.
///
/// # Errors
/// The driver lacks a function, or refuses; what `try_it` says.
pub fn with_memory_by(
    function: &str,
    last: u64,
    try_it: impl FnOnce(DevicePtr) -> Result<()>,
) -> Result<()> {
    type Allocate = unsafe extern "C" fn(*mut u64, usize, u64) -> i32;
    type Context = *mut std::ffi::c_void;
    // SAFETY: the library is loaded already, so nothing is initialised again.
    let library = unsafe { libloading::Library::new("libcuda.so.1")? };
    let (mut ptr, mut context) = (0, std::ptr::null_mut());
    // SAFETY: the driver's functions have these signatures, and the places they write to live.
    let codes = unsafe {
        let retain = library
            .get::<unsafe extern "C" fn(*mut Context, i32) -> i32>("cuDevicePrimaryCtxRetain")?;
        let set_current = library.get::<unsafe extern "C" fn(Context) -> i32>("cuCtxSetCurrent")?;
        [
            retain(&mut context, 0),
            set_current(context),
            library.get::<Allocate>(function)?(&mut ptr, 4096, last),
        ]
    };
    ensure!(codes == [0; 3], "{function}: {codes:?}");
    let outcome = try_it(ptr);
    // SAFETY: allocated above and freed once; no stream used it.
    let code = unsafe { library.get::<unsafe extern "C" fn(u64) -> i32>("cuMemFree_v2")?(ptr) };
    ensure!(code == 0, "cuMemFree: {code}");
    outcome
}

/// Opens and destroys another process's event.
///
/// # Errors
/// Those of the device.
pub fn open_event(device: &Device, handle: &[u8]) -> Result<()> {
    let event = device.backend().open_event(handle.try_into()?)?;
    // SAFETY: opened above, destroyed once.
    unsafe { device.backend().destroy_event(event)? };
    Ok(())
}

/// Creates interprocess events until `each` says stop or none is left, then destroys them all.
///
/// # Errors
/// The error of `each`.
pub fn with_events(
    device: &Device,
    most: u32,
    each: impl FnOnce(Vec<[u8; 64]>, Option<warpipe::Error>) -> Result<()>,
) -> Result<()> {
    let backend = device.backend();
    let (mut events, mut end) = (Vec::new(), None);
    while events.len() < most as usize && end.is_none() {
        match backend.create_ipc_event() {
            Ok(event) => events.push(event),
            Err(error) => end = Some(error),
        }
    }
    // SAFETY: every event is live until it is destroyed below, once.
    let handles = events
        .iter()
        .map(|&event| unsafe { backend.export_event(event) })
        .collect::<warpipe::Result<_>>();
    let outcome = handles
        .map_err(Into::into)
        .and_then(|handles| each(handles, end));
    for event in events {
        // SAFETY: as above.
        unsafe { backend.destroy_event(event)? };
    }
    outcome
}
