//! Memory that processes share: allocated here, opened here, or a block of a pool. **This module is
//! marked for unsafe**: it borrows a descriptor that the caller names.

use std::ffi::{c_char, c_void};
use std::ops::Deref;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::Arc;

use warpipe::{
    Access, Buffer, Device, DeviceId, DeviceKind, DeviceSlice, LegacyMemory, LentBuffer, Memory,
    MemoryInfo, SharedMemory, Stream,
};

use crate::arguments::{choice, fixed, out, put_text, slice, slice_mut, timeout};
use crate::call::{call, call_on, get, make, make_beside};
use crate::handle::{self, Handle, Locked};
use crate::{Failure, OnDevice, Result, run, streams_of, warpipe_device, warpipe_status};

/// A range of device memory: allocated by this process, opened by a ticket, a descriptor or a
/// legacy CUDA IPC handle, or a block of a pool. Any number of threads may use it. Closed, it stays
/// until the streams that it was used on are past their work; a block returns to its pool then.
/// Memory that other processes have open, or that is published, stays theirs.
pub struct warpipe_memory(());

/// How memory may be used.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum warpipe_access {
    /// For reading. The MMU enforces it against mistakes; a hostile importer can map the memory
    /// writable. Send a copy instead.
    WARPIPE_ACCESS_READ = 0,
    /// For reading and writing.
    WARPIPE_ACCESS_READ_WRITE = 1,
}

/// The properties of a range of memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_memory_info {
    /// The device address of its first byte: a `CUdeviceptr`, or on the host an address of this
    /// process.
    pub data: u64,
    /// Its length in bytes, as it was asked for.
    pub bytes: u64,
    /// The length of the whole allocation, which `warpipe_memory_import_fd` needs beside the
    /// descriptor; 0 for memory that `warpipe_memory_export_fd` does not export.
    pub mapped_bytes: u64,
    /// Whether it lies on a GPU.
    pub is_cuda: bool,
    /// Whether this process may only read it.
    pub is_read_only: bool,
    /// The UUID of the GPU that it lies on; zeros for the host.
    pub uuid: [u8; 16],
    /// The name under which it was opened, or its pool's name; else empty.
    pub name: [c_char; 81],
}

/// The kinds of memory.
#[derive(Debug)]
pub(crate) enum MemoryKind {
    /// Allocated by this process.
    Owned(Memory),
    /// Opened by a ticket or a descriptor.
    Shared(SharedMemory),
    /// A block of this process's pool.
    Block(Buffer),
    /// A block of another process's pool.
    Lent(LentBuffer),
    /// Another allocator's, opened by a legacy handle.
    Legacy(LegacyMemory),
}

impl Deref for MemoryKind {
    type Target = DeviceSlice;

    fn deref(&self) -> &DeviceSlice {
        match self {
            MemoryKind::Owned(memory) => memory,
            MemoryKind::Shared(memory) => memory,
            MemoryKind::Block(block) => block,
            MemoryKind::Lent(block) => block,
            MemoryKind::Legacy(memory) => memory,
        }
    }
}

impl MemoryKind {
    fn name(&self) -> &str {
        match self {
            MemoryKind::Owned(_) | MemoryKind::Legacy(_) => "",
            named => &named.name,
        }
    }

    pub(crate) fn info(&self) -> warpipe_memory_info {
        let mapped_bytes = match self {
            MemoryKind::Owned(memory) => memory.info().mapped_bytes,
            _ => 0,
        };
        warpipe_memory_info {
            data: self.ptr(),
            bytes: self.bytes(),
            mapped_bytes,
            is_cuda: self.owner().kind == DeviceKind::Cuda,
            is_read_only: self.access == Access::Read,
            uuid: self.owner().uuid,
            name: fixed(self.name()),
        }
    }
}

/// A range of memory on the device that it is mapped on. Tensors of other frameworks share it.
pub(crate) type MemoryObject = OnDevice<Arc<MemoryKind>>;

