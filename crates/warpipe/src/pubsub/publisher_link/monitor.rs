//! What a receiver knows of the life of its link's sender: the positions that this process's
//! streams wait for, and the streams' release at the sender's proven death. A table without a call
//! of the driver or the system.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock};

use crate::atomic::{AtomicBool, AtomicU64};
use crate::pubsub::entry::{Completion, Violation, violation};
use crate::shm::page::SharedPage;
use crate::shm::segment::Segment;

/// See the [module](self).
#[derive(Debug)]
pub(in crate::pubsub) struct PublisherMonitor {
    segment: Arc<Segment>,
    /// The publisher is proven dead, or [orphaned](crate::ipc::peer::DeathEvidence::Orphaned), and
    /// stuck streams are rescued.
    dead: AtomicBool,
    /// For each entry, the position handed out here that a stream may be waiting for.
    held: Vec<AtomicU64>,
    /// For each entry, the position that the publisher's death left incomplete.
    lost: Vec<AtomicU64>,
    /// The publisher's fence words, if it has a history.
    completions: OnceLock<Completions>,
}

/// The fence words of a publisher with a history, for the samples that it sent before this link
/// existed.
#[derive(Debug)]
struct Completions {
    fence_words: SharedPage,
    /// For each entry: the position, and the word and the value that it reaches when that
    /// position's data is complete.
    entries: Vec<[AtomicU64; 3]>,
}

impl PublisherMonitor {
    pub(super) fn new(segment: &Arc<Segment>) -> PublisherMonitor {
        let words = || (0..segment.depth()).map(|_| AtomicU64::new(0));
        PublisherMonitor {
            segment: segment.clone(),
            dead: AtomicBool::new(false),
            held: words().collect(),
            lost: words().collect(),
            completions: OnceLock::new(),
        }
    }

    /// Takes the publisher's fence words, before any of its samples.
    pub(super) fn set_completions(&self, fence_words: SharedPage) {
        let entries = self.held.iter().map(|_| Default::default()).collect();
        let _ = self.completions.set(Completions {
            fence_words,
            entries,
        });
    }

    pub(super) fn has_completions(&self) -> bool {
        self.completions.get().is_some()
    }

    #[inline]
    fn index(&self, position: u64) -> usize {
        self.segment.index(position) as usize
    }

    /// Records the fence word for a sample of the history, before the sample is
    /// [held](Self::hold).
    pub(in crate::pubsub) fn note_completion(
        &self,
        position: u64,
        completion: Completion,
    ) -> Result<(), Violation> {
        let index = completion.word as usize;
        let Some(Completions { entries, .. }) = self
            .completions
            .get()
            .filter(|completions| index < completions.fence_words.words())
        else {
            let allowed = "one that the publisher has sent";
            return Err(violation("completion", format!("word {index}"), allowed));
        };
        let [at, word, value] = &entries[self.index(position)];
        word.store(completion.word.into(), SeqCst);
        value.store(completion.value, SeqCst);
        at.store(position, SeqCst);
        Ok(())
    }

    /// Whether a fence word of the publisher's says that the data at a position is complete.
    fn is_complete(&self, position: u64) -> bool {
        self.completions.get().is_some_and(|completions| {
            let [at, word, value] = &completions.entries[self.index(position)];
            let word = || completions.fence_words.word(word.load(SeqCst) as usize);
            at.load(SeqCst) == position && word().reached(value.load(SeqCst))
        })
    }

    /// Records a position that is handed out. Returns whether the publisher is dead, so that no
    /// rescue will follow.
    #[inline]
    pub(super) fn hold(&self, position: u64) -> bool {
        // The table is written before `dead` is read; `rescue` sets `dead` first and then reads the
        // table. So one of the two sees the other, and no stream is left waiting.
        self.held[self.index(position)].store(position, SeqCst);
        self.is_dead()
    }

    #[inline]
    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(SeqCst)
    }

    #[inline]
    pub(super) fn has_lost(&self, position: u64) -> bool {
        self.lost[self.index(position)].load(SeqCst) == position
    }

    /// Releases the streams that wait for a position of a dead or orphaned publisher, and marks the
    /// position lost unless its data was complete. The mark and the word move forward only: the
    /// reactor, and threads that receive, may handle two positions of one entry if the publisher
    /// has used it again before it was free.
    pub(super) fn release_wait(&self, position: u64) {
        let entry = self.segment.entry(position);
        if !entry.ready.reached(position) {
            if !self.is_complete(position) {
                self.lost[self.index(position)].fetch_max(position, SeqCst);
            }
            entry.ready.bring_up(position);
        }
    }

    /// The publisher is proven dead, or orphaned: samples that are ready by now are whole and
    /// count. A stream that waits for any other sample is released, and that sample is lost.
    pub(super) fn rescue(&self) {
        self.dead.store(true, SeqCst);
        let held = self.held.iter().map(|held| held.load(SeqCst));
        held.filter(|&position| position != 0)
            .for_each(|position| self.release_wait(position));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::shm::page::PAGE_BYTES;

    const DEPTH: u32 = 2;

    /// A monitor of a link, and the publisher's fence words.
    fn monitor() -> (PublisherMonitor, SharedPage) {
        let device = Device::host();
        let segment = Arc::new(Segment::create(&device, DEPTH, [7; 16]).unwrap().0);
        let (fence_words, fd) = SharedPage::publish(Some(&device), PAGE_BYTES).unwrap();
        let copy = SharedPage::read(fd.into(), PAGE_BYTES, "test").unwrap();
        let monitor = PublisherMonitor::new(&segment);
        monitor.set_completions(copy);
        (monitor, fence_words)
    }

    #[test]
    fn a_rescue_believes_the_publishers_own_word_of_a_sample_that_it_could_not_tell_a_late_joiner_of()
     {
        let (monitor, fence_words) = monitor();
        for position in [1, 2] {
            let word = position as u32;
            let noted = monitor.note_completion(position, Completion { word, value: 9 });
            assert!(noted.is_ok());
            assert!(!monitor.hold(position));
        }
        fence_words.word(1).store(9);
        fence_words.word(2).store(8);
        monitor.rescue();
        for (position, is_lost) in [(1, false), (2, true)] {
            assert_eq!(monitor.has_lost(position), is_lost);
            assert!(monitor.segment.entry(position).ready.reached(position));
        }
        let unknown = Completion {
            word: u32::MAX,
            value: 1,
        };
        assert!(monitor.note_completion(2, unknown).is_err());
    }

    #[test]
    fn a_rescue_takes_no_word_back_of_a_publisher_that_has_used_an_entry_again_before_it_was_free()
    {
        let (monitor, _) = monitor();
        let (first, second) = (2, 2 + u64::from(DEPTH));
        assert!(!monitor.hold(first));
        monitor.rescue();
        assert!(monitor.hold(second));
        monitor.release_wait(second);
        // The publisher's device writes on, and another thread handles the first position again.
        monitor.segment.entry(first).ready.store(0);
        monitor.release_wait(first);
        assert!(
            monitor.has_lost(second),
            "what was noted of the second stays"
        );
    }
}
