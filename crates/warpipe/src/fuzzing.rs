//! Every parser of data from outside this process, for fuzzers and replays. Each parser takes any
//! bytes and does not panic, and every accepted value keeps its invariants. For tests alone, behind
//! the feature `testing`.

use std::fmt::Debug;
use std::sync::atomic::Ordering::Relaxed;

use crate::backend::pointer::mapping_of;
use crate::backend::{Access, DeviceId, DeviceKind};
use crate::error::PeerLimit;
use crate::ipc::domain::EndpointName;
use crate::ipc::message::{self, CloseReason, Message};
use crate::ipc::{self, Kind};
use crate::memory::{legacy, ticket};
use crate::pubsub::Part;
use crate::pubsub::entry::{Completion, Description, Head, Metadata, UntrustedEntry};
use crate::pubsub::parts;
use crate::pubsub::place::Place;
use crate::queue::wire;
use crate::shm::segment::{META_BYTES_MAX, Segment, VERSION};
use crate::tensor::RANK_MAX;
use crate::weights;
use crate::{DType, Device, EventHandle, Layout, LegacyHandle, Ticket, origin, sync::event};

/// A parser: its name, the function that runs it, and seeds that reach far into it.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name of its fuzz target and of its folder in the corpus.
    pub name: &'static str,
    /// Runs the parser on any bytes.
    pub parse: fn(&[u8]),
    /// Whole messages of every kind.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All fuzz targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "message",
        parse: packets,
        seeds: packet_seeds,
    },
    Target {
        name: "bodies",
        parse: bodies,
        seeds: body_seeds,
    },
    Target {
        name: "queue",
        parse: queue,
        seeds: queue_seeds,
    },
    Target {
        name: "weights",
        parse: weights,
        seeds: weights::seeds,
    },
    Target {
        name: "ticket",
        parse: tickets,
        seeds: ticket_seeds,
    },
    Target {
        name: "event_handle",
        parse: event_handles,
        seeds: event_seeds,
    },
    Target {
        name: "legacy_handle",
        parse: legacy_handles,
        seeds: legacy_seeds,
    },
    Target {
        name: "entry",
        parse: entries,
        seeds: entry_seeds,
    },
    Target {
        name: "layout",
        parse: layouts,
        seeds: layout_seeds,
    },
    Target {
        name: "text",
        parse: texts,
        seeds: text_seeds,
    },
];

/// Numbers that wrong input often has.
const EDGES: [u64; 6] = [0, 1, 255, 1 << 32, i64::MAX as u64, u64::MAX];

/// A message as it goes over the wire.
pub(crate) fn packet(message: &Message) -> Vec<u8> {
    let mut packet = b"WARP".to_vec();
    packet.extend(VERSION.to_le_bytes());
    packet.extend([0, 0]);
    packet.extend(postcard::to_stdvec(message).unwrap_or_default());
    packet
}

/// One message of each kind.
pub(crate) fn messages(number: u64) -> Vec<Message> {
    let generation = [number as u8; 16];
    let device = DeviceId {
        kind: DeviceKind::Host,
        uuid: [3; 16],
    };
    let (small, body, text) = (number as u32, vec![number as u8; 16], "full".to_string());
    vec![
        Message::Hello {
            device: Some(device),
            kind: Kind::Publisher,
            body: Vec::new(),
        },
        Message::Welcome {
            generation,
            device,
            depth: small,
            access: Access::Read,
            lossless: true,
            source: generation,
            regions: small,
            replies: small,
        },
        Message::Region {
            id: small,
            bytes: number,
        },
        Message::CloseRegion { id: small },
        Message::RegionClosed { id: small },
        Message::Returned {
            positions: vec![number],
        },
        Message::NoRoom { text: text.clone() },
        Message::Attached,
        Message::Close(CloseReason::Closed),
        Message::CloseReplies(CloseReason::Closed),
        Message::Close(CloseReason::Evicted("too slow".into())),
        Message::Close(CloseReason::Failed("it broke the protocol".into())),
        Message::Refused {
            denied: false,
            text: text.clone(),
        },
        Message::Hello {
            device: Some(device),
            kind: Kind::Pool,
            body: body.clone(),
        },
        Message::SessionOpened {
            generation,
            body: body.clone(),
            fds: number as u8,
        },
        Message::OtherKind { found: Kind::Queue },
        Message::Request {
            serial: number,
            body: body.clone(),
        },
        Message::Reply {
            serial: number,
            body,
            fds: number as u8,
        },
        Message::RequestFailed {
            serial: number,
            text,
        },
        Message::Completions { bytes: number },
        Message::MetadataPage,
        Message::Full {
            limit: PeerLimit::User,
            max: small,
        },
        Message::MemoryRequest {
            serial: number,
            body: b"memory".to_vec(),
        },
    ]
}

