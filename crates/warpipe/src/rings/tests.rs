//! Rings on the host backend: threads and streams of one process on both sides.

mod ends;

use std::cell::Cell;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::Duration;

use super::*;

const LIMIT: Duration = Duration::from_secs(30);

struct Place {
    folder: std::path::PathBuf,
    domain: Domain,
    device: Device,
}

impl Place {
    fn new() -> Place {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, SeqCst);
        let folder = format!("warpipe-rings-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        Place {
            domain: Domain::at(&folder).unwrap(),
            folder,
            device: Device::host(),
        }
    }

    fn options(&self) -> KernelRingOptions {
        self.domain.on(&self.device)
    }

    fn open(&self) -> Result<KernelRing> {
        KernelRing::open("ring", self.domain.on(&self.device), Duration::ZERO)
    }

    /// A ring with its consumers, started.
    fn ring(&self, options: KernelRingOptions) -> (KernelRing, Vec<KernelRing>) {
        let consumers = options.consumers;
        let producer = KernelRing::new("ring", options).unwrap();
        let consumers = (0..consumers).map(|_| self.open().unwrap()).collect();
        producer.wait_for_consumers(LIMIT).unwrap();
        (producer, consumers)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

fn side(ring: &KernelRing) -> (HostRing, Stream) {
    let stream = ring.device.stream().unwrap();
    // SAFETY: the caller keeps the ring while it uses the side.
    (
        unsafe { HostRing::new(ring.params(&stream).unwrap()) },
        stream,
    )
}

fn write(side: &HostRing, item: u64, words: u64) {
    for index in 0..words {
        // SAFETY: the slot is the caller's until it is passed on, and has so many words.
        unsafe {
            side.slot(item)
                .cast::<u64>()
                .add(index as usize)
                .write(item * 1000 + index)
        };
    }
}

fn check_words(side: &HostRing, item: u64, words: u64) {
    for index in 0..words {
        // SAFETY: as for `write`.
        let found = unsafe { side.slot(item).cast::<u64>().add(index as usize).read() };
        assert_eq!(found, item * 1000 + index, "item {item}");
    }
}

#[test]
fn a_start_that_is_cancelled_when_the_last_consumer_has_come_starts_nothing() {
    let place = Place::new();
    let producer = KernelRing::new("ring", place.options()).unwrap();
    let consumer = Cell::new(None);
    let cancelled = || {
        consumer.set(Some(place.open().unwrap()));
        true
    };
    let wait = Wait::at_most(LIMIT).unless(&cancelled);
    let told = producer.wait_for_consumers(wait);
    assert!(matches!(told, Err(Error::Timeout { .. })), "{told:?}");
    // Its place is free again.
    drop(consumer.take());
    let _next = place.open().unwrap();
    producer.wait_for_consumers(LIMIT).unwrap();
}

#[test]
fn the_header_has_the_constants_and_structures_of_the_table() {
    let header = KernelRing::HEADER;
    assert!(
        header.contains(&layout::header()),
        "run `cargo xtask ring-header`, and commit it"
    );
}

#[test]
fn the_statuses_of_the_header_are_those_of_the_library() {
    for &(name, value, _) in layout::STATUSES {
        match RingEnd::of_status(value) {
            None => assert_eq!(name, "OK"),
            Some(end) => {
                assert_eq!(end as u64, value);
                let found = format!("{end:?}").to_uppercase();
                assert_eq!(found, name.replace('_', ""));
            }
        }
    }
}

#[test]
fn every_consumer_gets_every_item_once_and_whole() {
    let place = Place::new();
    let options = KernelRingOptions {
        depth: 4,
        slot_bytes: 512,
        consumers: 3,
        ..place.options()
    };
    let (producer, consumers) = place.ring(options);
    const ITEMS: u64 = 500;
    thread::scope(|scope| {
        for ring in &consumers {
            scope.spawn(move || {
                let (side, _stream) = side(ring);
                for item in 0..ITEMS {
                    assert_eq!(side.claim(), item);
                    side.wait(item).unwrap();
                    check_words(&side, item, 64);
                    side.pass(item);
                }
            });
        }
        let (side, _stream) = side(&producer);
        for item in 0..ITEMS {
            assert_eq!(side.claim(), item);
            side.wait(item).unwrap();
            write(&side, item, 64);
            side.pass(item);
        }
    });
}

#[test]
fn several_blocks_of_each_side_take_items_of_their_own() {
    let place = Place::new();
    let (producer, consumers) = place.ring(KernelRingOptions {
        depth: 4,
        slot_bytes: 512,
        ..place.options()
    });
    const ITEMS: u64 = 300;
    let seen: Vec<AtomicU64> = (0..ITEMS).map(|_| AtomicU64::new(0)).collect();
    let blocks = |ring: &KernelRing, work: &(dyn Fn(&HostRing, u64) + Sync)| {
        let (side, _stream) = side(ring);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(move || {
                    for _ in 0..ITEMS / 3 {
                        let item = side.claim();
                        side.wait(item).unwrap();
                        work(&side, item);
                        side.pass(item);
                    }
                });
            }
        });
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            blocks(&consumers[0], &|side, item| {
                check_words(side, item, 64);
                seen[item as usize].fetch_add(1, SeqCst);
            })
        });
        blocks(&producer, &|side, item| write(side, item, 64));
    });
    assert!(seen.iter().all(|count| count.load(SeqCst) == 1));
}

