//! The allocator of `warpipe.torch.pool()`: memory of this library for PyTorch's caching allocator.
//! **This module is marked for unsafe**: PyTorch calls it by C functions.
//!
//! PyTorch calls these functions with its allocator's lock held, with and without the interpreter.
//! They take neither the interpreter nor a lock that is held while PyTorch is called, and wait for
//! no thread of the library: such a thread may be in the middle of dropping a tensor.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard};

use crate::exclusive::locked;
use warpipe::backend::DevicePtr;
use warpipe::{Device, Memory, Stream};

/// What PyTorch has, by its first byte.
static ALLOCATED: LazyLock<Mutex<BTreeMap<DevicePtr, Memory>>> = LazyLock::new(Mutex::default);
/// The process that has allocated.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn allocated() -> MutexGuard<'static, BTreeMap<DevicePtr, Memory>> {
    locked(&ALLOCATED)
}

/// Whether the memory at `ptr` was allocated here. It is shared for reading alone.
pub fn has(ptr: DevicePtr) -> bool {
    find(ptr).is_some()
}

/// The memory around `ptr`, if that was allocated here, and where `ptr` lies in it.
pub fn find(ptr: DevicePtr) -> Option<(Memory, u64)> {
    if PROCESS.load(Ordering::Relaxed) != std::process::id() {
        return None;
    }
    let known = allocated();
    let (first, memory) = known.range(..=ptr).next_back()?;
    let offset = ptr - first;
    (offset < memory.bytes()).then(|| (memory.clone(), offset))
}

fn allocate(bytes: isize, ordinal: c_int) -> Option<DevicePtr> {
    let (bytes, ordinal) = (u64::try_from(bytes).ok()?, u32::try_from(ordinal).ok()?);
    let device = Device::cuda(ordinal).ok()?;
    let memory = Memory::allocate(&device, bytes).ok()?;
    let ptr = memory.ptr();
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    allocated().insert(ptr, memory);
    Some(ptr)
}

/// PyTorch's `void *malloc(ssize_t bytes, int device, cudaStream_t stream)`: memory that other
/// processes can open by a descriptor (`cuMemCreate`, `cuMemMap`). Null if there is none, which
/// PyTorch reports as it does for `cudaMalloc`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_torch_allocate(
    bytes: isize,
    ordinal: c_int,
    _stream: *mut c_void,
) -> *mut c_void {
    let made = std::panic::catch_unwind(|| allocate(bytes, ordinal));
    let ptr = made.ok().flatten().unwrap_or_default();
    std::ptr::with_exposed_provenance_mut(ptr as usize)
}

/// PyTorch's `void free(void *ptr, size_t bytes, int device, cudaStream_t stream)`: returns the
/// memory to the device behind the work of `stream` so far, and once no process has it open.
///
/// # Safety
/// `stream` lasts until its work so far is done, as PyTorch's own allocator assumes of it, and no
/// other stream has work on the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_torch_free(
    ptr: *mut c_void,
    _bytes: usize,
    _ordinal: c_int,
    stream: *mut c_void,
) {
    // A forked child has none of this memory, and may find the table locked for ever.
    if PROCESS.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let known = allocated().remove(&(ptr.addr() as DevicePtr));
    let Some(memory) = known else { return };
    let release = || {
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrow_raw(memory.device(), stream) };
        memory.used_on(&stream);
        drop(memory);
    };
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(release));
}
