//! What one process's handles and permits of a semaphore share. **This module is marked for unsafe**: it hands the words
//! that streams wait for to the device.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::SPINS;
use super::room::{CREATOR, LOOK, Look, Place, Room, UNDER_WAY_MAX};
use super::signals::Signals;
use super::survivor::Survivor;
use super::warden::{Ask, Here, Offer, Warden};
use crate::backend::StreamOp;
use crate::clock::Stopwatch;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::{Home, PrivateFd};
use crate::link::closer::PeerFd;
use crate::link::proof::Proof;
use crate::link::watcher::{Usage, Watcher};
use crate::rendezvous::{ANSWER_TIMEOUT, Keeper, Refusal, Visitor, decode, encode};
use crate::stream::{Backoff, Stream};

/// Leaves what could not be put together to the reaper.
pub(super) fn bury(remains: impl Send + 'static, why: Error) -> Error {
    if let Ok(watcher) = Watcher::of_process() {
        watcher.bury(Box::new(remains));
    }
    why
}

/// How this process belongs to it.
#[derive(Debug)]
pub(super) enum Side {
    Creator { keeper: Keeper, warden: Arc<Warden> },
    Member { visitor: Visitor },
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
    signals: Arc<Signals>,
    survivor: Arc<Survivor>,
    watcher: Arc<Watcher>,
    /// A thread gets to know members for those that only try; why the last one failed.
    is_meeting: AtomicBool,
    meeting: Mutex<Option<Error>>,
    /// `None` only while dropping.
    pub(super) side: Option<Side>,
}

impl Core {
    pub(super) fn new(
        room: Arc<Room>,
        device: &Device,
        member: u32,
        signals: Arc<Signals>,
        survivor: Arc<Survivor>,
        side: Side,
    ) -> Core {
        Core {
            room,
            home: Home::here(),
            device: device.clone(),
            name: signals.name().to_string(),
            member,
            hint: AtomicU32::new(0),
            watcher: signals.watcher().clone(),
            signals,
            survivor,
            is_meeting: AtomicBool::new(false),
            meeting: Mutex::new(None),
            side: Some(side),
        }
    }

    #[cfg(test)]
    pub(super) fn signals(&self) -> &Arc<Signals> {
        &self.signals
    }

    #[cfg(test)]
    pub(super) fn survivor(&self) -> &Arc<Survivor> {
        &self.survivor
    }

    pub(super) fn check_open(&self) -> Result<()> {
        self.home.check()?;
        match &self.side {
            Some(Side::Member { visitor }) if self.survivor.is_over() => Err(visitor.owner_gone()),
            _ => Ok(()),
        }
    }

    fn is_over(&self) -> bool {
        self.survivor.is_over()
    }

