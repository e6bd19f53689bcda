//! Versions of memory that readers and keepers have already. **This module is marked for unsafe**: it
//! publishes tensors by address.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::in_place::{is_dropped, is_kept};
use super::{Stage, WAIT};
use crate::OpenOptions;
use crate::backend::testing::{Counting, Wrapped};
use crate::device::Device;
use crate::error::{Error, WeightsFault};
use crate::hostile::in_a_forked_child;
use crate::ipc::OutgoingReply;
use crate::memory::Memory;
use crate::tensor::{DType, Layout};
use crate::wait::Wait;
use crate::weights::exports::PieceFd;
use crate::weights::held::{Held, KnownParts, PartialVersion};
use crate::weights::keeper::{KeeperReply, KeeperRequest};
use crate::weights::manifest::Part;
use crate::weights::mapped::known_parts;
use crate::weights::{Hashing, PublishedWeights, SharedWeights, TensorsInPlace, Weights};

/// Memory of tensors that are published again and again, where they lie.
struct Trainer<'a> {
    stage: &'a Stage,
    device: Device,
    memory: Vec<Memory>,
}

impl Stage {
    fn trainer(&self, device: &Device, tensors: usize) -> Trainer<'_> {
        let mut trainer = Trainer {
            stage: self,
            device: device.clone(),
            memory: Vec::new(),
        };
        (0..tensors).for_each(|_| trainer.add());
        trainer
    }
}

impl Trainer<'_> {
    fn add(&mut self) {
        let (number, stream) = (self.memory.len(), self.device.stream().unwrap());
        let memory = Memory::allocate(&self.device, 4096).unwrap();
        memory.write(&stream, 0, &[number as u8; 100]).unwrap();
        stream.synchronize(WAIT).unwrap();
        self.memory.push(memory);
    }

    /// A version of the memory, and the receiver that says when the publisher gets it back.
    fn weights(&self) -> (Weights, Receiver<()>) {
        let (tell, told) = channel();
        let mut tensors = TensorsInPlace::new(&self.device);
        for (number, memory) in self.memory.iter().enumerate() {
            let layout = Layout::contiguous(DType::U8, &[100]).unwrap();
            let owner: Box<(Memory, Sender<()>)> = Box::new((memory.clone(), tell.clone()));
            // SAFETY: the tensor lies in the memory of its owner, which nothing writes.
            unsafe { tensors.add(&format!("t{number}"), layout, memory.ptr(), owner) }.unwrap();
        }
        let mut builder = Weights::builder(&self.device, []).unwrap();
        (builder.in_place, builder.hashing) = (Some(tensors), Hashing::None);
        (builder.finish().unwrap(), told)
    }

    fn publish(&self) -> (PublishedWeights, Receiver<()>) {
        let (weights, told) = self.weights();
        let domain = &self.stage.domain;
        (weights.publish(domain, "w", WAIT).unwrap(), told)
    }
}

fn counting(device: &Device) -> (Arc<Wrapped<Counting>>, Device) {
    let backend = Wrapped::new(device.backend().clone(), Counting::default());
    (backend.clone(), Device::from_backend(backend))
}

/// The calls that map, allocate, export or release memory.
fn memory_calls(backend: &Wrapped<Counting>) -> BTreeMap<&'static str, u64> {
    let mut calls = backend.hook().calls();
    calls.retain(|method, _| {
        let words = ["import", "allocate", "release", "export", "retain"];
        words.iter().any(|word| method.contains(word))
    });
    calls
}

fn bytes_of(weights: &SharedWeights, number: usize) -> Vec<u8> {
    let tensor = weights.tensor(&format!("t{number}")).unwrap();
    tensor.memory.to_vec(WAIT).unwrap()
}

fn addresses(weights: &SharedWeights) -> Vec<u64> {
    let mut found: Vec<u64> = weights.parts().map(|(_, part)| part.ptr()).collect();
    found.sort_unstable();
    found
}

