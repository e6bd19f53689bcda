//! The samples of a link at its receiver: streams wait for their data, and release them.
//!
//! A sample with complete data can be *set aside*: its entry takes the next sample at once, and its
//! slot goes back with a message, once this process's streams are past it. So the depth of a ring
//! limits what is under way, and the publisher's memory alone what is kept. Senders of replies
//! allow it.

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use super::PublisherLink;
use crate::backend::StreamOp;
use crate::error::{Error, Loss, Result};
use crate::ipc::message::{self, Message};
use crate::memory::region::Kept;
use crate::mutex::LockUnpoisoned;
use crate::os::is_shortage;
use crate::pubsub::ring;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::reactor::DropReadiness;
use crate::stream::Stream;

/// The most positions in one message: a packet has 1024 bytes, a position at most 10.
const POSITIONS_MAX: usize = 64;

/// Memory that samples lie in, beside the regions of their link. It is unmapped once the link's
/// streams are past their work.
pub(in crate::pubsub) type OpenMemory = Arc<DropAfterFence<Kept>>;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct SetAside {
    /// How many samples are set aside and not on their way back.
    kept: AtomicUsize,
    /// Positions that the publisher is to be told of. Until there is none, the fence thread tries.
    due: Mutex<VecDeque<u64>>,
}

/// What a stream has to wait for before it reads a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pubsub) enum Admission {
    /// Nothing.
    Complete,
    /// The data; the wait is enqueued, behind the release of an earlier sample if there was one.
    Awaited,
    /// The publisher is dead, and the data never will be complete.
    Lost,
}

impl PublisherLink {
    /// Prepares `stream`, which was found [usable](Stream::check_usable) in the same user call, to
    /// read the sample at `position`: the stream waits until the data is complete, and `released`,
    /// an earlier position, is released in the same call of the driver.
    #[inline]
    pub(in crate::pubsub) fn admit(
        &self,
        position: u64,
        stream: &Stream,
        released: Option<u64>,
    ) -> Result<Admission> {
        if self.monitor.hold(position) {
            // No rescue follows: the state that a death between publishing and signalling left is
            // judged here.
            self.monitor.release_wait(position);
            return Ok(match self.monitor.has_lost(position) {
                true => Admission::Lost,
                false => Admission::Complete,
            });
        }
        // Work that is launched after the CPU has seen the word is ordered behind the data without
        // a wait on the device.
        if self.segment.entry(position).ready.reached(position) {
            return Ok(Admission::Complete);
        }
        let wait = StreamOp::Wait {
            word: self.segment.ready_word(position),
            value: position,
        };
        let release = released.map(|position| self.release_op(position));
        let ops = [release.unwrap_or(wait), wait];
        self.record_use(stream);
        // SAFETY: the words lie in the link segment, which is dropped only when this stream,
        // recorded above, is proven to be past them (`DropAfterFence`).
        unsafe { stream.batch_at_once(&ops[usize::from(release.is_none())..])? };
        Ok(Admission::Awaited)
    }

    /// Records that the sample at `position` is out of the ring and not admitted to any stream: if
    /// its sender dies first, [`completion`](Self::completion) reports the loss.
    pub(in crate::pubsub) fn keep(&self, position: u64) {
        if self.monitor.hold(position) {
            // A position that the rescue did not see is released here.
            self.monitor.release_wait(position);
        }
    }

    #[inline]
    pub(in crate::pubsub) fn record_use(&self, stream: &Stream) {
        self.streams().record_use(stream);
    }

    /// Keeps memory beside the regions mapped until this link's streams are past it.
    pub(in crate::pubsub) fn hold(&self, memory: Kept) -> Result<OpenMemory> {
        let held = DropAfterFence::new(self.streams().clone(), memory)?;
        Ok(Arc::new(held))
    }

    /// Enqueues the release of `position` behind the stream's work.
    pub(in crate::pubsub) fn release(&self, position: u64, stream: &Stream) -> Result<()> {
        let op = self.release_op(position);
        self.record_use(stream);
        // SAFETY: the word lies in the link segment, which is dropped only when this stream,
        // recorded above, is proven to be past it (`DropAfterFence`).
        unsafe { stream.batch(&[op])? };
        Ok(())
    }

