//! Which version a keeper offers.

use super::*;
use crate::device::Device;
use crate::tensor::{DType, Layout};
use crate::weights::Weights;

fn held(number: u64) -> Held {
    let layout = Layout::contiguous(DType::U8, &[1]).unwrap();
    let weights = Weights::from_bytes(&Device::host(), [("a", layout, &[1][..])]).unwrap();
    weights.held_for_tests(number)
}

#[test]
fn a_published_version_is_numbered_after_all_known_ones_and_replaces_them() {
    let mut state = KeeperState {
        last_number: 7,
        candidates: vec![held(4), held(6)],
        ..KeeperState::default()
    };
    let first = held(0);
    let again = first.numbered(0);
    let (number, replaced) = state.replace(first).unwrap();
    assert_eq!((number, replaced.len(), state.candidate()), (8, 2, None));
    let (number, _) = state.replace(again).unwrap();
    assert_eq!(number, 8, "the same content gets no second number");
    let (number, replaced) = state.replace(held(0)).unwrap();
    assert_eq!((number, replaced.len()), (9, 1));
    state.last_number = NUMBER_MAX;
    assert!(state.replace(held(0)).is_err());
}

#[test]
fn only_the_candidate_that_was_checked_is_offered_and_a_damaged_one_gives_way_to_an_older() {
    let mut state = KeeperState {
        candidates: vec![held(4), held(6)],
        last_number: 6,
        ..KeeperState::default()
    };
    let other = held(6).version;
    assert!(
        state.check(other, true).is_none(),
        "other content of this number"
    );
    assert_eq!(state.candidate(), Some(6));
    let newest = state.candidates[1].version;
    assert_eq!(state.check(newest, false).unwrap().len(), 1);
    assert_eq!(state.candidate(), Some(4));
    let older = state.candidates[0].version;
    assert!(state.check(older, true).unwrap().is_empty());
    assert_eq!(state.offered.map(|held| held.version), Some(older));
}

#[test]
fn a_keeper_that_was_asked_to_end_while_it_searched_takes_nothing_over() {
    let mut state = KeeperState::default();
    assert!(state.end().is_empty());
    let found = Found {
        versions: vec![held(4)],
        last_number: 4,
        ..Found::default()
    };
    assert_eq!(state.take_over(found).len(), 1);
    assert_eq!((state.candidate(), state.last_number), (None, 4));
}

#[test]
fn a_version_published_again_to_the_next_keeper_keeps_its_number_if_it_is_the_newest() {
    let mut state = KeeperState {
        candidates: vec![held(4), held(6)],
        last_number: 6,
        ..KeeperState::default()
    };
    let newest = state.candidates[1].numbered(0);
    let (number, replaced) = state.replace(newest).unwrap();
    assert_eq!((number, replaced.len(), state.candidate()), (6, 2, None));
    assert_eq!(state.offered.map(|held| held.version.number), Some(6));
    for (again, last_number) in [(0, 6), (1, 7)] {
        let mut state = KeeperState {
            candidates: vec![held(4), held(6)],
            last_number,
            ..KeeperState::default()
        };
        let held = state.candidates[again].numbered(0);
        let (number, _) = state.replace(held).unwrap();
        assert_eq!(number, last_number + 1, "a later version may be in use");
    }
}