/// Takes memory that is used up if it is of a wanted kind, which closes the pointer.
pub(crate) fn take(
    lent: &mut Locked<MemoryObject>,
    is_wanted: impl FnOnce(&MemoryKind) -> bool,
    otherwise: &str,
) -> Result<MemoryKind> {
    if !is_wanted(&lent.object) {
        return Err(Failure::state(otherwise));
    }
    let OnDevice { object, streams } = lent.take();
    Arc::try_unwrap(object).map_err(|object| {
        lent.put_back(OnDevice { object, streams });
        Failure::state("a tensor of another framework uses this warpipe_memory; delete that first")
    })
}

/// Writes the pointer of memory that `work` makes of an object, on that object's device.
///
/// # Safety
/// As for [`make_beside`].
pub(crate) unsafe fn make_memory_of<S: Handle<Object = OnDevice<T>>, T>(
    source: *const S,
    memory: *mut *mut warpipe_memory,
    work: impl FnOnce(&T) -> warpipe::Result<MemoryKind>,
) -> warpipe_status {
    let work = |found: &mut S::Guard| Ok(Arc::new(work(&found.object)?));
    // SAFETY: the caller's promise.
    unsafe { make_beside(source, "memory", memory, work) }
}

/// Writes the pointer of memory that `work` makes on a device.
///
/// # Safety
/// As for [`make`].
pub(crate) unsafe fn make_memory_on(
    device: *const warpipe_device,
    memory: *mut *mut warpipe_memory,
    work: impl FnOnce(&Device) -> Result<MemoryKind>,
) -> warpipe_status {
    let make_object = || {
        let streams = streams_of(device)?;
        let object = Arc::new(work(streams.device())?);
        Ok(OnDevice { object, streams })
    };
    // SAFETY: the caller's promise.
    unsafe { make("memory", memory, make_object) }
}

/// The access that an argument or option names.
pub(crate) fn access_of(name: &str, access: u32) -> Result<Access> {
    let accesses = [Access::Read, Access::ReadWrite];
    choice(name, access, "a warpipe_access", &accesses)
}

/// Allocates `bytes` bytes that can be given to other processes, zeroed: in all a multiple of the
/// device's unit, 2 MiB on CUDA as a rule, a page on the host (`cuMemCreate`, `cuMemMap`). `device`
/// may be null: the first GPU, else the host.
///
/// `*memory` is the caller's, to be closed by `warpipe_close`. The memory lives as long as
/// any process has it open.
///
/// `WARPIPE_LIMIT_REACHED` when the device has no room; `WARPIPE_INVALID_INPUT` for 0 bytes;
/// `WARPIPE_DEVICE_FAILED`; `WARPIPE_SYSTEM`.
///
/// # Safety
/// `memory` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_allocate(
    device: *const warpipe_device,
    bytes: u64,
    memory: *mut *mut warpipe_memory,
) -> warpipe_status {
    let allocate = |device: &Device| Ok(MemoryKind::Owned(Memory::allocate(device, bytes)?));
    // SAFETY: the caller's promise.
    unsafe { make_memory_on(device, memory, allocate) }
}

/// Describes memory: its address, length and device.
///
/// # Safety
/// `info` is the address of such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_get_info(
    memory: *const warpipe_memory,
    info: *mut warpipe_memory_info,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { get(memory, "info", info, |memory| memory.info()) }
}

/// Enqueues a copy of `bytes` bytes from memory of the host to byte `offset`
/// (`cuMemcpyHtoDAsync`). The source may be reused when the call returns.
///
/// `WARPIPE_INVALID_INPUT`: beyond the memory's end, memory that was given for reading, or a stream
/// of another device; `WARPIPE_TIMEOUT` when too many copies wait behind streams that stand still;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `data` is the address of `bytes` bytes; `stream` is a stream of the memory's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_write(
    memory: *const warpipe_memory,
    stream: *mut c_void,
    offset: u64,
    data: *const c_void,
    bytes: usize,
) -> warpipe_status {
    let write = |memory: &Arc<MemoryKind>, stream: &Stream| {
        // SAFETY: the caller's promise.
        let data = unsafe { slice("data", data.cast::<u8>(), bytes) }?;
        Ok(memory.write(stream, offset, data)?)
    };
    // SAFETY: the caller's promise.
    unsafe { call_on(memory, stream, write) }
}

