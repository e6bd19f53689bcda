//! Seeded garbage for every check of a peer's bytes: no panic, and accepted bytes keep their
//! invariants.

use std::sync::atomic::Ordering::Relaxed;

use super::stage::{Random, packet};
use crate::fuzzing::{assert_promises, messages};
use crate::ipc::message::decode;
use crate::pubsub::entry::{Completion, Description, Metadata, UntrustedEntry};
use crate::shm::segment::{META_BYTES_MAX, Segment};
use crate::tensor::RANK_MAX;
use crate::{DType, Device, Layout};

/// Rounds of the cheap ones.
const ROUNDS: u32 = 100_000;

#[test]
fn a_packet_decodes_to_the_sent_message_or_to_an_error() {
    let mut random = Random(3);
    for round in 0..ROUNDS {
        let mut kinds = messages(random.edge());
        let original = kinds.swap_remove(round as usize % kinds.len());
        let mut bytes = packet(&original);
        assert_eq!(decode(&bytes).unwrap(), original);
        match random.below(3) {
            0 => bytes.truncate(random.below(bytes.len() as u64) as usize),
            1 => {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 + random.below(255) as u8;
            }
            _ => {
                let length = random.below(64) as usize;
                bytes.extend(random.bytes(length + 1));
            }
        }
        if let Ok(message) = decode(&bytes) {
            // An accepted packet is a whole message: encoded again it has the same meaning.
            assert_eq!(decode(&packet(&message)).unwrap(), message);
        }
    }
}

fn any_layout(random: &mut Random) -> crate::Result<Layout> {
    let dtype = DType::ALL[random.below(DType::ALL.len() as u64) as usize];
    let rank = random.below(RANK_MAX as u64 + 2) as usize;
    let small = random.below(2) == 0;
    let mut number = || {
        if small {
            random.below(5)
        } else {
            random.edge()
        }
    };
    let shape: Vec<u64> = (0..rank).map(|_| number()).collect();
    let strides: Vec<i64> = (0..rank)
        .map(|_| number() as i64 - if small { 2 } else { 0 })
        .collect();
    let offset = number();
    if offset % 3 == 0 {
        Layout::contiguous(dtype, &shape)
    } else {
        Layout::strided(dtype, &shape, &strides, offset)
    }
}

#[test]
fn a_layout_that_is_accepted_lies_inside_its_slot() {
    let (mut random, mut accepted) = (Random(4), 0);
    for _ in 0..ROUNDS {
        if let Ok(layout) = any_layout(&mut random) {
            accepted += 1;
            assert_promises(&layout);
        }
    }
    assert!(
        accepted > ROUNDS / 20,
        "only {accepted} were accepted: the generator tests nothing"
    );
}

#[test]
fn strides_with_a_product_above_128_bits_are_refused_and_not_wrapped() {
    for stride in [i64::MIN, i64::MAX, 1 << 62] {
        let layout = Layout::strided(DType::C128, &[i64::MAX as u64, 1], &[stride, 1], 0);
        assert!(
            matches!(layout, Err(crate::Error::Layout { .. })),
            "{stride}: {layout:?}"
        );
    }
    assert!(
        Layout::strided(DType::U8, &[0, u64::MAX, u64::MAX], &[1, 1, 1], 0)
            .unwrap()
            .elements()
            == 0
    );
    assert!(
        Layout::strided(DType::U8, &[0], &[1], u64::MAX).is_err(),
        "an offset that no slot can have"
    );
}

#[test]
fn a_description_arrives_as_it_was_written() {
    let (segment, _fd) = Segment::create(&Device::host(), 1, [1; 16]).unwrap();
    let mut random = Random(5);
    for sequence in 1..20_000 {
        let Ok(layout) = any_layout(&mut random) else {
            continue;
        };
        let length = random.below(META_BYTES_MAX as u64 + 1) as usize;
        let metadata = Metadata::new(&random.bytes(length)).unwrap();
        let (slot, region, sent_ns) = (
            512 * random.below(1 << 20),
            random.next() as u32,
            random.next(),
        );
        let completion = Completion {
            word: random.next() as u32,
            value: random.next(),
        };
        let completion = Some(completion).filter(|_| sequence % 2 == 0);
        let written = Description {
            sequence,
            sent_ns,
            region,
            slot,
            layout,
            metadata: metadata.clone(),
            completion,
        };
        written.write(segment.entry(1));
        let mut copy = UntrustedEntry::default();
        copy.copy(segment.entry(1));
        let fits = slot.checked_add(layout.bytes()).unwrap();
        let read = copy.check(fits).unwrap();
        assert_eq!(
            (read.sequence, read.sent_ns, read.region, read.slot),
            (sequence, sent_ns, region, slot)
        );
        assert_eq!(
            (read.layout.shape(), read.layout.dtype()),
            (layout.shape(), layout.dtype())
        );
        assert_eq!(
            (read.layout.bytes(), read.layout.offset()),
            (layout.bytes(), layout.offset())
        );
        assert_eq!(read.metadata.as_bytes(), metadata.as_bytes());
        assert_eq!(read.completion, completion);
        if fits > 0 {
            assert!(
                copy.check(fits - 1).is_err(),
                "a region that is a byte too short"
            );
        }
    }
}

#[test]
fn an_entry_of_nonsense_is_refused_or_keeps_every_bound() {
    let (segment, _fd) = Segment::create(&Device::host(), 1, [1; 16]).unwrap();
    let entry = segment.entry(1);
    let (mut random, mut accepted, mut copy) = (Random(6), 0, UntrustedEntry::default());
    for round in 0..ROUNDS {
        if round % 4 == 0 {
            for word in &entry.words {
                word.store(random.edge(), Relaxed);
            }
        } else if let Ok(layout) = any_layout(&mut random) {
            // A valid entry with some changed words gets further.
            let metadata = Metadata::new(&random.bytes(16)).unwrap();
            Description {
                sequence: 1,
                sent_ns: 0,
                region: 0,
                slot: 0,
                layout,
                metadata,
                completion: None,
            }
            .write(entry);
            for _ in 0..random.below(3) {
                let at = random.below(21) as usize;
                let value = if random.below(2) == 0 {
                    random.edge()
                } else {
                    1 << random.below(64)
                };
                entry.words[at].fetch_xor(value, Relaxed);
            }
        }
        let region_bytes = random.edge();
        copy.copy(entry);
        if let Ok(description) = copy.check(region_bytes) {
            accepted += 1;
            assert_promises(&description.layout);
            let end = description
                .slot
                .checked_add(description.layout.bytes())
                .unwrap();
            assert!(end <= region_bytes);
            assert!(description.metadata.as_bytes().len() <= META_BYTES_MAX);
        }
    }
    assert!(
        accepted > 1000,
        "only {accepted} were accepted: the generator tests nothing"
    );
}
