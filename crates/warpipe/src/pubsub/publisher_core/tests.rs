//! Other threads of a publisher make progress while the driver blocks one thread's send; numbers
//! that a publisher skips; slots that are lent again.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::memory::{RECLAIM_EVERY, SHORT_BYTES_MAX};
use crate::backend::testing::{Counting, Holding, Wrapped};
use crate::device::Device;
use crate::error::{Error, LimitFault, StateFault};
use crate::fuzzing::packet;
use crate::hostile::{alone, in_a_forked_child, send_raw};
use crate::ipc::Kind;
use crate::ipc::connection::ConnectionUser;
use crate::ipc::domain::Domain;
use crate::ipc::message::{self, CloseReason, Message};
use crate::pubsub::PublisherRole;
use crate::pubsub::entry::Metadata;
use crate::pubsub::{
    Forwarded, LinkReceiver, REPLIES, RawSample, Reply, ReplyLink, SubscriberChanges,
};
use crate::runtime::reactor::{Next, Reactor};
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;
use crate::{PeerState, Policy, Publisher, PublisherOptions, Subscriber, SubscriberInfo};

const LONG: Duration = Duration::from_secs(60);

/// A publisher on a device with calls that can be blocked.
struct Stage {
    folder: PathBuf,
    domain: Domain,
    wrapped: Arc<Wrapped<Holding>>,
    device: Device,
}

impl Stage {
    fn new(title: &str) -> Stage {
        let folder =
            std::env::temp_dir().join(format!("warpipe-core-{title}-{}", std::process::id()));
        let wrapped = Wrapped::new(Device::host().backend().clone(), Holding::default());
        let device = Device::from_backend(wrapped.clone());
        Stage {
            domain: Domain::at(&folder).unwrap(),
            folder,
            wrapped,
            device,
        }
    }

    fn hook(&self) -> &Holding {
        self.wrapped.hook()
    }

    fn options(&self) -> PublisherOptions {
        self.domain.on(&self.device)
    }

    fn publisher(&self) -> Publisher {
        Publisher::new("a", self.options()).unwrap()
    }

    /// A subscriber with calls that are never blocked.
    fn subscriber(&self) -> Subscriber {
        self.subscriber_to((Kind::Publisher, false))
    }

    fn subscriber_to(&self, role: (Kind, bool)) -> Subscriber {
        Subscriber::to_kind("a", self.domain.on(&Device::host()), role, Duration::ZERO).unwrap()
    }

