//! Receivers that lie on an established link: their publisher continues to serve the others, with
//! the right contents.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;
use warpipe_testkit::Rng;

use super::descriptors::{descriptors, settled_descriptors};
use super::publisher_handshake::hello;
use super::scribbler::Words;
use super::stage::{
    LONG, Scratch, TestProcess, alone, assert_delivers, eventually, hear, mappings, packet,
    random_bytes, role, send_raw, stream,
};
use crate::ipc::message::{Message, Received};
use crate::ipc::{Kind, PeerState};
use crate::pubsub::PublisherRole;
use crate::shm::seal;
use crate::{Device, Error, Layout, LimitFault, Policy, Publisher, PublisherOptions};

/// A client that has attached correctly and holds its segment.
struct Liar {
    socket: OwnedFd,
    words: Words,
    fds: Vec<OwnedFd>,
}

impl Liar {
    fn attach(scratch: &Scratch) -> Liar {
        Liar::attach_by(scratch.connection())
    }

    fn attach_by(socket: OwnedFd) -> Liar {
        Liar::attach_as(socket, &hello())
    }

    fn attach_as(socket: OwnedFd, hello: &Message) -> Liar {
        send_raw(&socket, &packet(hello), &[]).unwrap();
        let Received::Message(Message::Welcome { regions, .. }, fds) = hear(&socket) else {
            panic!("no welcome")
        };
        (0..regions).for_each(|_| {
            assert!(matches!(
                hear(&socket),
                Received::Message(Message::Region { .. }, _)
            ))
        });
        let words = Words::map(&fds[0]);
        seal::close(fds[0].as_fd()).unwrap();
        send_raw(&socket, &packet(&Message::Attached), &[]).unwrap();
        loop {
            match hear(&socket) {
                Received::Message(Message::Attached, _) => break,
                Received::Message(Message::Region { .. }, _) => {}
                other => panic!("{other:?}"),
            }
        }
        Liar {
            socket,
            words,
            fds: fds.into_iter().map(|fd| fd.accept().release()).collect(),
        }
    }

    /// The segment's inode.
    fn segment(&self) -> u64 {
        rustix::fs::fstat(&self.fds[0]).unwrap().st_ino
    }
}

const POLICIES: [Policy; 4] = [
    Policy::DropOldest,
    Policy::DropNewest,
    Policy::Fail,
    Policy::Block {
        timeout: Duration::from_millis(2),
    },
];

#[test]
fn a_scribbling_receiver_does_not_affect_the_other_ones_samples() {
    alone(
        module_path!(),
        "a_scribbling_receiver_does_not_affect_the_other_ones_samples",
        || {
            for (policy, spins) in POLICIES.into_iter().zip([0, 30, 0, 30]) {
                let scratch = Scratch::new();
                let publisher = scratch.publisher(|it| PublisherOptions {
                    policy,
                    memory_limit: 8 << 20,
                    ..it
                });
                let (mut good, stream) = (scratch.subscriber(), stream());
                assert_delivers(&publisher, &mut good, b"before");
                let before = settled_descriptors();
                let (mut sent, mut refused, mut random) = (0, 0, Rng::with_seed(8));
                for round in 0..4 {
                    let liar = Liar::attach(&scratch);
                    let scribbling = liar.words.scribble_on(round, spins);
                    for _ in 0..200 {
                        let length = random.usize(..20_000);
                        let payload = random_bytes(&mut random, length);
                        match publisher.send_bytes(&stream, &payload) {
                            Ok(_) => sent += 1,
                            // The liar is full, and its publisher has promised it every sample.
                            Err(Error::Timeout { .. } | Error::Limit(LimitFault::Depth { .. }))
                                if policy.is_lossless() =>
                            {
                                refused += 1;
                                continue;
                            }
                            Err(error) => panic!("{policy:?}: {error}"),
                        }
                        let sample = good.receive(&stream, LONG).unwrap();
                        assert_eq!(sample.to_vec(LONG).unwrap(), payload, "{policy:?}");
                        sample.finish(LONG).unwrap();
                    }
                    drop(scribbling);
                    drop(liar.socket);
                }
                println!("{policy:?}: {sent} sent, {refused} refused");
                assert!(sent > 10);
                let is_in = |it: &crate::SubscriberInfo| {
                    matches!(it.state, PeerState::Alive | PeerState::Stalled)
                };
                eventually("the liars are out", || {
                    publisher
                        .subscribers()
                        .iter()
                        .filter(|it| is_in(it))
                        .count()
                        == 1
                });
                assert_delivers(&publisher, &mut good, b"afterwards");
                assert_delivers(
                    &publisher,
                    &mut scratch.subscriber(),
                    b"and to somebody new",
                );
                drop(publisher);
                eventually("no descriptor is kept for liars", || {
                    descriptors() <= before
                });
            }
        },
    );
}

