//! The host backend: memfds as device memory, threads as streams, futexes as timeline words.
//!
//! It is not a mock. Memory crosses processes by descriptor and the MMU enforces read-only imports;
//! streams finish *late*, on threads of their own, so that a missing wait gives a wrong result here
//! too. Kernels run as their CPU implementations.

mod memory;
pub(crate) use memory::{check_memfd, check_sealed_memfd, sealed_memfd};
mod device_malloc;
mod regions;
mod stream;

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use self::device_malloc::DeviceMalloc;
use self::regions::Regions;
use self::stream::{HostEvent, HostStream, Op};
use super::{
    Access, Backend, DeviceId, DeviceInfo, DeviceKind, DevicePtr, IpcBytes, PointerInfo,
    PointerKind, RawEvent, RawRegion, RawStream, Retained, Rows, StreamOp, Streams,
};
use crate::error::{Error, HandleFault, LimitFault, Result};
use crate::fork::per_process::InheritedOnFork;
use crate::kernel::{Kernel, KernelLaunch};

/// The backend of [`Device::host`](crate::Device::host).
#[derive(Debug)]
pub struct HostBackend {
    info: DeviceInfo,
    allocated: AtomicU64,
    imported: AtomicU64,
    malloc: DeviceMalloc,
    regions: Regions,
    has_short_queues: bool,
}

impl HostBackend {
    /// The process's one host backend.
    pub fn shared() -> Arc<dyn Backend> {
        // A device that was opened before a fork can be used in the child.
        static SHARED: InheritedOnFork<Option<Arc<HostBackend>>> = InheritedOnFork::new(None);
        SHARED
            .lock()
            .get_or_insert_with(|| Arc::new(HostBackend::new(false)))
            .clone()
    }

    /// Another backend, for tests, with streams like those of a driver: 1,020 operations fit in a
    /// stream's queue; a call that finds the queue full blocks, and so does every other call for
    /// that stream, until there is room.
    pub fn with_short_queues() -> Arc<dyn Backend> {
        Arc::new(HostBackend::new(true))
    }

    fn new(has_short_queues: bool) -> HostBackend {
        let system = rustix::system::sysinfo();
        let id = DeviceId {
            kind: DeviceKind::Host,
            uuid: [0; 16],
        };
        let memory_bytes = system
            .totalram
            .saturating_mul(u64::from(system.mem_unit.max(1)));
        HostBackend {
            info: DeviceInfo {
                id,
                ordinal: 0,
                name: "host".into(),
                memory_bytes,
            },
            allocated: AtomicU64::new(0),
            imported: AtomicU64::new(0),
            malloc: DeviceMalloc::default(),
            regions: Regions::default(),
            has_short_queues,
        }
    }

    /// Counts `bytes` as allocated, unless the machine has less memory.
    fn reserve(&self, bytes: u64) -> Result<()> {
        let limit = self.info.memory_bytes;
        let fits = |held: u64| held.checked_add(bytes).filter(|&total| total <= limit);
        match self
            .allocated
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
        {
            Ok(_) => Ok(()),
            Err(held) => {
                let detail = format!(" ({held} of {limit} in use)");
                Err(Error::Limit(LimitFault::Device {
                    device: "host".into(),
                    bytes,
                    detail,
                }))
            }
        }
    }
}

/// The raw handle of a stream or an event.
fn raw<T>(object: Arc<T>) -> *mut c_void {
    Arc::into_raw(object).cast_mut().cast()
}

/// The stream behind a raw handle.
///
/// # Safety
/// `raw` came from `create_stream` of this backend and has not been destroyed.
unsafe fn stream<'a>(raw: RawStream) -> Result<&'a HostStream> {
    if raw.0.is_null() {
        return Err(Error::argument(
            "stream",
            "null",
            "a stream of the host device (it has no default stream)",
        ));
    }
    // SAFETY: the caller promises a live handle, which is a pointer from `Arc::into_raw` (see
    // `create_stream`).
    Ok(unsafe { &*raw.0.cast::<HostStream>() })
}

/// The event behind a raw handle.
///
/// # Safety
/// `raw` came from `create_event` of this backend and has not been destroyed.
unsafe fn event(raw: RawEvent) -> Arc<HostEvent> {
    let pointer = raw.0.cast::<HostEvent>().cast_const();
    // SAFETY: a live handle is a pointer from `Arc::into_raw`; its count is raised before this
    // takes one reference.
    unsafe {
        Arc::increment_strong_count(pointer);
        Arc::from_raw(pointer)
    }
}

impl super::sealed::Sealed for HostBackend {}

impl Backend for HostBackend {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
}

impl super::Regions for HostBackend {
    fn granularity(&self) -> u64 {
        rustix::param::page_size() as u64
    }

