//! The device backend: [`Backend`], one object-safe trait of narrow methods over plain handles. Its
//! contract stands at the trait.
//!
//! The checks stand above this trait: a backend trusts its callers, which is why most of its methods
//! are `unsafe`, and trusts neither the driver nor a descriptor from a peer. The trait is sealed:
//! callers trust a backend's answers, so a wrong one would break memory safety from safe code. The
//! feature `testing` has wrappers that delay, fail or count the calls of one.

pub(crate) mod pointer;
pub(crate) mod unreclaimed;
mod word;

pub mod cuda;
pub mod host;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use pointer::{IPC_EVENTS_MAX, IpcBytes, PointerInfo, PointerKind};
pub use word::TimelineWord;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

pub use crate::device_types::{
    Access, DeviceId, DeviceInfo, DeviceKind, DevicePtr, RawEvent, RawStream,
};
use crate::error::{DeviceFault, Error, LimitFault, Result};
use crate::kernel::Kernel;
pub use crate::rows::{Axis, Rows};
use crate::slow_path::{self, SlowPath};

/// One allocation, mapped in this process. Plain data: its owner calls `release` until that
/// succeeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawRegion {
    /// Its address.
    pub ptr: DevicePtr,
    /// Its length in bytes, a multiple of the granularity.
    pub bytes: u64,
    /// The backend's own handle (`CUmemGenericAllocationHandle`, or a descriptor number).
    pub handle: u64,
    /// The length in bytes of each of its mappings.
    pub(crate) piece: u64,
    /// The first bytes of it, which are still mapped. A device that has released a part of a region
    /// leaves 0 here, in `handle` and in `ptr`, in this order: mapped memory is not freed.
    pub(crate) mapped: u64,
}

/// An allocation that other code of this process has made and mapped, held once more. Plain data:
/// its owner releases it with [`Imports::release_retained`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retained {
    /// The driver's handle (`CUmemGenericAllocationHandle`). All holds of one allocation have the
    /// same, and while one is held no other allocation gets it.
    pub handle: u64,
    /// Where the allocation is mapped.
    pub base: DevicePtr,
    /// The mapping's length in bytes.
    pub bytes: u64,
}

/// One memory operation of a [`Streams::batch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamOp {
    /// Stores `value` into the word, behind all earlier work of the stream.
    Signal {
        /// The word's device address.
        word: DevicePtr,
        /// The value to store.
        value: u64,
    },
    /// Blocks the stream until the word is at or above `value`.
    Wait {
        /// The word's device address.
        word: DevicePtr,
        /// The value to reach.
        value: u64,
    },
}

/// The error of a device that cannot reach memory of another one.
pub(crate) fn out_of_reach(reader: &DeviceInfo, owner: DeviceId, reason: &str) -> Error {
    slow_path::count(SlowPath::NoPeerAccess, 0);
    let (name, id) = (&reader.name, reader.id);
    let text = format!("{name} ({id}) cannot read memory of {owner}: {reason}");
    Error::device(DeviceFault::OutOfReach, text)
}

/// The error of memory that `device` has no room for.
pub(crate) fn no_room(device: &str, bytes: u64, detail: String) -> Error {
    let device = device.into();
    Error::Limit(LimitFault::Device {
        device,
        bytes,
        detail,
    })
}

/// The error of a peer's descriptor that is not `wanted`.
pub(crate) fn not_shareable(wanted: &str, found: impl fmt::Display) -> Error {
    let text = format!("the descriptor received is not {wanted}: {found}");
    Error::device(DeviceFault::NotShareable, text)
}

