//! Versions with content hashes that come with the copy, later, or never. **This module is marked for
//! unsafe**: it copies tensors by address.

use std::sync::Arc;
use std::time::Duration;

use super::{Stage, WAIT, byte_of};
use crate::OpenOptions;
use crate::backend::testing::{Counting, Failing, Wrapped};
use crate::device::Device;
use crate::error::{Error, StateFault, WeightsFault};
use crate::hostile::in_a_forked_child;
use crate::memory::Memory;
use crate::tensor::{DType, Layout};
use crate::wait::Wait;
use crate::weights::SharedWeights;
use crate::weights::held::{Held, KnownParts};
use crate::weights::holder;
use crate::weights::keeper_session::offer_to_keeper;
use crate::weights::manifest::Manifest;
use crate::weights::{
    BaseVersion, Hashing, NamedVersion, NamedWeights, Weights, content, takeover, weights_name,
};

impl Stage {
    fn weights_hashed(&self, device: &Device, byte: u8, hashing: Hashing) -> Weights {
        let layout = Layout::contiguous(DType::U8, &[3, 300]).unwrap();
        let mut builder = Weights::builder(device, [("a", layout), ("b", layout)]).unwrap();
        let (stream, memory) = (device.stream().unwrap(), builder.memory().unwrap());
        for &offset in builder.offsets() {
            memory.write(&stream, offset, &[byte; 900]).unwrap();
        }
        (builder.aliases, builder.hashing) = (vec![(1, "c".into())], hashing);
        builder.finish().unwrap()
    }

    fn named(&self) -> NamedVersion {
        let found = NamedWeights::list(&self.domain, "w").unwrap();
        found[0].version.clone().unwrap()
    }
}

/// The manifest of three tensors with these bytes each, with their hashes.
fn hashed_manifest(weights: &Weights, bytes: &[u8]) -> Manifest {
    let mut manifest = weights.manifest_for_tests().clone();
    let hash = content::content_hash(bytes);
    manifest.add_hashes((0..3).map(|number| (number, hash)));
    manifest
}

#[test]
fn a_version_without_hashes_is_offered_and_no_keeper_that_takes_it_over_offers_it() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let _older = stage.publish(1);
    let weights = stage.weights_hashed(&stage.device, 2, Hashing::None);
    let newer = weights.publish(&stage.domain, "w", WAIT).unwrap();
    assert!(!newer.wait_for_hashes(WAIT).unwrap());
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!((shared.info().version, byte_of(&shared)), (2, 2));
    assert_eq!(
        (shared.info().hashing, shared.info().is_hashed),
        (Hashing::None, false)
    );
    assert_eq!(shared.tensor("a").unwrap().info.hash, None);
    let named = stage.named();
    assert_eq!(
        (named.number, named.hash, named.is_hashed),
        (2, Hashing::None, false)
    );
    let told = SharedWeights::verify("w", stage.options(), WAIT).unwrap_err();
    assert!(
        matches!(&told, Error::Weights(WeightsFault::Unverified { version: 2, tensors, .. })
            if tensors.is_empty()),
        "{told}"
    );
    assert_eq!(keeper.state().unwrap().version, Some(2), "it stays offered");
    drop(keeper);
    let keeper = stage.keeper();
    assert_eq!(keeper.state().unwrap().candidate, Some(2));
    let told = SharedWeights::verify("w", stage.options(), WAIT).unwrap_err();
    assert!(
        matches!(&told, Error::Weights(WeightsFault::Unverified { version: 2, tensors, .. })
            if tensors.is_empty()),
        "{told}"
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
    assert_eq!(stage.publish(3).version, 3);
}

#[test]
fn hashes_that_are_computed_later_reach_the_keeper_new_readers_and_the_next_keeper() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let weights = stage.weights_hashed(&stage.device, 5, Hashing::Later);
    assert_eq!(weights.tensors()[0].hash, None);
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop(weights);
    assert!(published.wait_for_hashes(WAIT).unwrap());
    assert_eq!(keeper.state().unwrap().version, Some(1));
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let hash = Some(content::content_hash(&[5; 900]));
    for name in ["a", "b", "c"] {
        assert_eq!(shared.tensor(name).unwrap().info.hash, hash);
    }
    let named = stage.named();
    assert_eq!((named.hash, named.is_hashed), (Hashing::Later, true));
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
    drop((keeper, shared));
    // Its publisher alone has it.
    let keeper = stage.keeper();
    assert_eq!(keeper.state().unwrap().candidate, Some(1));
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
    assert_eq!(
        byte_of(&SharedWeights::open("w", stage.options(), WAIT).unwrap()),
        5
    );
}

