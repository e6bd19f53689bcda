//! The CUDA implementation of [`Backend`]: opening a device, entering its context, and the calls to
//! the other parts.

pub(super) mod broadcast;
mod gather;
mod kernels;
mod legacy;
pub(super) mod memory;

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use self::broadcast::Broadcast;
use self::gather::Gather;
use self::kernels::Kernels;
use self::legacy::{EVENTS, IpcHandleTable};
use self::memory::allocation;
use super::context::{Current, Relaxed, enter, make_current};
use super::device::{check_abilities, describe, driver, find};
use super::fault::Fault;
use super::staging::Staging;
use super::sys::{CUcontext, CUdevice, CUresult, DEVICE_ATTRIBUTE_MPS_ENABLED, Driver};
use super::{shutdown_gate, waits};
use crate::backend::{
    Access, Backend, DeviceId, DeviceInfo, DevicePtr, HostCopy, IpcBytes, PointerInfo, RawEvent,
    RawRegion, RawStream, Retained, Rows, StreamOp, TimelineWord,
};
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::fork::per_process::PerProcess;
use crate::kernel::Kernel;

/// One GPU, through its primary context. See the [module](super).
#[derive(Debug)]
pub struct CudaBackend {
    pub(super) driver: &'static Driver,
    pub(super) device: CUdevice,
    context: CUcontext,
    /// `None` for a driver that does not number contexts.
    context_id: Option<u64>,
    /// The context is known to have been reset.
    is_reset: AtomicBool,
    pub(super) opening: waits::Context,
    pub(super) info: DeviceInfo,
    pub(super) granularity: u64,
    /// Set for the life of the context.
    pub(super) is_under_mps: bool,
    pub(super) kernels: Kernels,
    pub(super) broadcast: Broadcast,
    pub(super) gather: Gather,
    pub(super) staging: Staging,
    /// Bytes of regions and legacy memory that are allocated and not yet released.
    pub(super) held: AtomicU64,
    pub(super) ipc_handles: IpcHandleTable,
    pub(super) stuck: Mutex<HashSet<usize>>,
    pub(super) me: Weak<CudaBackend>,
}

/// The devices opened so far, by ordinal: one context, one set of modules, for the life of the
/// process.
static OPENED: PerProcess<Mutex<BTreeMap<u32, Arc<CudaBackend>>>> = PerProcess::new();

thread_local! {
    /// The context that was current on this thread, without a push, at its last capture query; null
    /// for another context. See [`Backend::batch_at_once`].
    static FOUND_CURRENT: Cell<CUcontext> = const { Cell::new(CUcontext(ptr::null_mut())) };
}

/// Codes with which a driver answers to handles of a destroyed context.
const STALE: [CUresult; 3] = [
    CUresult::INVALID_CONTEXT,
    CUresult::INVALID_HANDLE,
    CUresult::CONTEXT_IS_DESTROYED,
];

impl CudaBackend {
    /// `cuDevicePrimaryCtxRetain`: the GPU with this ordinal. Opening it again gives the same
    /// backend.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::DriverSymbol`], [`Error::DevicePermission`],
    /// [`Error::NoDevice`], [`Error::NoSuchDevice`], [`Error::Driver`], and [`Error::Forked`] in a
    /// child of a process that used CUDA.
    pub fn open(ordinal: u32) -> Result<Arc<dyn Backend>> {
        Ok(Self::opened(ordinal)?)
    }

    /// [`open`](Self::open), with the concrete type.
    pub(super) fn opened(ordinal: u32) -> Result<Arc<CudaBackend>> {
        // Before the lock, so that no thread parks while it holds the lock.
        let _guard = shutdown_gate::enter();
        let driver = driver()?;
        let mut opened = OPENED.lock();
        let known = opened.get(&ordinal);
        if let Some(backend) = known.filter(|backend| !backend.is_gone()) {
            return Ok(backend.clone());
        }
        let had_one = known.is_some();
        let device = find(driver, ordinal)?;
        let info = describe(driver, device, ordinal)?;
        check_abilities(driver, device)?;
        let _relaxed = Relaxed::new(driver);
        let context = driver.primary_context_retain(device)?;
        let backend = Self::with_context(driver, device, context, info).inspect_err(|_| {
            let _ = driver.primary_context_release(device);
        })?;
        if had_one {
            // A reset leaves the retain counts as they are: the previous backend's retain is
            // released now that a new one exists.
            let _ = driver.primary_context_release(device);
        }
        let backend = Arc::new_cyclic(|me| CudaBackend {
            me: me.clone(),
            ..backend
        });
        opened.insert(ordinal, backend.clone());
        Ok(backend)
    }

