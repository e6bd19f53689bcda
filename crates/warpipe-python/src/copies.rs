//! Copies of foreign tensors into slots. Each tensor is kept alive until its copy is done.
//! **This module is marked for unsafe**: it enqueues copies from addresses that other frameworks
//! state.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, TryLockError};
use std::time::Duration;

use pyo3::ffi;
use pyo3::prelude::*;
use warpipe::backend::room_for;
use warpipe_dlpack::Elements;

use crate::detached::OwnStream;
use crate::device::is_cuda;
use crate::errors::Outcome;
use crate::exclusive::locked;
use crate::interpreter_exit;
use crate::source::{Source, SourceOwner, Wanted};
use crate::stream::Consumer;
use crate::wait::{awaited, until};

/// The most foreign tensors under copy at once; a further send waits.
const COPIES_MAX: usize = 256;

/// What an endpoint copies tensors with.
#[derive(Debug, Clone)]
pub struct CopyContext {
    pub device: warpipe::Device,
    /// The stream for tensors without a stream of their own.
    pub stream: OwnStream,
    /// The number of copies that streams may not have finished.
    pub open: Arc<AtomicUsize>,
    /// The limit of a wait for room, for memory, or for an answer.
    pub patience: Option<Duration>,
}

impl CopyContext {
    /// Without copies yet.
    pub fn new(
        device: warpipe::Device,
        stream: OwnStream,
        patience: Option<Duration>,
    ) -> CopyContext {
        CopyContext {
            device,
            stream,
            open: Arc::default(),
            patience,
        }
    }

    /// A search for a tensor, to be read on `stream` if there is one.
    pub fn wanted<'a>(&'a self, stream: Option<&'a Consumer>) -> Wanted<'a> {
        Wanted {
            stream,
            ..Wanted::on(&self.device, &self.stream)
        }
    }

    /// For memory that no endpoint has: its copies count together.
    pub fn of_memory(device: &warpipe::Device, stream: &warpipe::Stream) -> CopyContext {
        static OPEN: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);
        let stream = OwnStream::of(stream.clone());
        CopyContext {
            open: OPEN.clone(),
            ..CopyContext::new(device.clone(), stream, None)
        }
    }
}

/// The target of a copy: memory of this package that nothing else writes meanwhile, and that stays
/// until the copy is done.
pub trait Target: Send {
    /// The address of the first byte.
    fn lowest(&self) -> u64;
    /// The length in bytes.
    fn bytes(&self) -> u64;
    /// Whether the target is reachable at these addresses only. Then a source elsewhere cannot
    /// overlap it.
    fn is_private(&self) -> bool;
    /// Enqueues a copy of `bytes` host bytes.
    fn write(&mut self, stream: &warpipe::Stream, bytes: &[u8]) -> Outcome<()>;
    /// Told before a copy is enqueued on the stream: a target that goes back goes behind it, also
    /// if a call after the copy fails.
    fn stay_behind(&mut self, stream: &warpipe::Stream);
}

/// A foreign tensor that a stream still copies.
#[derive(Debug)]
struct Copying {
    /// `None` only while dropping.
    keep: Option<SourceOwner>,
    open: Arc<AtomicUsize>,
}

impl Copying {
    fn of(keep: SourceOwner, open: &Arc<AtomicUsize>) -> Copying {
        open.fetch_add(1, Ordering::Relaxed);
        Copying {
            keep: Some(keep),
            open: open.clone(),
        }
    }

    /// The copy is done. Runs in the stream's order, where neither the interpreter nor the driver
    /// may be called. Dropping a tensor may need both, so the interpreter's main thread or the next
    /// send drops it.
    fn done(mut self) {
        let keep = self.keep.take();
        locked(&DONE).extend(keep);
        if !interpreter_exit::has_begun() {
            // SAFETY: may be called without the interpreter, while there is one; `sweep_later`
            // takes any argument. If too many calls are pending, one of those sweeps, or the next
            // copy does.
            unsafe { ffi::Py_AddPendingCall(Some(sweep_later), std::ptr::null_mut()) };
        }
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        // A stream that never reported its end may read the tensor for ever.
        std::mem::forget(self.keep.take());
        self.open.fetch_sub(1, Ordering::Release);
    }
}

/// Tensors that have been copied and wait to be dropped.
static DONE: Mutex<Vec<SourceOwner>> = Mutex::new(Vec::new());

/// Drops copied tensors. Their destructors may be foreign code, so they run without the lock.
fn sweep(_: Python<'_>) {
    let done = match DONE.try_lock() {
        Ok(mut done) => std::mem::take(&mut *done),
        Err(TryLockError::Poisoned(done)) => std::mem::take(&mut *done.into_inner()),
        // Another thread holds the lock to add a tensor and sweeps again; or this is a forked child
        // and its parent held it.
        Err(TryLockError::WouldBlock) => return,
    };
    drop(done);
}

/// Called by the interpreter on its main thread.
extern "C" fn sweep_later(_: *mut c_void) -> c_int {
    // A panic must not unwind into the interpreter.
    let _ = std::panic::catch_unwind(|| Python::attach(sweep));
    0
}