#[test]
fn a_reader_of_the_next_version_in_place_makes_no_call_of_the_driver_for_memory() {
    const TENSORS: usize = 171;
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let trainer = stage.trainer(&stage.device, TENSORS);
    let (first, _told) = trainer.publish();
    let (backend, device) = counting(&stage.device);
    let options = OpenOptions {
        device: Some(device.clone()),
        ..stage.options()
    };
    let mut shared = SharedWeights::open("w", options, WAIT).unwrap();
    let (calls, at) = (memory_calls(&backend), addresses(&shared));
    assert!(calls.values().sum::<u64>() >= 1, "{calls:?}");
    let mut published = vec![first];
    for version in 2..5 {
        published.push(trainer.publish().0);
        shared = shared.newer(WAIT).unwrap();
        assert_eq!(
            (shared.info().version, addresses(&shared)),
            (version, at.clone())
        );
        assert_eq!(memory_calls(&backend), calls);
    }
    assert_eq!(bytes_of(&shared, TENSORS - 1), [TENSORS as u8 - 1; 100]);
    // What comes new is mapped, and no more.
    let mut trainer = trainer;
    trainer.add();
    published.push(trainer.publish().0);
    let longer = shared.newer(WAIT).unwrap();
    assert_eq!(bytes_of(&longer, TENSORS), [TENSORS as u8; 100]);
    let more = memory_calls(&backend);
    let imports = |calls: &BTreeMap<&str, u64>| {
        let counted = calls
            .iter()
            .filter(|(method, _)| method.starts_with("import"));
        counted.map(|(_, count)| count).sum::<u64>()
    };
    assert!(imports(&more) <= imports(&calls) + 2, "{more:?}");
}

#[test]
fn a_piece_that_was_published_before_is_not_exported_again_and_not_held_once_more() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let (backend, device) = counting(&stage.device);
    let trainer = stage.trainer(&device, 9);
    let (_first, _told) = trainer.publish();
    let exports = || backend.hook().calls().get("export_retained").copied();
    assert_eq!(exports(), Some(9));
    let (_second, _told) = trainer.publish();
    assert_eq!(exports(), Some(9));
}

#[test]
fn neither_a_reader_nor_a_keeper_asks_for_pieces_that_it_has() {
    let stage = Stage::new();
    let trainer = stage.trainer(&stage.device, 100);
    let (first, second) = (trainer.weights(), trainer.weights());
    let versions = [first.0.held_for_tests(1), second.0.held_for_tests(2)];
    let (offered, asked) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (server_offered, server_asked) = (offered.clone(), asked.clone());
    let _server = stage.scripted(move |_, _, request| {
        let held: &Held = &versions[server_offered.load(SeqCst)];
        match request {
            KeeperRequest::Offered => held.reply(&KeeperReply::Version(held.describe())),
            KeeperRequest::Pieces { first, .. } => {
                server_asked.fetch_add(1, SeqCst);
                held.reply_pieces(&KeeperReply::Pieces, first)
            }
            _ => OutgoingReply::new(&KeeperReply::Noted, vec![]),
        }
    });
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(asked.swap(0, SeqCst), 2, "64 in a reply");
    offered.store(1, SeqCst);
    let next = shared.newer(WAIT).unwrap();
    assert_eq!((next.info().version, asked.load(SeqCst)), (2, 0));
    // It is a full holder.
    assert_eq!(next.inner.held.pieces.len(), 100);
    assert!(
        next.inner
            .held
            .pieces
            .iter()
            .zip(&*shared.inner.held.pieces)
            .all(|(one, other)| Arc::ptr_eq(one, other))
    );
}

#[test]
fn a_keeper_takes_what_it_has_for_the_next_version_and_gives_all_of_it_to_each_reader() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let trainer = stage.trainer(&stage.device, 70);
    let (first, _told) = trainer.publish();
    let (second, told) = trainer.publish();
    drop(first);
    // This process has nothing mapped: all comes from the keeper.
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(bytes_of(&shared, 69), [69; 100]);
    drop((keeper, second));
    assert!(is_kept(&told), "the reader has the version");
    let next = stage.keeper();
    assert_eq!(next.state().unwrap().candidate, Some(2));
    drop((shared, next));
    assert!(is_dropped(&told));
}