    fn stream(&self) -> Stream {
        self.device.stream().unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn layout() -> Layout {
    Layout::bytes_only(8).unwrap()
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_send_waits_for_another_threads_as_long_as_it_is_told_to_and_gives_the_loan_back_unharmed() {
    let stage = Stage::new("turn");
    let (publisher, mut subscriber) = (stage.publisher(), stage.subscriber());
    let first = stage.stream();
    let second = stage.stream();
    let receiving = Device::host().stream().unwrap();
    let mut other = publisher.loan(&layout()).unwrap();
    other.write(&second, &[2; 8]).unwrap();
    stage.hook().hold("batch");
    let other = std::thread::scope(|scope| {
        let sending = scope.spawn(|| publisher.send_bytes(&first, &[1; 8]));
        stage.hook().wait_for(1);
        let timeouts = [Duration::ZERO, Duration::from_millis(20)];
        let other = timeouts.into_iter().fold(other, |other, timeout| {
            let unsent = other.send_within(&second, timeout).unwrap_err();
            assert!(
                matches!(unsent.error, Error::Timeout { waited, .. } if waited == timeout),
                "{unsent}"
            );
            *unsent.returned.unwrap()
        });
        stage.hook().unblock();
        assert_eq!(sending.join().unwrap().unwrap(), 1);
        other
    });
    assert_eq!(other.send_within(&second, LONG).unwrap(), 2);
    for sequence in [1, 2] {
        let sample = subscriber.receive(&receiving, LONG).unwrap();
        assert_eq!(
            (sample.sequence(), sample.to_vec(LONG).unwrap()),
            (sequence, vec![sequence as u8; 8])
        );
        sample.finish(LONG).unwrap();
    }
}

#[test]
fn late_joiners_of_a_history_that_is_not_complete_are_let_in_and_get_it_without_the_driver() {
    let stage = Stage::new("history");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            history: 4,
            ..stage.options()
        },
    )
    .unwrap();
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    let gates = [1, 2].map(|value| {
        publisher.send_bytes(&sending, &[value; 8]).unwrap();
        let (go, gate) = channel::<()>();
        sending.call(move || assert!(gate.recv().is_err())).unwrap();
        go
    });
    for value in [3, 4] {
        publisher.send_bytes(&sending, &[value; 8]).unwrap();
    }
    stage.hook().hold("batch");
    drop(stage.subscriber());
    let mut subscribers = [stage.subscriber(), stage.subscriber()];
    let is_alive = |one: &&SubscriberInfo| one.state == PeerState::Alive;
    eventually("the leaving subscriber is seen to leave", || {
        publisher.subscribers().iter().filter(is_alive).count() == 2
    });
    let samples = subscribers
        .each_mut()
        .map(|late| [1, 2, 3, 4].map(|_| late.receive(&receiving, LONG).unwrap()));
    for [first, rest @ ..] in &samples {
        assert!(
            first.is_complete().unwrap()
                && rest.iter().all(|sample| !sample.is_complete().unwrap())
        );
    }
    let [go, go_on] = gates;
    drop(go);
    for [_, second, third, _] in &samples {
        second.wait(LONG).unwrap();
        assert!(!third.is_complete().unwrap());
    }
    drop(go_on);
    for (value, sample) in samples.into_iter().flat_map(|samples| (1..=4).zip(samples)) {
        assert_eq!(
            (sample.sequence(), sample.to_vec(LONG).unwrap()),
            (value.into(), vec![value; 8])
        );
        sample.finish(LONG).unwrap();
    }
    eventually("and is forgotten", || publisher.subscribers().len() == 2);
    stage.hook().unblock();
    publisher.send_bytes(&sending, &[5; 8]).unwrap();
    for subscriber in &mut subscribers {
        assert_eq!(
            subscriber
                .receive(&receiving, LONG)
                .unwrap()
                .to_vec(LONG)
                .unwrap(),
            [5; 8]
        );
    }
}

#[test]
fn a_wait_for_a_subscriber_that_joins_during_a_send_ends_with_the_send() {
    let stage = Stage::new("joins");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            history: 1,
            ..stage.options()
        },
    )
    .unwrap();
    let sending = stage.stream();
    stage.hook().hold("batch");
    std::thread::scope(|scope| {
        scope.spawn(|| publisher.send_bytes(&sending, &[1; 8]));
        stage.hook().wait_for(1);
        let _subscriber = stage.subscriber();
        let waiting = scope.spawn(|| publisher.wait_for_subscribers(1, 2 * LONG));
        // Meanwhile that one has begun.
        let found = publisher.wait_for_subscribers(1, Duration::from_millis(200));
        assert!(matches!(found, Err(Error::Timeout { .. })), "{found:?}");
        stage.hook().unblock();
        eventually("it goes on", || waiting.is_finished());
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_publisher_that_is_dropped_completes_what_late_joiners_have_of_its_history() {
    let stage = Stage::new("left-history");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            history: 1,
            ..stage.options()
        },
    )
    .unwrap();
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    let (go, gate) = channel::<()>();
    sending.call(move || assert!(gate.recv().is_err())).unwrap();
    publisher.send_bytes(&sending, &[7; 8]).unwrap();
    let sample = stage.subscriber().receive(&receiving, LONG).unwrap();
    drop(publisher);
    assert!(!sample.is_complete().unwrap());
    drop(go);
    assert_eq!(sample.to_vec(LONG).unwrap(), [7; 8]);
    sample.finish(LONG).unwrap();
}

#[test]
fn a_child_forked_while_a_thread_has_the_publishers_lock_may_ask_its_loan_anything() {
    let stage = Stage::new("fork-hold");
    let publisher = stage.publisher();
    let loan = publisher.loan(&layout()).unwrap();
    let core = loan.core.clone();
    let locked = core.lock();
    in_a_forked_child(|| {
        let (hold, returned) = (loan.hold(), loan.returned());
        drop(hold);
        matches!(returned.is_back(), Err(Error::State(StateFault::Forked)))
    });
    drop(locked);
    assert!(!loan.returned().is_back().unwrap());
}

#[test]
fn a_slot_is_forwarded_once_its_data_is_complete_and_no_other_thread_sends() {
    let stage = Stage::new("forward");
    let observer = Arc::new(SubscriberChanges::new().unwrap());
    let options = PublisherOptions {
        depth: 1,
        ..stage.options()
    };
    let publisher = Publisher::with_role("a", options, observed(&observer, 0)).unwrap();
    let (mut subscriber, metadata) = (stage.subscriber(), Metadata::default());
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    let (go, gate) = channel::<()>();
    sending.call(move || assert!(gate.recv().is_err())).unwrap();
    let mut loan = publisher.loan(&layout()).unwrap();
    loan.write(&sending, &[3; 8]).unwrap();
    let (retained, _) = loan.post(None, &metadata, &sending).unwrap();
    let id = publisher.linked_subscribers()[0].id;
    let forward = || retained.forward(id, &metadata).unwrap();
    assert_eq!(forward(), Forwarded::NotYet);
    drop(go);
    eventually("it is filled", || {
        let state = publisher.core.lock();
        let fence = state.arena.fence_of(retained.slot);
        publisher.core.fences.is_reached(retained.slot, fence)
    });
    let sends = publisher.core.send_lock.try_lock().unwrap();
    assert_eq!(forward(), Forwarded::NotYet);
    drop(sends);
    assert_eq!(forward(), Forwarded::At(1));
    assert_eq!(forward(), Forwarded::NoRoom);
    let sample = subscriber.receive(&receiving, LONG).unwrap();
    assert_eq!(sample.to_vec(LONG).unwrap(), [3; 8]);
    sample.finish(LONG).unwrap();
}

