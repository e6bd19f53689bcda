//! The page of words: a counter's last value under concurrent writers and readers.

use std::sync::Arc;

use crate::backend::TimelineWord;
use crate::shm::counter::{COUNTER_BYTES, SharedCounter, VALUE_MAX, WaitStatus};
use crate::shm::page::SharedPage;
use crate::verify::models::Model;
use crate::verify::page;

pub const ENDED: Model = Model {
    name: "what a counter reached it has reached, ended or not",
    bound: 4,
    body: ended,
};
pub const TWICE: Model = Model {
    name: "a counter that two end has one last value",
    bound: 4,
    body: twice,
};
pub const BROUGHT_UP: Model = Model {
    name: "a copy is brought up and never back",
    bound: 4,
    body: brought_up,
};

fn counter() -> (SharedCounter, Arc<SharedPage>) {
    let page = Arc::new(page(COUNTER_BYTES));
    let counter = SharedCounter::new(&page, 0);
    counter.reset();
    (counter, page)
}

fn raise(page: &SharedPage, value: u64) {
    page.at::<TimelineWord>(0).store(value);
}

fn ended() {
    let (counter, page) = counter();
    raise(&page, 1);
    let reader = counter.clone();
    let thread = loom::thread::spawn(move || {
        assert_eq!(reader.wait_status(1), WaitStatus::Reached);
        assert!(reader.wait_status(2) != WaitStatus::Reached);
        assert_eq!(reader.value(), 1);
        if reader.has_ended() {
            assert_eq!(reader.wait_status(2), WaitStatus::Never);
        }
    });
    // Proven dead by now: nothing raises it any more.
    counter.end();
    thread.join().expect("the reader");
    assert_eq!(
        (counter.wait_status(1), counter.wait_status(2)),
        (WaitStatus::Reached, WaitStatus::Never)
    );
}

/// One of them is the raiser itself, which knows best, and is let go for dead by the other.
fn twice() {
    let (counter, page) = counter();
    raise(&page, 2);
    let theirs = counter.clone();
    let thread = loom::thread::spawn(move || theirs.end());
    counter.end_at(2);
    let first = counter.value();
    thread.join().expect("the survivor");
    assert_eq!((first, counter.value()), (2, 2));
    assert_eq!(
        (counter.wait_status(2), counter.wait_status(VALUE_MAX)),
        (WaitStatus::Reached, WaitStatus::Never)
    );
}

fn brought_up() {
    let (counter, page) = counter();
    let theirs = counter.clone();
    let thread = loom::thread::spawn(move || theirs.bring_up(1));
    // A stream that has come further.
    raise(&page, 2);
    thread.join().expect("the CPU");
    assert_eq!(counter.value(), 2);
}