    fn with_context(
        driver: &'static Driver,
        device: CUdevice,
        context: CUcontext,
        info: DeviceInfo,
    ) -> Result<CudaBackend> {
        let _current = enter(driver, context)?;
        let granularity = driver.allocation_granularity(&allocation(device))?.max(1);
        let is_under_mps = driver
            .device_attribute(device, DEVICE_ATTRIBUTE_MPS_ENABLED)
            .is_ok_and(|is_enabled| is_enabled != 0);
        let (broadcast, gather) = (Broadcast::load(driver)?, Gather::load(driver)?);
        // Once more: the first context may have made the driver register a handler of its own.
        shutdown_gate::close_before_the_driver()?;
        let (kernels, staging, ipc_handles) = (
            Kernels::default(),
            Staging::default(),
            IpcHandleTable::default(),
        );
        // SAFETY: retained by the caller.
        let context_id = unsafe { driver.context_id(context) }.ok();
        let (held, is_reset) = (AtomicU64::new(0), AtomicBool::new(false));
        Ok(CudaBackend {
            driver,
            device,
            context,
            context_id,
            is_reset,
            opening: waits::next_context(),
            info,
            granularity,
            is_under_mps,
            kernels,
            broadcast,
            gather,
            staging,
            held,
            ipc_handles,
            stuck: Mutex::default(),
            me: Weak::new(),
        })
    }

    /// Makes the device's context current on this thread until the result is dropped, for any call.
    /// It does not disturb a stream that another thread captures: see [`Relaxed`].
    ///
    /// # Errors
    /// [`Error::DeviceReset`]: the handles and addresses of a reset context may belong to others in
    /// the next one.
    pub(super) fn enter(&self) -> Result<Current> {
        let _guard = shutdown_gate::enter();
        if self.is_gone() {
            return Err(self.reset_error());
        }
        enter(self.driver, self.context)
    }

    /// Like [`enter`](Self::enter), for calls that only enqueue work. Those disturb no capture, and
    /// are too frequent for [`Relaxed`] and for a check that the retained context still exists. A
    /// known reset is an error here, too.
    #[inline]
    pub(super) fn enter_to_enqueue(&self) -> Result<Current> {
        if self.is_reset.load(Ordering::Relaxed) {
            return Err(self.reset_error());
        }
        make_current(self.driver, self.context).map_err(|error| self.explain(error))
    }

    /// [`enter`](Self::enter), for calls that release: `None` if the resource went with the
    /// context.
    pub(super) fn enter_unless_gone(&self) -> Result<Option<Current>> {
        match self.enter() {
            Err(Error::DeviceReset { .. }) => Ok(None),
            entered => entered.map(Some),
        }
    }

    #[cold]
    pub(super) fn reset_error(&self) -> Error {
        Error::DeviceReset {
            device: self.info.name.clone(),
        }
    }

    /// Whether the device was reset since this was opened. A context that cannot be queried counts
    /// as present. The caller is inside the gate.
    fn is_gone(&self) -> bool {
        let is_another = || {
            // SAFETY: the primary context is active, and has one handle for the life of the
            // process.
            let now = unsafe { self.driver.context_id(self.context) }.ok();
            self.context_id
                .is_some_and(|before| now.is_some_and(|now| now != before))
        };
        let is_gone = self.is_reset.load(Ordering::Relaxed)
            || match self.driver.primary_context_is_active(self.device) {
                Ok(is_active) => !is_active || is_another(),
                Err(_) => false,
            };
        if is_gone && !self.is_reset.swap(true, Ordering::Relaxed) {
            waits::reset(self.opening);
        }
        is_gone
    }