    fn release_op(&self, position: u64) -> StreamOp {
        StreamOp::Signal {
            word: self.segment.released_word(position),
            value: position,
        }
    }

    /// Releases a sample that was given to no stream, once its data is complete. There is no time
    /// limit: the sender waits for the slot, and this end keeps the link for it.
    pub(in crate::pubsub) fn give_back(self: &Arc<Self>, position: u64) {
        if !self.release_if_complete(position) {
            self.try_until(move |me| me.release_if_complete(position));
        }
    }

    /// Has the fence thread call `done` until it returns true, however long the peer takes.
    fn try_until(self: &Arc<Self>, done: impl Fn(&PublisherLink) -> bool + Send + 'static) {
        let me = self.clone();
        self.reactor().drop_after(move || match done(&me) {
            false => DropReadiness::Held,
            true => DropReadiness::Ready,
        });
    }

    /// Releases a sample with the CPU if its data is complete. Returns whether it is.
    fn release_if_complete(&self, position: u64) -> bool {
        let entry = self.segment.entry(position);
        let is_complete = entry.ready.reached(position);
        if is_complete {
            entry.released.store(position);
        }
        is_complete
    }

    /// Whether the sample's data is complete; an error if it never will be.
    #[inline]
    pub(in crate::pubsub) fn completion(&self, position: u64, sequence: u64) -> Result<bool> {
        // `ready` first: a rescue, and a sender that gives up, mark the loss before the word is
        // stored.
        let reached = self.segment.entry(position).ready.reached(position);
        if self.monitor.has_lost(position) || ring::was_given_up(&self.segment, position) {
            return Err(self.lost(sequence));
        }
        Ok(reached)
    }

    /// The error for a sample with data that will never be complete.
    #[cold]
    pub(in crate::pubsub) fn lost(&self, sequence: u64) -> Error {
        Error::Lost(Loss::Sample {
            name: self.terms.name.clone(),
            sequence,
            pid: self.end.peer.pid,
        })
    }

    /// The stream for copies to the host. It only ever copies complete data, so it never waits for
    /// anything but other copies.
    pub(in crate::pubsub) fn copies(&self) -> Result<&Stream> {
        if let Some(stream) = self.copies.get() {
            return Ok(stream);
        }
        let made = self.terms.device.stream()?;
        let stream = self.copies.get_or_init(|| made);
        // A copy that was not done in time goes on: the memory stays mapped until it is.
        self.record_use(stream);
        Ok(stream)
    }

    /// Whether samples hold more than half of the ring's entries, or about so many: whatever else
    /// holds a part of the link counts, too.
    pub(in crate::pubsub) fn is_crowded(self: &Arc<Self>) -> bool {
        let in_the_ring = Arc::strong_count(self).saturating_sub(self.set_aside.kept.load(Relaxed));
        in_the_ring > self.segment.depth() as usize / 2
    }

    /// Gives the entry of a sample with complete data back, and keeps its slot. No stream waits for
    /// the sample or has been given its release.
    pub(in crate::pubsub) fn set_aside(&self, position: u64) {
        self.set_aside.kept.fetch_add(1, Relaxed);
        ring::set_aside(&self.segment, position);
    }

    /// Returns the slot of a sample that was set aside.
    pub(in crate::pubsub) fn return_slot(self: &Arc<Self>, position: u64) {
        self.set_aside.kept.fetch_sub(1, Relaxed);
        let mut due = self.set_aside.due.locked();
        due.push_back(position);
        if due.len() > 1 || self.send_returns(&mut due) {
            return;
        }
        // The publisher does not read now: another try, for all that are due by then.
        self.try_until(|me| me.send_returns(&mut me.set_aside.due.locked()));
    }

