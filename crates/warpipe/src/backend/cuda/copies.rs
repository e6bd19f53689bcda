//! Copies between the device and the host. **This module is marked for unsafe**: it copies by
//! address.
//!
//! `cuMemcpyHtoDAsync` from pageable memory may block in the driver until the stream reaches it,
//! and `cuMemcpyDtoHAsync` always does. A stream may be blocked until a signal comes, perhaps from
//! the calling thread; and no time limit applies inside the driver. So a copy on a stream with work
//! goes through page-locked memory of this library ([`staging`](super::staging)), which the driver
//! only enqueues.

use std::collections::VecDeque;
use std::ptr;
use std::time::{Duration, Instant};

use super::backend::CudaBackend;
use super::shutdown_gate;
use super::staging::{LARGEST, Purpose, StagingLease, UPLOADS_MAX};
use super::sys::{CUdeviceptr, CUstream};
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::slow_path::{self, SlowPath};

/// Bytes of one download that are in progress at once, in pieces.
const WINDOW_BYTES: usize = 4 * LARGEST;

/// Pieces of one download that are in progress at once, of small ones.
const WINDOW: usize = 16;

/// The limit for a copy's wait for staging memory, or for the stream's earlier work.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often a query is refused before its stream counts as failed.
const QUERIES: u32 = 3;

/// A limited wait.
struct Wait {
    start: Instant,
    backoff: Backoff,
}

impl Wait {
    fn new() -> Wait {
        Wait {
            start: Instant::now(),
            backoff: Backoff::default(),
        }
    }

    fn pause(&mut self, what: impl FnOnce() -> String) -> Result<()> {
        if self.start.elapsed() >= PATIENCE {
            return Err(Error::Timeout {
                what: what(),
                waited: PATIENCE,
            });
        }
        shutdown_gate::leave_if_ending();
        self.backoff.pause();
        Ok(())
    }
}

fn earlier_work() -> String {
    "the stream's earlier work, and a copy behind it".into()
}

impl CudaBackend {
    /// # Safety
    /// As for [`crate::backend::Backend::upload`].
    pub(super) unsafe fn upload_bytes(
        &self,
        stream: CUstream,
        dst: CUdeviceptr,
        src: &[u8],
    ) -> Result<()> {
        if src.is_empty() {
            return Ok(());
        }
        let _current = self.enter()?;
        let mut wait = Wait::new();
        loop {
            // SAFETY: the caller's promise.
            if unsafe { self.driver.stream_query(stream) }? {
                // SAFETY: the caller's promise.
                return unsafe { self.upload_at_once(stream, dst, src) };
            }
            if let Some(lease) = self.staging.lend(self.driver, src.len(), Purpose::Upload)? {
                // SAFETY: the caller's promise.
                return unsafe { self.upload_staged(stream, dst, src, lease) };
            }
            wait.pause(|| {
                let (bytes, most) = (src.len(), UPLOADS_MAX);
                format!(
                    "room for {bytes} more bytes behind blocked streams (release the streams, or upload less: {most} bytes may be under way)"
                )
            })?;
        }
    }

    /// Uploads on a stream that has no work.
    ///
    /// # Safety
    /// As for `upload_bytes`; the context is current.
    unsafe fn upload_at_once(&self, stream: CUstream, dst: CUdeviceptr, src: &[u8]) -> Result<()> {
        // The driver stages pageable memory before it returns, but reads page-locked memory when
        // the stream reaches the copy.
        let late = self.driver.is_registered_host(src.as_ptr())?;
        if !late {
            slow_path::count(SlowPath::PageableUpload, src.len() as u64);
        }
        // SAFETY: the caller's promise on `dst`; `src` is read before this function returns, see
        // below.
        unsafe {
            self.driver
                .upload_async(dst, src.as_ptr(), src.len(), stream)
        }?;
        if late {
            // SAFETY: the stream is the caller's.
            let waited = unsafe { self.wait_for_copy(stream) };
            // SAFETY: as above.
            return unsafe { self.settled(stream, waited) };
        }
        Ok(())
    }