/// The length of a peer's pieces in all, if each is a multiple of the granularity.
pub(crate) fn length_of_pieces(
    fds: &[BorrowedFd<'_>],
    piece: u64,
    granularity: u64,
    wanted: &str,
) -> Result<u64> {
    let bytes = piece.checked_mul(fds.len() as u64);
    let is_whole = |&bytes: &u64| bytes > 0 && piece.is_multiple_of(granularity);
    bytes.filter(is_whole).ok_or_else(|| {
        let count = fds.len();
        let text = format!("{count} pieces of {piece} bytes, not multiples of {granularity}");
        not_shareable(wanted, text)
    })
}

/// `fcntl(F_DUPFD_CLOEXEC)`: a descriptor of memory, numbered from 3 on.
pub(crate) fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, 3)
        .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", "a descriptor of memory", e))
}

mod sealed {
    /// Implemented by this crate's backends only.
    pub trait Sealed {}
}

/// A copy to the host that a stream makes. Dropping it waits for it, too.
pub trait HostCopy: Send {
    /// Waits until the bytes have arrived, for 10 s at most
    /// ([`Error::Timeout`](crate::Error::Timeout)). After an error the stream may still read what it
    /// was to copy, as after a drop that waited as long. Returns them in the pieces of memory in which
    /// they lie, in order.
    fn wait(self: Box<Self>) -> Result<Vec<HostPiece>>;
}

/// A piece of host memory with the bytes of a copy, given back when this is dropped.
pub struct HostPiece(Box<dyn AsRef<[u8]> + Send + Sync>);

impl HostPiece {
    pub(crate) fn new(memory: impl AsRef<[u8]> + Send + Sync + 'static) -> HostPiece {
        HostPiece(Box::new(memory))
    }
}

impl AsRef<[u8]> for HostPiece {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

/// An empty vector that has room for so many bytes.
///
/// # Errors
/// [`Error::Limit`] when this process has not.
#[doc(hidden)] // For the bindings.
pub fn room_for(bytes: u64) -> Result<Vec<u8>> {
    let mut room = Vec::new();
    let reserved = usize::try_from(bytes)
        .ok()
        .and_then(|length| room.try_reserve_exact(length).ok());
    let full = || no_room("this process", bytes, String::new());
    reserved.map(|()| room).ok_or_else(full)
}

/// A vector for a copy of device memory: [`room_for`] it, filled with zeros.
pub(crate) fn zeroed(bytes: u64) -> Result<Vec<u8>> {
    let mut copy = room_for(bytes)?;
    copy.resize(bytes as usize, 0);
    Ok(copy)
}

/// A copy of ranges to memory that is not page-locked, made by one download each.
pub(crate) fn copy_at_once(
    ranges: &[(DevicePtr, u64)],
    mut download: impl FnMut(&mut [u8], DevicePtr) -> Result<()>,
) -> Result<Box<dyn HostCopy>> {
    let mut copy = zeroed(ranges.iter().map(|(_, bytes)| bytes).sum())?;
    let mut rest = &mut copy[..];
    for &(src, bytes) in ranges {
        let (dst, behind) = std::mem::take(&mut rest).split_at_mut(bytes as usize);
        rest = behind;
        download(dst, src)?;
    }
    Ok(Box::new(copy))
}

/// A copy that has been made.
impl HostCopy for Vec<u8> {
    fn wait(self: Box<Self>) -> Result<Vec<HostPiece>> {
        Ok(vec![HostPiece(self)])
    }
}

/// A device backend. Sealed: no other crate can implement it.
///
/// # Contract
///
/// * The caller checks arguments: sizes are positive and aligned to [`Regions::granularity`],
///   handles come from the same backend, layouts fit. A backend trusts its callers, which is why
///   most of its methods are `unsafe`; it does not trust the driver or a descriptor from a peer.
/// * Every method may be called from any thread and leaves the caller's current context as it was.
/// * A *word* is the first field of a [`TimelineWord`] in a segment that was passed to
///   [`Regions::register`]. Its values only grow.
/// * `Signal` makes all work enqueued before it on its stream visible to every device and process
///   that sees the word's new value (`cuStreamWriteValue64` with its default barrier). `Wait` lets
///   the stream go on once the word is at or above the value (`CU_STREAM_WAIT_VALUE_GEQ`).
/// * No method blocks without a timeout, with these exceptions. `allocate`, `import`, `register`,
///   `open_legacy` and the creation of a device take as long as the driver does. `free_plain` and
///   `close_legacy` may also wait for the device's work: only the reaper or the user calls them.
///
/// ```compile_fail
/// #[derive(Debug)]
/// struct Mine;
/// impl warpipe::backend::sealed::Sealed for Mine {} // error: module `sealed` is private
/// ```
pub trait Backend:
    sealed::Sealed + Regions + Imports + Streams + Copies + Kernels + Ipc + Send + Sync + fmt::Debug
{
    /// The device that this backend drives.
    fn info(&self) -> &DeviceInfo;

    /// Whether kernels of this process run at the same time as kernels that other processes have on
    /// this device (CUDA: `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`). If not, or if the driver does not
    /// say, processes take turns in time slices.
    fn runs_beside_other_processes(&self) -> bool {
        true
    }
}

/// Regions: allocations of this library, which a descriptor names; and host memory that streams can reach. A part of [`Backend`].
pub trait Regions {
    /// The unit of a region's length, in bytes (CUDA: usually 2 MiB; host: the page).
    fn granularity(&self) -> u64;

