//! Copies between the device and the host. **This module is marked for unsafe**: it copies by
//! address.
//!
//! `cuMemcpyHtoDAsync` from pageable memory may block in the driver until the stream reaches it,
//! and `cuMemcpyDtoHAsync` always does. A stream may be blocked until a signal comes, perhaps from
//! the calling thread; and no time limit applies inside the driver. So a copy on a stream with work
//! goes through page-locked memory of this library ([`staging`](super::staging)), which the driver
//! only enqueues.
//!
//! The driver gives short copies from the host to the compute engine, with the bytes in the
//! command: up to 64 KiB of pageable memory, less than 32 KiB of page-locked memory. Where
//! processes take turns on the compute engine, each such copy waits for a turn: 140 us, where the
//! copy engine takes 8 (H100, see ARCHITECTURE.md). A copy of two rows goes to the copy engine,
//! however short. So short copies are staged, and enqueued as two rows; not under MPS, where there
//! are no turns.

use std::collections::VecDeque;
use std::ptr;
use std::time::Duration;

use super::backend::CudaBackend;
use super::backend::memory::size;
use super::host_copy::{Arrived, StagedCopy};
use super::shutdown_gate::Wait;
use super::staging::{LARGEST, Piece, Purpose, StagingLease, UPLOADS_MAX};
use super::sys::Fault;
use super::sys::{
    CUDA_MEMCPY3D, CUdeviceptr, CUstream, CopySide, EVENT_DISABLE_TIMING,
    STREAM_WRITE_VALUE_DEFAULT,
};
use crate::backend::{Copies, DevicePtr, HostCopy, RawStream, Rows, copy_at_once};
use crate::error::{Error, Result, StateFault};
use crate::slow_path::{self, SlowPath};

/// The longest copy from the host that the driver gives to the compute engine.
const SHORT_MAX: usize = 64 << 10;

/// Pieces of one download that are in progress at once.
const WINDOW: usize = 4;

/// The limit for a copy's wait for staging memory, or for the stream's earlier work.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often a query is refused before its stream counts as failed.
const QUERIES: u32 = 3;

/// No limit, for a copy that uses memory of the caller that is borrowed for the call alone.
const NO_LIMIT: Duration = Duration::MAX;

fn earlier_work() -> String {
    "the stream's earlier work, and a copy behind it".into()
}

impl Copies for CudaBackend {
    unsafe fn copy_rows(&self, stream: RawStream, rows: &Rows) -> Result<()> {
        // SAFETY: the caller's promise; the context is current.
        self.enqueued(|_| unsafe { self.enqueue_rows(stream.0, rows) })
    }

    unsafe fn zero(&self, stream: RawStream, dst: DevicePtr, bytes: u64) -> Result<()> {
        let bytes = size(bytes)?;
        // SAFETY: the caller's promise.
        self.enqueued(|driver| unsafe { driver.cuMemsetD8Async(dst, 0, bytes, stream.0) })
    }

    unsafe fn upload_pieces(
        &self,
        RawStream(stream): RawStream,
        mut dst: DevicePtr,
        pieces: &[&[u8]],
    ) -> Result<()> {
        let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.enter()?;
        // SAFETY: the stream is the caller's.
        unsafe { self.check_not_capturing(stream) }?;
        if (pieces.len() > 1 || self.goes_as_rows(bytes))
            && let Some(lease) = self.lend(bytes, Purpose::Upload)?
        {
            // SAFETY: the caller's promise.
            return unsafe { self.upload_lease(stream, dst, pieces, bytes, lease) };
        }
        for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
            // SAFETY: the caller's promise.
            unsafe { self.upload_in_turn(stream, dst, piece) }?;
            dst += piece.len() as u64;
        }
        Ok(())
    }

    unsafe fn download(
        &self,
        RawStream(stream): RawStream,
        dst: &mut [u8],
        src: DevicePtr,
    ) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: the stream is the caller's.
        unsafe { self.check_not_capturing(stream) }?;
        if dst.len() > LARGEST && self.driver.is_registered_host(dst.as_ptr())? {
            // SAFETY: the caller's promise.
            let outcome = unsafe { self.download_in_place(stream, dst, src) };
            // SAFETY: the stream is the caller's.
            return unsafe { self.settled(stream, outcome) };
        }
        slow_path::count(SlowPath::StagedDownload, dst.len() as u64);
        let mut window = VecDeque::with_capacity(WINDOW);
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.download_through(stream, dst, src, &mut window) };
        // SAFETY: the stream is the caller's.
        let outcome = unsafe { self.settled(stream, outcome) };
        window
            .into_iter()
            .for_each(|(lease, _)| self.staging.leave(lease));
        outcome
    }

    unsafe fn copy_to_host(
        &self,
        RawStream(stream): RawStream,
        ranges: &[(DevicePtr, u64)],
    ) -> Result<Box<dyn HostCopy>> {
        let bytes = ranges.iter().map(|(_, bytes)| bytes).sum::<u64>() as usize;
        if bytes == 0 {
            return Ok(Box::new(Vec::new()));
        }
        let backend = self.me.upgrade().ok_or_else(|| self.reset_error())?;
        let current = self.enter()?;
        // SAFETY: the stream is the caller's.
        unsafe { self.check_not_capturing(stream) }?;
        let lease = self.lend(bytes, Purpose::Kept)?;
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
        let enqueued = enqueued.and(signalled).map_err(Error::from);
        // SAFETY: the stream is the caller's.
        if let Err(error) = unsafe { self.settled(stream, enqueued) } {
            self.staging.leave(lease);
            return Err(error);
        }
        let lease = Some(lease);
        let to = Some(Arrived {
            backend,
            lease,
            bytes,
        });
        Ok(Box::new(StagedCopy { stream, to }))
    }
}

