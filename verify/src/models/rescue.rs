//! The rescue: a publisher is proven dead while its sample is being handed out.

use std::sync::Arc;
use std::sync::Weak;
use std::time::Duration;

use super::vigil::Vigil;
use crate::link::segment::Segment;
use crate::link::wake::Bell;
use crate::link::watcher::Watched;
use crate::models::Model;

pub const LET_GO: Model = Model { name: "a stream that waits for the dead is let go", bound: 4, body: let_go };
pub const WHOLE: Model =
    Model { name: "what was complete counts, and what was not is lost", bound: 4, body: || whole(true) };
pub const LOST: Model = Model { name: "what was not complete is lost to everybody", bound: 4, body: || whole(false) };

const POSITION: u64 = 1;

fn vigil(segment: &Arc<Segment>) -> Arc<Vigil> {
    let vigil = Vigil::new(segment, &Arc::new(Bell::default()), None);
    vigil.read_by(Weak::new());
    // Its words are made.
    vigil.hold(0, 0);
    let _ = (vigil.has_lost(0, POSITION), vigil.standing());
    Arc::new(vigil)
}

/// As `Inlet::admit` does: whether the sample is handed out.
fn admit(vigil: &Vigil) -> bool {
    if vigil.hold(0, POSITION) {
        vigil.let_go(0, POSITION);
        return !vigil.has_lost(0, POSITION);
    }
    true
}

/// As `Inlet::completion`: `None` if it is lost.
fn completion(vigil: &Vigil, segment: &Segment) -> Option<bool> {
    let reached = segment.entry(POSITION).ready.reached(POSITION);
    if vigil.has_lost(0, POSITION) { None } else { Some(reached) }
}

fn await_ready(segment: &Segment) {
    while !segment.entry(POSITION).ready.reached(POSITION) {
        segment.entry(POSITION).ready.park(POSITION, Duration::MAX);
    }
}

fn let_go() {
    let segment = Arc::new(Segment::new(1).touched());
    let vigil = vigil(&segment);
    let watcher = vigil.clone();
    let thread = loom::thread::spawn(move || {
        watcher.on_ready(0);
    });
    if admit(&vigil) {
        await_ready(&segment);
        assert_eq!(completion(&vigil, &segment), None, "its data was never complete");
    }
    thread.join().expect("the watcher");
}

/// The proof comes behind all that the publisher did; `is_complete` says whether that was all of it.
fn whole(is_complete: bool) {
    let segment = Arc::new(Segment::new(1).touched());
    let vigil = vigil(&segment);
    let (watcher, words) = (vigil.clone(), segment.clone());
    let thread = loom::thread::spawn(move || {
        if is_complete {
            words.entry(POSITION).ready.store(POSITION);
        }
        watcher.on_ready(0);
    });
    let is_handed_out = admit(&vigil);
    if is_handed_out {
        await_ready(&segment);
    }
    let found = if is_handed_out { completion(&vigil, &segment) } else { None };
    assert_eq!(found, is_complete.then_some(true));
    thread.join().expect("the watcher");
}
