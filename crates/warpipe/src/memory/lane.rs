//! A word that one process alone raises, and the field that says how far it came when that process is no more.
//! **This module is marked for unsafe**: it lays out shared memory and hands its addresses to streams.
//!
//! Values are from 0 to [`VALUE_MAX`]. Once the raiser is proven dead, or has given up with all its work done, the
//! word's last value is written down ([`Lane::end`]) and the word itself is raised to [`ENDED`], above everything that
//! anybody can wait for: so every stream that waits is let go, now and later, by one store of whoever sees it first.
//! Who was let go asks for the [`Verdict`].

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::board::Board;
use super::page::{Page, Shared};
use crate::backend::{StreamOp, TimelineWord};
use crate::device::Device;
use crate::error::Result;
use crate::link::proof::Streams;
use crate::stream::Stream;

/// The largest value that a lane can have.
pub(crate) const VALUE_MAX: u64 = ENDED - 1;

/// What an ended lane's word says: streams compare signed differences, and this is at or above every value from 0 on.
pub(crate) const ENDED: u64 = i64::MAX as u64;

/// A lane's shared bytes.
#[repr(C, align(16))]
#[derive(Debug)]
struct LaneWords {
    word: TimelineWord,
    /// 0 while the lane may still be raised, then the last value and 1.
    last: AtomicU64,
    /// Its raiser's process id, for people.
    pid: AtomicU32,
    _reserved: AtomicU32,
}

/// The length of a lane in a page.
pub(crate) const LANE_BYTES: usize = 32;

const _: () = assert!(size_of::<LaneWords>() == LANE_BYTES);
const _: () = assert!(std::mem::offset_of!(LaneWords, last) == 16 && std::mem::offset_of!(LaneWords, pid) == 24);

// SAFETY: atomics alone.
unsafe impl Shared for LaneWords {}

/// What is known of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Reached,
    /// It may still come.
    Due,
    /// The lane ended below it.
    Never,
}

/// A lane in a page. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Lane {
    page: Arc<Page>,
    offset: usize,
}

impl Lane {
    /// The lane at `offset`, which is this library's own and never a peer's.
    pub(crate) fn new(page: &Arc<Page>, offset: usize) -> Lane {
        debug_assert!(offset + LANE_BYTES <= page.bytes());
        Lane { page: page.clone(), offset }
    }

    fn words(&self) -> &LaneWords {
        self.page.at(self.offset)
    }

    /// The value now, or the last one.
    pub(crate) fn value(&self) -> u64 {
        match self.words().word.load() {
            value if value < ENDED => value,
            _ => self.words().last.load(SeqCst).saturating_sub(1),
        }
    }

    /// Whether it can be raised no more.
    pub(crate) fn has_ended(&self) -> bool {
        self.words().last.load(SeqCst) != 0
    }

    pub(crate) fn pid(&self) -> i32 {
        self.words().pid.load(SeqCst) as i32
    }

    /// Says whose it is.
    pub(crate) fn sign(&self) {
        self.words().pid.store(std::process::id(), SeqCst);
    }

    pub(crate) fn verdict(&self, value: u64) -> Verdict {
        let word = self.words().word.load();
        if word < ENDED && word >= value {
            return Verdict::Reached;
        }
        // After the word: whoever ends a lane writes this first.
        match self.words().last.load(SeqCst) {
            0 if word < ENDED => Verdict::Due,
            last if last.saturating_sub(1) >= value => Verdict::Reached,
            _ => Verdict::Never,
        }
    }

    /// Ends the lane: writes down its last value, unless somebody has, and lets go whoever waits. To be called when
    /// nothing raises it any more; where something still may, again from time to time: a late value stands below.
    pub(crate) fn end(&self) {
        self.end_at(self.words().word.load());
    }

    /// The same, for the raiser itself, who need not take anybody's word for the last value.
    pub(crate) fn end_at(&self, value: u64) {
        let words = self.words();
        let _ = words.last.compare_exchange(0, value.min(VALUE_MAX) + 1, SeqCst, SeqCst);
        if words.word.load() != ENDED {
            words.word.store(ENDED);
        }
    }

    /// Makes it a new lane at 0. To be called when nobody waits for it or raises it any more.
    pub(crate) fn reset(&self) {
        self.words().word.store(0);
        self.words().last.store(0, SeqCst);
    }

    /// Has `stream` wait for `value`.
    pub(crate) fn wait(&self, stream: &Stream, value: u64, streams: &Streams) -> Result<()> {
        streams.note(stream);
        let wait = StreamOp::Wait { word: self.word_ptr(), value };
        // SAFETY: the word lies in the page, which is let go only when this stream, noted above, is proven to be past
        // it (whoever holds `streams` retires the page with them).
        unsafe { stream.batch(&[wait]) }
    }

    /// Waits on the CPU; what came is then to be asked for.
    pub(crate) fn wait_host(&self, device: &Device, value: u64, timeout: Duration) -> Result<bool> {
        device.backend().wait_word(&self.words().word, value, timeout)
    }

    fn word_ptr(&self) -> u64 {
        self.page.device_ptr(self.offset).unwrap_or_default()
    }
}

/// Who raises a lane: keeps its values in order.
#[derive(Debug)]
pub(crate) struct Raiser {
    lane: Lane,
    /// A word of our own that follows the lane's: no peer can set it back, so a stream of ours that waits for an earlier
    /// value of ours is let go whatever happens to the shared one.
    board: Arc<Board>,
    index: usize,
    raised: Mutex<Raised>,
}

