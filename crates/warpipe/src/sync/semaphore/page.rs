//! The shared words of a semaphore, and the operations on them. `docs/design/protocol.md`
//! draws them byte by byte, and lists what a wrong member can do.
//!
//! A permit's owner word is 0 if it is free, else a member's number. One exception: a *wait slot*
//! in phase [`GRANTED`] names the permit that is granted to it, and from that compare-and-swap on
//! the permit is the waiter's. Wherever a process dies, the permit is free or a dead member's, and
//! [`SemaphorePage::sweep`] tells these apart. While members wait, free permits go to the oldest
//! ticket alone. No waiter is lost ([`SemaphorePage::match_waiters`]). All members can write all of
//! this page: numbers are checked before they are used as addresses, and every loop has a bound.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::time::Duration;

use crate::atomic::{self, AtomicU32, AtomicU64};
use crate::backend::{DevicePtr, TimelineWord};
use crate::shm::page::{PAGE_BYTES, SharedPage};

/// The most permits.
pub(super) const PERMITS_MAX: u32 = 1024;

/// The most threads that can wait in order.
pub(super) const WAIT_SLOTS: u32 = 256;

/// The most pieces of work of one permit that may be in progress on devices. Its holders' streams
/// wait for each other, and each one's signaller is recorded.
pub(super) const IN_FLIGHT_MAX: u64 = 8;

/// The creator's number. Other members are counted from 1.
pub(super) const CREATOR: u32 = u32::MAX;

/// Attempts to match a permit and a waiter before the next caller takes over. Each attempt fails
/// only because another member has just succeeded; honest members do not come near the limit.
const ATTEMPTS: u32 = 512;

const TICKETS: usize = 0;
const HANDED: usize = 8;
const BITS: usize = 64;
const WAIT_SLOTS_AT: usize = PAGE_BYTES;
const WAIT_SLOT_BYTES: usize = 64;
const PERMITS_AT: usize = WAIT_SLOTS_AT + WAIT_SLOTS as usize * WAIT_SLOT_BYTES;
const PERMIT_BYTES: usize = 64;

/// Offsets in a wait slot.
const STATE: usize = 0;
const TICKET: usize = 8;
const FUTEX: usize = 16;

/// Offsets in a permit.
const OWNER: usize = 0;
const PROMISED: usize = 8;
const WORD: usize = 16;
const SIGNALLERS: usize = 32;

const _: () = assert!(SIGNALLERS + IN_FLIGHT_MAX as usize * size_of::<u32>() == PERMIT_BYTES);
const _: () = assert!(
    WORD.is_multiple_of(align_of::<TimelineWord>()) && PERMITS_AT.is_multiple_of(PERMIT_BYTES)
);
const _: () =
    assert!(BITS + WAIT_SLOTS as usize / 8 <= PAGE_BYTES && PERMITS_MAX - 1 == STATE_PERMIT as u32);

/// Phases of a wait slot, the low bits of its state.
const FREE: u64 = 0;
const CLAIMED: u64 = 1;
const WAITING: u64 = 2;
const GRANTED: u64 = 3;

const STATE_PERMIT: u64 = 0x3ff;
const STATE_COUNT: u64 = 0xf_ffff;

/// A wait slot's state in one word, so that it changes in one step.
fn state(member: u32, phase: u64, permit: u32, count: u64) -> u64 {
    u64::from(member) << 32
        | (count & STATE_COUNT) << 12
        | (u64::from(permit) & STATE_PERMIT) << 2
        | phase
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

/// Bytes of the page for this many permits.
pub(super) fn bytes_for(permits: u32) -> usize {
    (PERMITS_AT + permits as usize * PERMIT_BYTES).next_multiple_of(PAGE_BYTES)
}

/// A wait slot that this member has.
#[derive(Debug, Clone, Copy)]
pub(super) struct WaitSlot {
    pub(super) index: u32,
    /// The number of grants at the start of the wait.
    pub(super) handed: u64,
}

/// The progress of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitProgress {
    Waiting,
    /// The waiter has this permit; `passed` permits went to others meanwhile.
    Granted {
        permit: u32,
        passed: u64,
    },
    /// The wait slot is not the waiter's any more, which no honest member causes.
    Lost,
}

