//! Streams: the order of a device's work.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use crate::backend::{Backend, DevicePtr, RawStream, Rows, StreamOp};
use crate::device::Device;
use crate::error::{Error, Result, StateFault};
use crate::fork::OwnerProcess;
use crate::kernel::Kernel;
use crate::tensor::Layout;
use crate::wait::Wait;

/// A stream of one device, made by this library or borrowed. Cheap to clone; an owned stream is
/// destroyed with its last clone (work already enqueued still runs).
#[derive(Debug, Clone)]
pub struct Stream {
    inner: Arc<StreamInner>,
}

#[derive(Debug)]
struct StreamInner {
    device: Device,
    raw: RawStream,
    owned: bool,
    owner_process: OwnerProcess,
    /// Keeps a borrowed stream alive as long as this refers to it.
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl Stream {
    pub(crate) fn new(device: &Device) -> Result<Stream> {
        let raw = device.backend().create_stream()?;
        Ok(Stream {
            inner: Arc::new(StreamInner {
                device: device.clone(),
                raw,
                owned: true,
                owner_process: OwnerProcess::current(),
                _keep: None,
            }),
        })
    }

    /// A borrowed stream: a `CUstream` of the device's primary context (null is the legacy default
    /// stream), for example PyTorch's `torch.cuda.current_stream().cuda_stream`.
    ///
    /// # Safety
    /// The stream outlives every clone of the result, and everything sent or received with it.
    pub unsafe fn borrow_raw(device: &Device, stream: *mut c_void) -> Stream {
        let raw = RawStream(stream);
        Stream {
            inner: Arc::new(StreamInner {
                device: device.clone(),
                raw,
                owned: false,
                owner_process: OwnerProcess::current(),
                _keep: None,
            }),
        }
    }

    /// A stream that lives as long as `keep` does.
    #[cfg(feature = "cudarc")]
    pub(crate) fn borrow_kept(
        device: &Device,
        raw: RawStream,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Stream {
        Stream {
            inner: Arc::new(StreamInner {
                device: device.clone(),
                raw,
                owned: false,
                owner_process: OwnerProcess::current(),
                _keep: Some(keep),
            }),
        }
    }

    /// The device of this stream.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The handle, a `CUstream` on CUDA.
    pub fn raw(&self) -> RawStream {
        self.inner.raw
    }

    /// Whether both are clones of one stream.
    pub(crate) fn is_same(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// An identity that all clones of one stream share. It is unique among the streams that live at
    /// the same time.
    pub(crate) fn identity(&self) -> *const () {
        Arc::as_ptr(&self.inner).cast()
    }

    /// The number of clones of this stream.
    pub(crate) fn clones(&self) -> usize {
        Arc::strong_count(&self.inner)
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        self.inner.device.backend()
    }

    /// Refuses a stream of another device than `device`: it cannot use the addresses of `device`.
    /// Checked for every stream that a user passes, usually by one comparison of pointers.
    #[inline]
    pub(crate) fn check_of(&self, device: &Device) -> Result<()> {
        if Arc::ptr_eq(self.backend(), device.backend()) {
            Ok(())
        } else {
            self.compare(device)
        }
    }

    /// One device may be opened through several backends (wrapped, in tests).
    #[cold]
    fn compare(&self, device: &Device) -> Result<()> {
        let (found, wanted) = (self.device().info(), device.info());
        if found.id == wanted.id {
            return Ok(());
        }
        let tell = |device: &Device| format!("one of {device} ({})", device.info().id);
        let allowed = format!("{}, where this memory lies", tell(device));
        Err(Error::argument("stream", tell(self.device()), allowed))
    }

    /// Enqueues a kernel, on the host backend its CPU version (`cuLaunchKernel`).
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// `args` match the kernel's parameters, and the memory they name stays valid until the kernel
    /// is done.
    pub unsafe fn launch(
        &self,
        kernel: &Kernel,
        grid: u32,
        block: u32,
        args: &[u64],
    ) -> Result<()> {
        // SAFETY: the stream is live as long as self; the caller promises the rest.
        unsafe { self.backend().launch(self.raw(), kernel, grid, block, args) }
    }

    /// Enqueues a function on the CPU behind the stream's work (`cuLaunchHostFunc`). It must not
    /// call the device.
    ///
    /// # Errors
    /// [`Error::State`], also for a stream that is being captured: each launch of the graph would
    /// call the function again; [`Error::Driver`].
    pub fn call(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        self.check_not_capturing()?;
        // SAFETY: the stream is live as long as self, and is not captured.
        unsafe { self.backend().call(self.raw(), Box::new(function)) }
    }

    /// Enqueues a copy between device addresses (`cuMemcpyAsync`).
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// Both ranges stay mapped until the copy is done, and do not overlap.
    pub unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        let row = Rows::one(dst, src, bytes);
        // SAFETY: the stream is live as long as self; the caller promises the ranges.
        unsafe { self.backend().copy_rows(self.raw(), &row) }
    }

    /// Enqueues a copy between tensors of different layouts: a gather of a crop or a transposed
    /// view into row-major order, a scatter, or both (`cuMemcpyAsync`, `cuMemcpy3DAsync`, or a
    /// kernel). It is one operation for any layouts.
    ///
    /// `into` is the layout of the slot at `to`, `source` that of the slot at `from`; a layout's
    /// offset counts from there. Both tensors lie where this stream's device reaches them: its own
    /// memory, memory that it has mapped, registered memory of the host.
    ///
    /// ```
    /// use std::time::Duration;
    /// use warpipe::{DType, Device, Layout, Memory};
    /// let device = Device::host();
    /// let (frame, crop) = (Memory::allocate(&device, 24)?, Memory::allocate(&device, 4)?);
    /// let stream = device.stream()?;
    /// frame.write(&stream, 0, &(0..24).collect::<Vec<u8>>())?;
    /// // Rows 1 and 2, columns 3 and 4 of 4 x 6 pixels.
    /// let from = Layout::strided(DType::U8, &[2, 2], &[6, 1], 9)?;
    /// let into = Layout::contiguous(DType::U8, &[2, 2])?;
    /// // SAFETY: both live until the stream is done, and are apart.
    /// unsafe { stream.copy_elements(crop.ptr(), &into, frame.ptr(), &from)? };
    /// stream.synchronize(Duration::from_secs(10))?;
    /// assert_eq!(crop.to_vec(Duration::from_secs(10))?, [9, 10, 15, 16]);
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`]: another shape or element type, elements of `into` that lie on each
    /// other or between each other, or a tensor that reaches further than an address can.
    /// [`Error::Argument`] for tensors of which one lies in or between the other's elements: copy
    /// by way of other memory. [`Error::Driver`].
    ///
    /// # Safety
    /// Both slots are as long as their layouts say, stay mapped until the copy is done, and nothing
    /// else writes `to` meanwhile.
    pub unsafe fn copy_elements(
        &self,
        to: DevicePtr,
        into: &Layout,
        from: DevicePtr,
        source: &Layout,
    ) -> Result<()> {
        let rows = Rows::between(to, into, from, source)?;
        if rows.bytes() == 0 {
            return Ok(());
        }
        if rows.meet() {
            let found = format!("{source:?} at {from:#x}");
            let allowed = format!("memory apart from that of {into:?} at {to:#x}");
            return Err(Error::argument("from", found, allowed));
        }
        // SAFETY: the stream is live as long as self; every row lies in its slot, as layouts were
        // checked to, and the two sides are apart; the caller promises the rest.
        unsafe { self.backend().copy_rows(self.raw(), &rows) }
    }

    /// Refuses a stream that cannot take this library's work on memory of `device`: a stream of
    /// another device, and a stream that is being captured. Must be called before anything becomes
    /// visible to others.
    #[inline]
    pub(crate) fn check_usable(&self, device: &Device) -> Result<()> {
        self.check_of(device)?;
        self.check_not_capturing()
    }

    /// Refuses a stream that is being captured (`cuStreamIsCapturing`): the graph would record its
    /// work, and repeat that work at every launch.
    #[inline]
    pub(crate) fn check_not_capturing(&self) -> Result<()> {
        // A forked child must not call the driver.
        self.inner.owner_process.check()?;
        // SAFETY: the stream is live as long as self.
        if unsafe { self.backend().is_capturing(self.raw()) }? {
            Err(self.capturing())
        } else {
            Ok(())
        }
    }

    #[cold]
    fn capturing(&self) -> Error {
        Error::State(StateFault::Capturing(format!(
            "stream {:#x}",
            self.raw().0.addr()
        )))
    }

    /// Whether all work enqueued so far is done (`cuStreamQuery`).
    ///
    /// # Errors
    /// [`Error::State`] for a stream that is being captured: it has no such state, and the
    /// query would invalidate the capture; [`Error::Driver`], also for a fault of earlier work.
    pub fn is_idle(&self) -> Result<bool> {
        self.check_not_capturing()?;
        // SAFETY: the stream is live as long as self.
        unsafe { self.backend().query(self.raw()) }
    }

    /// Waits on the CPU until all work enqueued so far is done.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Driver`].
    pub fn synchronize<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        let wait = wait.into();
        wait.poll(|| "the end of the stream's work".into(), || self.is_idle())
    }

