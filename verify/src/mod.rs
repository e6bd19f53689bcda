//! The lock-free parts of the library and its bookkeeping, and the C interface's table of objects,
//! under model checkers.
//!
//! This is a module of the library. The package `verify/` compiles the library as it is, with
//! `cfg(loom)`, and that changes two things: the library's module `atomic` is `atomic.rs` here, and
//! the clock of leases stands still.
//!
//! * `atomic.rs`: the words, of one of three kinds; [`plant`]: faults planted in the library's
//!   source;
//! * [`models`]: two or three threads under loom, which models weak memory;
//! * [`steps`] and [`states`]: every order of steps of several processes, any of them killed at any
//!   step;
//! * [`histories`]: long random rows of acts, with memory in which late writes are seen.

pub mod plant;
pub mod steps;

mod handle;
pub mod histories;
#[cfg(not(miri))]
pub mod models;
pub mod states;

use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use crate::atomic::AtomicU64;
use crate::backend::TimelineWord;
use crate::device::Device;
use crate::ipc::peer::Process;
use crate::shm::page::{AtomicsOnly, SharedPage};
use crate::shm::segment::Segment;

// SAFETY: an atomic.
unsafe impl AtomicsOnly for std::sync::atomic::AtomicU64 {}
// SAFETY: an atomic.
unsafe impl AtomicsOnly for std::sync::atomic::AtomicU32 {}

/// The words of an entry that are made before threads are: those of a description of a row of
/// bytes.
const WORDS_USED: usize = 6;

/// A process that lives as long as this one.
pub(crate) fn process() -> Arc<Process> {
    static PROCESS: LazyLock<(Arc<Process>, OwnedFd)> = LazyLock::new(|| {
        let (end, lifeline) = rustix::pipe::pipe().expect("a pipe");
        (Process::of_pipe(end), lifeline)
    });
    PROCESS.0.clone()
}

/// A page of zeros.
pub(crate) fn page(bytes: usize) -> SharedPage {
    let (page, _) = SharedPage::create(None, bytes).expect("a page");
    page
}

/// The ring of a link, with the words that two threads of a model use made.
pub(crate) fn segment(depth: u32) -> Arc<Segment> {
    let (segment, _) = Segment::create(&Device::host(), depth, [0; 16]).expect("a segment");
    segment.header().receiver.asleep.touch();
    for position in 1..=depth.into() {
        let entry = segment.entry(position);
        entry.state_word.touch();
        entry.sequence.touch();
        entry.given_up.touch();
        entry.aborted.touch();
        entry.set_aside.touch();
        touch(&entry.ready);
        touch(&entry.released);
        let used = &entry.words[..WORDS_USED];
        used.iter().for_each(AtomicU64::touch);
    }
    Arc::new(segment)
}

/// The moment that the library's clock reads: a model alone makes time pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant;

impl Instant {
    pub(crate) fn now() -> Instant {
        Instant
    }

    pub(crate) fn saturating_duration_since(self, _: Instant) -> Duration {
        Duration::ZERO
    }
}

/// Makes both words of a timeline.
pub(crate) fn touch(word: &TimelineWord) {
    word.store(0);
}