/// The mapped page of one semaphore.
#[derive(Debug)]
pub(super) struct SemaphorePage {
    page: SharedPage,
    permits: u32,
}

impl SemaphorePage {
    /// # Panics
    /// If the page does not have the length for this many permits.
    pub(super) fn new(page: SharedPage, permits: u32) -> SemaphorePage {
        assert!((1..=PERMITS_MAX).contains(&permits) && page.bytes() >= bytes_for(permits));
        SemaphorePage { page, permits }
    }

    pub(super) fn permits(&self) -> u32 {
        self.permits
    }

    #[cfg(test)]
    pub(super) fn first_word(&self) -> &AtomicU64 {
        self.page.at(0)
    }

    /// How often a waiter has been woken.
    #[cfg(test)]
    pub(super) fn wake_ups(&self, slot: WaitSlot) -> u32 {
        self.in_slot::<AtomicU32>(slot.index, FUTEX).load(SeqCst)
    }

    /// Does what a member does that dies between the grant and the wake-up.
    #[cfg(test)]
    pub(super) fn grant_without_wake_up(&self, permit: u32) {
        let (slot, seen) = self.oldest().unwrap();
        let granted = state(member_of(seen), GRANTED, permit, 0);
        self.slot_state(slot).store(granted, SeqCst);
    }

    /// Writes one value everywhere.
    #[cfg(test)]
    pub(super) fn scribble(&self, value: u64) {
        (0..self.page.bytes() / 8)
            .for_each(|index| self.page.at::<AtomicU64>(8 * index).store(value, SeqCst));
    }

    fn bits(&self, group: u32) -> &AtomicU64 {
        self.page.at(BITS + 8 * group as usize)
    }

    fn in_slot<T: crate::shm::page::AtomicsOnly>(&self, slot: u32, field: usize) -> &T {
        assert!(slot < WAIT_SLOTS);
        self.page
            .at(WAIT_SLOTS_AT + slot as usize * WAIT_SLOT_BYTES + field)
    }

    fn slot_state(&self, slot: u32) -> &AtomicU64 {
        self.in_slot(slot, STATE)
    }

    fn in_permit(&self, permit: u32, field: usize) -> usize {
        assert!(permit < self.permits);
        PERMITS_AT + permit as usize * PERMIT_BYTES + field
    }

    fn owner(&self, permit: u32) -> &AtomicU64 {
        self.page.at(self.in_permit(permit, OWNER))
    }

    /// The word by which devices order the permit's work.
    pub(super) fn word(&self, permit: u32) -> &TimelineWord {
        self.page.at(self.in_permit(permit, WORD))
    }

    /// The same word's address for a device.
    pub(super) fn device_word(&self, permit: u32) -> Option<DevicePtr> {
        self.page.device_ptr(self.in_permit(permit, WORD))
    }

    fn signaller(&self, permit: u32, value: u64) -> &AtomicU32 {
        let at = (value % IN_FLIGHT_MAX) as usize * size_of::<u32>();
        self.page.at(self.in_permit(permit, SIGNALLERS + at))
    }

    fn promised(&self, permit: u32) -> &AtomicU64 {
        self.page.at(self.in_permit(permit, PROMISED))
    }

    /// The value of the permit's word when all its earlier holders' work is done.
    pub(super) fn due(&self, permit: u32) -> u64 {
        self.promised(permit).load(Acquire)
    }

    /// Promises that `me`, which has the permit, will signal the returned value. Call it before the
    /// signal is enqueued, and while the word is less than [`IN_FLIGHT_MAX`] behind. One store
    /// makes the promise: a member that dies before it has promised nothing.
    pub(super) fn promise(&self, permit: u32, me: u32) -> u64 {
        let value = self.due(permit).wrapping_add(1);
        self.signaller(permit, value).store(me, SeqCst);
        self.promised(permit).store(value, SeqCst);
        value
    }

    /// Takes back the last promise. The caller still has the permit and no stream signals it. A
    /// member that dies before this leaves a promise that is completed for it.
    pub(super) fn take_back(&self, permit: u32) {
        let value = self.due(permit).wrapping_sub(1);
        self.promised(permit).store(value, SeqCst);
    }

