//! Legacy CUDA IPC handles, for memory that another allocator made with `cudaMalloc`. **This module
//! is marked for unsafe**: it exports memory that other allocators own.

use std::ffi::c_char;

use warpipe::{Device, LegacyHandle};

use crate::arguments::{put_text, text, timeout};
use crate::call::call;
use crate::{
    MemoryKind, handle, make_memory_on, run, take, warpipe_device, warpipe_memory, warpipe_status,
};

/// A handle for `bytes` bytes at the device address `data`, which may lie anywhere in an allocation
/// of `cudaMalloc` (`cuMemAlloc`): `cuIpcGetMemHandle`, with the facts that the driver's 64 bytes
/// do not include. A process of the same machine and user opens it with `warpipe_legacy_open`.
///
/// Never the first choice: the memory is gone when its exporter is, every importer maps the whole
/// allocation around it, and can write it. Memory of `warpipe_memory_allocate` has none of these
/// limits.
///
/// The text is written to `buffer` with a zero at its end. `*length` becomes its length without
/// that, also if the buffer is too short; `length` may be null.
///
/// `WARPIPE_INVALID_INPUT`: memory that is not of `cudaMalloc` (null, host, pinned, managed,
/// pooled, mapped by the virtual memory functions, freed) or of another device; a range longer than
/// its allocation; `capacity` is too small. `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// The allocation stays for as long as another process uses it: the driver does not document its
/// behaviour for memory that is freed while another process has it open. The address itself is
/// looked up and not trusted. `buffer` is the address of `capacity` bytes, `length` null or that of
/// a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_legacy_export(
    device: *const warpipe_device,
    data: u64,
    bytes: u64,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> warpipe_status {
    call(device, |device| {
        // SAFETY: the caller's promise.
        let exported = unsafe { LegacyHandle::export(device.streams.device(), data, bytes) }?;
        // SAFETY: the caller's promises.
        unsafe { put_text(exported, buffer, capacity, length) }
    })
}

/// Opens memory by its legacy handle (`cuIpcOpenMemHandle`). An allocation that is open already, or
/// that this process exported, makes no driver call and has the same address. `device` may be null:
/// the first GPU, else the host; it may be another GPU than the owner if the two have peer access.
/// Does not wait.
///
/// `*memory` is the caller's, to be closed by `warpipe_close` or `warpipe_legacy_close`. It
/// may be read and written, by work on streams that `warpipe_memory_used_on` was called with.
///
/// `WARPIPE_PEER_GONE` when the exporter is dead; `WARPIPE_NOT_FOUND` when it has freed the memory;
/// `WARPIPE_INVALID_INPUT` for a text that is no such handle, or one of another machine, or of a
/// GPU for the host; `WARPIPE_LIMIT_REACHED`; `WARPIPE_DEVICE_UNAVAILABLE` or
/// `WARPIPE_DEVICE_FAILED` for a GPU that this process cannot see or reach.
///
/// # Safety
/// `legacy_handle` is a text, `memory` the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_legacy_open(
    legacy_handle: *const c_char,
    device: *const warpipe_device,
    memory: *mut *mut warpipe_memory,
) -> warpipe_status {
    let open = |device: &Device| {
        // SAFETY: the caller's promise.
        let found: LegacyHandle = unsafe { text("legacy_handle", legacy_handle) }?.parse()?;
        Ok(MemoryKind::Legacy(found.open(device)?))
    };
    // SAFETY: the caller's promise.
    unsafe { make_memory_on(device, memory, open) }
}

/// Waits, at most `timeout_ns` nanoseconds, until the streams that the memory was used on are past
/// their work, and closes it (`cuIpcCloseMemHandle`, if it is the last one of its allocation).
/// Closes `memory`. `warpipe_close` does the same later, without waiting: this is for an
/// exporter that waits to free the memory.
///
/// `WARPIPE_TIMEOUT` when a stream is not done: it is closed when it is. `WARPIPE_INVALID_STATE`
/// for other memory, or while another thread is in a call on it: then it stays the caller's.
/// `WARPIPE_DEVICE_FAILED`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_legacy_close(
    memory: *mut warpipe_memory,
    timeout_ns: u64,
) -> warpipe_status {
    run(|| {
        let mut lent = handle::lock(memory)?;
        let is_legacy = |held: &MemoryKind| matches!(held, MemoryKind::Legacy(_));
        let said = "this memory was not opened by a legacy handle; close it with warpipe_close";
        match take(&mut lent, is_legacy, said)? {
            MemoryKind::Legacy(memory) => Ok(memory.close(timeout(timeout_ns))?),
            _ => Ok(()),
        }
    })
}
