//! The sender's end of a lane's bytes: copies from the device that go on while parts are sent.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use warpipe::backend::{HostCopy, HostPiece};
use warpipe::{DevicePtr, Sample, Stream};
use zenoh::bytes::ZBytes;

use super::{LaneCounts, LaneSender};
use crate::error::Result;
use crate::message::{Part, Tensor};

/// The parts of a lane that are being sent. The bytes of one part are on their way from the device
/// while those of the part before it are given to Zenoh.
pub(crate) struct Outgoing<'a> {
    lane: &'a LaneSender,
    /// Of device memory, in the order of their numbers.
    copied: VecDeque<(Part, Copying<'a>)>,
}

/// The bytes of a part, on their way from the device.
pub(super) struct Copying<'a> {
    /// `None` once it has been waited for. Before the contents, which it reads.
    pub(super) copy: Option<Box<dyn HostCopy>>,
    pub(super) contents: Vec<DeviceContent<'a>>,
}

impl Copying<'_> {
    fn wait(mut self) -> Result<Vec<HostPiece>> {
        let copied = self.copy.take().map(|copy| copy.wait()).transpose();
        if copied.is_err() {
            leave(&self.contents);
        }
        Ok(copied?.unwrap_or_default())
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        if self.copy.is_some() {
            leave(&self.contents);
        }
    }
}

/// The stream may still copy these.
fn leave(contents: &[DeviceContent<'_>]) {
    let keepers = contents
        .iter()
        .filter_map(|content| content.keeper.as_ref());
    keepers.for_each(|keeper| keeper.is_left.store(true, Ordering::Relaxed));
}

impl<'a> Outgoing<'a> {
    pub(crate) fn new(lane: &'a LaneSender) -> Outgoing<'a> {
        Outgoing {
            lane,
            copied: VecDeque::new(),
        }
    }

    /// Whether all parts have been given to Zenoh.
    pub(crate) fn is_empty(&self) -> bool {
        self.copied.is_empty()
    }

    /// Sends a tensor, in parts of at most `part_bytes`. Says whether the lane goes on: else not
    /// all of it was sent. The last parts may be on their way until [`flush`](Self::flush).
    pub(crate) fn tensor(
        &mut self,
        tensor: Tensor,
        content: &Content<'a>,
        part_bytes: usize,
    ) -> Result<bool> {
        let (bytes, mut tensor, mut offset) = (content.len(), Some(tensor), 0);
        while tensor.is_some() || offset < bytes {
            let Some(number) = self.lane.take_credit() else {
                return Ok(false);
            };
            let length = (bytes - offset).min(part_bytes as u64);
            let part = Part {
                lane: self.lane.lane,
                number,
                offset,
                tensor: tensor.take(),
                more: Vec::new(),
            };
            self.part(part, vec![content.part(offset, length)])?;
            offset += length;
        }
        LaneCounts::add(&self.lane.counts.tensors, 1);
        LaneCounts::add(&self.lane.counts.bytes, bytes);
        Ok(true)
    }

    /// Sends whole tensors in one part, for one credit. Says whether the lane goes on: else they
    /// were not sent.
    pub(crate) fn batch(
        &mut self,
        tensors: Vec<Tensor>,
        contents: Vec<Content<'a>>,
    ) -> Result<bool> {
        let bytes = contents.iter().map(Content::len).sum();
        let Some(number) = self.lane.take_credit() else {
            return Ok(false);
        };
        let mut tensors = tensors.into_iter();
        let part = Part {
            lane: self.lane.lane,
            number,
            offset: 0,
            tensor: tensors.next(),
            more: tensors.collect(),
        };
        let count = 1 + part.more.len() as u64;
        self.part(part, contents)?;
        LaneCounts::add(&self.lane.counts.tensors, count);
        LaneCounts::add(&self.lane.counts.bytes, bytes);
        Ok(true)
    }

    /// Sends a part with the contents, one behind the other. Each is dropped as soon as it has been
    /// copied.
    fn part(&mut self, part: Part, contents: Vec<Content<'a>>) -> Result<()> {
        let (mut payload, mut on_device) = (ZBytes::writer(), Vec::new());
        for content in contents.into_iter().filter(|content| content.len() > 0) {
            match content {
                Content::Host(bytes) => payload.append(bytes.into()),
                Content::Device(memory) => on_device.push(memory),
            }
        }
        let Some(stream) = on_device.first().map(|memory| memory.stream) else {
            self.flush()?;
            return self.lane.put(part, payload.finish());
        };
        let range = |memory: &DeviceContent<'_>| (memory.address, memory.bytes);
        let ranges: Vec<_> = on_device.iter().map(range).collect();
        let backend = stream.device().backend();
        // SAFETY: `Content::device` was promised that the ranges are readable as long as the
        // contents live, which stay with the copy; they borrow the stream.
        let copy = unsafe { backend.copy_to_host(stream.raw(), &ranges) };
        let copy = copy.inspect_err(|_| leave(&on_device))?;
        let copying = Copying {
            copy: Some(copy),
            contents: on_device,
        };
        self.copied.push_back((part, copying));
        match self.copied.len() {
            1 => Ok(()),
            _ => self.put_first(),
        }
    }

    /// Gives all parts to Zenoh.
    pub(crate) fn flush(&mut self) -> Result<()> {
        while !self.copied.is_empty() {
            self.put_first()?;
        }
        Ok(())
    }

    /// Waits for the bytes of the first part, and gives it to Zenoh.
    fn put_first(&mut self) -> Result<()> {
        let Some((part, copying)) = self.copied.pop_front() else {
            return Ok(());
        };
        let pieces = copying.wait()?;
        let mut payload = ZBytes::writer();
        for piece in pieces {
            payload.append(Bytes::from_owner(piece).into());
        }
        self.lane.put(part, payload.finish())
    }
}

/// The bytes of a tensor that is sent.
pub(crate) enum Content<'a> {
    /// In memory of this process, kept by these bytes.
    Host(Bytes),
    Device(DeviceContent<'a>),
}

/// Bytes of device memory, which a stream copies out.
pub(crate) struct DeviceContent<'a> {
    address: DevicePtr,
    bytes: u64,
    stream: &'a Stream,
    /// What keeps them readable, if that is not the borrower of this.
    keeper: Option<Arc<Keeper>>,
}

/// A complete sample, released behind its own stream, or behind the one that copies its bytes out
/// if it is not known to have copied them.
struct Keeper {
    sample: Option<Sample>,
    stream: Stream,
    is_left: AtomicBool,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(sample) = self.sample.take()
            && *self.is_left.get_mut()
        {
            let _ = self.stream.wait_for(sample.stream());
            let _ = sample.release_on(&self.stream);
        }
    }
}

