//! A *lane*: a word that one process alone raises, its [signaller](super::signaller), and a field
//! that keeps the last value when that process has ended. **This module is marked for unsafe**: it
//! lays out shared memory and hands its addresses to streams.
//!
//! Values are from 0 to [`VALUE_MAX`]. Once the signaller is proven dead, or has given up with all
//! its work done, the word's last value is recorded ([`SharedCounter::end`]) and the word itself is
//! raised to [`ENDED`], above every value that a stream can wait for. So one store, by the first
//! process that sees the end, releases every stream that waits, now and later. A released waiter
//! then queries the [`WaitStatus`].

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use crate::atomic::{AtomicU32, AtomicU64};
use crate::backend::{StreamOp, TimelineWord};
use crate::error::Result;
use crate::runtime::fence::StreamSet;
use crate::shm::page::{AtomicsOnly, SharedPage};
use crate::stream::Stream;

/// The largest value that a counter can have.
pub(crate) const VALUE_MAX: u64 = ENDED - 1;

/// The word of an ended counter: streams compare signed differences, and this is at or above every
/// value from 0 on.
pub(crate) const ENDED: u64 = i64::MAX as u64;

/// A counter's shared bytes.
#[repr(C, align(16))]
#[derive(Debug)]
pub(super) struct CounterWords {
    pub(super) word: TimelineWord,
    /// 0 while the counter may still be raised, then the last value and 1.
    last: AtomicU64,
    /// Its signaller's process id, for people.
    pid: AtomicU32,
    _reserved: AtomicU32,
}

/// The length of a counter in a page.
pub(crate) const COUNTER_BYTES: usize = 32;

const _: () = assert!(size_of::<CounterWords>() == COUNTER_BYTES);
const _: () = assert!(
    std::mem::offset_of!(CounterWords, last) == 16 && std::mem::offset_of!(CounterWords, pid) == 24
);

// SAFETY: atomics alone.
unsafe impl AtomicsOnly for CounterWords {}

/// The status of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitStatus {
    Reached,
    /// The value may still come.
    Pending,
    /// The counter ended below the value.
    Never,
}

/// A counter in a page. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct SharedCounter {
    page: Arc<SharedPage>,
    offset: usize,
}

impl SharedCounter {
    /// The counter at `offset`, which is this library's own and never a peer's.
    pub(crate) fn new(page: &Arc<SharedPage>, offset: usize) -> SharedCounter {
        debug_assert!(offset + COUNTER_BYTES <= page.bytes());
        SharedCounter {
            page: page.clone(),
            offset,
        }
    }

    pub(super) fn words(&self) -> &CounterWords {
        self.page.at(self.offset)
    }

    /// The value now, or the last one.
    pub(crate) fn value(&self) -> u64 {
        match self.words().word.load() {
            value if value < ENDED => value,
            _ => self.words().last.load(SeqCst).saturating_sub(1),
        }
    }

    /// Whether the counter has ended, and can be raised no more.
    pub(crate) fn has_ended(&self) -> bool {
        self.words().last.load(SeqCst) != 0
    }

    pub(crate) fn pid(&self) -> i32 {
        self.words().pid.load(SeqCst) as i32
    }

    /// Records this process as the signaller.
    pub(crate) fn write_pid(&self) {
        self.words().pid.store(std::process::id(), SeqCst);
    }

    /// Records the signaller of `other`.
    pub(crate) fn copy_pid(&self, other: &SharedCounter) {
        self.words()
            .pid
            .store(other.words().pid.load(SeqCst), SeqCst);
    }

    pub(crate) fn wait_status(&self, value: u64) -> WaitStatus {
        let word = self.words().word.load();
        if word < ENDED && word >= value {
            return WaitStatus::Reached;
        }
        // After the word: a process that ends a counter writes this field first.
        match self.words().last.load(SeqCst) {
            0 if word < ENDED => WaitStatus::Pending,
            last if last.saturating_sub(1) >= value => WaitStatus::Reached,
            _ => WaitStatus::Never,
        }
    }

    /// Ends the counter: records its last value, unless another process has, and releases all
    /// waiters. To be called when nothing raises the counter any more. Where something still may,
    /// [`end_again`](Self::end_again) follows from time to time.
    pub(crate) fn end(&self) {
        self.end_at(self.words().word.load());
    }

