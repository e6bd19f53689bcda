//! Random histories: against the library's own arena and a pool's bookkeeping, and with faults that
//! they must find.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, any};
use proptest::test_runner::{RngAlgorithm, TestError, TestRng, TestRunner};
use warpipe::verify::histories::{Draw, arena, entry, pool};
use warpipe::verify::plant::Effect::Says;
use warpipe::verify::plant::{Op, Plant};

/// Histories that are tried of each kind; `VERIFY_HISTORIES` of the environment says another
/// number, and then they are others each time.
const HISTORIES: u32 = if cfg!(miri) { 4 } else { 10_000 };
const LENGTH_MAX: usize = 120;

fn runner() -> TestRunner {
    let wanted = std::env::var("VERIFY_HISTORIES")
        .ok()
        .and_then(|number| number.parse().ok());
    let cases = wanted.unwrap_or(HISTORIES);
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    };
    match wanted {
        Some(_) => TestRunner::new(config),
        None => TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)),
    }
}

/// The shortest history that goes wrong, if there is one.
fn search(play: impl Fn(&[Draw]) -> Result<(), String>) -> Option<(Vec<Draw>, String)> {
    // A panic is a finding, too.
    let sound = |acts: &[Draw]| {
        catch_unwind(AssertUnwindSafe(|| play(acts)))
            .unwrap_or_else(|_| Err("the books do not add up".into()))
    };
    let acts = vec(any::<Draw>(), 1..LENGTH_MAX);
    match runner().run(&acts, |acts| {
        sound(&acts).map_err(proptest::test_runner::TestCaseError::fail)
    }) {
        Ok(()) => None,
        Err(TestError::Fail(reason, acts)) => Some((acts, reason.to_string())),
        Err(TestError::Abort(reason)) => panic!("{reason}"),
    }
}

fn play_arena(fault: arena::Fault) -> impl Fn(&[Draw]) -> Result<(), String> {
    move |acts| {
        let mut play = arena::Play::new(fault);
        acts.iter().try_for_each(|&act| play.act(act))?;
        play.finish()
    }
}

fn play_pool(fault: pool::Fault) -> impl Fn(&[Draw]) -> Result<(), String> {
    move |acts| {
        let mut play = pool::Play::new(fault);
        acts.iter().try_for_each(|&act| play.act(act))?;
        play.finish()
    }
}

fn noticed(found: Option<(Vec<Draw>, String)>) {
    let (acts, reason) = found.expect("nothing was noticed");
    println!("noticed after {} acts: {reason}", acts.len());
}

#[test]
#[cfg_attr(miri, ignore = "regions are memfds")]
fn a_slot_is_taken_again_only_when_its_last_writer_is_past_it() {
    assert_eq!(search(play_arena(arena::Fault::None)), None);
}

#[test]
fn an_entry_comes_out_as_it_went_in_or_is_refused() {
    let play = |acts: &[Draw]| {
        let mut play = entry::Play::default();
        acts.iter().try_for_each(|&act| play.act(act))
    };
    assert_eq!(search(play), None);
}

#[test]
#[cfg_attr(miri, ignore = "there are too few histories for it")]
fn every_fault_of_an_arenas_owner_is_noticed() {
    use arena::Fault::{ForgetsFence, SignalsEarly, StaleFence};
    for fault in [ForgetsFence, SignalsEarly, StaleFence] {
        noticed(search(play_arena(fault)));
    }
}

#[test]
#[cfg_attr(miri, ignore = "there are too few histories for it")]
fn a_word_that_counts_as_reached_too_early_is_noticed() {
    let line = "self.value.load(Ordering::Acquire)";
    let plant = Plant {
        file: "backend/word.rs",
        line,
        op: Op::Load,
        effect: Says(1 << 40),
    };
    let _planted = plant.sow();
    noticed(search(play_arena(arena::Fault::None)));
}

#[test]
#[cfg_attr(miri, ignore = "regions are memfds")]
fn a_block_is_lent_again_only_when_all_that_had_it_are_past_it() {
    assert_eq!(search(play_pool(pool::Fault::None)), None);
}

#[test]
#[cfg_attr(miri, ignore = "there are too few histories for it")]
fn every_fault_of_a_pool_is_noticed() {
    use pool::Fault::{
        ForgetsBorrowers, ForgetsFence, FreesAtDeath, FreesAtGoodbye, GivesUncleared, NotesOneUser,
    };
    for fault in [
        ForgetsFence,
        FreesAtDeath,
        FreesAtGoodbye,
        ForgetsBorrowers,
        GivesUncleared,
        NotesOneUser,
    ] {
        noticed(search(play_pool(fault)));
    }
}
