//! Seeded garbage for every check of a peer's bytes: no panic, and accepted bytes keep their
//! invariants.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use warpipe_testkit::Rng;

use super::stage::{packet, random_bytes, random_edge};
use crate::fuzzing::{assert_promises, messages};
use crate::ipc::message::decode;
use crate::pubsub::entry::{Completion, Description, Head, Metadata, UntrustedEntry};
use crate::shm::segment::{ENTRY_META_BYTES_MAX, META_BYTES_MAX, Segment};
use crate::tensor::RANK_MAX;
use crate::{DType, Device, Layout};

/// Rounds of the cheap ones.
const ROUNDS: u32 = 100_000;

#[test]
fn a_packet_decodes_to_the_sent_message_or_to_an_error() {
    let mut random = Rng::with_seed(3);
    for round in 0..ROUNDS {
        let mut kinds = messages(random_edge(&mut random));
        let original = kinds.swap_remove(round as usize % kinds.len());
        let mut bytes = packet(&original);
        assert_eq!(decode(&bytes).unwrap(), original);
        match random.u64(..3) {
            0 => bytes.truncate(random.usize(..bytes.len())),
            1 => {
                let at = random.usize(..bytes.len());
                bytes[at] ^= 1 + random.u8(..255);
            }
            _ => {
                let length = random.usize(..64);
                bytes.extend(random_bytes(&mut random, length + 1));
            }
        }
        if let Ok(message) = decode(&bytes) {
            // An accepted packet is a whole message: encoded again it has the same meaning.
            assert_eq!(decode(&packet(&message)).unwrap(), message);
        }
    }
}

fn any_layout(random: &mut Rng) -> crate::Result<Layout> {
    let dtype = DType::ALL[random.usize(..DType::ALL.len())];
    let rank = random.usize(..RANK_MAX + 2);
    let small = random.u64(..2) == 0;
    let mut number = || {
        if small {
            random.u64(..5)
        } else {
            random_edge(random)
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
    let (mut random, mut accepted) = (Rng::with_seed(4), 0);
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
            matches!(
                layout,
                Err(crate::Error::Argument {
                    argument: "tensor layout",
                    ..
                })
            ),
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
    // One copy for all, as a receiver has.
    let (mut random, mut copy) = (Rng::with_seed(5), UntrustedEntry::default());
    for sequence in 1..20_000 {
        let Ok(layout) = any_layout(&mut random) else {
            continue;
        };
        let length = random.usize(..ENTRY_META_BYTES_MAX + 1);
        let metadata = Metadata::new(&random_bytes(&mut random, length)).unwrap();
        let (slot, region, sent_ns) = (512 * random.u64(..1 << 20), random.u32(..), random.u64(..));
        let completion = Completion {
            word: random.u32(..),
            value: random.u64(..),
        };
        let completion = Some(completion).filter(|_| sequence % 2 == 0);
        let written = Description {
            sequence,
            sent_ns,
            region,
            slot,
            layout: &layout,
            metadata: &metadata,
        };
        let packed = written.packed();
        let packed = match completion {
            Some(completion) => packed.with_completion(completion),
            None => packed,
        };
        packed.write(segment.entry(1));
        copy.copy(segment.entry(1));
        let fits = slot.checked_add(layout.bytes()).unwrap();
        let read = copy.check(fits).unwrap();
        assert_eq!(
            (read.sequence, read.sent_ns, copy.region(), read.slot),
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
        copy.copy(segment.entry(1));
        let next = copy.check(fits).unwrap();
        assert!(
            Arc::ptr_eq(&next.layout, &read.layout),
            "the next sample of this layout shares it"
        );
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
    let (mut random, mut accepted, mut copy) = (Rng::with_seed(6), 0, UntrustedEntry::default());
    for round in 0..ROUNDS {
        if round % 4 == 0 {
            for word in &entry.words {
                word.store(random_edge(&mut random), Relaxed);
            }
        } else if let Ok(layout) = any_layout(&mut random) {
            // A valid entry with some changed words gets further.
            let metadata = Metadata::new(&random_bytes(&mut random, 16)).unwrap();
            Description {
                sequence: 1,
                sent_ns: 0,
                region: 0,
                slot: 0,
                layout: &layout,
                metadata: &metadata,
            }
            .packed()
            .write(entry);
            for _ in 0..random.u64(..3) {
                let at = random.usize(..21);
                let value = if random.u64(..2) == 0 {
                    random_edge(&mut random)
                } else {
                    1 << random.u64(..64)
                };
                entry.words[at].fetch_xor(value, Relaxed);
            }
        }
        let region_bytes = random_edge(&mut random);
        copy.copy(entry);
        if let Ok(description) = copy.check(region_bytes) {
            accepted += 1;
            assert_promises(&description.layout);
            let bytes = match description.head {
                Head::Place => 0,
                Head::None | Head::Parts => description.layout.bytes(),
            };
            let end = description.slot.checked_add(bytes).unwrap();
            assert!(end <= region_bytes);
            assert!(description.metadata.as_bytes().len() <= META_BYTES_MAX);
        }
    }
    assert!(
        accepted > 1000,
        "only {accepted} were accepted: the generator tests nothing"
    );
}
