//! The page of words: a lane's last value, whoever writes it down and whoever asks.

use std::sync::Arc;

use crate::backend::TimelineWord;
use crate::memory::lane::{LANE_BYTES, Lane, VALUE_MAX, Verdict};
use crate::memory::page::Page;
use crate::models::Model;

pub const ENDED: Model = Model { name: "what a lane reached it has reached, ended or not", bound: 4, body: ended };
pub const TWICE: Model = Model { name: "a lane that two end has one last value", bound: 4, body: twice };
pub const BROUGHT_UP: Model = Model { name: "a copy is brought up and never back", bound: 4, body: brought_up };

fn lane() -> (Lane, Arc<Page>) {
    let page = Arc::new(Page::new(LANE_BYTES));
    let lane = Lane::new(&page, 0);
    lane.reset();
    (lane, page)
}

fn raise(page: &Page, value: u64) {
    page.at::<TimelineWord>(0).store(value);
}

fn ended() {
    let (lane, page) = lane();
    raise(&page, 1);
    let reader = lane.clone();
    let thread = loom::thread::spawn(move || {
        assert_eq!(reader.verdict(1), Verdict::Reached);
        assert!(reader.verdict(2) != Verdict::Reached);
        assert_eq!(reader.value(), 1);
        if reader.has_ended() {
            assert_eq!(reader.verdict(2), Verdict::Never);
        }
    });
    // Proven dead by now: nothing raises it any more.
    lane.end();
    thread.join().expect("the reader");
    assert_eq!((lane.verdict(1), lane.verdict(2)), (Verdict::Reached, Verdict::Never));
}

/// One of them is the raiser itself, which knows best, and is let go for dead by the other.
fn twice() {
    let (lane, page) = lane();
    raise(&page, 2);
    let theirs = lane.clone();
    let thread = loom::thread::spawn(move || theirs.end());
    lane.end_at(2);
    let first = lane.value();
    thread.join().expect("the survivor");
    assert_eq!((first, lane.value()), (2, 2));
    assert_eq!((lane.verdict(2), lane.verdict(VALUE_MAX)), (Verdict::Reached, Verdict::Never));
}

fn brought_up() {
    let (lane, page) = lane();
    let theirs = lane.clone();
    let thread = loom::thread::spawn(move || theirs.bring_up(1));
    // A stream that has come further.
    raise(&page, 2);
    thread.join().expect("the CPU");
    assert_eq!(lane.value(), 2);
}