#[test]
fn a_child_forked_while_a_thread_has_the_publishers_lock_drops_every_handle_and_changes_nothing() {
    let stage = Stage::new("fork-drop");
    let (observer, metadata) = (Arc::new(SubscriberChanges::new().unwrap()), Metadata::EMPTY);
    let role = observed(&observer, 0);
    let publisher = Publisher::with_role("a", stage.options(), role).unwrap();
    let mut subscriber = stage.subscriber();
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    let mut loan = publisher.loan(&layout()).unwrap();
    loan.write(&sending, &[3; 8]).unwrap();
    let (retained, _) = loan.post(None, &metadata, &sending).unwrap();
    let id = publisher.linked_subscribers()[0].id;
    for value in [1, 2] {
        publisher.send_bytes(&sending, &[value; 8]).unwrap();
    }
    let sample = subscriber.receive(&receiving, LONG).unwrap();
    let mut raw = None;
    eventually("the second sample is there", || {
        raw = subscriber.take_raw_sample().unwrap();
        raw.is_some()
    });
    let core = Arc::clone(&publisher.core);
    let mut handles = Some((publisher, retained, sample, raw.unwrap(), subscriber));
    let locked = core.lock();
    in_a_forked_child(|| {
        drop(handles.take());
        true
    });
    drop(locked);
    let (publisher, retained, sample, raw, mut subscriber) = handles.unwrap();
    assert_eq!(sample.to_vec(LONG).unwrap(), [1; 8]);
    let second = raw.into_sample(&receiving);
    assert_eq!(second.to_vec(LONG).unwrap(), [2; 8]);
    assert_eq!(retained.forward(id, &metadata).unwrap(), Forwarded::At(3));
    let third = subscriber.receive(&receiving, LONG).unwrap();
    assert_eq!(third.to_vec(LONG).unwrap(), [3; 8]);
    assert_eq!(publisher.subscribers()[0].in_flight, 3);
    for sample in [sample, second, third] {
        sample.finish(LONG).unwrap();
    }
    eventually("all are released", || {
        publisher.subscribers()[0].in_flight == 0
    });
}

struct Stuck(Receiver<()>);

impl Drop for Stuck {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}