    /// # Safety
    /// As for `upload_bytes`; the context is current.
    unsafe fn upload_staged(
        &self,
        stream: CUstream,
        dst: CUdeviceptr,
        src: &[u8],
        lease: StagingLease,
    ) -> Result<()> {
        slow_path::count(SlowPath::StagedUpload, src.len() as u64);
        let (mut at, mut copied) = (dst, Ok(()));
        for (bytes, piece) in src.chunks(lease.piece_bytes).zip(&lease.pieces) {
            // SAFETY: the piece is this lease's alone and at least as long.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), piece.place, bytes.len()) };
            // SAFETY: the caller's promise on `dst`; the piece stays as it is until the word is
            // written behind the copy.
            copied = unsafe {
                self.driver
                    .upload_async(at, piece.place, bytes.len(), stream)
            };
            if copied.is_err() {
                break;
            }
            at += bytes.len() as u64;
        }
        // Also behind a failure: the earlier pieces are in progress.
        // SAFETY: the word is never unmapped.
        let signalled = unsafe {
            self.driver
                .stream_write_value(stream, lease.word_ptr, lease.value)
        };
        self.staging.leave(lease);
        Ok(copied.and(signalled)?)
    }

    /// # Safety
    /// As for [`crate::backend::Backend::download`].
    pub(super) unsafe fn download_bytes(
        &self,
        stream: CUstream,
        dst: &mut [u8],
        src: CUdeviceptr,
    ) -> Result<()> {
        let _current = self.enter()?;
        if dst.len() > LARGEST && self.driver.is_registered_host(dst.as_ptr())? {
            // SAFETY: the caller's promise.
            let outcome = unsafe { self.download_in_place(stream, dst, src) };
            // SAFETY: the stream is the caller's.
            return unsafe { self.settled(stream, outcome) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.download_staged(stream, &mut [(dst, src)]) }
    }

    /// # Safety
    /// As for [`crate::backend::Backend::download_all`].
    pub(super) unsafe fn download_pieces(
        &self,
        stream: CUstream,
        pieces: &mut [(&mut [u8], CUdeviceptr)],
    ) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.download_staged(stream, pieces) }
    }

    /// # Safety
    /// As for `download_pieces`; the context is current.
    unsafe fn download_staged(
        &self,
        stream: CUstream,
        pieces: &mut [(&mut [u8], CUdeviceptr)],
    ) -> Result<()> {
        let bytes: usize = pieces.iter().map(|(dst, _)| dst.len()).sum();
        slow_path::count(SlowPath::StagedDownload, bytes as u64);
        let mut window = VecDeque::with_capacity(WINDOW);
        let pieces = pieces.iter_mut().flat_map(|(dst, src)| {
            let addresses = (*src..).step_by(LARGEST);
            dst.chunks_mut(LARGEST).zip(addresses)
        });
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.download_through(stream, pieces, &mut window) };
        // SAFETY: the stream is the caller's.
        let outcome = unsafe { self.settled(stream, outcome) };
        window
            .into_iter()
            .for_each(|(lease, _)| self.staging.leave(lease));
        outcome
    }

    /// Waits, after a refused call, for the copies before it: the caller is free to unmap the memory
    /// that they read, or to use the memory that they write, once it has the error. Not after a
    /// timeout, nor on a stream that the driver refuses to tell of: a failed context copies nothing.
    ///
    /// # Safety
    /// The stream is live, the context current.
    unsafe fn settled(&self, stream: CUstream, outcome: Result<()>) -> Result<()> {
        if matches!(outcome, Ok(()) | Err(Error::Timeout { .. })) {
            return outcome;
        }
        let (mut wait, mut refusals) = (Wait::new(), 0);
        while refusals < QUERIES {
            // SAFETY: the caller's promise.
            match unsafe { self.driver.stream_query(stream) } {
                Ok(true) => break,
                Ok(false) if wait.pause(earlier_work).is_err() => break,
                Ok(false) => {}
                Err(_) => refusals += 1,
            }
        }
        outcome
    }

    /// Downloads into page-locked memory, which the device itself writes: a second copy would take
    /// longer than the first.
    ///
    /// # Safety
    /// As for `download_bytes`; the context is current.
    unsafe fn download_in_place(
        &self,
        stream: CUstream,
        dst: &mut [u8],
        src: CUdeviceptr,
    ) -> Result<()> {
        // The limit is on the work before the copy. Once the copy is enqueued `dst` must stay
        // borrowed until it is done, so that wait has no limit. It takes the bus's time, unless
        // another thread of the caller's makes the stream wait at this very moment.
        // SAFETY: the stream is the caller's.
        unsafe { self.wait_for_copy(stream) }?;
        // SAFETY: the caller's promise on `src`; `dst` is borrowed until the copy is done, see
        // below.
        unsafe {
            self.driver
                .download_async(dst.as_mut_ptr(), src, dst.len(), stream)
        }?;
        loop {
            // SAFETY: the stream is the caller's.
            match unsafe { self.wait_for_copy(stream) } {
                Err(Error::Timeout { .. }) => {}
                done => return done,
            }
        }
    }

    /// Downloads through staging pieces. The pieces that remain in `window` at the end are still in
    /// progress.
    ///
    /// # Safety
    /// As for `download_bytes`; the context is current.
    unsafe fn download_through<'a>(
        &self,
        stream: CUstream,
        pieces: impl Iterator<Item = (&'a mut [u8], CUdeviceptr)>,
        window: &mut VecDeque<(StagingLease, &'a mut [u8])>,
    ) -> Result<()> {
        for (bytes, src) in pieces {
            let under_way: usize = window.iter().map(|(_, bytes)| bytes.len()).sum();
            if window.len() == WINDOW || under_way >= WINDOW_BYTES {
                self.finish_first(stream, window)?;
            }
            let mut wait = Wait::new();
            let lease = loop {
                match self
                    .staging
                    .lend(self.driver, bytes.len(), Purpose::Download)?
                {
                    Some(lease) => break lease,
                    None if !window.is_empty() => self.finish_first(stream, window)?,
                    None => wait.pause(|| "page-locked memory for a copy to the host".into())?,
                }
            };
            // SAFETY: the caller's promise on `src`; the one piece is this lease's alone, as long,
            // and stays.
            let copied = unsafe {
                self.driver
                    .download_async(lease.pieces[0].place, src, bytes.len(), stream)
            };
            if let Err(fault) = copied {
                self.staging.give_back(lease);
                return Err(fault.into());
            }
            // SAFETY: the word is never unmapped.
            let signalled = unsafe {
                self.driver
                    .stream_write_value(stream, lease.word_ptr, lease.value)
            };
            window.push_back((lease, bytes));
            signalled?;
        }
        while !window.is_empty() {
            self.finish_first(stream, window)?;
        }
        Ok(())
    }

    /// Waits for the first of `window` and takes it out.
    fn finish_first(
        &self,
        stream: CUstream,
        window: &mut VecDeque<(StagingLease, &mut [u8])>,
    ) -> Result<()> {
        let Some((lease, _)) = window.front() else {
            return Ok(());
        };
        let mut wait = Wait::new();
        while !lease.is_past() {
            if !wait.backoff.is_spinning() {
                // A stream writes no word after its work has failed.
                // SAFETY: the stream is live as long as the copy that it was given.
                unsafe { self.driver.stream_query(stream) }?;
            }
            wait.pause(earlier_work)?;
        }
        if let Some((lease, bytes)) = window.pop_front() {
            // SAFETY: the device has written the piece, which is as long and this lease's alone.
            unsafe {
                ptr::copy_nonoverlapping(lease.pieces[0].place, bytes.as_mut_ptr(), bytes.len())
            };
            self.staging.give_back(lease);
        }
        Ok(())
    }

    /// Waits until the stream's present work is done. It uses an event and not the stream's own
    /// state: another thread may keep the stream busy.
    ///
    /// # Safety
    /// The stream is live, the context current.
    unsafe fn wait_for_copy(&self, stream: CUstream) -> Result<()> {
        let event = self.driver.event_create()?;
        // SAFETY: both are live.
        let recorded = unsafe { self.driver.event_record(event, stream) };
        let waited = recorded.map_err(Error::from).and_then(|()| {
            let mut wait = Wait::new();
            // SAFETY: the event is live until the end of this function.
            while !unsafe { self.driver.event_query(event) }? {
                wait.pause(earlier_work)?;
            }
            Ok(())
        });
        // SAFETY: created above, destroyed here only.
        let destroyed = unsafe { self.driver.event_destroy(event) };
        waited.and(destroyed.map_err(Error::from))
    }
}
