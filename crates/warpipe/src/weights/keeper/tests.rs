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
    let again = first.numbered(0).unwrap();
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
        state.check(other, true).is_empty(),
        "other content of this number"
    );
    assert_eq!(state.candidate(), Some(6));
    let newest = state.candidates[1].version;
    assert_eq!(state.check(newest, false).len(), 1);
    assert_eq!(state.candidate(), Some(4));
    let older = state.candidates[0].version;
    assert!(state.check(older, true).is_empty());
    assert_eq!(state.offered.map(|held| held.version), Some(older));
}