    fn allocate(&self, bytes: u64) -> Result<RawRegion> {
        self.reserve(bytes)?;
        let region = memory::allocate(bytes).inspect_err(|_| {
            self.allocated.fetch_sub(bytes, Ordering::Relaxed);
        })?;
        self.regions.add(&region);
        Ok(region)
    }

    unsafe fn export(&self, region: &RawRegion) -> Result<OwnedFd> {
        // SAFETY: the region is live and its own allocation, so its handle is an open descriptor of
        // this process.
        unsafe { memory::export(region) }
    }

    unsafe fn release(&self, region: &mut RawRegion) -> Result<()> {
        let counter = if memory::is_import(region) {
            &self.imported
        } else {
            // Before another mapping may have the address.
            self.regions.remove(region);
            &self.allocated
        };
        // SAFETY: the caller's promise: the region is this backend's, live, and no longer used.
        unsafe { memory::release(*region)? };
        counter.fetch_sub(region.bytes, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn register(&self, ptr: *mut u8, _bytes: usize) -> Result<DevicePtr> {
        Ok(ptr as DevicePtr)
    }

    unsafe fn unregister(&self, _ptr: *mut u8) -> Result<()> {
        Ok(())
    }

    fn bytes_held(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed) + self.imported.load(Ordering::Relaxed)
    }
}

impl super::Imports for HostBackend {
    fn import(
        &self,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        _owner: DeviceId,
    ) -> Result<RawRegion> {
        let region = memory::import(fds, piece, access)?;
        self.imported.fetch_add(region.bytes, Ordering::Relaxed);
        Ok(region)
    }

    unsafe fn import_over(
        &self,
        region: &mut RawRegion,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        _owner: DeviceId,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { memory::import_over(region, fds, piece, access) }
    }

    fn retain_mapped(&self, ptr: DevicePtr) -> Result<Retained> {
        match self.regions.retain(ptr)? {
            Some(retained) => Ok(retained),
            None => {
                let kind = match super::Ipc::locate(self, ptr)?.kind {
                    // Mapped, and not allocated here.
                    PointerKind::Vmm => PointerKind::VmmPrivate,
                    kind => kind,
                };
                Err(Error::not_exportable(ptr, kind))
            }
        }
    }

    unsafe fn export_retained(&self, retained: &Retained) -> Result<OwnedFd> {
        self.regions.export(retained)
    }

    unsafe fn release_retained(&self, retained: &Retained) -> Result<()> {
        self.regions.release(retained);
        Ok(())
    }
}

impl Streams for HostBackend {
    fn create_stream(&self) -> Result<RawStream> {
        Ok(RawStream(raw(HostStream::start(self.has_short_queues)?)))
    }

    unsafe fn destroy_stream(&self, raw: RawStream) -> Result<()> {
        // SAFETY: the caller gives up a live handle, which is a pointer from `Arc::into_raw`.
        let stream = unsafe { Arc::from_raw(raw.0.cast::<HostStream>().cast_const()) };
        stream.close();
        Ok(())
    }

    unsafe fn batch(&self, raw: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: the caller promises a live stream and words that outlive the operations.
        unsafe { stream(raw)?.batch(ops) }
    }

    unsafe fn may_signal_from_cpu(&self, raw: RawStream) -> bool {
        // SAFETY: the caller promises a live stream.
        unsafe { stream(raw) }.is_ok_and(HostStream::is_idle)
    }

    unsafe fn call(&self, raw: RawStream, function: Box<dyn FnOnce() + Send>) -> Result<()> {
        // SAFETY: the caller promises a live stream.
        unsafe { stream(raw)? }.push(Op::Call(function))
    }

    unsafe fn is_capturing(&self, _raw: RawStream) -> Result<bool> {
        Ok(false)
    }

    unsafe fn query(&self, raw: RawStream) -> Result<bool> {
        // SAFETY: the caller promises a live stream.
        Ok(unsafe { stream(raw)? }.has_finished())
    }

    fn create_event(&self) -> Result<RawEvent> {
        Ok(RawEvent(raw(Arc::<HostEvent>::default())))
    }

    unsafe fn destroy_event(&self, raw: RawEvent) -> Result<()> {
        // SAFETY: the caller gives up a live handle, which is a pointer from `Arc::into_raw`.
        let event = unsafe { Arc::from_raw(raw.0.cast::<HostEvent>().cast_const()) };
        if event.is_interprocess {
            self.malloc.events.remove();
        }
        Ok(())
    }

    unsafe fn record_event(&self, raw: RawEvent, on: RawStream) -> Result<()> {
        // SAFETY: the caller promises live handles.
        let (event, stream) = unsafe { (event(raw), stream(on)?) };
        let turn = event.next_turn();
        stream.push(Op::Record(event, turn))
    }

    unsafe fn wait_event(&self, on: RawStream, raw: RawEvent) -> Result<()> {
        // SAFETY: the caller promises live handles.
        let (event, stream) = unsafe { (event(raw), stream(on)?) };
        let turn = event.last_turn();
        stream.push(Op::Await(event, turn))
    }

