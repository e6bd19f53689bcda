//! The shared words of a semaphore, and what is done with them. `docs/design/semaphore-page.md` draws them byte by byte.
//!
//! **Who has a permit.** Its owner word says it: 0 is free, everything else a member's number. With one exception: a
//! *place* (where somebody waits) in phase [`GRANTED`] names the permit that has been handed to it, and from the
//! compare-and-swap that wrote this on, the permit is the waiter's, whatever its owner word says until the waiter has
//! put its own number there. So a permit changes hands by one compare-and-swap, and wherever a process dies the permit
//! is free, or is a dead member's, and [`Room::sweep`] knows which.
//!
//! **Nobody is forgotten.** Who gives back looks for a waiter, stores 0, and looks again; who waits makes itself seen and
//! then looks for a free permit. All of these are `SeqCst`, so one of the two sees the other. Who sees both a free permit
//! and a waiter brings them together ([`Room::serve`]), whoever it is. A waiter that was not woken (its giver died
//! between the hand-over and the wake-up) looks by itself every [`LOOK`].
//!
//! **Nobody overtakes.** While anybody waits, free permits go to the oldest ticket alone.
//!
//! **What a wrong member can do.** All members can write all of this, and remove pages of it. One that does so wrongly
//! can take permits it has not got, give away those of others, make permits unusable, turn the order round, and let
//! streams start early. It cannot make a stream wait that would not otherwise (those wait on [pages of
//! two](super::signals)), nor make anybody read outside the page, panic, or loop: numbers are compared or checked and never used to address
//! unchecked, and every loop here has a bound.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::time::Duration;

use crate::atomic::{self, AtomicU32, AtomicU64};
use crate::backend::{DevicePtr, TimelineWord};
use crate::memory::page::{PAGE_BYTES, Page};

/// The most permits.
pub(super) const PERMITS_MAX: u32 = 1024;

/// The most who can wait in order.
pub(super) const PLACES: u32 = 256;

/// The most works of one permit that may be under way on devices: its holders' streams wait for each other, and for
/// each it is remembered who is to signal it.
pub(super) const UNDER_WAY_MAX: u64 = 8;

/// The creator's number. Visitors are counted from 1.
pub(super) const CREATOR: u32 = u32::MAX;

/// How long a waiter sleeps at most between looks.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// Attempts to bring a permit and a waiter together before it is left to the next who looks. Each fails only because
/// somebody else has just succeeded; an honest crowd does not come near.
const ATTEMPTS: u32 = 512;

const TICKETS: usize = 0;
const HANDED: usize = 8;
const BITS: usize = 64;
const PLACE: usize = PAGE_BYTES;
const PLACE_BYTES: usize = 64;
const PERMIT: usize = PLACE + PLACES as usize * PLACE_BYTES;
const PERMIT_BYTES: usize = 64;

/// Inside a place.
const STATE: usize = 0;
const TICKET: usize = 8;
const BELL: usize = 16;

/// Inside a permit.
const OWNER: usize = 0;
const PROMISED: usize = 8;
const WORD: usize = 16;
const SIGNALLERS: usize = 32;

const _: () = assert!(SIGNALLERS + UNDER_WAY_MAX as usize * size_of::<u32>() == PERMIT_BYTES);
const _: () = assert!(WORD.is_multiple_of(align_of::<TimelineWord>()) && PERMIT.is_multiple_of(PERMIT_BYTES));
const _: () = assert!(BITS + PLACES as usize / 8 <= PAGE_BYTES && PERMITS_MAX - 1 == STATE_PERMIT as u32);

/// Phases of a place, the low bits of its state.
const FREE: u64 = 0;
const CLAIMED: u64 = 1;
const WAITING: u64 = 2;
const GRANTED: u64 = 3;

const STATE_PERMIT: u64 = 0x3ff;
const STATE_COUNT: u64 = 0xf_ffff;

