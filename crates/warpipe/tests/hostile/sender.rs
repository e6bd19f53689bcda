//! A sender that lies on an established link: its subscriber gets a typed error, and can continue
//! with another.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::descriptors::settled_descriptors;
use super::fake_publisher::{Offer, meet};
use super::scribbler::Words;
use super::stage::{
    LONG, SIZE_SEALS, Scratch, alone, assert_delivers, eventually, hear, mappings, memfd, packet,
    send_raw, stream,
};
use crate::ipc::domain::EndpointName;
use crate::ipc::message::{self, CloseReason, Message, Received, wait_readable};
use crate::pubsub::entry::{Description, Metadata};
use crate::pubsub::place::Place;
use crate::pubsub::ring::SenderRing;
use crate::shm::page::SharedPage;
use crate::shm::segment::{Entry, Segment};
use crate::wait::{OptionalExtension, Wait};
use crate::{Device, Error, ErrorKind, Layout, LegacyHandle, Loss, Memory, Subscriber};

const REGION_BYTES: u64 = 2 << 20;

/// A publisher under the test's control.
struct Fake {
    segment: Arc<Segment>,
    segment_fd: OwnedFd,
    words: Words,
    ring: SenderRing,
    socket: OwnedFd,
    sequence: u64,
    _offer: Offer,
}

impl Fake {
    /// A link to a real subscriber, with one region.
    fn attach(scratch: &Scratch, lossless: bool) -> (Fake, Subscriber) {
        let mut fake = None;
        let subscriber = meet(scratch, LONG, |socket| {
            let mut offer = Offer::new();
            (offer.regions, offer.lossless) = (1, lossless);
            let words = Words::map(&offer.fds[0]);
            offer.send(socket);
            let memory = memfd(REGION_BYTES, SIZE_SEALS);
            let region = packet(&Message::Region {
                id: 0,
                bytes: REGION_BYTES,
            });
            send_raw(socket, &region, &[memory.as_fd()]).unwrap();
            assert!(matches!(
                hear(socket),
                Received::Message(Message::Attached, _)
            ));
            send_raw(socket, &packet(&Message::Attached), &[]).unwrap();
            let segment = offer.segment.clone();
            fake = Some(Fake {
                segment_fd: offer.fds[0].try_clone().unwrap(),
                words,
                ring: SenderRing::new(segment.clone()),
                socket: socket.try_clone().unwrap(),
                sequence: 0,
                segment,
                _offer: offer,
            });
        });
        (fake.unwrap(), subscriber.unwrap())
    }

    /// The segment's inode.
    fn inode(&self) -> u64 {
        rustix::fs::fstat(&self.segment_fd).unwrap().st_ino
    }

    /// Publishes a valid sample if there is room, changed by `spoil` before the receiver reads it.
    fn send(&mut self, spoil: impl FnOnce(&Entry)) {
        self.send_with(b"meta", spoil);
    }

    /// Publishes a sample that lies at this place.
    fn send_in_place(&mut self, place: &Place<'_>) {
        let metadata = [&place.to_bytes()[..], b"behind it"].concat();
        self.send_with(&metadata, |it| word(it, PACKED, |packed| packed | IN_PLACE));
    }

    fn send_with(&mut self, metadata: &[u8], spoil: impl FnOnce(&Entry)) {
        let Some(position) = self.ring.space() else {
            return;
        };
        self.sequence += 1;
        let (metadata, layout) = (
            Metadata::new(metadata).unwrap(),
            Layout::bytes_only(1000).unwrap(),
        );
        let description = Description {
            sequence: self.sequence,
            sent_ns: 0,
            region: 0,
            slot: 512,
            layout: &layout,
            metadata: &metadata,
        };
        self.ring.publish(position, &description.packed(), false);
        spoil(self.segment.entry(position));
        self.segment.entry(position).ready.store(position);
    }
}

