//! Publishing, opening and taking over within one process. `tests/weights.rs` kills processes.

mod follower;
mod hashes;
mod in_place;
mod mapped;
mod names;
mod partial;
mod races;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use warpipe_testkit::{TempDir, temporary_folder};

use super::*;
use crate::OpenOptions;
use crate::backend::testing::{Failing, Wrapped};
use crate::device::Device;
use crate::error::{Error, NameFault, StateFault, WeightsFault};
use crate::hostile::in_a_forked_child;
use crate::ipc::domain::Domain;
use crate::tensor::{DType, Layout};

const WAIT: Duration = Duration::from_secs(30);

struct Stage {
    folder: TempDir,
    domain: Domain,
    device: Device,
}

impl Stage {
    fn new() -> Stage {
        let folder = temporary_folder().unwrap();
        let domain = Domain::at(folder.path()).unwrap();
        let device = Device::host();
        Stage {
            folder,
            domain,
            device,
        }
    }

    fn keeper(&self) -> Keeper {
        Keeper::new("w", self.domain.options()).unwrap()
    }

    fn options(&self) -> OpenOptions {
        self.domain.on(&self.device)
    }

    /// Weights with two tensors, every byte of them `byte`.
    fn weights(&self, byte: u8) -> Weights {
        let layout = Layout::contiguous(DType::U8, &[3, 300]).unwrap();
        let bytes = [byte; 900];
        let tensors = [("a", layout, &bytes[..]), ("b", layout, &bytes[..])];
        Weights::from_bytes(&self.device, tensors).unwrap()
    }

    fn publish(&self, byte: u8) -> PublishedWeights {
        let weights = self.weights(byte);
        weights.publish(&self.domain, "w", WAIT).unwrap()
    }
}

/// The byte that all tensors consist of.
fn byte_of(weights: &SharedWeights) -> u8 {
    let bytes: Vec<u8> = ["a", "b"]
        .iter()
        .flat_map(|name| weights.tensor(name).unwrap().memory.to_vec(WAIT).unwrap())
        .collect();
    assert_eq!(bytes, vec![bytes[0]; 1800]);
    bytes[0]
}

#[test]
fn weights_of_files_are_the_files_bytes_aligned_and_hashed() {
    let stage = Stage::new();
    // Larger than a staging buffer, and a length that is no multiple of one.
    let large: Vec<u8> = (0..9_000_001u32).map(|index| (index % 251) as u8).collect();
    let header = format!(
        r#"{{"large":{{"dtype":"U8","shape":[{0}],"data_offsets":[2,{1}]}},
        "none":{{"dtype":"F32","shape":[0],"data_offsets":[{1},{1}]}},
        "small":{{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}}}"#,
        large.len(),
        large.len() + 2
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&[5, 6]);
    file.extend_from_slice(&large);
    let path = stage.folder.path().join("model.safetensors");
    std::fs::write(&path, &file).unwrap();
    let source = Source::open([&path]).unwrap();
    let weights = Weights::load(&stage.device, &source, |_| {}).unwrap();
    let found: Vec<_> = weights
        .tensors()
        .iter()
        .map(|t| (t.name.as_ref(), t.offset, t.hash))
        .collect();
    let hash = content::content_hash;
    let end = 512 + (large.len() as u64).next_multiple_of(512);
    assert_eq!(
        found,
        [
            ("small", 0, Some(hash(&[5, 6]))),
            ("large", 512, Some(hash(&large))),
            ("none", end, Some(hash(&[])))
        ]
    );
    let _keeper = stage.keeper();
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop(weights);
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let bytes = |name: &str| shared.tensor(name).unwrap().memory.to_vec(WAIT).unwrap();
    assert!(bytes("large") == large && bytes("small") == [5, 6] && bytes("none").is_empty());
    assert_eq!(
        shared.tensor("large").unwrap().info.layout.shape(),
        [large.len() as u64]
    );
    assert!(shared.tensor("none of these").is_none());
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        published.version
    );
}

/// A file with one tensor, which needs each staging buffer more than once.
fn large_file(stage: &Stage) -> (Source, Vec<u8>) {
    let bytes: Vec<u8> = (0..17_000_001u32)
        .map(|index| (index % 253) as u8)
        .collect();
    let header = format!(
        r#"{{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#,
        bytes.len()
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&bytes);
    let path = stage.folder.path().join("large.safetensors");
    std::fs::write(&path, &file).unwrap();
    (Source::open([&path]).unwrap(), bytes)
}

