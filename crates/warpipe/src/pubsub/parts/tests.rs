//! Samples of several tensors: what is received, and what a list of parts may say.

use std::path::PathBuf;
use std::time::Duration;

use super::*;
use crate::{Device, Domain, Memory, Publisher, PublisherOptions, Sample, Stream, Subscriber};

const SOON: Duration = Duration::from_secs(20);

struct Scene {
    folder: PathBuf,
    domain: Domain,
    device: Device,
    stream: Stream,
}

impl Scene {
    fn new(title: &str) -> Scene {
        let folder =
            std::env::temp_dir().join(format!("warpipe-several-{title}-{}", std::process::id()));
        let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
        Scene {
            stream: device.stream().unwrap(),
            folder,
            domain,
            device,
        }
    }

    fn publisher(&self, history: u32) -> Publisher {
        let options = PublisherOptions {
            history,
            ..self.domain.on(&self.device)
        };
        Publisher::new("a", options).unwrap()
    }

    fn subscriber(&self) -> Subscriber {
        Subscriber::open("a", self.domain.on(&self.device), Duration::ZERO).unwrap()
    }

    fn receive(&self, subscriber: &mut Subscriber) -> Sample {
        subscriber.receive(&self.stream, SOON).unwrap()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn plain(shape: &[u64]) -> Layout {
    Layout::contiguous(DType::U8, shape).unwrap()
}

#[test]
fn the_parts_of_a_sample_arrive_with_their_names_layouts_and_bytes() {
    let scene = Scene::new("arrive");
    let (publisher, mut subscriber) = (scene.publisher(0), scene.subscriber());
    let transposed = Layout::strided(DType::F32, &[2, 3], &[1, 2], 4).unwrap();
    let layouts = [
        ("image", plain(&[2, 3])),
        ("тень", transposed),
        ("none", plain(&[0, 4])),
        ("one", plain(&[])),
    ];
    let mut loan = publisher.loan_parts(&layouts).unwrap();
    loan.set_metadata(b"meta").unwrap();
    for (index, (name, layout)) in layouts.iter().enumerate() {
        let bytes = vec![index as u8; layout.bytes() as usize];
        loan.write_part(&scene.stream, name, &bytes).unwrap();
    }
    loan.send(&scene.stream).unwrap();
    publisher.send_bytes(&scene.stream, b"one tensor").unwrap();
    let sample = scene.receive(&mut subscriber);
    assert_eq!(sample.metadata(), b"meta");
    assert_eq!(sample.parts().len(), layouts.len());
    for (index, (name, layout)) in layouts.iter().enumerate() {
        let part = &sample.parts()[index];
        assert_eq!((&*part.name, &part.layout), (*name, layout));
        assert_eq!(part.slot_ptr % ALIGNMENT, 0);
        assert_eq!(part.ptr, part.slot_ptr + layout.offset());
        let bytes = vec![index as u8; layout.bytes() as usize];
        assert_eq!(sample.part_to_vec(name, SOON).unwrap(), bytes);
    }
    assert!(matches!(sample.part("other"), Err(Error::Argument { .. })));
    assert!(scene.receive(&mut subscriber).parts().is_empty());
}

#[test]
fn long_metadata_reaches_each_subscriber_and_a_late_one() {
    let scene = Scene::new("long");
    let publisher = scene.publisher(2);
    let mut subscribers = [scene.subscriber(), scene.subscriber()];
    let send = |length: usize| {
        let mut loan = publisher.loan(&plain(&[4])).unwrap();
        let bytes: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        loan.set_metadata(&bytes).unwrap();
        loan.send(&scene.stream).unwrap();
        bytes
    };
    let lengths = [256, 257, 4096, 0, 300];
    let sent = lengths.map(send);
    for bytes in &sent {
        for subscriber in &mut subscribers {
            assert_eq!(scene.receive(subscriber).metadata(), bytes);
        }
    }
    let mut late = scene.subscriber();
    for bytes in &sent[3..] {
        assert_eq!(scene.receive(&mut late).metadata(), bytes);
    }
    let mut loan = publisher.loan(&plain(&[4])).unwrap();
    let refused = loan.set_metadata(&[0; 4097]).unwrap_err();
    assert!(
        refused.to_string().contains("at most 4096 bytes"),
        "{refused}"
    );
}

#[test]
fn a_loan_takes_as_many_parts_as_its_metadata_has_room_for() {
    let scene = Scene::new("many");
    let (publisher, mut subscriber) = (scene.publisher(0), scene.subscriber());
    let names: Vec<String> = (0..=PARTS_MAX)
        .map(|number| format!("part {number}"))
        .collect();
    let parts: Vec<_> = names.iter().map(|name| (&name[..], plain(&[2]))).collect();
    publisher
        .loan_parts(&parts[..PARTS_MAX])
        .unwrap()
        .send(&scene.stream)
        .unwrap();
    assert_eq!(scene.receive(&mut subscriber).parts().len(), PARTS_MAX);
    let long = "n".repeat(PART_NAME_BYTES_MAX);
    let longer = "n".repeat(PART_NAME_BYTES_MAX + 1);
    let many: Vec<String> = (100..140)
        .map(|number| format!("{number}{}", &long[3..]))
        .collect();
    let many: Vec<_> = many.iter().map(|name| (&name[..], plain(&[2]))).collect();
    drop(publisher.loan_parts(&[(&long, plain(&[2]))]).unwrap());
    let twice = [("a", plain(&[2])), ("a", plain(&[2]))];
    let wrong = [
        &parts[..],
        &[("", plain(&[2]))],
        &[(&longer, plain(&[2]))],
        &[("cut\0off", plain(&[2]))],
        &twice,
        &many,
    ];
    for parts in wrong {
        let refused = publisher.loan_parts(parts).unwrap_err();
        assert!(matches!(refused, Error::Argument { .. }), "{refused}");
    }
}

#[test]
fn parts_in_place_lie_beside_those_in_the_slot_and_keep_their_owners() {
    let scene = Scene::new("in-place");
    let (publisher, mut subscriber) = (scene.publisher(0), scene.subscriber());
    let memories = ["first", "second"].map(|name| {
        let memory = Memory::allocate(&scene.device, 4096).unwrap();
        memory.write(&scene.stream, 512, name.as_bytes()).unwrap();
        memory.publish(name, scene.domain.options()).unwrap()
    });
    let mut loan = publisher.loan_parts(&[("copied", plain(&[3]))]).unwrap();
    let owner = std::sync::Arc::new(());
    for (memory, bytes) in memories.iter().zip([5, 6]) {
        let (name, layout) = (memory.name(), plain(&[bytes]));
        loan.add_part_in(name, memory, 512, &layout, owner.clone())
            .unwrap();
    }
    let again = loan.add_part_in("first", &memories[0], 0, &plain(&[1]), owner.clone());
    assert!(matches!(again, Err(Error::Argument { .. })));
    loan.write_part(&scene.stream, "copied", b"abc").unwrap();
    loan.set_metadata(b"meta").unwrap();
    loan.send(&scene.stream).unwrap();
    let sample = scene.receive(&mut subscriber);
    assert!(sample.info().is_in_place);
    assert_eq!(sample.metadata(), b"meta");
    assert_eq!(sample.part_to_vec("copied", SOON).unwrap(), b"abc");
    for memory in &memories {
        let part = sample.part(memory.name()).unwrap();
        assert!(part.is_in_place);
        assert_eq!(part.ptr, memory.memory().ptr() + 512);
        let bytes = sample.part_to_vec(memory.name(), SOON).unwrap();
        assert_eq!(bytes, memory.name().as_bytes());
    }
    assert_eq!(std::sync::Arc::strong_count(&owner), 3);
    sample.finish(SOON).unwrap();
    let start = std::time::Instant::now();
    // The library's own threads may be dropping them.
    while publisher.stats().unwrap().in_place > 0 {
        assert!(start.elapsed() < SOON, "the owners are dropped");
        std::thread::yield_now();
    }
    assert_eq!(std::sync::Arc::strong_count(&owner), 1);
    let mut single = publisher.loan(&plain(&[4])).unwrap();
    let refused = single
        .add_part_in("first", &memories[0], 0, &plain(&[1]), owner)
        .unwrap_err();
    assert!(matches!(refused, Error::Argument { .. }), "{refused}");
}

#[test]
fn a_list_of_parts_that_breaks_a_rule_is_refused() {
    let whole = |parts: &[(&str, Layout)]| -> Vec<u8> {
        let listed = parts
            .iter()
            .flat_map(|(name, layout)| listed(name, layout, None));
        std::iter::once(parts.len() as u8).chain(listed).collect()
    };
    let good = whole(&[("a", plain(&[100])), ("b", plain(&[4]))]);
    let list = [&good[..], b"rest"].concat();
    let read_back = read(&list, 4096, 260).unwrap();
    assert_eq!(read_back.metadata().as_bytes(), b"rest");
    assert_eq!(read_back.parts[1].slot_ptr, 4096 + 256);
    let huge = plain(&[i64::MAX as u64]);
    let too_long = "n".repeat(PART_NAME_BYTES_MAX + 1);
    let wrong: [(&str, Vec<u8>, u64); 11] = [
        ("a slot that is too short", good.clone(), 259),
        ("a slot that is too long", good.clone(), 261),
        ("no part", vec![0], 0),
        ("nothing", vec![], 0),
        ("an end in the middle", good[..good.len() - 1].to_vec(), 260),
        (
            "a name twice",
            whole(&[("a", plain(&[1])), ("a", plain(&[4]))]),
            260,
        ),
        ("an empty name", whole(&[("", plain(&[4]))]), 4),
        ("a long name", whole(&[(&too_long, plain(&[4]))]), 4),
        ("a name with a 0", whole(&[("cut\0off", plain(&[4]))]), 4),
        (
            "sizes that overflow",
            whole(&[("a", huge), ("b", huge)]),
            u64::MAX,
        ),
        (
            "a name that is not UTF-8",
            [&[1, 1, 0xff][..], &good[3..]].concat(),
            260,
        ),
    ];
    for (title, list, slot_bytes) in wrong {
        assert!(read(&list, 4096, slot_bytes).is_err(), "{title}");
    }
    let names: Vec<String> = (0..=PARTS_MAX).map(|number| number.to_string()).collect();
    let mut many: Vec<u8> = vec![0x80, 1];
    let listed = names
        .iter()
        .flat_map(|name| listed(name, &plain(&[0]), None));
    many.extend(listed);
    assert!(
        read(&many, 4096, 256 * PARTS_MAX as u64).is_err(),
        "too many parts"
    );
}
