//! Wrappers over any backend for tests: they delay, fail or count its calls.
//!
//! All are one [`Wrapped`] backend with another [`Hook`]. The library trusts a hook, so safe code
//! can break memory safety with one, by operations on invalid words or by a false device identity:
//! this is for tests and measurements alone, behind the feature `testing`.

#[cfg(test)]
mod full_queue;

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{
    Access, Backend, DeviceId, DeviceInfo, DevicePtr, IpcBytes, PointerInfo, RawEvent, RawRegion,
    RawStream, Retained, Rows, StreamOp,
};
use crate::error::{Error, Result};
use crate::kernel::Kernel;

#[cfg(test)]
pub(crate) use self::full_queue::FullQueue;

/// A wrapper's behaviour before each call of the inner backend.
pub trait Hook: Send + Sync + std::fmt::Debug {
    /// Called with the method's name before it runs; an error is returned in its place.
    fn before(&self, method: &'static str) -> Result<()>;

    /// Whether a stream is reported as being captured.
    fn is_capturing(&self, _stream: RawStream) -> bool {
        false
    }

    /// Changes a batch: returns the operations to run, after any that the hook enqueues itself.
    fn batch(
        &self,
        _inner: &dyn Backend,
        _stream: RawStream,
        ops: &[StreamOp],
    ) -> Result<Vec<StreamOp>> {
        Ok(ops.to_vec())
    }
}

/// Any backend with a [`Hook`] before each call.
#[derive(Debug)]
pub struct Wrapped<H> {
    inner: Arc<dyn Backend>,
    info: DeviceInfo,
    hook: H,
}

impl<H: Hook> Wrapped<H> {
    /// Puts `hook` in front of `inner`.
    pub fn new(inner: Arc<dyn Backend>, hook: H) -> Arc<Self> {
        let info = inner.info().clone();
        Arc::new(Wrapped { inner, info, hook })
    }

    /// Like [`new`](Self::new), and reports another device identity, for tests that need two
    /// devices on a machine with one.
    pub fn posing_as(inner: Arc<dyn Backend>, hook: H, id: DeviceId) -> Arc<Self> {
        let info = DeviceInfo {
            id,
            ..inner.info().clone()
        };
        Arc::new(Wrapped { inner, info, hook })
    }

    /// The hook, to read its counts or change its aim.
    pub fn hook(&self) -> &H {
        &self.hook
    }
}

/// Counts the calls of each method.
#[derive(Debug, Default)]
pub struct Counting {
    calls: Mutex<BTreeMap<&'static str, u64>>,
}

impl Counting {
    /// The calls so far, by method.
    pub fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Hook for Counting {
    fn before(&self, method: &'static str) -> Result<()> {
        *self
            .calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(method)
            .or_default() += 1;
        Ok(())
    }
}

impl Error {
    /// The code of [`injected`](Error::injected) faults.
    pub const INJECTED: i32 = -1;

    /// A fault that a test asked for, in the call of this number, from 1, of a backend's method.
    pub fn injected(method: &'static str, call: u64) -> Self {
        Error::Driver {
            call: method,
            code: Error::INJECTED,
            name: "an injected fault".into(),
            message: format!("call {call}"),
            next: "",
        }
    }
}

/// Fails one call: the Nth of a method, once, with [`Error::injected`].
#[derive(Debug, Default)]
pub struct Failing {
    aim: Mutex<Option<(&'static str, u64)>>,
    seen: AtomicU64,
}

impl Failing {
    /// Fails call `call` of `method`, counted from 1 and from now on.
    pub fn aim(&self, method: &'static str, call: u64) {
        let mut aim = self.aim.lock().unwrap_or_else(PoisonError::into_inner);
        self.seen.store(0, Ordering::Relaxed);
        *aim = Some((method, call));
    }

    /// Whether the aimed-at call has failed.
    pub fn has_struck(&self) -> bool {
        self.aim
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_none()
    }
}

impl Hook for Failing {
    fn before(&self, method: &'static str) -> Result<()> {
        let mut aim = self.aim.lock().unwrap_or_else(PoisonError::into_inner);
        match *aim {
            Some((target, call))
                if target == method && self.seen.fetch_add(1, Ordering::Relaxed) + 1 == call =>
            {
                *aim = None;
                Err(Error::injected(method, call))
            }
            _ => Ok(()),
        }
    }
}

/// Panics in the call that [`Failing`] fails.
#[cfg(test)]
#[derive(Debug, Default)]
pub(crate) struct Panicking(Failing);

#[cfg(test)]
impl Panicking {
    /// Panics in call `call` of `method`, counted from 1 and from now on.
    pub(crate) fn aim(&self, method: &'static str, call: u64) {
        self.0.aim(method, call);
    }

