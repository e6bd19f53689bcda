//! The ring against a simple model: every order of a few steps, and two threads at full speed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::pubsub::entry::{Description, Metadata, PackedEntry};
use crate::pubsub::ring::{ReceiverRing, SenderRing};
use crate::shm::segment::Segment;
use crate::{Device, Layout};

/// One step of either end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The sender publishes the next sample if there is room; its data is complete at once.
    Send,
    /// The same, but the data is not complete before `Complete`.
    SendLate,
    /// The sender's stream completes the oldest incomplete sample.
    Complete,
    /// The sender takes the oldest complete sample back.
    Revoke,
    /// The receiver takes the next sample.
    Take,
    /// The receiver's stream releases the oldest sample held.
    ReleaseOldest,
    /// ... or the newest.
    ReleaseNewest,
}

const STEPS: [Step; 7] = [
    Step::Send,
    Step::SendLate,
    Step::Complete,
    Step::Revoke,
    Step::Take,
    Step::ReleaseOldest,
    Step::ReleaseNewest,
];

/// A link with its model beside it. Samples are known by their sequence number.
struct Play {
    sender: SenderRing,
    receiver: ReceiverRing,
    segment: Arc<Segment>,
    depth: usize,
    sequence: u64,
    /// Published, not taken, not revoked: (position, sequence, complete).
    waiting: Vec<(u64, u64, bool)>,
    /// Revoked or taken, and not complete.
    incomplete: Vec<u64>,
    /// Taken and not released: positions.
    held: Vec<u64>,
    last_taken: u64,
    last_position: u64,
}

impl Play {
    fn new(depth: u32) -> Play {
        let (segment, _fd) = Segment::create(&Device::host(), depth, [1; 16]).unwrap();
        let segment = Arc::new(segment);
        Play {
            sender: SenderRing::new(segment.clone()),
            receiver: ReceiverRing::new(segment.clone()),
            segment,
            depth: depth as usize,
            sequence: 0,
            waiting: Vec::new(),
            incomplete: Vec::new(),
            held: Vec::new(),
            last_taken: 0,
            last_position: 0,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Send => self.send(true),
            Step::SendLate => self.send(false),
            Step::Complete => self.complete(),
            Step::Revoke => self.revoke(),
            Step::Take => self.take(),
            Step::ReleaseOldest => self.release(0),
            Step::ReleaseNewest => self.release(self.held.len().saturating_sub(1)),
        }
    }

    fn send(&mut self, complete: bool) {
        let used: BTreeSet<u64> = self
            .waiting
            .iter()
            .map(|it| it.0)
            .chain(self.held.iter().copied())
            .chain(self.incomplete.iter().copied())
            .collect();
        match self.sender.space() {
            Some(position) => {
                assert!(position > self.last_position, "positions only grow");
                let lands_on = |other: &u64| (position - other).is_multiple_of(self.depth as u64);
                assert!(
                    !used.iter().any(lands_on),
                    "position {position} overwrites one of {used:?}"
                );
                self.sequence += 1;
                let packed = packed(self.sequence, 0, 0, &Metadata::EMPTY);
                self.sender.publish(position, &packed, false);
                self.last_position = position;
                self.waiting.push((position, self.sequence, complete));
                if complete {
                    self.segment.entry(position).ready.store(position)
                } else {
                    self.incomplete.push(position)
                }
            }
            // Full is right as long as an entry is in use; an empty ring has room.
            None => assert!(!used.is_empty(), "a ring that nobody uses is full"),
        }
    }

    fn complete(&mut self) {
        if self.incomplete.is_empty() {
            return;
        }
        let position = self.incomplete.remove(0);
        self.segment.entry(position).ready.store(position);
        self.waiting
            .iter_mut()
            .filter(|it| it.0 == position)
            .for_each(|it| it.2 = true);
    }

    fn revoke(&mut self) {
        let expected = self.waiting.iter().find(|it| it.2).map(|it| it.0);
        assert_eq!(self.sender.revoke_oldest_complete(), expected);
        self.waiting.retain(|it| Some(it.0) != expected);
        if let Some(position) = expected {
            let state_word = &self.segment.entry(position).state_word;
            assert!(self.sender.is_over(position) && state_word.load(Relaxed) == position << 2 | 2);
        }
    }

    fn take(&mut self) {
        match self.receiver.take(|_| true).unwrap() {
            Some(position) => {
                let (expected, sequence, _) = self.waiting.remove(0);
                assert_eq!(
                    position, expected,
                    "the oldest that is neither taken nor revoked"
                );
                let read = self.receiver.copy().check(1 << 20).unwrap();
                assert_eq!(read.sequence, sequence);
                assert!(
                    sequence > self.last_taken,
                    "order holds, and none comes twice"
                );
                self.last_taken = sequence;
                self.held.push(position);
                assert!(!self.sender.is_over(position));
            }
            None => assert!(
                self.waiting.is_empty(),
                "{:?} should have been found",
                self.waiting
            ),
        }
    }

    fn release(&mut self, index: usize) {
        // A receiver's stream releases behind its wait for `ready`.
        let Some(&position) = self
            .held
            .get(index)
            .filter(|position| !self.incomplete.contains(position))
        else {
            return;
        };
        self.held.remove(index);
        self.segment.entry(position).released.store(position);
        assert!(self.sender.is_over(position));
    }
}