    /// Replaces an error if the device was reset.
    #[cold]
    fn explain(&self, error: Error) -> Error {
        let _guard = shutdown_gate::enter();
        match error {
            Error::Driver { code, .. } if STALE.contains(&CUresult(code)) && self.is_gone() => {
                self.reset_error()
            }
            other => other,
        }
    }
}

impl crate::backend::sealed::Sealed for CudaBackend {}

impl Backend for CudaBackend {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn runs_beside_other_processes(&self) -> bool {
        self.is_under_mps
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn allocate(&self, bytes: u64) -> Result<RawRegion> {
        self.allocate_region(bytes)
    }

    unsafe fn export(&self, region: &RawRegion) -> Result<OwnedFd> {
        // SAFETY: the caller's promise.
        unsafe { self.export_region(region) }
    }

    fn import(
        &self,
        fd: BorrowedFd<'_>,
        bytes: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<RawRegion> {
        self.import_region(fd, bytes, access, owner)
    }

    fn retain_mapped(&self, ptr: DevicePtr) -> Result<Retained> {
        self.retain_foreign(ptr)
    }

    unsafe fn is_mapped_at(&self, retained: &Retained, ptr: DevicePtr) -> Result<bool> {
        self.is_foreign_at(retained, ptr)
    }

    unsafe fn export_retained(&self, retained: &Retained) -> Result<OwnedFd> {
        // SAFETY: the caller's promise.
        unsafe { self.export_foreign(retained) }
    }

    unsafe fn release_retained(&self, retained: &Retained) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.release_foreign(retained) }
    }

    fn import_pieces(
        &self,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<RawRegion> {
        self.import_foreign(fds, piece, access, owner)
    }

    unsafe fn import_over(
        &self,
        region: &mut RawRegion,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.import_foreign_over(region, fds, piece, access, owner) }
    }