    /// The signallers of the values that the permit's word has not reached yet, oldest first.
    pub(super) fn in_flight(&self, permit: u32) -> impl Iterator<Item = (u64, u32)> + '_ {
        let (reached, due) = (self.word(permit).load(), self.due(permit));
        let count = if due.wrapping_sub(reached) as i64 > 0 {
            due.wrapping_sub(reached).min(IN_FLIGHT_MAX)
        } else {
            0
        };
        let values = (0..count).map(move |back| due.wrapping_sub(count - 1 - back));
        values.map(move |value| (value, self.signaller(permit, value).load(SeqCst)))
    }

    /// Whether any member waits, or is about to leave.
    pub(super) fn has_waiters(&self) -> bool {
        (0..WAIT_SLOTS / 64).any(|group| self.bits(group).load(SeqCst) != 0)
    }

    /// Whether at most one member waits.
    pub(super) fn is_first_in_line(&self) -> bool {
        (0..WAIT_SLOTS / 64)
            .map(|group| self.bits(group).load(SeqCst).count_ones())
            .sum::<u32>()
            <= 1
    }

    /// The number of waiters, for diagnostics.
    pub(super) fn waiting(&self) -> u32 {
        self.visible_slots()
            .filter(|&slot| phase_of(self.slot_state(slot).load(Relaxed)) == WAITING)
            .count() as u32
    }

    /// The number of free permits, for diagnostics.
    pub(super) fn available(&self) -> u32 {
        (0..self.permits)
            .filter(|&permit| self.owner(permit).load(Relaxed) == 0)
            .count() as u32
    }

    fn visible_slots(&self) -> impl Iterator<Item = u32> + '_ {
        (0..WAIT_SLOTS / 64).flat_map(move |group| {
            let mut bits = self.bits(group).load(SeqCst);
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros())?;
                bits &= bits - 1;
                Some(64 * group + bit)
            })
        })
    }

    /// Takes a free permit, searched from `first` on, whether or not members wait. A permit
    /// after its device work is done comes before one that would make a stream wait.
    pub(super) fn take_free(&self, me: u32, first: u32) -> Option<u32> {
        self.take_free_of(me, first, |_| true)
    }

    /// Like [`take_free`](Self::take_free), among the permits that `may` accepts.
    pub(super) fn take_free_of(
        &self,
        me: u32,
        first: u32,
        may: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let all = || (0..self.permits).map(|step| (first % self.permits + step) % self.permits);
        let in_turn = || all().filter(|&permit| may(permit));
        let is_done = |&permit: &u32| self.word(permit).reached(self.due(permit));
        let idle = in_turn()
            .filter(is_done)
            .find(|&permit| self.take(permit, me));
        idle.or_else(|| in_turn().find(|&permit| self.take(permit, me)))
    }

    fn take(&self, permit: u32, me: u32) -> bool {
        let owner = self.owner(permit);
        owner.load(SeqCst) == 0 && owner.compare_exchange(0, me.into(), SeqCst, SeqCst).is_ok()
    }

    /// The oldest waiter.
    fn oldest(&self) -> Option<(u32, u64)> {
        let waiting = |slot| {
            let state = self.slot_state(slot).load(SeqCst);
            (phase_of(state) == WAITING).then(|| {
                (
                    self.in_slot::<AtomicU64>(slot, TICKET).load(SeqCst),
                    slot,
                    state,
                )
            })
        };
        self.visible_slots()
            .filter_map(waiting)
            .min()
            .map(|(_, slot, state)| (slot, state))
    }

    /// Grants a permit that `me` has to the oldest waiter, or frees it.
    pub(super) fn hand_on(&self, permit: u32, me: u32) {
        for _ in 0..ATTEMPTS {
            match self.oldest() {
                Some((slot, seen)) => {
                    if self.grant(permit, slot, seen) {
                        return;
                    }
                }
                None => {
                    self.owner(permit).store(0, SeqCst);
                    // A member that began to wait since the check may have looked before this
                    // store.
                    if self.oldest().is_none() || !self.take(permit, me) {
                        return;
                    }
                }
            }
        }
        self.owner(permit).store(0, SeqCst);
    }

    fn grant(&self, permit: u32, slot: u32, seen: u64) -> bool {
        let handed = self.page.at::<AtomicU64>(HANDED);
        let granted = state(member_of(seen), GRANTED, permit, handed.load(SeqCst));
        let is_ours = self
            .slot_state(slot)
            .compare_exchange(seen, granted, SeqCst, SeqCst)
            .is_ok();
        if is_ours {
            handed.fetch_add(1, SeqCst);
            self.ring(slot);
        }
        is_ours
    }

    /// Matches free permits and waiters, so that no waiter is lost: a release looks for a waiter,
    /// stores 0, and looks again; a waiter becomes visible and then looks for a free permit. All of
    /// these are `SeqCst`, so one of the two sees the other. The creator's [`sweep`](Self::sweep)
    /// wakes a waiter if its granter died before the wake-up.
    pub(super) fn match_waiters(&self, me: u32) {
        for _ in 0..ATTEMPTS {
            if self.oldest().is_none() {
                return;
            }
            let Some(permit) = self.take_free(me, 0) else {
                return;
            };
            self.hand_on(permit, me);
        }
    }

    /// Starts a wait; `None` if all wait slots are taken.
    pub(super) fn begin_wait(&self, me: u32) -> Option<WaitSlot> {
        let claim = |&slot: &u32| {
            let word = self.slot_state(slot);
            word.load(SeqCst) == FREE
                && word
                    .compare_exchange(FREE, state(me, CLAIMED, 0, 0), SeqCst, SeqCst)
                    .is_ok()
        };
        let index = (0..WAIT_SLOTS).find(claim)?;
        let ticket = self.page.at::<AtomicU64>(TICKETS).fetch_add(1, SeqCst);
        self.in_slot::<AtomicU64>(index, TICKET)
            .store(ticket, SeqCst);
        self.slot_state(index)
            .store(state(me, WAITING, 0, 0), SeqCst);
        // Visible from here on.
        self.bits(index / 64).fetch_or(1 << (index % 64), SeqCst);
        Some(WaitSlot {
            index,
            handed: self.page.at::<AtomicU64>(HANDED).load(SeqCst),
        })
    }

    /// The progress of the wait. A granted permit is taken over, and the wait slot is freed.
    pub(super) fn check_wait(&self, slot: WaitSlot, me: u32) -> WaitProgress {
        let seen = self.slot_state(slot.index).load(SeqCst);
        match phase_of(seen) {
            _ if member_of(seen) != me => WaitProgress::Lost,
            WAITING => WaitProgress::Waiting,
            GRANTED if permit_of(seen) < self.permits => {
                let permit = permit_of(seen);
                self.owner(permit).store(me.into(), SeqCst);
                self.free_slot(slot.index);
                WaitProgress::Granted {
                    permit,
                    passed: (seen >> 12).wrapping_sub(slot.handed) & STATE_COUNT,
                }
            }
            _ => {
                self.free_slot(slot.index);
                WaitProgress::Lost
            }
        }
    }

    /// Ends the wait, unless a permit has been granted meanwhile.
    pub(super) fn cancel_wait(&self, slot: WaitSlot, me: u32) -> WaitProgress {
        let (waiting, claimed) = (state(me, WAITING, 0, 0), state(me, CLAIMED, 0, 0));
        if self
            .slot_state(slot.index)
            .compare_exchange(waiting, claimed, SeqCst, SeqCst)
            .is_err()
        {
            return self.check_wait(slot, me);
        }
        self.free_slot(slot.index);
        WaitProgress::Waiting
    }

    /// Hides the slot, then frees it: a visible wait slot is never free.
    fn free_slot(&self, slot: u32) {
        self.bits(slot / 64).fetch_and(!(1 << (slot % 64)), SeqCst);
        self.slot_state(slot).store(FREE, SeqCst);
    }

    fn ring(&self, slot: u32) {
        let futex = self.in_slot::<AtomicU32>(slot, FUTEX);
        futex.fetch_add(1, SeqCst);
        atomic::wake(futex);
    }

    /// Wakes all threads that wait for `me`, so that they check this process's state.
    pub(super) fn wake_member(&self, me: u32) {
        self.visible_slots()
            .filter(|&slot| member_of(self.slot_state(slot).load(SeqCst)) == me)
            .for_each(|p| self.ring(p));
    }

    /// Sleeps until the wait slot is woken, or `limit` has passed. `is_due` is called after the
    /// futex word has been read, so no wake-up is lost.
    pub(super) fn sleep(&self, slot: WaitSlot, limit: Duration, is_due: impl FnOnce() -> bool) {
        let futex = self.in_slot::<AtomicU32>(slot.index, FUTEX);
        let seen = futex.load(SeqCst);
        if is_due() || phase_of(self.slot_state(slot.index).load(SeqCst)) != WAITING {
            return;
        }
        atomic::wait(futex, seen, limit);
    }

    /// Takes back permits and wait slots of absent members. Only the creator calls it, on one
    /// thread at a time.
    pub(super) fn sweep(&self, is_present: impl Fn(u32) -> bool) {
        (0..WAIT_SLOTS).for_each(|slot| self.sweep_slot(slot, &is_present));
        for permit in 0..self.permits {
            let owner = self.owner(permit).load(SeqCst);
            let is_ownerless = owner != 0 && !u32::try_from(owner).is_ok_and(&is_present);
            // A dead member granted it before its death, and the waiter has not taken it over yet:
            // it is the waiter's.
            if is_ownerless
                && !self.is_granted(permit)
                && self
                    .owner(permit)
                    .compare_exchange(owner, CREATOR.into(), SeqCst, SeqCst)
                    .is_ok()
            {
                self.hand_on(permit, CREATOR);
            }
        }
        self.complete_dead_signals(|member| !is_present(member));
        self.match_waiters(CREATOR);
    }

    /// Takes back the wait slot of an absent member, and wakes a present one that has a permit.
    fn sweep_slot(&self, slot: u32, is_present: &impl Fn(u32) -> bool) {
        let (word, ours) = (self.slot_state(slot), state(CREATOR, CLAIMED, 0, 0));
        // Twice: an exchange fails if the wait has just been granted, and the second takes that
        // back.
        for _ in 0..2 {
            let seen = word.load(SeqCst);
            if phase_of(seen) == FREE {
                return;
            }
            if is_present(member_of(seen)) {
                // Its granter may have died before the wake-up.
                if phase_of(seen) == GRANTED {
                    self.ring(slot);
                }
                return;
            }
            if word.compare_exchange(seen, ours, SeqCst, SeqCst).is_ok() {
                return self.reclaim_slot(slot, seen);
            }
        }
    }

    /// Frees a dead waiter's wait slot, which the creator holds by now, and hands on its granted
    /// permit.
    fn reclaim_slot(&self, slot: u32, seen: u64) {
        let permit = permit_of(seen);
        let is_granted = phase_of(seen) == GRANTED && permit < self.permits;
        if is_granted {
            self.owner(permit).store(CREATOR.into(), SeqCst);
        }
        self.free_slot(slot);
        if is_granted {
            self.hand_on(permit, CREATOR);
        }
    }

    fn is_granted(&self, permit: u32) -> bool {
        self.visible_slots()
            .map(|slot| self.slot_state(slot).load(SeqCst))
            .any(|seen| phase_of(seen) == GRANTED && permit_of(seen) == permit)
    }

    /// Stores the values that dead members owe, each once the previous value has been reached.
    /// Living members signal their own values and hold up later ones, so this is called again while
    /// a dead member owes a value.
    pub(super) fn complete_dead_signals(&self, is_dead: impl Fn(u32) -> bool) {
        for permit in 0..self.permits {
            let word = self.word(permit);
            let owed = self
                .in_flight(permit)
                .take_while(|&(_, member)| is_dead(member));
            // Only from exactly the previous value: survivors and the creator may do this at the
            // same time. A word that is further behind than honest members allow is corrupt.
            owed.for_each(|(value, _)| word.advance(value.wrapping_sub(1), value));
        }
    }

    /// Whether `member` has a permit or a wait slot, or owes a signal.
    pub(super) fn holds(&self, member: u32) -> bool {
        let waits = |state: u64| phase_of(state) != FREE && member_of(state) == member;
        (0..WAIT_SLOTS).any(|slot| waits(self.slot_state(slot).load(SeqCst)))
            || (0..self.permits).any(|permit| self.owner(permit).load(SeqCst) == u64::from(member))
            || self.owes_signal(member)
    }

    /// Whether `member` owes a signal.
    pub(super) fn owes_signal(&self, member: u32) -> bool {
        (0..self.permits).any(|permit| {
            self.in_flight(permit)
                .any(|(_, signaller)| signaller == member)
        })
    }
}
