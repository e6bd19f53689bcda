//! Replays the corpus, and a bounded number of changes of it that are the same every time. No
//! nightly, no fuzzer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use fastrand::Rng;
use warpipe_fuzz::{corpus, targets};

/// Changes that are tried of each parser; `VERIFY_ROUNDS` of the environment says another number.
const ROUNDS: u64 = 40_000;

/// The longest input that a change makes.
const LENGTH_MAX: usize = 2048;

fn change(input: &mut Vec<u8>, other: &[u8], random: &mut Rng) {
    for _ in 0..1 + random.usize(..4) {
        let at = random.usize(..input.len() + 1);
        match random.usize(..6) {
            0 => input.truncate(at),
            1 => input.insert(at, random.u8(..)),
            2 => input.extend(&other[random.usize(..other.len() + 1)..]),
            3 if at < input.len() => input[at] ^= 1 << random.usize(..8),
            4 if at < input.len() => input[at] = [0, 1, 127, 128, 255][random.usize(..5)],
            5 if at < input.len() => drop(input.remove(at)),
            _ => {}
        }
        input.truncate(LENGTH_MAX);
    }
}

fn replay(name: &str) {
    let target = targets()
        .find(|target| target.name == name)
        .expect("a target");
    let corpus = corpus::of(&target);
    assert!(!corpus.is_empty(), "{name} has neither seeds nor a corpus");
    let try_one = |input: &[u8]| {
        if catch_unwind(AssertUnwindSafe(|| (target.parse)(input))).is_err() {
            panic!("{name} does what it may not with {input:02x?}");
        }
    };
    corpus.iter().for_each(|input| try_one(input));
    let rounds = std::env::var("VERIFY_ROUNDS")
        .ok()
        .and_then(|rounds| rounds.parse().ok())
        .unwrap_or(ROUNDS);
    let mut random = Rng::with_seed(7);
    for _ in 0..rounds {
        let (mut input, other) = (
            corpus[random.usize(..corpus.len())].clone(),
            random.usize(..corpus.len()),
        );
        change(&mut input, &corpus[other], &mut random);
        try_one(&input);
    }
    println!(
        "{name}: {} inputs and {rounds} changes of them",
        corpus.len()
    );
}

macro_rules! replays {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            replay(stringify!($name));
        })*

        #[test]
        fn every_target_is_replayed_and_has_a_program() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz_targets");
            for target in targets() {
                assert!([$(stringify!($name)),*].contains(&target.name), "{} is not replayed", target.name);
                assert!(folder.join(format!("{}.rs", target.name)).exists(), "{} has no program", target.name);
            }
        }
    };
}

replays! { message bodies queue ticket event_handle legacy_handle entry layout text npy png weights }
