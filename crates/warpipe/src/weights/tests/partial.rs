//! Versions that share tensors with another one.

use std::os::fd::AsFd;

use super::in_place::{is_dropped, is_kept};
use super::{Stage, WAIT, byte_of};
use crate::error::Error;
use crate::tensor::{DType, Layout};
use crate::weights::manifest::LEASES_MAX;
use crate::weights::{BaseVersion, Hashing, PublishedWeights, SharedWeights, Weights};

fn layout(bytes: u64) -> Layout {
    Layout::contiguous(DType::U8, &[bytes]).unwrap()
}

fn bytes_of(shared: &SharedWeights, name: &str) -> Vec<u8> {
    let tensor = shared.tensor(name).unwrap();
    tensor.memory.to_vec(WAIT).unwrap()
}

impl Stage {
    /// Weights with these tensors of 100 bytes, and all others of a base.
    fn partial(&self, tensors: &[(&str, u8)], base: impl Into<BaseVersion>) -> Weights {
        let described = tensors.iter().map(|&(name, _)| (name, layout(100)));
        let mut builder = Weights::builder(&self.device, described).unwrap();
        if let Some(memory) = builder.memory() {
            let stream = self.device.stream().unwrap();
            for (&offset, &(_, byte)) in builder.offsets().iter().zip(tensors) {
                memory.write(&stream, offset, &[byte; 100]).unwrap();
            }
        }
        builder.base = Some(base.into());
        builder.finish().unwrap()
    }

    fn publish_partial(
        &self,
        tensors: &[(&str, u8)],
        base: impl Into<BaseVersion>,
    ) -> PublishedWeights {
        let weights = self.partial(tensors, base);
        weights.publish(&self.domain, "w", WAIT).unwrap()
    }
}

#[test]
fn a_partial_version_is_whole_for_readers_and_has_the_memory_and_hashes_of_its_base() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let whole = stage.weights(1);
    whole.publish(&stage.domain, "w", WAIT).unwrap();
    let first = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    let weights = stage.partial(&[("b", 2), ("c", 3)], &whole);
    let file = |weights: &Weights, piece: usize| {
        let held = weights.held_for_tests(0);
        rustix::fs::fstat(held.pieces[piece].as_fd())
            .unwrap()
            .st_ino
    };
    assert_eq!(file(&weights, 1), file(&whole, 0), "one memory");
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop((whole, weights));
    let second = first.newer(WAIT).unwrap();
    assert_eq!((published.version, second.info().version), (2, 2));
    let names: Vec<_> = second.tensors().iter().map(|it| it.name.as_ref()).collect();
    assert_eq!(names, ["b", "c", "a"]);
    assert_eq!(bytes_of(&second, "a"), [1; 900]);
    assert_eq!(bytes_of(&second, "b"), [2; 100]);
    assert_eq!(bytes_of(&second, "c"), [3; 100]);
    assert_eq!(byte_of(&first), 1, "its base is as it was");
    let hash = |shared: &SharedWeights| shared.tensor("a").unwrap().info.hash;
    assert!(hash(&second).is_some() && hash(&second) == hash(&first));
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        2
    );
    // Nothing of its own: another name of the version.
    let third = stage.publish_partial(&[], &second);
    let third = (
        third.version,
        SharedWeights::open("w", stage.options(), WAIT).unwrap(),
    );
    assert_eq!((third.0, bytes_of(&third.1, "b")), (3, vec![2; 100]));
}

#[test]
fn tensors_behind_copies_that_fill_their_memory_are_hashed_where_they_lie_or_not_at_all() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let copied = |name, hashing| {
        // All of the memory that its allocation has: what follows begins at its very end.
        let mut builder = Weights::builder(&stage.device, [(name, layout(4096))]).unwrap();
        let stream = stage.device.stream().unwrap();
        let memory = builder.memory().unwrap();
        memory.write(&stream, 0, &[9; 4096]).unwrap();
        builder.hashing = hashing;
        builder
    };
    let (tensors, _told) = stage.in_place_at(0, 0, 2);
    let mut builder = copied("copied", Hashing::Device);
    builder.in_place = Some(tensors);
    let weights = builder.finish().unwrap();
    weights.publish(&stage.domain, "w", WAIT).unwrap();
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
    // Tensors of a base without hashes get none.
    let base = copied("first", Hashing::None).finish().unwrap();
    let mut builder = copied("copied", Hashing::Device);
    builder.base = Some((&base).into());
    let partial = builder.finish().unwrap();
    let hashed = partial.tensors().iter().map(|it| it.hash.is_some());
    assert_eq!(hashed.collect::<Vec<_>>(), [true, false]);
}

#[test]
fn a_version_of_bases_has_the_parts_that_it_uses_and_no_others() {
    let stage = Stage::new();
    let _keeper = stage.keeper();
    let mut last = stage.publish_partial(&[("x", 0), ("y", 0)], &stage.weights(1));
    for step in 1..=20 {
        // `y` is never given again; each `x` replaces that of the version before.
        last = stage.publish_partial(&[("x", step)], &last);
    }
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(shared.info().version, 21);
    assert_eq!(
        (byte_of(&shared), bytes_of(&shared, "x")),
        (1, vec![20; 100])
    );
    assert_eq!(shared.parts().count(), 3, "x, y, and the first base");
}