#[test]
fn a_load_tells_each_number_of_bytes_that_it_has_read_and_all_of_them_in_the_end() {
    let stage = Stage::new();
    let (source, bytes) = large_file(&stage);
    let told = std::sync::Mutex::new(Vec::new());
    let progress = |done| told.lock().unwrap().push(done);
    Weights::load(&stage.device, &source, progress).unwrap();
    let told = told.into_inner().unwrap();
    // One tensor has one reader.
    assert!(told.len() > 1 && told.is_sorted(), "{told:?}");
    assert_eq!(told.last(), Some(&(bytes.len() as u64)));
}

#[test]
fn a_call_of_the_device_that_fails_ends_the_load_and_the_next_load_is_whole() {
    let stage = Stage::new();
    let (source, bytes) = large_file(&stage);
    let inner = Device::preferred().device;
    for (method, call) in [
        ("allocate", 1),
        ("create_stream", 1),
        ("register", 1),
        ("create_event", 1),
        ("create_event", 2),
        ("copy_rows", 1),
        ("copy_rows", 5),
        // A later one may be the fence's behind a reader that is done.
        ("record_event", 1),
        ("export", 1),
    ] {
        let backend = Wrapped::new(inner.backend().clone(), Failing::default());
        let device = Device::from_backend(backend.clone());
        backend.hook().aim(method, call);
        let failed = Weights::load(&device, &source, |_| {}).unwrap_err();
        assert!(
            matches!(
                failed,
                Error::Driver {
                    code: Error::INJECTED,
                    ..
                }
            ),
            "{method} {call}: {failed}"
        );
    }
    let weights = Weights::load(&inner, &source, |_| {}).unwrap();
    assert!(weights.memory_for_tests().to_vec(WAIT).unwrap()[..bytes.len()] == bytes[..]);
    let hash = content::content_hash(&bytes);
    assert_eq!(weights.tensors()[0].hash, Some(hash));
}

#[test]
fn a_file_that_shrinks_while_it_is_loaded_is_an_error() {
    let stage = Stage::new();
    let header = r#"{"a":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + 64, 1);
    let path = stage.folder.path().join("model.safetensors");
    std::fs::write(&path, &file).unwrap();
    let source = Source::open([&path]).unwrap();
    std::fs::write(&path, &file[..file.len() - 1]).unwrap();
    let refused = Weights::load(&stage.device, &source, |_| {}).unwrap_err();
    assert!(
        refused.to_string().contains("changed while it was loaded"),
        "{refused}"
    );
}

#[test]
fn tensors_of_one_name_or_of_another_length_than_their_layout_are_refused() {
    let device = Device::host();
    let layout = Layout::contiguous(DType::U8, &[2]).unwrap();
    let turned = Layout::strided(DType::U8, &[2], &[-1], 1).unwrap();
    for tensors in [
        vec![("a", layout, &[1, 2][..]), ("a", layout, &[1, 2][..])],
        vec![("a", layout, &[1][..])],
        vec![("", layout, &[1, 2][..])],
        vec![("a", turned, &[1, 2][..])],
    ] {
        let refused = Weights::from_bytes(&device, tensors).unwrap_err();
        assert!(matches!(refused, Error::Argument { .. }), "{refused}");
    }
    assert_eq!(Weights::from_bytes(&device, []).unwrap().tensors().len(), 0);
}

#[test]
fn each_version_replaces_the_previous_one_which_stays_valid_for_its_readers() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    assert_eq!(keeper.state().unwrap().version, None);
    assert_eq!(stage.publish(1).version, 1);
    let first = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(stage.publish(2).version, 2);
    let second = first.newer(WAIT).unwrap();
    assert_eq!((first.info().version, byte_of(&first)), (1, 1));
    assert_eq!((second.info().version, byte_of(&second)), (2, 2));
    assert_eq!(keeper.state().unwrap().version, Some(2));
    let none = second.newer(Duration::from_millis(1)).unwrap_err();
    assert!(matches!(none, Error::Timeout { .. }), "{none}");
}

#[test]
fn a_waiting_reader_gets_the_version_that_is_published_later() {
    let stage = Stage::new();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| SharedWeights::open("w", stage.options(), WAIT).unwrap());
        let _keeper = stage.keeper();
        let _published = stage.publish(4);
        let first = reader.join().unwrap();
        let reader = scope.spawn(move || byte_of(&first.newer(WAIT).unwrap()));
        let _published = stage.publish(5);
        assert_eq!(reader.join().unwrap(), 5);
    });
}

