//! A word that one process alone raises, and the field that says how far it came when that process is no more.
//! **This module is marked for unsafe**: it lays out shared memory and hands its addresses to streams.
//!
//! Values are from 0 to [`VALUE_MAX`]. Once the raiser is proven dead, or has given up with all its work done, the
//! word's last value is written down ([`Lane::end`]) and the word itself is raised to [`ENDED`], above everything that
//! anybody can wait for: so every stream that waits is let go, now and later, by one store of whoever sees it first.
//! Who was let go asks for the [`Verdict`].

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::page::{Page, Shared};
use crate::atomic::{AtomicU32, AtomicU64};
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

    /// Says that it is whose the other is.
    pub(crate) fn sign_as(&self, other: &Lane) {
        self.words().pid.store(other.words().pid.load(SeqCst), SeqCst);
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

    /// Raises it to `value` with the CPU, unless a stream has come further.
    pub(crate) fn bring_up(&self, value: u64) {
        let word = &self.words().word;
        for _ in 0..ATTEMPTS {
            let found = word.load();
            if found.wrapping_sub(value) as i64 >= 0 {
                return;
            }
            word.advance(found, value);
        }
    }

    /// Whether both are the same words.
    pub(crate) fn is_same(&self, other: &Lane) -> bool {
        Arc::ptr_eq(&self.page, &other.page) && self.offset == other.offset
    }

    pub(crate) fn page(&self) -> &Arc<Page> {
        &self.page
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

    /// The wait of a stream for `value`, unless it has been reached. The page must outlive it.
    pub(crate) fn wait_op(&self, value: u64) -> Option<StreamOp> {
        (!self.words().word.reached(value)).then(|| StreamOp::Wait { word: self.word_ptr(), value })
    }

    /// Waits on the CPU; what came is then to be asked for.
    pub(crate) fn wait_host(&self, device: &Device, value: u64, timeout: Duration) -> Result<bool> {
        device.backend().wait_word(&self.words().word, value, timeout)
    }

    fn word_ptr(&self) -> u64 {
        self.page.device_ptr(self.offset).unwrap_or_default()
    }
}

/// Who raises a lane: keeps its values in order, and tells others of them.
///
/// The values stand first of all in a lane of this process's own. No peer can set it back or take it away, so a stream
/// of ours that waits for an earlier value of ours is let go whatever happens elsewhere. Each process that follows has
/// a *copy* in a page of its own, which the same streams signal. Should they have to agree on the last value after this
/// process's death, it also *publishes* the lane: no copy is ever ahead of what is published.
#[derive(Debug)]
pub(crate) struct Raiser {
    own: Lane,
    published: Option<Lane>,
    raised: Mutex<Raised>,
    /// Copies that were added while streams had yet to signal earlier values: up to this value they are the CPU's.
    late: Mutex<Vec<(Lane, u64)>>,
}

#[derive(Debug)]
struct Raised {
    /// The highest value given to a stream, or stored.
    last: u64,
    /// The stream that it was given to.
    stream: Option<Stream>,
    /// By a number of the caller's.
    copies: Vec<(u64, Lane)>,
    /// Kept for its memory.
    ops: Vec<StreamOp>,
}

/// Signals in one call of the driver that are executed in order; more may go out side by side.
const ORDERED_MAX: usize = 4;

/// Attempts to bring a copy up against its other user, who may write there what it likes.
const ATTEMPTS: u32 = 64;

impl Raiser {
    /// The raiser of a lane that stands at `from`; `own` lies in memory of this process alone.
    pub(crate) fn new(own: Lane, from: u64) -> Raiser {
        own.words().word.store(from);
        let raised = Raised { last: from, stream: None, copies: Vec::new(), ops: Vec::new() };
        Raiser { own, published: None, raised: Mutex::new(raised), late: Mutex::default() }
    }

    /// Publishes it, too. To be called before it is raised.
    pub(crate) fn publishing(self, lane: Lane) -> Raiser {
        lane.sign();
        lane.words().word.store(self.last());
        Raiser { published: Some(lane), ..self }
    }

    /// The lane that no peer can write.
    pub(crate) fn own(&self) -> &Lane {
        &self.own
    }

    /// The highest value given to a stream, or stored.
    pub(crate) fn last(&self) -> u64 {
        self.lock().last
    }

    fn lock(&self) -> MutexGuard<'_, Raised> {
        self.raised.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to signal a copy, too. True if it has every value that has been given out; else [`catch_up`] is to be
    /// called until it has.
    ///
    /// [`catch_up`]: Self::catch_up
    pub(crate) fn add(&self, number: u64, copy: &Lane) -> bool {
        copy.sign();
        let mut raised = self.lock();
        raised.copies.push((number, copy.clone()));
        let last = raised.last;
        drop(raised);
        // Whatever is raised from here on reaches the copy by itself.
        self.late.lock().unwrap_or_else(PoisonError::into_inner).push((copy.clone(), last));
        self.catch_up()
    }

    /// Brings copies up to what was raised before they were added, as far as it has been reached; true once all are.
    /// CPU stores alone.
    pub(crate) fn catch_up(&self) -> bool {
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        let reached = self.own.words().word.load();
        late.retain(|(copy, last)| {
            copy.bring_up(reached.min(*last));
            reached < *last
        });
        late.is_empty()
    }

    /// Signals a copy no more; what streams have been given for it is still to come.
    pub(crate) fn remove(&self, number: u64) -> Option<Lane> {
        let mut raised = self.lock();
        let index = raised.copies.iter().position(|(known, _)| *known == number)?;
        let copy = raised.copies.swap_remove(index).1;
        drop(raised);
        self.late.lock().unwrap_or_else(PoisonError::into_inner).retain(|(late, _)| !late.is_same(&copy));
        Some(copy)
    }

    /// Raises the lane behind the work of `stream`, to what `choose` makes of the last value. Values on several streams
    /// are reached one after the other.
    pub(crate) fn raise(
        &self,
        stream: &Stream,
        streams: &Streams,
        choose: impl FnOnce(u64) -> Result<u64>,
    ) -> Result<u64> {
        self.raise_behind(stream, streams, &[], choose)
    }

    /// The same, with further operations before it, for which the caller answers.
    pub(crate) fn raise_behind(
        &self,
        stream: &Stream,
        streams: &Streams,
        before: &[StreamOp],
        choose: impl FnOnce(u64) -> Result<u64>,
    ) -> Result<u64> {
        let mut raised = self.lock();
        let value = choose(raised.last)?;
        let is_behind = raised.stream.as_ref().is_none_or(|last| last.is_same(stream)) || self.is_done(&raised);
        let wait = (!is_behind).then_some(StreamOp::Wait { word: self.own.word_ptr(), value: raised.last });
        let signal = |lane: &Lane| StreamOp::Signal { word: lane.word_ptr(), value };
        let Raised { copies, ops, .. } = &mut *raised;
        ops.clear();
        ops.extend_from_slice(before);
        ops.extend(wait);
        ops.extend(self.published.as_ref().map(signal));
        streams.note(stream);
        let signals = before.len() + copies.len() + 1 + usize::from(self.published.is_some());
        let is_ordered = signals <= ORDERED_MAX;
        if !is_ordered {
            // SAFETY: as below.
            unsafe { stream.batch(ops)? };
            ops.clear();
        }
        ops.extend(copies.iter().map(|(_, copy)| signal(copy)));
        // The own word comes last: whoever sees it reached, here or on another stream, is behind the copies.
        if !is_ordered {
            // SAFETY: as below.
            unsafe { stream.batch(ops)? };
            ops.clear();
        }
        ops.push(signal(&self.own));
        // SAFETY: the pages are let go only when this stream, noted above, is proven to be past the operations (whoever
        // holds `streams` retires them with it).
        unsafe { stream.batch(ops)? };
        (raised.last, raised.stream) = (value, Some(stream.clone()));
        Ok(value)
    }

    /// Raises the lane now. `choose` gets the last value, and the one that has been reached.
    pub(crate) fn raise_now(&self, choose: impl FnOnce(u64, u64) -> Result<u64>) -> Result<()> {
        let mut raised = self.lock();
        let value = choose(raised.last, self.own.words().word.load())?;
        let copies = raised.copies.iter().map(|(_, copy)| copy);
        self.published.iter().chain(copies).chain([&self.own]).for_each(|lane| lane.words().word.store(value));
        (raised.last, raised.stream) = (value, None);
        Ok(())
    }

    /// Ends the lane and all copies. To be called when all streams are past what they were given.
    pub(crate) fn end(&self) {
        let raised = self.lock();
        let copies = raised.copies.iter().map(|(_, copy)| copy);
        self.published.iter().chain(copies).chain([&self.own]).for_each(|lane| lane.end_at(raised.last));
    }

    /// What a stream of a process that dies leaves: it has come to what is published and to some of the copies.
    #[cfg(test)]
    pub(crate) fn reach_in_part(&self, value: u64, copies: usize) {
        let raised = self.lock();
        let reached = raised.copies.iter().take(copies).map(|(_, copy)| copy);
        self.published.iter().chain(reached).for_each(|lane| lane.words().word.store(value));
    }

    fn is_done(&self, raised: &Raised) -> bool {
        self.own.words().word.reached(raised.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane() -> Lane {
        Lane::new(&Arc::new(Page::private(&Device::host(), LANE_BYTES).unwrap()), 0)
    }

    fn raiser(copy: &Lane) -> Raiser {
        let raiser = Raiser::new(lane(), 0);
        assert!(raiser.add(1, copy));
        raiser
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
    fn a_copy_that_comes_late_gets_each_value_as_it_is_reached() {
        let (device, copies) = (Device::host(), [lane(), lane()]);
        let (slow, slower, streams) = (device.stream().unwrap(), device.stream().unwrap(), Streams::default());
        let raiser = raiser(&copies[0]);
        let ((go, held), (go_on, held_on)) = (std::sync::mpsc::channel::<()>(), std::sync::mpsc::channel::<()>());
        slow.call(move || assert!(held.recv().is_err())).unwrap();
        slower.call(move || assert!(held_on.recv().is_err())).unwrap();
        raiser.raise(&slow, &streams, |last| Ok(last + 1)).unwrap();
        raiser.raise(&slower, &streams, |last| Ok(last + 1)).unwrap();
        assert!(!raiser.add(2, &copies[1]));
        raiser.raise(&slower, &streams, |last| Ok(last + 1)).unwrap();
        drop(go);
        assert!(raiser.own().wait_host(&device, 1, WAIT).unwrap());
        assert!(!raiser.catch_up());
        assert_eq!(copies[1].value(), 1, "what is reached between is there, too");
        drop(go_on);
        slower.synchronize(WAIT).unwrap();
        assert!(raiser.catch_up());
        assert_eq!(copies.each_ref().map(Lane::value), [3, 3]);
    }

    #[test]
    fn many_copies_have_every_value_before_the_own_lane_has() {
        let (device, copies, published) = (Device::host(), [0; 9].map(|_| lane()), lane());
        let (stream, streams) = (device.stream().unwrap(), Streams::default());
        let raiser = raiser(&copies[0]).publishing(published.clone());
        (1..9).for_each(|index| assert!(raiser.add(index as u64 + 1, &copies[index])));
        raiser.raise(&stream, &streams, |_| Ok(4)).unwrap();
        assert!(raiser.own().wait_host(&device, 4, WAIT).unwrap());
        assert_eq!(copies.each_ref().map(Lane::value), [4; 9]);
        assert!(raiser.remove(3).unwrap().is_same(&copies[2]));
        raiser.raise_now(|_, _| Ok(5)).unwrap();
        assert_eq!((copies[2].value(), copies[3].value(), published.value()), (4, 5, 5));
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