#[test]
fn memory_outlives_the_work_of_a_hold_that_is_dropped_between_the_last_fence_and_the_end() {
    let test =
        "memory_outlives_the_work_of_a_hold_that_is_dropped_between_the_last_fence_and_the_end";
    alone(module_path!(), test, || {
        let wrapped = Wrapped::new(Device::host().backend().clone(), Counting::default());
        let device = Device::from_backend(wrapped.clone());
        let released = || {
            let calls = wrapped.hook().calls();
            calls.get("release").copied().unwrap_or(0)
        };
        let folder = std::env::temp_dir().join(format!("warpipe-held-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let publisher = Publisher::new("a", domain.on(&device)).unwrap();
        let (stream, mut loan) = (device.stream().unwrap(), publisher.loan(&layout()).unwrap());
        loan.write(&stream, &[1; 8]).unwrap();
        let hold = loan.hold();
        let reactor = Reactor::of_process().unwrap();
        let (go, wait) = channel();
        reactor.defer_drop(Box::new(Stuck(wait)));
        drop((loan, publisher));
        eventually("the streams are past the publisher", || {
            reactor.counts().0 == 0
        });
        let (finish, unfinished) = channel::<()>();
        stream.call(move || _ = unfinished.recv()).unwrap();
        drop(hold);
        drop(go);
        // The reaper drops in order: this is dropped after the publisher.
        let (last, is_dropped) = channel::<()>();
        reactor.defer_drop(Box::new(last));
        assert!(is_dropped.recv().is_err());
        assert_eq!(released(), 0, "the hold's stream may still touch it");
        drop(finish);
        eventually("it is released", || released() == 1);
        let _ = std::fs::remove_dir_all(folder);
    });
}

#[test]
fn a_forwarder_gives_the_numbers_that_it_skips_to_and_no_number_twice() {
    let stage = Stage::new("forwarder");
    let options = PublisherOptions {
        forwards: Some([7; 16]),
        history: 2,
        ..stage.options()
    };
    let publisher = Publisher::new("a", options).unwrap();
    let (mut early, stream) = (stage.subscriber(), stage.stream());
    let send = || publisher.send_bytes(&stream, b"a sample").unwrap();
    assert_eq!(send(), 1);
    publisher.skip_to(5).unwrap();
    assert_eq!(send(), 5);
    for given in [0, 1, 5, u64::MAX] {
        let refused = publisher.skip_to(given).unwrap_err().to_string();
        assert!(refused.contains("6 to "), "{given}: {refused}");
    }
    publisher.skip_to(6).unwrap();
    publisher.skip_to(9).unwrap();
    publisher.skip_to(7).unwrap_err();
    assert_eq!(send(), 9);
    let mut late = stage.subscriber();
    let next = |subscriber: &mut Subscriber| {
        let sample = subscriber.receive(&stream, LONG).unwrap();
        let missing = sample.info().discontinuity.map(|gap| gap.missing);
        (sample.sequence(), missing)
    };
    let received = [(); 3].map(|()| next(&mut early));
    assert_eq!(received, [(1, None), (5, Some(3)), (9, Some(3))]);
    let received = [(); 2].map(|()| next(&mut late));
    assert_eq!(received, [(5, None), (9, Some(3))]);
    assert_eq!((early.dropped(), late.dropped()), (0, 0));
}

#[test]
fn a_publisher_that_forwards_nothing_refuses_to_skip_and_its_numbers_follow_each_other() {
    let stage = Stage::new("no-forwarder");
    let (publisher, stream) = (stage.publisher(), stage.stream());
    let refused = publisher.skip_to(5).unwrap_err();
    assert!(matches!(refused, Error::Argument { .. }), "{refused:?}");
    assert!(
        refused.to_string().contains("the option `forwards`"),
        "{refused}"
    );
    let mut subscriber = stage.subscriber();
    for number in 1..=2 {
        publisher.send_bytes(&stream, b"a sample").unwrap();
        let sample = subscriber.receive(&stream, LONG).unwrap();
        assert_eq!(sample.sequence(), number);
    }
}

#[test]
fn two_publishers_of_one_name_and_process_are_two_sources() {
    let stage = Stage::new("sources");
    let sources = [(); 2].map(|()| {
        let _publisher = stage.publisher();
        let (one, other) = (stage.subscriber(), stage.subscriber());
        assert_eq!(one.publisher_source(), other.publisher_source());
        one.publisher_source().unwrap()
    });
    assert_ne!(sources[0], sources[1]);
}

/// Sends 100 samples of `bytes`, each of which is released before the next loan. Returns the number
/// of slots that were used.
fn slots_used(stage: &Stage, publisher: &Publisher, bytes: u64) -> usize {
    let mut subscriber = stage.subscriber();
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    let layout = Layout::bytes_only(bytes).unwrap();
    let slots = (0..100).map(|_| {
        let loan = publisher.loan(&layout).unwrap();
        let slot = loan.slot_ptr();
        loan.send(&sending).unwrap();
        sending.synchronize(LONG).unwrap();
        drop(subscriber.receive(&receiving, LONG).unwrap());
        receiving.synchronize(LONG).unwrap();
        slot
    });
    slots.collect::<BTreeSet<_>>().len()
}

#[test]
fn short_slots_that_are_released_are_lent_again_after_a_few_loans_and_long_ones_at_once() {
    let stage = Stage::new("look");
    let publisher = stage.publisher();
    let short = slots_used(&stage, &publisher, SHORT_BYTES_MAX);
    assert!(short <= RECLAIM_EVERY as usize + 1, "{short}");
    let long = slots_used(&stage, &publisher, SHORT_BYTES_MAX + 1);
    assert!(long <= 2, "{long}");
}

#[test]
fn a_loan_for_which_there_is_no_other_slot_gets_a_released_one_at_once() {
    let stage = Stage::new("short");
    let limit = 2 << 20;
    let options = PublisherOptions {
        memory_limit: limit,
        loan_timeout: Duration::ZERO,
        ..stage.options()
    };
    let publisher = Publisher::new("a", options).unwrap();
    let layout = Layout::bytes_only(SHORT_BYTES_MAX).unwrap();
    let all_but_one: Vec<_> = (1..limit / SHORT_BYTES_MAX)
        .map(|_| publisher.loan(&layout).unwrap())
        .collect();
    assert_eq!(slots_used(&stage, &publisher, SHORT_BYTES_MAX), 1);
    drop(all_but_one);
}

#[test]
fn a_send_that_is_cancelled_before_there_is_room_sends_nothing_although_room_comes() {
    let stage = Stage::new("cancelled");
    let policy = Policy::Block { timeout: LONG };
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            depth: 1,
            policy,
            ..stage.options()
        },
    )
    .unwrap();
    let mut subscriber = stage.subscriber();
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    publisher.send_bytes(&sending, &[1; 8]).unwrap();
    let held = Cell::new(Some(subscriber.receive(&receiving, LONG).unwrap()));
    // A signal's handler, and right behind it the way is free.
    let cancelled = || {
        held.take().map(|sample| sample.release().unwrap());
        receiving.synchronize(LONG).unwrap();
        true
    };
    let loan = publisher.loan(&layout()).unwrap();
    let wait = Wait::at_most(LONG).unless(&cancelled);
    let unsent = loan.send_within(&sending, wait).unwrap_err();
    assert!(matches!(unsent.error, Error::Timeout { .. }), "{unsent}");
    assert_eq!(unsent.returned.unwrap().send(&sending).unwrap(), 2);
}