impl CopyContext {
    /// Enqueues the copy of `source` into `into`, which has the same length; on its own stream if
    /// the source is on the host. Returns the stream of the copy. Waits, within its limit, only if
    /// too many copies are pending.
    ///
    /// If the source overlaps the target, it is read before the target is written, through other
    /// memory.
    pub fn fill(
        &self,
        py: Python<'_>,
        into: &mut impl Target,
        mut source: Source,
    ) -> PyResult<warpipe::Stream> {
        let own: &warpipe::Stream = &self.stream;
        let (to, bytes) = (into.lowest(), into.bytes());
        let meets = source.meets(to, bytes);
        let Some(reader) = source.reader.take() else {
            let (rows, bytes) = (source.rows.as_deref(), source.host_bytes());
            py.detach(|| match rows {
                Some(rows) => gather(rows, into, own, meets),
                None if meets => into.write(own, &copied(bytes)?),
                None => into.write(own, bytes),
            })?;
            return Ok(own.clone());
        };
        let from = match source.rows.take() {
            Some(rows) => CopySource::Rows(rows),
            None => CopySource::Whole(source.lowest),
        };
        let target = reader.follow(py)?.clone();
        if bytes > 0 {
            // Before the copy: an interrupted wait leaves nothing behind that writes the target.
            self.wait_for_room(py, &target)?;
            // Dropped with the interpreter, in every case.
            let mut keep = Some(source.owner);
            py.detach(|| {
                refuse_capture(&target)?;
                into.stay_behind(&target);
                copy(&target, to, bytes, &from, meets)?;
                self.keep(&target, &mut keep)
            })?;
        }
        // The tensor's owner may write it again after this on its own stream.
        reader.lead(py)?;
        Ok(target)
    }

    /// Keeps a foreign tensor, if it needs that, until `stream` has copied it.
    fn keep(&self, stream: &warpipe::Stream, keep: &mut Option<SourceOwner>) -> Outcome<()> {
        let Some(keep) = keep.take_if(|keep| !matches!(keep, SourceOwner::Nothing)) else {
            return Ok(());
        };
        let copying = Copying::of(keep, &self.open);
        Ok(stream.call(move || copying.done())?)
    }

    /// Waits, within its limit, if too many copies are pending.
    fn wait_for_room(&self, py: Python<'_>, stream: &warpipe::Stream) -> PyResult<()> {
        sweep(py);
        if self.open.load(Ordering::Acquire) >= COPIES_MAX {
            awaited(py, self.patience, |wait| stream.synchronize(wait))?;
        }
        Ok(())
    }

    /// Waits, within its limit, until all copies are done. A tensor with a copy that is not
    /// done by then is kept until it is: its owner must not reuse the memory while a stream reads
    /// it.
    pub fn settle(&self, py: Python<'_>) -> PyResult<()> {
        let waited = until(py, self.patience, || {
            Ok(self.open.load(Ordering::Acquire) == 0)
        });
        sweep(py);
        waited
    }
}

/// Refuses a stream that is being captured: its graph would copy again, whenever it is launched, to
/// memory that is another's by then.
pub fn refuse_capture(stream: &warpipe::Stream) -> Outcome<()> {
    // SAFETY: the stream is live as long as its handle.
    if unsafe { stream.device().backend().is_capturing(stream.raw()) }? {
        let what = format!("stream {:#x}", stream.raw().0.addr());
        return Err(warpipe::Error::State(warpipe::StateFault::Capturing(what)).into());
    }
    Ok(())
}

/// Where a GPU's tensor lies.
enum CopySource {
    /// As it is sent, from this address on.
    Whole(u64),
    Rows(Box<Elements>),
}

/// Copies host rows into a whole target: directly if the target is host memory without pending
/// work, else through a buffer.
fn gather(
    rows: &Elements,
    into: &mut impl Target,
    own: &warpipe::Stream,
    meets: bool,
) -> Outcome<()> {
    if into.is_private() && !meets && !is_cuda(own.device()) && own.is_idle()? {
        // SAFETY: the source's extent was checked and its owner keeps it for this call; the target
        // is this caller's alone, as long (callers compare the layouts), and on the host, where
        // `own`, behind all that may write it, is done.
        return Ok(unsafe { rows.copy_to(into.lowest()) }?);
    }
    // SAFETY: as above.
    into.write(own, &unsafe { rows.bytes() }?)
}

/// Enqueues the copy of a whole target. If the source overlaps the target, the copy goes through
/// memory of its own.
fn copy(
    stream: &warpipe::Stream,
    to: u64,
    bytes: u64,
    from: &CopySource,
    meets: bool,
) -> Outcome<()> {
    if !meets {
        return enqueue(stream, to, bytes, from);
    }
    if matches!(*from, CopySource::Whole(lowest) if lowest == to) {
        // Source and target are the same bytes.
        return Ok(());
    }
    let between = warpipe::Memory::allocate(stream.device(), bytes)?;
    // The memory is not unmapped before the stream is past both copies.
    between.used_on(stream);
    enqueue(stream, between.ptr(), bytes, from)?;
    enqueue(stream, to, bytes, &CopySource::Whole(between.ptr()))
}

fn enqueue(stream: &warpipe::Stream, to: u64, bytes: u64, from: &CopySource) -> Outcome<()> {
    // SAFETY: the target is this caller's alone; the source names as many bytes (callers compare
    // the layouts), is apart from it, and is kept until the stream has done the copy (`keep`), or
    // its owner orders its reuse behind this stream.
    unsafe {
        match from {
            CopySource::Whole(lowest) => Ok(stream.copy(to, *lowest, bytes)?),
            CopySource::Rows(rows) => Ok(rows.copy_on(stream, to)?),
        }
    }
}

fn copied(bytes: &[u8]) -> Outcome<Vec<u8>> {
    let mut copy = room_for(bytes.len() as u64)?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}