fn packet_seeds() -> Vec<Vec<u8>> {
    EDGES
        .iter()
        .flat_map(|&number| messages(number))
        .map(|message| packet(&message))
        .collect()
}

/// Messages on a link's socket.
fn packets(bytes: &[u8]) {
    if let Ok(message) = message::decode(bytes) {
        // An accepted message is whole: it has the same meaning when encoded once more.
        assert_eq!(
            message::decode(&packet(&message)).ok().as_ref(),
            Some(&message)
        );
        let _ = (
            message.descriptors(),
            message.is_first(),
            message.unexpected("something else"),
        );
    }
}

/// A file's header, and a manifest.
fn weights(bytes: &[u8]) {
    weights::try_header(bytes);
    weights::try_manifest(bytes);
}

/// Message bodies: the requests and replies of every endpoint kind.
fn bodies(bytes: &[u8]) {
    let interfaces = [
        crate::sync::event::try_messages,
        crate::members::try_messages,
        crate::memory::try_messages,
        crate::lend::try_messages,
        crate::pool::try_messages,
        crate::sync::semaphore::try_messages,
        crate::rings::try_messages,
        crate::weights::try_messages,
    ];
    interfaces.into_iter().for_each(|read| read(bytes));
    // Types of this library that user programs may deserialize with serde.
    if let Ok(dtype) = ipc::decode::<DType>(bytes, "any") {
        assert_eq!(DType::from_name(dtype.name()), Some(dtype));
    }
}

/// Postcard decodes most bytes; these begin every variant of an enumeration, followed by numbers.
fn body_seeds() -> Vec<Vec<u8>> {
    let with = |kind: u8, fill: u8| [vec![kind], vec![fill; 40]].concat();
    (0..8)
        .flat_map(|kind| [0, 1, 2, 127].map(|fill| with(kind, fill)))
        .collect()
}

/// The metadata of jobs and results.
fn queue(bytes: &[u8]) {
    if let Ok(tag) = wire::DeliveryTag::decode(bytes) {
        let again = tag
            .encode(wire::user_of_job(bytes))
            .map(|metadata| metadata.as_bytes().to_vec());
        assert_eq!(again.ok().as_deref(), Some(bytes));
    }
    if let Ok(answer) = wire::Answer::decode(bytes) {
        // A reason is cleaned and cut; the cleaned text does not change again.
        let user = wire::user_of_answer(bytes);
        let user = if answer.kind == wire::AnswerKind::Completed {
            user
        } else {
            &[]
        };
        if let Ok(metadata) = answer.encode(user) {
            let again = wire::Answer::decode(metadata.as_bytes()).ok();
            assert!(
                again.is_some_and(|again| (again.job, again.number) == (answer.job, answer.number))
            );
        }
    }
}

fn queue_seeds() -> Vec<Vec<u8>> {
    (0..6)
        .flat_map(|kind| {
            [13, 20, 25, 40, 225, 226].map(|length| [vec![kind], vec![1; length - 1]].concat())
        })
        .collect()
}

/// The text of a ticket, and a text with a valid checksum over any contents.
fn tickets(bytes: &[u8]) {
    for text in [
        String::from_utf8_lossy(bytes).into_owned(),
        ticket::forged::text(bytes),
    ] {
        comes_back(text.parse::<Ticket>().ok(), |ticket| {
            ticket.to_string().parse().ok()
        });
    }
}

fn ticket_seeds() -> Vec<Vec<u8>> {
    let bodies = ticket::forged::bodies();
    let texts = bodies
        .iter()
        .map(|body| ticket::forged::text(body).into_bytes());
    texts.chain(bodies.iter().cloned()).collect()
}

/// The text and the bytes of an event's handle, and bytes with the right checksum whatever their
/// contents.
fn event_handles(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), event::forged::handle(bytes)] {
        comes_back(EventHandle::from_bytes(&bytes).ok(), |handle| {
            EventHandle::from_bytes(&handle.to_bytes()).ok()
        });
    }
    let text = String::from_utf8_lossy(bytes);
    comes_back(text.parse::<EventHandle>().ok(), |handle| {
        handle.to_string().parse().ok()
    });
}

fn event_seeds() -> Vec<Vec<u8>> {
    let bodies = event::forged::bodies();
    let whole = bodies.iter().map(|body| event::forged::handle(body));
    let text = |bytes: Vec<u8>| {
        EventHandle::from_bytes(&bytes).map(|handle| handle.to_string().into_bytes())
    };
    let texts = whole.clone().flat_map(text);
    whole
        .clone()
        .chain(texts)
        .chain(bodies.iter().cloned())
        .collect()
}