    /// `cuMemCreate` + `cuMemAddressReserve` + `cuMemMap` + `cuMemSetAccess`, or `memfd_create` +
    /// `mmap`: zeroed, exportable memory, mapped read and write. `bytes` is a positive multiple of
    /// the granularity.
    fn allocate(&self, bytes: u64) -> Result<RawRegion>;

    /// `cuMemExportToShareableHandle` (POSIX descriptor), or a duplicate of the memfd. The
    /// descriptor is close-on-exec. It alone grants access to the memory, whatever happens to this
    /// process.
    ///
    /// # Safety
    /// `region` came from `allocate` of this backend and has not been released.
    unsafe fn export(&self, region: &RawRegion) -> Result<OwnedFd>;

    /// Unmaps a region and releases this process's handle of it. After an error `region` records
    /// the remaining part: call this again to continue there.
    /// [`DeviceFault::Reset`] is final.
    ///
    /// # Safety
    /// `region` came from `allocate` or `import` of this backend, is not released, and no enqueued
    /// work uses it.
    unsafe fn release(&self, region: &mut RawRegion) -> Result<()>;

    /// `cuMemHostRegister` (portable, mapped): makes host memory accessible to streams, for words
    /// and copies. Returns its device address.
    ///
    /// # Safety
    /// `ptr..ptr+bytes` is page-aligned mapped memory that stays mapped until `unregister`.
    unsafe fn register(&self, ptr: *mut u8, bytes: usize) -> Result<DevicePtr>;

    /// Whether a failed `register` has left this memory registered, because the driver did not undo
    /// it.
    fn is_registered(&self, _ptr: *mut u8) -> bool {
        false
    }

    /// `cuMemHostUnregister`, which waits for all streams of the context. So this refuses
    /// ([`Error::Timeout`](crate::Error::Timeout)) while a stream waits for a peer, which would hold
    /// up every allocation of this process as well. After an error the driver may still use the
    /// memory: it must stay mapped, and this may be called again.
    ///
    /// # Safety
    /// `ptr` was passed to `register` of this backend, and no enqueued work uses the memory.
    unsafe fn unregister(&self, ptr: *mut u8) -> Result<()>;