#[test]
fn concurrent_readers_see_all_of_one_version_and_no_older_one_afterwards() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let _first = stage.publish(1);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut last = 0;
                while !is_over.load(SeqCst) {
                    let weights = SharedWeights::open("w", stage.options(), WAIT).unwrap();
                    assert!(weights.info().version >= last);
                    last = weights.info().version;
                    assert_eq!(u64::from(byte_of(&weights)), last);
                }
            });
        }
        for byte in 2..=40 {
            assert_eq!(stage.publish(byte).version, u64::from(byte));
        }
        is_over.store(true, SeqCst);
    });
}

#[test]
fn a_new_keeper_offers_a_version_of_another_process_only_after_its_hashes_were_compared() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let published = [stage.publish(1), stage.publish(2)];
    drop(keeper);
    let keeper = stage.keeper();
    assert_eq!(
        (
            keeper.state().unwrap().candidate,
            keeper.state().unwrap().version
        ),
        (Some(2), None)
    );
    assert_eq!(keeper.state().unwrap().unanswered, 0);
    let early = SharedWeights::open("w", stage.options(), Duration::ZERO).unwrap_err();
    assert!(early.to_string().contains("check of version 2"), "{early}");
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| SharedWeights::open("w", stage.options(), WAIT).unwrap());
        assert_eq!(
            SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
            2
        );
        assert_eq!(byte_of(&reader.join().unwrap()), 2);
    });
    assert_eq!(
        (
            keeper.state().unwrap().candidate,
            keeper.state().unwrap().version
        ),
        (None, Some(2))
    );
    drop(published);
    assert_eq!(stage.publish(3).version, 3);
}

#[test]
fn a_damaged_version_is_never_offered_and_an_older_one_takes_its_place() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let _older = stage.publish(1);
    let weights = stage.weights(2);
    let _newer = weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop(keeper);
    let stream = stage.device.stream().unwrap();
    weights
        .memory_for_tests()
        .write(&stream, 1024 + 899, &[9])
        .unwrap();
    stream.synchronize(WAIT).unwrap();
    let keeper = stage.keeper();
    let damaged = SharedWeights::verify("w", stage.options(), WAIT).unwrap_err();
    assert!(
        matches!(&damaged, Error::Weights(WeightsFault::Unverified { version: 2, tensors, .. })
            if *tensors == ["b"]),
        "{damaged}"
    );
    assert!(
        damaged.to_string().contains("of tensor \"b\" differs"),
        "{damaged}"
    );
    assert_eq!(
        (
            keeper.state().unwrap().candidate,
            keeper.state().unwrap().version
        ),
        (Some(1), None)
    );
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
    assert_eq!(
        byte_of(&SharedWeights::open("w", stage.options(), WAIT).unwrap()),
        1
    );
    assert_eq!(stage.publish(3).version, 3, "no number is used twice");
}

#[test]
fn names_that_are_taken_of_another_kind_or_unknown_are_errors_and_leave_no_file() {
    let stage = Stage::new();
    let weights = stage.weights(1);
    let publish = |wait| weights.publish(&stage.domain, "w", wait);
    let absent = publish(Duration::ZERO).unwrap_err();
    assert!(matches!(absent, Error::NotFound { .. }), "{absent}");
    let keeper = stage.keeper();
    let taken = Keeper::new("w", stage.domain.options()).unwrap_err();
    assert!(
        matches!(taken, Error::Name(NameFault::Taken { .. })),
        "{taken}"
    );
    drop(keeper);
    let memory = crate::memory::Memory::allocate(&stage.device, 8).unwrap();
    let other = memory.publish("w", stage.domain.options()).unwrap();
    let found = publish(Duration::ZERO).unwrap_err();
    assert!(
        matches!(found, Error::Name(NameFault::OtherKind { .. })),
        "{found}"
    );
    drop(other);
    let long = Keeper::new(&"n".repeat(201), stage.domain.options()).unwrap_err();
    assert!(
        matches!(long, Error::Name(NameFault::Invalid { .. })),
        "{long}"
    );
    assert_eq!(std::fs::read_dir(&stage.folder).unwrap().count(), 0);
}

#[test]
fn a_keeper_refuses_an_offer_that_is_none_of_its_weights() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let name = weights_name("w").unwrap();
    let session = keeper_session::KeeperSession::open(&stage.domain, &name, &WAIT.into()).unwrap();
    for name in ["elsewhere", "x/offer-1", "w/held-1-1", ""] {
        let take = keeper::KeeperRequest::Take { name: name.into() };
        let refused = session.request(&take, &WAIT.into()).unwrap_err();
        assert!(
            matches!(refused, Error::Refused { denied: false, .. }),
            "{refused}"
        );
    }
    let gone = EndpointName::new("w/offer-1").unwrap();
    let offered = keeper_session::offer_to_keeper(&stage.domain, &name, &gone, &WAIT.into());
    let offered = offered.map(|(_, number)| number);
    assert!(
        matches!(offered, Err(Error::Refused { denied: false, .. })),
        "{offered:?}"
    );
}

