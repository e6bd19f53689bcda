//! The shares that one client has open, and the words by which it releases them. Pure, over a page
//! of words.

use std::sync::Arc;

use super::{CLAIMS_MAX, RETURNED, word_at};
use crate::backend::TimelineWord;
use crate::ipc::peer::{DeathEvidence, Process};
use crate::shm::page::SharedPage;

/// A client that has shares.
#[derive(Debug)]
pub(super) struct Claims<T> {
    pub(super) page: Arc<SharedPage>,
    open: Vec<Claim<T>>,
    unused: Vec<u32>,
    next_word: u32,
    values: u64,
    process: Arc<Process>,
    /// The client has closed gracefully. Its device may still work on what it has.
    pub(super) is_leaving: bool,
}

#[derive(Debug)]
struct Claim<T> {
    share: T,
    word: u32,
    value: u64,
}

/// The shares that a client has given up.
#[derive(Debug)]
pub(super) struct Ended<T> {
    /// It is done with them.
    pub(super) released: Vec<T>,
    /// It has not used them, and another client may open them.
    pub(super) returned: Vec<T>,
}

impl<T> Claims<T> {
    pub(super) fn new(page: SharedPage, process: Arc<Process>) -> Claims<T> {
        Claims {
            page: Arc::new(page),
            open: vec![],
            unused: vec![],
            next_word: 0,
            values: 0,
            process,
            is_leaving: false,
        }
    }

    /// Opens a share: its word, and the value that releases it. Gives the share back if all words
    /// are in use.
    pub(super) fn open(&mut self, share: T) -> Result<(u32, u64), T> {
        let word = match self.unused.pop() {
            Some(word) => word,
            None if self.next_word < CLAIMS_MAX => {
                self.next_word += 1;
                self.next_word - 1
            }
            None => return Err(share),
        };
        // One counter serves all words, so none has held this value before.
        self.values += 1;
        let value = self.values;
        self.open.push(Claim { share, word, value });
        Ok((word, value))
    }

    /// Undoes [`open`](Self::open) before the client learns of it.
    pub(super) fn take_back(&mut self, word: u32) -> Option<T> {
        let at = self.open.iter().position(|claim| claim.word == word)?;
        self.unused.push(word);
        Some(self.open.swap_remove(at).share)
    }

    /// What the client's words say has ended since the last call.
    pub(super) fn collect(&mut self) -> Ended<T> {
        let mut ended = Ended {
            released: vec![],
            returned: vec![],
        };
        let page = &self.page;
        // Exactly the value: an honest client stores it, and random writes hardly ever do.
        let holds =
            |claim: &Claim<T>, value| page.at::<TimelineWord>(word_at(claim.word)).is(value);
        let mut at = 0;
        while let Some(claim) = self.open.get(at) {
            let list = if holds(claim, claim.value) {
                &mut ended.released
            } else if holds(claim, claim.value | RETURNED) {
                &mut ended.returned
            } else {
                at += 1;
                continue;
            };
            let claim = self.open.swap_remove(at);
            self.unused.push(claim.word);
            list.push(claim.share);
        }
        ended
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn has_any(&self) -> bool {
        !self.open.is_empty()
    }

    pub(super) fn shares(&self) -> impl Iterator<Item = &T> {
        self.open.iter().map(|claim| &claim.share)
    }

    /// Whether nothing of the client's is left: it has closed, and released all or died.
    pub(super) fn is_done(&self) -> bool {
        self.is_leaving && (self.open.is_empty() || self.is_dead())
    }

    /// Whether the client is proven dead.
    pub(super) fn is_dead(&self) -> bool {
        self.process.shows(DeathEvidence::Proven)
    }

    /// All shares that it has, whatever its words say.
    pub(super) fn into_shares(self) -> impl Iterator<Item = T> {
        self.open.into_iter().map(|claim| claim.share)
    }
}
