//! The count of the threads inside the gate, and the word that closes it.
//!
//! A thread counts itself at an entrance, which has a cache line of its own: threads that call the
//! driver at the same time write different lines, and the thread that closes the gate reads them
//! all. The first threads of a process have an entrance each, for good. Later threads share the
//! others, so that no thread has to give its entrance back when it ends.

use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};

use crate::atomic::{AtomicBool, AtomicU32};

/// `OWN` threads have an entrance each, and the others share `SHARED` ones. Threads are known by
/// their numbers, from 0.
#[derive(Debug)]
pub(super) struct Entrances<const OWN: usize, const SHARED: usize> {
    pub(super) is_closed: AtomicBool,
    pub(super) own: [Entrance; OWN],
    pub(super) shared: [Entrance; SHARED],
}

/// Two cache lines: CPUs fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Entrance {
    /// The threads that have come in here and not left.
    pub(super) inside: AtomicU32,
}

impl<const OWN: usize, const SHARED: usize> Entrances<OWN, SHARED> {
    /// Counts a thread. False if the gate is closed: then the thread has to leave, unless it may be
    /// inside all the same.
    #[inline]
    pub(super) fn enter(&self, thread: usize) -> bool {
        let entrance = self.own.get(thread).unwrap_or_else(|| self.shared(thread));
        // Pairs with `close` and `inside`: in the one order of these four, either this thread sees
        // that the gate is closed, or the closing thread sees this one.
        entrance.inside.fetch_add(1, SeqCst);
        !self.is_closed.load(SeqCst)
    }

    /// Uncounts a thread.
    #[inline]
    pub(super) fn leave(&self, thread: usize) {
        match self.own.get(thread) {
            // Two steps: no other thread changes the count, and a signal handler that comes between
            // them leaves as often as it enters.
            Some(own) => own.inside.store(own.inside.load(Relaxed) - 1, Release),
            None => {
                self.shared(thread).inside.fetch_sub(1, Release);
            }
        }
    }

    /// As this thread happens to see it now.
    #[inline]
    pub(super) fn seems_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
    }

    /// Closes the gate. False if it was closed already.
    pub(super) fn close(&self) -> bool {
        !self.is_closed.swap(true, SeqCst)
    }

    /// The threads inside a closed gate, and those that are just leaving it. A thread that has come
    /// in is counted at one entrance until it leaves, so 0 says that all have left, although the
    /// entrances are read one after the other; their work happened before this call then.
    pub(super) fn inside(&self) -> u64 {
        let inside = |entrance: &Entrance| u64::from(entrance.inside.load(SeqCst));
        self.own.iter().chain(&self.shared).map(inside).sum()
    }

    #[inline]
    fn shared(&self, thread: usize) -> &Entrance {
        &self.shared[thread % SHARED]
    }
}
