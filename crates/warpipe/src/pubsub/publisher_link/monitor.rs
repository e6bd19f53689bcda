//! Watches a publisher's life: keeps the positions that this process's streams wait for, and
//! releases the streams on the publisher's proven death.
//!
//! The monitor is kept until those streams are past the link, which may be long after the
//! subscriber and its samples are gone.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock, Weak};

use super::PublisherLink;
use crate::atomic::{AtomicBool, AtomicU8, AtomicU64};
use crate::pubsub::entry::Completion;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::reactor::{EventSource, Next};
use crate::shm::fence_words::FenceWords;
use crate::shm::segment::Segment;

/// The state of the sender of a link's ring, as this end sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::pubsub) enum SenderState {
    Open = 0,
    /// The publisher closed gracefully. Samples that it sent will still complete.
    Closed = 1,
    /// The publisher closed this link alone.
    Evicted = 2,
    /// This side closed it, because of the fault stored beside.
    Failed = 3,
    /// The socket closed without a `Close` message.
    Suspect = 4,
}

impl SenderState {
    fn from_bits(bits: u8) -> SenderState {
        match bits {
            0 => SenderState::Open,
            1 => SenderState::Closed,
            2 => SenderState::Evicted,
            3 => SenderState::Failed,
            _ => SenderState::Suspect,
        }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct PublisherMonitor {
    segment: Arc<Segment>,
    doorbell: Arc<LocalDoorbell>,
    /// Reads the publisher's last messages.
    link: OnceLock<Weak<PublisherLink>>,
    link_state: AtomicU8,
    /// The publisher is proven dead, or [orphaned](crate::ipc::peer::DeathEvidence::Orphaned), and
    /// stuck streams are rescued.
    dead: AtomicBool,
    /// For each entry, the position handed out here that a stream may be waiting for.
    held: Vec<AtomicU64>,
    /// For each entry, the position that the publisher's death left incomplete.
    lost: Vec<AtomicU64>,
    /// The publisher's own words, if it has a history.
    completions: Option<Completions>,
}

/// The fence words of a publisher with a history, for the samples that it sent before this link
/// existed.
#[derive(Debug)]
struct Completions {
    fence_words: FenceWords,
    /// For each entry: the position, and the word and the value that it reaches when that
    /// position's data is complete.
    entries: Vec<[AtomicU64; 3]>,
}

impl Completions {
    /// Whether the data at a position is complete, as far as this process knows.
    fn is_complete(&self, index: usize, position: u64) -> bool {
        let [at, word, value] = &self.entries[index];
        at.load(SeqCst) == position
            && self
                .fence_words
                .word(word.load(SeqCst) as usize)
                .reached(value.load(SeqCst))
    }
}

impl PublisherMonitor {
    pub(super) fn new(
        segment: &Arc<Segment>,
        doorbell: &Arc<LocalDoorbell>,
        completions: Option<FenceWords>,
    ) -> PublisherMonitor {
        let words = || (0..segment.depth()).map(|_| AtomicU64::new(0));
        PublisherMonitor {
            segment: segment.clone(),
            doorbell: doorbell.clone(),
            link: OnceLock::new(),
            link_state: AtomicU8::new(SenderState::Open as u8),
            dead: AtomicBool::new(false),
            held: words().collect(),
            lost: words().collect(),
            completions: completions.map(|fence_words| Completions {
                fence_words,
                entries: words().map(|_| Default::default()).collect(),
            }),
        }
    }

    pub(super) fn set_link(&self, link: Weak<PublisherLink>) {
        let _ = self.link.set(link);
    }

    /// Records the publisher's own word for a sample of the history, before the sample is
    /// [held](Self::hold). Returns whether there is such a word.
    pub(super) fn note_completion(
        &self,
        index: usize,
        position: u64,
        completion: Completion,
    ) -> bool {
        let Some(Completions {
            fence_words,
            entries,
        }) = &self.completions
        else {
            return false;
        };
        let is_there = (completion.word as usize) < fence_words.words();
        if is_there {
            let [at, word, value] = &entries[index];
            word.store(completion.word.into(), SeqCst);
            value.store(completion.value, SeqCst);
            at.store(position, SeqCst);
        }
        is_there
    }

    #[inline]
    pub(super) fn link_state(&self) -> SenderState {
        SenderState::from_bits(self.link_state.load(SeqCst))
    }

    /// Moves away from `Open`, once.
    pub(super) fn set_link_state(&self, link_state: SenderState) {
        let _ = self.link_state.compare_exchange(
            SenderState::Open as u8,
            link_state as u8,
            SeqCst,
            SeqCst,
        );
        self.doorbell.ring();
    }

    /// Records a position that is handed out. Returns whether the publisher is dead, so that no
    /// rescue will follow.
    #[inline]
    pub(super) fn hold(&self, index: usize, position: u64) -> bool {
        // The table is written before `dead` is read; `rescue` sets `dead` first and then reads the
        // table. So one of the two sees the other, and no stream is left waiting.
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

    /// Releases the streams that wait for a position of a dead publisher, and marks the position
    /// lost unless its data was complete. The mark and the word move forward only: the reactor, and
    /// threads that receive, may handle two positions of one entry if the publisher has used it
    /// again before it was free.
    pub(super) fn release_wait(&self, index: usize, position: u64) {
        let entry = self.segment.entry(position);
        if !entry.ready.reached(position) {
            if !self
                .completions
                .as_ref()
                .is_some_and(|completions| completions.is_complete(index, position))
            {
                self.lost[index].fetch_max(position, SeqCst);
            }
            entry.ready.bring_up(position);
        }
    }

    /// The publisher is proven dead: samples that are ready by now are whole and count. A stream
    /// that waits for any other sample is released, and that sample is lost.
    fn rescue(&self) {
        self.dead.store(true, SeqCst);
        for (index, held) in self.held.iter().enumerate() {
            let position = held.load(SeqCst);
            if position != 0 {
                self.release_wait(index, position);
            }
        }
    }
}

impl EventSource for PublisherMonitor {
    /// The publisher is proven dead, or it is an orphan's parent and the orphan timeout has passed.
    fn on_ready(&self, _: u64) -> Next {
        // The publisher's messages are read before its end is reported, in whatever order the
        // two events arrive: its `Close` lies in the socket, behind at most a socket buffer of
        // messages.
        if let Some(link) = self.link.get().and_then(Weak::upgrade) {
            link.on_death();
            // This may be the last holder of the link, and dropping the link calls the driver.
            let reactor = link.reactor.clone();
            Arc::into_inner(link)
                .into_iter()
                .for_each(|last| reactor.defer_drop(Box::new(last)));
        }
        self.rescue();
        self.set_link_state(SenderState::Suspect);
        self.doorbell.ring();
        Next::Stop
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    const DEPTH: u32 = 2;

    /// A monitor of a link, and the publisher's fence words.
    fn monitor() -> (PublisherMonitor, FenceWords) {
        let device = Device::host();
        let segment = Arc::new(Segment::create(&device, DEPTH, [7; 16]).unwrap().0);
        let (fence_words, fd) = FenceWords::published(&device, 4).unwrap();
        let copy = FenceWords::read(fd.into(), fence_words.bytes(), "test").unwrap();
        (
            PublisherMonitor::new(
                &segment,
                &Arc::new(LocalDoorbell::new().unwrap()),
                Some(copy),
            ),
            fence_words,
        )
    }

    #[test]
    fn a_rescue_believes_the_publishers_own_word_of_a_sample_that_it_could_not_tell_a_late_joiner_of()
     {
        let (monitor, fence_words) = monitor();
        for position in [1, 2] {
            let index = monitor.segment.index(position) as usize;
            assert!(monitor.note_completion(
                index,
                position,
                Completion {
                    word: position as u32,
                    value: 9
                }
            ));
            assert!(!monitor.hold(index, position));
        }
        fence_words.word(1).store(9);
        fence_words.word(2).store(8);
        monitor.rescue();
        for (position, is_lost) in [(1, false), (2, true)] {
            assert_eq!(
                monitor.has_lost(monitor.segment.index(position) as usize, position),
                is_lost
            );
            assert!(monitor.segment.entry(position).ready.reached(position));
        }
        assert!(!monitor.note_completion(
            0,
            2,
            Completion {
                word: u32::MAX,
                value: 1
            }
        ));
    }

    #[test]
    fn a_rescue_takes_no_word_back_of_a_publisher_that_has_used_an_entry_again_before_it_was_free()
    {
        let (monitor, _) = monitor();
        let (first, second) = (2, 2 + u64::from(DEPTH));
        let index = monitor.segment.index(first) as usize;
        assert!(!monitor.hold(index, first));
        monitor.rescue();
        assert!(monitor.hold(index, second));
        monitor.release_wait(index, second);
        // The publisher's device writes on, and another thread handles the first position again.
        monitor.segment.entry(first).ready.store(0);
        monitor.release_wait(index, first);
        assert!(
            monitor.has_lost(index, second),
            "what was noted of the second stays"
        );
    }
}