/// A place's state in one word, so that it changes in one step.
fn state(member: u32, phase: u64, permit: u32, count: u64) -> u64 {
    u64::from(member) << 32 | (count & STATE_COUNT) << 12 | (u64::from(permit) & STATE_PERMIT) << 2 | phase
}

fn phase_of(state: u64) -> u64 {
    state & 3
}

fn member_of(state: u64) -> u32 {
    (state >> 32) as u32
}

fn permit_of(state: u64) -> u32 {
    (state >> 2 & STATE_PERMIT) as u32
}

/// Bytes of the page for so many permits.
pub(super) fn bytes_for(permits: u32) -> usize {
    (PERMIT + permits as usize * PERMIT_BYTES).next_multiple_of(PAGE_BYTES)
}

/// A place that is this member's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) index: u32,
    /// Hand-overs there had been when it began to wait.
    pub(super) handed: u64,
}

/// What has become of a waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    Waiting,
    /// It has this permit, after so many had gone to others.
    Granted {
        permit: u32,
        passed: u64,
    },
    /// Its place is not its own any more, which no honest member does.
    Lost,
}

/// The mapped page of one semaphore.
#[derive(Debug)]
pub(super) struct Room {
    page: Page,
    permits: u32,
}

impl Room {
    /// # Panics
    /// If the page is not as long as so many permits need.
    pub(super) fn new(page: Page, permits: u32) -> Room {
        assert!((1..=PERMITS_MAX).contains(&permits) && page.bytes() >= bytes_for(permits));
        Room { page, permits }
    }

    pub(super) fn permits(&self) -> u32 {
        self.permits
    }

    #[cfg(test)]
    pub(super) fn at_start(&self) -> &AtomicU64 {
        self.page.at(0)
    }

    /// Writes one value everywhere.
    #[cfg(test)]
    pub(super) fn scribble(&self, value: u64) {
        (0..self.page.bytes() / 8).for_each(|index| self.page.at::<AtomicU64>(8 * index).store(value, SeqCst));
    }

    fn bits(&self, group: u32) -> &AtomicU64 {
        self.page.at(BITS + 8 * group as usize)
    }

    fn in_place<T: crate::memory::page::Shared>(&self, place: u32, field: usize) -> &T {
        assert!(place < PLACES);
        self.page.at(PLACE + place as usize * PLACE_BYTES + field)
    }

    fn place_state(&self, place: u32) -> &AtomicU64 {
        self.in_place(place, STATE)
    }

    fn in_permit(&self, permit: u32, field: usize) -> usize {
        assert!(permit < self.permits);
        PERMIT + permit as usize * PERMIT_BYTES + field
    }

    fn owner(&self, permit: u32) -> &AtomicU64 {
        self.page.at(self.in_permit(permit, OWNER))
    }

    /// The word that the permit's devices order themselves by.
    pub(super) fn word(&self, permit: u32) -> &TimelineWord {
        self.page.at(self.in_permit(permit, WORD))
    }

    /// The same word's address for a device.
    pub(super) fn device_word(&self, permit: u32) -> Option<DevicePtr> {
        self.page.device_ptr(self.in_permit(permit, WORD))
    }

    fn signaller(&self, permit: u32, value: u64) -> &AtomicU32 {
        let place = (value % UNDER_WAY_MAX) as usize * size_of::<u32>();
        self.page.at(self.in_permit(permit, SIGNALLERS + place))
    }

    /// The value that the permit's word has when all its earlier holders' work is done.
    pub(super) fn due(&self, permit: u32) -> u64 {
        self.page.at::<AtomicU64>(self.in_permit(permit, PROMISED)).load(Acquire)
    }

    /// Says that `me`, who has the permit, will signal the value returned. To be called before the signal is enqueued,
    /// and while the word is at most [`UNDER_WAY_MAX`] behind it. One store makes it so: who dies before it has
    /// promised nothing.
    pub(super) fn promise(&self, permit: u32, me: u32) -> u64 {
        let value = self.due(permit).wrapping_add(1);
        self.signaller(permit, value).store(me, SeqCst);
        self.page.at::<AtomicU64>(self.in_permit(permit, PROMISED)).store(value, SeqCst);
        value
    }

