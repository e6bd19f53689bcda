//! The ring of a link: the owner of each sample, and that an entry's words are never torn.

use std::sync::Arc;

use crate::pubsub::entry::{Description, Metadata, PackedEntry};
use crate::pubsub::ring::{ReceiverRing, SenderRing};
use crate::shm::segment::Segment;
use crate::tensor::Layout;
use crate::verify::models::Model;
use crate::verify::segment;

pub const ONE_PIECE: Model = Model {
    name: "a sample that is taken is of one piece",
    bound: 4,
    body: || one_piece(false),
};
pub const ONE_PIECE_FOR_MANY: Model = Model {
    name: "a sample for several that is taken is of one piece",
    bound: 4,
    body: || one_piece(true),
};
pub const REVOKED: Model = Model {
    name: "a sample is taken or taken back",
    bound: 2,
    body: revoked,
};
pub const STEPPED_OVER: Model = Model {
    name: "an entry that is held is stepped over",
    bound: 4,
    body: stepped_over,
};
pub const DROPPED: Model = Model {
    name: "the dead reader's entries are used again",
    bound: 4,
    body: dropped,
};

/// Which end begins.
const SENDER: bool = true;
const RECEIVER: bool = false;

pub(super) fn packed(sequence: u64) -> PackedEntry {
    let layout = &Layout::bytes_only(8).expect("eight bytes");
    let (sent_ns, slot) = (sequence ^ 0xff, 512 * sequence);
    Description {
        sequence,
        sent_ns,
        region: 0,
        slot,
        layout,
        metadata: &Metadata::EMPTY,
    }
    .packed()
}

struct Sender {
    /// It publishes as a sender with several receivers does.
    is_for_many: bool,
    ring: SenderRing,
    segment: Arc<Segment>,
    sequence: u64,
    /// By position: the sequence number.
    published: Vec<(u64, u64)>,
    revoked: Vec<u64>,
}

impl Sender {
    fn new(segment: &Arc<Segment>) -> Sender {
        let ring = SenderRing::new(segment.clone());
        Sender {
            is_for_many: false,
            ring,
            segment: segment.clone(),
            sequence: 0,
            published: Vec::new(),
            revoked: Vec::new(),
        }
    }

    /// Publishes the next sample, with complete data, if there is room.
    fn send(&mut self) {
        if let Some(position) = self.ring.space() {
            self.sequence += 1;
            // As a stream that is done at once, and as one that is done later.
            let is_complete = self.sequence % 2 == 0;
            let packed = packed(self.sequence);
            if self.is_for_many {
                self.ring
                    .publish_to_one_of_many(position, &packed, is_complete);
            } else {
                self.ring.publish(position, &packed, is_complete);
            }
            self.published.push((position, self.sequence));
            if !is_complete {
                self.segment.entry(position).ready.store(position);
            }
        }
    }

    fn revoke(&mut self) {
        if let Some(position) = self.ring.revoke_oldest_complete() {
            let sequence = self
                .published
                .iter()
                .find(|(at, _)| *at == position)
                .expect("published")
                .1;
            self.revoked.push(sequence);
        }
    }
}

struct Receiver {
    ring: ReceiverRing,
    segment: Arc<Segment>,
    taken: Vec<u64>,
    held: Vec<u64>,
}

impl Receiver {
    fn new(segment: &Arc<Segment>) -> Receiver {
        let ring = ReceiverRing::new(segment.clone());
        Receiver {
            ring,
            segment: segment.clone(),
            taken: Vec::new(),
            held: Vec::new(),
        }
    }

    fn take(&mut self) -> bool {
        let Some(position) = self.ring.take(|_| true).expect("an honest sender") else {
            return false;
        };
        let read = self.ring.copy().check(1 << 20).expect("of one piece");
        assert_eq!(
            (read.sent_ns, read.slot),
            (read.sequence ^ 0xff, 512 * read.sequence),
            "of one piece"
        );
        assert!(
            self.taken.last().is_none_or(|&last| last < read.sequence),
            "in order, and none twice"
        );
        self.taken.push(read.sequence);
        self.held.push(position);
        true
    }

    fn release(&mut self) {
        for position in self.held.drain(..) {
            self.segment.entry(position).released.store(position);
        }
    }
}

/// Runs both ends, then takes what is left: each sample that was published was taken or taken back.
fn play(
    depth: u32,
    first: bool,
    before: impl Fn(&mut Sender, &mut Receiver),
    send: impl Fn(&mut Sender) + 'static,
    receive: impl Fn(&mut Receiver) + 'static,
) {
    let segment = segment(depth);
    let (mut sender, mut receiver) = (Sender::new(&segment), Receiver::new(&segment));
    before(&mut sender, &mut receiver);
    let begin_sender = move || {
        loom::thread::spawn(move || {
            send(&mut sender);
            sender
        })
    };
    let begin_receiver = move || {
        loom::thread::spawn(move || {
            receive(&mut receiver);
            receiver
        })
    };
    let (sender, receiver) = if first == SENDER {
        let sender = begin_sender();
        (sender, begin_receiver())
    } else {
        let receiver = begin_receiver();
        (begin_sender(), receiver)
    };
    let (mut sender, mut receiver) = (
        sender.join().expect("the sender"),
        receiver.join().expect("the receiver"),
    );
    while receiver.take() {}
    let mut all: Vec<u64> = receiver
        .taken
        .iter()
        .chain(&sender.revoked)
        .copied()
        .collect();
    all.sort_unstable();
    assert_eq!(
        all,
        (1..=sender.sequence).collect::<Vec<_>>(),
        "each is taken or taken back, and once"
    );
    receiver.release();
    sender.send();
    assert!(receiver.take(), "and the ring goes on");
}

fn one_piece(is_for_many: bool) {
    play(
        1,
        RECEIVER,
        |sender, _| sender.is_for_many = is_for_many,
        |sender| (0..3).for_each(|_| sender.send()),
        |receiver| {
            receiver.take();
            receiver.release();
            receiver.take();
        },
    );
}

fn revoked() {
    play(
        1,
        SENDER,
        |_, _| {},
        |sender| {
            sender.send();
            sender.revoke();
            sender.send();
        },
        |receiver| {
            receiver.take();
            receiver.take();
        },
    );
}

fn stepped_over() {
    play(
        2,
        RECEIVER,
        |sender, receiver| {
            sender.send();
            sender.send();
            // Held to the end.
            assert!(receiver.take());
            receiver.held.clear();
        },
        |sender| (0..2).for_each(|_| sender.send()),
        |receiver| {
            receiver.take();
            receiver.release();
            receiver.take();
        },
    );
}

/// The reader dies with what it has taken: the sender uses its entries again, and no others before.
fn dropped() {
    let segment = segment(1);
    let mut sender = Sender::new(&segment);
    sender.send();
    let thread = loom::thread::spawn(move || {
        sender.send();
        assert_eq!(sender.sequence, 1, "an entry that nobody has released");
        sender
    });
    let mut receiver = Receiver::new(&segment);
    receiver.take();
    let (mut sender, held) = (thread.join().expect("the sender"), receiver.held.len());
    sender.ring.mark_receiver_dead();
    sender.revoke();
    assert_eq!(sender.revoked.len(), 1 - held);
    sender.send();
    assert_eq!(sender.sequence, 2);
}