#[test]
fn files_of_other_endpoints_behind_the_prefix_are_no_versions() {
    let stage = Stage::new();
    let memory = crate::memory::Memory::allocate(&stage.device, 8).unwrap();
    let names = [
        "w/held-5-0",
        "w/held-x-0",
        "w/held-1000000000001-0",
        "w/held-0-0",
        "w/held-9",
    ];
    let others = names.map(|name| memory.publish(name, stage.domain.options()).unwrap());
    let keeper = stage.keeper();
    assert_eq!(
        (
            keeper.state().unwrap().candidate,
            keeper.state().unwrap().unanswered
        ),
        (None, 1)
    );
    assert_eq!(stage.publish(1).version, 6, "above a number in use");
    drop(others);
}

#[test]
fn a_forked_child_neither_hangs_nor_disturbs_what_its_parent_holds() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let _published = stage.publish(1);
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let memory = shared.tensor("a").unwrap();
    in_a_forked_child(|| {
        let is_forked =
            |error: Option<Error>| matches!(error, Some(Error::State(StateFault::Forked)));
        is_forked(keeper.state().err()) && is_forked(memory.memory.to_vec(WAIT).err())
    });
    assert_eq!(byte_of(&shared), 1);
    assert_eq!(
        byte_of(&SharedWeights::open("w", stage.options(), WAIT).unwrap()),
        1
    );
}

#[test]
fn every_damaged_tensor_is_listed() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let weights = stage.weights(1);
    let _published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    let stream = stage.device.stream().unwrap();
    for offset in [0, 1024] {
        weights
            .memory_for_tests()
            .write(&stream, offset, &[9])
            .unwrap();
    }
    stream.synchronize(WAIT).unwrap();
    let damaged = SharedWeights::verify("w", stage.options(), WAIT).unwrap_err();
    assert!(
        matches!(&damaged, Error::Weights(WeightsFault::Unverified { tensors, .. })
            if *tensors == ["a", "b"]),
        "{damaged}"
    );
}

#[test]
fn damage_in_any_part_of_a_tensor_is_found() {
    let stage = Stage::new();
    let (source, bytes) = large_file(&stage);
    let weights = Weights::load(&stage.device, &source, |_| {}).unwrap();
    let _keeper = stage.keeper();
    let _published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
    let stream = stage.device.stream().unwrap();
    let last = bytes.len() - 1;
    for place in [0, (4 << 20) - 1, 4 << 20, 8 << 20, last] {
        let write = |byte: u8| {
            let memory = weights.memory_for_tests();
            memory.write(&stream, place as u64, &[byte]).unwrap();
            stream.synchronize(WAIT).unwrap();
        };
        write(!bytes[place]);
        let damaged = SharedWeights::verify("w", stage.options(), WAIT).unwrap_err();
        assert!(
            matches!(damaged, Error::Weights(WeightsFault::Unverified { .. })),
            "{damaged}"
        );
        write(bytes[place]);
    }
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
}

#[test]
fn a_check_that_the_device_fails_is_no_verdict() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let _published = stage.publish(1);
    drop(keeper);
    let keeper = stage.keeper();
    for (method, call) in [
        ("import", 1),
        ("upload", 1),
        ("launch", 1),
        ("launch", 2),
        ("download", 1),
    ] {
        let backend = Wrapped::new(stage.device.backend().clone(), Failing::default());
        backend.hook().aim(method, call);
        let device = Device::from_backend(backend);
        let failed = SharedWeights::verify(
            "w",
            OpenOptions {
                device: Some(device.clone()),
                ..stage.options()
            },
            WAIT,
        )
        .unwrap_err();
        assert!(
            matches!(
                failed,
                Error::Driver {
                    code: Error::INJECTED,
                    ..
                }
            ),
            "{method}: {failed}"
        );
        assert_eq!(keeper.state().unwrap().candidate, Some(1));
    }
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
}

