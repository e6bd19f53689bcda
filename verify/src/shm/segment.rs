//! Stand-in for the link segment: the same words on the heap.

use crate::atomic::{AtomicU32, AtomicU64};
use crate::backend::TimelineWord;

pub(crate) const META_BYTES_MAX: usize = 256;

/// The words of an entry that are made before threads are: those of a description of a row of
/// bytes.
const WORDS_USED: usize = 6;

#[derive(Debug, Default)]
pub(crate) struct Header {
    pub(crate) receiver: ReceiverWords,
}

#[derive(Debug, Default)]
pub(crate) struct ReceiverWords {
    pub(crate) asleep: AtomicU32,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) state_word: AtomicU64,
    pub(crate) sequence: AtomicU64,
    pub(crate) ready: TimelineWord,
    pub(crate) words: [AtomicU64; 58],
    pub(crate) given_up: AtomicU64,
    pub(crate) aborted: AtomicU64,
    pub(crate) released: TimelineWord,
    pub(crate) set_aside: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Segment {
    header: Header,
    entries: Vec<Entry>,
}

/// Makes both words of a timeline.
pub(crate) fn touch(word: &TimelineWord) {
    word.store(0);
}

impl Segment {
    pub(crate) fn new(depth: u32) -> Segment {
        let entry = |_| Entry {
            state_word: AtomicU64::default(),
            sequence: AtomicU64::default(),
            ready: TimelineWord::default(),
            words: std::array::from_fn(|_| AtomicU64::default()),
            given_up: AtomicU64::default(),
            aborted: AtomicU64::default(),
            released: TimelineWord::default(),
            set_aside: AtomicU64::default(),
        };
        Segment {
            header: Header::default(),
            entries: (0..depth).map(entry).collect(),
        }
    }

    /// Makes the words that two threads of a model use.
    pub(crate) fn touched(self) -> Segment {
        self.header.receiver.asleep.touch();
        for entry in &self.entries {
            entry.state_word.touch();
            entry.sequence.touch();
            entry.given_up.touch();
            entry.aborted.touch();
            entry.set_aside.touch();
            touch(&entry.ready);
            touch(&entry.released);
            entry.words[..WORDS_USED].iter().for_each(AtomicU64::touch);
        }
        self
    }

    pub(crate) fn depth(&self) -> u32 {
        self.entries.len() as u32
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    pub(crate) fn index(&self, position: u64) -> u32 {
        (position % self.entries.len() as u64) as u32
    }

    pub(crate) fn entry(&self, position: u64) -> &Entry {
        &self.entries[self.index(position) as usize]
    }
}
