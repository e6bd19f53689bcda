//! The semaphore's page of counters: no waiter is forgotten, and no permit is doubled.

use std::sync::Arc;
use std::time::Duration;

use super::page::{SemaphorePage, WaitProgress, bytes_for};
use crate::atomic::{AtomicU32, AtomicU64};
use crate::backend::TimelineWord;
use crate::verify::models::Model;
use crate::verify::page;

pub const HANDED_ON: Model = Model {
    name: "a thread that waits for a permit gets it",
    bound: 4,
    body: handed_on,
};
pub const WITHDRAWN: Model = Model {
    name: "a wait that ends has a permit or none",
    bound: 4,
    body: withdrawn,
};
pub const TAKEN: Model = Model {
    name: "of two that take a permit one has it",
    bound: 4,
    body: taken,
};

const HOLDER: u32 = 1;
const WAITER: u32 = 2;

/// A room of one permit, with the words that two members use made.
fn room() -> Arc<SemaphorePage> {
    let page = page(bytes_for(1));
    let word = |offset| page.at::<AtomicU64>(offset).touch();
    [0, 8, 64, 72, 80, 88].into_iter().for_each(word);
    for place in 0..2 {
        let base = 4096 + 64 * place;
        [base, base + 8].into_iter().for_each(word);
        page.at::<AtomicU32>(base + 16).touch();
    }
    let permit = bytes_for(1) - 4096;
    [permit, permit + 8].into_iter().for_each(word);
    page.at::<TimelineWord>(permit + 16).store(0);
    Arc::new(SemaphorePage::new(page, 1))
}

/// As `LocalSemaphore::wait_at` does, without a limit.
fn wait(room: &SemaphorePage) -> u32 {
    let place = room.begin_wait(WAITER).expect("places are free");
    room.match_waiters(WAITER);
    loop {
        match room.check_wait(place, WAITER) {
            WaitProgress::Granted { permit, .. } => return permit,
            WaitProgress::Lost => panic!("its place is its own"),
            WaitProgress::Waiting => {
                room.sleep(place, Duration::MAX, || false);
            }
        }
    }
}

fn handed_on() {
    let room = room();
    let permit = room.take_free(HOLDER, 0).expect("a free permit");
    let theirs = room.clone();
    let thread = loom::thread::spawn(move || wait(&theirs));
    room.hand_on(permit, HOLDER);
    assert_eq!(thread.join().expect("the waiter"), permit);
    assert!(room.holds(WAITER) && !room.holds(HOLDER) && !room.has_waiters());
}

fn withdrawn() {
    let room = room();
    let permit = room.take_free(HOLDER, 0).expect("a free permit");
    let place = room.begin_wait(WAITER).expect("places are free");
    let theirs = room.clone();
    let thread = loom::thread::spawn(move || theirs.hand_on(permit, HOLDER));
    let look = room.cancel_wait(place, WAITER);
    thread.join().expect("the holder");
    assert_eq!(
        matches!(look, WaitProgress::Granted { .. }),
        room.holds(WAITER)
    );
    assert_eq!(room.available(), u32::from(look == WaitProgress::Waiting));
    assert!(!room.holds(HOLDER) && !room.has_waiters());
}

fn taken() {
    let room = room();
    let theirs = room.clone();
    let thread = loom::thread::spawn(move || theirs.take_free(WAITER, 0).is_some());
    let ours = room.take_free(HOLDER, 0).is_some();
    assert_ne!(ours, thread.join().expect("the other one"));
}