#[test]
fn early_releases_unmap_nothing_under_the_publishers_stream() {
    let (scratch, elsewhere) = (Scratch::new(), Scratch::new());
    let (publisher, another) = (scratch.publisher(|it| it), elsewhere.publisher(|it| it));
    let (stream, (go, wait)) = (stream(), mpsc::channel::<()>());
    let liar = Liar::attach(&scratch);
    let segment = liar.segment();
    assert_eq!(
        mappings(segment),
        2,
        "the publisher's, and the liar's own, which stays"
    );
    stream.call(move || assert!(wait.recv().is_err())).unwrap();
    for _ in 0..3 {
        publisher.send_bytes(&stream, &[1; 4096]).unwrap();
    }
    (1..=3).for_each(|position| liar.words.forge_end_of(position, 4));
    drop(liar);
    eventually("the liar is forgotten", || {
        publisher.subscribers().is_empty()
    });
    // A link that ended later, with idle streams, shows that this link's turn has passed.
    let honest = Liar::attach(&elsewhere);
    let later = honest.segment();
    assert_delivers(&another, &mut elsewhere.subscriber(), b"elsewhere");
    drop(honest);
    eventually("a later link is unmapped", || mappings(later) == 1);
    assert_eq!(mappings(segment), 2, "the stream still has to write there");
    drop(go);
    stream.synchronize(LONG).unwrap();
    eventually("now it is unmapped", || mappings(segment) == 1);
    assert_delivers(&publisher, &mut scratch.subscriber(), b"afterwards");
}

#[test]
fn a_slot_released_early_is_not_reused_while_it_is_being_filled() {
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| PublisherOptions {
        memory_limit: 2 << 20,
        loan_timeout: Duration::from_millis(50),
        ..it
    });
    let (busy, (go, wait)) = (stream(), mpsc::channel::<()>());
    let liar = Liar::attach(&scratch);
    let whole = Layout::bytes_only(2 << 20).unwrap();
    busy.call(move || assert!(wait.recv().is_err())).unwrap();
    publisher
        .send_slice(&busy, &whole, &vec![7; 2 << 20])
        .unwrap();
    // A receiver that releases without having waited does this.
    liar.words.release_all(1);
    let error = publisher.loan(&whole).unwrap_err();
    assert!(
        matches!(error, Error::Limit(LimitFault::Memory { .. })),
        "{error}"
    );
    drop(go);
    busy.synchronize(LONG).unwrap();
    eventually("the slot is back", || publisher.loan(&whole).is_ok());
}

#[test]
fn slots_of_a_killed_scribbler_are_reclaimed_whatever_its_words_hold() {
    let test = "slots_of_a_killed_scribbler_are_reclaimed_whatever_its_words_hold";
    if role().as_deref() == Some("scribbler") {
        let scratch = Scratch::of_test();
        let liar = Liar::attach(&scratch);
        println!("attached");
        let mut random = Rng::with_seed(9);
        loop {
            liar.words.scribble(&mut random);
        }
    }
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| PublisherOptions {
        policy: Policy::DropNewest,
        memory_limit: 4 << 20,
        loan_timeout: Duration::from_secs(5),
        ..it
    });
    let stream = stream();
    for round in 0..5 {
        let mut scribbler = TestProcess::start(module_path!(), test, "scribbler", &scratch);
        scribbler.hear("attached");
        publisher.wait_for_subscribers(1, LONG).unwrap();
        for _ in 0..200 {
            publisher.send_bytes(&stream, &[round; 64 << 10]).unwrap();
        }
        scribbler.kill();
        eventually("the dead subscriber is removed", || {
            publisher.subscribers().is_empty()
        });
        drop(scribbler);
    }
    // All of the memory can be allocated at once again.
    let half = Layout::bytes_only(2 << 20).unwrap();
    let loans = [
        publisher.loan(&half).unwrap(),
        publisher.loan(&half).unwrap(),
    ];
    assert!(publisher.stats().unwrap().memory_bytes <= 4 << 20);
    drop(loans);
    assert_delivers(&publisher, &mut scratch.subscriber(), b"afterwards");
}

