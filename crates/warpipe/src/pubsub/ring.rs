//! The ring of a link: the state of each entry ([`state_word`]).
//!
//! The sender publishes; a compare-and-swap out of PUBLISHED decides, once, whether the receiver
//! has the sample (TAKEN) or the sender has it back (REVOKED). A sample that is held long does not
//! stop the ring: the sender skips its entry and marks it SKIPPED. All other stores have one writer
//! at a time: only the sender writes `state_word` of an entry that is free or taken. The words are
//! untrusted: a peer can write all of them. `docs/design/protocol.md` draws the bytes;
//! `verify/src/models/ring.rs` and `tests/hostile/ring_model.rs` check the ring.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};

use crate::atomic::{self, fence};
use crate::pubsub::entry::{PackedEntry, UntrustedEntry, Violation, violation};
use crate::shm::segment::Segment;

const PUBLISHED: u64 = 0;
const TAKEN: u64 = 1;
const REVOKED: u64 = 2;
const SKIPPED: u64 = 3;

/// The word of an entry. Positions count a link's samples from 1; position `p` falls on entry
/// `p % depth`.
///
/// ```text
///            sender                  receiver
///   (free) ────────▶ PUBLISHED(p) ─────CAS─────▶ TAKEN(p) ──▶ `released` reaches p: free
///                        │ sender, CAS
///                        └──────────▶ REVOKED(p): free
///   TAKEN(q), not released ──sender──▶ SKIPPED(p): stays the receiver's until `released` reaches q
/// ```
fn state_word(position: u64, state: u64) -> u64 {
    position << 2 | state
}

/// The sender's record of one entry.
#[derive(Debug, Clone, Copy, Default)]
struct Sent {
    /// The position last published here; 0 for none.
    position: u64,
    /// The sender has taken it back, or has published nothing there ([`forgo`](SenderRing::forgo)).
    revoked: bool,
}

/// The sender's end.
#[derive(Debug)]
pub(crate) struct SenderRing {
    segment: Arc<Segment>,
    next: u64,
    sent: Vec<Sent>,
    /// No receiver reads any more: a sample that the receiver held is over once its own data is
    /// complete.
    receiver_dead: bool,
    /// Every signal for this link is proven to have been executed.
    signals_done: bool,
}