#[test]
fn of_two_threads_that_wait_for_room_each_gets_it() {
    let stage = Stage::new("two-waiters");
    let policy = Policy::Block { timeout: LONG };
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            depth: 1,
            policy,
            ..stage.options()
        },
    )
    .unwrap();
    let mut subscriber = stage.subscriber();
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    for _ in 0..20 {
        publisher.send_bytes(&sending, &[1; 8]).unwrap();
        std::thread::scope(|scope| {
            let senders = [2, 3].map(|value| {
                let (publisher, sending) = (&publisher, &sending);
                scope.spawn(move || publisher.send_bytes(sending, &[value; 8]).map(drop))
            });
            // What one of them takes, the other one waits for once more.
            for _ in 0..3 {
                let sample = subscriber.receive(&receiving, LONG).unwrap();
                sample.finish(LONG).unwrap();
            }
            for sender in senders {
                sender.join().unwrap().unwrap();
            }
        });
    }
}

const MIB: u64 = 1 << 20;

fn send(publisher: &Publisher, stream: &Stream, bytes: u64) -> crate::Result<u64> {
    let layout = Layout::bytes_only(bytes).unwrap();
    let sent = publisher.loan(&layout)?.send(stream);
    sent.map_err(|unsent| unsent.error)
}

#[test]
fn memory_that_nobody_holds_makes_room_for_a_longer_sample() {
    let stage = Stage::new("longer");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            memory_limit: 64 * MIB,
            ..stage.options()
        },
    )
    .unwrap();
    let stream = stage.stream();
    for bytes in [40 * MIB, 41 * MIB, 64 * MIB, 2 * MIB] {
        send(&publisher, &stream, bytes).unwrap();
    }
    let refused = send(&publisher, &stream, 64 * MIB + 1).unwrap_err();
    assert!(
        matches!(refused, Error::Limit(LimitFault::Memory { .. })),
        "{refused}"
    );
}

#[test]
fn a_sample_that_is_taken_back_while_its_region_is_closed_leaves_no_fault_behind() {
    let stage = Stage::new("taken-back");
    let policy = Policy::DropOldest;
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            depth: 1,
            policy,
            memory_limit: 16 * MIB,
            ..stage.options()
        },
    )
    .unwrap();
    let mut subscriber = stage.subscriber();
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    for round in 0..20 {
        send(&publisher, &sending, (3 + round % 3) * MIB).unwrap();
    }
    let sample = subscriber.receive(&receiving, LONG).unwrap();
    assert_eq!(sample.sequence(), 20);
    sample.finish(LONG).unwrap();
    assert_eq!(
        subscriber.publisher().map(|it| it.state),
        Some(PeerState::Alive)
    );
}

#[test]
fn a_loan_that_cannot_be_served_leaves_the_memory_for_those_that_can() {
    let stage = Stage::new("in-vain");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            memory_limit: 8 * MIB,
            loan_timeout: Duration::ZERO,
            ..stage.options()
        },
    )
    .unwrap();
    let loan = |mebibytes: u64| publisher.loan(&Layout::bytes_only(mebibytes * MIB).unwrap());
    // As a stopped subscriber does, these keep regions mapped that are given back.
    let holds: Vec<_> = [2, 4, 6].map(|it| loan(it).unwrap().hold()).into();
    let refused = loan(8).unwrap_err();
    assert!(
        matches!(refused, Error::Limit(LimitFault::Memory { .. })),
        "{refused}"
    );
    drop(loan(6).expect("as before"));
    drop(holds);
    eventually("all are unmapped", || {
        let state = publisher.core.lock();
        let mut closing = state.closing.iter();
        closing.all(|region| region.own.strong_count() == 0)
    });
    drop(loan(8).expect("in time"));
}

