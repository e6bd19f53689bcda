//! A lane: tensors in one direction between two bridges, in parts, under credit.
//!
//! The receiver says how many parts may be sent in all; the sender waits for that number before
//! each part. So no more parts are on their way than the receiver has room for, and a receiver that
//! stands still holds up its own lanes and no link.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use warpipe::backend::{HostCopy, HostPiece};
use warpipe::{Device, DevicePtr, Layout, Loan, Sample, SampleMut, Stream};
use zenoh::bytes::{ZBytes, ZBytesSliceIterator};

use crate::error::Result;
use crate::message::{Id, Message, Part, Tag, Tensor};
use crate::session::Outbox;

/// The most parts that a receiver may allow to be on their way.
pub(crate) const WINDOW_MAX: u64 = 1024;
/// How often a wait looks whether its lane has ended.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Figures of one lane, for people.
#[derive(Debug, Default)]
pub(crate) struct LaneCounts {
    pub(crate) tensors: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// Samples that the policy left out.
    pub(crate) dropped: AtomicU64,
    /// Samples that did not come, by the numbers, whatever the reason.
    pub(crate) missing: AtomicU64,
    /// Samples that came a second time and were not published.
    pub(crate) repeated: AtomicU64,
    /// Parts that may still be sent.
    pub(crate) credit: AtomicU64,
}

impl LaneCounts {
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

/// The sending end of a lane.
#[derive(Debug)]
pub(crate) struct LaneSender {
    pub(crate) lane: Id,
    pub(crate) peer: Id,
    outbox: Arc<Outbox>,
    state: Mutex<SenderState>,
    changed: Condvar,
    pub(crate) counts: LaneCounts,
}

#[derive(Debug, Default)]
struct SenderState {
    /// From the receiver's `Ready`.
    after: Option<u64>,
    granted: u64,
    sent: u64,
    ended: Option<String>,
}

impl LaneSender {
    pub(crate) fn new(lane: Id, peer: Id, outbox: Arc<Outbox>) -> LaneSender {
        LaneSender {
            lane,
            peer,
            outbox,
            state: Mutex::default(),
            changed: Condvar::new(),
            counts: LaneCounts::default(),
        }
    }

    pub(crate) fn send(&self, message: &Message) -> Result<()> {
        self.outbox.send(message, ZBytes::new())
    }

    /// Zenoh has copied the payload when this returns.
    fn put(&self, part: Part, payload: ZBytes) -> Result<()> {
        self.outbox.send(&Message::Part(part), payload)
    }

    /// As [`Outbox::post`].
    pub(crate) fn post(&self, message: Message) -> bool {
        self.outbox.post(message)
    }

    /// The receiver has taken the lane.
    pub(crate) fn ready(&self, after: u64, parts: u64) {
        lock(&self.state).after.get_or_insert(after);
        self.grant(parts);
    }