impl CudaBackend {
    /// The context is current.
    fn lend(&self, bytes: usize, purpose: Purpose) -> Result<Option<StagingLease>> {
        let owe = |of| self.owe(of);
        self.staging.lend(self.driver, bytes, purpose, owe)
    }

    /// Uploads at once on a stream that has no work, else through staging memory when there is room.
    ///
    /// # Safety
    /// As for [`Copies::upload`]; the context is current.
    unsafe fn upload_in_turn(&self, stream: CUstream, dst: CUdeviceptr, src: &[u8]) -> Result<()> {
        let mut wait = Wait::new(PATIENCE);
        loop {
            // SAFETY: the caller's promise.
            if unsafe { self.driver.stream_query(stream) }? {
                // SAFETY: the caller's promise.
                return unsafe { self.upload_at_once(stream, dst, src) };
            }
            if let Some(lease) = self.lend(src.len(), Purpose::Upload)? {
                if src.len() > SHORT_MAX {
                    slow_path::count(SlowPath::StagedUpload, src.len() as u64);
                }
                // SAFETY: the caller's promise.
                return unsafe { self.upload_lease(stream, dst, &[src], src.len(), lease) };
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
    /// As for [`Copies::upload`]; the context is current.
    unsafe fn upload_at_once(&self, stream: CUstream, dst: CUdeviceptr, src: &[u8]) -> Result<()> {
        // The driver stages pageable memory before it returns, but reads page-locked memory when
        // the stream reaches the copy.
        let late = self.driver.is_registered_host(src.as_ptr())?;
        if !late && src.len() > SHORT_MAX {
            slow_path::count(SlowPath::PageableUpload, src.len() as u64);
        }
        let (from, bytes) = (src.as_ptr().cast(), src.len());
        // SAFETY: the caller's promise on `dst`; `src` is read before this function returns, see
        // below.
        unsafe { self.driver.cuMemcpyHtoDAsync_v2(dst, from, bytes, stream) }?;
        if late {
            // SAFETY: the stream is the caller's.
            let waited = unsafe { self.wait_for_copy(stream, NO_LIMIT) };
            // SAFETY: as above.
            return unsafe { self.settled(stream, waited) };
        }
        Ok(())
    }

    /// Copies `bytes` bytes in all to the lease's memory, and enqueues the copy from there.
    ///
    /// # Safety
    /// As for [`Copies::upload`]; the context is current.
    unsafe fn upload_lease(
        &self,
        stream: CUstream,
        dst: CUdeviceptr,
        sources: &[&[u8]],
        bytes: usize,
        lease: StagingLease,
    ) -> Result<()> {
        let (mut at, mut copied) = (0, Ok(()));
        for &(mut source) in sources {
            while !source.is_empty() && copied.is_ok() {
                let (piece, filled) = lease.piece_at(at);
                let room = lease.piece_bytes - filled;
                let (now, later) = source.split_at(source.len().min(room));
                // SAFETY: the piece is this lease's alone and has room for so many bytes more.
                unsafe {
                    let place = piece.place.add(filled);
                    ptr::copy_nonoverlapping(now.as_ptr(), place, now.len());
                }
                (source, at) = (later, at + now.len());
                if now.len() == room || at == bytes {
                    let length = filled + now.len();
                    let dst = dst + (at - length) as u64;
                    // SAFETY: the caller's promise on `dst`; the piece stays as it is until the word
                    // is written behind the copy.
                    copied = unsafe { self.upload_piece(dst, piece, length, stream) };
                }
            }
        }
        // Also behind a failure: the earlier pieces are in progress.
        // SAFETY: the word is never unmapped.
        let signalled = unsafe { self.signal_lease(stream, &lease) };
        self.staging.leave(lease);
        Ok(copied.and(signalled)?)
    }

    /// Refuses a stream that is captured: its graph would repeat the copy when the memory on the
    /// host is another copy's, and the queries here would invalidate the capture.
    ///
    /// # Safety
    /// The stream is live; the context is current.
    pub(super) unsafe fn check_not_capturing(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the caller's promise.
        if unsafe { self.driver.stream_is_capturing(stream) }? {
            let stream = format!("stream {:#x}", stream.addr());
            return Err(Error::State(StateFault::Capturing(stream)));
        }
        Ok(())
    }

    /// Whether a copy of this length from page-locked memory is enqueued as two rows. One byte is
    /// no two rows.
    fn goes_as_rows(&self, bytes: usize) -> bool {
        !self.is_under_mps && (2..=SHORT_MAX).contains(&bytes)
    }

    /// Enqueues a copy of the first `bytes` of a piece.
    ///
    /// # Safety
    /// As for [`Copies::upload`]; the context is current; the piece is as long, and stays as it is
    /// until the copy is done.
    unsafe fn upload_piece(
        &self,
        dst: CUdeviceptr,
        piece: &Piece,
        bytes: usize,
        stream: CUstream,
    ) -> std::result::Result<(), Fault> {
        let (driver, from) = (self.driver, piece.place.cast());
        if !self.goes_as_rows(bytes) {
            // SAFETY: the caller's promise.
            return unsafe { driver.cuMemcpyHtoDAsync_v2(dst, from, bytes, stream) };
        }
        // An odd number: twice, one byte apart.
        for start in 0..=(bytes % 2) as u64 {
            let (row, from) = (bytes / 2, piece.place_ptr + start);
            let rows = CUDA_MEMCPY3D {
                src: CopySide::linear(from, row, 2),
                dst: CopySide::linear(dst + start, row, 2),
                width: row,
                height: 2,
                depth: 1,
            };
            // SAFETY: both ranges lie in those that the caller promises.
            unsafe { driver.cuMemcpy3DAsync_v2(&rows, stream) }?;
        }
        Ok(())
    }

    /// Waits, after a refused call, for the copies before it: the caller is free to unmap the
    /// memory that they read, or to use the memory that they write, once it has the error. Not
    /// after a timeout, nor on a stream that the driver refuses to tell of: a failed context copies
    /// nothing.
    ///
    /// # Safety
    /// The stream is live, the context current.
    pub(super) unsafe fn settled(&self, stream: CUstream, outcome: Result<()>) -> Result<()> {
        if matches!(outcome, Ok(()) | Err(Error::Timeout { .. })) {
            return outcome;
        }
        let (mut wait, mut refusals) = (Wait::new(PATIENCE), 0);
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
    /// As for [`Copies::download`]; the context is current.
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
        unsafe { self.wait_for_copy(stream, PATIENCE) }?;
        let to = dst.as_mut_ptr().cast();
        // SAFETY: the caller's promise on `src`; `dst` is borrowed until the copy is done, see
        // below.
        unsafe { self.driver.cuMemcpyDtoHAsync_v2(to, src, dst.len(), stream) }?;
        // SAFETY: the stream is the caller's.
        unsafe { self.wait_for_copy(stream, NO_LIMIT) }
    }

    /// Downloads through staging pieces. The pieces that remain in `window` at the end are still in
    /// progress.
    ///
    /// # Safety
    /// As for [`Copies::download`]; the context is current.
    unsafe fn download_through<'a>(
        &self,
        stream: CUstream,
        dst: &'a mut [u8],
        src: CUdeviceptr,
        window: &mut VecDeque<(StagingLease, &'a mut [u8])>,
    ) -> Result<()> {
        for (bytes, src) in dst.chunks_mut(LARGEST).zip((src..).step_by(LARGEST)) {
            if window.len() == WINDOW {
                self.finish_first(stream, window)?;
            }
            let mut wait = Wait::new(PATIENCE);
            let lease = loop {
                match self.lend(bytes.len(), Purpose::Download)? {
                    Some(lease) => break lease,
                    None if !window.is_empty() => self.finish_first(stream, window)?,
                    None => wait.pause(|| "page-locked memory for a copy to the host".into())?,
                }
            };
            let range = (src, bytes.len() as u64);
            // SAFETY: the caller's promise on `src`; the lease has one piece.
            if let Err(fault) = unsafe { self.enqueue_ranges(stream, &[range], &lease) } {
                self.staging.give_back(lease);
                return Err(fault.into());
            }
            // SAFETY: the word is never unmapped.
            let signalled = unsafe { self.signal_lease(stream, &lease) };
            window.push_back((lease, bytes));
            signalled?;
        }
        while !window.is_empty() {
            self.finish_first(stream, window)?;
        }
        Ok(())
    }

    /// Enqueues copies of ranges, one behind the other, to a lease's memory.
    ///
    /// # Safety
    /// As for [`Copies::copy_to_host`]; the context is current; the lease has room.
    unsafe fn enqueue_ranges(
        &self,
        stream: CUstream,
        ranges: &[(CUdeviceptr, u64)],
        lease: &StagingLease,
    ) -> std::result::Result<(), Fault> {
        let (driver, mut at) = (self.driver, 0);
        for &(mut src, bytes) in ranges {
            let end = at + bytes as usize;
            while at < end {
                let (piece, offset) = lease.piece_at(at);
                let length = (end - at).min(lease.piece_bytes - offset);
                // SAFETY: the caller's promise on `src`; the place lies in a piece that is this
                // lease's alone, and so do the bytes behind it.
                unsafe {
                    let place = piece.place.add(offset).cast();
                    driver.cuMemcpyDtoHAsync_v2(place, src, length, stream)
                }?;
                (at, src) = (at + length, src + length as u64);
            }
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
        self.wait_for_lease(stream, lease)?;
        if let Some((lease, bytes)) = window.pop_front() {
            // SAFETY: the device has written the piece, which is as long and this lease's alone.
            unsafe {
                ptr::copy_nonoverlapping(lease.pieces[0].place, bytes.as_mut_ptr(), bytes.len())
            };
            self.staging.give_back(lease);
        }
        Ok(())
    }

    /// Has the stream write the lease's word, behind its copies.
    ///
    /// # Safety
    /// The stream is live, the context current.
    pub(super) unsafe fn signal_lease(
        &self,
        stream: CUstream,
        lease: &StagingLease,
    ) -> std::result::Result<(), Fault> {
        let (driver, word, flags) = (self.driver, lease.word_ptr, STREAM_WRITE_VALUE_DEFAULT);
        // SAFETY: the word is never unmapped; the rest is the caller's promise.
        unsafe { driver.cuStreamWriteValue64_v2(stream, word, lease.value, flags) }
    }

    /// Waits until the stream is past a lease. The stream is live as long as the copy that it was
    /// given.
    pub(super) fn wait_for_lease(&self, stream: CUstream, lease: &StagingLease) -> Result<()> {
        let mut wait = Wait::new(PATIENCE);
        while !lease.is_past() {
            if !wait.is_spinning() {
                // A stream writes no word after its work has failed.
                // SAFETY: as above.
                unsafe { self.driver.stream_query(stream) }?;
            }
            wait.pause(earlier_work)?;
        }
        Ok(())
    }

    /// Waits until the stream's present work is done. It uses an event and not the stream's own
    /// state: another thread may keep the stream busy.
    ///
    /// # Safety
    /// The stream is live, the context current.
    unsafe fn wait_for_copy(&self, stream: CUstream, limit: Duration) -> Result<()> {
        let event = self.driver.cuEventCreate(EVENT_DISABLE_TIMING)?;
        // SAFETY: both are live.
        let recorded = unsafe { self.driver.cuEventRecord(event, stream) };
        let waited = recorded.map_err(Error::from).and_then(|()| {
            let mut wait = Wait::new(limit);
            // SAFETY: the event is live until the end of this function.
            while !unsafe { self.driver.event_query(event) }? {
                wait.pause(earlier_work)?;
            }
            Ok(())
        });
        // SAFETY: created above, destroyed here only.
        let destroyed = unsafe { self.driver.cuEventDestroy_v2(event) };
        waited.and(destroyed.map_err(Error::from))
    }
}