#[test]
fn a_loan_that_waits_sees_that_a_region_is_unmapped_here() {
    let stage = Stage::new("unmapped");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            memory_limit: 8 * MIB,
            ..stage.options()
        },
    )
    .unwrap();
    let loan = |mebibytes: u64| publisher.loan(&Layout::bytes_only(mebibytes * MIB).unwrap());
    let holds: Vec<_> = [2, 4, 6].map(|it| loan(it).unwrap().hold()).into();
    let looks = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let looked = || looks.fetch_add(1, Relaxed) == u32::MAX;
            let wait = Wait::at_most(2 * LONG).unless(&looked);
            let layout = Layout::bytes_only(8 * MIB).unwrap();
            publisher.loan_within(&layout, wait).map(drop)
        });
        eventually("it waits", || looks.load(Relaxed) > 0);
        drop(holds);
        eventually("it goes on", || waiting.is_finished());
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_sender_that_waits_for_long_looks_at_a_change_and_sleeps_on() {
    let stage = Stage::new("sleeps-on");
    let policy = Policy::Block { timeout: 2 * LONG };
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            depth: 1,
            policy,
            ..stage.options()
        },
    )
    .unwrap();
    let (_full, sending) = (stage.subscriber(), stage.stream());
    publisher.send_bytes(&sending, &[1; 8]).unwrap();
    let looks = || publisher.core.send_lock.last();
    let thread = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            thread.store(own, Relaxed);
            publisher.send_bytes(&sending, &[2; 8])
        });
        let sleeps = || -> u64 {
            let path = format!("/proc/self/task/{}/status", thread.load(Relaxed));
            let status = std::fs::read_to_string(path).unwrap();
            let count = |line: &str| {
                line.strip_prefix("voluntary_ctxt_switches:")?
                    .trim()
                    .parse()
                    .ok()
            };
            status.lines().find_map(count).unwrap()
        };
        eventually("it waits", || thread.load(Relaxed) > 0);
        let begun = sleeps();
        eventually("it sleeps", || sleeps() > begun + 40);
        let (looked, slept) = (looks(), sleeps());
        publisher.core.notify();
        eventually("it looks", || looks() > looked + 20);
        assert!(sleeps() > slept + 10, "between the looks");
        publisher.core.lock().links[0].leave(None);
        publisher.core.notify();
        eventually("it goes on", || waiting.is_finished());
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_subscriber_that_has_left_and_holds_a_sample_closes_the_regions_of_others() {
    let stage = Stage::new("left");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            memory_limit: 8 * MIB,
            ..stage.options()
        },
    )
    .unwrap();
    let mut subscriber = stage.subscriber();
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    publisher.send_bytes(&sending, &[7; 8]).unwrap();
    let held = subscriber.receive(&receiving, LONG).unwrap();
    send(&publisher, &sending, 4 * MIB).unwrap();
    let sample = subscriber.receive(&receiving, LONG).unwrap();
    sample.finish(LONG).unwrap();
    drop(subscriber);
    eventually("it leaves", || {
        publisher.subscribers()[0].state == PeerState::Leaving
    });
    send(&publisher, &sending, 6 * MIB).unwrap();
    eventually("the region that was given back is unmapped", || {
        publisher.stats().unwrap().memory_bytes == 8 * MIB
    });
    assert_eq!(held.to_vec(LONG).unwrap(), [7; 8]);
}

#[test]
fn a_sample_that_is_set_aside_makes_room_for_one_that_waits() {
    let stage = Stage::new("aside");
    let options = PublisherOptions {
        depth: 2,
        ..stage.options()
    };
    let role = PublisherRole::of(Kind::Results);
    let publisher = Publisher::with_role("a", options, role).unwrap();
    let mut subscriber = stage.subscriber_to((Kind::Results, false));
    let stream = stage.stream();
    let mut kept: Vec<_> = (0..2_u8)
        .map(|value| {
            publisher.send_bytes(&stream, &[value; 8]).unwrap();
            let mut taken = None;
            eventually("its region is mapped", || {
                taken = subscriber.take_raw_sample().unwrap();
                taken.is_some()
            });
            taken.unwrap()
        })
        .collect();
    let loan = publisher.loan(&layout()).unwrap();
    let looks = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let looked = || looks.fetch_add(1, Relaxed) == u32::MAX;
            loan.send_within(&stream, Wait::at_most(LONG).unless(&looked))
        });
        eventually("it waits", || looks.load(Relaxed) > 0);
        kept.iter_mut().for_each(RawSample::make_room);
        assert_eq!(waiting.join().unwrap().unwrap(), 3);
    });
}