/// Waits on the CPU for the streams that `warpipe_memory_write` and `warpipe_memory_used_on` were
/// called with on this memory, at most `timeout_ns` nanoseconds, and copies `bytes` bytes from byte
/// `offset` on to memory of the host.
///
/// `WARPIPE_INVALID_INPUT`: beyond the memory's end; `WARPIPE_TIMEOUT`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `buffer` is the address of `bytes` bytes that nothing else uses during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_copy_to(
    memory: *const warpipe_memory,
    offset: u64,
    buffer: *mut c_void,
    bytes: usize,
    timeout_ns: u64,
) -> warpipe_status {
    call(memory, |memory| {
        // SAFETY: the caller's promise; bytes of any value are valid.
        let buffer = unsafe { slice_mut("buffer", buffer.cast::<u8>(), bytes) }?;
        Ok(memory.copy_to(offset, buffer, timeout(timeout_ns))?)
    })
}

/// Says that the stream is about to be given work on this memory, which is neither unmapped nor
/// used again before the stream has done all work that it was given before the memory is closed.
/// Call it before the work is enqueued, once for each stream.
///
/// # Safety
/// `stream` is a stream of the memory's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_used_on(
    memory: *const warpipe_memory,
    stream: *mut c_void,
) -> warpipe_status {
    let use_on = |memory: &Arc<MemoryKind>, stream: &Stream| {
        memory.used_on(stream);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { call_on(memory, stream, use_on) }
}

/// A descriptor of allocated memory, close-on-exec (`cuMemExportToShareableHandle`, or a duplicate
/// of the memfd), to be sent over a socket. Any process that gets it can map all of the memory, for
/// reading or writing: `warpipe_memory_import_fd`.
///
/// `*fd` is the caller's, to be closed by `close(2)`. It becomes -1 when the call fails.
///
/// `WARPIPE_INVALID_STATE` unless the memory is of `warpipe_memory_allocate`;
/// `WARPIPE_LIMIT_REACHED`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `fd` is the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_export_fd(
    memory: *const warpipe_memory,
    fd: *mut i32,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out("fd", fd) }?;
        place.put(-1);
        let memory = handle::find(memory)?;
        place.put(owned(&memory)?.export_fd()?.into_raw_fd());
        Ok(())
    })
}

/// The memory, if this process allocated it and may give it away.
pub(crate) fn owned(memory: &MemoryKind) -> Result<&Memory> {
    let MemoryKind::Owned(memory) = memory else {
        let said = "this memory is not of warpipe_memory_allocate; its owner can give it away";
        return Err(Failure::state(said));
    };
    Ok(memory)
}

/// Maps memory by a descriptor of `warpipe_memory_export_fd` that came over the caller's own
/// socket. `bytes`, `mapped_bytes` and `uuid` are those of the exporter's `warpipe_memory_info`;
/// `uuid` may be null on the host. `access` is a `warpipe_access`. `device` may be null: the first
/// GPU, else the host. The descriptor's type and size are checked. It stays the caller's, and may
/// be closed afterwards.
///
/// `*memory` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_DEVICE_FAILED`: another descriptor, another size, or memory that the device cannot
/// reach; `WARPIPE_INVALID_INPUT`: no descriptor, no access, or more bytes than are mapped;
/// `WARPIPE_LIMIT_REACHED`.
///
/// # Safety
/// `uuid` is null or the address of 16 bytes, `memory` the address of a pointer. `fd` is not closed
/// during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_import_fd(
    device: *const warpipe_device,
    fd: i32,
    bytes: u64,
    mapped_bytes: u64,
    uuid: *const u8,
    access: u32,
    memory: *mut *mut warpipe_memory,
) -> warpipe_status {
    let import = |device: &Device| {
        let uuid_bytes = if uuid.is_null() { 0 } else { 16 };
        // SAFETY: the caller's promise.
        let uuid = unsafe { slice("uuid", uuid, uuid_bytes) }?;
        if fd < 0 {
            return Err(Failure::argument("fd", fd, "an open descriptor"));
        }
        let access = access_of("access", access)?;
        let info = MemoryInfo {
            bytes,
            mapped_bytes,
            device: DeviceId {
                kind: device.info().id.kind,
                uuid: uuid.try_into().unwrap_or_default(),
            },
        };
        // SAFETY: not -1; the caller keeps it open during the call. A number without a descriptor
        // is an error of the first call of the system that gets it.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let imported = Memory::import_fd(device, fd, &info, access)?;
        Ok(MemoryKind::Shared(imported))
    };
    // SAFETY: the caller's promise.
    unsafe { make_memory_on(device, memory, import) }
}

