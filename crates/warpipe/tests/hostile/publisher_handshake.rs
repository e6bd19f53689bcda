//! Raw clients against a real publisher: it refuses wrong messages alone and continues.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use warpipe_testkit::Rng;

use super::descriptors::{descriptors, settled_descriptors};
use super::stage::{
    LONG, Scratch, alone, assert_delivers, eventually, hear, packet, pipe, random_bytes, send_raw,
};
use crate::PublisherOptions;
use crate::backend::{DeviceId, DeviceKind};
use crate::ipc::Kind;
use crate::ipc::PeerState;
use crate::ipc::message::{CloseReason, Message, Received};
use crate::shm::seal;

pub(super) fn hello() -> Message {
    let device = DeviceId {
        kind: DeviceKind::Host,
        uuid: [0; 16],
    };
    Message::Hello {
        device: Some(device),
        kind: Kind::Publisher,
        body: Vec::new(),
    }
}

/// Reads until the connection has ended; returns the rejection if there was one.
fn last_word(socket: &OwnedFd) -> Option<String> {
    let mut refusal = None;
    loop {
        match hear(socket) {
            Received::Message(Message::Refused { text, denied }, _) => {
                assert!(!denied);
                refusal = Some(text);
            }
            Received::End => return refusal,
            Received::Nothing => panic!("neither a word nor the end"),
            Received::Message(..) => {}
        }
    }
}

#[test]
fn a_greeting_that_is_none_is_refused_with_the_reason() {
    alone(
        module_path!(),
        "a_greeting_that_is_none_is_refused_with_the_reason",
        || {
            let scratch = Scratch::new();
            let publisher = scratch.publisher(|it| it);
            let mut good = scratch.subscriber();
            assert_delivers(&publisher, &mut good, b"before");
            let before = settled_descriptors();
            let whole = packet(&hello());
            let edited = |at: usize, byte: u8| {
                let mut packet = whole.clone();
                packet[at] = byte;
                packet
            };
            let trailing = [whole.as_slice(), b"more"].concat();
            let cases: [(&str, Vec<u8>, &str); 10] = [
                ("another version", edited(4, 99), "version 99"),
                ("wrong magic", edited(0, b'w'), "magic"),
                ("cut behind the frame", whole[..8].to_vec(), "cut short"),
                ("cut in the frame", whole[..5].to_vec(), "cut short"),
                ("one byte", vec![b'W'], "cut short"),
                (
                    "cut in the message",
                    whole[..whole.len() - 1].to_vec(),
                    "cut short",
                ),
                ("trailing bytes", trailing, "garbled"),
                ("oversized", vec![b'W'; 4096], "longer than"),
                (
                    "another message",
                    packet(&Message::Attached),
                    "Attached came where Hello was due",
                ),
                ("an unknown message", edited(8, 99), "garbled"),
            ];
            for (what, bytes, reason) in cases {
                let socket = scratch.connection();
                send_raw(&socket, &bytes, &[]).unwrap();
                let refusal = last_word(&socket).unwrap_or_default();
                assert!(refusal.contains(reason), "{what}: {refusal:?}");
            }
            let empty = scratch.connection();
            send_raw(&empty, b"", &[]).unwrap();
            assert_eq!(
                last_word(&empty),
                None,
                "an empty packet looks like the end"
            );
            drop(empty);
            eventually("every descriptor is closed", || descriptors() <= before);
            assert_delivers(&publisher, &mut good, b"afterwards");
            assert_delivers(
                &publisher,
                &mut scratch.subscriber(),
                b"and to somebody new",
            );
        },
    );
}

#[test]
fn a_hello_with_descriptors_is_refused_and_they_are_closed() {
    alone(
        module_path!(),
        "a_hello_with_descriptors_is_refused_and_they_are_closed",
        || {
            // A newer kernel would not accept the descriptors.
            crate::os::IS_OLD_KERNEL.store(true, std::sync::atomic::Ordering::SeqCst);
            let scratch = Scratch::new();
            let publisher = scratch.publisher(|it| it);
            assert_delivers(&publisher, &mut scratch.subscriber(), b"before");
            eventually("the first has gone", || publisher.subscribers().is_empty());
            let before = settled_descriptors();
            for count in [1, 2, 3, 8, 9, 100] {
                let pipe = pipe();
                let fds: Vec<BorrowedFd<'_>> = vec![pipe.as_fd(); count];
                let socket = scratch.connection();
                send_raw(&socket, &packet(&hello()), &fds).unwrap();
                let refusal = last_word(&socket).unwrap_or_default();
                // Two is a lifeline's number, and these have ended.
                let reason = if count == 2 { "closed" } else { "descriptors" };
                assert!(refusal.contains(reason), "{count}: {refusal:?}");
            }
            eventually("every descriptor is closed", || descriptors() <= before);
            assert_delivers(&publisher, &mut scratch.subscriber(), b"afterwards");
        },
    );
}