#[test]
fn one_sample_held_for_long_does_not_make_the_publisher_take_all_memory() {
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| PublisherOptions { depth: 16, ..it });
    let (mut subscriber, stream) = (scratch.subscriber(), stream());
    publisher.send_bytes(&stream, b"held").unwrap();
    let held = subscriber.receive(&stream, LONG).unwrap();
    for number in 0..20_000u32 {
        publisher
            .send_bytes(&stream, &number.to_le_bytes())
            .unwrap();
        drop(subscriber.receive(&stream, LONG).unwrap());
    }
    let used = publisher.stats().unwrap().memory_bytes;
    assert!(used <= 8 << 20, "{used} bytes for a few samples of 4");
    assert_eq!(held.to_vec(LONG).unwrap(), b"held");
}

#[test]
fn a_failed_wait_or_release_neither_loses_nor_keeps_a_sample() {
    use crate::backend::testing::{Failing, Wrapped};
    let scratch = Scratch::new();
    let publisher: Publisher = scratch.publisher(|it| PublisherOptions { depth: 2, ..it });
    let backend = Wrapped::new(
        crate::backend::host::HostBackend::shared(),
        Failing::default(),
    );
    let device = crate::Device::from_backend(backend.clone());
    let mut subscriber =
        crate::Subscriber::open("a", scratch.domain.on(&device), Duration::ZERO).unwrap();
    let (ours, theirs) = (stream(), device.stream().unwrap());
    for round in 0..10u8 {
        let (go, wait) = mpsc::channel::<()>();
        // Not complete when it is received, so that the receiver's stream has to wait.
        ours.call(move || assert!(wait.recv().is_err())).unwrap();
        publisher.send_bytes(&ours, &[round; 100]).unwrap();
        backend.hook().aim("batch", 1);
        assert!(matches!(
            subscriber.receive(&theirs, LONG),
            Err(Error::Driver {
                code: Error::INJECTED,
                ..
            })
        ));
        let sample = subscriber.receive(&theirs, LONG).unwrap();
        assert_eq!(
            sample.sequence(),
            u64::from(round) + 1,
            "the sample of the failed wait"
        );
        drop(go);
        assert_eq!(sample.to_vec(LONG).unwrap(), [round; 100]);
        backend.hook().aim("batch", 1);
        if round % 2 == 0 {
            drop(sample);
            // A drop cannot report an error, so it ends the link rather than keep the slot.
            let error = subscriber.receive(&theirs, LONG).unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Driver {
                        code: Error::INJECTED,
                        ..
                    }
                ),
                "{error}"
            );
            subscriber =
                crate::Subscriber::open("a", scratch.domain.on(&device), Duration::ZERO).unwrap();
            let info = publisher.subscribers();
            assert!(
                info.iter().any(|it| it.state == PeerState::Alive),
                "{info:?}"
            );
        } else {
            assert!(matches!(
                sample.release(),
                Err(Error::Driver {
                    code: Error::INJECTED,
                    ..
                })
            ));
        }
    }
}

