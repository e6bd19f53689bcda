//! The way of a reader's bytes to the device: a few buffers of page-locked memory, so that the device
//! copies some while the reader has another. **This module is marked for unsafe**: it gives out memory
//! that a device reads by its address.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::RawEvent;
use crate::backoff::Backoff;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::slice::{DeviceSlice, check_range};
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::StreamSet;
use crate::shm::page::{PAGE_BYTES, SharedPage};
use crate::stream::Stream;

/// More than two, so that neither the reader nor the device waits for one late step of the other.
pub(super) const BUFFERS: usize = 4;

/// Page-locked buffers (`cuMemHostRegister`), and the stream that copies them. On the host backend they are
/// ordinary memory, and the stream is a thread.
pub(super) struct Staging {
    /// Unregistered once the stream is past the copies, also after an error.
    memory: DropAfterFence<SharedPage>,
    stream: Stream,
    buffers: Vec<Buffer>,
    buffer_bytes: usize,
    /// The buffer that [`fill`](Self::fill) gave out last.
    current: usize,
}

/// Looks at a copy (`cuEventQuery`) before a reader sleeps between them.
const POLLS_BEFORE_SLEEP: u32 = 16;

struct Buffer {
    /// Recorded behind the buffer's last copy.
    copied: RawEvent,
    state: BufferState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BufferState {
    /// No work of the device uses it.
    Free,
    /// Its event is recorded behind the copy.
    Copying,
    /// It may be in use, and no event says until when: the driver refused the copy, or the event.
    Unknown,
}

impl Staging {
    /// Buffers of at least `bytes` bytes each.
    pub(super) fn new(device: &Device, bytes: usize) -> Result<Staging> {
        let stream = device.stream()?;
        let streams: Arc<StreamSet> = Arc::default();
        streams.record_use(&stream);
        let buffer_bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let page = SharedPage::private(device, BUFFERS * buffer_bytes)?;
        let memory = DropAfterFence::new(streams, page)?;
        // Dropped with the events that were made, if the driver refuses one.
        let mut staging = Staging {
            memory,
            stream,
            buffers: Vec::with_capacity(BUFFERS),
            buffer_bytes,
            current: 0,
        };
        for _ in 0..BUFFERS {
            let copied = staging.stream.backend().create_event()?;
            staging.buffers.push(Buffer {
                copied,
                state: BufferState::Free,
            });
        }
        Ok(staging)
    }

    /// The next buffer in turn, of whole pages, for the caller to fill. Waits up to
    /// `timeout` until the device has copied what was in it.
    pub(super) fn fill(&mut self, timeout: Duration) -> Result<&mut [u8]> {
        self.current = (self.current + 1) % BUFFERS;
        let index = self.current;
        // Sleeps soon: readers that all ask the driver hold each other up, and the other buffers are
        // on their way meanwhile.
        let (start, mut backoff) = (Instant::now(), Backoff::spinning(POLLS_BEFORE_SLEEP));
        while !self.is_free(index)? {
            if start.elapsed() >= timeout {
                return Err(Error::timeout("the copy of a part of a tensor", timeout));
            }
            backoff.pause();
        }
        self.buffers[index].state = BufferState::Free;
        let address = self.memory.address(index * self.buffer_bytes);
        // SAFETY: inside the page, which is mapped for writing as long as self. Its bytes are
        // initialized (zeros at first). Nothing else has a reference into it: only this function
        // gives one out, and that one borrows self. The device is past its last copy of this
        // buffer, and gets the next one in `copy`, which borrows self, too.
        Ok(unsafe { std::slice::from_raw_parts_mut(address, self.buffer_bytes) })
    }

    /// Enqueues a copy of the first `bytes` bytes of the buffer that was filled last
    /// (`cuMemcpyAsync`), to byte `offset` of `memory`.
    pub(super) fn copy_to(
        &mut self,
        memory: &DeviceSlice,
        offset: u64,
        bytes: usize,
    ) -> Result<()> {
        let index = self.current;
        check_range("weights", offset, bytes as u64, memory.bytes())?;
        check_range("a buffer", 0, bytes as u64, self.buffer_bytes as u64)?;
        let from = self.memory.device_ptr(index * self.buffer_bytes);
        let from = from.ok_or_else(|| Error::argument("buffer", "not registered", "registered"))?;
        let to = memory.ptr() + offset;
        memory.used_on(&self.stream);
        let buffer = &mut self.buffers[index];
        buffer.state = BufferState::Unknown;
        // SAFETY: both ranges lie in their memory, as checked above. The slice's memory stays
        // mapped until the stream recorded above is past the copy; the buffer's is dropped after
        // that stream (`memory`). No reference into the buffer exists: one would borrow self. The
        // next one is given out once `is_free` has seen the copy's end.
        unsafe { self.stream.copy(to, from, bytes as u64) }?;
        // SAFETY: both handles are live as long as self.
        unsafe {
            let backend = self.stream.backend();
            backend.record_event(buffer.copied, self.stream.raw())
        }?;
        buffer.state = BufferState::Copying;
        Ok(())
    }

    /// Waits up to `timeout` until every copy is done.
    pub(super) fn finish(&self, timeout: Duration) -> Result<()> {
        self.stream.synchronize(timeout)
    }

    /// Whether the device is past the last copy of a buffer. A fault of the device is an error
    /// here.
    fn is_free(&self, index: usize) -> Result<bool> {
        let buffer = &self.buffers[index];
        match buffer.state {
            BufferState::Free => Ok(true),
            // SAFETY: the event is live as long as self.
            BufferState::Copying => unsafe { self.stream.backend().query_event(buffer.copied) },
            BufferState::Unknown => self.stream.is_idle(),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        for buffer in &self.buffers {
            // SAFETY: made in `new` with this backend, and given up here once. The driver keeps an
            // event that is still due.
            let _ = unsafe { self.stream.backend().destroy_event(buffer.copied) };
        }
    }
}

#[cfg(test)]
mod tests;