#[test]
fn weights_are_listed_with_their_keeper_or_without_one() {
    let stage = Stage::new();
    let list = || NamedWeights::list(&stage.domain, None).unwrap();
    assert_eq!(list(), []);
    let memory = crate::memory::Memory::allocate(&stage.device, 8).unwrap();
    let _other = memory.publish("memory", stage.domain.options()).unwrap();
    let keeper = stage.keeper();
    let [empty] = &list()[..] else {
        panic!("one name")
    };
    assert_eq!((&empty.version, empty.holders), (&None, 0));
    let own = Some(std::process::id() as i32);
    assert_eq!(empty.keeper.as_ref().map(|keeper| keeper.pid), Some(own));

    let _published = [stage.publish(1), stage.publish(2)];
    let [offered] = &list()[..] else {
        panic!("one name")
    };
    let version = offered.version.as_ref().unwrap();
    assert_eq!((offered.name.as_str(), offered.holders), ("w", 1));
    assert_eq!(
        (version.number, version.tensors, version.bytes),
        (2, 2, 2048)
    );
    assert_eq!(
        (version.is_offered, version.device),
        (true, stage.device.info().id)
    );

    drop(keeper);
    let [kept] = &list()[..] else {
        panic!("one name")
    };
    assert_eq!((kept.keeper.clone(), kept.holders), (None, 1));
    let version = kept.version.as_ref().unwrap();
    assert_eq!((version.number, version.is_offered), (2, false));

    let _keeper = stage.keeper();
    let candidate = NamedWeights::list(&stage.domain, "w").unwrap().remove(0);
    let version = candidate.version.unwrap();
    assert_eq!((version.number, version.is_offered), (2, false));
    assert!(candidate.keeper.is_some());
    assert_eq!(NamedWeights::list(&stage.domain, "memory").unwrap(), []);
}

#[test]
fn a_keeper_that_is_asked_to_end_gives_its_descriptors_up_and_takes_no_more() {
    let stage = Stage::new();
    let absent = Keeper::end(&stage.domain, "w", WAIT).unwrap_err();
    assert!(matches!(absent, Error::NotFound { .. }), "{absent}");
    let keeper = stage.keeper();
    let published = stage.publish(1);
    assert!(!keeper.state().unwrap().is_asked_to_end);
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| Keeper::end(&stage.domain, "w", WAIT));
        let mut fds = [rustix::event::PollFd::new(
            &keeper,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut fds, None).unwrap();
        assert!(keeper.state().unwrap().is_asked_to_end);
        assert_eq!(keeper.state().unwrap().version, None);
        let refused = stage
            .weights(2)
            .publish(&stage.domain, "w", WAIT)
            .unwrap_err();
        assert!(
            matches!(refused, Error::Refused { denied: false, .. }),
            "{refused}"
        );
        let none = SharedWeights::open("w", stage.options(), Duration::ZERO).unwrap_err();
        assert!(matches!(none, Error::Timeout { .. }), "{none}");
        drop(keeper);
        ending.join().unwrap().unwrap();
    });
    let next = stage.keeper();
    assert_eq!(next.state().unwrap().candidate, Some(published.version));
    let held_up = Keeper::end(&stage.domain, "w", Duration::ZERO).unwrap_err();
    assert!(matches!(held_up, Error::Timeout { .. }), "{held_up}");
    assert_eq!(next.state().unwrap().candidate, None);
}

/// A safetensors file with one tensor of `bytes` bytes, each of them `byte`.
fn file_of(byte: u8, bytes: usize) -> Vec<u8> {
    let header =
        format!(r#"{{"a":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + bytes, byte);
    file
}

#[test]
fn a_file_that_is_written_in_place_while_it_is_loaded_is_an_error_also_with_its_old_time() {
    use std::os::unix::fs::FileExt;
    let stage = Stage::new();
    let path = stage.folder.path().join("model.safetensors");
    for keeps_time in [false, true] {
        let whole = file_of(1, 4 << 20);
        std::fs::write(&path, &whole).unwrap();
        // At once, in the same tick of the kernel's clock.
        let source = Source::open([&path]).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        let before = file.metadata().unwrap().modified().unwrap();
        let once = AtomicBool::new(false);
        let loaded = Weights::load(&stage.device, &source, |_| {
            if !once.swap(true, SeqCst) {
                file.write_all_at(&file_of(2, 4 << 20), 0).unwrap();
                if keeps_time {
                    file.set_modified(before).unwrap();
                }
            }
        });
        let refused = loaded.map(drop).unwrap_err().to_string();
        assert!(refused.contains("changed while it was loaded"), "{refused}");
        let source = Source::open([&path]).unwrap();
        Weights::load(&stage.device, &source, |_| {}).unwrap();
    }
}