#[test]
fn a_forked_child_waits_for_no_hashes_of_its_parent_and_disturbs_nothing() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let weights = stage.weights_hashed(&stage.device, 5, Hashing::Later);
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    let mut held = Some((weights, published));
    in_a_forked_child(|| {
        let (weights, published) = held.take().unwrap();
        let told = published.wait_for_hashes(WAIT);
        let base = BaseVersion::from(&published);
        drop((base, weights, published));
        matches!(told, Err(Error::State(StateFault::Forked)))
    });
    let (_, published) = held.unwrap();
    assert!(published.wait_for_hashes(WAIT).unwrap());
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
}

#[test]
fn a_check_that_is_cancelled_while_the_device_hashes_gives_no_verdict() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let bytes = vec![1; 64 << 20];
    let layout = Layout::contiguous(DType::U8, &[bytes.len() as u64]).unwrap();
    let weights = Weights::from_bytes(&stage.device, [("a", layout, &bytes[..])]).unwrap();
    let _published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop(keeper);
    let keeper = stage.keeper();
    let backend = Wrapped::new(stage.device.backend().clone(), Counting::default());
    let cancelled = || backend.hook().calls().contains_key("launch");
    let told = SharedWeights::verify(
        "w",
        OpenOptions {
            device: Some(Device::from_backend(backend.clone()).clone()),
            ..stage.options()
        },
        Wait::at_most(WAIT).unless(&cancelled),
    );
    assert!(matches!(told, Err(Error::Timeout { .. })), "{told:?}");
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
}

#[test]
fn a_version_that_its_publisher_could_not_hash_stays_offered_and_says_so() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let inner = stage.device.backend().clone();
    let backend = Wrapped::new(inner, Failing::default());
    let device = Device::from_backend(backend.clone());
    let weights = stage.weights_hashed(&device, 4, Hashing::Later);
    backend.hook().aim("launch", 1);
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    let told = published.wait_for_hashes(WAIT).unwrap_err();
    assert!(
        matches!(
            told,
            Error::Driver {
                code: Error::INJECTED,
                ..
            }
        ),
        "{told}"
    );
    assert!(!published.wait_for_hashes(WAIT).unwrap());
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!((byte_of(&shared), shared.info().is_hashed), (4, false));
    assert_eq!(shared.info().hashing, Hashing::Later);
}

#[test]
fn a_check_waits_for_hashes_that_come_later() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let weights = stage.weights_hashed(&stage.device, 3, Hashing::Later);
    // As if its publisher had not hashed it yet.
    let held = Arc::new(weights.held_for_tests(4));
    let _holder = holder::serve(&stage.domain, "w", held.clone()).unwrap();
    drop(keeper);
    let keeper = stage.keeper();
    assert_eq!(keeper.state().unwrap().candidate, Some(4));
    std::thread::scope(|scope| {
        let check = scope.spawn(|| SharedWeights::verify("w", stage.options(), WAIT).unwrap());
        // Once the check has the version, or before: either way it sees the hashes.
        let manifest = hashed_manifest(&weights, &[3; 900]);
        let hashed = Arc::new(held.hashed(manifest).unwrap());
        let offer = holder::offer(&stage.domain, "w", hashed).unwrap();
        let name = weights_name("w").unwrap();
        offer_to_keeper(&stage.domain, &name, &offer.1, &WAIT.into()).unwrap();
        assert_eq!(check.join().unwrap(), 4);
    });
    assert_eq!(keeper.state().unwrap().version, Some(4));
    let told = SharedWeights::verify("w", stage.options(), Duration::ZERO);
    assert_eq!(told.unwrap(), 4);
}

#[test]
fn a_keeper_holds_no_decoded_tensors_of_the_versions_that_it_serves() {
    let stage = Stage::new();
    let name = weights_name("w").unwrap();
    let weights = stage.weights_hashed(&stage.device, 3, Hashing::Later);
    let held = weights.held_for_tests(4);
    let hashed = held.hashed(hashed_manifest(&weights, &[3; 900])).unwrap();
    let _holder = holder::serve(&stage.domain, "w", Arc::new(hashed)).unwrap();
    let offer = holder::offer(&stage.domain, "w", Arc::new(held)).unwrap();
    let mut kept = takeover::fetch(&stage.domain, &offer.1, KnownParts::default).unwrap();
    assert!(!kept.is_hashed());
    let found = takeover::find(&stage.domain, &name).unwrap().versions;
    kept.take_hashes(&found[0]);
    for held in [&kept, &found[0]] {
        assert_eq!(held.manifest.tensors(), []);
        assert_eq!(held.manifest.bytes(), weights.bytes());
        assert!(held.is_hashed());
    }
}

#[test]
fn a_takeover_has_the_hashes_whichever_holder_it_asks_first() {
    let stage = Stage::new();
    let name = weights_name("w").unwrap();
    let weights = stage.weights_hashed(&stage.device, 3, Hashing::Later);
    let early = Arc::new(weights.held_for_tests(4));
    let manifest = hashed_manifest(&weights, &[3; 900]);
    let hashed = Arc::new(early.hashed(manifest).unwrap());
    // Their names, and so the order, are drawn.
    for _ in 0..16 {
        let serve = |held: &Arc<Held>| holder::serve(&stage.domain, "w", held.clone()).unwrap();
        let _holders = [serve(&early), serve(&early), serve(&hashed)];
        let found = takeover::find(&stage.domain, &name).unwrap();
        let versions: Vec<_> = found.versions.iter().map(|it| it.is_hashed()).collect();
        assert_eq!(versions, [true]);
    }
}

