//! The sleep and wake-up of a receiver. Sleeps have no limit here: a sleeper that is not woken
//! hangs.

use super::Socket;
use super::ring::packed;
use crate::pubsub::ring::{ReceiverRing, SenderRing, fence_published};
use crate::verify::models::Model;
use crate::verify::segment;

pub const RECEIVER: Model = Model {
    name: "a receiver that sleeps is woken by a sample",
    bound: 4,
    body: || receiver(publish),
};
pub const ONE_OF_MANY: Model = Model {
    name: "a receiver that sleeps is woken by a sample for several",
    bound: 4,
    body: || receiver(publish_to_one_of_many),
};
pub const NEWCOMER: Model = Model {
    name: "a receiver that sleeps is woken by its next sender",
    bound: 4,
    body: || newcomer(true),
};
/// As it was before a receiver told its new sender that it sleeps.
pub const UNTOLD: Model = Model {
    name: "a receiver that sleeps and does not say so is not woken",
    bound: 4,
    body: || newcomer(false),
};

fn publish(ring: &mut SenderRing, sequence: u64, socket: &Socket) {
    let Some(position) = ring.space() else {
        panic!("an empty ring")
    };
    if ring.publish(position, &packed(sequence), false) {
        socket.ring();
    }
}

/// As a sender with several receivers does.
fn publish_to_one_of_many(ring: &mut SenderRing, sequence: u64, socket: &Socket) {
    let Some(position) = ring.space() else {
        panic!("an empty ring")
    };
    ring.publish_to_one_of_many(position, &packed(sequence), false);
    fence_published();
    if ring.is_receiver_asleep() {
        socket.ring();
    }
}

/// As `Subscriber::receive` does.
fn receive(ring: &mut ReceiverRing, socket: &Socket) -> u64 {
    loop {
        ring.fall_asleep();
        let mut found = ring.take(|_| true).expect("an honest sender");
        if found.is_none() {
            socket.sleep();
            ring.wake_up();
            found = ring.take(|_| true).expect("an honest sender");
        }
        if let Some(position) = found {
            return position;
        }
    }
}

fn receiver(publish: fn(&mut SenderRing, u64, &Socket)) {
    let segment = segment(2);
    let (mut ring, socket) = (SenderRing::new(segment.clone()), Socket::new());
    let theirs = socket.clone();
    let thread = loom::thread::spawn(move || {
        let mut ring = ReceiverRing::new(segment);
        assert_eq!(receive(&mut ring, &theirs), 1);
        ring.wake_up();
        assert_eq!(receive(&mut ring, &theirs), 2);
    });
    publish(&mut ring, 1, &socket);
    publish(&mut ring, 2, &socket);
    thread.join().expect("the receiver");
}

/// A receiver with a polling loop, as in `Subscriber::receive` without a wait: it is asleep
/// whenever no call runs, and then its new sender's ring is there.
fn newcomer(tells: bool) {
    let segment = segment(1);
    let (mut ring, socket) = (SenderRing::new(segment.clone()), Socket::new());
    let theirs = socket.clone();
    let thread = loom::thread::spawn(move || {
        let mut ring = ReceiverRing::new(segment);
        if tells {
            ring.fall_asleep();
        }
        while ring.take(|_| true).expect("an honest sender").is_none() {
            theirs.sleep();
        }
    });
    publish(&mut ring, 1, &socket);
    thread.join().expect("the receiver");
}