#[test]
fn blocks_that_share_an_item_pass_it_on_when_the_last_one_has_finished() {
    let place = Place::new();
    let (producer, consumers) = place.ring(KernelRingOptions {
        depth: 2,
        slot_bytes: 512,
        ..place.options()
    });
    const ITEMS: u64 = 200;
    thread::scope(|scope| {
        let (writer, _stream) = side(&producer);
        for block in 0..2 {
            scope.spawn(move || {
                for item in 0..ITEMS {
                    writer.wait(item).unwrap();
                    // SAFETY: each block has half of the slot, which is theirs until both arrive.
                    unsafe {
                        let half = writer.slot(item).cast::<u64>().add(32 * block);
                        for index in 0..32 {
                            half.add(index)
                                .write(item * 1000 + (32 * block + index) as u64);
                        }
                    }
                    writer.arrive(item, 2);
                }
            });
        }
        let (reader, _stream) = side(&consumers[0]);
        for item in 0..ITEMS {
            reader.wait(reader.claim()).unwrap();
            check_words(&reader, item, 64);
            reader.pass(item);
        }
    });
    assert_eq!(side(&producer).0.position(), ITEMS);
}

#[test]
fn a_producer_waits_for_its_slowest_consumer() {
    let place = Place::new();
    let options = KernelRingOptions {
        depth: 2,
        consumers: 2,
        spin_limit: 500,
        ..place.options()
    };
    let (producer, consumers) = place.ring(options);
    let (writer, _stream) = side(&producer);
    let (fast, _stream) = side(&consumers[0]);
    for item in 0..2 {
        writer.wait(item).unwrap();
        writer.pass(item);
        fast.wait(item).unwrap();
        fast.pass(item);
    }
    assert_eq!(writer.wait(2), Err(RingEnd::SpinLimit));
    let (slow, _stream) = side(&consumers[1]);
    slow.wait(0).unwrap();
    slow.pass(0);
    assert_eq!(writer.wait(2), Ok(()));
}

#[test]
fn a_wait_ends_at_the_limit_of_looks() {
    let place = Place::new();
    let (_producer, consumers) = place.ring(KernelRingOptions {
        spin_limit: 300,
        ..place.options()
    });
    assert_eq!(side(&consumers[0]).0.wait(0), Err(RingEnd::SpinLimit));
}