#[derive(Debug)]
struct Raised {
    /// The highest value given to a stream, or stored.
    last: u64,
    /// The stream that it was given to.
    stream: Option<Stream>,
}

impl Raiser {
    /// The raiser of a lane that stands at `from`, with a word of `board`.
    pub(crate) fn new(lane: Lane, board: &Arc<Board>, index: usize, from: u64) -> Raiser {
        board.word(index).store(from);
        lane.sign();
        Raiser { lane, board: board.clone(), index, raised: Mutex::new(Raised { last: from, stream: None }) }
    }

    pub(crate) fn lane(&self) -> &Lane {
        &self.lane
    }

    /// The highest value given to a stream, or stored.
    pub(crate) fn last(&self) -> u64 {
        self.raised.lock().unwrap_or_else(PoisonError::into_inner).last
    }

    /// Raises the lane behind the work of `stream`, to what `choose` makes of the last value. Values on several streams
    /// are reached one after the other.
    pub(crate) fn raise(
        &self,
        stream: &Stream,
        streams: &Streams,
        choose: impl FnOnce(u64) -> Result<u64>,
    ) -> Result<u64> {
        let mut raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        let value = choose(raised.last)?;
        let own = self.board.device_word(self.index);
        let ops = [
            StreamOp::Wait { word: own, value: raised.last },
            StreamOp::Signal { word: self.lane.word_ptr(), value },
            StreamOp::Signal { word: own, value },
        ];
        let is_behind = raised.stream.as_ref().is_none_or(|last| last.is_same(stream)) || self.is_done(&raised);
        streams.note(stream);
        // SAFETY: page and board are let go only when this stream, noted above, is proven to be past the operations
        // (whoever holds `streams` retires both with them).
        unsafe { stream.batch(if is_behind { &ops[1..] } else { &ops })? };
        *raised = Raised { last: value, stream: Some(stream.clone()) };
        Ok(value)
    }

    /// Raises the lane now. `choose` gets the last value, and the one that has been reached.
    pub(crate) fn raise_now(&self, choose: impl FnOnce(u64, u64) -> Result<u64>) -> Result<()> {
        let mut raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        let value = choose(raised.last, self.board.word(self.index).load())?;
        self.lane.words().word.store(value);
        self.board.word(self.index).store(value);
        *raised = Raised { last: value, stream: None };
        Ok(())
    }

    fn is_done(&self, raised: &Raised) -> bool {
        self.board.word(self.index).reached(raised.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane() -> Lane {
        let (page, _fd) = Page::create(Some(&Device::host()), LANE_BYTES).unwrap();
        Lane::new(&Arc::new(page), 0)
    }

    fn raiser(lane: &Lane) -> Raiser {
        Raiser::new(lane.clone(), &Arc::new(Board::new(&Device::host(), 1).unwrap()), 0, 0)
    }

    const WAIT: Duration = Duration::from_secs(10);

    #[test]
    fn an_ended_lane_keeps_its_last_value_and_lets_everybody_go() {
        let (device, lane) = (Device::host(), lane());
        let (stream, streams) = (device.stream().unwrap(), Streams::default());
        raiser(&lane).raise_now(|_, _| Ok(5)).unwrap();
        lane.wait(&stream, VALUE_MAX, &streams).unwrap();
        assert!(!stream.is_idle().unwrap());
        assert_eq!((lane.verdict(5), lane.verdict(6)), (Verdict::Reached, Verdict::Due));
        lane.end();
        lane.end();
        stream.synchronize(WAIT).unwrap();
        assert_eq!((lane.verdict(5), lane.verdict(6)), (Verdict::Reached, Verdict::Never));
        assert_eq!((lane.value(), lane.has_ended()), (5, true));
        lane.wait(&stream, 7, &streams).unwrap();
        stream.synchronize(WAIT).unwrap();
    }

    #[test]
    fn values_on_two_streams_are_reached_in_order() {
        let (device, lane) = (Device::host(), lane());
        let (slow, quick, streams) = (device.stream().unwrap(), device.stream().unwrap(), Streams::default());
        let raiser = raiser(&lane);
        let (go, held) = std::sync::mpsc::channel::<()>();
        slow.call(move || assert!(held.recv().is_err())).unwrap();
        raiser.raise(&slow, &streams, |last| Ok(last + 1)).unwrap();
        raiser.raise(&quick, &streams, |last| Ok(last + 1)).unwrap();
        assert_eq!((lane.value(), raiser.last()), (0, 2), "the second waits for the first");
        drop(go);
        assert!(lane.wait_host(&device, 2, WAIT).unwrap());
        slow.synchronize(WAIT).unwrap();
        assert_eq!(lane.value(), 2, "and is not set back by it");
    }

    #[test]
    fn whatever_stands_in_a_lane_is_a_verdict() {
        let lane = lane();
        for word in [0, 1, VALUE_MAX, ENDED, ENDED + 1, u64::MAX] {
            for last in [0, 1, u64::MAX] {
                lane.words().word.store(word);
                lane.words().last.store(last, SeqCst);
                let _ = (lane.verdict(0), lane.verdict(VALUE_MAX), lane.value());
                lane.end();
                assert!(lane.has_ended() && lane.verdict(1) != Verdict::Due);
            }
        }
    }
}
