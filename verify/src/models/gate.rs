//! The gate that the end of a process closes: the thread that closes it waits for those inside, and
//! those that come later do nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::entrances::{Entrance, Entrances};
use crate::atomic::{AtomicBool, AtomicU32, AtomicU64};
use crate::verify::models::Model;

/// A thread with an entrance of its own, and one at a shared entrance.
pub const APART: Model = Model {
    name: "the end of a process waits for the threads inside the gate",
    bound: 3,
    body: || end([0, 1]),
};
/// Two threads at one entrance.
pub const SHARED: Model = Model {
    name: "the end of a process waits for all threads of one entrance",
    bound: 3,
    body: || end([1, 2]),
};

/// The value of a thread's word before its call of the driver, behind it, and once the driver is
/// torn down.
const BEFORE: u64 = 0;
const CALLED: u64 = 1;
const TORN_DOWN: u64 = 2;

struct Process {
    gate: Entrances<1, 1>,
    /// A word of the driver for each thread: a call writes it, and so does the teardown.
    driver: [AtomicU64; 2],
}

/// An open gate, with all words made before threads are.
fn gate() -> Entrances<1, 1> {
    let entrance = || Entrance {
        inside: AtomicU32::default(),
    };
    let gate = Entrances {
        is_closed: AtomicBool::default(),
        own: [entrance()],
        shared: [entrance()],
    };
    gate.is_closed.touch();
    gate.own[0].inside.touch();
    gate.shared[0].inside.touch();
    gate
}

/// Two threads call the driver inside the gate while a third one ends the process.
fn end(numbers: [usize; 2]) {
    let process = Arc::new(Process {
        gate: gate(),
        driver: Default::default(),
    });
    process.driver.iter().for_each(AtomicU64::touch);
    let threads = [0, 1].map(|thread| {
        let (process, number) = (process.clone(), numbers[thread]);
        loom::thread::spawn(move || {
            let word = &process.driver[thread];
            let is_in = process.gate.enter(number);
            if is_in {
                assert_eq!(word.load(Relaxed), BEFORE, "the driver is there");
                word.store(CALLED, Relaxed);
            }
            process.gate.leave(number);
            is_in
        })
    });
    assert!(process.gate.close());
    // With one look only: how long is waited makes no difference to what a look proves.
    let is_empty = process.gate.inside() == 0;
    let found = [0, 1].map(|thread| {
        let word = &process.driver[thread];
        is_empty.then(|| {
            let found = word.load(Relaxed);
            word.store(TORN_DOWN, Relaxed);
            found
        })
    });
    for (thread, found) in threads.into_iter().zip(found) {
        let was_in = thread.join().expect("a caller of the driver");
        if let Some(found) = found {
            let expected = if was_in { CALLED } else { BEFORE };
            assert_eq!(found, expected, "its call was over, or never began");
        }
    }
    assert_eq!(process.gate.inside(), 0, "all have left");
    assert!(!process.gate.close(), "it is closed once");
}