    /// Tells the publisher of all slots that are due. False if it has to be tried again.
    fn send_returns(&self, due: &mut VecDeque<u64>) -> bool {
        while !due.is_empty() {
            let next = due.len().min(POSITIONS_MAX);
            let positions = due.range(..next).copied().collect();
            let message = Message::Returned { positions };
            match message::send(self.end.socket(), &message, &[]) {
                Err(Errno::AGAIN) => return false,
                Err(error) if is_shortage(error) => return false,
                // The publisher that has gone needs no slot.
                Ok(()) | Err(_) => due.drain(..next),
            };
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::{Duration, Instant};

    use crate::device::Device;
    use crate::error::{Error, StateFault};
    use crate::ipc::Kind;
    use crate::ipc::domain::Domain;
    use crate::pubsub::{
        Policy, Publisher, PublisherOptions, PublisherRole, RawSample, Reply, Subscriber,
    };
    use crate::stream::Stream;
    use crate::tensor::Layout;

    const SOON: Duration = Duration::from_secs(10);
    const DEPTH: u32 = 4;

    struct Scene {
        folder: PathBuf,
        publisher: Publisher,
        subscriber: Subscriber,
        stream: Stream,
    }

    impl Scene {
        fn new(title: &str, kind: Kind) -> Scene {
            let folder =
                std::env::temp_dir().join(format!("warpipe-aside-{title}-{}", std::process::id()));
            let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
            let publishing = PublisherOptions {
                depth: DEPTH,
                policy: Policy::Fail,
                ..domain.on(&device)
            };
            let publisher = Publisher::with_role("a", publishing, PublisherRole::of(kind)).unwrap();
            let subscriber =
                Subscriber::to_kind("a", domain.on(&device), (kind, false), Duration::ZERO);
            Scene {
                publisher,
                subscriber: subscriber.unwrap(),
                stream: device.stream().unwrap(),
                folder,
            }
        }

        fn send(&self) -> Result<u64, Error> {
            let loan = self.publisher.loan(&Layout::bytes_only(8).unwrap())?;
            loan.send(&self.stream).map_err(Error::from)
        }

        fn take(&mut self) -> RawSample {
            self.send().unwrap();
            let start = Instant::now();
            loop {
                // Its region may have to be mapped first.
                if let Some(arrival) = self.subscriber.take_raw_sample().unwrap() {
                    return arrival;
                }
                assert!(start.elapsed() < SOON);
                std::thread::yield_now();
            }
        }

        fn in_flight(&self) -> u32 {
            self.publisher.subscribers()[0].in_flight
        }
    }

    impl Drop for Scene {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    #[test]
    fn a_sample_that_is_set_aside_holds_its_slot_and_no_entry_until_it_is_dropped() {
        let mut scene = Scene::new("slot", Kind::Results);
        let mut kept: Vec<RawSample> = Vec::new();
        for _ in 0..10 * DEPTH {
            let mut arrival = scene.take();
            assert!(arrival.is_complete().unwrap());
            arrival.make_room();
            kept.push(arrival);
        }
        assert_eq!(scene.in_flight(), 10 * DEPTH);
        // Half of them are given to a stream and released behind it, the others never leave.
        let stream = scene.stream.clone();
        for (index, arrival) in kept.drain(..).enumerate() {
            if index % 2 == 0 {
                let sample = arrival.into_sample(&stream);
                sample.wait_on(&stream).unwrap();
                let receipt = sample.release().unwrap();
                assert!(receipt.check().unwrap());
            }
        }
        let start = Instant::now();
        while scene.in_flight() > 0 {
            assert!(start.elapsed() < SOON, "{} are not back", scene.in_flight());
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_publisher_of_samples_keeps_no_slot_beyond_its_depth() {
        let mut scene = Scene::new("samples", Kind::Publisher);
        let mut kept: Vec<RawSample> = Vec::new();
        for _ in 0..2 * DEPTH {
            let mut arrival = scene.take();
            arrival.make_room();
            kept.push(arrival);
        }
        assert!(scene.in_flight() <= DEPTH, "{}", scene.in_flight());
    }

    #[test]
    fn a_subscriber_that_returns_what_it_has_not_set_aside_loses_its_link() {
        for kind in [Kind::Results, Kind::Publisher] {
            let mut scene = Scene::new("false", kind);
            let arrival = scene.take();
            arrival.receipt.link.return_slot(1);
            let end = scene.subscriber.receive(&scene.stream, SOON);
            let Err(Error::State(StateFault::LinkClosed { reason, .. })) = end else {
                panic!("{end:?}");
            };
            assert!(reason.contains("one that was set aside"), "{reason}");
        }
    }
}
