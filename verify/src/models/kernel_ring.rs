//! Kernel rings: a slot is read whole, and written again only when it has been released.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::host_ring::{HostRing, RingEnd};
use super::layout::{self, WORDS_BYTES, block, peer};
use crate::atomic::AtomicU64;
use crate::verify::models::Model;

pub const WHOLE: Model = Model {
    name: "an item is read whole, and its slot is written again behind its release",
    bound: 3,
    body: whole,
};
pub const EVERY_CONSUMER: Model = Model {
    name: "a slot is written again when every consumer has released it",
    bound: 2,
    body: every_consumer,
};
pub const SHARED: Model = Model {
    name: "an item that two blocks write is published when both have",
    bound: 3,
    body: shared,
};
pub const SHARED_AGAIN: Model = Model {
    name: "the next item that two blocks write in the same slot is published when both have",
    bound: 2,
    body: shared_again,
};
pub const ENDED: Model = Model {
    name: "what was published before the end counts",
    bound: 3,
    body: ended,
};

/// The looks of a wait: a model ends where a wait would go on.
const SPINS: u64 = 2;
/// Words of a slot that are written and read.
const PAYLOAD: usize = 2;

/// Memory of one process: zeroed words.
struct Words(Vec<AtomicU64>);

impl Words {
    fn new(bytes: u64) -> Words {
        Words((0..bytes / 8).map(|_| AtomicU64::new(0)).collect())
    }

    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn at(&self, offset: u64) -> &AtomicU64 {
        &self.0[offset as usize / 8]
    }

    /// A number of a parameter block, which no thread writes later.
    fn put(&self, offset: u64, value: u64) {
        let word = std::ptr::from_ref(self.at(offset)).cast_mut().cast::<u64>();
        // SAFETY: a word of this memory, and no other thread has it yet.
        unsafe { word.write(value) };
    }
}

/// A ring of one slot.
struct Ring {
    slot: Words,
    producer: Words,
    consumers: Vec<Words>,
    /// Where the producer spins for each consumer, and where each consumer spins.
    words: Vec<[Words; 2]>,
    /// The stop word, and the word that says that the producer has ended.
    stop: Words,
}

impl Ring {
    fn new(consumers: usize) -> Arc<Ring> {
        let ring = Ring {
            slot: Words::new(8 * PAYLOAD as u64),
            producer: Words::new(block::BYTES),
            consumers: (0..consumers).map(|_| Words::new(block::BYTES)).collect(),
            words: (0..consumers)
                .map(|_| [Words::new(WORDS_BYTES), Words::new(WORDS_BYTES)])
                .collect(),
            stop: Words::new(16),
        };
        for params in ring.consumers.iter().chain([&ring.producer]) {
            ring.describe(params);
        }
        ring.producer.put(block::PEERS, consumers as u64);
        for (index, [released, published]) in ring.words.iter().enumerate() {
            let at = block::PEER + index as u64 * peer::BYTES;
            ring.producer.put(at + peer::MINE, released.address());
            ring.producer.put(at + peer::THEIRS, published.address());
            ring.producer.put(at + peer::GONE, ring.stop.address() + 8);
            ring.producer.at(at + peer::LOST).touch();
            let consumer = &ring.consumers[index];
            consumer.put(block::ROLE, layout::CONSUMER);
            consumer.put(block::PEERS, 1);
            consumer.put(block::PEER + peer::MINE, published.address());
            consumer.put(block::PEER + peer::THEIRS, released.address());
            consumer.put(block::PEER + peer::GONE, ring.stop.address() + 8);
            released.at(0).touch();
            published.at(0).touch();
        }
        ring.slot.0.iter().for_each(AtomicU64::touch);
        ring.stop.0.iter().for_each(AtomicU64::touch);
        Arc::new(ring)
    }

