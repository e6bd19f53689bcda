//! A received sample: a tensor in the publisher's memory, lent until it is released.

use std::sync::Arc;
use std::time::Duration;

use super::observer::Reply;
use super::publisher_link::{Admission, OpenMemory, PublisherLink};
use crate::backend::DevicePtr;
use crate::backend::zeroed;
use crate::clock::now_ns;
use crate::error::{Error, Result, StateFault};
use crate::memory::region::Region;
use crate::pubsub::entry::{CheckedEntry, Head, Metadata, Violation};
use crate::pubsub::parts::{self, Part};
use crate::runtime::fence::Fence;
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;

/// A break between a sample and the one received before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Discontinuity {
    /// How many samples are missing between this one and the one received before it. 0 on the first
    /// sample of another publisher: its numbers begin anew, unless both
    /// [forward](crate::PublisherOptions::forwards) one source, and the numbers go on.
    pub missing: u64,
    /// The publisher of the earlier samples, when it is another one than this sample's.
    pub previous: Option<PreviousPublisher>,
}

/// The publisher before the one that a subscriber follows now. See [`Discontinuity`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PreviousPublisher {
    /// Its process. One process may publish a name again.
    pub pid: i32,
    /// Whether it closed gracefully; otherwise it died, or the link to it ended first.
    pub graceful: bool,
}

/// Reports, after a sample has been released, whether its data was complete.
#[derive(Debug)]
pub struct Receipt {
    pub(super) link: Arc<PublisherLink>,
    pub(super) position: u64,
    pub(super) sequence: u64,
    /// Its data is complete, and its entry of the ring may have another sample.
    pub(super) is_set_aside: bool,
}

impl Receipt {
    /// Whether the data was complete; `Ok(false)` while that is not known yet.
    ///
    /// # Errors
    /// [`Error::Lost`]; [`Error::State`].
    pub fn check(&self) -> Result<bool> {
        self.link.owner_process().check()?;
        Ok(self.is_set_aside || self.link.completion(self.position, self.sequence)?)
    }

    /// Waits until the result is known.
    ///
    /// # Errors
    /// [`Error::Lost`]; [`Error::Timeout`]; [`Error::State`].
    pub fn wait<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        // The clock is read only if there is something to wait for.
        if self.check()? {
            return Ok(());
        }
        let (sequence, name) = (self.sequence, &self.link.terms.name);
        let what = || format!("the data of sample {sequence} of {name:?}");
        let sleep = |slice| self.wait_word(slice);
        wait.into().until(what, || self.check(), sleep)
    }

    /// Waits on the CPU until the data may be complete, or never will be, at most `limit`.
    pub(crate) fn wait_word(&self, limit: Duration) {
        let word = &self.link.segment.entry(self.position).ready;
        word.wait(self.position, limit, self.link.terms.device.is_gpu());
    }

    pub(crate) fn duplicate(&self) -> Receipt {
        Receipt {
            link: self.link.clone(),
            ..*self
        }
    }

    /// Releases the sample behind the stream's work.
    fn release(&self, stream: &Stream) -> Result<()> {
        if !self.is_set_aside {
            return self.link.release(self.position, stream);
        }
        stream.check_not_capturing()?;
        self.give_back_behind(stream);
        Ok(())
    }

    /// [Gives the sample back](Self::give_back) once `stream` is past the work that it has; one
    /// that is being captured, once the capture has ended and it is past the work that it had
    /// before.
    fn give_back_behind(&self, stream: &Stream) {
        self.link.record_use(stream);
        let mut fence = Fence::behind(stream);
        if fence.is_reached() {
            return self.give_back();
        }
        let receipt = self.duplicate();
        self.link
            .reactor()
            .call_after(fence, move || receipt.give_back());
    }

    /// Releases, once its data is complete, a sample that no stream reads.
    fn give_back(&self) {
        match self.is_set_aside {
            true => self.link.return_slot(self.position),
            false => self.link.give_back(self.position),
        }
    }
}

/// Where a sample's tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TensorLocation {
    InSlot,
    /// It, or a part of it, lies at a [place](super::place) that its metadata begins with, and is
    /// not open yet: its address is not the tensor's.
    Unopened,
    InPlace,
}

/// A sample that was taken from the ring. Dropped, it is released once its data is complete.
#[derive(Debug)]
pub(crate) struct RawSample {
    pub(super) receipt: Receipt,
    pub(super) address: DevicePtr,
    #[expect(dead_code, reason = "keeps it mapped, whatever the publisher says")]
    region: Arc<Region>,
    pub(super) layout: Arc<Layout>,
    pub(super) metadata: Metadata,
    /// Behind a pointer: a sample is moved often, and up to 128 bytes without a call.
    pub(super) rare: Option<Box<Rare>>,
    /// 0 for none.
    sent_ns: u64,
    is_released: bool,
    pub(super) location: TensorLocation,
}

