//! What one process's handles and permits of a semaphore share.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;

use super::SPINS;
use super::room::{LOOK, Look, Place, Room, UNDER_WAY_MAX};
use super::survivor::Survivor;
use super::warden::{Here, WhoIs};
use crate::backend::StreamOp;
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::link::proof::Streams;
use crate::link::watcher::{Usage, Watcher};
use crate::rendezvous::{ANSWER_TIMEOUT, Keeper, Visitor, decode, encode};
use crate::stream::{Backoff, Stream};

/// Leaves a room that nobody came into to the reaper.
pub(super) fn bury(room: Arc<Room>, why: Error) -> Error {
    if let Ok(watcher) = Watcher::of_process() {
        watcher.bury(Box::new(room));
    }
    why
}

/// How this process belongs to it.
#[derive(Debug)]
pub(super) enum Side {
    Creator(#[expect(dead_code, reason = "held, not used")] Keeper),
    Member { visitor: Visitor, survivor: Arc<Survivor> },
}

/// What a process's handles and permits share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) room: Arc<Room>,
    pub(super) home: Home,
    device: Device,
    pub(super) name: String,
    pub(super) member: u32,
    /// The permit given back last: most likely free, and in this CPU's cache.
    pub(super) hint: AtomicU32,
    streams: Arc<Streams>,
    watcher: Arc<Watcher>,
    /// `None` only while dropping.
    pub(super) side: Option<Side>,
}

impl Core {
    pub(super) fn new(
        room: Arc<Room>,
        device: &Device,
        name: &str,
        member: u32,
        watcher: Arc<Watcher>,
        side: Side,
    ) -> Core {
        Core {
            room,
            home: Home::here(),
            device: device.clone(),
            name: name.to_string(),
            member,
            hint: AtomicU32::new(0),
            streams: Arc::default(),
            watcher,
            side: Some(side),
        }
    }

    pub(super) fn check_open(&self) -> Result<()> {
        self.home.check()?;
        match &self.side {
            Some(Side::Member { visitor, survivor }) if survivor.is_over() => Err(visitor.owner_gone()),
            _ => Ok(()),
        }
    }

    fn is_over(&self) -> bool {
        matches!(&self.side, Some(Side::Member { survivor, .. }) if survivor.is_over())
    }

    /// The page is registered with this device's backend, and its addresses mean nothing to another.
    pub(super) fn check_stream(&self, stream: &Stream) -> Result<()> {
        stream.check_of(&self.device)
    }

    pub(super) fn no_permit(&self, waited: Duration) -> Error {
        Error::Timeout { what: format!("a permit of {:?}", self.name), waited }
    }

    /// Waits at a place in the line until it is served, the time is over, or it is called off.
    pub(super) fn wait_at(
        &self,
        place: Place,
        timeout: Duration,
        clock: &mut Stopwatch,
        called_off: Option<&AtomicBool>,
    ) -> Result<(u32, u64)> {
        let is_called_off = || called_off.is_some_and(|off| off.load(Relaxed));
        // Behind others the turn is far off, and a CPU that spins is one that a holder may need.
        let mut backoff = Backoff::spinning(if self.room.is_first_in_line() { SPINS } else { 0 });
        // A permit may have become free while nobody was to be seen.
        self.room.serve(self.member);
        loop {
            let left = timeout.saturating_sub(clock.elapsed());
            let give_up = left.is_zero() || self.is_over() || is_called_off();
            let look =
                if give_up { self.room.withdraw(place, self.member) } else { self.room.look(place, self.member) };
            match look {
                Look::Granted { permit, passed } => return Ok((permit, passed)),
                Look::Lost => return Err(self.place_lost()),
                Look::Waiting if give_up => {
                    self.check_open()?;
                    return Err(self.no_permit(timeout));
                }
                Look::Waiting if backoff.step().is_zero() => std::hint::spin_loop(),
                Look::Waiting => {
                    self.room.sleep(place, left.min(LOOK), || self.is_over());
                    self.room.serve(self.member);
                }
            }
        }
    }

