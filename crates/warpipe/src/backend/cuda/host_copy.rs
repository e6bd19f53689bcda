//! Copies to the host that are enqueued now and waited for later. **This module is marked for
//! unsafe**: it reads page-locked memory where the device has written it.

use std::sync::Arc;

use super::backend::CudaBackend;
use super::shutdown_gate;
use super::staging::{Piece, StagingLease};
use super::sys::CUstream;
use crate::backend::{HostCopy, HostPiece};
use crate::error::{Error, Result, StateFault};

/// Page-locked memory that a stream copies to.
pub(super) struct StagedCopy {
    pub(super) stream: CUstream,
    /// Taken when it is waited for.
    pub(super) to: Option<Arrived>,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for StagedCopy {}

/// Page-locked memory that the device has written, or none.
pub(super) struct Arrived {
    pub(super) backend: Arc<CudaBackend>,
    pub(super) lease: Option<StagingLease>,
    pub(super) bytes: usize,
}

/// A part of it that lies together.
struct ArrivedPiece {
    /// Nothing writes the memory until the lease is given back, and that happens once.
    _of: Arc<Arrived>,
    piece: Piece,
    bytes: usize,
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
            let wait = |lease| to.backend.wait_for_lease(self.stream, lease);
            let waited = to.lease.iter().try_for_each(wait);
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
        let mut left = arrived.bytes;
        let of = Arc::new(arrived);
        let pieces = of.lease.iter().flat_map(|lease| {
            let most = lease.piece_bytes;
            lease.pieces.iter().map(move |&piece| (piece, most))
        });
        let piece = |(piece, most)| {
            let bytes = left.min(most);
            left -= bytes;
            let _of = of.clone();
            HostPiece::new(ArrivedPiece { _of, piece, bytes })
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
        // SAFETY: the device has written the bytes, and nothing writes them as long as the lease is
        // not given back.
        unsafe { std::slice::from_raw_parts(self.piece.place, self.bytes) }
    }
}