#[test]
fn a_thousand_garbage_connections_affect_no_subscriber() {
    alone(
        module_path!(),
        "a_thousand_garbage_connections_affect_no_subscriber",
        || {
            let scratch = Scratch::new();
            let publisher = scratch.publisher(|it| it);
            let mut good = scratch.subscriber();
            assert_delivers(&publisher, &mut good, b"before");
            let (before, mut random) = (settled_descriptors(), Rng::with_seed(1));
            for round in 0..2000 {
                let socket = scratch.connection();
                let mut bytes = packet(&hello());
                if round % 2 == 0 {
                    let length = random.usize(..200);
                    bytes = random_bytes(&mut random, length);
                } else {
                    for _ in 0..=random.u64(..4) {
                        let at = random.usize(..bytes.len());
                        bytes[at] ^= random.u8(..);
                    }
                }
                let _ = send_raw(&socket, &bytes, &[]);
            }
            eventually("all of them have gone", || {
                publisher.subscribers().len() == 1 && descriptors() <= before
            });
            assert_delivers(&publisher, &mut good, b"afterwards");
            assert_delivers(
                &publisher,
                &mut scratch.subscriber(),
                b"and to somebody new",
            );
        },
    );
}

/// A client that has sent Hello, was welcomed and has not reported that it is attached.
fn welcomed(scratch: &Scratch) -> OwnedFd {
    let socket = scratch.connection();
    send_raw(&socket, &packet(&hello()), &[]).unwrap();
    let Received::Message(Message::Welcome { .. }, fds) = hear(&socket) else {
        panic!("no welcome")
    };
    assert_eq!(fds.len(), 4);
    seal::close(fds[0].as_fd()).unwrap();
    socket
}

#[test]
fn invalid_messages_after_the_hello_end_that_link_alone() {
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| it);
    let mut good = scratch.subscriber();
    let welcome = Message::Welcome {
        generation: [0; 16],
        device: DeviceId {
            kind: DeviceKind::Host,
            uuid: [0; 16],
        },
        depth: 4,
        access: crate::backend::Access::Read,
        lossless: true,
        source: [1; 16],
        regions: 0,
        replies: 0,
    };
    let evil = [
        hello(),
        welcome,
        Message::Region { id: 0, bytes: 4096 },
        Message::Attached,
    ];
    for attached in [false, true] {
        for message in &evil {
            if !attached && *message == Message::Attached {
                continue;
            }
            let socket = welcomed(&scratch);
            if attached {
                send_raw(&socket, &packet(&Message::Attached), &[]).unwrap();
            }
            send_raw(&socket, &packet(message), &[]).unwrap();
            let last_message = std::iter::repeat_with(|| hear(&socket)).find(|heard| {
                !matches!(
                    heard,
                    Received::Message(Message::Attached | Message::Region { .. }, _)
                )
            });
            let said = format!("{last_message:?}");
            assert!(
                matches!(
                    last_message,
                    Some(Received::Message(Message::Close(CloseReason::Failed(_)), _))
                ),
                "{message:?}: {said}"
            );
        }
    }
    eventually("they are forgotten", || publisher.subscribers().len() == 1);
    assert_delivers(&publisher, &mut good, b"untouched");
}

#[test]
fn a_silent_client_is_refused_in_time_before_and_after_the_hello() {
    alone(
        module_path!(),
        "a_silent_client_is_refused_in_time_before_and_after_the_hello",
        || {
            let scratch = Scratch::new();
            let publisher = scratch.publisher(|it| PublisherOptions {
                handshake_timeout: Duration::from_secs(2),
                ..it
            });
            assert_delivers(&publisher, &mut scratch.subscriber(), b"before");
            eventually("the first has gone", || publisher.subscribers().is_empty());
            let before = settled_descriptors();
            let (silent, half) = (scratch.connection(), welcomed(&scratch));
            assert_eq!(last_word(&silent), None);
            assert_eq!(last_word(&half), None);
            drop((silent, half));
            eventually("every descriptor is closed", || descriptors() <= before);
            assert_delivers(&publisher, &mut scratch.subscriber(), b"afterwards");
        },
    );
}

#[test]
fn silent_connections_exclude_no_subscriber() {
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| PublisherOptions {
        handshake_timeout: LONG,
        ..it
    });
    let connections: Vec<_> = (0..300).map(|_| scratch.connection()).collect();
    assert_delivers(&publisher, &mut scratch.subscriber(), b"in spite of them");
    drop(connections);
    assert_delivers(&publisher, &mut scratch.subscriber(), b"and afterwards");
}

#[test]
fn subscribers_above_the_limit_are_refused_until_others_leave() {
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| PublisherOptions {
        subscribers_max: 3,
        ..it
    });
    let mut three: Vec<_> = (0..3).map(|_| scratch.subscriber()).collect();
    let error = scratch.try_subscriber().unwrap_err();
    assert!(
        matches!(
            &error,
            crate::Error::Handshake {
                fault: crate::HandshakeFault::Full { max: 3, .. },
                ..
            }
        ),
        "{error}"
    );
    assert_delivers(&publisher, &mut three[0], b"still served");
    drop(three);
    eventually("the places come back", || {
        publisher.subscribers().is_empty()
    });
    assert_delivers(&publisher, &mut scratch.subscriber(), b"a free place");
}

