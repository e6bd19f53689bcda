//! The rescue: a publisher is proven dead while its sample is being sent.

use std::sync::Arc;
use std::time::Duration;

use super::monitor::PublisherMonitor;
use crate::shm::segment::Segment;
use crate::verify::models::Model;
use crate::verify::segment;

pub const LET_GO: Model = Model {
    name: "a stream that waits for the dead is let go",
    bound: 4,
    body: let_go,
};
pub const WHOLE: Model = Model {
    name: "what was complete counts, and what was not is lost",
    bound: 4,
    body: || whole(true),
};
pub const LOST: Model = Model {
    name: "what was not complete is lost to everybody",
    bound: 4,
    body: || whole(false),
};

const POSITION: u64 = 1;

fn monitor(segment: &Arc<Segment>) -> Arc<PublisherMonitor> {
    let monitor = PublisherMonitor::new(segment);
    // Its words are made.
    monitor.hold(0);
    let _ = monitor.has_lost(POSITION);
    Arc::new(monitor)
}

/// As `PublisherLink::admit` does: whether the sample is handed out.
fn admit(monitor: &PublisherMonitor) -> bool {
    if monitor.hold(POSITION) {
        monitor.release_wait(POSITION);
        return !monitor.has_lost(POSITION);
    }
    true
}

/// As `PublisherLink::completion`: `None` if it is lost.
fn completion(monitor: &PublisherMonitor, segment: &Segment) -> Option<bool> {
    let reached = segment.entry(POSITION).ready.reached(POSITION);
    if monitor.has_lost(POSITION) {
        None
    } else {
        Some(reached)
    }
}

fn await_ready(segment: &Segment) {
    while !segment.entry(POSITION).ready.reached(POSITION) {
        segment.entry(POSITION).ready.park(POSITION, Duration::MAX);
    }
}

fn let_go() {
    let segment = segment(1);
    let monitor = monitor(&segment);
    let reactor = monitor.clone();
    let thread = loom::thread::spawn(move || {
        reactor.rescue();
    });
    if admit(&monitor) {
        await_ready(&segment);
        assert_eq!(
            completion(&monitor, &segment),
            None,
            "its data was never complete"
        );
    }
    thread.join().expect("the reactor");
}

/// The proof comes behind all that the publisher did; `is_complete` says whether that was all of
/// it.
fn whole(is_complete: bool) {
    let segment = segment(1);
    let monitor = monitor(&segment);
    let (reactor, words) = (monitor.clone(), segment.clone());
    let thread = loom::thread::spawn(move || {
        if is_complete {
            words.entry(POSITION).ready.store(POSITION);
        }
        reactor.rescue();
    });
    let is_handed_out = admit(&monitor);
    if is_handed_out {
        await_ready(&segment);
    }
    let found = if is_handed_out {
        completion(&monitor, &segment)
    } else {
        None
    };
    assert_eq!(found, is_complete.then_some(true));
    thread.join().expect("the reactor");
}