#[test]
fn forged_ready_and_released_words_of_another_user_reuse_no_slot_under_its_writer() {
    const NOBODY: u32 = 65534;
    let test = "forged_ready_and_released_words_of_another_user_reuse_no_slot_under_its_writer";
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        std::fs::set_permissions(
            &scratch.path,
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        let all = Layout::bytes_only(2 << 20).unwrap();
        let publisher = scratch.publisher(|it| PublisherOptions {
            allow_uids: vec![NOBODY],
            depth: 4,
            memory_limit: 2 << 20,
            loan_timeout: Duration::ZERO,
            ..it
        });
        let liar = Liar::attach_by(super::users::as_user(NOBODY, || scratch.connection()));
        let stream = stream();
        let (go, wait) = mpsc::channel::<()>();
        let loan = publisher.loan(&all).unwrap();
        stream.call(move || _ = wait.recv()).unwrap();
        loan.send(&stream).unwrap();
        liar.words.forge_end_of(1, 4);
        assert!(
            matches!(
                publisher.loan(&all),
                Err(Error::Limit(LimitFault::Memory { .. }))
            ),
            "its writer has not begun"
        );
        drop(go);
        stream.synchronize(LONG).unwrap();
        eventually("it is lent again", || publisher.loan(&all).is_ok());
    });
}

/// Takes part in nothing: as a process that is stopped.
#[test]
fn a_receiver_that_closes_no_region_keeps_memory_of_the_limit_once_more_and_no_more() {
    let scratch = Scratch::new();
    let limit = 64 << 20;
    let publisher = scratch.publisher(|it| PublisherOptions {
        policy: Policy::DropOldest,
        depth: 1,
        memory_limit: limit,
        loan_timeout: Duration::from_millis(20),
        ..it
    });
    let (liar, stream) = (Liar::attach(&scratch), stream());
    let mut lengths = (20 << 20..).step_by(1 << 20);
    let send = |bytes: u64| {
        let layout = Layout::bytes_only(bytes).unwrap();
        let sent = publisher.loan(&layout)?.send(&stream);
        sent.map_err(|unsent| unsent.error)
    };
    let refused = lengths.by_ref().take(12).find_map(|bytes| {
        let refused = send(bytes).err();
        let used = publisher.stats().unwrap().memory_bytes;
        assert!(used <= 2 * limit, "{used} bytes are mapped");
        refused
    });
    assert!(
        matches!(refused, Some(Error::Limit(LimitFault::Memory { .. }))),
        "{refused:?}"
    );
    let closed: Vec<u32> = std::iter::from_fn(|| match hear(&liar.socket) {
        Received::Message(Message::CloseRegion { id }, _) => Some(Some(id)),
        Received::Message(Message::Region { .. }, _) => Some(None),
        _ => None,
    })
    .flatten()
    .collect();
    for id in closed {
        let said = packet(&Message::RegionClosed { id });
        send_raw(&liar.socket, &said, &[]).unwrap();
    }
    eventually("what was closed leaves room", || send(30 << 20).is_ok());
    // Of a region that it was not asked to close.
    let lie = packet(&Message::RegionClosed { id: 4711 });
    send_raw(&liar.socket, &lie, &[]).unwrap();
    eventually("it is out", || publisher.subscribers().is_empty());
}

#[test]
fn a_queue_that_returns_results_that_it_did_not_set_aside_loses_its_link_and_no_slot_twice() {
    for positions in [vec![1], vec![1, 1], vec![7], vec![0, u64::MAX]] {
        let scratch = Scratch::new();
        let options = PublisherOptions {
            depth: 4,
            memory_limit: 2 << 20,
            loan_timeout: Duration::from_millis(20),
            ..scratch.domain.on(&Device::host())
        };
        let role = PublisherRole::of(Kind::Results);
        let publisher = Publisher::with_role("a", options, role).unwrap();
        let mut own = hello();
        if let Message::Hello { kind, .. } = &mut own {
            *kind = Kind::Results;
        }
        let (liar, stream) = (Liar::attach_as(scratch.connection(), &own), stream());
        publisher.send_bytes(&stream, b"one").unwrap();
        let lie = packet(&Message::Returned { positions });
        send_raw(&liar.socket, &lie, &[]).unwrap();
        eventually("it is out", || publisher.subscribers().is_empty());
        let all = Layout::bytes_only(2 << 20).unwrap();
        let loan = publisher.loan(&all).expect("its sample was taken back");
        let more = publisher.loan(&Layout::bytes_only(1).unwrap());
        assert!(more.is_err(), "a slot is free twice");
        drop(loan);
    }
}