impl SenderRing {
    pub(crate) fn new(segment: Arc<Segment>) -> SenderRing {
        let depth = segment.depth() as usize;
        SenderRing {
            segment,
            next: 1,
            sent: vec![Sent::default(); depth],
            receiver_dead: false,
            signals_done: false,
        }
    }

    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Whether the sample at `position` is over: complete, and released or taken back. (Until the
    /// sender's stream has written a position's `ready`, a later position's could be overwritten by
    /// it, and the slot is still being filled.) A peer that overwrites `ready` keeps its entry
    /// until its death is proven.
    #[inline]
    pub(crate) fn is_over(&self, position: u64) -> bool {
        let sent = self.sent[self.segment.index(position) as usize];
        let entry = self.segment.entry(position);
        sent.position != position
            || (self.receiver_dead && self.signals_done)
            || ((sent.revoked || self.receiver_dead || entry.released.reached(position))
                && entry.ready.is(position))
    }

    /// The position that was published last in the entry of `position`; 0 for none.
    pub(crate) fn last_at(&self, position: u64) -> u64 {
        self.sent[self.segment.index(position) as usize].position
    }

    /// Whether the receiver keeps the slot of a sample that is over: see [`set_aside`].
    pub(crate) fn is_set_aside(&self, position: u64) -> bool {
        let entry = self.segment.entry(position);
        !self.receiver_dead && entry.set_aside.load(Acquire) == position
    }

    /// The receiver is *proven* dead. (Suspicion is not enough: its device may still be reading the
    /// slot.)
    pub(crate) fn mark_receiver_dead(&mut self) {
        self.receiver_dead = true;
    }

    pub(crate) fn is_receiver_dead(&self) -> bool {
        self.receiver_dead
    }

    /// Every signal enqueued for this link is proven to have been executed, whatever values its
    /// words have.
    pub(crate) fn mark_signals_done(&mut self) {
        self.signals_done = true;
    }

    /// The free position where the next sample can go. `None` if the first entry that the receiver
    /// does not hold has a sample that it has not taken, or if it holds all entries.
    #[inline]
    pub(crate) fn space(&self) -> Option<u64> {
        for position in self.next..self.next + u64::from(self.segment.depth()) {
            let last = self.sent[self.segment.index(position) as usize].position;
            if last == 0 || self.is_over(last) {
                return Some(position);
            }
            if self.segment.entry(position).state_word.load(Acquire) == state_word(last, PUBLISHED)
            {
                return None;
            }
        }
        None
    }

    /// Publishes at a position that [`space`](Self::space) gave just now. `is_complete`: the data
    /// is complete, and no stream is going to say so. Returns whether the receiver sleeps.
    #[inline]
    pub(crate) fn publish(
        &mut self,
        position: u64,
        packed: &PackedEntry,
        is_complete: bool,
    ) -> bool {
        self.fill(position, packed, is_complete);
        // Pairs with the fence in `ReceiverRing::fall_asleep`: in the one order of this exchange,
        // that fence and the look at `asleep`, either this end sees the sleeper, or the sleeper
        // sees the sample. An exchange is cheaper than a store and a fence; the old value is not
        // used.
        self.segment
            .entry(position)
            .state_word
            .swap(state_word(position, PUBLISHED), SeqCst);
        self.record_published(position);
        self.is_receiver_asleep()
    }

    /// [`publish`](Self::publish) for one of several receivers: [`fence_published`] follows once
    /// for all of them, and then a look at each one's
    /// [`is_receiver_asleep`](Self::is_receiver_asleep).
    #[inline]
    pub(crate) fn publish_to_one_of_many(
        &mut self,
        position: u64,
        packed: &PackedEntry,
        is_complete: bool,
    ) {
        self.fill(position, packed, is_complete);
        self.segment
            .entry(position)
            .state_word
            .store(state_word(position, PUBLISHED), Release);
        self.record_published(position);
    }

    /// Whether the receiver sleeps, behind what was published to it.
    #[inline]
    pub(crate) fn is_receiver_asleep(&self) -> bool {
        self.segment.header().receiver.asleep.load(SeqCst) != 0
    }

    #[inline]
    fn fill(&mut self, position: u64, packed: &PackedEntry, is_complete: bool) {
        self.step_over(position);
        let entry = self.segment.entry(position);
        packed.write(entry);
        if is_complete {
            // Here, beside the other words of its cache line: a receiver that polls takes the line
            // away between two stores that are far apart.
            entry.ready.store(position);
        }
    }

    #[inline]
    fn record_published(&mut self, position: u64) {
        self.sent[self.segment.index(position) as usize] = Sent {
            position,
            revoked: false,
        };
        self.next = position + 1;
    }

    /// Gives up a position that [`space`](Self::space) gave and with its `ready` enqueued, because
    /// nothing is published there any more. The sample that lay in that entry before is over.
    pub(crate) fn forgo(&mut self, position: u64) {
        self.sent[self.segment.index(position) as usize] = Sent {
            position,
            revoked: true,
        };
    }

    fn step_over(&mut self, position: u64) {
        for skipped in self.next..position {
            self.segment
                .entry(skipped)
                .state_word
                .store(state_word(skipped, SKIPPED), Release);
        }
        self.next = self.next.max(position);
    }

    /// Takes the oldest sample back that the receiver has not taken, if its data is complete: an
    /// incomplete one would not make room yet. Returns its position.
    pub(crate) fn revoke_oldest_complete(&mut self) -> Option<u64> {
        let lap = self.lap();
        lap.into_iter().find(|&position| {
            self.segment.entry(position).ready.reached(position) && self.revoke(position)
        })
    }

    /// The positions that may still lie in the ring, oldest first.
    fn lap(&self) -> std::ops::Range<u64> {
        self.next
            .saturating_sub(u64::from(self.segment.depth()))
            .max(1)..self.next
    }

    fn revoke(&mut self, position: u64) -> bool {
        let sent = &mut self.sent[self.segment.index(position) as usize];
        if sent.position != position || sent.revoked {
            return false;
        }
        let from = state_word(position, PUBLISHED);
        let to = state_word(position, REVOKED);
        sent.revoked = self
            .segment
            .entry(position)
            .state_word
            .compare_exchange(from, to, AcqRel, Acquire)
            .is_ok();
        sent.revoked
    }

    /// Takes back everything that the receiver has not taken. Returns the positions.
    pub(crate) fn revoke_all(&mut self) -> Vec<u64> {
        self.lap()
            .filter(|&position| self.revoke(position))
            .collect()
    }
}

/// Comes between [publishing](SenderRing::publish_to_one_of_many) to several receivers and the
/// looks whether they sleep: one fence is cheaper than an exchange for each. Pairs with the fence
/// in [`ReceiverRing::fall_asleep`]: in the one order of the two, either the sender sees the
/// sleeper, or the sleeper sees the sample.
#[inline]
pub(crate) fn fence_published() {
    atomic::fence(SeqCst);
}

/// Tells the reader of `position` that the data will not be complete. The sample is not taken back
/// even where that is still possible: its sequence number is spent, and a reader that may miss none
/// would see a gap. The reader's stream is released by `ready`, which must be stored only when
/// nothing writes the slot any more.
pub(crate) fn give_up(segment: &Segment, position: u64) {
    let (entry, lap) = (segment.entry(position), lap_of(segment, position));
    // A reader that sees `aborted` sees at least these laps.
    let laps = GivenUpLaps(entry.given_up.load(Acquire)).with(lap);
    entry.given_up.store(laps.0, Release);
    entry.aborted.store(position, Release);
}

/// Whether the sender has given up the sample at `position`, with a `ready` that was found reached
/// before, even if its entry has been used again since then. If the record no longer reaches back
/// to that lap, and the entry has had a sample given up since, the sample counts as given up.
#[inline]
pub(crate) fn was_given_up(segment: &Segment, position: u64) -> bool {
    let last = segment.entry(position).aborted.load(Acquire);
    last >= position && (last == position || was_given_up_before(segment, position, last))
}

#[cold]
fn was_given_up_before(segment: &Segment, position: u64, last: u64) -> bool {
    let (lap, last) = (lap_of(segment, position), lap_of(segment, last));
    last - lap >= LAPS_KNOWN || GivenUpLaps(segment.entry(position).given_up.load(Acquire)).has(lap)
}

/// How often an entry was used before `position` fell on it.
fn lap_of(segment: &Segment, position: u64) -> u64 {
    position / u64::from(segment.depth())
}

/// How many laps a [`GivenUpLaps`] reaches back.
const LAPS_KNOWN: u64 = 32;

/// Which laps of an entry were given up. The high 32 bits are the low half of the last such lap's
/// number. The low 32 bits have one bit for each of the laps that end with it, that lap's lowest.
/// One word, so that a reader sees both halves of the same time.
#[derive(Debug, Clone, Copy)]
struct GivenUpLaps(u64);

impl GivenUpLaps {
    fn with(self, lap: u64) -> GivenUpLaps {
        let (lap, passed) = (lap as u32, (lap as u32).wrapping_sub((self.0 >> 32) as u32));
        let before = (self.0 as u32).checked_shl(passed).unwrap_or(0);
        GivenUpLaps(u64::from(lap) << 32 | u64::from(before | 1))
    }

