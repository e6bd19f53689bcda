//! A lane: tensors in one direction between two bridges, in parts, under credit.
//!
//! The receiver says how many parts may be sent in all; the sender waits for that number before
//! each part. So no more parts are on their way than the receiver has room for, and a receiver that
//! stands still holds up its own lanes and no link.

mod assembly;
mod outgoing;
mod receive_memory;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use zenoh::bytes::ZBytes;

pub(crate) use self::assembly::{Assembly, Payload, Target, upload};
pub(crate) use self::outgoing::{Content, Outgoing};
pub(crate) use self::receive_memory::{ReceiveMemory, Window};
use crate::error::Result;
use crate::message::{Id, Message, Part, Tensor};
use crate::session::Outbox;

/// The most parts that a receiver may allow to be on their way.
pub(crate) const WINDOW_MAX: u64 = 1024;
/// How often a wait looks whether its lane has ended.
pub(crate) const SLICE: Duration = Duration::from_millis(100);
/// How long a tensor waits for device memory before people are told.
const MEMORY_PATIENCE: Duration = Duration::from_secs(5);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Figures of one lane, for people.
#[derive(Debug, Default)]
pub(crate) struct LaneCounts {
    pub(crate) tensors: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// Samples that the policy left out.
    pub(crate) dropped: AtomicU64,
    /// Samples that did not come, by the numbers, whatever the reason.
    pub(crate) missing: AtomicU64,
    /// Samples that came a second time and were not published.
    pub(crate) repeated: AtomicU64,
    /// Parts that may still be sent.
    pub(crate) credit: AtomicU64,
}

impl LaneCounts {
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

/// The sending end of a lane.
#[derive(Debug)]
pub(crate) struct LaneSender {
    pub(crate) lane: Id,
    pub(crate) peer: Id,
    outbox: Arc<Outbox>,
    state: Mutex<SenderState>,
    changed: Condvar,
    pub(crate) counts: LaneCounts,
}

#[derive(Debug, Default)]
struct SenderState {
    /// From the receiver's `Ready`.
    after: Option<u64>,
    granted: u64,
    sent: u64,
    /// Whether a thread has its turn.
    has_turn: bool,
    ended: Option<String>,
}

/// The turn of a thread to send a tensor, of several threads that send on one lane.
#[derive(Debug)]
pub(crate) struct Turn<'a>(&'a LaneSender);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).has_turn = false;
        self.0.changed.notify_all();
    }
}

impl LaneSender {
    pub(crate) fn new(lane: Id, peer: Id, outbox: Arc<Outbox>) -> LaneSender {
        LaneSender {
            lane,
            peer,
            outbox,
            state: Mutex::default(),
            changed: Condvar::new(),
            counts: LaneCounts::default(),
        }
    }

    pub(crate) fn send(&self, message: &Message) -> Result<()> {
        self.outbox.send(message, ZBytes::new())
    }

    /// Zenoh has copied the payload when this returns.
    fn put(&self, part: Part, payload: ZBytes) -> Result<()> {
        self.outbox.send(&Message::Part(part), payload)
    }

    /// As [`Outbox::post`].
    pub(crate) fn post(&self, message: Message) -> bool {
        self.outbox.post(message)
    }

    /// The receiver has taken the lane.
    pub(crate) fn ready(&self, after: u64, parts: u64) {
        lock(&self.state).after.get_or_insert(after);
        self.grant(parts);
    }