    /// Bytes of device memory in use by this process alone, as the backend counts them (regions
    /// allocated and imported, not yet released). For leak checks and diagnostics.
    fn bytes_held(&self) -> u64;
}

/// Allocations of other processes, and of other code in this one. A part of [`Backend`].
pub trait Imports {
    /// `cuMemImportFromShareableHandle` + map, or `mmap` of sealed memfds: maps a peer's
    /// allocations of exactly `piece` bytes each, owned by device `owner`, in their order into one
    /// range. The descriptors are not trusted:
    /// [`DeviceFault::NotShareable`] for anything but such memory,
    /// [`DeviceFault::OutOfReach`] for memory that this device cannot reach.
    fn import(
        &self,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<RawRegion>;

    /// Maps other allocations over an imported region, in place of its own: pieces of `piece` bytes
    /// that fill it (`cuMemUnmap`, `cuMemMap` and `cuMemSetAccess`, or `mmap` with `MAP_FIXED`). The
    /// address stays. Descriptors that are refused change nothing. After any other error parts of
    /// the region may be without memory, until a later call succeeds.
    ///
    /// # Safety
    /// `region` came from `import` of this backend with the same `access`, is as long as the pieces,
    /// is not released, and no enqueued work uses it.
    unsafe fn import_over(
        &self,
        region: &mut RawRegion,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<()>;

    /// `cuMemRetainAllocationHandle` + `cuMemGetAddressRange`: holds the allocation that other code
    /// of this process has mapped at `ptr` by the virtual memory functions (PyTorch's expandable
    /// segments, for example). [`Error::Handle`](crate::Error::Handle) for any other
    /// memory; on the host backend for any but its own regions.
    fn retain_mapped(&self, ptr: DevicePtr) -> Result<Retained>;

    /// `cuMemExportToShareableHandle` (POSIX descriptor) of a retained allocation. Close-on-exec.
    /// [`Error::Handle`](crate::Error::Handle) if it was made without that.
    ///
    /// # Safety
    /// `retained` came from `retain_mapped` of this backend and is not released.
    unsafe fn export_retained(&self, retained: &Retained) -> Result<OwnedFd>;

    /// `cuMemRelease` of a retained allocation. After an error it is held, and this may be called
    /// again.
    ///
    /// # Safety
    /// `retained` came from `retain_mapped` of this backend and is released once.
    unsafe fn release_retained(&self, retained: &Retained) -> Result<()>;
}

/// Streams, their order, and events. A part of [`Backend`].
pub trait Streams {
    /// `cuStreamCreate` (non-blocking), or a new thread.
    fn create_stream(&self) -> Result<RawStream>;

    /// `cuStreamDestroy`: returns at once; work already enqueued still runs.
    ///
    /// # Safety
    /// `stream` came from `create_stream` and is destroyed once.
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()>;

    /// `cuStreamBatchMemOp`: enqueues the operations, in order, with as few driver calls as can be.
    /// Up to four signals, with the waits before them, are enqueued entirely or not at all; an
    /// error in a longer batch may leave a part of it enqueued.
    ///
    /// # Safety
    /// `stream` is live; every word lies in registered memory that outlives the operation.
    unsafe fn batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()>;

    /// Whether the stream's work so far is done and nothing orders later work but the caller: then
    /// a signal may be stored by the CPU in place of [`batch`](Self::batch). Never on CUDA, where
    /// the driver orders signals.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn may_signal_from_cpu(&self, _stream: RawStream) -> bool {
        false
    }

    /// Like [`batch`](Self::batch), for a thread that has just called
    /// [`is_capturing`](Self::is_capturing) for this stream, and only this library's code since
    /// then: the thread's current context is still the one found there.
    ///
    /// # Safety
    /// As for [`batch`](Self::batch).
    unsafe fn batch_at_once(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.batch(stream, ops) }
    }

    /// `cuLaunchHostFunc`: enqueues a function on the CPU. It must not call the device.
    ///
    /// # Safety
    /// `stream` is live, and is not captured: a graph would call the function at each launch.
    unsafe fn call(&self, stream: RawStream, function: Box<dyn FnOnce() + Send>) -> Result<()>;