    unsafe fn release(&self, region: &mut RawRegion) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.release_region(region) }
    }

    unsafe fn register(&self, ptr: *mut u8, bytes: usize) -> Result<DevicePtr> {
        // SAFETY: the caller's promise.
        unsafe { self.register_host(ptr, bytes) }
    }

    fn is_registered(&self, ptr: *mut u8) -> bool {
        self.stuck().contains(&ptr.addr())
    }

    fn unregister_would_block(&self, ptr: *mut u8) -> bool {
        waits::postpone(ptr)
    }

    unsafe fn unregister(&self, ptr: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.unregister_host(ptr) }
    }

    fn create_stream(&self) -> Result<RawStream> {
        let _current = self.enter()?;
        Ok(RawStream(self.driver.stream_create()?))
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        let Some(_current) = self.enter_unless_gone()? else {
            return Ok(());
        };
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.stream_destroy(stream.0) }?)
    }

    unsafe fn batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(stream.0, ops) }.map_err(|error| self.explain(error))
    }

    unsafe fn batch_at_once(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        if FOUND_CURRENT.get() != self.context || self.is_reset.load(Ordering::Relaxed) {
            // SAFETY: the caller's promise.
            return unsafe { self.batch(stream, ops) };
        }
        let _guard = shutdown_gate::enter();
        // SAFETY: the caller's promise; the context is still current.
        unsafe { self.enqueue_inside(stream.0, ops) }.map_err(|error| self.explain(error))
    }

    unsafe fn copy(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    ) -> Result<()> {
        let _current = self.enter_to_enqueue()?;
        let bytes = usize::try_from(bytes)
            .map_err(|_| Error::argument("bytes", bytes, "what an address can count"))?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.copy_async(dst, src, bytes, stream.0) }
            .map_err(|fault| self.explain(fault.into()))
    }

    unsafe fn copy_rows(&self, stream: RawStream, rows: &Rows) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.enqueue_rows(stream.0, rows) }.map_err(|error| self.explain(error))
    }

    unsafe fn zero(&self, stream: RawStream, dst: DevicePtr, bytes: u64) -> Result<()> {
        let _current = self.enter_to_enqueue()?;
        let bytes = usize::try_from(bytes)
            .map_err(|_| Error::argument("bytes", bytes, "what an address can count"))?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.zero_async(dst, bytes, stream.0) }
            .map_err(|fault| self.explain(fault.into()))
    }

    unsafe fn upload(&self, stream: RawStream, dst: DevicePtr, src: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.upload_bytes(stream.0, dst, src) }
    }

    unsafe fn download(&self, stream: RawStream, dst: &mut [u8], src: DevicePtr) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.download_bytes(stream.0, dst, src) }
    }

    unsafe fn upload_pieces(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        pieces: &[&[u8]],
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.upload_gathered(stream.0, dst, pieces) }
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        ranges: &[(DevicePtr, u64)],
    ) -> Result<Box<dyn HostCopy>> {
        // SAFETY: the caller's promise.
        unsafe { self.copy_ranges_to_host(stream.0, ranges) }
    }

    unsafe fn launch(
        &self,
        stream: RawStream,
        kernel: &Kernel,
        grid: u32,
        block: u32,
        args: &[u64],
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_kernel(stream.0, kernel, grid, block, args) }
            .map_err(|error| self.explain(error))
    }

    fn preload(&self, kernel: &Kernel) -> Result<()> {
        self.preload_kernel(kernel)
    }

    unsafe fn call(&self, stream: RawStream, function: Box<dyn FnOnce() + Send>) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.call_on_cpu(stream.0, function) }.map_err(|error| self.explain(error))
    }

    unsafe fn is_capturing(&self, stream: RawStream) -> Result<bool> {
        let current = self.enter_to_enqueue()?;
        FOUND_CURRENT.set(if current.pushed {
            CUcontext(ptr::null_mut())
        } else {
            self.context
        });
        // SAFETY: the caller's promise.
        match unsafe { self.driver.stream_is_capturing(stream.0) } {
            // A driver without stream capture.
            Err(Fault::Symbol(_)) => Ok(false),
            answer => answer.map_err(|fault| self.explain(fault.into())),
        }
    }

    unsafe fn query(&self, stream: RawStream) -> Result<bool> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.stream_query(stream.0) }?)
    }

    fn create_event(&self) -> Result<RawEvent> {
        let _current = self.enter()?;
        Ok(RawEvent(self.driver.event_create()?))
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        EVENTS.get().forget(event.0);
        let Some(_current) = self.enter_unless_gone()? else {
            return Ok(());
        };
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.event_destroy(event.0) }?)
    }

    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let _current = self.enter_to_enqueue()?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.event_record(event.0, stream.0) }
            .map_err(|fault| self.explain(fault.into()))
    }

    unsafe fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let _current = self.enter_to_enqueue()?;
        // SAFETY: the caller's promise.
        unsafe { self.driver.stream_wait_event(stream.0, event.0) }
            .map_err(|fault| self.explain(fault.into()))
    }

    unsafe fn query_event(&self, event: RawEvent) -> Result<bool> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.event_query(event.0) }?)
    }

    fn create_ipc_event(&self) -> Result<RawEvent> {
        Ok(RawEvent(self.create_interprocess_event()?))
    }

    unsafe fn export_event(&self, event: RawEvent) -> Result<IpcBytes> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { self.driver.ipc_export_event(event.0) }?)
    }

    fn open_event(&self, handle: &IpcBytes) -> Result<RawEvent> {
        self.open_interprocess_event(handle)
    }

    fn allocate_plain(&self, bytes: u64) -> Result<DevicePtr> {
        self.allocate_legacy(bytes)
    }

    unsafe fn free_plain(&self, ptr: DevicePtr) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.free_legacy(ptr) }
    }

    fn locate(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        self.locate_pointer(ptr)
    }

    unsafe fn export_legacy(&self, base: DevicePtr) -> Result<IpcBytes> {
        self.export_legacy_handle(base)
    }

    fn open_legacy(&self, handle: &IpcBytes, bytes: u64, owner: DeviceId) -> Result<DevicePtr> {
        self.open_legacy_handle(handle, bytes, owner)
    }

    unsafe fn close_legacy(&self, base: DevicePtr) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.close_legacy_handle(base) }
    }

    fn wait_word(&self, word: &TimelineWord, value: u64, timeout: Duration) -> Result<bool> {
        let start = Instant::now();
        let mut backoff = Backoff::default();
        while !word.reached(value) {
            if start.elapsed() >= timeout {
                return Ok(false);
            }
            backoff.pause();
        }
        Ok(true)
    }

    fn bytes_held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }
}