    /// The page is registered with this device's backend, and its addresses mean nothing to another; nor may its words go
    /// into a graph.
    pub(super) fn check_stream(&self, stream: &Stream) -> Result<()> {
        stream.check_usable(&self.device)
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

    /// Makes sure that streams of this process can wait for everybody who is to signal this permit, and that it hears of
    /// their deaths. The first time with each of them takes a few messages.
    pub(super) fn meet_signallers(&self, permit: u32, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        for (_, member) in self.room.under_way(permit) {
            if !self.knows(member) {
                let left = timeout.saturating_sub(start.elapsed());
                let _one = self.signals.meeting.lock(left, String::new).map_err(|_| self.no_answer(timeout))?;
                if !self.knows(member) {
                    self.meet(member, Instant::now(), timeout.saturating_sub(start.elapsed()).min(ANSWER_TIMEOUT))?;
                }
            }
        }
        Ok(())
    }

    /// Keeps this process from getting to know anybody.
    #[cfg(test)]
    pub(super) fn hold_meetings(&self) -> impl Drop {
        self.signals.meeting.lock(ANSWER_TIMEOUT, String::new).unwrap()
    }

    /// Whether streams of this process can wait for all that are to signal this permit.
    pub(super) fn knows_signallers(&self, permit: u32) -> bool {
        self.room.word(permit).reached(self.room.due(permit))
            || self.room.under_way(permit).all(|(_, member)| self.knows(member))
    }

    /// Begins to get to know them on a thread of its own, one at a time: they may stand still.
    ///
    /// # Errors
    /// Why the last one could not: told once.
    pub(super) fn meet_elsewhere(self: &Arc<Self>, permit: u32) -> Result<()> {
        if let Some(error) = self.meeting.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        if self.is_meeting.swap(true, SeqCst) {
            return Ok(());
        }
        let me = self.clone();
        let meet = move || {
            match me.meet_signallers(permit, ANSWER_TIMEOUT) {
                Ok(()) | Err(Error::Timeout { .. }) => {}
                Err(error) => *me.meeting.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
            }
            me.is_meeting.store(false, SeqCst);
        };
        std::thread::Builder::new().name("warpipe-meet".into()).spawn(meet).map(drop).map_err(|error| {
            self.is_meeting.store(false, SeqCst);
            Error::Os { call: "clone", context: "a thread that gets to know members".into(), source: error }
        })
    }

    fn no_answer(&self, waited: Duration) -> Error {
        let what = format!("another thread that gets to know a member of {:?}", self.name);
        Error::Timeout { what, waited }
    }

    fn knows(&self, member: u32) -> bool {
        self.survivor.knows(member) && self.signals.hears(member)
    }

    /// Gets to know a member, within `timeout` of `start`.
    fn meet(&self, member: u32, start: Instant, timeout: Duration) -> Result<()> {
        let left = || timeout.saturating_sub(start.elapsed());
        let Some(Offer { page, process }) = self.offer(member, left())? else {
            // What it owes behind the work of the living must come due even if the creator dies now.
            self.survivor.bury(member);
            return Ok(());
        };
        let draft = self.signals.map(page)?;
        match &self.side {
            Some(Side::Creator { keeper, warden }) => {
                let forwarded = warden.forward(keeper.desk(), CREATOR, member);
                forwarded.map_err(|Refusal(text)| Error::Refused { name: self.name.clone(), text })?;
            }
            Some(Side::Member { visitor }) => drop(visitor.ask(&encode(&Ask::Mapped { member })?, left())?),
            None => return Err(Error::Forked),
        }
        self.signals.hear(member, draft, left())?;
        // Before the watch: who is dead by now is found so at once, and what we share with it is lifted.
        process.map_or(Ok(()), |process| self.survivor.learn(member, process, &self.name))
    }

    /// A page to share with a member, from the creator. None if the member is here no more.
    fn offer(&self, member: u32, timeout: Duration) -> Result<Option<Offer<PeerFd>>> {
        match &self.side {
            Some(Side::Creator { keeper, warden }) => {
                let offer = warden.offer(keeper.desk(), CREATOR, member)?;
                let process = |process: [PrivateFd; 3]| process.map(PeerFd::from);
                Ok(offer.map(|offer| Offer { page: offer.page.into(), process: offer.process.map(process) }))
            }
            Some(Side::Member { visitor }) => {
                let gift = visitor.ask(&encode(&Ask::Page { member })?, timeout)?;
                let Here(is_here) = decode(&gift.body, &self.name)?;
                let mut fds = gift.fds.into_iter();
                let page = fds.next();
                let process = <[PeerFd; 3]>::try_from(fds.collect::<Vec<_>>()).ok();
                let is_whole = page.is_some() && (process.is_some() || member == CREATOR);
                if is_here && !is_whole {
                    return Err(Error::Protocol {
                        name: self.name.clone(),
                        field: "descriptors",
                        found: "too few".into(),
                        allowed: "a page, a pidfd and a lifeline".into(),
                    });
                }
                Ok(page.filter(|_| is_here).map(|page| Offer { page, process }))
            }
            None => Err(Error::Forked),
        }
    }

    fn word_address(&self, permit: u32) -> Result<u64> {
        let missing = || Error::argument("device", "none", "the one it was opened on");
        self.room.device_word(permit).ok_or_else(missing)
    }

    /// What a stream that is given the permit waits for.
    fn waits(&self, permit: u32) -> Vec<StreamOp> {
        self.signals.waits(permit, self.room.under_way(permit).map(|(_, member)| member))
    }

    /// Makes the stream wait for the permit's earlier holders.
    pub(super) fn wait(&self, permit: u32, stream: &Stream) -> Result<()> {
        let waits = self.waits(permit);
        if waits.is_empty() {
            return Ok(());
        }
        self.signals.streams().note(stream);
        // SAFETY: the words lie in pages of this process and one other (or of this one alone), which are let go only
        // when this stream, noted above, is proven to be past them.
        unsafe { stream.batch(&waits) }
    }

    /// Promises a release of the permit behind the stream's work, and has the stream signal it, behind that of earlier
    /// holders unless it `is_behind` it already. An error: nothing is promised, and the stream has been given nothing. The
    /// permit is not to be handed on before that stream's work is done.
    pub(super) fn release(&self, permit: u32, stream: &Stream, is_behind: bool) -> Result<()> {
        let mut before = if is_behind { Vec::new() } else { self.waits(permit) };
        let word = self.word_address(permit)?;
        let value = self.room.promise(permit, self.member);
        // For the CPUs that look at the permit: no stream waits for this word.
        before.push(StreamOp::Signal { word, value });
        let released = self.signals.release(permit, stream, &before);
        if released.is_err() {
            self.room.take_back(permit);
        }
        released
    }

    /// Hands a permit on once `stream`, which gives no signal, is past what it was given so far: it is being captured, or
    /// the driver refuses.
    pub(super) fn hand_on_later(self: &Arc<Self>, permit: u32, stream: &Stream) {
        let (me, mut proof) = (self.clone(), Proof::behind(stream));
        // However long that takes.
        self.watcher.retire(move || {
            let is_past = proof.is_passed();
            if is_past {
                me.room.hand_on(permit, me.member);
            }
            is_past
        });
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let mut side = self.side.take();
        if !self.home.is_here() {
            return std::mem::forget((side, self.room.clone(), self.signals.clone(), self.survivor.clone()));
        }
        let (room, signals, survivor) = (self.room.clone(), self.signals.clone(), self.survivor.clone());
        let (streams, mut proof) = (signals.streams().clone(), None);
        // A creator whose streams wait for members must still see them die; else the name is free at once.
        if matches!(side, Some(Side::Creator { .. })) && proof.insert(streams.mark_busy()).is_passed() {
            drop(side.take());
        }
        // Others wait for the name, and for the goodbye.
        self.watcher.retire(move || {
            let (room, signals, survivor) = (&room, &signals, &survivor);
            if !proof.get_or_insert_with(|| streams.mark()).is_passed() || !signals.catch_up() {
                return Usage::Busy;
            }
            // Only now a goodbye: whoever has said it owes no signal any more. And only now the page: never on this
            // thread, since to unregister memory, a driver may wait for a stream that waits for a peer.
            drop(side.take());
            // The survivor has one of each.
            let is_last =
                Arc::strong_count(survivor) == 1 && Arc::strong_count(room) == 2 && Arc::strong_count(signals) == 2;
            if is_last { Usage::Over } else { Usage::Held }
        });
    }
}