/// The text and the bytes of a legacy handle, and bytes with the right checksum whatever their
/// contents.
fn legacy_handles(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), legacy::forged::handle(bytes)] {
        comes_back(LegacyHandle::from_bytes(&bytes).ok(), |handle| {
            LegacyHandle::from_bytes(&handle.to_bytes()).ok()
        });
    }
    let text = String::from_utf8_lossy(bytes);
    comes_back(text.parse::<LegacyHandle>().ok(), |handle| {
        handle.to_string().parse().ok()
    });
}

fn legacy_seeds() -> Vec<Vec<u8>> {
    let body = legacy::forged::body();
    let whole = legacy::forged::handle(&body);
    let text = LegacyHandle::from_bytes(&whole).map(|handle| handle.to_string().into_bytes());
    text.into_iter().chain([whole, body]).collect()
}

/// An accepted value is unchanged by encoding and decoding.
fn comes_back<T: PartialEq + Debug>(accepted: Option<T>, again: impl FnOnce(&T) -> Option<T>) {
    if let Some(accepted) = accepted {
        assert_eq!(again(&accepted).as_ref(), Some(&accepted));
    }
}

/// The words of an entry, eight bytes each, and the stated size of the region; missing words are 0.
fn entries(bytes: &[u8]) {
    thread_local! {
        static SEGMENT: Option<Segment> = Segment::create(&Device::host(), 1, [1; 16]).ok().map(|(segment, _)| segment);
    }
    SEGMENT.with(|segment| {
        let Some(entry) = segment.as_ref().map(|segment| segment.entry(1)) else {
            return;
        };
        let (words, _) = bytes.as_chunks::<8>();
        let mut words = words
            .iter()
            .map(|&word| u64::from_le_bytes(word))
            .chain(std::iter::repeat(0));
        let region_bytes = words.next().unwrap_or_default();
        entry
            .words
            .iter()
            .zip(words)
            .for_each(|(to, word)| to.store(word, Relaxed));
        let mut copy = UntrustedEntry::default();
        copy.copy(entry);
        let Ok(description) = copy.check(region_bytes) else {
            return;
        };
        assert_promises(&description.layout);
        let (mut bytes, metadata) = (description.layout.bytes(), description.metadata.as_bytes());
        match description.head {
            Head::None => {}
            Head::Place => {
                bytes = 0;
                let rest = Place::read(metadata).map(|(_, rest)| rest);
                assert!(rest.map_or(true, |rest| metadata.ends_with(rest)));
            }
            Head::Parts => {
                let list = parts::read(metadata, description.slot, bytes);
                let in_slot = |part: &&Part| !part.is_in_place;
                for part in list
                    .iter()
                    .flat_map(|list| list.parts.iter().filter(in_slot))
                {
                    assert_promises(&part.layout);
                    let start = part.slot_ptr - description.slot;
                    assert!(start + part.layout.bytes() <= bytes);
                }
            }
        }
        let end = description.slot.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= region_bytes));
        assert!(description.metadata.as_bytes().len() <= META_BYTES_MAX);
    });
}

fn entry_seeds() -> Vec<Vec<u8>> {
    let Ok((segment, _)) = Segment::create(&Device::host(), 1, [1; 16]) else {
        return Vec::new();
    };
    let entry = segment.entry(1);
    let layouts = [
        Layout::contiguous(DType::F32, &[2, 3]),
        Layout::contiguous(DType::U8, &[]),
        Layout::contiguous(DType::BF16, &[0, 4]),
        Layout::strided(DType::C128, &[2, 2], &[-2, 1], 64),
        Layout::bytes_only(100),
    ];
    let place = Place::Published {
        name: "memory",
        incarnation: [3; 16],
        offset: 512,
    };
    let place = place.to_bytes();
    let image = Layout::bytes_only(100);
    let shifted = Layout::strided(DType::F32, &[2], &[3], 4);
    let listed = [("image", image), ("shifted", shifted)].into_iter();
    let listed = listed.filter_map(|(name, layout)| Some(parts::listed(name, &layout.ok()?, None)));
    let list: Vec<u8> = std::iter::once(2).chain(listed.flatten()).collect();
    let seed = |(layout, head, bytes): (Layout, Head, &[u8])| {
        let metadata = Metadata::behind(bytes, b"some of the user's").unwrap_or_default();
        let description = Description {
            sequence: 1,
            sent_ns: 2,
            region: 0,
            slot: 512,
            layout: &layout,
            metadata: &metadata,
        };
        let (word, value, mut packed) = (1, 2, description.packed());
        packed.set_head(head);
        packed
            .with_completion(Completion { word, value })
            .write(entry);
        let words = entry.words.iter().map(|word| word.load(Relaxed));
        std::iter::once(1 << 20)
            .chain(words)
            .flat_map(u64::to_le_bytes)
            .collect()
    };
    let placed = |layout| [(layout, Head::None, &[][..]), (layout, Head::Place, &place)];
    let seeds = layouts.into_iter().flatten().flat_map(placed);
    let slot = Layout::bytes_only(256 + 20).ok();
    let with_parts = slot.map(|slot| (slot, Head::Parts, &list[..]));
    seeds.chain(with_parts).map(seed).collect()
}