impl RawSample {
    #[inline(always)]
    pub(super) fn new(receipt: Receipt, region: Arc<Region>, checked: CheckedEntry) -> RawSample {
        RawSample {
            receipt,
            address: region.ptr() + checked.slot,
            region,
            layout: checked.layout,
            metadata: checked.metadata,
            rare: None,
            sent_ns: checked.sent_ns,
            is_released: false,
            location: match checked.head {
                Head::Place => TensorLocation::Unopened,
                Head::None | Head::Parts => TensorLocation::InSlot,
            },
        }
    }

    /// Reads the list of its parts in front of its metadata.
    #[cold]
    pub(super) fn read_parts(&mut self) -> Result<(), Violation> {
        let list = parts::read(self.metadata.as_bytes(), self.address, self.layout.bytes())?;
        if list.places.iter().any(Option::is_some) {
            self.location = TensorLocation::Unopened;
        }
        let metadata = list.metadata();
        self.rare.get_or_insert_default().parts = list.parts;
        if self.location == TensorLocation::InSlot {
            self.metadata = metadata;
        }
        Ok(())
    }

    /// What lies elsewhere has been opened: its tensor at this address, or parts of it.
    pub(super) fn open_at(&mut self, address: DevicePtr, metadata: Metadata) {
        (self.address, self.metadata, self.location) = (address, metadata, TensorLocation::InPlace);
    }

    /// None if it is one tensor.
    pub(super) fn parts(&self) -> &[Part] {
        self.rare.as_ref().map_or(&[], |rare| &rare.parts)
    }

    /// A handle to wait for the data without keeping this sample.
    pub(crate) fn receipt(&self) -> Receipt {
        self.receipt.duplicate()
    }

    /// The sample, for a stream that waits for its data, or has nothing to wait for.
    // A sample is long: a call that hands it on copies it.
    #[inline(always)]
    pub(crate) fn into_sample(self, stream: &Stream) -> Sample {
        Sample {
            received_ns: if self.sent_ns == 0 { 0 } else { now_ns() },
            stream: stream.clone(),
            released_before: 0,
            raw: self,
        }
    }
}

impl Reply for RawSample {
    fn metadata(&self) -> &[u8] {
        self.metadata.as_bytes()
    }

    #[inline]
    fn is_complete(&self) -> Result<bool> {
        self.receipt.check()
    }

    fn make_room(&mut self) {
        let Receipt { link, position, .. } = &self.receipt;
        if !self.receipt.is_set_aside && link.is_crowded() {
            link.set_aside(*position);
            self.receipt.is_set_aside = true;
        }
    }
}

impl Drop for RawSample {
    #[inline]
    fn drop(&mut self) {
        if self.is_released {
            return;
        }
        let link = &self.receipt.link;
        match link.owner_process().is_current() {
            true => self.receipt.give_back(),
            // A forked child must not give up the parent's mappings and words.
            false => std::mem::forget(link.clone()),
        }
    }
}

/// What few samples have.
#[derive(Debug, Default)]
pub(crate) struct Rare {
    pub(super) discontinuity: Option<Discontinuity>,
    pub(super) parts: Vec<Part>,
    /// What keeps tensors mapped that do not lie in the slot.
    pub(super) memory: Vec<OpenMemory>,
}

/// What [`Sample::info`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SampleInfo {
    /// The break before this sample, if there is one: samples of its publisher are missing, by a
    /// policy that drops, [`skip_to`](crate::Publisher::skip_to), or the death of their sender; or
    /// with [`reconnect`](crate::SubscriberOptions::reconnect) it is the first sample of another
    /// incarnation, or of the same one after the link had ended. None on the first sample that a
    /// subscriber receives of its first publisher, whatever its number.
    pub discontinuity: Option<Discontinuity>,
    /// When the sample was sent, in nanoseconds of `CLOCK_MONOTONIC` (see
    /// [`crate::clock::now_ns`]), as stated by the sender; `None` from a publisher without
    /// [`timestamps`](crate::PublisherOptions::timestamps).
    pub sent_at_ns: Option<u64>,
    /// When the sample was received, in nanoseconds of `CLOCK_MONOTONIC`; `None` where
    /// `sent_at_ns` is.
    pub received_at_ns: Option<u64>,
    /// Whether it, or a part of it, lies in memory of its sender's own, which was [sent without a
    /// copy](crate::Publisher::loan_in). It is read and released as any other.
    pub is_in_place: bool,
}