    unsafe fn query_event(&self, raw: RawEvent) -> Result<bool> {
        // SAFETY: the caller promises a live handle.
        let event = unsafe { event(raw) };
        Ok(event.is_done(event.last_turn()))
    }
}

impl super::Copies for HostBackend {
    unsafe fn copy_rows(&self, raw: RawStream, rows: &Rows) -> Result<()> {
        let rows = *rows;
        let work = move || {
            // SAFETY: the caller's promise on the rows lasts until this has run.
            unsafe { rows.copy() }
        };
        // SAFETY: the caller promises a live stream.
        unsafe { self.call(raw, Box::new(work)) }
    }

    unsafe fn zero(&self, raw: RawStream, dst: DevicePtr, bytes: u64) -> Result<()> {
        let work = move || {
            // SAFETY: the caller's promise on the range lasts until this has run.
            unsafe { std::ptr::write_bytes(dst as *mut u8, 0, bytes as usize) }
        };
        // SAFETY: the caller promises a live stream.
        unsafe { self.call(raw, Box::new(work)) }
    }

    unsafe fn upload_pieces(
        &self,
        raw: RawStream,
        mut dst: DevicePtr,
        pieces: &[&[u8]],
    ) -> Result<()> {
        pieces.iter().try_for_each(|piece| {
            // SAFETY: the caller promises a live stream, and that all their bytes can be written
            // behind `dst`.
            unsafe { stream(raw)?.upload(dst, piece) }?;
            dst += piece.len() as u64;
            Ok(())
        })
    }

    unsafe fn download(&self, raw: RawStream, dst: &mut [u8], src: DevicePtr) -> Result<()> {
        // SAFETY: the caller promises a live stream, and that `src` is readable for `dst.len()`
        // bytes.
        unsafe { stream(raw)?.download(dst, src) }
    }
}

impl super::Kernels for HostBackend {
    unsafe fn launch(
        &self,
        raw: RawStream,
        kernel: &Kernel,
        grid: u32,
        block: u32,
        args: &[u64],
    ) -> Result<()> {
        let (host_version, args): (_, Box<[u64]>) = (kernel.host, args.into());
        let work = move || {
            // SAFETY: the caller of `launch` promised arguments that fit the kernel and memory that
            // outlives it.
            unsafe {
                host_version(KernelLaunch {
                    grid,
                    block,
                    args: &args,
                })
            }
        };
        // SAFETY: the caller promises a live stream.
        unsafe { self.call(raw, Box::new(work)) }
    }

    fn preload(&self, _kernel: &Kernel) -> Result<()> {
        Ok(())
    }
}

impl super::Ipc for HostBackend {
    fn create_ipc_event(&self) -> Result<RawEvent> {
        self.malloc.events.add()?;
        Ok(RawEvent(raw(Arc::new(HostEvent::interprocess()))))
    }

    unsafe fn export_event(&self, raw: RawEvent) -> Result<IpcBytes> {
        // SAFETY: the caller promises a live handle.
        if !unsafe { event(raw) }.is_interprocess {
            return Err(Error::argument(
                "event",
                "an event of this process alone",
                "one of create_ipc_event",
            ));
        }
        device_malloc::export_event(raw.0.addr() as u64)
    }

    fn open_event(&self, handle: &IpcBytes) -> Result<RawEvent> {
        device_malloc::check_event(handle)?;
        self.create_event()
    }

    fn allocate_plain(&self, bytes: u64) -> Result<DevicePtr> {
        self.reserve(bytes)?;
        self.malloc.allocate(bytes).inspect_err(|_| {
            self.allocated.fetch_sub(bytes, Ordering::Relaxed);
        })
    }

    unsafe fn free_plain(&self, ptr: DevicePtr) -> Result<()> {
        // SAFETY: the caller's promise.
        let bytes = unsafe { self.malloc.free(ptr) }?;
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn locate(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        self.malloc.locate(ptr, self.info.id)
    }

    unsafe fn export_legacy(&self, base: DevicePtr) -> Result<IpcBytes> {
        self.malloc.export(base)
    }

    fn open_legacy(&self, handle: &IpcBytes, bytes: u64, owner: DeviceId) -> Result<DevicePtr> {
        if owner != self.info.id {
            let (owner, device) = (owner.to_string(), self.info.id.to_string());
            return Err(Error::legacy(HandleFault::Device { owner, device }));
        }
        let (base, is_new) = self.malloc.open(handle, bytes)?;
        if is_new {
            self.imported.fetch_add(bytes, Ordering::Relaxed);
        }
        Ok(base)
    }

    unsafe fn close_legacy(&self, base: DevicePtr) -> Result<()> {
        // SAFETY: the caller's promise.
        let bytes = unsafe { self.malloc.close(base) }?;
        self.imported.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }
}