/// A layout as a caller or a message states it: code, bits, rank, offset, then lengths and strides,
/// eight bytes each; missing values are 0.
fn layouts(bytes: &[u8]) {
    let Some((&[code, bits, rank, is_strided], rest)) = bytes.split_first_chunk::<4>() else {
        return;
    };
    let Some(dtype) = DType::from_dlpack(code, bits) else {
        return;
    };
    let (words, _) = rest.as_chunks::<8>();
    let mut words = words
        .iter()
        .map(|&word| u64::from_le_bytes(word))
        .chain(std::iter::repeat(0));
    let rank = usize::from(rank) % (RANK_MAX + 2);
    let offset = words.next().unwrap_or_default();
    let shape: Vec<u64> = words.by_ref().take(rank).collect();
    let strides: Vec<i64> = words.take(rank).map(|word| word as i64).collect();
    let layout = if is_strided & 1 == 0 {
        Layout::contiguous(dtype, &shape)
    } else {
        Layout::strided(dtype, &shape, &strides, offset)
    };
    if let Ok(layout) = layout {
        assert_promises(&layout);
        assert_eq!((layout.dtype(), layout.shape()), (dtype, &shape[..]));
    }
}

fn layout_seeds() -> Vec<Vec<u8>> {
    let seed = |is_strided: u8, words: &[u64]| {
        let words = words.iter().flat_map(|word| word.to_le_bytes());
        [2, 32, 3, is_strided].into_iter().chain(words).collect()
    };
    let (minus, most) = (-2i64 as u64, i64::MAX as u64);
    vec![
        seed(0, &[0, 2, 3, 4]),
        seed(0, &[0, 1 << 31, 1 << 31, 1]),
        seed(1, &[64, 2, 3, 4, 12, 4, 1]),
        seed(1, &[640, 2, 3, 4, minus, 1, 0]),
        seed(1, &[u64::MAX, 0, 1, u64::MAX, most, 1 << 63, 1]),
    ]
}

/// Short texts: names of endpoints and of their files, and lines of `/proc`, which contain other
/// processes' names.
fn texts(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(name) = EndpointName::new(&text) {
        assert_eq!(name.as_str(), text);
    }
    if let Some(name) = EndpointName::from_file(&text) {
        assert_eq!(EndpointName::of_endpoint(name.as_str()).ok(), Some(name));
    }
    origin::try_stat(bytes);
    text.lines()
        .for_each(|line| drop(mapping_of(line, u64::from_le_bytes([1; 8]))));
}

fn text_seeds() -> Vec<Vec<u8>> {
    let texts = [
        "camera/front",
        "../etc",
        "camera+front.sock",
        "7 (a) b) c) Z 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20",
        "7f00-7f10 rw-s 00000000 00:01 1026                       /memfd:warpipe plain (deleted)",
        "0-ffffffffffffffff r--p 00000000 00:00 0",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}

/// Every byte that an element of the layout may touch, by visiting the corners of the index space.
fn corners(layout: &Layout) -> (i128, i128) {
    let (mut low, mut high) = (i128::from(layout.offset()), i128::from(layout.offset()));
    for (&length, &stride) in layout.shape().iter().zip(layout.strides()) {
        // Shape and strides of an accepted layout are small enough for this.
        let reach =
            (i128::from(length) - 1) * i128::from(stride) * i128::from(layout.dtype().bytes());
        if reach < 0 {
            low += reach
        } else {
            high += reach
        }
    }
    (low, high + i128::from(layout.dtype().bytes()))
}

/// Checks the invariants of an accepted layout.
pub(crate) fn assert_promises(layout: &Layout) {
    assert!(layout.bytes() <= i64::MAX as u64);
    assert!(layout.offset() <= layout.bytes());
    if layout.elements() > 0 {
        let (low, high) = corners(layout);
        assert!(
            low >= 0 && high <= i128::from(layout.bytes()),
            "{layout:?}: {low}..{high} of {}",
            layout.bytes()
        );
    }
    let _ = layout.is_contiguous();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parser_takes_its_seeds() {
        for Target { parse, seeds, .. } in TARGETS {
            seeds().iter().for_each(|seed| parse(seed));
        }
        assert!(
            packet_seeds()
                .iter()
                .all(|packet| message::decode(packet).is_ok())
        );
    }
}