/// A tensor in the publisher's memory. Kernels enqueued on the stream that it was received with
/// read complete data; dropping it gives the slot back behind that stream's work.
#[derive(Debug)]
#[must_use = "a sample that is dropped is released"]
pub struct Sample {
    pub(super) raw: RawSample,
    /// 0 for none.
    received_ns: u64,
    stream: Stream,
    /// The position in its link with a release that its stream got before it; 0 for none.
    pub(super) released_before: u64,
}

const _: () = assert!(size_of::<Sample>() <= 128, "its moves are calls of memmove");

impl Sample {
    /// The device address of the element with all indices 0. Memory that this process may only
    /// read.
    pub fn ptr(&self) -> DevicePtr {
        self.slot_ptr() + self.layout().offset()
    }

    /// The device address of the slot's first byte, or of the first byte of a tensor [in
    /// place](SampleInfo::is_in_place); it is `layout().bytes()` long.
    pub fn slot_ptr(&self) -> DevicePtr {
        self.raw.address
    }

    /// The tensor's layout.
    pub fn layout(&self) -> &Layout {
        &self.raw.layout
    }

    /// Its tensors, if it was [sent with several](crate::Publisher::loan_parts); else none. The
    /// sample's own layout and addresses are those of the slot then: of all parts that lie there.
    pub fn parts(&self) -> &[Part] {
        self.raw.parts()
    }

    /// The part of this name.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is none.
    pub fn part(&self, name: &str) -> Result<&Part> {
        parts::find(self.parts(), name)
    }

    /// The metadata bytes that were sent with the sample.
    pub fn metadata(&self) -> &[u8] {
        self.raw.metadata()
    }

    /// The sample's number among its publisher's samples, from 1. A gap in the numbers is samples
    /// that this subscriber did not get: [`discontinuity`](SampleInfo::discontinuity) counts them.
    pub fn sequence(&self) -> u64 {
        self.raw.receipt.sequence
    }

    /// What else is known of it.
    pub fn info(&self) -> SampleInfo {
        let known = |time: u64| Some(time).filter(|&time| time != 0);
        SampleInfo {
            discontinuity: self.raw.rare.as_ref().and_then(|rare| rare.discontinuity),
            sent_at_ns: known(self.raw.sent_ns),
            received_at_ns: known(self.received_ns),
            is_in_place: self.raw.location == TensorLocation::InPlace,
        }
    }

    /// The time between sending and receiving, if both are known. The sender states its time, which
    /// may be any number.
    #[inline]
    pub(super) fn latency_ns(&self) -> Option<u64> {
        let sent_ns = Some(self.raw.sent_ns).filter(|&sent| sent != 0)?;
        self.received_ns.checked_sub(sent_ns)
    }

    /// The stream that waits for the sample.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Makes another stream wait for the data, too (`cuStreamWaitValue64`): kernels enqueued on it
    /// from now on read complete data. Release the sample behind its work then: see
    /// [`release_on`](Self::release_on).
    ///
    /// # Errors
    /// [`Error::Lost`] when the sender died before the data was complete; [`Error::Argument`]
    /// for a stream of another device; [`Error::Driver`]; [`Error::State`].
    pub fn wait_on(&self, stream: &Stream) -> Result<()> {
        let Receipt { link, position, .. } = &self.raw.receipt;
        link.owner_process().check()?;
        stream.check_usable(self.stream.device())?;
        if self.raw.receipt.is_set_aside || link.admit(*position, stream, None)? != Admission::Lost
        {
            return Ok(());
        }
        Err(link.lost(self.sequence()))
    }

    /// Whether the data is complete, as the CPU sees it now.
    ///
    /// # Errors
    /// [`Error::Lost`]; [`Error::State`].
    pub fn is_complete(&self) -> Result<bool> {
        self.raw.receipt.check()
    }