#[test]
fn a_consumer_takes_what_was_published_and_then_sees_the_close() {
    let place = Place::new();
    let (producer, consumers) = place.ring(place.options());
    let (reader, _stream) = side(&consumers[0]);
    let (writer, _) = side(&producer);
    for item in 0..3 {
        writer.wait(item).unwrap();
        write(&writer, item, 1);
        writer.pass(item);
    }
    drop(producer);
    for item in 0..3 {
        reader.wait(item).unwrap();
        check_words(&reader, item, 1);
        reader.pass(item);
    }
    assert_eq!(reader.wait(3), Err(RingEnd::Closed));
}

#[test]
fn a_producer_goes_on_without_a_consumer_that_closed_and_ends_without_any() {
    let place = Place::new();
    let (producer, mut consumers) = place.ring(KernelRingOptions {
        depth: 1,
        consumers: 2,
        ..place.options()
    });
    let (writer, _stream) = side(&producer);
    writer.wait(0).unwrap();
    writer.pass(0);
    drop(consumers.pop());
    {
        let (reader, _stream) = side(&consumers[0]);
        reader.wait(0).unwrap();
        reader.pass(0);
    }
    assert_eq!(writer.wait(1), Ok(()));
    writer.pass(1);
    drop(consumers);
    assert_eq!(writer.wait(2), Err(RingEnd::Closed));
}

#[test]
fn a_side_that_stops_ends_its_own_waits_and_its_steps() {
    let place = Place::new();
    let (producer, consumers) = place.ring(place.options());
    let consumer = &consumers[0];
    let stream = consumer.device.stream().unwrap();
    consumer.wait_on(&stream).unwrap();
    consumer.release_on(&stream).unwrap();
    consumer.stop();
    stream.synchronize(LIMIT).unwrap();
    let error = consumer.check().unwrap_err();
    assert!(
        matches!(
            &error,
            Error::State(StateFault::LinkClosed {
                kind: Kind::KernelRing,
                ..
            })
        ) && error
            .hint()
            .is_some_and(|hint| hint.contains("open it again")),
        "{error}"
    );
    assert_eq!(side(consumer).0.wait(0), Err(RingEnd::Stopped));
    assert_eq!(side(consumer).0.position(), 0, "nothing was passed on");
    producer.check().unwrap();
}

#[test]
fn a_side_that_never_waits_sees_that_it_is_to_stop() {
    let place = Place::new();
    let (producer, _consumers) = place.ring(KernelRingOptions {
        depth: 1024,
        ..place.options()
    });
    let (writer, _stream) = side(&producer);
    producer.stop();
    let end = (0..1024).find_map(|item| writer.wait(item).err().map(|end| (item, end)));
    assert_eq!(end, Some((255, RingEnd::Stopped)));
}

#[test]
fn steps_on_streams_carry_every_item_in_order() {
    let place = Place::new();
    let (producer, consumers) = place.ring(KernelRingOptions {
        depth: 4,
        consumers: 2,
        ..place.options()
    });
    const ITEMS: u64 = 1000;
    let writing = producer.device.stream().unwrap();
    let reading: Vec<Stream> = consumers
        .iter()
        .map(|ring| ring.device.stream().unwrap())
        .collect();
    let wrong = Arc::new(AtomicU64::new(0));
    for item in 0..ITEMS {
        producer.wait_on(&writing).unwrap();
        let slot = producer.slot(item % 4).unwrap();
        // SAFETY: the slot is the stream's between the two steps.
        writing
            .call(move || unsafe { (slot as *mut u64).write(item) })
            .unwrap();
        producer.publish_on(&writing).unwrap();
        for (ring, stream) in consumers.iter().zip(&reading) {
            ring.wait_on(stream).unwrap();
            let (slot, wrong) = (ring.slot(item % 4).unwrap(), wrong.clone());
            stream
                .call(move || {
                    // SAFETY: as above.
                    let found = unsafe { (slot as *const u64).read() };
                    wrong.fetch_add(u64::from(found != item), SeqCst);
                })
                .unwrap();
            ring.release_on(stream).unwrap();
        }
    }
    for (ring, stream) in consumers.iter().zip(&reading) {
        stream.synchronize(LIMIT).unwrap();
        ring.check().unwrap();
        assert_eq!(side(ring).0.position(), ITEMS);
    }
    assert_eq!(wrong.load(SeqCst), 0);
}

