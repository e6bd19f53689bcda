//! One name, exported to one peer: an ordinary subscriber here, and a lane to the peer.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use warpipe::{DeviceKind, Error as Local, ErrorKind, Layout, Loss, Sample, Stream, Subscriber};

use crate::error::{Error, Result};
use crate::lane::{Content, LaneCounts, LaneSender, Outgoing, SLICE};
use crate::message::{BATCH_MAX, BATCH_METADATA_BYTES_MAX, End, Id, Message, Purpose, Tag, Tensor};
use crate::options::{Options, Policy};

/// The largest sample that goes with others in one part: a larger one is worth a message.
const SMALL: u64 = 128 << 10;

/// How long a peer may take to take a lane.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// The samples that were sent to a home, by their source: a new run of the bridge there gets none
/// of them again.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Sent {
    pub(crate) generation: Id,
    pub(crate) sequence: u64,
}

/// What an export needs.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) name: String,
    pub(crate) options: Arc<Options>,
    pub(crate) sender: Arc<LaneSender>,
    pub(crate) sent: Arc<Mutex<Sent>>,
}

/// The samples that are held for the peer.
#[derive(Debug, Default)]
struct Held {
    samples: VecDeque<Sample>,
    bytes: u64,
    is_over: bool,
}

impl Held {
    fn push(&mut self, sample: Sample) {
        self.bytes = self.bytes.saturating_add(bytes_of(&sample));
        self.samples.push_back(sample);
    }

    fn pop(&mut self) -> Option<Sample> {
        let sample = self.samples.pop_front()?;
        self.bytes = self.bytes.saturating_sub(bytes_of(&sample));
        Some(sample)
    }

    /// The next sample, and those behind it that go with it in one part: small and complete.
    fn pop_batch(&mut self, part_bytes: usize) -> Vec<Sample> {
        let mut batch = Vec::from_iter(self.pop());
        let mut bytes = match batch.first() {
            Some(first) if is_small(first) => first.layout().bytes(),
            _ => return batch,
        };
        while let Some(next) = self.samples.front() {
            bytes += next.layout().bytes();
            let fits = is_small(next) && bytes <= part_bytes as u64;
            if !fits || batch.len() == BATCH_MAX || !matches!(next.is_complete(), Ok(true)) {
                break;
            }
            batch.extend(self.pop());
        }
        batch
    }
}

#[derive(Debug, Default)]
struct Shelf {
    held: Mutex<Held>,
    changed: Condvar,
    is_over: AtomicBool,
}

impl Export {
    /// Runs until the source or the lane has ended. Returns how the lane ended at this end.
    pub(crate) fn run(&self) -> Result<End> {
        let end = self.export();
        let told = match &end {
            Ok(end) => end.clone(),
            // This says nothing of the source.
            Err(_) => End::Paused,
        };
        let lane = self.sender.lane;
        let _ = self.sender.send(&Message::End { lane, end: told });
        self.sender.end("the export has ended");
        end
    }