#[test]
fn regions_are_given_back_also_where_those_that_have_left_hold_all_that_is_exempt() {
    let stage = Stage::new("exempt");
    let publisher = Publisher::new(
        "a",
        PublisherOptions {
            memory_limit: 8 * MIB,
            loan_timeout: LONG,
            ..stage.options()
        },
    )
    .unwrap();
    let mut subscriber = stage.subscriber();
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    let loan = |mebibytes: u64| publisher.loan(&Layout::bytes_only(mebibytes * MIB).unwrap());
    drop(loan(2).unwrap());
    send(&publisher, &sending, 6 * MIB).unwrap();
    let held = subscriber.receive(&receiving, LONG).unwrap();
    drop(subscriber);
    eventually("it leaves", || {
        publisher.subscribers()[0].state == PeerState::Leaving
    });
    drop(loan(4).unwrap());
    drop(loan(8).expect("nobody holds a sample there"));
    drop(held);
}

fn observed(observer: &Arc<SubscriberChanges>, replies: u32) -> PublisherRole {
    PublisherRole {
        kind: Kind::Publisher,
        observer: Some(observer.clone()),
        replies,
    }
}

/// A publisher that expects replies, its subscriber, the sender of the replies, and their receiver.
fn duplex(
    stage: &Stage,
    observer: &Arc<SubscriberChanges>,
) -> (Publisher, Subscriber, Publisher, LinkReceiver) {
    const DEPTH: u32 = 2;
    let on_host = || stage.domain.on(&Device::host());
    let publisher = Publisher::with_role("a", on_host(), observed(observer, DEPTH)).unwrap();
    let subscriber = stage.subscriber_to((Kind::Publisher, true));
    // The memory of these samples is announced before there is a reader of the socket.
    let stream = Device::host().stream().unwrap();
    publisher.send_bytes(&stream, b"early").unwrap();
    let sender = Publisher::over(&subscriber, on_host(), Kind::Publisher);
    let linked = publisher.linked_subscribers();
    let replies = linked[0].receive_replies("a", &stage.domain).unwrap();
    (publisher, subscriber, sender.unwrap(), replies)
}

#[test]
fn a_receiver_is_woken_while_another_thread_waits_for_room_in_the_links_other_ring() {
    let stage = Stage::new("duplex");
    let observer = Arc::new(SubscriberChanges::new().unwrap());
    let (publisher, mut subscriber, sender, mut replies) = duplex(&stage, &observer);
    let (sending, receiving) = (stage.stream(), Device::host().stream().unwrap());
    let early = subscriber.receive(&receiving, LONG).unwrap();
    assert_eq!(early.to_vec(LONG).unwrap(), b"early");
    let link = subscriber.link_of_replies().unwrap();
    let reply = |limit: Option<Duration>| {
        let loan = sender.loan(&layout()).unwrap();
        let stream = Device::host().stream().unwrap();
        let wait = limit.map(Wait::from);
        loan.send_to(REPLIES, &Metadata::EMPTY, &stream, wait.as_ref())
            .map(drop)
    };
    (0..2).for_each(|_| reply(None).unwrap());
    std::thread::scope(|scope| {
        // One thread waits for room in the ring of the replies, another one for samples.
        let waits_for_room = scope.spawn(|| reply(Some(LONG)));
        let samples = scope
            .spawn(|| (0..20).for_each(|_| drop(subscriber.receive(&receiving, LONG).unwrap())));
        for _ in 0..20 {
            eventually("it sleeps", || {
                link.segment.header().receiver.asleep.load(Relaxed) != 0
            });
            publisher.send_bytes(&sending, &[7; 8]).unwrap();
        }
        samples.join().unwrap();
        let mut taken = None;
        eventually("the memory of the replies is mapped", || {
            taken = replies.take().unwrap();
            taken.is_some()
        });
        drop(taken);
        waits_for_room.join().unwrap().unwrap();
    });
}

#[test]
fn both_rings_of_a_link_close_one_by_one() {
    let stage = Stage::new("half-closed");
    let observer = Arc::new(SubscriberChanges::new().unwrap());
    let (publisher, subscriber, sender, mut replies) = duplex(&stage, &observer);
    let stream = Device::host().stream().unwrap();
    drop(subscriber);
    eventually("it takes no more samples", || {
        publisher.linked_subscribers().is_empty()
    });
    let loan = sender.loan(&layout()).unwrap();
    loan.send_to(REPLIES, &Metadata::EMPTY, &stream, None)
        .unwrap();
    // It lingers, and sees the end of the socket before its reply is taken.
    let core = Arc::clone(&sender.core);
    drop(sender);
    eventually("the link is gone", || publisher.subscribers().is_empty());
    eventually("its other end knows", || {
        core.lock().live().next().is_none()
    });
    let mut taken = 0;
    eventually("the reply comes, and then the end", || {
        match replies.take() {
            Ok(reply) => {
                taken += usize::from(reply.is_some());
                false
            }
            Err(error) => matches!(error, Error::PeerGone { graceful: true, .. }),
        }
    });
    assert_eq!(taken, 1);
}