#[test]
fn versions_of_one_memory_share_its_mapping_and_each_gives_its_own_lease_up() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let trainer = stage.trainer(&stage.device, 3);
    let (first, first_told) = trainer.publish();
    let one = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let (second, second_told) = trainer.publish();
    let two = one.newer(WAIT).unwrap();
    assert_eq!(addresses(&one), addresses(&two));
    let tensor = one.tensor("t1").unwrap();
    drop((first, one));
    assert!(
        is_kept(&first_told),
        "a tensor of the first version is in use"
    );
    drop(tensor);
    assert!(is_dropped(&first_told), "nobody has the first version");
    assert_eq!(bytes_of(&two, 2), [2; 100]);
    drop(second);
    drop(stage.publish(1));
    assert!(is_kept(&second_told));
    drop(two);
    assert!(is_dropped(&second_told));
}

#[test]
fn a_part_whose_mapping_has_ended_is_mapped_anew_when_it_comes_back() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let trainer = stage.trainer(&stage.device, 5);
    let (backend, device) = counting(&stage.device);
    let (_first, told) = trainer.publish();
    drop(
        SharedWeights::open(
            "w",
            OpenOptions {
                device: Some(device.clone()),
                ..stage.options()
            },
            WAIT,
        )
        .unwrap(),
    );
    let (_other, _) = (stage.publish(1), ());
    let (_again, _again_told) = trainer.publish();
    let shared = SharedWeights::open(
        "w",
        OpenOptions {
            device: Some(device.clone()),
            ..stage.options()
        },
        WAIT,
    )
    .unwrap();
    assert_eq!(bytes_of(&shared, 4), [4; 100]);
    assert!(memory_calls(&backend).values().sum::<u64>() >= 2);
    drop(_first);
    assert!(is_dropped(&told));
}

#[test]
fn parts_of_another_user_of_another_length_or_under_a_follower_are_not_taken_for_known_ones() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let trainer = stage.trainer(&stage.device, 9);
    let (_published, _told) = trainer.publish();
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let held = &shared.inner.held;
    let described = held.reply(&held.describe()).unwrap();
    let fds = described.fds.into_iter().map(Into::into).collect();
    let found = PartialVersion::receive("w", &held.describe(), fds).unwrap();
    let ids: Vec<_> = found.part_ids().collect();
    let publisher = stage.domain.owner();
    let (_, other_device) = counting(&stage.device);
    let finds = |publisher, device: &Device, change: &dyn Fn(Part) -> Part| {
        let known = known_parts(publisher, device, &found);
        ids.iter()
            .any(|&(id, part)| known.find(id, change(part)).is_some())
    };
    assert!(finds(publisher, &stage.device, &|part| part));
    assert!(!finds(publisher + 1, &stage.device, &|part| part));
    assert!(!finds(publisher, &other_device, &|part| part));
    let longer = |part: Part| Part {
        piece_bytes: 2 * part.piece_bytes,
        ..part
    };
    assert!(!finds(publisher, &stage.device, &longer));
    let more = |part: Part| Part {
        pieces: part.pieces + 1,
        ..part
    };
    assert!(!finds(publisher, &stage.device, &more));
    let follower = shared.follow();
    assert!(!finds(publisher, &stage.device, &|part| part));
    drop((follower, keeper));
}

#[test]
fn known_pieces_of_another_length_are_asked_for() {
    let stage = Stage::new();
    let trainer = stage.trainer(&stage.device, 9);
    let (weights, _told) = trainer.weights();
    let held = weights.held_for_tests(1);
    let fds = held.reply(&held.describe()).unwrap().fds;
    let mut found = PartialVersion::receive(
        "w",
        &held.describe(),
        fds.into_iter().map(Into::into).collect(),
    )
    .unwrap();
    let mut wrong = KnownParts::default();
    for (id, part) in found.part_ids() {
        let pieces: Arc<[Arc<PieceFd>]> = held
            .pieces
            .iter()
            .take(part.pieces as usize)
            .cloned()
            .collect();
        wrong.add(id, part.piece_bytes + 512, &pieces);
    }
    found.take_known(&wrong);
    assert!(!found.is_whole());
    let mut right = KnownParts::default();
    right.add_version(&held);
    found.take_known(&right);
    assert!(found.is_whole());
}