    /// Nothing is known of a lap that is too far back, and it counts as given up.
    fn has(self, lap: u64) -> bool {
        let back = ((self.0 >> 32) as u32).wrapping_sub(lap as u32);
        (self.0 as u32)
            .checked_shr(back)
            .is_none_or(|laps| laps & 1 == 1)
    }
}

/// The receiver keeps the sample at `position`, with data that is complete, longer than its entry:
/// the entry is free from here on, and the slot is returned by a message.
pub(crate) fn set_aside(segment: &Segment, position: u64) {
    let entry = segment.entry(position);
    // A sender that sees the release sees this.
    entry.set_aside.store(position, Release);
    entry.released.store(position);
}

/// The receiver's end.
#[derive(Debug)]
pub(crate) struct ReceiverRing {
    segment: Arc<Segment>,
    cursor: u64,
    /// The copy of the description in the entry read last: unchecked.
    copy: UntrustedEntry,
}

impl ReceiverRing {
    pub(crate) fn new(segment: Arc<Segment>) -> ReceiverRing {
        ReceiverRing {
            segment,
            cursor: 1,
            copy: UntrustedEntry::default(),
        }
    }

    /// Whether the entry at the cursor may hold a sample, or the sender has passed the cursor.
    /// Cheap, for a reader that polls.
    #[inline]
    pub(crate) fn may_have_news(&self) -> bool {
        self.segment.entry(self.cursor).state_word.load(Acquire) >> 2 >= self.cursor
    }

