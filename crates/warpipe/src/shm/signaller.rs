//! The one signaller of a [counter](crate::shm::counter). **This module is marked for unsafe**: it
//! hands words to streams.
//!
//! No lock is held while a stream is given work: a full launch queue holds such a call up until the
//! stream goes on, and the control thread, which admits peers, and the reactor take the signaller's
//! state lock. So one thread raises at a time ([`TimedLock`]): it copies the list of words to
//! signal, has the stream signal them without the lock, and then records the value. The CPU brings
//! a copy that is added meanwhile up to that value, when the own counter has reached it; streams
//! signal the later values. The copied list keeps the page of a copy that is removed meanwhile
//! mapped.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use crate::backend::StreamOp;
use crate::error::{Error, Result};
use crate::mutex::LockUnpoisoned;
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{EventSource, Reactor};
use crate::runtime::timed_lock::{LOCK_TIMEOUT, TimedLock};
use crate::shm::counter::SharedCounter;
use crate::stream::Stream;
use crate::wait::Wait;

/// Raises a counter: keeps its values in order, and forwards them to copies.
///
/// The values stand first of all in a counter of this process's own. No peer can set it back or
/// take it away, so a stream of this process that waits for an earlier value is released whatever
/// happens elsewhere. Each process that follows has a *copy* in a page of its own, which the same
/// streams signal. If the followers have to agree on the last value after this process's death, the
/// signaller also *publishes* the counter: no copy is ever ahead of the published one.
#[derive(Debug)]
pub(crate) struct Signaller {
    own: SharedCounter,
    published: Option<SharedCounter>,
    /// Held by the thread that raises.
    signal_lock: TimedLock,
    /// Never held across a driver call.
    state: Mutex<SignallerState>,
}

/// Copies, by a number that the caller chooses.
type Copies = Vec<(u64, SharedCounter)>;

#[derive(Debug)]
struct SignallerState {
    /// The highest value given to a stream, or stored.
    last: u64,
    /// The value that is being given to a stream now; else equal to `last`.
    next: u64,
    /// The stream that the last value was given to.
    stream: Option<Stream>,
    /// A thread that raises holds the list as it was, and so keeps the pages of copies that are
    /// removed meanwhile.
    copies: Arc<Copies>,
    /// Copies that were added while streams had yet to signal earlier values. The CPU stores the
    /// values up to this one.
    late: Vec<(SharedCounter, u64)>,
    /// Kept so that its allocation is reused.
    ops: Vec<StreamOp>,
}

/// A signaller while it has late copies.
struct LateCopies(Arc<Signaller>);

impl EventSource for LateCopies {
    fn on_tick(&self, _: u64) {
        self.0.catch_up();
    }
}

/// Why a stream did not take a value that it was to signal.
enum SignalFailure {
    /// The stream has been given no signal of the value.
    Nothing(Error),
    /// The stream has been given a part of the signals.
    InPart,
}

/// The most signals that one driver call takes whole or not at all and executes in order; more may
/// execute side by side.
const ORDERED_MAX: usize = 4;

impl Signaller {
    /// The signaller of a counter that stands at `from`; `own` lies in memory of this process
    /// alone.
    pub(crate) fn new(own: SharedCounter, from: u64) -> Signaller {
        own.words().word.store(from);
        let (copies, late, ops) = Default::default();
        let state = SignallerState {
            last: from,
            next: from,
            stream: None,
            copies,
            late,
            ops,
        };
        Signaller {
            own,
            published: None,
            signal_lock: TimedLock::default(),
            state: Mutex::new(state),
        }
    }

    /// Publishes the counter, too. To be called before the counter is raised.
    pub(crate) fn publishing(self, counter: SharedCounter) -> Signaller {
        counter.write_pid();
        counter.words().word.store(self.last());
        Signaller {
            published: Some(counter),
            ..self
        }
    }

    /// The counter that no peer can write.
    pub(crate) fn own(&self) -> &SharedCounter {
        &self.own
    }

    /// The highest value given to a stream, or stored.
    pub(crate) fn last(&self) -> u64 {
        self.lock().last
    }