#[test]
fn a_failed_wait_on_a_stream_is_reported_and_no_later_step_does_anything() {
    let place = Place::new();
    let (producer, consumers) = place.ring(place.options());
    let stream = consumers[0].device.stream().unwrap();
    drop(producer);
    for _ in 0..3 {
        consumers[0].wait_on(&stream).unwrap();
        consumers[0].release_on(&stream).unwrap();
    }
    stream.synchronize(LIMIT).unwrap();
    let error = consumers[0].check().unwrap_err();
    assert!(
        matches!(error, Error::PeerGone { graceful: true, .. }),
        "{error}"
    );
    assert_eq!(side(&consumers[0]).0.position(), 0);
}

#[test]
fn a_ring_takes_its_consumers_and_no_more() {
    let place = Place::new();
    let producer = KernelRing::new("ring", place.options()).unwrap();
    let early = producer.wait_for_consumers(Duration::ZERO).unwrap_err();
    assert!(matches!(early, Error::Timeout { .. }), "{early}");
    let stream = producer.device.stream().unwrap();
    assert!(matches!(
        producer.params(&stream),
        Err(Error::Argument { .. })
    ));
    let first = place.open().unwrap();
    assert!(matches!(
        place.open(),
        Err(Error::Refused { denied: false, .. })
    ));
    drop(first);
    // Its place is free again before the start, as soon as the producer has seen the close.
    let second = (0..1000)
        .find_map(|_| match place.open() {
            Ok(ring) => Some(ring),
            Err(Error::Refused { denied: false, .. }) => {
                thread::yield_now();
                None
            }
            Err(error) => panic!("{error}"),
        })
        .expect("the place is free");
    producer.wait_for_consumers(LIMIT).unwrap();
    drop(second);
    assert!(matches!(
        place.open(),
        Err(Error::Refused { denied: false, .. })
    ));
}

#[test]
fn what_no_ring_can_be_is_refused() {
    let place = Place::new();
    let options = || place.options();
    for wrong in [
        KernelRingOptions {
            depth: 0,
            ..options()
        },
        KernelRingOptions {
            depth: 3,
            ..options()
        },
        KernelRingOptions {
            depth: 2048,
            ..options()
        },
        KernelRingOptions {
            slot_bytes: 0,
            ..options()
        },
        KernelRingOptions {
            slot_bytes: u64::MAX,
            ..options()
        },
        KernelRingOptions {
            slot_bytes: 1 << 40,
            ..options()
        },
        KernelRingOptions {
            consumers: 0,
            ..options()
        },
        KernelRingOptions {
            consumers: 9,
            ..options()
        },
        KernelRingOptions {
            spin_limit: 0,
            ..options()
        },
    ] {
        let error = KernelRing::new("ring", wrong).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error}");
    }
    let (producer, consumers) = place.ring(options());
    let stream = producer.device.stream().unwrap();
    assert!(matches!(
        producer.release_on(&stream),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        consumers[0].publish_on(&stream),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(producer.slot(8), Err(Error::Argument { .. })));
}

#[test]
fn one_gpu_in_time_slices_is_refused_unless_the_producer_allows_it() {
    use crate::backend::DeviceKind;
    let [gpu, other] = [1, 2].map(|uuid| DeviceId {
        kind: DeviceKind::Cuda,
        uuid: [uuid; 16],
    });
    let grant = |device, runs_beside, allows_time_slices| RingGrant {
        depth: 1,
        slot_bytes: 128,
        slots_bytes: 4096,
        words_bytes: 4096,
        spins_max: 1,
        device,
        runs_beside,
        allows_time_slices,
    };
    let takes_turns = consumer::takes_turns;
    assert!(takes_turns(&grant(gpu, false, false), gpu, false));
    assert!(
        takes_turns(&grant(gpu, true, false), gpu, false),
        "one is no client"
    );
    assert!(
        takes_turns(&grant(gpu, false, false), gpu, true),
        "one is no client"
    );
    assert!(
        !takes_turns(&grant(gpu, true, false), gpu, true),
        "under MPS"
    );
    assert!(
        !takes_turns(&grant(gpu, false, true), gpu, false),
        "allowed"
    );
    assert!(
        !takes_turns(&grant(gpu, false, false), other, false),
        "two GPUs"
    );
    let host = Device::host().info().id;
    assert!(!takes_turns(&grant(host, false, false), host, false));
}