/// The words of an entry's description, as `pubsub::entry` packs them.
const PACKED: usize = 0;
const SLOT: usize = 1;
const SHAPE: usize = 2;
const METADATA: usize = 3;
const COMPLETION: usize = 4;
/// With the flag that says so, in front of the shape.
const OFFSET: usize = 2;
/// Without the flag of contiguous tensors, behind the shape.
const STRIDES: usize = 3;

/// The flag of a tensor that does not lie in its slot.
const IN_PLACE: u64 = 1 << 60;
/// That of a sample with parts, and that of long metadata.
const PARTS: u64 = 1 << 61;
const LONG_METADATA: u64 = 1 << 62;

type Lie = (&'static str, fn(&Entry));

fn word(entry: &Entry, index: usize, change: impl Fn(u64) -> u64) {
    let word = &entry.words[index];
    word.store(change(word.load(Relaxed)), Relaxed);
}

const LIES: [Lie; 28] = [
    ("dtype", |it| word(it, PACKED, |packed| packed | 0x3f << 41)),
    ("dtype", |it| {
        word(it, PACKED, |packed| packed & !(0x1f << 47))
    }),
    ("rank", |it| {
        word(it, PACKED, |packed| packed & !(0xf << 52) | 9 << 52)
    }),
    ("rank", |it| word(it, PACKED, |packed| packed | 0xf << 52)),
    ("metadata length", |it| {
        word(it, PACKED, |packed| packed & !(0x1ff << 32) | 257 << 32)
    }),
    ("flags", |it| word(it, PACKED, |packed| packed | 1 << 63)),
    // Words of a history that this publisher does not have.
    ("completion", |it| {
        word(it, PACKED, |packed| packed | 1 << 57)
    }),
    ("completion", |it| {
        word(it, PACKED, |packed| packed | 1 << 57);
        word(it, COMPLETION, |_| u64::MAX);
    }),
    ("place", |it| word(it, PACKED, |packed| packed | IN_PLACE)),
    ("place", |it| {
        word(it, PACKED, |packed| packed & !(0x1ff << 32) | IN_PLACE);
    }),
    ("parts", |it| word(it, PACKED, |packed| packed | PARTS)),
    ("flags", |it| {
        word(it, PACKED, |packed| packed | IN_PLACE | PARTS)
    }),
    // The page was never sent.
    ("metadata", |it| {
        word(it, PACKED, |packed| packed & !(0x1ff << 32) | LONG_METADATA)
    }),
    ("slot", |it| word(it, SLOT, |_| REGION_BYTES)),
    ("slot", |it| word(it, SLOT, |_| REGION_BYTES - 999)),
    ("slot", |it| word(it, SLOT, |_| u64::MAX)),
    ("slot", |it| {
        word(it, PACKED, |packed| packed | 1 << 59);
        word(it, OFFSET, |_| REGION_BYTES);
        word(it, OFFSET + 1, |_| 1000);
    }),
    ("layout", |it| {
        word(it, PACKED, |packed| packed | 1 << 59);
        word(it, OFFSET, |_| u64::MAX);
        word(it, OFFSET + 1, |_| 1000);
    }),
    // The time of sending would be where the shape is, and the shape where the metadata is.
    ("slot", |it| {
        word(it, PACKED, |packed| packed | 1 << 58);
        word(it, METADATA, |_| REGION_BYTES);
    }),
    ("layout", |it| word(it, SHAPE, |_| u64::MAX)),
    ("slot", |it| word(it, SHAPE, |_| REGION_BYTES)),
    ("layout", |it| {
        word(it, PACKED, |packed| packed & !(1 << 56));
        word(it, STRIDES, |_| i64::MIN as u64);
    }),
    ("slot", |it| {
        word(it, PACKED, |packed| packed & !(1 << 56));
        word(it, STRIDES, |_| 1 << 20);
    }),
    ("sequence", |it| it.sequence.store(0, Relaxed)),
    ("sequence", |it| it.sequence.store(7, Relaxed)),
    ("sequence", |it| it.sequence.store(u64::MAX, Relaxed)),
    ("position", |it| it.state_word.store((2 + 5) << 2, Relaxed)),
    ("state", |it| it.state_word.store(2 << 2 | 1, Relaxed)),
];

#[test]
fn every_invalid_field_of_an_entry_ends_that_link_alone() {
    alone(
        module_path!(),
        "every_invalid_field_of_an_entry_ends_that_link_alone",
        || {
            let scratch = Scratch::new();
            drop(Fake::attach(&scratch, true));
            let before = settled_descriptors();
            for (number, (lie, spoil)) in LIES.into_iter().enumerate() {
                let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
                let stream = stream();
                fake.send(|_| ());
                drop(subscriber.receive(&stream, LONG).unwrap());
                fake.send(spoil);
                let error = subscriber.receive(&stream, LONG).unwrap_err();
                assert!(
                    matches!(&error, Error::Protocol { field, .. } if *field == lie),
                    "lie {number}, {lie}: {error}"
                );
                let last_message = hear(&fake.socket);
                assert!(
                    matches!(
                        last_message,
                        Received::Message(Message::Close(CloseReason::Failed(_)), _)
                    ),
                    "{last_message:?}"
                );
                fake.send(|_| ());
                assert!(
                    subscriber.receive(&stream, LONG).is_err(),
                    "it stays closed"
                );
            }
            eventually("every descriptor is closed", || {
                super::descriptors::descriptors() <= before
            });
            let publisher = scratch.publisher(|it| it);
            assert_delivers(
                &publisher,
                &mut scratch.subscriber(),
                b"a good one afterwards",
            );
        },
    );
}

#[test]
fn a_page_of_metadata_that_comes_twice_or_is_no_page_ends_its_link() {
    let scratch = Scratch::new();
    for is_page in [true, false] {
        let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
        let bytes = fake.segment.cells_bytes();
        let (_page, fd) = SharedPage::publish(None, bytes).unwrap();
        let pages = match is_page {
            true => [fd.as_fd(), fd.as_fd()],
            false => [fake.segment_fd.as_fd(), fake.segment_fd.as_fd()],
        };
        for page in pages {
            let _ = message::send(fake.socket.as_fd(), &Message::MetadataPage, &[page]);
        }
        let error = subscriber.receive(&stream(), LONG).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        fake.send(|_| ());
        assert!(subscriber.receive(&stream(), LONG).is_err());
    }
}

#[test]
fn a_place_that_cannot_be_opened_costs_its_sample_alone() {
    let scratch = Scratch::new();
    let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
    let (device, stream) = (Device::host(), stream());
    let memory = Memory::allocate(&device, 4096).unwrap();
    let published = memory.publish("memory", scratch.domain.options()).unwrap();
    let plain = device.backend().allocate_plain(4096).unwrap();
    // SAFETY: freed below, behind the subscriber.
    let handle = unsafe { LegacyHandle::export(&device, plain, 1000) }.unwrap();
    // SAFETY: as above.
    let short = unsafe { LegacyHandle::export(&device, plain, 999) }.unwrap();
    let (good, stale) = (handle.to_bytes(), handle.of_another_process().to_bytes());
    let damaged = [&good[..good.len() - 1], &[!good[good.len() - 1]]].concat();
    let at = |name, offset| Place::Published {
        name,
        incarnation: published.incarnation(),
        offset,
    };
    let another_run = |name| Place::Published {
        name,
        incarnation: [7; 16],
        offset: 0,
    };
    let places = [
        at("memory", 4096 - 999),
        at("memory", u64::MAX),
        another_run("nobody"),
        at("a/../b", 0),
        another_run("memory"),
        Place::Legacy(b""),
        Place::Legacy(&damaged),
        Place::Legacy(&stale),
        Place::Legacy(&short.to_bytes()),
    ];
    for place in &places {
        fake.send_in_place(place);
        let error = subscriber.receive(&stream, LONG).unwrap_err();
        assert!(
            !matches!(error, Error::Protocol { .. } | Error::Timeout { .. }),
            "{place:?}: {error}"
        );
    }
    let (lowest, offset) = (memory.ptr() + 4096 - 1000, 4096 - 1000);
    for (place, ptr) in [
        (Place::Legacy(&good), plain),
        (at("memory", offset), lowest),
    ] {
        fake.send_in_place(&place);
        let sample = subscriber.receive(&stream, LONG).unwrap();
        assert_eq!((sample.ptr(), sample.metadata()), (ptr, &b"behind it"[..]));
        assert!(sample.info().is_in_place);
        sample.finish(LONG).unwrap();
    }
    drop(subscriber);
    // SAFETY: allocated above, and read by no stream.
    unsafe { device.backend().free_plain(plain) }.unwrap();
}

/// As after the death of a sender with last samples that are complete, and lie in their slots.
#[test]
fn memory_that_died_with_its_process_is_lost_with_its_sample_and_ends_no_loop() {
    let scratch = Scratch::new();
    let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
    let (device, stream) = (Device::host(), stream());
    let plain = device.backend().allocate_plain(4096).unwrap();
    // SAFETY: freed below, and opened by nobody.
    let handle = unsafe { LegacyHandle::export(&device, plain, 1000) }.unwrap();
    fake.send_in_place(&Place::Legacy(&handle.of_another_process().to_bytes()));
    fake.send_in_place(&Place::Legacy(b""));
    fake.send(|_| ());
    let mut samples = subscriber.samples(&stream, LONG);
    let gone = samples.next().unwrap().unwrap_err();
    assert!(
        matches!(gone, Error::Lost(Loss::Sample { sequence: 1, .. })),
        "{gone}"
    );
    let garbled = samples.next().unwrap().unwrap_err();
    let text = garbled.to_string();
    assert!(text.starts_with("not a usable legacy handle: "), "{text}");
    let next = samples.next().unwrap().unwrap();
    assert_eq!(
        (
            next.sequence(),
            next.info().discontinuity.map(|gap| gap.missing)
        ),
        (3, None),
        "none was received before"
    );
    // SAFETY: allocated above, and read by no stream.
    unsafe { device.backend().free_plain(plain) }.unwrap();
}

/// The listener of a stopped process: connections succeed, and nobody answers.
#[test]
fn a_wait_for_a_silent_owner_of_memory_can_be_cancelled_and_takes_nothing() {
    let scratch = Scratch::new();
    let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
    let silent = EndpointName::new("silent").unwrap();
    let claim = scratch.domain.claim(&silent, false).unwrap();
    let (name, incarnation, offset) = ("silent", [1; 16], 0);
    fake.send_in_place(&Place::Published {
        name,
        incarnation,
        offset,
    });
    let poll = subscriber.receive(&stream(), Duration::ZERO).unwrap_err();
    assert!(matches!(poll, Error::Timeout { .. }), "{poll}");
    for _ in 0..2 {
        let looks = Cell::new(0);
        let cancelled = || looks.replace(looks.get() + 1) >= 1;
        let wait = Wait::at_most(Duration::MAX).unless(&cancelled);
        let error = subscriber.receive(&stream(), wait).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    }
    fake.send(|_| ());
    let refused = subscriber.receive(&stream(), LONG).unwrap_err();
    assert!(matches!(refused, Error::Handshake { .. }), "{refused}");
    // It stays the next, until its memory has no owner any more.
    drop(claim);
    let expired = subscriber.receive(&stream(), LONG).unwrap_err();
    assert_ne!(expired.kind(), ErrorKind::Timeout, "{expired}");
    assert!(
        !subscriber
            .receive(&stream(), LONG)
            .unwrap()
            .info()
            .is_in_place
    );
}

/// An event loop that asks for the descriptor before each sleep.
#[test]
fn a_poller_sleeps_while_a_silent_owner_is_asked_for_memory_and_more_samples_have_come() {
    let scratch = Scratch::new();
    let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
    let silent = EndpointName::new("silent").unwrap();
    let _claim = scratch.domain.claim(&silent, false).unwrap();
    let (name, incarnation, offset) = ("silent", [1; 16], 0);
    fake.send_in_place(&Place::Published {
        name,
        incarnation,
        offset,
    });
    fake.send(|_| ());
    eventually("it sleeps", || {
        let poll = subscriber.receive(&stream(), Duration::ZERO).optional();
        assert!(matches!(poll, Ok(None)), "{poll:?}");
        !wait_readable(subscriber.as_fd(), Duration::ZERO)
    });
}

/// As an owner that dies: what connects to it is closed before its name is free.
#[test]
fn memory_of_an_owner_that_closes_connections_unanswered_is_lost_with_its_sample() {
    let scratch = Scratch::new();
    let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
    let dying = EndpointName::new("dying").unwrap();
    let claim = scratch.domain.claim(&dying, false).unwrap();
    let (name, incarnation, offset) = ("dying", [1; 16], 0);
    fake.send_in_place(&Place::Published {
        name,
        incarnation,
        offset,
    });
    let lost = std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2 {
                assert!(wait_readable(claim.listener().as_fd(), LONG));
                drop(rustix::net::accept(claim.listener()).unwrap());
            }
        });
        subscriber.receive(&stream(), LONG).unwrap_err()
    });
    assert!(
        matches!(lost, Error::Lost(Loss::Sample { sequence: 1, .. })),
        "{lost}"
    );
}