    fn place_lost(&self) -> Error {
        Error::Protocol {
            name: self.name.clone(),
            field: "waiter's place",
            found: "overwritten".into(),
            allowed: "its waiter's own until it leaves".into(),
        }
    }

    pub(super) fn has_room_for_work(&self, permit: u32) -> bool {
        self.room.word(permit).reached(self.room.due(permit).wrapping_sub(UNDER_WAY_MAX - 1))
    }

    pub(super) fn await_word(&self, permit: u32, value: u64, timeout: Duration, clock: &mut Stopwatch) -> Result<()> {
        let word = self.room.word(permit);
        let left = timeout.saturating_sub(clock.elapsed());
        if word.reached(value) || self.device.backend().wait_word(word, value, left)? {
            return Ok(());
        }
        let what = format!("the device work of the last holder of {:?}", self.name);
        Err(Error::Timeout { what, waited: timeout })
    }

    /// Makes sure that this process hears of the death of everybody who is to signal this permit.
    pub(super) fn meet_signallers(&self, permit: u32, timeout: Duration) -> Result<()> {
        let Some(Side::Member { visitor, survivor }) = &self.side else { return Ok(()) };
        for (_, member) in self.room.under_way(permit) {
            if survivor.knows(member) {
                continue;
            }
            let mut gift = visitor.ask(&encode(&WhoIs { member })?, timeout.min(ANSWER_TIMEOUT))?;
            let Here(is_here) = decode(&gift.body, &self.name)?;
            match (is_here, gift.fds.pop()) {
                (true, Some(pidfd)) => survivor.learn(member, pidfd, &self.watcher, &self.name)?,
                // What it owes behind the work of the living must come due even if the creator dies now.
                _ => survivor.bury(member),
            }
        }
        Ok(())
    }

    fn word_address(&self, permit: u32) -> Result<u64> {
        let missing = || Error::argument("device", "none", "the one it was opened on");
        self.room.device_word(permit).ok_or_else(missing)
    }

    pub(super) fn wait_op(&self, permit: u32, value: u64) -> Result<StreamOp> {
        Ok(StreamOp::Wait { word: self.word_address(permit)?, value })
    }

    pub(super) fn signal_op(&self, permit: u32, value: u64) -> Result<StreamOp> {
        Ok(StreamOp::Signal { word: self.word_address(permit)?, value })
    }

    pub(super) fn enqueue(&self, stream: &Stream, ops: &[StreamOp]) -> Result<()> {
        self.streams.note(stream);
        // SAFETY: the words lie in the page, which is let go only when this stream, noted above, is proven to be past
        // them (see `Drop`).
        unsafe { stream.batch(ops) }
    }

    /// Stores, once what came before it is done, a value that was promised and could not be enqueued.
    pub(super) fn pay_later(&self, permit: u32, value: u64) {
        let room = self.room.clone();
        // However long the holders before it take: nobody else would ever store it.
        self.watcher.retire(move || {
            room.word(permit).advance(value.wrapping_sub(1), value);
            if room.word(permit).reached(value) { Usage::Over } else { Usage::Held }
        });
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let mut side = self.side.take();
        if !self.home.is_here() {
            return std::mem::forget((side, self.room.clone()));
        }
        let (room, streams, mut proof) = (self.room.clone(), self.streams.clone(), None);
        // A creator whose streams wait for members must still see them die; else the name is free at once.
        if matches!(side, Some(Side::Creator(_))) && proof.insert(streams.mark()).is_passed() {
            drop(side.take());
        }
        // Others wait for the name, and for the goodbye.
        self.watcher.retire(move || {
            let room = &room;
            if !proof.get_or_insert_with(|| streams.mark()).is_passed() {
                return Usage::Busy;
            }
            // Only now a goodbye: whoever has said it owes no signal any more. And only now the page: never on this
            // thread, since to unregister memory, a driver may wait for a stream that waits for a peer.
            drop(side.take());
            if Arc::strong_count(room) > 1 { Usage::Held } else { Usage::Over }
        });
    }
}