    pub(crate) fn has_struck(&self) -> bool {
        self.0.has_struck()
    }
}

#[cfg(test)]
impl Hook for Panicking {
    fn before(&self, method: &'static str) -> Result<()> {
        self.0.before(method).unwrap();
        Ok(())
    }
}

/// Blocks the calls of one method, like a driver with a full launch queue.
#[cfg(test)]
#[derive(Debug, Default)]
pub(crate) struct Holding {
    /// The method, and the number of its blocked calls.
    state: Mutex<(Option<&'static str>, usize)>,
    changed: std::sync::Condvar,
}

#[cfg(test)]
impl Holding {
    const LIMIT: Duration = Duration::from_secs(60);

    fn lock(&self) -> std::sync::MutexGuard<'_, (Option<&'static str>, usize)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on, calls of `method` block.
    pub(crate) fn hold(&self, method: &'static str) {
        *self.lock() = (Some(method), 0);
    }

    /// Waits until `calls` calls are blocked.
    pub(crate) fn wait_for(&self, calls: usize) {
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), Holding::LIMIT, |(_, held)| *held < calls);
        assert!(
            waited.unwrap_or_else(PoisonError::into_inner).0.1 >= calls,
            "nothing comes to be held up"
        );
    }

    /// Unblocks all calls, now and later.
    pub(crate) fn unblock(&self) {
        self.lock().0 = None;
        self.changed.notify_all();
    }
}

#[cfg(test)]
impl Hook for Holding {
    fn before(&self, method: &'static str) -> Result<()> {
        let mut state = self.lock();
        if state.0 == Some(method) {
            state.1 += 1;
            self.changed.notify_all();
            let is_held = |(aim, _): &mut (Option<&'static str>, usize)| *aim == Some(method);
            let waited = self
                .changed
                .wait_timeout_while(state, Holding::LIMIT, is_held);
            assert!(
                !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out(),
                "nobody lets {method} go"
            );
        }
        Ok(())
    }
}

/// Delays every signal, so that a reader that does not wait reads too early. With `waits` off it
/// also drops every wait: the negative control of a synchronisation test.
#[derive(Debug)]
pub struct Delaying {
    /// The delay of a signal.
    pub signal_late: Duration,
    /// Whether waits are enqueued at all.
    pub waits: bool,
}

impl Hook for Delaying {
    fn before(&self, _method: &'static str) -> Result<()> {
        Ok(())
    }

    fn batch(
        &self,
        inner: &dyn Backend,
        stream: RawStream,
        ops: &[StreamOp],
    ) -> Result<Vec<StreamOp>> {
        if ops.iter().any(|op| matches!(op, StreamOp::Signal { .. })) && !self.signal_late.is_zero()
        {
            let late = self.signal_late;
            // SAFETY: the caller of `batch` promises that the stream is live.
            unsafe { inner.call(stream, Box::new(move || std::thread::sleep(late)))? };
        }
        let kept = ops
            .iter()
            .filter(|op| self.waits || matches!(op, StreamOp::Signal { .. }));
        Ok(kept.copied().collect())
    }
}

impl<H: Hook> super::sealed::Sealed for Wrapped<H> {}

// SAFETY comments below: each method passes its caller's promise to the same method of the inner
// backend.
impl<H: Hook> Backend for Wrapped<H> {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn runs_beside_other_processes(&self) -> bool {
        self.inner.runs_beside_other_processes()
    }
}

impl<H: Hook> super::Regions for Wrapped<H> {
    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }

    fn allocate(&self, bytes: u64) -> Result<RawRegion> {
        self.hook.before("allocate")?;
        self.inner.allocate(bytes)
    }

    unsafe fn export(&self, region: &RawRegion) -> Result<OwnedFd> {
        self.hook.before("export")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.export(region) }
    }

    unsafe fn release(&self, region: &mut RawRegion) -> Result<()> {
        self.hook.before("release")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.release(region) }
    }

    unsafe fn register(&self, ptr: *mut u8, bytes: usize) -> Result<DevicePtr> {
        self.hook.before("register")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.register(ptr, bytes) }
    }

    fn is_registered(&self, ptr: *mut u8) -> bool {
        self.inner.is_registered(ptr)
    }

    unsafe fn unregister(&self, ptr: *mut u8) -> Result<()> {
        self.hook.before("unregister")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.unregister(ptr) }
    }

    fn bytes_held(&self) -> u64 {
        self.inner.bytes_held()
    }
}

impl<H: Hook> super::Imports for Wrapped<H> {
    fn import(
        &self,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<RawRegion> {
        self.hook.before("import")?;
        self.inner.import(fds, piece, access, owner)
    }

    unsafe fn import_over(
        &self,
        region: &mut RawRegion,
        fds: &[BorrowedFd<'_>],
        piece: u64,
        access: Access,
        owner: DeviceId,
    ) -> Result<()> {
        self.hook.before("import_over")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.import_over(region, fds, piece, access, owner) }
    }

    fn retain_mapped(&self, ptr: DevicePtr) -> Result<Retained> {
        self.hook.before("retain_mapped")?;
        self.inner.retain_mapped(ptr)
    }

    unsafe fn export_retained(&self, retained: &Retained) -> Result<OwnedFd> {
        self.hook.before("export_retained")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.export_retained(retained) }
    }