#[test]
fn an_unannounced_region_times_out_with_an_error() {
    let scratch = Scratch::new();
    let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
    fake.send(|it| word(it, PACKED, |packed| packed | 5));
    let error = subscriber.receive(&stream(), LONG).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Protocol {
                field: "region",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_region_that_is_closed_under_a_held_sample_stays_mapped_until_it_is_released() {
    let scratch = Scratch::new();
    let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
    fake.send(|_| ());
    let sample = subscriber.receive(&stream(), LONG).unwrap();
    let close = packet(&Message::CloseRegion { id: 0 });
    send_raw(&fake.socket, &close, &[]).unwrap();
    let memory = memfd(REGION_BYTES, SIZE_SEALS);
    let (id, bytes) = (1, REGION_BYTES);
    let next = packet(&Message::Region { id, bytes });
    send_raw(&fake.socket, &next, &[memory.as_fd()]).unwrap();
    fake.send(|it| word(it, PACKED, |packed| packed | 1));
    let second = subscriber.receive(&stream(), LONG).unwrap();
    assert_eq!(sample.to_vec(LONG).unwrap(), [0; 1000]);
    drop(second);
    drop(sample);
    loop {
        match hear(&fake.socket) {
            Received::Message(Message::RegionClosed { id }, _) => break assert_eq!(id, 0),
            Received::Nothing => std::thread::yield_now(),
            other => panic!("{other:?}"),
        }
    }
    fake.send(|_| ());
    let error = subscriber.receive(&stream(), LONG).unwrap_err();
    let is_named = matches!(
        &error,
        Error::Protocol {
            field: "region",
            ..
        }
    );
    assert!(is_named, "{error}");
}

#[test]
fn a_sequence_may_jump_but_not_run_back_where_samples_may_be_dropped() {
    let scratch = Scratch::new();
    let (mut fake, mut subscriber) = Fake::attach(&scratch, false);
    let stream = stream();
    fake.send(|it| it.sequence.store(u64::MAX - 1, Relaxed));
    assert_eq!(
        subscriber.receive(&stream, LONG).unwrap().sequence(),
        u64::MAX - 1
    );
    fake.send(|it| it.sequence.store(u64::MAX, Relaxed));
    assert_eq!(
        subscriber.receive(&stream, LONG).unwrap().sequence(),
        u64::MAX
    );
    fake.send(|_| ());
    assert!(matches!(
        subscriber.receive(&stream, LONG),
        Err(Error::Protocol {
            field: "sequence",
            ..
        })
    ));
}

#[test]
fn a_lossless_sequence_at_its_end_is_an_error_and_not_an_overflow() {
    let scratch = Scratch::new();
    let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
    let stream = stream();
    fake.send(|it| it.sequence.store(u64::MAX, Relaxed));
    drop(subscriber.receive(&stream, LONG).unwrap());
    fake.send(|_| ());
    assert!(matches!(
        subscriber.receive(&stream, LONG),
        Err(Error::Protocol {
            field: "sequence",
            ..
        })
    ));
}

#[test]
fn forged_counts_overflow_nothing() {
    let scratch = Scratch::new();
    let (fake, subscriber) = Fake::attach(&scratch, true);
    fake.segment
        .header()
        .sender
        .dropped
        .store(u64::MAX, Relaxed);
    fake.segment
        .header()
        .sender
        .heartbeat_ns
        .store(u64::MAX, Relaxed);
    assert_eq!(subscriber.dropped(), u64::MAX);
    assert!(subscriber.publisher().map(|it| it.state).is_some());
}

#[test]
fn endless_invalid_messages_after_the_handshake_are_answered_once() {
    alone(
        module_path!(),
        "endless_invalid_messages_after_the_handshake_are_answered_once",
        || {
            let scratch = Scratch::new();
            drop(Fake::attach(&scratch, true));
            let before = settled_descriptors();
            for message in [
                Message::Attached,
                Message::Region { id: 7, bytes: 4096 },
                Message::Region { id: 1, bytes: 3 },
                Message::CloseRegion { id: 7 },
                Message::RegionClosed { id: 0 },
            ] {
                let (fake, mut subscriber) = Fake::attach(&scratch, true);
                let memory = memfd(4096, SIZE_SEALS);
                let fds = [memory.as_fd()];
                let fds = if matches!(message, Message::Region { .. }) {
                    &fds[..]
                } else {
                    &[]
                };
                // As many as the socket takes.
                (0..10_000)
                    .take_while(|_| send_raw(&fake.socket, &packet(&message), fds).is_ok())
                    .count();
                let error = subscriber.receive(&stream(), LONG).unwrap_err();
                assert!(
                    matches!(error, Error::Protocol { .. } | Error::Handshake { .. }),
                    "{error}"
                );
                drop((fake, subscriber, memory));
                eventually("every descriptor is closed", || {
                    super::descriptors::descriptors() <= before
                });
            }
        },
    );
}

#[test]
fn a_wake_channel_that_is_closed_or_signals_endlessly_hangs_no_receiver() {
    let scratch = Scratch::new();
    for rings in [false, true] {
        let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
        let stream = stream();
        if rings {
            (0..1000).for_each(|_| fake._offer.wake.ring());
        } else {
            let (other, _) = crate::runtime::doorbell::PeerDoorbell::pair().unwrap();
            drop(std::mem::replace(&mut fake._offer.wake, other));
            fake._offer.fds.clear();
        }
        let timeout = Duration::from_millis(50);
        assert!(matches!(
            subscriber.receive(&stream, timeout),
            Err(Error::Timeout { .. })
        ));
        fake.send(|_| ());
        drop(subscriber.receive(&stream, LONG).unwrap());
        // Nothing is due: a poller must not be woken for ever.
        assert!(
            subscriber
                .receive(&stream, Duration::ZERO)
                .optional()
                .unwrap()
                .is_none()
        );
        let fd = subscriber.as_fd().try_clone_to_owned().unwrap();
        eventually("it reads as idle", || {
            assert!(
                subscriber
                    .receive(&stream, Duration::ZERO)
                    .optional()
                    .unwrap()
                    .is_none()
            );
            !crate::ipc::message::wait_readable(fd.as_fd(), Duration::ZERO)
        });
    }
}

#[test]
fn a_closing_subscriber_keeps_memory_mapped_until_its_streams_are_done() {
    let scratch = Scratch::new();
    let (mut fake, mut subscriber) = Fake::attach(&scratch, true);
    let (stream, (go, wait)) = (stream(), std::sync::mpsc::channel::<()>());
    fake.send(|_| ());
    let sample = subscriber.receive(&stream, LONG).unwrap();
    stream.call(move || assert!(wait.recv().is_err())).unwrap();
    drop(sample);
    // Its sender claims that it is released, but it is not: the release is enqueued behind work
    // that reads the sample.
    fake.segment.entry(1).released.store(1);
    assert_eq!(
        mappings(fake.inode()),
        3,
        "this side's two and the subscriber's"
    );
    drop(subscriber);
    // A link that ended later, with idle streams, shows that this link's turn has passed.
    let (later, another) = Fake::attach(&scratch, true);
    drop(another);
    eventually("a later link is unmapped", || mappings(later.inode()) == 2);
    assert_eq!(
        mappings(fake.inode()),
        3,
        "the stream still has to write there"
    );
    drop(go);
    stream.synchronize(LONG).unwrap();
    eventually("now it is unmapped", || mappings(fake.inode()) == 2);
}

/// More rounds than any machine needs.
const ROUNDS_MAX: u64 = 4000;

#[test]
fn concurrent_writes_to_a_segment_give_samples_inside_the_region_or_errors() {
    alone(
        module_path!(),
        "concurrent_writes_to_a_segment_give_samples_inside_the_region_or_errors",
        || {
            let scratch = Scratch::new();
            drop(Fake::attach(&scratch, true));
            let before = settled_descriptors();
            let (mut calls, mut samples, mut errors) = (0u32, 0u32, 0u32);
            let mut round = 0;
            // Until enough of both has been seen: the scheduler decides how much one round shows.
            while round < 400 || (round < ROUNDS_MAX && (samples <= 1000 || errors <= 10)) {
                round += 1;
                let (mut fake, mut subscriber) = Fake::attach(&scratch, round % 2 == 0);
                let words = fake.words.clone();
                let stream = stream();
                let scribbling = words.scribble_on(round, [0, 5, 30, 150][round as usize / 2 % 4]);
                for call in 0.. {
                    if call >= 400 && scribbling.written() >= 400 {
                        break;
                    }
                    if call >= 400 {
                        // The other thread's turn.
                        std::thread::yield_now();
                    }
                    calls += 1;
                    fake.send(|_| ());
                    match subscriber.receive(&stream, Duration::ZERO).optional() {
                        Ok(Some(sample)) => {
                            samples += 1;
                            assert!(
                                sample.layout().bytes() <= REGION_BYTES
                                    && sample.metadata().len() <= 256
                            );
                            if call % 16 == 0 {
                                // Every byte of it can be read, whatever its contents. It may never
                                // be complete.
                                let mut bytes = vec![0; sample.layout().bytes() as usize];
                                let read = sample.copy_to(&mut bytes, Duration::from_millis(1));
                                assert!(matches!(
                                    read,
                                    Ok(())
                                        | Err(Error::Timeout { .. }
                                            | Error::Lost(Loss::Sample { .. }))
                                ));
                            }
                        }
                        Ok(None) => std::hint::spin_loop(),
                        Err(Error::Protocol { .. }) => {
                            errors += 1;
                            break;
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
                drop((subscriber, stream));
                drop(scribbling);
                // The reactor would rescue from a dead sender; this sender is alive, and must
                // release the streams itself.
                words.let_all_go();
            }
            println!("{calls} calls, {samples} samples, {errors} errors");
            assert!(
                samples > 1000 && errors > 10,
                "{samples} samples and {errors} errors: it tests nothing"
            );
            eventually("everything is released", || {
                super::descriptors::descriptors() <= before
            });
            let publisher = scratch.publisher(|it| it);
            assert_delivers(
                &publisher,
                &mut scratch.subscriber(),
                b"a good one afterwards",
            );
        },
    );
}