    /// Ends a counter that has ended: a late value stands below [`ENDED`].
    pub(crate) fn end_again(&self) {
        if self.has_ended() {
            self.end();
        }
    }

    /// As [`end`](Self::end), for the signaller itself, which knows the last value and need not
    /// trust the word.
    pub(crate) fn end_at(&self, value: u64) {
        let words = self.words();
        let _ = words
            .last
            .compare_exchange(0, value.min(VALUE_MAX) + 1, SeqCst, SeqCst);
        if words.word.load() != ENDED {
            words.word.store(ENDED);
        }
    }

    /// Raises the counter to `value` with the CPU, unless a stream has raised it further.
    pub(crate) fn bring_up(&self, value: u64) {
        self.words().word.bring_up(value);
    }

    /// Whether both are the same words.
    pub(crate) fn is_same(&self, other: &SharedCounter) -> bool {
        Arc::ptr_eq(&self.page, &other.page) && self.offset == other.offset
    }

    pub(crate) fn page(&self) -> &Arc<SharedPage> {
        &self.page
    }

    /// Makes it a new counter at 0. To be called when nothing waits for it or raises it any more.
    pub(crate) fn reset(&self) {
        self.words().word.store(0);
        self.words().last.store(0, SeqCst);
    }

    /// Has `stream` wait for `value`.
    pub(crate) fn wait(&self, stream: &Stream, value: u64, streams: &StreamSet) -> Result<()> {
        streams.record_use(stream);
        let wait = StreamOp::Wait {
            word: self.word_ptr(),
            value,
        };
        // SAFETY: the word lies in the page, which is dropped only when this stream, recorded
        // above, is proven to be past it (the owner of `streams` drops the page behind a fence of
        // them).
        unsafe { stream.batch(&[wait]) }
    }

    /// The operation that waits for `value`, unless the value has been reached. The page must
    /// outlive it.
    pub(crate) fn wait_op(&self, value: u64) -> Option<StreamOp> {
        (!self.words().word.reached(value)).then(|| StreamOp::Wait {
            word: self.word_ptr(),
            value,
        })
    }

    /// Waits on the CPU, at most `limit`. The caller then queries the [`WaitStatus`].
    pub(crate) fn wait_host(&self, value: u64, limit: Duration) -> bool {
        self.words().word.wait(value, limit, self.page.is_of_gpu())
    }

    pub(super) fn word_ptr(&self) -> u64 {
        self.page.device_ptr(self.offset).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    fn counter() -> SharedCounter {
        SharedCounter::new(
            &Arc::new(SharedPage::private(&Device::host(), COUNTER_BYTES).unwrap()),
            0,
        )
    }

    const WAIT: Duration = Duration::from_secs(10);

    #[test]
    fn an_ended_counter_keeps_its_last_value_and_lets_everybody_go() {
        let (device, counter) = (Device::host(), counter());
        let (stream, streams) = (device.stream().unwrap(), StreamSet::default());
        counter.words().word.store(5);
        counter.wait(&stream, VALUE_MAX, &streams).unwrap();
        assert!(!stream.is_idle().unwrap());
        assert_eq!(
            (counter.wait_status(5), counter.wait_status(6)),
            (WaitStatus::Reached, WaitStatus::Pending)
        );
        counter.end();
        counter.end();
        stream.synchronize(WAIT).unwrap();
        assert_eq!(
            (counter.wait_status(5), counter.wait_status(6)),
            (WaitStatus::Reached, WaitStatus::Never)
        );
        assert_eq!((counter.value(), counter.has_ended()), (5, true));
        counter.wait(&stream, 7, &streams).unwrap();
        stream.synchronize(WAIT).unwrap();
    }

    #[test]
    fn whatever_stands_in_a_counter_is_a_verdict() {
        let counter = counter();
        for word in [0, 1, VALUE_MAX, ENDED, ENDED + 1, u64::MAX] {
            for last in [0, 1, u64::MAX] {
                counter.words().word.store(word);
                counter.words().last.store(last, SeqCst);
                let _ = (
                    counter.wait_status(0),
                    counter.wait_status(VALUE_MAX),
                    counter.value(),
                );
                counter.end();
                assert!(counter.has_ended() && counter.wait_status(1) != WaitStatus::Pending);
            }
        }
    }
}