    unsafe fn release_retained(&self, retained: &Retained) -> Result<()> {
        self.hook.before("release_retained")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.release_retained(retained) }
    }
}

impl<H: Hook> super::Streams for Wrapped<H> {
    fn create_stream(&self) -> Result<RawStream> {
        self.hook.before("create_stream")?;
        self.inner.create_stream()
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        self.hook.before("destroy_stream")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.destroy_stream(stream) }
    }

    unsafe fn batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        self.hook.before("batch")?;
        let ops = self.hook.batch(&*self.inner, stream, ops)?;
        // SAFETY: the caller's promise, passed on; the hook adds no word of its own.
        unsafe { self.inner.batch(stream, &ops) }
    }

    unsafe fn batch_at_once(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        self.hook.before("batch")?;
        let ops = self.hook.batch(&*self.inner, stream, ops)?;
        // SAFETY: the caller's promise, passed on; the hook adds no word of its own.
        unsafe { self.inner.batch_at_once(stream, &ops) }
    }

    unsafe fn call(&self, stream: RawStream, function: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.hook.before("call")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.call(stream, function) }
    }

    unsafe fn is_capturing(&self, stream: RawStream) -> Result<bool> {
        self.hook.before("is_capturing")?;
        // SAFETY: the caller's promise, passed on.
        Ok(self.hook.is_capturing(stream) || unsafe { self.inner.is_capturing(stream) }?)
    }

    unsafe fn query(&self, stream: RawStream) -> Result<bool> {
        self.hook.before("query")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.query(stream) }
    }

    fn create_event(&self) -> Result<RawEvent> {
        self.hook.before("create_event")?;
        self.inner.create_event()
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.hook.before("destroy_event")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.destroy_event(event) }
    }

    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.hook.before("record_event")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.record_event(event, stream) }
    }

    unsafe fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.hook.before("wait_event")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.wait_event(stream, event) }
    }

    unsafe fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.hook.before("query_event")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.query_event(event) }
    }
}

impl<H: Hook> super::Copies for Wrapped<H> {
    unsafe fn copy_rows(&self, stream: RawStream, rows: &Rows) -> Result<()> {
        self.hook.before("copy_rows")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.copy_rows(stream, rows) }
    }

    unsafe fn zero(&self, stream: RawStream, dst: DevicePtr, bytes: u64) -> Result<()> {
        self.hook.before("zero")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.zero(stream, dst, bytes) }
    }

    unsafe fn upload_pieces(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        pieces: &[&[u8]],
    ) -> Result<()> {
        self.hook.before("upload")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.upload_pieces(stream, dst, pieces) }
    }

    unsafe fn download(&self, stream: RawStream, dst: &mut [u8], src: DevicePtr) -> Result<()> {
        self.hook.before("download")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.download(stream, dst, src) }
    }
}

impl<H: Hook> super::Kernels for Wrapped<H> {
    unsafe fn launch(
        &self,
        stream: RawStream,
        kernel: &Kernel,
        grid: u32,
        block: u32,
        args: &[u64],
    ) -> Result<()> {
        self.hook.before("launch")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.launch(stream, kernel, grid, block, args) }
    }

    fn preload(&self, kernel: &Kernel) -> Result<()> {
        self.hook.before("preload")?;
        self.inner.preload(kernel)
    }
}

impl<H: Hook> super::Ipc for Wrapped<H> {
    fn create_ipc_event(&self) -> Result<RawEvent> {
        self.hook.before("create_ipc_event")?;
        self.inner.create_ipc_event()
    }

    unsafe fn export_event(&self, event: RawEvent) -> Result<IpcBytes> {
        self.hook.before("export_event")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.export_event(event) }
    }

    fn open_event(&self, handle: &IpcBytes) -> Result<RawEvent> {
        self.hook.before("open_event")?;
        self.inner.open_event(handle)
    }

    fn allocate_plain(&self, bytes: u64) -> Result<DevicePtr> {
        self.hook.before("allocate_plain")?;
        self.inner.allocate_plain(bytes)
    }

    unsafe fn free_plain(&self, ptr: DevicePtr) -> Result<()> {
        self.hook.before("free_plain")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.free_plain(ptr) }
    }

    fn locate(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        self.hook.before("locate")?;
        self.inner.locate(ptr)
    }

    unsafe fn export_legacy(&self, base: DevicePtr) -> Result<IpcBytes> {
        self.hook.before("export_legacy")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.export_legacy(base) }
    }

    fn open_legacy(&self, handle: &IpcBytes, bytes: u64, owner: DeviceId) -> Result<DevicePtr> {
        self.hook.before("open_legacy")?;
        self.inner.open_legacy(handle, bytes, owner)
    }

    unsafe fn close_legacy(&self, base: DevicePtr) -> Result<()> {
        self.hook.before("close_legacy")?;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.close_legacy(base) }
    }
}