    /// `cuStreamIsCapturing`: whether work on the stream is recorded into a graph, and not
    /// executed. This holds for the legacy default stream, too, while a stream that is ordered with
    /// it is captured.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn is_capturing(&self, stream: RawStream) -> Result<bool>;

    /// `cuStreamQuery`: whether everything enqueued is done. A fault of earlier work is returned
    /// here.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn query(&self, stream: RawStream) -> Result<bool>;

    /// `cuEventCreate` (no timing).
    fn create_event(&self) -> Result<RawEvent>;

    /// `cuEventDestroy`.
    ///
    /// # Safety
    /// `event` came from `create_event` and is destroyed once.
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()>;

    /// `cuEventRecord`: the event is complete once the stream's work so far is.
    ///
    /// # Safety
    /// Both handles are live.
    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// `cuStreamWaitEvent`: the stream waits for the event's last record.
    ///
    /// # Safety
    /// Both handles are live.
    unsafe fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// `cuEventQuery`: whether the last record is complete (true if never recorded).
    ///
    /// # Safety
    /// `event` is live.
    unsafe fn query_event(&self, event: RawEvent) -> Result<bool>;
}

/// Copies that a stream makes. A part of [`Backend`].
pub trait Copies {
    /// `cuMemcpyAsync` for one row, `cuMemcpy3DAsync` for long ones in up to three dimensions, else
    /// a kernel of this library: enqueues a copy between device addresses (regions or registered
    /// memory), also of tensors of different layouts, as one operation. The kernel reaches the same
    /// memory as `stream`'s device, and no other device's memory.
    ///
    /// # Safety
    /// All rows stay mapped until the copy is done, readable on one side and writable on the other,
    /// and no byte is both.
    unsafe fn copy_rows(&self, stream: RawStream, rows: &Rows) -> Result<()>;

    /// `cuMemsetD8Async` with zeros: enqueues the clearing of device memory.
    ///
    /// # Safety
    /// `dst` is writable for `bytes` bytes until it is done; nothing enqueued elsewhere touches it.
    unsafe fn zero(&self, stream: RawStream, dst: DevicePtr, bytes: u64) -> Result<()>;

    /// `cuMemcpyHtoDAsync` from any host memory; `src` may be reused as soon as this returns. Does
    /// not wait for the stream's work, which may be blocked. Waits for staging memory if too many
    /// bytes are queued behind such streams, for 10 s at most
    /// ([`Error::Timeout`](crate::Error::Timeout)). Refuses a stream that is captured
    /// ([`Error::State`](crate::Error::State)), as the other copies from and to the host.
    ///
    /// # Safety
    /// `dst` is writable for `src.len()` bytes until the copy is done; nothing enqueued elsewhere
    /// writes it.
    unsafe fn upload(&self, stream: RawStream, dst: DevicePtr, src: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.upload_pieces(stream, dst, &[src]) }
    }

    /// As [`upload`](Self::upload), of pieces that will lie one behind the other.
    ///
    /// # Safety
    /// As for [`upload`](Self::upload), for all their bytes.
    unsafe fn upload_pieces(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        pieces: &[&[u8]],
    ) -> Result<()>;

    /// `cuMemcpyDtoHAsync` and wait: the bytes are in `dst` when this returns.
    ///
    /// The caller makes sure that no work on `stream` can be stuck. This waits for earlier work for
    /// 10 s at most ([`Error::Timeout`](crate::Error::Timeout)), and does not write `dst` after
    /// that.
    ///
    /// # Safety
    /// `src` is readable for `dst.len()` bytes.
    unsafe fn download(&self, stream: RawStream, dst: &mut [u8], src: DevicePtr) -> Result<()>;