    fn export(&self) -> Result<End> {
        let device = &self.options.device;
        let mut subscriber =
            Subscriber::open(&self.name, self.options.domain.on(device), Duration::ZERO)?;
        let generation = subscriber.publisher_source().unwrap_or_default();
        let (name, lane) = (self.name.clone(), self.sender.lane);
        let purpose = Purpose::Samples { name, generation };
        self.sender.send(&Message::Begin { lane, purpose })?;
        let Some(after) = self.sender.wait_ready(READY_TIMEOUT) else {
            return Ok(End::Paused);
        };
        let before = *self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = if before.generation == generation {
            before.sequence
        } else {
            0
        };
        let after = after.max(sent);
        let (receiving, copying) = (device.stream()?, device.stream()?);
        let shelf = Shelf::default();
        std::thread::scope(|scope| {
            let sending = std::thread::Builder::new().name("bridge-send".into());
            let sending = sending.spawn_scoped(scope, || {
                let result = self.send_held(&shelf, &copying, generation);
                shelf.is_over.store(true, Ordering::Release);
                shelf.changed.notify_all();
                result
            });
            let sending = sending.map_err(|source| Error::Thread {
                purpose: "an export",
                source,
            })?;
            let end = self.receive(&mut subscriber, &receiving, &shelf, after);
            // A publisher that waits for its subscribers does not wait for a send over a lost link.
            drop(subscriber);
            let is_failure = matches!(end, Ok(End::Failed(_)) | Err(_));
            shelf
                .held
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .is_over = true;
            shelf.changed.notify_all();
            if is_failure {
                self.sender.end("the export failed");
            }
            match sending.join() {
                Ok(result) => result.and(end),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Takes samples from the publisher until it has gone or the lane has ended.
    fn receive(
        &self,
        subscriber: &mut Subscriber,
        stream: &Stream,
        shelf: &Shelf,
        after: u64,
    ) -> Result<End> {
        let mut last = after;
        loop {
            if self.sender.ended().is_some() || shelf.is_over.load(Ordering::Acquire) {
                return Ok(End::Paused);
            }
            if self.options.policy == Policy::Block && !self.wait_for_room(shelf) {
                continue;
            }
            let sample = match subscriber.receive(stream, SLICE) {
                Ok(sample) => sample,
                // One waits for the owner of its memory, or is missing before the next one.
                Err(error) if error.kind() == ErrorKind::Timeout => continue,
                Err(error) if error.is_of_one_sample() => continue,
                Err(Local::PeerGone { graceful, .. }) => {
                    return Ok(if graceful { End::Closed } else { End::Died });
                }
                Err(error) => return Err(error.into()),
            };
            if sample.sequence() <= after {
                continue;
            }
            if last > 0 {
                let missing = sample.sequence().saturating_sub(last.saturating_add(1));
                LaneCounts::add(&self.sender.counts.missing, missing);
            }
            last = sample.sequence();
            if let Some(end) = self.hold(shelf, sample) {
                return Ok(end);
            }
        }
    }

    /// Whether there is room for one more sample, at the latest after a slice.
    fn wait_for_room(&self, shelf: &Shelf) -> bool {
        let held = shelf.held.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_full(&held) {
            return true;
        }
        let waits = |held: &mut Held| self.is_full(held) && !shelf.is_over.load(Ordering::Acquire);
        let waited = shelf.changed.wait_timeout_while(held, SLICE, waits);
        let (held, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !self.is_full(&held)
    }

    /// Whether no more samples are held. With `block` one is on its way, and one behind it hides
    /// the time until the publisher's next; of small ones as many as go in one part.
    fn is_full(&self, held: &Held) -> bool {
        let count = held.samples.len();
        match self.options.policy {
            Policy::Block if self.options.held_max > 1 => {
                let part_bytes = self.options.part_bytes as u64;
                count >= 2 && (count >= BATCH_MAX || held.bytes >= part_bytes)
            }
            Policy::Block | Policy::DropOldest | Policy::DropNewest | Policy::Fail => {
                count >= self.options.held_max
            }
        }
    }

    /// Keeps a sample for the sender, by the policy. An end for the policy that ends the lane.
    fn hold(&self, shelf: &Shelf, sample: Sample) -> Option<End> {
        let mut held = shelf.held.lock().unwrap_or_else(PoisonError::into_inner);
        let (is_full, was_empty) = (self.is_full(&held), held.samples.is_empty());
        let mut dropped = None;
        match self.options.policy {
            Policy::DropOldest if is_full => {
                dropped = held.pop();
                held.push(sample);
            }
            Policy::DropNewest if is_full => dropped = Some(sample),
            Policy::Fail if is_full => {
                let reason = format!(
                    "{} samples wait for room at the importer",
                    held.samples.len()
                );
                return Some(End::Failed(reason));
            }
            Policy::Block | Policy::DropOldest | Policy::DropNewest | Policy::Fail => {
                held.push(sample);
            }
        }
        drop(held);
        if dropped.is_some() {
            LaneCounts::add(&self.sender.counts.dropped, 1);
        }
        // The sender waits only while nothing is held.
        if was_empty {
            shelf.changed.notify_all();
        }
        None
    }

    /// Sends what is held, in order, until the lane has ended and nothing is left.
    fn send_held(&self, shelf: &Shelf, stream: &Stream, generation: Id) -> Result<()> {
        let mut outgoing = Outgoing::new(&self.sender);
        loop {
            // Nothing follows at once: what is on its way from the device waits for nothing else.
            if !outgoing.is_empty() && !self.is_next_ready(shelf) {
                outgoing.flush()?;
            }
            // A sample leaves the shelf when it can go: until then the policy may still drop it.
            if !self.sender.wait_credit(SLICE) {
                if self.sender.ended().is_some() {
                    return Ok(());
                }
                continue;
            }
            let held = shelf.held.lock().unwrap_or_else(PoisonError::into_inner);
            let waits = |held: &mut Held| held.samples.is_empty() && !held.is_over;
            let waited = shelf.changed.wait_timeout_while(held, SLICE, waits);
            let (mut held, _) = waited.unwrap_or_else(PoisonError::into_inner);
            let (was_full, is_over) = (self.is_full(&held), held.is_over);
            let batch = held.pop_batch(self.options.part_bytes);
            drop(held);
            if was_full {
                shelf.changed.notify_all();
            }
            if batch.is_empty() {
                if is_over || self.sender.ended().is_some() {
                    return outgoing.flush();
                }
            } else if !self.send_batch(batch, &mut outgoing, stream, generation)? {
                return Ok(());
            }
        }
    }

    /// Whether a sample is held that can go now.
    fn is_next_ready(&self, shelf: &Shelf) -> bool {
        let held = shelf.held.lock().unwrap_or_else(PoisonError::into_inner);
        let is_complete = |sample: &Sample| matches!(sample.is_complete(), Ok(true));
        let is_ready = held.samples.front().is_some_and(is_complete);
        drop(held);
        is_ready && self.sender.wait_credit(Duration::ZERO)
    }

    /// Whether a sample goes over the link: its data is proven complete. `None` once the lane has
    /// ended.
    fn is_sendable(&self, sample: &Sample) -> Result<Option<bool>> {
        loop {
            match sample.wait(SLICE) {
                Ok(()) => break,
                Err(Local::Timeout { .. }) if self.sender.ended().is_none() => {}
                Err(Local::Timeout { .. }) => return Ok(None),
                // Its number is missing there, and so it is counted.
                Err(Local::Lost(Loss::Sample { .. })) => return Ok(Some(false)),
                Err(error) => return Err(error.into()),
            }
        }
        if layout_of(sample)?.bytes() > self.options.tensor_bytes_max {
            LaneCounts::add(&self.sender.counts.dropped, 1);
            return Ok(Some(false));
        }
        Ok(Some(true))
    }

    /// Sends samples: one, or several small ones. Says whether the lane goes on.
    fn send_batch<'a>(
        &self,
        batch: Vec<Sample>,
        outgoing: &mut Outgoing<'a>,
        stream: &'a Stream,
        generation: Id,
    ) -> Result<bool> {
        // The samples before one that cannot be read are sent, and the error is told then.
        let (mut samples, mut failure) = (Vec::with_capacity(batch.len()), None);
        for sample in batch {
            match self.is_sendable(&sample) {
                Ok(None) => return Ok(false),
                Ok(Some(false)) => {}
                Ok(Some(true)) => samples.push(sample),
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let goes_on = self.send_complete(samples, outgoing, stream, generation)?;
        let Some(error) = failure else {
            return Ok(goes_on);
        };
        outgoing.flush()?;
        Err(error)
    }

    fn send_complete<'a>(
        &self,
        samples: Vec<Sample>,
        outgoing: &mut Outgoing<'a>,
        stream: &'a Stream,
        generation: Id,
    ) -> Result<bool> {
        let Some(last) = samples.last().map(Sample::sequence) else {
            return Ok(true);
        };
        if self.sender.ended().is_some() {
            return Ok(false);
        }
        // Before the first part: a part that may have arrived is never sent again.
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        // The lane before this one may still send what it held.
        let before = match sent.generation == generation {
            true => sent.sequence,
            false => 0,
        };
        *sent = Sent {
            generation,
            sequence: last.max(before),
        };
        drop(sent);
        let mut tensors = describe(&samples)?;
        let is_host = self.options.device.info().id.kind == DeviceKind::Host;
        let content = |sample: Sample| match is_host {
            _ if sample.info().is_in_place && !sample.parts().is_empty() => gathered(&sample),
            true => Ok(host_content(sample)),
            false => Ok(device_content(sample, stream)),
        };
        let mut contents: Vec<Content<'a>> =
            samples.into_iter().map(content).collect::<Result<_>>()?;
        if contents.len() > 1 {
            return outgoing.batch(tensors, contents);
        }
        match (tensors.pop(), contents.pop()) {
            (Some(tensor), Some(content)) => {
                outgoing.tensor(tensor, &content, self.options.part_bytes)
            }
            _ => Ok(true),
        }
    }
}

/// Whether a sample goes with others in one part.
fn is_small(sample: &Sample) -> bool {
    sample.layout().bytes() <= SMALL
        && sample.metadata().len() <= BATCH_METADATA_BYTES_MAX
        && sample.parts().is_empty()
}

/// The bytes that a sample keeps from its publisher: of several tensors those in the slot, and
/// those in place.
fn bytes_of(sample: &Sample) -> u64 {
    let in_place = sample.parts().iter().filter(|part| part.is_in_place);
    let bytes = in_place.map(|part| part.layout.bytes());
    bytes.fold(sample.layout().bytes(), u64::saturating_add)
}

/// The layout of the bytes that go over the link: of several tensors as they lie in a slot.
fn layout_of(sample: &Sample) -> warpipe::Result<Layout> {
    if sample.parts().is_empty() {
        return Ok(*sample.layout());
    }
    let (_, bytes) = warpipe::lay_out_parts(sample.parts().iter().map(|part| &part.layout))?;
    Layout::bytes_only(bytes)
}

/// The bytes of several complete tensors, of which some do not lie in their slot.
fn gathered(sample: &Sample) -> Result<Content<'static>> {
    let layouts = sample.parts().iter().map(|part| &part.layout);
    let (offsets, bytes) = warpipe::lay_out_parts(layouts)?;
    let mut slot = vec![0; bytes as usize];
    for (part, offset) in sample.parts().iter().zip(offsets) {
        let bytes = sample.part_to_vec(&part.name, Duration::ZERO)?;
        slot[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    Ok(Content::Host(slot.into()))
}

/// The descriptions of samples that go in one part.
fn describe(samples: &[Sample]) -> Result<Vec<Tensor>> {
    let mut before = None;
    let describe = |sample: &Sample| {
        let (layout, metadata) = (layout_of(sample)?, sample.metadata());
        let tag = Tag::Sample {
            sequence: sample.sequence(),
        };
        Ok(match before.replace(layout) {
            Some(before) if before == layout => Tensor::of_same_layout(tag, metadata),
            _ => Tensor::new(tag, &layout, metadata).with_several(sample.parts()),
        })
    };
    samples.iter().map(describe).collect()
}

/// The bytes of a complete sample on a device: the sample is released when they have been copied.
fn device_content(sample: Sample, stream: &Stream) -> Content<'_> {
    let (address, bytes) = (sample.slot_ptr(), sample.layout().bytes());
    // SAFETY: the data is complete, and the sample, which the content keeps, keeps its slot mapped
    // and unwritten until it is released.
    unsafe { Content::device(address, bytes, stream, Some(sample)) }
}

/// The bytes of a complete sample on the host, where they lie: the sample is released when they have
/// been sent.
fn host_content(sample: Sample) -> Content<'static> {
    Content::Host(Bytes::from_owner(SlotBytes(sample)))
}

/// A complete sample on the host, as bytes.
struct SlotBytes(Sample);

impl AsRef<[u8]> for SlotBytes {
    fn as_ref(&self) -> &[u8] {
        let (address, bytes) = (self.0.slot_ptr(), self.0.layout().bytes());
        if bytes == 0 {
            return &[];
        }
        let start = std::ptr::with_exposed_provenance(address as usize);
        // SAFETY: the address is one of this process, in a region that the sample keeps mapped; the
        // slot is as long (checked when it was received), and its publisher writes it again only
        // when the sample has been released. One that breaks this garbles its own bytes: they are
        // copied, and nothing else depends on them.
        unsafe { std::slice::from_raw_parts(start, bytes as usize) }
    }
}

#[cfg(test)]
mod tests {
    use warpipe::{Device, Domain, Memory, Publisher};

    use super::*;

    #[test]
    fn what_is_held_counts_the_bytes_of_parts_in_place() {
        let folder = tempfile::tempdir().unwrap();
        let domain = Domain::at(folder.path().join("domain")).unwrap();
        let device = Device::host();
        let stream = device.stream().unwrap();
        let publisher = Publisher::new("a", domain.on(&device)).unwrap();
        let mut subscriber = Subscriber::open("a", domain.on(&device), Duration::ZERO).unwrap();
        let memory = Memory::allocate(&device, 8192).unwrap();
        let memory = memory.publish("memory", domain.options()).unwrap();
        let [few, many] = [100, 8192].map(|bytes| Layout::bytes_only(bytes).unwrap());
        let mut loan = publisher.loan_parts(&[("copied", few)]).unwrap();
        loan.add_part_in("in place", &memory, 0, &many, ()).unwrap();
        loan.send(&stream).unwrap();
        let mut held = Held::default();
        held.push(subscriber.receive(&stream, READY_TIMEOUT).unwrap());
        assert_eq!(held.bytes, 100 + 8192);
        assert!(held.pop().is_some());
        assert_eq!(held.bytes, 0);
    }
}