    /// Takes back the last promise, by who has the permit still: no stream signals it. Who dies before that leaves a promise
    /// that is stored for it.
    pub(super) fn take_back(&self, permit: u32) {
        let value = self.due(permit).wrapping_sub(1);
        self.page.at::<AtomicU64>(self.in_permit(permit, PROMISED)).store(value, SeqCst);
    }

    /// Who is to signal what the permit's word has not reached yet, from the oldest on.
    pub(super) fn under_way(&self, permit: u32) -> impl Iterator<Item = (u64, u32)> + '_ {
        let (reached, due) = (self.word(permit).load(), self.due(permit));
        let count = if due.wrapping_sub(reached) as i64 > 0 { due.wrapping_sub(reached).min(UNDER_WAY_MAX) } else { 0 };
        let values = (0..count).map(move |back| due.wrapping_sub(count - 1 - back));
        values.map(move |value| (value, self.signaller(permit, value).load(SeqCst)))
    }

    /// Whether anybody waits, or is just about to leave.
    pub(super) fn has_waiters(&self) -> bool {
        (0..PLACES / 64).any(|group| self.bits(group).load(SeqCst) != 0)
    }

    /// Whether at most one is in line.
    pub(super) fn is_first_in_line(&self) -> bool {
        (0..PLACES / 64).map(|group| self.bits(group).load(SeqCst).count_ones()).sum::<u32>() <= 1
    }

    /// How many wait, for people.
    pub(super) fn waiting(&self) -> u32 {
        self.seen_places().filter(|&place| phase_of(self.place_state(place).load(Relaxed)) == WAITING).count() as u32
    }

    /// How many are free, for people.
    pub(super) fn available(&self) -> u32 {
        (0..self.permits).filter(|&permit| self.owner(permit).load(Relaxed) == 0).count() as u32
    }

    fn seen_places(&self) -> impl Iterator<Item = u32> + '_ {
        (0..PLACES / 64).flat_map(move |group| {
            let mut bits = self.bits(group).load(SeqCst);
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros())?;
                bits &= bits - 1;
                Some(64 * group + bit)
            })
        })
    }

    /// Takes a free permit, whether anybody waits or not; looked for from `first` on. One whose devices are done comes
    /// before one that would make a stream wait.
    pub(super) fn take_free(&self, me: u32, first: u32) -> Option<u32> {
        self.take_free_of(me, first, |_| true)
    }

    /// The same among those that `may` be taken.
    pub(super) fn take_free_of(&self, me: u32, first: u32, may: impl Fn(u32) -> bool) -> Option<u32> {
        let all = || (0..self.permits).map(|step| (first % self.permits + step) % self.permits);
        let in_turn = || all().filter(|&permit| may(permit));
        let is_done = |&permit: &u32| self.word(permit).reached(self.due(permit));
        let idle = in_turn().filter(is_done).find(|&permit| self.take(permit, me));
        idle.or_else(|| in_turn().find(|&permit| self.take(permit, me)))
    }

    fn take(&self, permit: u32, me: u32) -> bool {
        let owner = self.owner(permit);
        owner.load(SeqCst) == 0 && owner.compare_exchange(0, me.into(), SeqCst, SeqCst).is_ok()
    }

    /// The one who has waited longest.
    fn oldest(&self) -> Option<(u32, u64)> {
        let waiting = |place| {
            let state = self.place_state(place).load(SeqCst);
            (phase_of(state) == WAITING).then(|| (self.in_place::<AtomicU64>(place, TICKET).load(SeqCst), place, state))
        };
        self.seen_places().filter_map(waiting).min().map(|(_, place, state)| (place, state))
    }

    /// Passes a permit that `me` has to the oldest waiter, or frees it.
    pub(super) fn hand_on(&self, permit: u32, me: u32) {
        for _ in 0..ATTEMPTS {
            match self.oldest() {
                Some((place, seen)) => {
                    if self.grant(permit, place, seen) {
                        return;
                    }
                }
                None => {
                    self.owner(permit).store(0, SeqCst);
                    // Who has begun to wait since we looked may have looked before this store.
                    if self.oldest().is_none() || !self.take(permit, me) {
                        return;
                    }
                }
            }
        }
        self.owner(permit).store(0, SeqCst);
    }

    fn grant(&self, permit: u32, place: u32, seen: u64) -> bool {
        let handed = self.page.at::<AtomicU64>(HANDED);
        let granted = state(member_of(seen), GRANTED, permit, handed.load(SeqCst));
        let is_ours = self.place_state(place).compare_exchange(seen, granted, SeqCst, SeqCst).is_ok();
        if is_ours {
            handed.fetch_add(1, SeqCst);
            self.ring(place);
        }
        is_ours
    }

    /// Brings free permits and waiters together, whoever left them apart.
    pub(super) fn serve(&self, me: u32) {
        for _ in 0..ATTEMPTS {
            if self.oldest().is_none() {
                return;
            }
            let Some(permit) = self.take_free(me, 0) else { return };
            self.hand_on(permit, me);
        }
    }

    /// Begins to wait; `None` if all places are taken.
    pub(super) fn line_up(&self, me: u32) -> Option<Place> {
        let claim = |&place: &u32| {
            let word = self.place_state(place);
            word.load(SeqCst) == FREE && word.compare_exchange(FREE, state(me, CLAIMED, 0, 0), SeqCst, SeqCst).is_ok()
        };
        let index = (0..PLACES).find(claim)?;
        let ticket = self.page.at::<AtomicU64>(TICKETS).fetch_add(1, SeqCst);
        self.in_place::<AtomicU64>(index, TICKET).store(ticket, SeqCst);
        self.place_state(index).store(state(me, WAITING, 0, 0), SeqCst);
        // Seen from here on.
        self.bits(index / 64).fetch_or(1 << (index % 64), SeqCst);
        Some(Place { index, handed: self.page.at::<AtomicU64>(HANDED).load(SeqCst) })
    }

    /// What has become of the wait. A permit that was granted has been taken over, and the place is given up.
    pub(super) fn look(&self, place: Place, me: u32) -> Look {
        let seen = self.place_state(place.index).load(SeqCst);
        match phase_of(seen) {
            _ if member_of(seen) != me => Look::Lost,
            WAITING => Look::Waiting,
            GRANTED if permit_of(seen) < self.permits => {
                let permit = permit_of(seen);
                self.owner(permit).store(me.into(), SeqCst);
                self.leave(place.index);
                Look::Granted { permit, passed: (seen >> 12).wrapping_sub(place.handed) & STATE_COUNT }
            }
            _ => {
                self.leave(place.index);
                Look::Lost
            }
        }
    }

    /// Ends the wait, unless it has been granted meanwhile.
    pub(super) fn withdraw(&self, place: Place, me: u32) -> Look {
        let (waiting, claimed) = (state(me, WAITING, 0, 0), state(me, CLAIMED, 0, 0));
        if self.place_state(place.index).compare_exchange(waiting, claimed, SeqCst, SeqCst).is_err() {
            return self.look(place, me);
        }
        self.leave(place.index);
        Look::Waiting
    }

    /// First unseen, then free: a place that is seen is never free.
    fn leave(&self, place: u32) {
        self.bits(place / 64).fetch_and(!(1 << (place % 64)), SeqCst);
        self.place_state(place).store(FREE, SeqCst);
    }

    fn ring(&self, place: u32) {
        let bell = self.in_place::<AtomicU32>(place, BELL);
        bell.fetch_add(1, SeqCst);
        atomic::wake(bell);
    }

    /// Wakes all who wait for `me`, so that they look at what this process knows.
    pub(super) fn ring_own(&self, me: u32) {
        self.seen_places()
            .filter(|&place| member_of(self.place_state(place).load(SeqCst)) == me)
            .for_each(|p| self.ring(p));
    }

    /// Sleeps until the place is rung, or `limit` has passed. `is_due` is asked after the bell has been looked at, so
    /// no ring is missed.
    pub(super) fn sleep(&self, place: Place, limit: Duration, is_due: impl FnOnce() -> bool) {
        let bell = self.in_place::<AtomicU32>(place.index, BELL);
        let seen = bell.load(SeqCst);
        if is_due() || phase_of(self.place_state(place.index).load(SeqCst)) != WAITING {
            return;
        }
        atomic::wait(bell, seen, limit);
    }

    /// Takes back what belongs to nobody who is here. By the creator alone, and by one thread of it at a time.
    pub(super) fn sweep(&self, is_here: impl Fn(u32) -> bool) {
        for place in 0..PLACES {
            let seen = self.place_state(place).load(SeqCst);
            let ours = state(CREATOR, CLAIMED, 0, 0);
            let is_dead = phase_of(seen) != FREE && !is_here(member_of(seen));
            // It fails if the wait has just been granted: the next sweep, or this one's second look, takes that back.
            let is_taken = |seen| self.place_state(place).compare_exchange(seen, ours, SeqCst, SeqCst).is_ok();
            if is_dead && is_taken(seen) {
                self.bury(place, seen);
            } else if is_dead {
                let again = self.place_state(place).load(SeqCst);
                if phase_of(again) != FREE && !is_here(member_of(again)) && is_taken(again) {
                    self.bury(place, again);
                }
            }
        }
        for permit in 0..self.permits {
            let owner = self.owner(permit).load(SeqCst);
            let is_ownerless = owner != 0 && !u32::try_from(owner).is_ok_and(&is_here);
            // Granted by the dead one before it died, and not taken over yet: it is the waiter's.
            if is_ownerless
                && !self.is_granted(permit)
                && self.owner(permit).compare_exchange(owner, CREATOR.into(), SeqCst, SeqCst).is_ok()
            {
                self.hand_on(permit, CREATOR);
            }
        }
        self.settle(|member| !is_here(member));
        self.serve(CREATOR);
    }

    /// Gives up a dead waiter's place, which is the creator's by now, and passes on what it had been granted.
    fn bury(&self, place: u32, seen: u64) {
        let permit = permit_of(seen);
        let is_granted = phase_of(seen) == GRANTED && permit < self.permits;
        if is_granted {
            self.owner(permit).store(CREATOR.into(), SeqCst);
        }
        self.leave(place);
        if is_granted {
            self.hand_on(permit, CREATOR);
        }
    }

    fn is_granted(&self, permit: u32) -> bool {
        self.seen_places()
            .map(|place| self.place_state(place).load(SeqCst))
            .any(|seen| phase_of(seen) == GRANTED && permit_of(seen) == permit)
    }

    /// Stores what the dead owe: each value whose signaller is dead, once the one before it has been reached. Values of
    /// the living are theirs to signal, and hold up what comes behind them: this is to be called again while anybody
    /// dead owes anything.
    pub(super) fn settle(&self, is_dead: impl Fn(u32) -> bool) {
        for permit in 0..self.permits {
            let word = self.word(permit);
            let owed = self.under_way(permit).take_while(|&(_, member)| is_dead(member));
            // From exactly the value before: survivors and the creator may do this side by side, and what is further
            // behind than honest members let it fall has lost its beginning.
            owed.for_each(|(value, _)| word.advance(value.wrapping_sub(1), value));
        }
    }

    /// Whether `member` has a permit or a place, or is to signal something.
    pub(super) fn has(&self, member: u32) -> bool {
        let waits = |state: u64| phase_of(state) != FREE && member_of(state) == member;
        (0..PLACES).any(|place| waits(self.place_state(place).load(SeqCst)))
            || (0..self.permits).any(|permit| self.owner(permit).load(SeqCst) == u64::from(member))
            || self.owes(member)
    }

    /// Whether `member` is to signal something.
    pub(super) fn owes(&self, member: u32) -> bool {
        (0..self.permits).any(|permit| self.under_way(permit).any(|(_, signaller)| signaller == member))
    }
}