    /// Enqueues a copy of ranges of device memory, one behind the other, to page-locked memory, and
    /// does not wait for it: the bytes are read where the device has written them. Without room
    /// there, copies to other memory and waits.
    ///
    /// # Safety
    /// The ranges are readable, and nothing writes there, until the result has been waited for with
    /// success, or `stream` is past its present work; `stream` is live until the result has been
    /// waited for or dropped.
    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        ranges: &[(DevicePtr, u64)],
    ) -> Result<Box<dyn HostCopy>> {
        // SAFETY: the caller's promise.
        copy_at_once(ranges, |dst, src| unsafe {
            self.download(stream, dst, src)
        })
    }
}

/// Kernels of this library. A part of [`Backend`].
pub trait Kernels {
    /// `cuLaunchKernel`: enqueues `kernel` over `grid` blocks of `block` threads; on the host its
    /// CPU implementation.
    ///
    /// # Safety
    /// `args` are the kernel's parameters, and the memory they name outlives the launch.
    unsafe fn launch(
        &self,
        stream: RawStream,
        kernel: &Kernel,
        grid: u32,
        block: u32,
        args: &[u64],
    ) -> Result<()>;

    /// Loads `kernel` now, so that no later launch loads a module behind a waiting stream.
    fn preload(&self, kernel: &Kernel) -> Result<()>;
}

/// Memory of other allocators, and the driver's older handles of memory and events. A part of [`Backend`].
pub trait Ipc {
    /// `cuEventCreate` (`CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING`): an event that other
    /// processes may open. [`Error::Limit`](crate::Error::Limit) when the process has
    /// [`IPC_EVENTS_MAX`] of them.
    fn create_ipc_event(&self) -> Result<RawEvent>;

    /// `cuIpcGetEventHandle`: the bytes by which another process of the same user opens the event.
    ///
    /// # Safety
    /// `event` came from `create_ipc_event` of this backend and is live.
    unsafe fn export_event(&self, event: RawEvent) -> Result<IpcBytes>;

    /// `cuIpcOpenEventHandle`: another process's event, to be destroyed like an own one. The bytes
    /// are not trusted. On the host backend it is an event of this process alone, which was never
    /// recorded: timeline words order the work of two processes.
    fn open_event(&self, handle: &IpcBytes) -> Result<RawEvent>;

    /// `cuMemAlloc`: memory of another allocator's kind. No descriptor names it; a legacy handle
    /// can.
    fn allocate_plain(&self, bytes: u64) -> Result<DevicePtr>;

    /// `cuMemFree`, which may wait for all work of the device.
    ///
    /// # Safety
    /// `ptr` came from `allocate_plain` of this backend, is freed once, and no enqueued work uses
    /// it.
    unsafe fn free_plain(&self, ptr: DevicePtr) -> Result<()>;

    /// `cuPointerGetAttribute`: the allocation in which an address lies, of any kind, on any
    /// device.
    fn locate(&self, ptr: DevicePtr) -> Result<PointerInfo>;

    /// `cuIpcGetMemHandle`: the bytes by which another process of the same user opens the
    /// allocation that begins at `base`.
    ///
    /// # Safety
    /// `base` is the base of a live allocation of [`PointerKind::Device`], from
    /// [`locate`](Self::locate).
    unsafe fn export_legacy(&self, base: DevicePtr) -> Result<IpcBytes>;

    /// `cuIpcOpenMemHandle` (`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`): maps another process's
    /// allocation of `bytes` bytes, owned by device `owner`, and returns its base. Counted: an
    /// allocation that was opened twice must be closed twice. The bytes are not trusted:
    /// [`Error::Handle`](crate::Error::Handle) for bytes that cannot be opened.
    fn open_legacy(&self, handle: &IpcBytes, bytes: u64, owner: DeviceId) -> Result<DevicePtr>;

    /// `cuIpcCloseMemHandle`. [`Error::Handle`](crate::Error::Handle) for memory that
    /// is not open. After another error it is open, and this may be called again.
    ///
    /// # Safety
    /// No enqueued work uses the memory, unless it is open more than once.
    unsafe fn close_legacy(&self, base: DevicePtr) -> Result<()>;
}