#[test]
fn the_memory_of_a_base_is_kept_by_each_process_that_has_a_version_of_it_and_by_no_other() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let (weights, told) = stage.weights_in_place(3);
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    let partial = stage.publish_partial(&[("t1", 9)], &published);
    // The base was replaced, and its publisher gives it up.
    drop((weights, published));
    assert!(is_kept(&told), "the keeper offers tensors of it");
    let reader = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    drop((keeper, partial));
    let check = |shared: &SharedWeights| {
        let tensors = ["t0", "t1", "t2"].map(|name| bytes_of(shared, name));
        assert_eq!(tensors, [[0; 100], [9; 100], [2; 100]]);
    };
    check(&reader);
    assert!(is_kept(&told), "a reader has it");
    let keeper = stage.keeper();
    assert_eq!(keeper.state().unwrap().candidate, Some(2));
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        2
    );
    drop(reader);
    let reader = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    check(&reader);
    // A partial version of what was taken over, which needs nothing of the first one any more.
    let all = [("t0", 1), ("t1", 1), ("t2", 1)];
    let third = stage.publish_partial(&all, &reader);
    assert!(is_kept(&told));
    drop(reader);
    assert!(is_dropped(&told), "nobody has a version of it");
    assert_eq!(third.version, 3);
    drop(keeper);
}

#[test]
fn a_base_that_was_withdrawn_is_an_error_and_one_that_is_open_is_none() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    stage.publish(1);
    let find = |number| BaseVersion::find(&stage.domain, "w", number, WAIT);
    let base = find(1).unwrap();
    stage.publish(2);
    let told = find(1).unwrap_err();
    assert!(matches!(told, Error::Argument { .. }), "{told}");
    assert!(
        told.to_string().contains("version 2, which is offered"),
        "{told}"
    );
    stage.publish_partial(&[("b", 7)], base);
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(
        (shared.info().version, bytes_of(&shared, "a")),
        (3, vec![1; 900])
    );
    // Of another name, with another keeper, which ends.
    let other = crate::weights::Keeper::new("other", stage.domain.options()).unwrap();
    let weights = stage.weights(5);
    let elsewhere = weights.publish(&stage.domain, "other", WAIT).unwrap();
    let partial = stage.partial(&[("b", 8)], &elsewhere);
    drop((weights, elsewhere, other));
    partial.publish(&stage.domain, "w", WAIT).unwrap();
    let shared = shared.newer(WAIT).unwrap();
    assert_eq!(bytes_of(&shared, "a"), [5; 900]);
    drop(keeper);
}

#[test]
fn a_version_has_tensors_in_place_of_so_many_versions_and_no_more() {
    let stage = Stage::new();
    let mut last: Option<Weights> = None;
    let mut told = Vec::new();
    for number in 0..=LEASES_MAX {
        let (tensors, dropped) = stage.in_place_from(number, 1);
        told.push(dropped);
        let mut builder = Weights::builder(&stage.device, []).unwrap();
        builder.in_place = Some(tensors);
        builder.base = last.as_ref().map(Into::into);
        match builder.finish() {
            Ok(weights) => last = Some(weights),
            Err(error) => {
                assert_eq!(number, LEASES_MAX);
                assert!(error.to_string().contains("all of its tensors"), "{error}");
                assert!(is_dropped(&told.pop().unwrap()));
                break;
            }
        }
        assert_ne!(number, LEASES_MAX);
    }
    assert!(told.iter().all(is_kept));
    let _keeper = stage.keeper();
    let weights = last.unwrap();
    weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop(weights);
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(shared.tensors().len(), LEASES_MAX);
    assert!(told.iter().all(is_kept));
}

#[test]
fn strides_and_metadata_arrive_as_they_were_given() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let turned = Layout::strided(DType::U8, &[2, 3], &[1, 2], 0).unwrap();
    let mut builder = Weights::builder(&stage.device, [("turned", turned)]).unwrap();
    let stream = stage.device.stream().unwrap();
    builder
        .memory()
        .unwrap()
        .write(&stream, 0, b"abcdef")
        .unwrap();
    let json = r#"{"step": 7, "names": ["turned"]}"#;
    builder.metadata = json.into();
    let weights = builder.finish().unwrap();
    let published = weights.publish(&stage.domain, "w", WAIT).unwrap();
    drop(keeper);
    let _keeper = stage.keeper();
    assert_eq!(
        SharedWeights::verify("w", stage.options(), WAIT).unwrap(),
        1
    );
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(shared.info().metadata, json.as_bytes());
    let tensor = shared.tensor("turned").unwrap();
    assert_eq!((tensor.info.layout, tensor.memory.bytes()), (turned, 6));
    assert_eq!(bytes_of(&shared, "turned"), b"abcdef");
    // Not those of its base.
    let partial = stage.partial(&[("b", 1)], &published);
    assert!(partial.publish(&stage.domain, "w", WAIT).is_ok());
    let shared = shared.newer(WAIT).unwrap();
    assert_eq!(shared.info().metadata, b"");
    assert_eq!(shared.tensor("turned").unwrap().info.layout, turned);
    let long = format!("\"{}\"", "m".repeat(1 << 20));
    for wrong in [&b"{"[..], b"{} 1", b"\x01", b"\"\xff\"", long.as_bytes()] {
        let mut builder = Weights::builder(&stage.device, []).unwrap();
        builder.metadata = wrong.into();
        let told = builder.finish().unwrap_err();
        assert!(told.to_string().contains("metadata"), "{told}");
    }
}

#[test]
fn a_base_without_tensors_is_the_base_of_a_version_with_some_or_none() {
    let stage = Stage::new();
    let keeper = stage.keeper();
    let nothing = || Weights::builder(&stage.device, []).unwrap();
    let empty = nothing().finish().unwrap();
    let mut again = nothing();
    again.base = Some((&empty).into());
    let again = again.finish().unwrap();
    assert!(again.tensors().is_empty());
    again.publish(&stage.domain, "w", WAIT).unwrap();
    stage.publish_partial(&[("b", 7)], &again);
    let shared = SharedWeights::open("w", stage.options(), WAIT).unwrap();
    assert_eq!(bytes_of(&shared, "b"), [7; 100]);
    drop(keeper);
}
