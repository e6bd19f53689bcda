//! A thread that writes garbage into a link segment as fast as it can. **This module is marked for
//! unsafe.**

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;

use rustix::mm::{MapFlags, ProtFlags};
use warpipe_testkit::Rng;

use super::stage::random_edge;

/// The header's words, and those of one entry.
pub(super) const HEADER_WORDS: usize = 512;
const ENTRY_WORDS: usize = 80;

/// A second mapping of a segment, as a peer has it: all words are writable.
#[derive(Debug, Clone)]
pub(super) struct Words {
    words: &'static [AtomicU64],
}

impl Words {
    /// Maps the whole segment, and never unmaps it: tests are short.
    pub(super) fn map(fd: impl AsFd) -> Words {
        let bytes = rustix::fs::fstat(&fd).unwrap().st_size as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh shared mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED,
                fd,
                0,
            )
        }
        .unwrap();
        // SAFETY: the mapping is `bytes` long, page-aligned and never unmapped; atomics allow any
        // concurrent access.
        let words = unsafe { std::slice::from_raw_parts(base.cast::<AtomicU64>(), bytes / 8) };
        Words { words }
    }

    fn entries(&self) -> usize {
        (self.words.len() - HEADER_WORDS) / ENTRY_WORDS
    }

    fn in_entry(&self, entry: usize, word: usize) -> &AtomicU64 {
        &self.words[HEADER_WORDS + entry * ENTRY_WORDS + word]
    }

    /// Whether the entry of this position has been published.
    pub(super) fn is_published(&self, position: u64) -> bool {
        self.in_entry(position as usize, 0).load(Relaxed) == position << 2
    }

    /// Writes one word of garbage, more often into words that matter.
    pub(super) fn scribble(&self, random: &mut Rng) {
        let entry = random.usize(..self.entries());
        match random.u64(..8) {
            0 => self.words[random.usize(..self.words.len())].store(random_edge(random), Relaxed),
            // A possible state word: a position that falls on the entry, in any state.
            1 | 2 => {
                let position = entry as u64 + random.u64(..8) * self.entries() as u64;
                self.in_entry(entry, 0)
                    .store(position << 2 | random.u64(..4), Relaxed);
            }
            3 => self.in_entry(entry, 1).store(random.u64(..16), Relaxed),
            4 => self
                .in_entry(entry, [2, 64][random.usize(..2)])
                .store(random_edge(random), Relaxed),
            5 => self.words[random.usize(..HEADER_WORDS)].store(random_edge(random), Relaxed),
            _ => self
                .in_entry(entry, 4 + random.usize(..30))
                .store(random_edge(random), Relaxed),
        }
    }

    /// Marks everything as ready and released, and never aborted, so that all waits end.
    pub(super) fn let_all_go(&self) {
        for entry in 0..self.entries() {
            self.in_entry(entry, 2).store(u64::MAX >> 1, Relaxed);
            self.in_entry(entry, 64).store(u64::MAX >> 1, Relaxed);
        }
    }

    /// Marks `position` as released on every entry, and leaves the rest as it is.
    pub(super) fn release_all(&self, position: u64) {
        (0..self.entries()).for_each(|entry| self.in_entry(entry, 64).store(position, Relaxed));
    }

    /// Marks one position alone as ready and released, as if its sender and its receiver had done
    /// so.
    pub(super) fn forge_end_of(&self, position: u64, depth: u64) {
        for word in [2, 64] {
            self.in_entry((position % depth) as usize, word)
                .store(position, Relaxed);
        }
    }

    /// Scribbles on a thread until the result is dropped, with a pause of `spins` after each word:
    /// without pauses hardly any sample stays valid long enough to be taken.
    pub(super) fn scribble_on(&self, seed: u64, spins: u32) -> Scribbling {
        let (words, stop) = (self.clone(), Arc::new(AtomicBool::new(false)));
        let (stopped, written) = (stop.clone(), Arc::new(AtomicU64::new(0)));
        let count = written.clone();
        let thread = std::thread::spawn(move || {
            let mut random = Rng::with_seed(seed);
            while !stopped.load(Relaxed) {
                words.scribble(&mut random);
                count.fetch_add(1, Relaxed);
                (0..spins).for_each(|_| std::hint::spin_loop());
            }
        });
        Scribbling {
            stop,
            written,
            thread: Some(thread),
        }
    }
}

/// A scribbling thread; dropping it ends it.
pub(super) struct Scribbling {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Scribbling {
    /// Words written so far: on a busy machine the thread may not have run yet.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Relaxed)
    }
}

impl Drop for Scribbling {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

#[test]
fn the_words_are_where_the_segment_has_them() {
    let (segment, fd) =
        crate::shm::segment::Segment::create(&crate::Device::host(), 4, [1; 16]).unwrap();
    let words = Words::map(&fd);
    assert_eq!(
        words.entries(),
        4 + (8192 - 4096 - 4 * 640) / 640,
        "what is left of the last page counts, too"
    );
    segment.entry(3).state_word.store(77, Relaxed);
    segment.entry(3).ready.store(78);
    segment.entry(3).released.store(79);
    assert_eq!(
        [0, 2, 64].map(|word| words.in_entry(3, word).load(Relaxed)),
        [77, 78, 79]
    );
}