fn packed(sequence: u64, sent_ns: u64, slot: u64, metadata: &Metadata) -> PackedEntry {
    let layout = &Layout::bytes_only(8).unwrap();
    Description {
        sequence,
        sent_ns,
        region: 0,
        slot,
        layout,
        metadata,
    }
    .packed()
}

fn play_all(depth: u32, length: u32) {
    let orders = (STEPS.len() as u64).pow(length);
    for order in 0..orders {
        let (mut play, mut rest) = (Play::new(depth), order);
        for _ in 0..length {
            play.step(STEPS[(rest % STEPS.len() as u64) as usize]);
            rest /= STEPS.len() as u64;
        }
        // Everything can be finished in any state, and then the ring is as good as new.
        while !play.incomplete.is_empty() {
            play.complete();
        }
        while !play.waiting.is_empty() {
            play.take();
        }
        while !play.held.is_empty() {
            play.release(0);
        }
        play.take();
        for _ in 0..depth {
            play.send(true);
        }
        assert_eq!(
            play.waiting.len(),
            depth as usize,
            "every entry is used again"
        );
        (0..depth).for_each(|_| play.take());
    }
}

#[test]
fn every_order_of_five_steps_on_a_ring_of_two_agrees_with_the_model() {
    play_all(2, 5);
}

#[test]
fn every_order_of_five_steps_on_rings_of_one_and_three_agrees_with_the_model() {
    play_all(1, 5);
    play_all(3, 5);
}

#[test]
fn long_random_plays_on_larger_rings_agree_with_the_model() {
    let mut random = warpipe_testkit::Rng::with_seed(7);
    for depth in [2, 3, 4, 7] {
        let mut play = Play::new(depth);
        for _ in 0..50_000 {
            play.step(STEPS[random.usize(..STEPS.len())]);
        }
        assert!(
            play.last_taken > 1000,
            "only {} samples arrived",
            play.last_taken
        );
    }
}

#[test]
fn under_drop_oldest_two_threads_lose_nothing_that_was_not_dropped() {
    let (segment, _fd) = Segment::create(&Device::host(), 8, [1; 16]).unwrap();
    let segment = Arc::new(segment);
    let done = AtomicBool::new(false);
    let (sent, dropped, received) = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| receive_all(&segment, &done));
        let (sent, dropped) = send_all(&segment);
        done.store(true, Relaxed);
        (sent, dropped, receiver.join().unwrap())
    });
    assert!(
        received.windows(2).all(|pair| pair[0] < pair[1]),
        "in order, none twice"
    );
    let (received, dropped): (BTreeSet<u64>, BTreeSet<u64>) = (
        received.into_iter().collect(),
        dropped.into_iter().collect(),
    );
    assert!(
        received.is_disjoint(&dropped),
        "none is dropped and received"
    );
    assert_eq!(
        received.len() + dropped.len(),
        sent as usize,
        "each is one of both"
    );
    assert!(!received.is_empty());
}

/// The contents of a sample's entry words: a reader of another sample's words would notice.
fn fingerprint(sequence: u64) -> (u64, u64, Metadata) {
    let metadata = Metadata::new(&[sequence as u8; 256]).unwrap();
    (sequence ^ 0xffff, 512 * (sequence % 100), metadata)
}

fn send_all(segment: &Arc<Segment>) -> (u64, Vec<u64>) {
    let (mut sender, mut sequence, mut dropped) = (SenderRing::new(segment.clone()), 0, Vec::new());
    let mut at = std::collections::HashMap::new();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(1) {
        for _ in 0..100 {
            sequence += 1;
            let mut room = sender.space();
            if room.is_none()
                && let Some(position) = sender.revoke_oldest_complete()
            {
                dropped.extend(at.remove(&position));
                room = sender.space();
            }
            match room {
                Some(position) => {
                    at.insert(position, sequence);
                    let (sent_ns, slot, metadata) = fingerprint(sequence);
                    let packed = packed(sequence, sent_ns, slot, &metadata);
                    sender.publish(position, &packed, false);
                    segment.entry(position).ready.store(position);
                }
                None => dropped.push(sequence),
            }
        }
    }
    (sequence, dropped)
}

fn receive_all(segment: &Arc<Segment>, done: &AtomicBool) -> Vec<u64> {
    let (mut receiver, mut received, mut held) =
        (ReceiverRing::new(segment.clone()), Vec::new(), Vec::new());
    loop {
        let last_look = done.load(Relaxed);
        match receiver.take(|_| true).unwrap() {
            Some(position) => {
                let read = receiver.copy().check(1 << 20).unwrap();
                let (sent_ns, slot, metadata) = fingerprint(read.sequence);
                assert_eq!((read.sent_ns, read.slot), (sent_ns, slot), "of one piece");
                assert_eq!(read.metadata.as_bytes(), metadata.as_bytes());
                received.push(read.sequence);
                held.push(position);
                // Some are held for a while, and released in another order than they came.
                if held.len() > (read.sequence % 4) as usize {
                    let position = held.swap_remove((read.sequence % held.len() as u64) as usize);
                    segment.entry(position).released.store(position);
                }
            }
            None if last_look => return received,
            None => std::hint::spin_loop(),
        }
    }
}