#[test]
fn a_follower_beside_an_opener_of_the_same_memory_changes_what_it_shows_alone() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(stage.publish(1));
    let opened = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let mut follower = SharedWeights::open("w", stage.options(), WAIT)
        .unwrap()
        .follow();
    assert_ne!(addresses(&opened), addresses(follower.weights()));
    let again = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(addresses(&opened), addresses(&again), "openers share");
    drop(stage.publish(2));
    let stream = stage.device.stream().unwrap();
    assert_eq!(follower.update(&stream, WAIT).unwrap(), Some(2));
    let next = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    for (weights, byte) in [
        (&opened, 1),
        (&again, 1),
        (follower.weights(), 2),
        (&next, 2),
    ] {
        assert_eq!(super::byte_of(weights), byte);
    }
    assert_ne!(addresses(&next), addresses(follower.weights()));
    // The follower goes on, and the opener's memory stays.
    drop(stage.publish(3));
    assert_eq!(follower.update(&stream, WAIT).unwrap(), Some(3));
    assert_eq!(super::byte_of(&next), 2);
}

#[test]
fn a_follower_whose_addresses_were_used_waits_until_other_openers_have_closed_the_same_memory() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(stage.publish(1));
    let opened = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let tensor = shared.tensor("a").unwrap();
    let mut follower = shared.follow();
    drop(stage.publish(2));
    let stream = stage.device.stream().unwrap();
    let failed = follower
        .update(&stream, Duration::from_millis(20))
        .unwrap_err();
    assert!(
        matches!(&failed, Error::Timeout { what, .. } if what.contains("other weights")),
        "{failed}"
    );
    for weights in [&opened, follower.weights()] {
        assert_eq!((weights.info().version, super::byte_of(weights)), (1, 1));
    }
    let first = opened.tensor("a").unwrap();
    drop(opened);
    assert_eq!(first.memory.to_vec(WAIT).unwrap(), [1; 900]);
    drop(first);
    assert_eq!(follower.update(&stream, WAIT).unwrap(), Some(2));
    assert_eq!(tensor.memory.to_vec(WAIT).unwrap(), [2; 900]);
}

#[test]
fn a_cancellation_is_asked_while_other_threads_can_look_at_the_weights_that_a_follower_changes() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(stage.publish(1));
    let _opened = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert!(shared.tensor("a").is_some());
    let (clone, mut follower) = (shared.clone(), shared.follow());
    drop(stage.publish(2));
    let next = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let was_free = Cell::new(false);
    let cancelled = || {
        let ((look, looked), clone) = (channel(), clone.clone());
        std::thread::spawn(move || look.send(clone.is_whole()));
        was_free.set(looked.recv_timeout(Duration::from_secs(5)).is_ok());
        true
    };
    let stream = stage.device.stream().unwrap();
    let wait = Wait::at_most(WAIT).unless(&cancelled);
    let failed = follower.take(&next, &stream, wait).unwrap_err();
    assert!(
        matches!(&failed, Error::Timeout { what, .. } if what.contains("other weights")),
        "{failed}"
    );
    assert!(was_free.get());
}

#[test]
fn a_follower_with_clones_shares_its_memory_with_no_later_opener() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(stage.publish(1));
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let clone = shared.clone();
    let mut follower = shared.follow();
    let opened = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    drop(stage.publish(2));
    let stream = stage.device.stream().unwrap();
    assert_eq!(follower.update(&stream, WAIT).unwrap(), Some(2));
    assert_eq!(super::byte_of(&clone), 2);
    assert_eq!((opened.info().version, super::byte_of(&opened)), (1, 1));
}

