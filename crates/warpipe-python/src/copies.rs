//! Copies of foreign tensors into slots, and what keeps those tensors until they are done.
//! **This module is marked for unsafe**: it enqueues copies from addresses that others name.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use crate::errors::{Fault, Outcome};
use crate::slot::Slot;
use crate::source::{Keep, Place, Source};
use crate::wait::{in_slices, late, none_if_late};

/// Foreign tensors whose copies may be on their way at once; who sends more waits.
const COPIES_MAX: usize = 256;

/// A publisher's copies that streams may still be doing.
#[derive(Debug, Default)]
pub struct Copies {
    list: Mutex<VecDeque<Copying>>,
}

/// What is filled: memory of ours that nobody else writes meanwhile, and that stays until the copy is done.
pub trait Target: Send {
    /// Its first byte's address.
    fn lowest(&self) -> u64;
    /// Its length.
    fn bytes(&self) -> u64;
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

    fn write(&mut self, stream: &warpipe::Stream, bytes: &[u8]) -> Outcome<()> {
        Slot::write(self, stream, bytes)
    }
}

/// A foreign tensor that a stream still copies.
#[derive(Debug)]
struct Copying {
    is_done: Arc<AtomicBool>,
    _keep: Keep,
}

impl Copying {
    fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }
}

impl Copies {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Copying>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

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
        let Place::Device(address, reader, keep) = source.place else { unreachable!("what is not here is there") };
        let target = reader.follow()?.clone();
        if source.layout.bytes() > 0 {
            copy(&target, into, address)?;
            self.keep(py, &target, keep, patience)?;
        }
        // The tensor's owner may write it again behind its own stream.
        reader.lead()?;
        Ok(target)
    }

    /// Keeps a foreign tensor until `stream` has copied it, and lets go of those that are done.
    fn keep(&self, py: Python<'_>, stream: &warpipe::Stream, keep: Keep, patience: Option<Duration>) -> PyResult<()> {
        let mut copies = self.lock();
        let (done, open): (Vec<_>, _) = copies.drain(..).partition(Copying::is_done);
        *copies = open.into();
        drop(copies);
        // Without the lock: what is dropped here may be anybody's.
        drop(done);
        if matches!(keep, Keep::Nothing) {
            return Ok(());
        }
        let is_done = Arc::new(AtomicBool::new(false));
        let flag = is_done.clone();
        let told = stream.call(move || flag.store(true, Ordering::Release));
        let mut copies = self.lock();
        // Also if the stream could not be told: kept for ever is better than let go under a copy.
        copies.push_back(Copying { is_done, _keep: keep });
        let crowded = copies.len() > COPIES_MAX;
        drop(copies);
        told.map_err(Fault::from)?;
        if crowded {
            let done = in_slices(py, patience, |slice| none_if_late(stream.synchronize(slice)))?;
            done.ok_or_else(|| late("the end of a copy".into(), patience))?;
        }
        Ok(())
    }

    /// Waits, at most `patience`, until all are done. What is not done by then is kept until the process ends: its owner
    /// must not use the memory again while a stream reads it.
    pub fn settle(&self, py: Python<'_>, patience: Option<Duration>) -> PyResult<()> {
        let copies = std::mem::take(&mut *self.lock());
        let waited = in_slices(py, patience, |slice| {
            let is_done = copies.iter().all(Copying::is_done);
            if !is_done {
                std::thread::park_timeout(slice.min(Duration::from_millis(1)));
            }
            Ok(is_done.then_some(()))
        });
        if !matches!(waited, Ok(Some(()))) {
            std::mem::forget(copies);
        }
        waited.map(drop)
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let list = self.list.get_mut().unwrap_or_else(PoisonError::into_inner);
        let open: Vec<_> = list.drain(..).filter(|copy| !copy.is_done()).collect();
        std::mem::forget(open);
    }
}

/// Enqueues the copy of a whole target.
fn copy(stream: &warpipe::Stream, into: &impl Target, from: u64) -> Outcome<()> {
    // SAFETY: the target is this caller's alone; the source names as many bytes (callers compare the layouts), and is kept
    // until the stream has done the copy (`keep`), or its owner orders its reuse behind this stream.
    Ok(unsafe { stream.copy(into.lowest(), from, into.bytes()) }?)
}