    /// The receiver allows this number of parts in all. A smaller number than before changes
    /// nothing. One beyond any window ends the lane: a peer has no room for it, and what it does not
    /// read would fill the link.
    pub(crate) fn grant(&self, parts: u64) {
        let mut state = lock(&self.state);
        if parts.saturating_sub(state.sent) > WINDOW_MAX {
            let reason = || format!("the peer allowed more than {WINDOW_MAX} parts at a time");
            state.ended.get_or_insert_with(reason);
            self.changed.notify_all();
            return;
        }
        state.granted = state.granted.max(parts);
        let credit = state.granted.saturating_sub(state.sent);
        self.counts.credit.store(credit, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Ends the lane from outside; the first reason stays.
    pub(crate) fn end(&self, reason: &str) {
        lock(&self.state).ended.get_or_insert_with(|| reason.into());
        self.changed.notify_all();
    }

    /// Whether the receiver has taken the lane.
    pub(crate) fn is_taken(&self) -> bool {
        lock(&self.state).after.is_some()
    }

    /// Why the lane has ended, if it has.
    pub(crate) fn ended(&self) -> Option<String> {
        lock(&self.state).ended.clone()
    }

    /// Waits for the receiver's `Ready`. `None` when the lane ended or nothing came.
    pub(crate) fn wait_ready(&self, timeout: Duration) -> Option<u64> {
        let state = lock(&self.state);
        let waits = |state: &mut SenderState| state.after.is_none() && state.ended.is_none();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, timeout, waits)
            .unwrap_or_else(PoisonError::into_inner);
        state.after.filter(|_| state.ended.is_none())
    }

    /// Whether a part may be sent, at the latest after `timeout`. False once the lane has ended.
    pub(crate) fn wait_credit(&self, timeout: Duration) -> bool {
        let state = lock(&self.state);
        let waits = |state: &mut SenderState| state.sent >= state.granted && state.ended.is_none();
        let waited = self.changed.wait_timeout_while(state, timeout, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.sent < state.granted && state.ended.is_none()
    }

    /// Waits for this thread's turn; `None` once the lane has ended. The thread before it may be in
    /// a send over a link that has ended, until Zenoh gives up: this lane alone waits for it.
    pub(crate) fn turn(&self) -> Option<Turn<'_>> {
        let waits = |state: &mut SenderState| state.has_turn && state.ended.is_none();
        let waited = self.changed.wait_while(lock(&self.state), waits);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        if state.ended.is_some() {
            return None;
        }
        state.has_turn = true;
        Some(Turn(self))
    }

    /// Takes one credit and returns the number of the part; `None` once the lane has ended.
    fn take_credit(&self) -> Option<u64> {
        let mut state = lock(&self.state);
        loop {
            if state.ended.is_some() {
                return None;
            }
            if state.sent < state.granted {
                state.sent += 1;
                let credit = state.granted - state.sent;
                self.counts.credit.store(credit, Ordering::Relaxed);
                return Some(state.sent);
            }
            let waited = self.changed.wait_timeout(state, SLICE);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends a tensor, in parts of at most `part_bytes`. Says whether all of it was sent: not when
    /// the lane ended meanwhile.
    pub(crate) fn send_tensor(
        &self,
        tensor: Tensor,
        content: &Content<'_>,
        part_bytes: usize,
    ) -> Result<bool> {
        let mut outgoing = Outgoing::new(self);
        let goes_on = outgoing.tensor(tensor, content, part_bytes)?;
        outgoing.flush()?;
        Ok(goes_on)
    }
}

/// The receiving end of a lane. Zenoh's thread puts parts in, and one thread takes them out.
#[derive(Debug)]
pub(crate) struct LaneReceiver {
    pub(crate) lane: Id,
    pub(crate) peer: Id,
    window: Window,
    outbox: Arc<Outbox>,
    state: Mutex<ReceiverState>,
    changed: Condvar,
    pub(crate) counts: LaneCounts,
}

#[derive(Debug, Default)]
struct ReceiverState {
    parts: VecDeque<(Part, ZBytes)>,
    /// The number of the last part that came.
    arrived: u64,
    taken: u64,
    granted: u64,
    end: Option<Ending>,
    wanting: Option<Wanting>,
}

/// A tensor that waits for device memory.
#[derive(Debug)]
struct Wanting {
    bytes: u64,
    since: Instant,
    is_told: bool,
}

/// Why a receiver's lane has ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ending {
    /// The sender said so.
    Sender(crate::message::End),
    /// The peer is unreachable, or a new lane replaces this one.
    Cut,
    /// The peer broke the protocol.
    Fault(String),
}

impl LaneReceiver {
    pub(crate) fn new(lane: Id, peer: Id, window: Window, outbox: Arc<Outbox>) -> LaneReceiver {
        LaneReceiver {
            lane,
            peer,
            window,
            outbox,
            state: Mutex::default(),
            changed: Condvar::new(),
            counts: LaneCounts::default(),
        }
    }

    pub(crate) fn send(&self, message: &Message) -> Result<()> {
        self.outbox.send(message, ZBytes::new())
    }

    /// Takes the lane: tells the sender where to begin, and how many parts it may send.
    pub(crate) fn accept(&self, after: u64) -> Result<()> {
        let parts = self.window.parts;
        lock(&self.state).granted = parts;
        self.counts.credit.store(parts, Ordering::Relaxed);
        self.send(&Message::Ready {
            lane: self.lane,
            after,
            parts,
        })
    }

    /// A part came. Does not wait: the credit bounds what can come.
    pub(crate) fn put(&self, part: Part, payload: ZBytes) {
        let mut state = lock(&self.state);
        let fault = if part.number != state.arrived + 1 {
            Some(format!(
                "part {} came behind part {}",
                part.number, state.arrived
            ))
        } else if part.number > state.granted {
            Some(format!(
                "part {} is beyond the credit of {}",
                part.number, state.granted
            ))
        } else if payload.len() as u64 > self.window.part_bytes() {
            Some(format!(
                "a part has {} bytes, at most {} are allowed: give both bridges one `part_bytes`",
                payload.len(),
                self.window.part_bytes()
            ))
        } else {
            None
        };
        if state.end.is_none() {
            match fault {
                Some(fault) => state.end = Some(Ending::Fault(fault)),
                None => {
                    state.arrived += 1;
                    state.parts.push_back((part, payload));
                    // The taker waits only while there is none.
                    if state.parts.len() > 1 {
                        return;
                    }
                }
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the lane behind the parts that have come; the first ending stays. A cut takes the place
    /// of any other: the parts that have come are dropped, and no thread waits for room for them.
    pub(crate) fn end(&self, ending: Ending) {
        let mut state = lock(&self.state);
        if state.end.is_none() || ending == Ending::Cut {
            state.end = Some(ending);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// How the lane has ended, whatever has come and is not taken.
    pub(crate) fn ending(&self) -> Option<Ending> {
        lock(&self.state).end.clone()
    }

    /// The next part, at the latest after [`SLICE`]; `Ok(None)` if none has come by then.
    pub(crate) fn next(&self) -> std::result::Result<Option<(Part, ZBytes)>, Ending> {
        let state = lock(&self.state);
        let waits = |state: &mut ReceiverState| state.parts.is_empty() && state.end.is_none();
        let (mut state, _) = self
            .changed
            .wait_timeout_while(state, SLICE, waits)
            .unwrap_or_else(PoisonError::into_inner);
        match (state.parts.pop_front(), &state.end) {
            (_, Some(Ending::Cut)) => Err(Ending::Cut),
            (Some(part), _) => Ok(Some(part)),
            (None, Some(end)) => Err(end.clone()),
            (None, None) => Ok(None),
        }
    }

    /// Waits until the lane has ended, at most `timeout`.
    pub(crate) fn wait_for_end(&self, timeout: Duration) {
        self.wait_while(timeout, |state| state.end.is_none());
    }

    /// Waits until the lane is cut, at most `timeout`: its sender's end is no reason to leave what has
    /// come.
    pub(crate) fn wait_for_cut(&self, timeout: Duration) {
        self.wait_while(timeout, |state| state.end != Some(Ending::Cut));
    }

    fn wait_while(&self, timeout: Duration, waits: impl Fn(&ReceiverState) -> bool) {
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.state), timeout, |state| waits(state));
        drop(waited);
    }

    /// Whether the lane was cut, so that not even the parts that have come are wanted.
    pub(crate) fn is_cut(&self) -> bool {
        lock(&self.state).end == Some(Ending::Cut)
    }

    /// A tensor of `bytes` waits for device memory from now on, or still does; `None` once it has it.
    pub(crate) fn wants_memory(&self, bytes: Option<u64>) {
        let wanting = &mut lock(&self.state).wanting;
        match bytes {
            None => *wanting = None,
            Some(bytes) => {
                let begins = || Wanting {
                    bytes,
                    since: Instant::now(),
                    is_told: false,
                };
                wanting.get_or_insert_with(begins);
            }
        }
    }

    /// The bytes of a tensor that has waited for device memory for a while, once for each tensor.
    pub(crate) fn waits_for_memory(&self) -> Option<u64> {
        let mut state = lock(&self.state);
        let wanting = state.wanting.as_mut().filter(|it| !it.is_told)?;
        wanting.is_told = wanting.since.elapsed() >= MEMORY_PATIENCE;
        wanting.is_told.then_some(wanting.bytes)
    }

    /// The part's bytes are in their slot: gives the credit back, in steps of half a window.
    pub(crate) fn taken(&self) -> Result<()> {
        let mut state = lock(&self.state);
        state.taken += 1;
        let parts = state.taken + self.window.parts;
        self.counts
            .credit
            .store(state.granted - state.taken, Ordering::Relaxed);
        if parts - state.granted < self.window.parts.div_ceil(2) {
            return Ok(());
        }
        state.granted = parts;
        drop(state);
        self.send(&Message::Credit {
            lane: self.lane,
            parts,
        })
    }
}