#[test]
fn a_message_that_comes_while_a_publisher_closes_makes_the_end_no_fault() {
    let stage = Stage::new("last-message");
    let observer = Arc::new(SubscriberChanges::new().unwrap());
    let (publisher, mut subscriber, sender, _replies) = duplex(&stage, &observer);
    let stream = Device::host().stream().unwrap();
    drop(subscriber.receive(&stream, LONG).unwrap());
    let id = publisher.linked_subscribers()[0].id;
    let mut state = publisher.core.lock();
    // It announces memory, which nobody has read when the publisher closes.
    let _loan = sender.loan(&layout()).unwrap();
    drop(state.close_links());
    drop(state);
    assert_eq!(publisher.core.on_message(id), Next::Stop);
    let end = subscriber.receive(&stream, LONG);
    assert!(
        matches!(end, Err(Error::PeerGone { graceful: true, .. })),
        "{end:?}"
    );
}

/// Sends a message over the only link of `of`, as the process at that end.
fn say_as(of: &Publisher, message: &Message, fds: &[BorrowedFd<'_>]) {
    let socket = of.core.lock().links[0].end.socket.clone();
    message::send(socket.as_fd().as_fd(), message, fds).unwrap();
}

fn has_links(publisher: &Publisher) -> bool {
    publisher.core.lock().live().next().is_some()
}

#[test]
fn a_region_for_a_ring_that_is_over_ends_both_rings() {
    let bad = rustix::pipe::pipe().unwrap().0;
    let region = |id| Message::Region { id, bytes: 1 << 16 };
    let fails = |of: &Publisher| say_as(of, &region(7), &[bad.as_fd()]);
    let closes = |of: &Publisher| say_as(of, &Message::CloseReplies(CloseReason::Closed), &[]);
    let ways: [&dyn Fn(&Publisher); 2] = [&fails, &closes];
    for end_it in ways {
        let stage = Stage::new("region-for-no-ring");
        let observer = Arc::new(SubscriberChanges::new().unwrap());
        let (publisher, mut subscriber, sender, mut replies) = duplex(&stage, &observer);
        end_it(&sender);
        eventually("the replies are over", || replies.take().is_err());
        assert!(has_links(&publisher), "each ring ends alone");
        say_as(&sender, &region(8), &[bad.as_fd()]);
        eventually("its socket is not read", || !has_links(&publisher));
        eventually("both are over", || subscriber.take_raw_sample().is_err());
    }
    let stage = Stage::new("region-for-no-samples");
    let observer = Arc::new(SubscriberChanges::new().unwrap());
    let (publisher, subscriber, sender, mut replies) = duplex(&stage, &observer);
    fails(&publisher);
    eventually("there are no more samples", || {
        subscriber.link_of_replies().unwrap().ended().is_some()
    });
    assert!(has_links(&sender), "each ring ends alone");
    say_as(&publisher, &region(8), &[bad.as_fd()]);
    eventually("its socket is not read", || !has_links(&sender));
    eventually("both are over", || replies.take().is_err());
}

#[test]
fn a_wrong_return_ends_both_rings() {
    let stage = Stage::new("wrong-return");
    let observer = Arc::new(SubscriberChanges::new().unwrap());
    let (publisher, mut subscriber, sender, mut replies) = duplex(&stage, &observer);
    let positions = vec![77];
    say_as(&sender, &Message::Returned { positions }, &[]);
    eventually("the replies are over", || replies.take().is_err());
    assert!(!has_links(&publisher));
    eventually("both are over", || subscriber.take_raw_sample().is_err());
}

#[test]
fn a_link_with_replies_that_is_refused_keeps_no_place() {
    let stage = Stage::new("refused");
    let observer = Arc::new(SubscriberChanges::new().unwrap());
    let publisher = Publisher::with_role(
        "a",
        stage.domain.on(&Device::host()),
        observed(&observer, 2),
    )
    .unwrap();
    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let address = SocketAddrUnix::new(stage.folder.join("a.sock")).unwrap();
    rustix::net::connect(&socket, &address).unwrap();
    let hello = Message::Hello {
        device: Some(Device::host().info().id),
        kind: Kind::Publisher,
        body: Vec::new(),
    };
    send_raw(&socket, &packet(&hello), &[]).unwrap();
    let links = || publisher.core.lock().links.len();
    eventually("it is welcomed", || links() == 1);
    // It has not sealed the segment.
    send_raw(&socket, &packet(&Message::Attached), &[]).unwrap();
    eventually("its place is free, though its socket is open", || {
        links() == 0
    });
}