    /// Waits on the CPU until the data is complete. Device work needs no such wait: its stream
    /// waits.
    ///
    /// # Errors
    /// [`Error::Lost`] when the sender died first; [`Error::Timeout`]; [`Error::State`].
    pub fn wait<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.raw.receipt.wait(wait)
    }

    /// Waits for the data and copies the whole slot (`layout().bytes()` bytes) to host memory.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); [`Error::Argument`] unless `bytes` is that long; [`Error::Driver`].
    pub fn copy_to<'w>(&self, bytes: &mut [u8], wait: impl Into<Wait<'w>>) -> Result<()> {
        self.download((self.slot_ptr(), self.layout()), bytes, wait)
    }

    /// [`copy_to`](Self::copy_to), of one part.
    ///
    /// # Errors
    /// As [`copy_to`](Self::copy_to) and [`part`](Self::part).
    pub fn copy_part_to<'w>(
        &self,
        name: &str,
        bytes: &mut [u8],
        wait: impl Into<Wait<'w>>,
    ) -> Result<()> {
        let part = self.part(name)?;
        self.download((part.slot_ptr, &part.layout), bytes, wait)
    }

    /// Copies a whole tensor, of this address and layout: the slot's, or that of one part.
    fn download<'w>(
        &self,
        (address, layout): (DevicePtr, &Layout),
        bytes: &mut [u8],
        wait: impl Into<Wait<'w>>,
    ) -> Result<()> {
        layout.check_length(bytes.len())?;
        self.wait(wait)?;
        if bytes.is_empty() {
            return Ok(());
        }
        // Not the user's stream: that may wait for other work, and this copy must not.
        let stream = self.raw.receipt.link.copies()?;
        // SAFETY: the stream is live and only ever copies; the slot lies inside the region, or the
        // tensor inside its memory (checked when it was received), which this sample keeps mapped.
        unsafe { stream.backend().download(stream.raw(), bytes, address)? };
        // A death in between cannot have torn the copy: the data was complete.
        Ok(())
    }

    /// [`copy_to`](Self::copy_to) a new vector.
    ///
    /// # Errors
    /// As [`copy_to`](Self::copy_to); [`Error::Limit`] when the host has no room for it.
    pub fn to_vec<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Vec<u8>> {
        let mut bytes = zeroed(self.layout().bytes())?;
        self.copy_to(&mut bytes, wait)?;
        Ok(bytes)
    }

    /// [`to_vec`](Self::to_vec) of one part.
    ///
    /// # Errors
    /// As [`to_vec`](Self::to_vec) and [`part`](Self::part).
    pub fn part_to_vec<'w>(&self, name: &str, wait: impl Into<Wait<'w>>) -> Result<Vec<u8>> {
        let mut bytes = zeroed(self.part(name)?.layout.bytes())?;
        self.copy_part_to(name, &mut bytes, wait)?;
        Ok(bytes)
    }

    /// Releases the sample behind the stream's work, then waits on the CPU until its data was
    /// complete, and reports whether the sender lived until then. Discard results that were
    /// computed from a lost sample.
    ///
    /// # Errors
    /// [`Error::Lost`]; [`Error::Timeout`]; [`Error::Driver`] when the release could not be
    /// enqueued.
    pub fn finish<'w>(self, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.release()?.wait(wait)
    }

    /// Releases the sample behind the stream's work and returns at once; the receipt can be asked
    /// later.
    ///
    /// # Errors
    /// [`Error::State`] while the stream is being captured, and the sample is released once the
    /// capture has ended and the stream is past the work that it had before, as if it were dropped
    /// now; [`Error::Driver`] when the release could not be enqueued; [`Error::State`].
    pub fn release(mut self) -> Result<Receipt> {
        let receipt = &self.raw.receipt;
        receipt.link.owner_process().check()?;
        // If this fails, the drop tries once more, and closes the link when that fails, too.
        receipt.release(&self.stream)?;
        let receipt = receipt.duplicate();
        self.raw.is_released = true;
        Ok(receipt)
    }

    /// Its position in the ring of this link, if its entry there is to be released.
    pub(super) fn position_in(&self, link: &PublisherLink) -> Option<u64> {
        let receipt = &self.raw.receipt;
        let is_there = !receipt.is_set_aside && std::ptr::eq(&*receipt.link, link);
        is_there.then_some(receipt.position)
    }

    /// Whether its stream may have come to the work behind the wait for it.
    pub(super) fn is_in_progress(&self) -> bool {
        let segment = &self.raw.receipt.link.segment;
        let before = self.released_before;
        (before == 0 || segment.entry(before).released.reached(before))
            && !matches!(self.is_complete(), Ok(false))
    }

    /// Its release is enqueued.
    pub(super) fn set_released(&mut self) {
        self.raw.is_released = true;
    }

    /// Releases the sample behind the work of another stream than the one it was received with,
    /// which must have been made to wait for that one first.
    ///
    /// # Errors
    /// As [`release`](Self::release); [`Error::Argument`] for a stream of another device, and the
    /// sample is released behind its own stream.
    pub fn release_on(mut self, stream: &Stream) -> Result<Receipt> {
        stream.check_of(self.stream.device())?;
        self.stream = stream.clone();
        self.release()
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        let receipt = &self.raw.receipt;
        if self.raw.is_released || !receipt.link.owner_process().is_current() {
            return;
        }
        match receipt.release(&self.stream) {
            Ok(()) => {}
            Err(error)
                if receipt.is_set_aside
                    || matches!(error, Error::State(StateFault::Capturing(_))) =>
            {
                receipt.give_back_behind(&self.stream);
            }
            // Without a release the publisher keeps the slot. Closing the link tells the publisher
            // so.
            Err(error) => receipt.link.fail(error),
        }
        self.raw.is_released = true;
    }
}
