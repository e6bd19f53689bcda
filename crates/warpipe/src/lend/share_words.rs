//! The words by which receivers claim shares, and a pool's blocks, without a message. Pure, over
//! pages of words.
//!
//! A share's *number* is unique for its server. Its low 16 bits are its *slot*, which no other
//! share has as long as it lasts. Each slot has
//!
//! * an *offer*, which only the owner writes: the number, or 0, and where the memory lies;
//! * a *state*, which every receiver writes: the number, with a *turn* in place of the slot. It is
//!   odd while a receiver has the share, and decides between receivers, no more. Blocks, which any
//!   number of receivers may have at a time, have none;
//! * in each receiver's page its *claim*, which only that receiver and the owner can write: the
//!   number with [`CLAIMED`] while the receiver may use the memory, the number once it has released
//!   it, the number with [`RETURNED`] if it has not used it.
//!
//! A receiver writes its claim before the state, and then looks at the offer and at the first word
//! of its page; the owner ends an offer, or closes a page, before it looks at claims. So a receiver
//! sees the end, or the owner sees the claim, whatever others write: memory is let go when its
//! offer has ended and no living receiver's page has a claim on it.

use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use super::{Offer, RETURNED};
use crate::atomic::{AtomicU64, fence};
use crate::backend::TimelineWord;
use crate::error::Result;
use crate::fork::CloseOnForkFd;
use crate::ipc::{decode, encode};
use crate::mutex::LockUnpoisoned;
use crate::runtime::closer::PeerFd;
use crate::shm::page::{SharedPage, words_bytes};

/// The most slots of a server. No share has the first one: its word in a receiver's page is
/// [`CLOSED`] once the owner looks at the page no more.
pub(crate) const SLOTS: u32 = 1 << 16;

/// The bits of a slot, or of a turn.
const SLOT_BITS: u64 = SLOTS as u64 - 1;

/// In a receiver's page: it has a claim on this share.
const CLAIMED: u64 = 1 << 61;

/// The first word of a receiver's page: it can claim nothing any more.
const CLOSED: u64 = 1;

/// The number, the length of what follows, and an [`Offer`] as postcard has it.
const OFFER_WORDS: usize = 32;
const OFFER_BYTES: usize = OFFER_WORDS * size_of::<AtomicU64>();

/// What all receivers of a server share.
#[derive(Debug)]
pub(crate) struct ShareWords {
    /// `None` where any number of receivers may have a share.
    states: Option<SharedPage>,
    offers: SharedPage,
    /// Held by the thread of this process that claims a share.
    claiming: Mutex<()>,
}

/// The slot of a share.
pub(crate) fn slot(number: u64) -> u32 {
    (number & SLOT_BITS) as u32
}

/// What the states and the pages of living receivers say of a share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Claims {
    /// A receiver may use it.
    pub(crate) is_held: bool,
    /// It is to end: a receiver has released it, or has, or had, it without holding it.
    pub(crate) is_over: bool,
}

/// Whether the receiver of this page may use a share. None has one without a slot, whatever its
/// first word says.
pub(crate) fn has_claim(page: &SharedPage, number: u64) -> bool {
    let slot = slot(number) as usize;
    slot != 0 && page.word(slot).is(number | CLAIMED)
}

/// Has the receiver of this page claim nothing any more.
pub(crate) fn close(page: &SharedPage) {
    page.word(0).store(CLOSED);
    fence(SeqCst);
}

/// Whether the receiver of this page can claim nothing any more.
pub(crate) fn is_closed(page: &SharedPage) -> bool {
    page.word(0).is(CLOSED)
}

impl ShareWords {
    /// Of an owner of shares that one receiver has at a time, with the descriptors for receivers.
    pub(crate) fn create() -> Result<(ShareWords, [CloseOnForkFd; 2])> {
        let (states, states_fd) = SharedPage::create(None, words_bytes(SLOTS as usize))?;
        let (words, offers_fd) = ShareWords::for_many(SLOTS)?;
        let states = Some(states);
        Ok((ShareWords { states, ..words }, [states_fd, offers_fd]))
    }

    /// Of an owner of shares, in so many slots, that any number of receivers may have.
    pub(crate) fn for_many(slots: u32) -> Result<(ShareWords, CloseOnForkFd)> {
        let (offers, offers_fd) = SharedPage::publish(None, slots as usize * OFFER_BYTES)?;
        let words = ShareWords {
            states: None,
            offers,
            claiming: Mutex::default(),
        };
        Ok((words, offers_fd))
    }

    /// Of a receiver, of an owner with so many slots.
    pub(crate) fn open(
        slots: u32,
        states: Option<PeerFd>,
        offers: PeerFd,
        name: &str,
    ) -> Result<ShareWords> {
        let slots = slots as usize;
        let states = states.map(|states| SharedPage::open(None, states, words_bytes(slots), name));
        Ok(ShareWords {
            states: states.transpose()?,
            offers: SharedPage::read(offers, slots * OFFER_BYTES, name)?,
            claiming: Mutex::default(),
        })
    }

    /// The state of a share that one receiver has at a time.
    pub(crate) fn state(&self, number: u64) -> &AtomicU64 {
        let states = self.states.as_ref().expect("receivers take turns");
        states.at(slot(number) as usize * size_of::<AtomicU64>())
    }