    /// The receiver allows this number of parts in all. A smaller number than before changes
    /// nothing. One beyond any window ends the lane: a peer has no room for it, and what it does not
    /// read would fill the link.
    pub(crate) fn grant(&self, parts: u64) {
        let mut state = lock(&self.state);
        if parts.saturating_sub(state.sent) > WINDOW_MAX {
            let reason = || format!("the peer allowed more than {WINDOW_MAX} parts at a time");
            state.ended.get_or_insert_with(reason);
            self.changed.notify_all();
            return;
        }
        state.granted = state.granted.max(parts);
        let credit = state.granted.saturating_sub(state.sent);
        self.counts.credit.store(credit, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Ends the lane from outside; the first reason stays.
    pub(crate) fn end(&self, reason: &str) {
        lock(&self.state).ended.get_or_insert_with(|| reason.into());
        self.changed.notify_all();
    }

    /// Whether the receiver has taken the lane.
    pub(crate) fn is_taken(&self) -> bool {
        lock(&self.state).after.is_some()
    }

    /// Why the lane has ended, if it has.
    pub(crate) fn ended(&self) -> Option<String> {
        lock(&self.state).ended.clone()
    }

    /// Waits for the receiver's `Ready`. `None` when the lane ended or nothing came.
    pub(crate) fn wait_ready(&self, timeout: Duration) -> Option<u64> {
        let state = lock(&self.state);
        let waits = |state: &mut SenderState| state.after.is_none() && state.ended.is_none();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, timeout, waits)
            .unwrap_or_else(PoisonError::into_inner);
        state.after.filter(|_| state.ended.is_none())
    }

    /// Whether a part may be sent, at the latest after `timeout`. False once the lane has ended.
    pub(crate) fn wait_credit(&self, timeout: Duration) -> bool {
        let state = lock(&self.state);
        let waits = |state: &mut SenderState| state.sent >= state.granted && state.ended.is_none();
        let waited = self.changed.wait_timeout_while(state, timeout, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.sent < state.granted && state.ended.is_none()
    }

    /// Takes one credit and returns the number of the part; `None` once the lane has ended.
    fn take_credit(&self) -> Option<u64> {
        let mut state = lock(&self.state);
        loop {
            if state.ended.is_some() {
                return None;
            }
            if state.sent < state.granted {
                state.sent += 1;
                let credit = state.granted - state.sent;
                self.counts.credit.store(credit, Ordering::Relaxed);
                return Some(state.sent);
            }
            let waited = self.changed.wait_timeout(state, SLICE);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends a tensor, in parts of at most `part_bytes`. Says whether all of it was sent: not when
    /// the lane ended meanwhile.
    pub(crate) fn send_tensor(
        &self,
        tensor: Tensor,
        content: &Content<'_>,
        part_bytes: usize,
    ) -> Result<bool> {
        let mut outgoing = Outgoing::new(self);
        let goes_on = outgoing.tensor(tensor, content, part_bytes)?;
        outgoing.flush()?;
        Ok(goes_on)
    }
}

/// The parts of a lane that are being sent. The bytes of one part are on their way from the device
/// while those of the part before it are given to Zenoh.
pub(crate) struct Outgoing<'a> {
    lane: &'a LaneSender,
    /// Of device memory, in the order of their numbers.
    copied: VecDeque<(Part, Copying<'a>)>,
}

/// The bytes of a part, on their way from the device.
struct Copying<'a> {
    /// `None` once it has been waited for. Before the contents, which it reads.
    copy: Option<Box<dyn HostCopy>>,
    contents: Vec<DeviceContent<'a>>,
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

/// The receiving end of a lane. Zenoh's thread puts parts in, and one thread takes them out.
#[derive(Debug)]
pub(crate) struct LaneReceiver {
    pub(crate) lane: Id,
    pub(crate) peer: Id,
    pub(crate) window: u64,
    outbox: Arc<Outbox>,
    state: Mutex<ReceiverState>,
    changed: Condvar,
    pub(crate) counts: LaneCounts,
}

#[derive(Debug, Default)]
struct ReceiverState {
    parts: VecDeque<(Part, ZBytes)>,
    /// The number of the last part that came.
    arrived: u64,
    taken: u64,
    granted: u64,
    end: Option<Ending>,
}

/// Why a receiver's lane has ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ending {
    /// The sender said so.
    Sender(crate::message::End),
    /// The peer is unreachable, or a new lane replaces this one.
    Cut,
    /// The peer broke the protocol.
    Fault(String),
}

impl LaneReceiver {
    pub(crate) fn new(lane: Id, peer: Id, window: u64, outbox: Arc<Outbox>) -> LaneReceiver {
        LaneReceiver {
            lane,
            peer,
            window,
            outbox,
            state: Mutex::default(),
            changed: Condvar::new(),
            counts: LaneCounts::default(),
        }
    }

    pub(crate) fn send(&self, message: &Message) -> Result<()> {
        self.outbox.send(message, ZBytes::new())
    }

    /// Takes the lane: tells the sender where to begin, and how many parts it may send.
    pub(crate) fn accept(&self, after: u64) -> Result<()> {
        lock(&self.state).granted = self.window;
        self.counts.credit.store(self.window, Ordering::Relaxed);
        self.send(&Message::Ready {
            lane: self.lane,
            after,
            parts: self.window,
        })
    }

    /// A part came. Does not wait: the credit bounds what can come.
    pub(crate) fn put(&self, part: Part, payload: ZBytes) {
        let mut state = lock(&self.state);
        let fault = if part.number != state.arrived + 1 {
            Some(format!(
                "part {} came behind part {}",
                part.number, state.arrived
            ))
        } else if part.number > state.granted {
            Some(format!(
                "part {} is beyond the credit of {}",
                part.number, state.granted
            ))
        } else {
            None
        };
        if state.end.is_none() {
            match fault {
                Some(fault) => state.end = Some(Ending::Fault(fault)),
                None => {
                    state.arrived += 1;
                    state.parts.push_back((part, payload));
                    // The taker waits only while there is none.
                    if state.parts.len() > 1 {
                        return;
                    }
                }
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the lane behind the parts that have come; the first ending stays.
    pub(crate) fn end(&self, ending: Ending) {
        lock(&self.state).end.get_or_insert(ending);
        self.changed.notify_all();
    }

    /// The next part, at the latest after [`SLICE`]; `Ok(None)` if none has come by then.
    pub(crate) fn next(&self) -> std::result::Result<Option<(Part, ZBytes)>, Ending> {
        let state = lock(&self.state);
        let waits = |state: &mut ReceiverState| state.parts.is_empty() && state.end.is_none();
        let (mut state, _) = self
            .changed
            .wait_timeout_while(state, SLICE, waits)
            .unwrap_or_else(PoisonError::into_inner);
        match (state.parts.pop_front(), &state.end) {
            (Some(part), _) => Ok(Some(part)),
            (None, Some(end)) => Err(end.clone()),
            (None, None) => Ok(None),
        }
    }

    /// Waits until the lane has ended, at most `timeout`.
    pub(crate) fn wait_for_end(&self, timeout: Duration) {
        let waits = |state: &mut ReceiverState| state.end.is_none();
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.state), timeout, waits);
        drop(waited);
    }

    /// Whether the lane was cut, so that not even the parts that have come are wanted.
    pub(crate) fn is_cut(&self) -> bool {
        lock(&self.state).end == Some(Ending::Cut)
    }

    /// The part's bytes are in their slot: gives the credit back, in steps of half a window.
    pub(crate) fn taken(&self) -> Result<()> {
        let mut state = lock(&self.state);
        state.taken += 1;
        let parts = state.taken + self.window;
        self.counts
            .credit
            .store(state.granted - state.taken, Ordering::Relaxed);
        if parts - state.granted < self.window.div_ceil(2) {
            return Ok(());
        }
        state.granted = parts;
        drop(state);
        self.send(&Message::Credit {
            lane: self.lane,
            parts,
        })
    }
}

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

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Instant;

    use warpipe::backend::testing::{Failing, Wrapped};
    use warpipe::{Domain, Publisher, SlotReturn, Subscriber};

    use super::*;
    use crate::options::Options;
    use crate::session;

    /// A wait that only a hang reaches.
    const LONG: Duration = Duration::from_secs(300);

    /// A domain of its own on the host, for the folder's life.
    pub(crate) fn options() -> (tempfile::TempDir, Arc<Options>) {
        let folder = tempfile::tempdir().unwrap();
        let domain = Domain::at(folder.path().join("domain")).unwrap();
        let options = Options::new(&domain, &Device::host());
        (folder, Arc::new(options))
    }

    /// A stream that does nothing until the sender is dropped.
    pub(crate) fn blocked(device: &Device) -> (Stream, Sender<()>) {
        let stream = device.stream().unwrap();
        let (go, wait) = channel();
        let work = move || {
            let _ = wait.recv();
        };
        stream.call(work).unwrap();
        (stream, go)
    }

    /// That a slot comes back, but not before a stream goes on.
    pub(crate) fn comes_back_behind(go: Sender<()>, returned: &SlotReturn) {
        assert!(!returned.is_back().unwrap(), "its stream still copies");
        drop(go);
        let start = Instant::now();
        while !returned.is_back().unwrap() {
            assert!(start.elapsed() < LONG, "it is not back");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_sample_with_a_copy_that_failed_or_was_given_up_is_released_behind_that_copy() {
        struct Unfinished;
        impl HostCopy for Unfinished {
            fn wait(self: Box<Self>) -> warpipe::Result<Vec<HostPiece>> {
                unreachable!("it is dropped")
            }
        }

        let (_folder, options) = options();
        let (_session, outbox) = session::alone(&options);
        let failing = Wrapped::new(Device::host().backend().clone(), Failing::default());
        let device = Device::from_backend(failing.clone());
        let publisher = Publisher::builder("a").domain(&options.domain);
        let publisher = publisher.device(&device).build().unwrap();
        let subscriber = Subscriber::builder("a").domain(&options.domain);
        let mut subscriber = subscriber.device(&device).build().unwrap();
        let sender = LaneSender::new([1; 16], [2; 16], outbox);
        sender.ready(0, WINDOW_MAX);
        let layout = Layout::bytes_only(8).unwrap();
        let receiving = device.stream().unwrap();
        for is_dropped in [false, true] {
            let (copying, go) = blocked(&device);
            let loan = publisher.loan(&layout).unwrap();
            let returned = loan.returned();
            loan.send(&receiving).unwrap();
            let sample = subscriber.receive(&receiving).unwrap();
            sample.wait(LONG).unwrap();
            let (tensor, address) = (
                Tensor::new(Tag::Job { number: 1 }, &layout, b""),
                sample.slot_ptr(),
            );
            // SAFETY: the sample is complete, and is the keeper.
            let content = unsafe { Content::device(address, 8, &copying, Some(sample)) };
            if is_dropped {
                let Content::Device(content) = content else {
                    unreachable!("as made")
                };
                drop(Copying {
                    copy: Some(Box::new(Unfinished)),
                    contents: vec![content],
                });
            } else {
                failing.hook().aim("download", 1);
                sender.send_tensor(tensor, &content, 8).unwrap_err();
                assert!(failing.hook().has_struck());
                drop(content);
            }
            comes_back_behind(go, &returned);
        }
    }
}