    /// Makes this stream wait until the work enqueued on `other` so far is done (`cuEventRecord`
    /// there, `cuStreamWaitEvent` here). No CPU waits.
    ///
    /// # Errors
    /// [`Error::Argument`] for a stream of another device; [`Error::State`] for one that is
    /// being captured; [`Error::Driver`].
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        if self.device().info().id != other.device().info().id {
            let allowed = format!("a stream of {}", self.device());
            return Err(Error::argument("other", other.device(), allowed));
        }
        if self.raw() == other.raw() {
            return Ok(());
        }
        // A capturing stream would draw the other into its capture, or invalidate the capture.
        self.check_not_capturing()?;
        other.check_not_capturing()?;
        let backend = self.backend();
        let event = backend.create_event()?;
        // SAFETY: both streams are live as long as their handles here, the event until it is
        // destroyed below.
        let ordered = unsafe {
            backend
                .record_event(event, other.raw())
                .and_then(|()| backend.wait_event(self.raw(), event))
        };
        // SAFETY: made above, destroyed once; an enqueued wait keeps what it needs of the event.
        let destroyed = unsafe { backend.destroy_event(event) };
        ordered.and(destroyed)
    }

    /// Enqueues memory operations on words in registered memory, or does nothing and returns
    /// [`Error::State`] for a stream that is being captured.
    ///
    /// # Safety
    /// Every word lies in registered memory that outlives the operation.
    #[inline]
    pub(crate) unsafe fn batch(&self, ops: &[StreamOp]) -> Result<()> {
        self.check_not_capturing()?;
        // SAFETY: the caller promises it.
        unsafe { self.batch_at_once(ops) }
    }

    /// [`batch`](Self::batch) for a stream that [`check_usable`](Self::check_usable) accepted in the
    /// same call of the user's, where this thread has run only this library's code since: repeating
    /// the check would cost a tenth of a send, and the context found current then still is.
    ///
    /// # Safety
    /// As for [`batch`](Self::batch).
    #[inline]
    pub(crate) unsafe fn batch_at_once(&self, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: the stream is live as long as self; the caller promises the words.
        unsafe { self.backend().batch_at_once(self.raw(), ops) }
    }

    /// Whether all its work is done, on a backend where the CPU may then store signals itself.
    #[inline]
    pub(crate) fn may_signal_from_cpu(&self) -> bool {
        // SAFETY: the stream is live as long as self.
        unsafe { self.backend().may_signal_from_cpu(self.raw()) }
    }

    /// Enqueues a copy from host memory, which may be reused at once
    /// ([`Copies::upload`](crate::backend::Copies::upload)), or does nothing and returns
    /// [`Error::State`] for a stream that is being captured.
    ///
    /// # Safety
    /// As for [`Copies::upload`](crate::backend::Copies::upload).
    #[inline]
    pub(crate) unsafe fn upload(&self, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.check_not_capturing()?;
        // SAFETY: the stream is live as long as self; the caller promises the range.
        unsafe { self.backend().upload(self.raw(), dst, bytes) }
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        // In a forked child the stream's thread, or its context, does not exist; its lock may be
        // held for ever.
        if self.owned && self.owner_process.is_current() {
            // SAFETY: created in `new`, destroyed here only; no clone is left.
            let _ = unsafe { self.device.backend().destroy_stream(self.raw) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_stream_that_waits_for_another_runs_behind_its_work() {
        let device = Device::host();
        let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
        let (go, wait) = mpsc::channel::<()>();
        let (done, order) = mpsc::channel();
        let also = done.clone();
        first
            .call(move || {
                let _ = wait.recv();
                let _ = done.send(1);
            })
            .unwrap();
        second.wait_for(&first).unwrap();
        second
            .call(move || {
                let _ = also.send(2);
            })
            .unwrap();
        assert!(
            order.try_recv().is_err(),
            "the second stream ran before the first was done"
        );
        drop(go);
        let limit = Duration::from_secs(10);
        assert_eq!(
            [
                order.recv_timeout(limit).unwrap(),
                order.recv_timeout(limit).unwrap()
            ],
            [1, 2]
        );
    }
}
