//! The timeline word: parked threads go on, and the word never goes back.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::TimelineWord;
use crate::verify::models::Model;
use crate::verify::touch;

pub const PARKED: Model = Model {
    name: "a thread that parks on a word goes on when it is reached",
    bound: 4,
    body: parked,
};
pub const ADVANCED: Model = Model {
    name: "a parked thread goes on when a survivor stores what is owed",
    bound: 3,
    body: advanced,
};
pub const TAKEN_BACK: Model = Model {
    name: "of several that store what is owed none takes the word back",
    bound: 3,
    body: taken_back,
};

fn word() -> Arc<TimelineWord> {
    let word = TimelineWord::default();
    touch(&word);
    Arc::new(word)
}

fn await_value(word: &TimelineWord, value: u64) {
    while !word.reached(value) {
        word.park(value, Duration::MAX);
    }
}

fn parked() {
    let word = word();
    let theirs = word.clone();
    let thread = loom::thread::spawn(move || await_value(&theirs, 2));
    word.store(1);
    word.store(2);
    thread.join().expect("the sleeper");
}

fn advanced() {
    let word = word();
    let (parker, survivor) = (word.clone(), word.clone());
    let parker = loom::thread::spawn(move || await_value(&parker, 1));
    let survivor = loom::thread::spawn(move || survivor.advance(0, 1));
    word.advance(0, 1);
    parker.join().expect("the sleeper");
    survivor.join().expect("the other one");
    assert_eq!(word.load(), 1);
}

fn taken_back() {
    let word = word();
    let (one, other) = (word.clone(), word.clone());
    let one = loom::thread::spawn(move || one.advance(0, 1));
    let other = loom::thread::spawn(move || {
        other.advance(0, 1);
        other.advance(1, 2);
    });
    let mut last = 0;
    for _ in 0..3 {
        let now = word.load();
        assert!(now >= last, "from {last} to {now}");
        last = now;
    }
    one.join().expect("one");
    other.join().expect("the other one");
    assert_eq!(word.load(), 2);
}