/// A version of two tensors in one allocation: the first lies there, the second comes from a version
/// of both.
fn publish_halves(stage: &Stage, byte: u8) -> PublishedWeights {
    let stream = stage.device.stream().unwrap();
    let memory = Memory::allocate(&stage.device, 8192).unwrap();
    memory.write(&stream, 0, &[byte; 8192]).unwrap();
    stream.synchronize(WAIT).unwrap();
    let layout = Layout::contiguous(DType::U8, &[900]).unwrap();
    let in_place = |names: &[&str]| {
        let mut tensors = TensorsInPlace::new(&stage.device);
        for (name, at) in names.iter().zip([0, 4096]) {
            let (ptr, owner) = (memory.ptr() + at, Box::new(memory.clone()));
            // SAFETY: the tensor lies in the memory of its owner, which nothing writes.
            unsafe { tensors.add(name, layout, ptr, owner) }.unwrap();
        }
        let mut builder = Weights::builder(&stage.device, []).unwrap();
        builder.in_place = Some(tensors);
        builder
    };
    let whole = in_place(&["a", "b"]).finish().unwrap();
    let mut partial = in_place(&["a"]);
    partial.base = Some((&whole).into());
    let partial = partial.finish().unwrap();
    partial.publish(&stage.domain, "w", WAIT).unwrap()
}

#[test]
fn a_version_that_has_one_memory_in_two_parts_is_followed_by_another_one() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    drop(publish_halves(&stage, 1));
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(super::byte_of(&shared), 1);
    let mut follower = shared.follow();
    drop(publish_halves(&stage, 2));
    let stream = stage.device.stream().unwrap();
    let taken = follower.update(&stream, Duration::from_millis(20));
    assert_eq!(taken.unwrap(), Some(2));
    assert_eq!(super::byte_of(follower.weights()), 2);
}

#[test]
fn a_follower_maps_nothing_that_lies_there_already_and_gives_the_former_lease_up() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let trainer = stage.trainer(&stage.device, 20);
    let (first, first_told) = trainer.publish();
    let (backend, device) = counting(&stage.device);
    let mut follower = SharedWeights::open(
        "w",
        OpenOptions {
            device: Some(device.clone()),
            ..stage.options()
        },
        WAIT,
    )
    .unwrap()
    .follow();
    let calls = memory_calls(&backend);
    let (second, second_told) = trainer.publish();
    drop(first);
    assert!(is_kept(&first_told));
    let stream = device.stream().unwrap();
    assert_eq!(follower.update(&stream, WAIT).unwrap(), Some(2));
    assert_eq!(memory_calls(&backend), calls);
    assert!(is_dropped(&first_told));
    assert_eq!(bytes_of(follower.weights(), 19), [19; 100]);
    drop(second);
    drop(stage.publish(1));
    assert!(is_kept(&second_told), "the follower has it");
    drop(follower);
    assert!(is_dropped(&second_told));
}

impl Stage {
    /// A version of tensors in parts of their own, in memory that is allocated in this order: each byte
    /// is `byte` and the tensor's number.
    fn publish_parts(&self, byte: u8, order: &[usize]) -> PublishedWeights {
        let stream = self.device.stream().unwrap();
        let mut tensors = TensorsInPlace::new(&self.device);
        for &number in order {
            // Of several lengths, so that none are pieces of one part.
            let memory = Memory::allocate(&self.device, 4096 * (number as u64 + 1)).unwrap();
            let bytes = [byte + number as u8; 700];
            memory.write(&stream, 512, &bytes).unwrap();
            stream.synchronize(WAIT).unwrap();
            let layout = Layout::contiguous(DType::U8, &[700]).unwrap();
            let (ptr, owner) = (memory.ptr() + 512, Box::new(memory));
            // SAFETY: the tensor lies in the memory of its owner, which nothing writes.
            unsafe { tensors.add(&format!("t{number}"), layout, ptr, owner) }.unwrap();
        }
        let mut builder = Weights::builder(&self.device, []).unwrap();
        builder.in_place = Some(tensors);
        let weights = builder.finish().unwrap();
        weights.publish(&self.domain, "w", WAIT).unwrap()
    }
}