    /// Takes the next sample, if there is one and `is_there` says that its region has arrived, and
    /// the page of its metadata: it is given the copy of the entry, and the position.
    /// The entry at the returned position belongs to the receiver then, and [`copy`](Self::copy) is
    /// its unchecked description.
    #[inline]
    pub(crate) fn take(
        &mut self,
        mut is_there: impl FnMut((&mut UntrustedEntry, u64)) -> bool,
    ) -> Result<Option<u64>, Violation> {
        let depth = u64::from(self.segment.depth());
        // Each round moves the cursor or returns; two laps of moves mean that the sender overtakes
        // this end faster than it follows, and the next call continues from there.
        for _ in 0..2 * depth + 2 {
            let entry = self.segment.entry(self.cursor);
            let now = entry.state_word.load(Acquire);
            let (position, state) = (now >> 2, now & 3);
            if position < self.cursor {
                return Ok(None);
            }
            if position > self.cursor {
                self.jump(position, depth)?;
                continue;
            }
            match state {
                SKIPPED | REVOKED => self.cursor += 1,
                PUBLISHED => {
                    // The entry is copied before it is taken, because an entry must stay in
                    // the ring until its region has arrived. A state word never has the same value
                    // twice, so if the exchange succeeds, the sender has not touched the entry
                    // since `now` was read and the copy is of one piece.
                    self.copy.copy(entry);
                    if !is_there((&mut self.copy, position)) {
                        return Ok(None);
                    }
                    if entry
                        .state_word
                        .compare_exchange(now, state_word(position, TAKEN), AcqRel, Acquire)
                        .is_ok()
                    {
                        self.cursor += 1;
                        return Ok(Some(position));
                    }
                }
                _ => {
                    let found = format!("taken at {position}");
                    let allowed = "published, revoked or skipped";
                    return Err(violation("state", found, allowed));
                }
            }
        }
        Ok(None)
    }

    /// The unchecked description in the entry that was taken last.
    pub(crate) fn copy(&mut self) -> &mut UntrustedEntry {
        &mut self.copy
    }

    /// The sender has overtaken the cursor: moves it to the oldest position that can still be in
    /// the ring.
    fn jump(&mut self, position: u64, depth: u64) -> Result<(), Violation> {
        if !(position - self.cursor).is_multiple_of(depth) {
            let allowed = format!("{} and a multiple of {depth} more", self.cursor);
            return Err(violation("position", position, allowed));
        }
        self.cursor = (self.cursor + 1).max(position - depth + 1);
        Ok(())
    }

    /// Asks the sender to wake this end from now on. Check once more before sleeping.
    pub(crate) fn fall_asleep(&self) {
        self.segment.header().receiver.asleep.store(1, Release);
        fence(SeqCst);
    }

    pub(crate) fn wake_up(&self) {
        self.segment.header().receiver.asleep.store(0, Release);
    }
}