/// A ticket with which other processes open this block of a pool (`warpipe_ticket_open`) until it
/// is closed or freed here; a process that has opened it by then keeps it. `access` is a
/// `warpipe_access`. The text is written to `buffer` with a zero at its end. `*length` becomes its
/// length without that, also if the buffer is too short; `length` may be null.
///
/// `WARPIPE_INVALID_STATE` unless the memory is of `warpipe_pool_allocate`; `WARPIPE_INVALID_INPUT`
/// when `capacity` is too small; `WARPIPE_PEER_GONE` when the pool is closed.
///
/// # Safety
/// `buffer` is the address of `capacity` bytes, `length` null or that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_lend(
    memory: *const warpipe_memory,
    access: u32,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> warpipe_status {
    call(memory, |memory| {
        let access = access_of("access", access)?;
        let MemoryKind::Block(block) = &*memory.object else {
            let said = "this memory is no block of a pool of this process; publish it instead (warpipe_memory_publish)";
            return Err(Failure::state(said));
        };
        // SAFETY: the caller's promises.
        unsafe { put_text(block.lend(access)?, buffer, capacity, length) }
    })
}

/// Frees a block of a pool behind the work enqueued on the stream so far, and on the others that it
/// was used on (`cuStreamWriteValue64`). Does not wait: the block is used again when that work is
/// done. Closes `memory`, also when the device fails.
///
/// `WARPIPE_INVALID_STATE` for memory that is no block of a pool, or while another thread is in a
/// call on it: then it stays the caller's. `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `stream` is a stream of the memory's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_free_on(
    memory: *mut warpipe_memory,
    stream: *mut c_void,
) -> warpipe_status {
    run(|| {
        let mut lent = handle::lock(memory)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { lent.streams.get(stream) }?.into_owned();
        let is_block =
            |held: &MemoryKind| matches!(held, MemoryKind::Block(_) | MemoryKind::Lent(_));
        let said = "only a block of a pool is freed on a stream; close this memory (warpipe_close)";
        match take(&mut lent, is_block, said)? {
            MemoryKind::Block(block) => Ok(block.free(&stream)?),
            MemoryKind::Lent(block) => Ok(block.free(&stream)?),
            _ => Ok(()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::streams::Streams;
    use crate::warpipe_status::{WARPIPE_INVALID_OBJECT, WARPIPE_INVALID_STATE};

    #[test]
    fn memory_that_a_call_uses_is_not_consumed_meanwhile() {
        let streams = Arc::new(Streams::new(Device::host()));
        let memory = Memory::allocate(streams.device(), 64).expect("the host has memory");
        let object = Arc::new(MemoryKind::Owned(memory));
        let memory = OnDevice { object, streams };
        let memory: *mut warpipe_memory = handle::reserve().expect("a free entry").fill(memory);
        let consume = || take(&mut handle::lock(memory)?, |_| true, "");

        let used = handle::find(memory).expect("it is open");
        let refused = consume();
        assert!(
            matches!(refused, Err(Failure::Own(WARPIPE_INVALID_STATE, _))),
            "{refused:?}"
        );
        drop(used);
        let locked = handle::lock(memory).expect("no call uses it");
        let refused = handle::find(memory);
        assert!(
            matches!(refused, Err(Failure::Own(WARPIPE_INVALID_STATE, _))),
            "{refused:?}"
        );
        drop(locked);
        assert!(consume().is_ok());
        assert!(matches!(
            consume(),
            Err(Failure::Own(WARPIPE_INVALID_OBJECT, _))
        ));
    }
}