#[test]
fn a_policy_that_panics_refuses_only_the_client_it_was_asked_about() {
    let scratch = Scratch::new();
    let angry = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let mood = angry.clone();
    let publisher = scratch.publisher(|it| PublisherOptions {
        policy_of: Some(Arc::new(move |_| {
            assert!(
                !mood.load(std::sync::atomic::Ordering::SeqCst),
                "the user's code panics"
            );
            crate::Policy::Fail
        })),
        ..it
    });
    assert!(matches!(
        scratch.try_subscriber(),
        Err(crate::Error::Handshake { .. })
    ));
    angry.store(false, std::sync::atomic::Ordering::SeqCst);
    assert_delivers(
        &publisher,
        &mut scratch.subscriber(),
        b"the threads live on",
    );
    assert!(
        publisher
            .subscribers()
            .iter()
            .all(|it| it.state != PeerState::Dead)
    );
}

#[test]
fn a_policy_that_panics_while_others_wait_to_be_accepted_leaves_the_publisher_listening() {
    let scratch = Scratch::new();
    let (all_said, wait) = std::sync::mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let publisher = scratch.publisher(|it| {
        PublisherOptions {
            policy_of: Some(Arc::new(move |_| {
                // The first client is asked about until all others have connected and said `Hello`, so
                // each of those is read as soon as it is accepted.
                if wait.lock().is_ok_and(|wait| wait.recv().is_ok()) {
                    panic!("the user's code panics");
                }
                crate::Policy::Fail
            })),
            ..it
        }
    });
    let sockets = [(); 4].map(|()| {
        let socket = scratch.connection();
        send_raw(&socket, &packet(&hello()), &[]).unwrap();
        socket
    });
    sockets.iter().for_each(|_| all_said.send(()).unwrap());
    for socket in &sockets {
        assert!(!matches!(
            hear(socket),
            Received::Message(Message::Welcome { .. }, _)
        ));
    }
    drop(all_said);
    assert_delivers(&publisher, &mut scratch.subscriber(), b"it listens");
}

#[test]
fn a_limit_of_one_admits_one_of_many_that_come_at_once() {
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| PublisherOptions {
        subscribers_max: 1,
        ..it
    });
    let sockets: Vec<OwnedFd> = (0..32).map(|_| scratch.connection()).collect();
    sockets
        .iter()
        .for_each(|socket| send_raw(socket, &packet(&hello()), &[]).unwrap());
    let answers: Vec<Received> = sockets.iter().map(hear).collect();
    let welcomes = answers
        .iter()
        .filter(|it| matches!(it, Received::Message(Message::Welcome { .. }, _)))
        .count();
    let full = Message::Full {
        limit: crate::PeerLimit::All,
        max: 1,
    };
    let refusals = answers
        .iter()
        .filter(|it| matches!(it, Received::Message(message, _) if *message == full))
        .count();
    assert_eq!((welcomes, refusals), (1, 31));
    drop((sockets, answers));
    let mut next = None;
    eventually("the place comes back", || {
        next = scratch.try_subscriber().ok();
        next.is_some()
    });
    assert_delivers(&publisher, &mut next.unwrap(), b"to the next");
}

#[test]
fn a_link_with_unread_descriptors_counts_until_they_are_no_longer_in_flight() {
    use rustix::event::{PollFd, PollFlags, poll};
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| PublisherOptions {
        subscribers_max: 2,
        handshake_timeout: Duration::from_secs(2),
        ..it
    });
    let connections: Vec<OwnedFd> = (0..2).map(|_| scratch.connection()).collect();
    connections
        .iter()
        .for_each(|socket| send_raw(socket, &packet(&hello()), &[]).unwrap());
    for socket in &connections {
        eventually("its time is over", || {
            let mut ends = [PollFd::new(socket, PollFlags::RDHUP)];
            poll(
                &mut ends,
                Some(&rustix::event::Timespec {
                    tv_sec: 0,
                    tv_nsec: 0,
                }),
            )
            .unwrap()
                > 0
        });
    }
    let error = scratch.try_subscriber().unwrap_err();
    let full = matches!(
        &error,
        crate::Error::Handshake {
            fault: crate::HandshakeFault::Full { max: 2, .. },
            ..
        }
    );
    assert!(full, "{error}");
    drop(connections);
    // The kernel closes descriptors that nobody read a moment after their socket.
    let mut next = None;
    eventually("they are no longer in flight", || {
        next = scratch.try_subscriber().ok();
        next.is_some()
    });
    assert_delivers(&publisher, &mut next.unwrap(), b"they were closed unread");
}