impl<'a> Content<'a> {
    /// The bytes at `address`, to be copied out by `stream`, which does nothing else.
    ///
    /// # Safety
    /// They are readable by the stream's device, and nothing writes there, until `keeper`, a
    /// complete sample, is released, or, without one, as long as this or a part of it lives.
    pub(crate) unsafe fn device(
        address: DevicePtr,
        bytes: u64,
        stream: &'a Stream,
        keeper: Option<Sample>,
    ) -> Content<'a> {
        let keep = |sample| Keeper {
            sample: Some(sample),
            stream: stream.clone(),
            is_left: AtomicBool::new(false),
        };
        let keeper = keeper.map(keep).map(Arc::new);
        Content::Device(DeviceContent {
            address,
            bytes,
            stream,
            keeper,
        })
    }

    pub(crate) fn len(&self) -> u64 {
        match self {
            Content::Host(bytes) => bytes.len() as u64,
            Content::Device(memory) => memory.bytes,
        }
    }

    /// `length` of its bytes, from `offset` on: it has them.
    fn part(&self, offset: u64, length: u64) -> Content<'a> {
        match self {
            Content::Host(bytes) => {
                Content::Host(bytes.slice(offset as usize..(offset + length) as usize))
            }
            Content::Device(memory) => Content::Device(DeviceContent {
                address: memory.address + offset,
                bytes: length,
                stream: memory.stream,
                keeper: memory.keeper.clone(),
            }),
        }
    }
}