    fn lock(&self) -> MutexGuard<'_, SignallerState> {
        self.state.locked()
    }

    /// Starts to signal a copy, too. True if the copy has every value so far; else [`catch_up`] is
    /// to be called until it has.
    ///
    /// [`catch_up`]: Self::catch_up
    pub(crate) fn add(&self, number: u64, copy: &SharedCounter) -> bool {
        copy.write_pid();
        let mut state = self.lock();
        // Every value that is raised from here on reaches the copy without `catch_up`.
        Arc::make_mut(&mut state.copies).push((number, copy.clone()));
        let next = state.next;
        state.late.push((copy.clone(), next));
        self.bring_up_late(&mut state)
    }

    /// As [`add`](Self::add), and has the reactor's threads call [`catch_up`](Self::catch_up).
    pub(crate) fn add_late(
        self: &Arc<Self>,
        number: u64,
        copy: &SharedCounter,
        reactor: &Arc<Reactor>,
    ) {
        if self.add(number, copy) {
            return;
        }
        let late = Arc::new(LateCopies(self.clone()));
        // A full launch queue may hold up the fence thread, and never the one that ticks.
        reactor.register_ticks(Arc::downgrade(&late) as Weak<dyn EventSource>);
        reactor.drop_after(move || late.0.catch_up());
    }

    /// Brings copies up to the values that were raised before they were added, as far as these have
    /// been reached. True once all copies are. Makes CPU stores only.
    pub(crate) fn catch_up(&self) -> bool {
        self.bring_up_late(&mut self.lock())
    }

    fn bring_up_late(&self, state: &mut SignallerState) -> bool {
        let reached = self.own.words().word.load();
        state.late.retain(|(copy, last)| {
            copy.bring_up(reached.min(*last));
            reached < *last
        });
        state.late.is_empty()
    }

    /// Stops signalling a copy. Signals that streams have been given for it, or are being given
    /// now, are still to come. Its page may be dropped when this process has no other handle of it,
    /// and then a fence of the streams has been reached.
    pub(crate) fn remove(&self, number: u64) -> Option<SharedCounter> {
        let mut state = self.lock();
        let index = state
            .copies
            .iter()
            .position(|(known, _)| *known == number)?;
        let copy = Arc::make_mut(&mut state.copies).swap_remove(index).1;
        state.late.retain(|(late, _)| !late.is_same(&copy));
        Some(copy)
    }

    /// Raises the counter behind the work of `stream`, to the value that `choose` makes of the last
    /// one. Values on several streams are reached one after the other.
    pub(crate) fn raise(
        &self,
        stream: &Stream,
        streams: &StreamSet,
        choose: impl FnOnce(u64) -> Result<u64>,
    ) -> Result<u64> {
        self.raise_within(LOCK_TIMEOUT, stream, streams, &[], choose)
    }

    /// As [`raise`](Self::raise), behind further operations, for which the caller answers, and with
    /// a wait of its own for another thread that raises.
    pub(crate) fn raise_within<'w>(
        &self,
        wait: impl Into<Wait<'w>>,
        stream: &Stream,
        streams: &StreamSet,
        before: &[StreamOp],
        choose: impl FnOnce(u64) -> Result<u64>,
    ) -> Result<u64> {
        // First: it may query other streams, which a full launch queue holds up.
        streams.record_use(stream);
        let _turn = self.signal_lock.lock(wait, || "signal".into())?;
        let mut state = self.lock();
        let value = choose(state.last)?;
        let is_behind = state
            .stream
            .as_ref()
            .is_none_or(|last| last.is_same(stream))
            || self.is_done(&state);
        let wait = (!is_behind).then_some(StreamOp::Wait {
            word: self.own.word_ptr(),
            value: state.last,
        });
        let (copies, mut ops) = (state.copies.clone(), std::mem::take(&mut state.ops));
        state.next = value;
        drop(state);
        ops.clear();
        ops.extend(before.iter().copied().chain(wait));
        let given = self.give(stream, value, &copies, &mut ops, before.len());
        if matches!(given, Err(SignalFailure::InPart)) {
            self.complete_behind(stream, value, &copies);
        }
        let mut state = self.lock();
        state.ops = ops;
        if let Err(SignalFailure::Nothing(error)) = given {
            let last = state.last;
            state.next = last;
            state
                .late
                .iter_mut()
                .for_each(|(_, up_to)| *up_to = last.min(*up_to));
            return Err(error);
        }
        (state.last, state.stream) = (value, Some(stream.clone()));
        Ok(value)
    }

    /// Has the stream signal `value` behind `ops`, of which `signals` may be signals.
    fn give(
        &self,
        stream: &Stream,
        value: u64,
        copies: &Copies,
        ops: &mut Vec<StreamOp>,
        signals: usize,
    ) -> Result<(), SignalFailure> {
        let signal = |counter: &SharedCounter| StreamOp::Signal {
            word: counter.word_ptr(),
            value,
        };
        // SAFETY: the pages are dropped only when no handle is left, and this thread holds one;
        // then this stream, recorded by the caller, is proven to be past the operations (the owner
        // of `streams` drops the pages behind a fence of them).
        let give = |ops: &[StreamOp]| unsafe { stream.batch(ops) };
        ops.extend(self.published.as_ref().map(signal));
        let is_ordered =
            signals + copies.len() + 1 + usize::from(self.published.is_some()) <= ORDERED_MAX;
        if !is_ordered {
            if !ops.is_empty() {
                give(ops).map_err(SignalFailure::Nothing)?;
            }
            ops.clear();
        }
        ops.extend(copies.iter().map(|(_, copy)| signal(copy)));
        // The own word comes last: a stream or thread that sees it reached is behind the copies.
        if !is_ordered {
            give(ops).map_err(|_| SignalFailure::InPart)?;
            ops.clear();
        }
        ops.push(signal(&self.own));
        give(ops).map_err(|error| {
            if is_ordered {
                SignalFailure::Nothing(error)
            } else {
                SignalFailure::InPart
            }
        })
    }

    /// The driver has taken a part of a value's signals, so some copies get the value. The CPU
    /// stores it in all, once the stream is proven to be past its work.
    fn complete_behind(&self, stream: &Stream, value: u64, copies: &Copies) {
        // The reactor runs, since another process follows this counter.
        let Ok(reactor) = Reactor::of_process() else {
            return;
        };
        let counters: Vec<SharedCounter> = self.counters(copies).cloned().collect();
        reactor.call_after(Fence::behind(stream), move || {
            counters.iter().for_each(|counter| counter.bring_up(value));
        });
    }

    /// Raises the counter now, once no other thread does. `choose` gets the last value, and the one
    /// that has been reached.
    pub(crate) fn raise_now<'w>(
        &self,
        wait: impl Into<Wait<'w>>,
        choose: impl FnOnce(u64, u64) -> Result<u64>,
    ) -> Result<()> {
        let _turn = self.signal_lock.lock(wait, || "signal".into())?;
        let mut state = self.lock();
        let value = choose(state.last, self.own.words().word.load())?;
        self.counters(&state.copies)
            .for_each(|counter| counter.words().word.store(value));
        (state.last, state.next, state.stream) = (value, value, None);
        Ok(())
    }

    /// Ends the counter and all copies. To be called when all streams are past their work.
    pub(crate) fn end(&self) {
        let state = self.lock();
        self.counters(&state.copies)
            .for_each(|counter| counter.end_at(state.last));
    }

    /// The published counter, the copies, and the own counter.
    fn counters<'a>(&'a self, copies: &'a Copies) -> impl Iterator<Item = &'a SharedCounter> {
        let copies = copies.iter().map(|(_, copy)| copy);
        self.published.iter().chain(copies).chain([&self.own])
    }

    /// Simulates the stream of a process that dies: it has reached the published counter and some
    /// of the copies.
    #[cfg(test)]
    pub(crate) fn reach_in_part(&self, value: u64, copies: usize) {
        let state = self.lock();
        let reached = state.copies.iter().take(copies).map(|(_, copy)| copy);
        self.published
            .iter()
            .chain(reached)
            .for_each(|counter| counter.words().word.store(value));
    }

    fn is_done(&self, state: &SignallerState) -> bool {
        self.own.words().word.reached(state.last)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::backend::testing::{Failing, Holding, Wrapped};
    use crate::device::Device;
    use crate::shm::counter::COUNTER_BYTES;
    use crate::shm::page::SharedPage;

    fn counter() -> SharedCounter {
        SharedCounter::new(
            &Arc::new(SharedPage::private(&Device::host(), COUNTER_BYTES).unwrap()),
            0,
        )
    }

    fn signaller(copy: &SharedCounter) -> Signaller {
        let signaller = Signaller::new(counter(), 0);
        assert!(signaller.add(1, copy));
        signaller
    }

    fn next(last: u64) -> Result<u64> {
        Ok(last + 1)
    }

    const WAIT: Duration = Duration::from_secs(60);

    #[test]
    fn values_on_two_streams_are_reached_in_order() {
        let (device, counter) = (Device::host(), counter());
        let slow = device.stream().unwrap();
        let quick = device.stream().unwrap();
        let streams = StreamSet::default();
        let signaller = signaller(&counter);
        let (go, held) = std::sync::mpsc::channel::<()>();
        slow.call(move || assert!(held.recv().is_err())).unwrap();
        signaller
            .raise(&slow, &streams, |last| Ok(last + 1))
            .unwrap();
        signaller
            .raise(&quick, &streams, |last| Ok(last + 1))
            .unwrap();
        assert_eq!(
            (counter.value(), signaller.last()),
            (0, 2),
            "the second waits for the first"
        );
        drop(go);
        assert!(counter.wait_host(2, WAIT));
        // Both: the signaller's own word, which comes last, is unmapped with this frame.
        for stream in [&slow, &quick] {
            stream.synchronize(WAIT).unwrap();
        }
        assert_eq!(counter.value(), 2, "and is not set back by it");
    }

    #[test]
    fn a_copy_that_comes_late_gets_each_value_as_it_is_reached() {
        let (device, copies) = (Device::host(), [counter(), counter()]);
        let slow = device.stream().unwrap();
        let slower = device.stream().unwrap();
        let streams = StreamSet::default();
        let signaller = signaller(&copies[0]);
        let ((go, held), (go_on, held_on)) = (
            std::sync::mpsc::channel::<()>(),
            std::sync::mpsc::channel::<()>(),
        );
        slow.call(move || assert!(held.recv().is_err())).unwrap();
        slower
            .call(move || assert!(held_on.recv().is_err()))
            .unwrap();
        signaller
            .raise(&slow, &streams, |last| Ok(last + 1))
            .unwrap();
        signaller
            .raise(&slower, &streams, |last| Ok(last + 1))
            .unwrap();
        assert!(!signaller.add(2, &copies[1]));
        signaller
            .raise(&slower, &streams, |last| Ok(last + 1))
            .unwrap();
        drop(go);
        assert!(signaller.own().wait_host(1, WAIT));
        assert!(!signaller.catch_up());
        assert_eq!(
            copies[1].value(),
            1,
            "what is reached between is there, too"
        );
        drop(go_on);
        slower.synchronize(WAIT).unwrap();
        assert!(signaller.catch_up());
        assert_eq!(copies.each_ref().map(SharedCounter::value), [3, 3]);
    }

    #[test]
    fn many_copies_have_every_value_before_the_own_counter_has() {
        let (device, copies, published) = (Device::host(), [0; 9].map(|_| counter()), counter());
        let (stream, streams) = (device.stream().unwrap(), StreamSet::default());
        let signaller = signaller(&copies[0]).publishing(published.clone());
        (1..9).for_each(|index| assert!(signaller.add(index as u64 + 1, &copies[index])));
        signaller.raise(&stream, &streams, |_| Ok(4)).unwrap();
        assert!(signaller.own().wait_host(4, WAIT));
        assert_eq!(copies.each_ref().map(SharedCounter::value), [4; 9]);
        assert!(signaller.remove(3).unwrap().is_same(&copies[2]));
        signaller.raise_now(WAIT, |_, _| Ok(5)).unwrap();
        assert_eq!(
            (copies[2].value(), copies[3].value(), published.value()),
            (4, 5, 5)
        );
    }

    #[test]
    fn while_a_signal_is_held_up_copies_come_and_go_and_get_its_value_no_sooner_than_it_is_reached()
    {
        let wrapped = Wrapped::new(Device::host().backend().clone(), Holding::default());
        let device = Device::from_backend(wrapped.clone());
        let (copies, late) = ([counter(), counter()], counter());
        let stream = device.stream().unwrap();
        let other = device.stream().unwrap();
        let streams = StreamSet::default();
        let signaller = signaller(&copies[0]);
        assert!(signaller.add(2, &copies[1]));
        signaller.raise(&stream, &streams, next).unwrap();
        wrapped.hook().hold("batch");
        std::thread::scope(|scope| {
            let held_up = scope.spawn(|| signaller.raise(&stream, &streams, next));
            wrapped.hook().wait_for(1);
            assert!(
                !signaller.add(3, &late),
                "the value that is on its way is still to come"
            );
            assert_eq!((late.value(), signaller.last()), (1, 1));
            assert!(signaller.remove(2).unwrap().is_same(&copies[1]));
            assert_eq!(
                Arc::strong_count(copies[1].page()),
                2,
                "the stream is about to be given a word of its page"
            );
            let second = signaller
                .raise_within(Duration::from_millis(10), &other, &streams, &[], next)
                .unwrap_err();
            assert!(matches!(second, Error::Timeout { .. }), "{second}");
            let now = signaller.raise_now(Duration::ZERO, |last, _| next(last));
            assert!(matches!(now, Err(Error::Timeout { .. })), "{now:?}");
            wrapped.hook().unblock();
            assert_eq!(held_up.join().unwrap().unwrap(), 2);
        });
        assert!(signaller.own().wait_host(2, WAIT) && signaller.catch_up());
        assert_eq!((late.value(), Arc::strong_count(copies[1].page())), (2, 1));
        assert_eq!(signaller.raise(&other, &streams, next).unwrap(), 3);
        assert!(signaller.own().wait_host(3, WAIT));
        assert_eq!(
            (copies[0].value(), copies[1].value(), late.value()),
            (3, 2, 3)
        );
    }

    #[test]
    fn a_value_that_the_driver_takes_nothing_of_is_as_if_never_raised() {
        let wrapped = Wrapped::new(Device::host().backend().clone(), Failing::default());
        let device = Device::from_backend(wrapped.clone());
        let (copy, late) = (counter(), counter());
        let (stream, streams) = (device.stream().unwrap(), StreamSet::default());
        let signaller = signaller(&copy);
        wrapped.hook().aim("batch", 1);
        let refused = signaller.raise(&stream, &streams, |last| {
            assert_eq!(last, 0);
            Ok(5)
        });
        assert!(
            matches!(
                refused,
                Err(Error::Driver {
                    code: Error::INJECTED,
                    ..
                })
            ),
            "{refused:?}"
        );
        assert!(signaller.add(2, &late), "nothing is to come");
        signaller.raise(&stream, &streams, next).unwrap();
        assert!(signaller.own().wait_host(1, WAIT));
        assert_eq!((copy.value(), late.value(), signaller.last()), (1, 1, 1));
    }

    #[test]
    fn a_value_of_which_the_driver_takes_a_part_comes_to_all_behind_the_streams_work() {
        let wrapped = Wrapped::new(Device::host().backend().clone(), Failing::default());
        let device = Device::from_backend(wrapped.clone());
        for call in [2, 3] {
            let (copies, published) = ([0; 9].map(|_| counter()), counter());
            let stream = device.stream().unwrap();
            let other = device.stream().unwrap();
            let streams = StreamSet::default();
            let signaller = signaller(&copies[0]).publishing(published.clone());
            (1..9).for_each(|index| assert!(signaller.add(index as u64 + 1, &copies[index])));
            let (go, held) = std::sync::mpsc::channel::<()>();
            stream.call(move || assert!(held.recv().is_err())).unwrap();
            wrapped.hook().aim("batch", call);
            assert_eq!(signaller.raise(&stream, &streams, next).unwrap(), 1);
            assert!(wrapped.hook().has_struck());
            signaller.raise(&other, &streams, next).unwrap();
            assert_eq!(
                copies.each_ref().map(SharedCounter::value),
                [0; 9],
                "the work before it is not done"
            );
            drop(go);
            assert!(signaller.own().wait_host(2, WAIT));
            assert_eq!(copies.each_ref().map(SharedCounter::value), [2; 9]);
            assert_eq!(published.value(), 2);
        }
    }
}
