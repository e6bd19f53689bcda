//! The memory of this process for parts that have arrived and do not lie in their slots yet: each
//! lane has a share of it, its window.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The fewest parts of a window: with one, the sender would wait for each credit.
const WINDOW_MIN: u64 = 2;

/// What the lanes to this end have together.
#[derive(Debug)]
pub(crate) struct ReceiveMemory {
    /// The largest window, in parts.
    window: u64,
    part_bytes: u64,
    /// Bytes that no lane has.
    left: AtomicU64,
}

/// The window of one lane.
#[derive(Debug)]
pub(crate) struct Window {
    memory: Arc<ReceiveMemory>,
    /// In parts.
    pub(super) parts: u64,
    /// Bytes that go back with it: fewer than its parts have when nothing was left for it.
    bytes: u64,
}

impl ReceiveMemory {
    pub(crate) fn new(window: u64, part_bytes: u64, bytes: u64) -> Arc<ReceiveMemory> {
        Arc::new(ReceiveMemory {
            window,
            part_bytes,
            left: AtomicU64::new(bytes),
        })
    }

    /// A window for one more lane: with many lanes a smaller one, but no lane is refused.
    pub(crate) fn window(self: &Arc<ReceiveMemory>) -> Window {
        // Half of what is left at most: so there is some for the next one.
        let parts_of = |left: u64| (left / 2 / self.part_bytes).clamp(WINDOW_MIN, self.window);
        let bytes_of = |left: u64| left.min(parts_of(left) * self.part_bytes);
        let take = |left| Some(left - bytes_of(left));
        let (Ok(left) | Err(left)) =
            self.left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        Window {
            memory: self.clone(),
            parts: parts_of(left),
            bytes: bytes_of(left),
        }
    }
}

impl Window {
    /// The longest part.
    pub(super) fn part_bytes(&self) -> u64 {
        self.memory.part_bytes
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.memory.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_lanes_have_small_windows_and_what_they_had_comes_back() {
        let memory = ReceiveMemory::new(32, 1 << 20, 256 << 20);
        for _ in 0..2 {
            let windows: Vec<Window> = (0..100).map(|_| memory.window()).collect();
            let parts: Vec<u64> = windows.iter().map(|window| window.parts).collect();
            assert_eq!(parts[..5], [32; 5]);
            assert!(parts.is_sorted_by(|one, next| one >= next), "{parts:?}");
            assert_eq!(parts[99], 2);
            // Beyond the memory, two parts for each lane.
            let all: u64 = parts.iter().sum();
            assert!(all <= 256 + 2 * 100, "{all}");
            let last = memory.left.load(Ordering::Relaxed);
            assert_eq!(last, 0);
        }
        assert_eq!(memory.left.load(Ordering::Relaxed), 256 << 20);
    }
}