#[test]
fn a_keeper_takes_the_hashes_of_a_version_that_it_has_and_nothing_else_of_that_offer() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let name = weights_name("w").unwrap();
    let later = stage.weights_hashed(&stage.device, 6, Hashing::None);
    let _published = later.publish(&stage.domain, "w", WAIT).unwrap();
    let early = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let bring = |number| {
        let mut held = later.held_for_tests(number);
        held = held.hashed(hashed_manifest(&later, &[6; 900])).unwrap();
        let offer = holder::offer(&stage.domain, "w", Arc::new(held)).unwrap();
        offer_to_keeper(&stage.domain, &name, &offer.1, &WAIT.into())
            .unwrap()
            .1
    };
    // Of a version that it does not have.
    assert_eq!(bring(7), 7);
    assert_eq!(keeper.state().unwrap().version, Some(1));
    assert!(!stage.named().is_hashed);
    // A candidate gets them, too.
    drop(keeper);
    let keeper = stage.keeper();
    assert_eq!(bring(1), 1);
    assert_eq!(keeper.state().unwrap().candidate, Some(1));
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
    let again = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert!(again.info().is_hashed && !early.info().is_hashed && !again.is_same(&early));
    // When the version has been replaced they change nothing, and number nothing anew.
    assert_eq!(stage.publish(8).version, 2);
    assert_eq!(bring(1), 1);
    assert_eq!(keeper.state().unwrap().version, Some(2));
    // The next keeper takes them from the holder that has them.
    drop((keeper, early));
    let keeper = stage.keeper();
    assert_eq!(keeper.state().unwrap().candidate, Some(1));
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
}

#[test]
fn tensors_are_hashed_as_they_are_copied_whatever_their_lengths_and_places() {
    copied_and_hashed(&Device::host());
    let preferred = Device::preferred().device;
    if preferred.is_gpu() {
        copied_and_hashed(&preferred);
    }
}

fn copied_and_hashed(device: &Device) {
    let lengths = [
        0, 1, 15, 16, 17, 600, 16_383, 16_384, 16_385, 131_073, 20_000_003,
    ];
    let bytes: Vec<Vec<u8>> = (0..)
        .zip(lengths)
        .map(|(seed, length)| (0..length).map(|at: u32| (at * 7 + seed) as u8).collect())
        .collect();
    for hashing in [Hashing::Device, Hashing::None] {
        // Each behind the one before: half of them where the device's kernel cannot read them whole.
        let memory = Memory::allocate(device, 24 << 20).unwrap();
        let (stream, mut from, mut end) = (device.stream().unwrap(), Vec::new(), 0u64);
        for (index, bytes) in bytes.iter().enumerate() {
            let begin = end.next_multiple_of(16) + index as u64 % 2;
            end = begin + bytes.len() as u64;
            memory.write(&stream, begin, bytes).unwrap();
            from.push((index, memory.ptr() + begin));
        }
        stream.synchronize(WAIT).unwrap();
        let names: Vec<String> = (0..bytes.len())
            .map(|index| format!("t{index:02}"))
            .collect();
        let layouts = bytes
            .iter()
            .map(|it| Layout::contiguous(DType::U8, &[it.len() as u64]).unwrap());
        let named = names.iter().map(String::as_str).zip(layouts);
        let mut builder = Weights::builder(device, named).unwrap();
        (builder.aliases, builder.hashing) = (vec![(3, "tied".into())], hashing);
        // SAFETY: the memory has them, and nothing writes it.
        unsafe { builder.copy_from(&from) }.unwrap();
        // SAFETY: nothing is read.
        let refused = unsafe { builder.copy_from(&[(bytes.len(), memory.ptr())]) }.unwrap_err();
        assert!(matches!(refused, Error::Argument { .. }), "{refused}");
        let weights = builder.finish().unwrap();
        let copy = weights.memory_for_tests().to_vec(WAIT).unwrap();
        for tensor in weights.tensors() {
            let index = tensor.name.as_ref()[1..].parse().unwrap_or(3);
            let (begin, wanted): (usize, &Vec<u8>) = (tensor.offset as usize, &bytes[index]);
            assert!(
                copy[begin..begin + wanted.len()] == wanted[..],
                "{}",
                tensor.name.as_ref()
            );
            let hash = (hashing == Hashing::Device).then(|| content::content_hash(wanted));
            assert_eq!(tensor.hash, hash, "{}", tensor.name.as_ref());
        }
    }
}