#[test]
fn memory_that_is_no_consumers_words_is_refused_and_the_ring_goes_on() {
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, memfd_create};

    use crate::ipc::{Address, ClientSession, SessionObserver, encode};
    struct Deaf;
    impl SessionObserver for Deaf {}

    let place = Place::new();
    let producer = KernelRing::new("ring", place.options()).unwrap();
    let at = Address {
        domain: &place.domain,
        name: &EndpointName::new("ring").unwrap(),
        kind: Kind::KernelRing,
    };
    let id = place.device.info().id;
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let unsealed = memfd_create(c"words", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, layout::WORDS_BYTES).unwrap();
    let long = allocate(&place.device, 2 * layout::WORDS_BYTES).unwrap();
    let long = long.export().unwrap();
    for (bytes, memory) in [
        (layout::WORDS_BYTES, pipe.as_fd()),
        (layout::WORDS_BYTES, unsealed.as_fd()),
        (layout::WORDS_BYTES, long.as_fd()),
        (layout::WORDS_BYTES + 1, long.as_fd()),
        (1 << 40, long.as_fd()),
        (0, long.as_fd()),
        (u64::MAX, long.as_fd()),
    ] {
        let session = (0..1000).find_map(|_| {
            // The place of the one before is free once the producer has seen its end.
            let (session, _) = ClientSession::attach(&at, Some(id), b"", LIMIT).ok()?;
            Some(session)
        });
        let session = session.expect("the place is free");
        session.observe(Arc::new(Deaf)).unwrap();
        let offer = encode(&WordsOffer {
            bytes,
            runs_beside: true,
        })
        .unwrap();
        let refused = session.request_with(&offer, Some(memory), LIMIT);
        assert!(
            matches!(refused, Err(Error::Refused { denied: false, .. })),
            "{bytes}: {refused:?}"
        );
        assert!(matches!(
            session.request(b"anything", LIMIT),
            Err(Error::Refused { denied: false, .. })
        ));
    }
    let consumer = (0..1000)
        .find_map(|_| place.open().ok())
        .expect("the place is free");
    producer.wait_for_consumers(LIMIT).unwrap();
    drop(consumer);
}

#[test]
fn a_grant_that_is_of_no_ring_is_refused_before_anything_is_mapped() {
    let device = Device::host();
    let sound = RingGrant {
        depth: 8,
        slot_bytes: 4096,
        slots_bytes: 8 * 4096,
        words_bytes: layout::WORDS_BYTES,
        spins_max: 1,
        device: device.info().id,
        runs_beside: true,
        allows_time_slices: false,
    };
    assert!(consumer::check(&sound, &device, "ring").is_ok());
    let wrong: [fn(&mut RingGrant); 10] = [
        |grant| grant.depth = 0,
        |grant| grant.depth = 7,
        |grant| grant.depth = 2048,
        |grant| grant.slot_bytes = 0,
        |grant| grant.slot_bytes = 100,
        |grant| grant.slot_bytes = 1 << 63,
        |grant| grant.slots_bytes = 4096,
        |grant| grant.slots_bytes = u64::MAX,
        |grant| grant.words_bytes = 4096,
        |grant| grant.spins_max = 0,
    ];
    for change in wrong {
        let mut grant = sound.clone();
        change(&mut grant);
        let error = consumer::check(&grant, &device, "ring").unwrap_err();
        assert!(
            matches!(error, Error::Protocol { .. }),
            "{grant:?}: {error}"
        );
    }
}
