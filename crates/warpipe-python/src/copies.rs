//! Copies of foreign tensors into slots, and what keeps those tensors until they are done.
//! **This module is marked for unsafe**: it enqueues copies from addresses that others name.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Duration;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::device::is_cuda;
use crate::ending;
use crate::errors::{Fault, Outcome};
use crate::rows::Rows;
use crate::slot::Slot;
use crate::source::{Keep, Place, Source};
use crate::wait::{in_slices, late, none_if_late};

/// Foreign tensors whose copies may be on their way at once; who sends more waits.
const COPIES_MAX: usize = 256;

/// A publisher's copies that streams may still be doing.
#[derive(Debug, Default)]
pub struct Copies {
    open: Arc<AtomicUsize>,
}

/// What is filled: memory of ours that nobody else writes meanwhile, and that stays until the copy is done.
pub trait Target: Send {
    /// Its first byte's address.
    fn lowest(&self) -> u64;
    /// Its length.
    fn bytes(&self) -> u64;
    /// Whether it can be reached at these addresses alone: then what does not lie there is not it.
    fn is_private(&self) -> bool;
    /// Enqueues a copy of bytes of the host, as many as it is long.
    fn write(&mut self, stream: &warpipe::Stream, bytes: &[u8]) -> Outcome<()>;
}

impl Target for Slot {
    fn lowest(&self) -> u64 {
        self.slot_ptr()
    }

    fn bytes(&self) -> u64 {
        self.layout().bytes()
    }

    fn is_private(&self) -> bool {
        true
    }

    fn write(&mut self, stream: &warpipe::Stream, bytes: &[u8]) -> Outcome<()> {
        Slot::write(self, stream, bytes)
    }
}

/// A foreign tensor that a stream still copies.
#[derive(Debug)]
struct Copying {
    /// `None` only while dropping.
    keep: Option<Keep>,
    open: Arc<AtomicUsize>,
}

impl Copying {
    fn of(keep: Keep, open: &Arc<AtomicUsize>) -> Copying {
        open.fetch_add(1, Ordering::Relaxed);
        Copying { keep: Some(keep), open: open.clone() }
    }

    /// The copy is done. Called in the stream's order, where neither the interpreter nor the driver may be asked, and to
    /// let go of a tensor may need both: that is left to the interpreter's main thread, or to whoever sends next.
    fn done(mut self) {
        let keep = self.keep.take();
        DONE.lock().unwrap_or_else(PoisonError::into_inner).extend(keep);
        if !ending::has_begun() {
            // SAFETY: may be called without the interpreter, while there is one; `sweep_later` takes any argument. If too
            // much is pending, that will sweep, or the next copy.
            unsafe { ffi::Py_AddPendingCall(Some(sweep_later), std::ptr::null_mut()) };
        }
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        // A stream that never told of its end may read it for ever.
        std::mem::forget(self.keep.take());
        self.open.fetch_sub(1, Ordering::Release);
    }
}

/// What has been copied and waits to be let go.
static DONE: Mutex<Vec<Keep>> = Mutex::new(Vec::new());

/// Lets go of what has been copied. What is dropped may be anybody's, and runs without the lock.
fn sweep(_: Python<'_>) {
    let done = match DONE.try_lock() {
        Ok(mut done) => std::mem::take(&mut *done),
        Err(TryLockError::Poisoned(done)) => std::mem::take(&mut *done.into_inner()),
        // Somebody adds to it, and asks again; or this is a forked child, whose parent did.
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

impl Copies {
    /// Enqueues the copy of `source`, which is as long, into `into`, on `own` if it comes from the host. Returns the
    /// stream that does it. Waits, at most `patience`, only if too many are on their way.
    pub fn fill(
        &self,
        py: Python<'_>,
        into: &mut impl Target,
        source: Source,
        own: &warpipe::Stream,
        patience: Option<Duration>,
    ) -> PyResult<warpipe::Stream> {
        if let Some(bytes) = source.host_bytes() {
            py.detach(|| into.write(own, bytes))?;
            return Ok(own.clone());
        }
        let (address, reader, keep) = match source.place {
            Place::Rows(rows, keep) => {
                py.detach(|| gather(&rows, into, own))?;
                drop(keep);
                return Ok(own.clone());
            }
            Place::Device(address, reader, keep) => (address, reader, keep),
            Place::Bytes(_) | Place::Host(..) => unreachable!("bytes of the host were written above"),
        };
        let target = reader.follow(py)?.clone();
        if source.layout.bytes() > 0 {
            py.detach(|| copy(&target, into, address))?;
            self.keep(py, &target, keep, patience)?;
        }
        // The tensor's owner may write it again behind its own stream.
        reader.lead(py)?;
        Ok(target)
    }

    /// Keeps a foreign tensor until `stream` has copied it.
    fn keep(&self, py: Python<'_>, stream: &warpipe::Stream, keep: Keep, patience: Option<Duration>) -> PyResult<()> {
        sweep(py);
        if matches!(keep, Keep::Nothing) {
            return Ok(());
        }
        let copying = Copying::of(keep, &self.open);
        py.detach(|| stream.call(move || copying.done())).map_err(Fault::from)?;
        if self.open.load(Ordering::Acquire) > COPIES_MAX {
            let done = in_slices(py, patience, |slice| none_if_late(stream.synchronize(slice)))?;
            done.ok_or_else(|| late("the end of a copy".into(), patience))?;
        }
        Ok(())
    }

    /// Waits, at most `patience`, until all are done. What is not done by then is kept until it is: its owner must not use
    /// the memory again while a stream reads it.
    pub fn settle(&self, py: Python<'_>, patience: Option<Duration>) -> PyResult<()> {
        let waited = in_slices(py, patience, |slice| {
            let is_done = self.open.load(Ordering::Acquire) == 0;
            if !is_done {
                std::thread::park_timeout(slice.min(Duration::from_millis(1)));
            }
            Ok(is_done.then_some(()))
        });
        sweep(py);
        waited.map(drop)
    }
}

/// Copies rows of the host into a whole target: in place where that is memory of the host that no work is due on, else by
/// way of a buffer.
fn gather(rows: &Rows, into: &mut impl Target, own: &warpipe::Stream) -> Outcome<()> {
    let is_apart = into.is_private() && !rows.meet(into.lowest(), into.bytes());
    if is_apart && !is_cuda(own.device()) && own.is_idle()? {
        // SAFETY: the source's extent was checked and its owner keeps it for this call; the target is this caller's alone,
        // as long (callers compare the layouts), and on the host, where `own`, behind all that may write it, is done.
        unsafe { rows.copy_to(into.lowest() as *mut u8) };
        return Ok(());
    }
    // SAFETY: as above.
    into.write(own, &unsafe { rows.to_vec() }?)
}

/// Enqueues the copy of a whole target.
fn copy(stream: &warpipe::Stream, into: &mut impl Target, from: u64) -> Outcome<()> {
    // SAFETY: the target is this caller's alone; the source names as many bytes (callers compare the layouts), and is kept
    // until the stream has done the copy (`keep`), or its owner orders its reuse behind this stream.
    Ok(unsafe { stream.copy(into.lowest(), from, into.bytes()) }?)
}
