//! Copies to the host that are enqueued now and waited for later. **This module is marked for
//! unsafe**: it copies by address and reads page-locked memory where the device has written it.

use std::sync::Arc;

use super::backend::CudaBackend;
use super::shutdown_gate;
use super::staging::{Piece, Purpose, StagingLease};
use super::sys::{CUdeviceptr, CUstream};
use crate::backend::{Copies, HostCopy, HostPiece, RawStream, copy_at_once};
use crate::error::{Error, Result, StateFault};
use crate::slow_path::{self, SlowPath};

/// Page-locked memory that a stream copies to.
struct StagedCopy {
    stream: CUstream,
    /// Taken when it is waited for.
    to: Option<Arrived>,
    bytes: usize,
}

// SAFETY: the lease's pieces are this copy's alone, live as long as the process, and are read only
// when the device has written them; a stream may be used from any thread.
unsafe impl Send for StagedCopy {}

/// Page-locked memory that the device has written, or none.
struct Arrived {
    backend: Arc<CudaBackend>,
    lease: Option<StagingLease>,
}

// SAFETY: nothing writes the memory until the lease is given back, and that happens once.
unsafe impl Send for Arrived {}
// SAFETY: as above.
unsafe impl Sync for Arrived {}

/// A part of it that lies together.
struct ArrivedPiece {
    of: Arc<Arrived>,
    place: *const u8,
    bytes: usize,
}

// SAFETY: as for what it is a piece of, which it keeps.
unsafe impl Send for ArrivedPiece {}
// SAFETY: as above.
unsafe impl Sync for ArrivedPiece {}

impl CudaBackend {
    /// # Safety
    /// As for [`Copies::copy_to_host`].
    pub(super) unsafe fn copy_ranges_to_host(
        &self,
        stream: CUstream,
        ranges: &[(CUdeviceptr, u64)],
    ) -> Result<Box<dyn HostCopy>> {
        let bytes = ranges.iter().map(|(_, bytes)| bytes).sum::<u64>() as usize;
        if bytes == 0 {
            return Ok(Box::new(Vec::new()));
        }
        let backend = self.me.upgrade().ok_or_else(|| self.reset_error())?;
        let current = self.enter()?;
        // SAFETY: the stream is the caller's.
        unsafe { self.check_not_capturing(stream) }?;
        let lease = self.staging.lend(self.driver, bytes, Purpose::Kept)?;
        let Some(lease) = lease else {
            // The callers that have the memory may each wait for more of it: no wait here.
            drop(current);
            // SAFETY: the caller's promise.
            let download =
                |dst: &mut [u8], src| unsafe { self.download(RawStream(stream), dst, src) };
            return copy_at_once(ranges, download);
        };
        slow_path::count(SlowPath::StagedDownload, bytes as u64);
        // SAFETY: the caller's promise.
        let enqueued = unsafe { self.enqueue_ranges(stream, ranges, &lease) };
        // Also behind a failure: the earlier copies are in progress. One word for all of them: the
        // copy engine does not stop between two copies.
        // SAFETY: the word is never unmapped.
        let signalled = unsafe { self.signal_lease(stream, &lease) };
        if let Err(fault) = enqueued.and(signalled.map_err(Error::from)) {
            // SAFETY: the stream is the caller's.
            let outcome = unsafe { self.settled(stream, Err(fault)) };
            self.staging.leave(lease);
            return outcome.map(|()| -> Box<dyn HostCopy> { Box::new(Vec::new()) });
        }
        let lease = Some(lease);
        Ok(Box::new(StagedCopy {
            stream,
            to: Some(Arrived { backend, lease }),
            bytes,
        }))
    }

    /// # Safety
    /// As for `copy_ranges_to_host`; the context is current; the lease has room.
    unsafe fn enqueue_ranges(
        &self,
        stream: CUstream,
        ranges: &[(CUdeviceptr, u64)],
        lease: &StagingLease,
    ) -> Result<()> {
        let mut at = 0;
        for &(mut src, bytes) in ranges {
            let end = at + bytes as usize;
            while at < end {
                let (index, offset) = (at / lease.piece_bytes, at % lease.piece_bytes);
                let length = (end - at).min(lease.piece_bytes - offset);
                // SAFETY: the caller's promise on `src`; the place lies in a piece that is this
                // lease's alone, and so do the bytes behind it.
                unsafe {
                    let place = lease.pieces[index].place.add(offset);
                    self.driver
                        .cuMemcpyDtoHAsync_v2(place.cast(), src, length, stream)
                }?;
                (at, src) = (at + length, src + length as u64);
            }
        }
        Ok(())
    }
}

impl StagedCopy {
    /// Waits for the copy and takes its memory: what is not proven to be written stays the
    /// stream's.
    fn finish(&mut self) -> Result<Option<Arrived>> {
        let Some(mut to) = self.to.take() else {
            return Ok(None);
        };
        if shutdown_gate::forked() {
            // The memory is the parent's, and another thread of the parent may have held its lock.
            return Err(Error::State(StateFault::Forked));
        }
        let waited = to.backend.enter().and_then(|_current| {
            let waited = to
                .lease
                .iter()
                .try_for_each(|lease| to.backend.wait_for_lease(self.stream, lease));
            // SAFETY: the stream is live until the copy has been waited for.
            unsafe { to.backend.settled(self.stream, waited) }
        });
        if waited.is_err()
            && let Some(lease) = to.lease.take()
        {
            to.backend.staging.leave(lease);
        }
        waited.map(|()| Some(to))
    }
}

impl HostCopy for StagedCopy {
    fn wait(mut self: Box<Self>) -> Result<Vec<HostPiece>> {
        let Some(arrived) = self.finish()? else {
            return Ok(Vec::new());
        };
        let (of, mut left) = (Arc::new(arrived), self.bytes);
        let pieces = of.lease.iter().flat_map(|lease| {
            let place = |piece: &Piece| (piece.place.cast_const(), lease.piece_bytes);
            lease.pieces.iter().map(place)
        });
        let piece = |(place, most): (*const u8, usize)| {
            let bytes = left.min(most);
            left -= bytes;
            let of = of.clone();
            HostPiece::new(ArrivedPiece { of, place, bytes })
        };
        Ok(pieces.map(piece).collect())
    }
}

impl Drop for StagedCopy {
    fn drop(&mut self) {
        // Its memory is given back by the drop.
        let _ = self.finish();
    }
}

impl Drop for Arrived {
    fn drop(&mut self) {
        // In a forked child it is the parent's.
        if let Some(lease) = self.lease.take()
            && !shutdown_gate::forked()
        {
            self.backend.staging.give_back(lease);
        }
    }
}

impl AsRef<[u8]> for ArrivedPiece {
    fn as_ref(&self) -> &[u8] {
        let _kept = &self.of;
        // SAFETY: the device has written the bytes, and nothing writes them as long as the lease,
        // which `of` has, is not given back.
        unsafe { std::slice::from_raw_parts(self.place, self.bytes) }
    }
}