#[test]
fn a_follower_takes_parts_that_come_in_another_order_each_at_the_address_of_its_tensors() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let _first = stage.publish_parts(10, &[0, 1, 2, 3]);
    let mut follower = SharedWeights::open("w", stage.options(), WAIT)
        .unwrap()
        .follow();
    let tensor = |follower: &crate::weights::Follower, number: usize| {
        let name = format!("t{number}");
        follower.weights().tensor(&name).unwrap()
    };
    let tensors: Vec<_> = (0..4).map(|number| tensor(&follower, number)).collect();
    let stream = stage.device.stream().unwrap();
    for (byte, order) in [(20, [3, 2, 1, 0]), (30, [1, 3, 0, 2]), (40, [0, 1, 2, 3])] {
        let published = stage.publish_parts(byte, &order);
        let taken = follower.update(&stream, WAIT).unwrap();
        assert_eq!(taken, Some(published.version));
        for (number, before) in tensors.iter().enumerate() {
            let now = tensor(&follower, number);
            assert_eq!(now.memory.ptr(), before.memory.ptr());
            assert_eq!(
                before.memory.to_vec(WAIT).unwrap(),
                [byte + number as u8; 700]
            );
        }
        // Each tensor lies in the part that the version says.
        let weights = follower.weights();
        let parts: Vec<_> = weights
            .parts()
            .map(|(begin, part)| (begin, part.ptr()))
            .collect();
        for info in weights.tensors() {
            let (begin, ptr) = *parts.iter().rfind(|part| part.0 <= info.offset).unwrap();
            let tensor = weights.tensor(info.name.as_ref()).unwrap();
            assert_eq!(tensor.memory.ptr(), ptr + info.offset - begin);
        }
    }
    // Parts of other lengths have no places there.
    let _other = stage.publish_parts(50, &[0, 1, 2, 4]);
    let failed = follower.update(&stream, WAIT).unwrap_err();
    assert!(
        matches!(failed, Error::Weights(WeightsFault::Mismatch { .. })),
        "{failed}"
    );
    assert_eq!(tensors[3].memory.to_vec(WAIT).unwrap(), [43; 700]);
}

#[test]
fn a_follower_takes_a_tensor_that_comes_by_copy_in_a_version_of_which_the_others_stay() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let trainer = stage.trainer(&stage.device, 1);
    let ((first, _told), layout) = (
        trainer.publish(),
        Layout::contiguous(DType::U8, &[100]).unwrap(),
    );
    // A base of two parts: a tensor in place, and one that was copied.
    let partial = |byte: u8, base: &PublishedWeights| {
        let mut builder = Weights::builder(&stage.device, [("copied", layout)]).unwrap();
        let stream = stage.device.stream().unwrap();
        let memory = builder.memory().unwrap();
        memory.write(&stream, 0, &[byte; 100]).unwrap();
        (builder.base, builder.hashing) = (Some(base.into()), Hashing::None);
        let weights = builder.finish().unwrap();
        weights.publish(&stage.domain, "w", WAIT).unwrap()
    };
    let second = partial(1, &first);
    let (backend, device) = counting(&stage.device);
    let mut follower = SharedWeights::open(
        "w",
        OpenOptions {
            device: Some(device.clone()),
            ..stage.options()
        },
        WAIT,
    )
    .unwrap()
    .follow();
    let tensor = follower.weights().tensor("copied").unwrap();
    let _third = partial(2, &second);
    let stream = device.stream().unwrap();
    assert_eq!(follower.update(&stream, WAIT).unwrap(), Some(3));
    assert_eq!(tensor.memory.to_vec(WAIT).unwrap(), [2; 100]);
    assert_eq!(bytes_of(follower.weights(), 0), [0; 100]);
    assert_eq!(
        backend.hook().calls().get("import_over"),
        Some(&1),
        "the part that differs"
    );
}

#[test]
fn a_forked_child_takes_no_mapping_of_its_parent_for_known() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let trainer = stage.trainer(&stage.device, 9);
    let (_published, _told) = trainer.publish();
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let held = &shared.inner.held;
    let fds = held.reply(&held.describe()).unwrap().fds;
    let found = PartialVersion::receive(
        "w",
        &held.describe(),
        fds.into_iter().map(Into::into).collect(),
    )
    .unwrap();
    let knows = || {
        let known = known_parts(stage.domain.owner(), &stage.device, &found);
        found
            .part_ids()
            .any(|(id, part)| known.find(id, part).is_some())
    };
    assert!(knows());
    in_a_forked_child(|| !knows());
}
