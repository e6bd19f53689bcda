//! The watch over a publisher's life: what this process's streams wait for, and that it is let go by the publisher's
//! proven death.
//!
//! It is kept until those streams are past the link, which may be long after the subscriber and its samples are gone.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock, Weak};

use super::Inlet;
use crate::atomic::{AtomicBool, AtomicU8, AtomicU64};
use crate::fork::Home;
use crate::link::entry::Completion;
use crate::link::segment::Segment;
use crate::link::wake::Bell;
use crate::link::watcher::{Next, Watched};
use crate::memory::board::Board;

/// How a link stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::channel) enum Standing {
    Open = 0,
    /// The publisher said goodbye; what it sent will still complete.
    Closed = 1,
    /// The publisher closed this link alone.
    Evicted = 2,
    /// This side closed it, for the fault kept beside.
    Failed = 3,
    /// The socket closed without a goodbye.
    Suspect = 4,
}

impl Standing {
    fn from_bits(bits: u8) -> Standing {
        match bits {
            0 => Standing::Open,
            1 => Standing::Closed,
            2 => Standing::Evicted,
            3 => Standing::Failed,
            _ => Standing::Suspect,
        }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Vigil {
    home: Home,
    segment: Arc<Segment>,
    bell: Arc<Bell>,
    /// Reads what the publisher said last.
    inlet: OnceLock<Weak<Inlet>>,
    standing: AtomicU8,
    /// The publisher's death is [over](crate::link::peer::Sign::Over) and stuck streams have been rescued.
    dead: AtomicBool,
    /// For each entry, the position handed out here that a stream may be waiting for.
    held: Vec<AtomicU64>,
    /// For each entry, the position that the publisher's death left incomplete.
    lost: Vec<AtomicU64>,
    /// The publisher's own words, if it has a history.
    completions: Option<Completions>,
}

/// What a publisher with a history says of the samples that it sent before this link was there.
#[derive(Debug)]
struct Completions {
    board: Board,
    /// For each entry: the position, and the word and the value that it reaches when that position's data is complete.
    of: Vec<[AtomicU64; 3]>,
}

impl Completions {
    /// Whether the data at a position is complete, as far as is known here.
    fn say(&self, index: usize, position: u64) -> bool {
        let [of, word, value] = &self.of[index];
        of.load(SeqCst) == position && self.board.word(word.load(SeqCst) as usize).reached(value.load(SeqCst))
    }
}

impl Vigil {
    pub(super) fn new(segment: &Arc<Segment>, bell: &Arc<Bell>, completions: Option<Board>) -> Vigil {
        let words = || (0..segment.depth()).map(|_| AtomicU64::new(0));
        Vigil {
            home: Home::here(),
            segment: segment.clone(),
            bell: bell.clone(),
            inlet: OnceLock::new(),
            standing: AtomicU8::new(Standing::Open as u8),
            dead: AtomicBool::new(false),
            held: words().collect(),
            lost: words().collect(),
            completions: completions
                .map(|board| Completions { board, of: words().map(|_| Default::default()).collect() }),
        }
    }

    pub(super) fn read_by(&self, inlet: Weak<Inlet>) {
        let _ = self.inlet.set(inlet);
    }

    /// Takes note of the publisher's own word for a sample of the history, before that is [held](Self::hold). Whether
    /// there is such a word.
    pub(super) fn note_completion(&self, index: usize, position: u64, completion: Completion) -> bool {
        let Some(Completions { board, of }) = &self.completions else { return false };
        let is_there = (completion.word as usize) < board.words();
        if is_there {
            let [at, word, value] = &of[index];
            word.store(completion.word.into(), SeqCst);
            value.store(completion.value, SeqCst);
            at.store(position, SeqCst);
        }
        is_there
    }

    #[inline]
    pub(super) fn standing(&self) -> Standing {
        Standing::from_bits(self.standing.load(SeqCst))
    }

    /// Moves away from `Open`, once.
    pub(super) fn stand(&self, standing: Standing) {
        let _ = self.standing.compare_exchange(Standing::Open as u8, standing as u8, SeqCst, SeqCst);
        self.bell.ring();
    }

    /// Takes note of a position that is handed out. Whether the publisher is dead, and no rescue will come.
    #[inline]
    pub(super) fn hold(&self, index: usize, position: u64) -> bool {
        // First in the table, then the look at `dead`: `rescue` sets it first and then reads the table, so one of
        // the two sees the other, and no stream is left waiting.
        self.held[index].store(position, SeqCst);
        self.is_dead()
    }

    #[inline]
    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(SeqCst)
    }

    #[inline]
    pub(super) fn has_lost(&self, index: usize, position: u64) -> bool {
        self.lost[index].load(SeqCst) == position
    }

    /// Lets a position of a dead publisher go, and notes that it is lost, unless its data was complete. Forward alone: the
    /// watcher, and threads that receive, may come to two positions of one entry, if the publisher has used it again before
    /// it was free.
    pub(super) fn let_go(&self, index: usize, position: u64) {
        let entry = self.segment.entry(position);
        if !entry.ready.reached(position) {
            if !self.completions.as_ref().is_some_and(|completions| completions.say(index, position)) {
                self.lost[index].fetch_max(position, SeqCst);
            }
            entry.ready.bring_up(position);
        }
    }

    /// The publisher is proven dead: what was ready by now is whole and counts; a stream that waits for anything
    /// else is let go, and its sample is lost.
    fn rescue(&self) {
        self.dead.store(true, SeqCst);
        for (index, held) in self.held.iter().enumerate() {
            let position = held.load(SeqCst);
            if position != 0 {
                self.let_go(index, position);
            }
        }
    }
}

impl Watched for Vigil {
    /// The publisher is proven dead, or an orphan's parent for so long that nobody waits on.
    fn on_ready(&self, _: u64) -> Next {
        if self.home.is_here() {
            // What the publisher said is heard before its end, in whatever order the two are told of: its goodbye lies in
            // the socket, behind no more than a socket's buffer holds.
            let mut has_heard = true;
            if let Some(inlet) = self.inlet.get().and_then(Weak::upgrade) {
                has_heard = inlet.hear_last_words();
                // Should it be the last holder by now: to drop it calls the driver.
                let watcher = inlet.watcher.clone();
                Arc::into_inner(inlet).into_iter().for_each(|last| watcher.bury(Box::new(last)));
            }
            self.rescue();
            // What is left unread is heard with a later tick, and its end told then: see `Inlet`.
            if has_heard {
                self.stand(Standing::Suspect);
            }
            self.bell.ring();
        }
        Next::Stop
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    const DEPTH: u32 = 2;

    /// A vigil over a link, and the publisher's own words.
    fn vigil() -> (Vigil, Board) {
        let device = Device::host();
        let segment = Arc::new(Segment::create(&device, DEPTH, [7; 16]).unwrap().0);
        let (board, fd) = Board::published(&device, 4).unwrap();
        let copy = Board::read(fd.into(), board.bytes(), "test").unwrap();
        (Vigil::new(&segment, &Arc::new(Bell::new().unwrap()), Some(copy)), board)
    }

    #[test]
    fn a_rescue_believes_the_publishers_own_word_of_a_sample_that_it_could_not_tell_a_late_joiner_of() {
        let (vigil, board) = vigil();
        for position in [1, 2] {
            let index = vigil.segment.index(position) as usize;
            assert!(vigil.note_completion(index, position, Completion { word: position as u32, value: 9 }));
            assert!(!vigil.hold(index, position));
        }
        board.word(1).store(9);
        board.word(2).store(8);
        vigil.rescue();
        for (position, is_lost) in [(1, false), (2, true)] {
            assert_eq!(vigil.has_lost(vigil.segment.index(position) as usize, position), is_lost);
            assert!(vigil.segment.entry(position).ready.reached(position));
        }
        assert!(!vigil.note_completion(0, 2, Completion { word: u32::MAX, value: 1 }));
    }

    #[test]
    fn a_rescue_takes_no_word_back_of_a_publisher_that_has_used_an_entry_again_before_it_was_free() {
        let (vigil, _) = vigil();
        let (first, second) = (2, 2 + u64::from(DEPTH));
        let index = vigil.segment.index(first) as usize;
        assert!(!vigil.hold(index, first));
        vigil.rescue();
        assert!(vigil.hold(index, second));
        vigil.let_go(index, second);
        // The publisher's device writes on, and somebody else comes to the first once more.
        vigil.segment.entry(first).ready.store(0);
        vigil.let_go(index, first);
        assert!(vigil.has_lost(index, second), "what was noted of the second stays");
    }
}
