//! The host backend: memfds as device memory, threads as streams, futexes as timeline words.
//!
//! It is not a mock. Memory crosses processes by descriptor and the MMU enforces read-only imports;
//! streams finish *late*, on threads of their own, so that a missing wait gives a wrong result here
//! too. Kernels run as their CPU implementations.

mod memory;
pub(crate) use memory::{check_memfd, check_sealed_memfd, map, sealed_memfd};
mod device_malloc;
mod regions;
mod stream;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use self::device_malloc::DeviceMalloc;
use self::regions::RegionTable;
use self::stream::{HostEvent, HostStream, Op};
use super::{
    Backend, Copies, DeviceId, DeviceInfo, DeviceKind, DevicePtr, Kernels, RawEvent, RawStream,
    Rows, StreamOp, Streams, no_room,
};
use crate::error::{Error, Result};
use crate::fork::per_process::InheritedOnFork;
use crate::kernel::{Kernel, KernelLaunch};

/// The backend of [`Device::host`](crate::Device::host).
#[derive(Debug)]
pub struct HostBackend {
    info: DeviceInfo,
    allocated: AtomicU64,
    imported: AtomicU64,
    malloc: DeviceMalloc,
    regions: RegionTable,
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
            regions: RegionTable::default(),
            has_short_queues,
        }
    }

    /// Makes memory of `bytes` bytes and counts it as allocated, unless the machine has less.
    fn reserved<T>(&self, bytes: u64, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let limit = self.info.memory_bytes;
        let fits = |held: u64| held.checked_add(bytes).filter(|&total| total <= limit);
        self.allocated
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|held| no_room("host", bytes, format!(" ({held} of {limit} in use)")))?;
        make().inspect_err(|_| {
            self.allocated.fetch_sub(bytes, Ordering::Relaxed);
        })
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
        let allowed = "a stream of the host device (it has no default stream)";
        return Err(Error::argument("stream", "null", allowed));
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
        Ok(RawEvent(raw(HostEvent::new(false))))
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

impl Copies for HostBackend {
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
        // SAFETY: the caller promises a live stream.
        let stream = unsafe { stream(raw) }?;
        for &piece in pieces {
            // SAFETY: the caller promises that all bytes can be written behind `dst` until the copy
            // is done.
            let copy = move |src: &[u8]| unsafe {
                std::ptr::copy_nonoverlapping(src.as_ptr(), dst as *mut u8, src.len());
            };
            // An idle stream copies at once, a busy one from a buffer of its own.
            if stream.is_idle() {
                copy(piece);
            } else {
                let owned: Box<[u8]> = piece.into();
                stream.push(Op::Call(Box::new(move || copy(&owned))))?;
            }
            dst += piece.len() as u64;
        }
        Ok(())
    }

    unsafe fn download(&self, raw: RawStream, dst: &mut [u8], src: DevicePtr) -> Result<()> {
        // SAFETY: the caller promises a live stream.
        unsafe { stream(raw) }?.wait_for_work()?;
        // SAFETY: the caller promises that `src` is readable for `dst.len()` bytes.
        unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }
}

impl Kernels for HostBackend {
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
            let args = &args;
            // SAFETY: the caller of `launch` promised arguments that fit the kernel and memory that
            // outlives it.
            unsafe { host_version(KernelLaunch { grid, block, args }) }
        };
        // SAFETY: the caller promises a live stream.
        unsafe { self.call(raw, Box::new(work)) }
    }

    fn preload(&self, _kernel: &Kernel) -> Result<()> {
        Ok(())
    }
}