    fn describe(&self, params: &Words) {
        for (offset, value) in [
            (block::LAYOUT, layout::LAYOUT),
            (block::DEPTH, 1),
            (block::SLOT_BYTES, 128),
            (block::SPINS_MAX, SPINS),
            (block::LOOK_EVERY, 1),
            (block::SLOTS, self.slot.address()),
            (block::STOP, self.stop.address()),
        ] {
            params.put(offset, value);
        }
        params.at(block::CURSOR).touch();
        params.at(block::ARRIVALS).touch();
    }

    fn producer(&self) -> HostRing {
        // SAFETY: the block is whole, and this lives as long as every thread.
        unsafe { HostRing::new(self.producer.address()) }
    }

    fn consumer(&self, index: usize) -> HostRing {
        // SAFETY: as above.
        unsafe { HostRing::new(self.consumers[index].address()) }
    }

    fn write(&self, item: u64) {
        for word in &self.slot.0 {
            word.store(item + 10, Relaxed);
        }
    }

    fn read(&self, item: u64) {
        for word in &self.slot.0 {
            assert_eq!(word.load(Relaxed), item + 10, "of item {item}");
        }
    }

    /// Takes items until a wait ends.
    fn consume(&self, index: usize, items: u64) {
        let side = self.consumer(index);
        for item in 0..items {
            if side.wait(item).is_err() {
                return;
            }
            self.read(item);
            side.pass(item);
        }
    }

    fn produce(&self, items: u64) {
        let side = self.producer();
        for item in 0..items {
            if side.wait(item).is_err() {
                return;
            }
            self.write(item);
            side.pass(item);
        }
    }
}

fn whole() {
    let ring = Ring::new(1);
    let theirs = ring.clone();
    let reader = loom::thread::spawn(move || theirs.consume(0, 2));
    ring.produce(2);
    reader.join().expect("the consumer");
}

fn every_consumer() {
    let ring = Ring::new(2);
    let (one, other) = (ring.clone(), ring.clone());
    let one = loom::thread::spawn(move || one.consume(0, 1));
    let other = loom::thread::spawn(move || other.consume(1, 1));
    ring.produce(2);
    one.join().expect("one consumer");
    other.join().expect("the other consumer");
}

fn shared() {
    let ring = Ring::new(1);
    let (reader, other) = (ring.clone(), ring.clone());
    let reader = loom::thread::spawn(move || reader.consume(0, 1));
    let part = |ring: &Ring, index: usize| {
        ring.producer().wait(0).expect("a slot that is free");
        ring.slot.0[index].store(10, Relaxed);
        ring.producer().arrive(0, 2);
    };
    let other = loom::thread::spawn(move || part(&other, 1));
    part(&ring, 0);
    reader.join().expect("the consumer");
    other.join().expect("the other block");
    assert_eq!(ring.producer().position(), 1);
}

/// Two items in one slot: what counts the blocks begins anew.
fn shared_again() {
    let ring = Ring::new(1);
    let (reader, other) = (ring.clone(), ring.clone());
    let reader = loom::thread::spawn(move || reader.consume(0, 2));
    let part = |ring: &Ring, index: usize| {
        for item in 0..2 {
            if ring.producer().wait(item).is_err() {
                return;
            }
            ring.slot.0[index].store(item + 10, Relaxed);
            ring.producer().arrive(item, 2);
        }
    };
    let other = loom::thread::spawn(move || part(&other, 1));
    part(&ring, 0);
    reader.join().expect("the consumer");
    other.join().expect("the other block");
}

/// The producer publishes, and its end is told: a consumer that is told has seen the item first.
fn ended() {
    let ring = Ring::new(1);
    let theirs = ring.clone();
    let reader = loom::thread::spawn(move || {
        let side = theirs.consumer(0);
        match side.wait(0) {
            Ok(()) => theirs.read(0),
            Err(end) => assert_eq!(end, RingEnd::SpinLimit),
        }
    });
    ring.produce(1);
    ring.stop.at(8).store(RingEnd::Died as u64, Release);
    reader.join().expect("the consumer");
}
