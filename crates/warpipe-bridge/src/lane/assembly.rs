//! The receiver's end of a lane's bytes: the parts of one tensor, copied to its slot.

use warpipe::{Device, DevicePtr, Layout, Loan, SampleMut, Stream};
use zenoh::bytes::{ZBytes, ZBytesSliceIterator};

use crate::error::Result;
use crate::message::{Part, Tag, Tensor};

/// The bytes of a part's payload, taken in order.
#[derive(Debug)]
pub(crate) struct Payload<'a> {
    slices: ZBytesSliceIterator<'a>,
    slice: &'a [u8],
}

impl<'a> Payload<'a> {
    pub(crate) fn new(payload: &'a ZBytes) -> Payload<'a> {
        Payload {
            slices: payload.slices(),
            slice: &[],
        }
    }

    /// The next bytes that lie together, at most `most`; `None` behind the last one.
    fn next(&mut self, most: u64) -> Option<&'a [u8]> {
        while self.slice.is_empty() {
            self.slice = self.slices.next()?;
        }
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let (bytes, rest) = self.slice.split_at(most.min(self.slice.len()));
        self.slice = rest;
        Some(bytes)
    }

    /// Copies the next `length` bytes to `address`.
    ///
    /// # Safety
    /// `address` is writable for `length` bytes, and nothing else enqueued writes there, until the
    /// stream has done the copy.
    pub(crate) unsafe fn upload(
        &mut self,
        device: &Device,
        stream: &Stream,
        address: DevicePtr,
        mut length: u64,
    ) -> Result<()> {
        let mut pieces = Vec::new();
        while length > 0
            && let Some(bytes) = self.next(length)
        {
            pieces.push(bytes);
            length -= bytes.len() as u64;
        }
        let backend = device.backend();
        // SAFETY: the stream is live; the pieces together are at most `length` bytes, for which the
        // caller promises the range.
        unsafe { backend.upload_pieces(stream.raw(), address, &pieces)? };
        Ok(())
    }

    /// Leaves out the next `length` bytes.
    pub(crate) fn skip(&mut self, mut length: u64) {
        while length > 0
            && let Some(bytes) = self.next(length)
        {
            length -= bytes.len() as u64;
        }
    }
}

/// Copies the payload of a part to `address`.
///
/// # Safety
/// `address` is writable for the payload's length, and nothing else enqueued writes there, until
/// the stream has done the copy.
pub(crate) unsafe fn upload(
    payload: &ZBytes,
    device: &Device,
    stream: &Stream,
    address: DevicePtr,
) -> Result<()> {
    let length = payload.len() as u64;
    // SAFETY: the caller's promise.
    unsafe { Payload::new(payload).upload(device, stream, address, length) }
}

/// A slot that is given back unsent.
pub(crate) trait Slot {
    /// Gives it back, behind the work enqueued on `stream` so far.
    fn give_back(self, stream: &Stream);
}

impl Slot for SampleMut {
    fn give_back(self, stream: &Stream) {
        let _ = self.discard(stream);
    }
}

impl Slot for Loan {
    fn give_back(self, stream: &Stream) {
        let _ = self.discard(stream);
    }
}

/// Where the bytes of a tensor go.
#[derive(Debug)]
pub(crate) struct Target<S: Slot> {
    /// None for a tensor that came before, or that nobody wants.
    pub(crate) slot: Option<S>,
    /// The stream that copies to it.
    pub(crate) stream: Stream,
}

impl<S: Slot> Drop for Target<S> {
    /// The slot of a tensor that is not sent goes back behind the copies to it: the next one there
    /// may be another stream's.
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.give_back(&self.stream);
        }
    }
}

/// Where the parts of one tensor go, checked part by part.
#[derive(Debug)]
pub(crate) struct Assembly<T> {
    pub(crate) tag: Tag,
    pub(crate) layout: Layout,
    pub(crate) metadata: Vec<u8>,
    filled: u64,
    pub(crate) target: T,
}

impl<T> Assembly<T> {
    pub(crate) fn new(tensor: Tensor, layout: Layout, target: T) -> Assembly<T> {
        Assembly {
            tag: tensor.tag,
            layout,
            metadata: tensor.metadata,
            filled: 0,
            target,
        }
    }

    /// Accounts for a part's payload; an error for one that does not follow.
    pub(crate) fn add(&mut self, part: &Part, length: u64) -> std::result::Result<(), String> {
        if !part.more.is_empty() {
            return Err("several tensors came in one part".into());
        }
        let left = self.layout.bytes() - self.filled;
        if part.offset != self.filled || length > left || (length == 0 && left > 0) {
            return Err(format!(
                "{length} bytes at {} where {left} bytes at {} are left",
                part.offset, self.filled
            ));
        }
        self.filled += length;
        Ok(())
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.filled == self.layout.bytes()
    }
}