    pub(crate) fn offer_words(&self, number: u64) -> &[AtomicU64; OFFER_WORDS] {
        self.offers.at(slot(number) as usize * OFFER_BYTES)
    }

    fn is_offered(&self, number: u64) -> bool {
        self.offer_words(number)[0].load(SeqCst) == number
    }

    /// Offers a share, whose slot no claim names any more.
    pub(crate) fn offer(&self, number: u64, offer: &Offer) -> Result<()> {
        let bytes = encode(offer)?;
        let [live, length, words @ ..] = self.offer_words(number);
        let chunks = bytes.chunks(size_of::<u64>());
        assert!(
            chunks.len() <= words.len(),
            "an offer of {} bytes",
            bytes.len()
        );
        length.store(bytes.len() as u64, Relaxed);
        for (word, chunk) in words.iter().zip(chunks) {
            let mut value = [0; 8];
            value[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(value), Relaxed);
        }
        if self.states.is_some() {
            self.state(number).store(number & !SLOT_BITS, Release);
        }
        live.store(number, SeqCst);
        Ok(())
    }

    /// Ends an offer: a receiver that claims it from now on gives it back.
    pub(crate) fn end(&self, number: u64) {
        self.offer_words(number)[0].store(0, SeqCst);
        fence(SeqCst);
    }

    /// Ends an offer that no receiver has. False if one has it.
    pub(crate) fn withdraw(&self, number: u64) -> bool {
        let state = self.state(number);
        let found = state.load(Acquire);
        let is_free =
            is_free(found, number) && state.compare_exchange(found, 0, SeqCst, SeqCst).is_ok();
        if is_free {
            self.end(number);
        }
        is_free
    }

    /// The claims on a share in these pages.
    pub(crate) fn look<'a>(
        &self,
        pages: impl IntoIterator<Item = &'a SharedPage>,
        number: u64,
    ) -> Claims {
        let state = self.state(number);
        let before = state.load(SeqCst);
        let mut claims = Claims::default();
        for page in pages {
            let claim = page.word(slot(number) as usize).load();
            claims.is_held |= claim == number | CLAIMED;
            claims.is_over |= claim == number;
        }
        fence(SeqCst);
        // The receiver that has it wrote its claim before. A turn is not seen again.
        let is_taken = !is_free(before, number) && state.load(SeqCst) == before;
        claims.is_over |= is_taken && !claims.is_held;
        claims
    }

    /// Claims a share for the process of this page. `None` if it is gone, another thread of this
    /// process has it, or another process that it is the turn of.
    pub(crate) fn claim(
        &self,
        page: &SharedPage,
        number: u64,
        name: &str,
    ) -> Result<Option<Offer>> {
        let _claiming = self.claiming.locked();
        let is_slot = 1..page.words();
        if !is_slot.contains(&(slot(number) as usize))
            || !self.is_offered(number)
            || is_closed(page)
        {
            return Ok(None);
        }
        let claim = page.word(slot(number) as usize);
        // A share that one receiver has at a time is over when that has released it.
        if claim.is(number | CLAIMED) || self.states.is_some() && claim.is(number) {
            return Ok(None);
        }
        claim.store(number | CLAIMED);
        let is_mine = self.states.is_none() || self.takes_turn(number);
        fence(SeqCst);
        if !is_mine || !self.is_offered(number) || is_closed(page) {
            if is_mine {
                self.give_back(claim, number);
            } else {
                claim.store(number | RETURNED);
            }
            return Ok(None);
        }
        let offer = self.offer_of(number, name);
        if offer.is_err() {
            self.give_back(claim, number);
        }
        offer.map(Some)
    }

    fn takes_turn(&self, number: u64) -> bool {
        let state = self.state(number);
        let found = state.load(Acquire);
        is_free(found, number)
            && state
                .compare_exchange(found, found + 1, SeqCst, SeqCst)
                .is_ok()
    }

    fn offer_of(&self, number: u64, name: &str) -> Result<Offer> {
        let [_, length, words @ ..] = self.offer_words(number);
        let length = length.load(Relaxed) as usize;
        let bytes = words
            .iter()
            .flat_map(|word| word.load(Relaxed).to_le_bytes());
        let bytes: Vec<_> = bytes.take(length).collect();
        decode(&bytes, name)
    }

    /// Lets others claim a share that the process of this claim has not used.
    pub(crate) fn give_back(&self, claim: &TimelineWord, number: u64) {
        if self.states.is_some() {
            self.raise_turn(number);
        }
        claim.store(number | RETURNED);
    }

    fn raise_turn(&self, number: u64) {
        let state = self.state(number);
        let found = state.load(Acquire);
        if found & !SLOT_BITS == number & !SLOT_BITS && found & 1 == 1 {
            let next = found & !SLOT_BITS | (found + 1) & SLOT_BITS;
            let _ = state.compare_exchange(found, next, SeqCst, SeqCst);
        }
    }
}

/// Whether a state says that no receiver has the share.
fn is_free(state: u64, number: u64) -> bool {
    state & !SLOT_BITS == number & !SLOT_BITS && state & 1 == 0
}
