//! The borrowers of a lender, what each has, and the words by which it gives that back. Pure, over
//! pages of words.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::RETURNED;
use super::share_words::close;
use crate::ipc::limits::QuotaPermit;
use crate::ipc::peer::{DeathEvidence, Process};
use crate::shm::page::SharedPage;

/// The borrowers of one lender, by the number of their session. `T` is what is lent.
#[derive(Debug)]
pub(crate) struct Borrowers<T> {
    by_client: BTreeMap<u64, Borrower<T>>,
    claims_max: u32,
}

/// What a process that may have claims has in one session.
#[derive(Debug)]
pub(crate) struct Borrower<T> {
    claimant: Claimant,
    open: Vec<Claim<T>>,
    unused: Vec<u32>,
    next_word: u32,
    values: u64,
}

/// A process that may have claims, and the page of its words.
#[derive(Debug)]
pub(crate) struct Claimant {
    pub(crate) page: Arc<SharedPage>,
    /// The proof of its death. It is awaited also after a graceful close: its device may still work
    /// on what it has, and a lying borrower may go on.
    process: Arc<Process>,
    /// Its place in the limits of connections: what is kept for a borrower counts as its connection
    /// did.
    _permit: Option<Arc<QuotaPermit>>,
    /// Whether words of the page but those that answers name are claims, too.
    pub(crate) claims_by_words: bool,
    /// Its session has ended.
    pub(crate) is_leaving: bool,
    is_dead: bool,
}

#[derive(Debug)]
struct Claim<T> {
    lent: T,
    word: u32,
    value: u64,
}

/// What borrowers have no more.
#[derive(Debug)]
pub(crate) struct Ended<T> {
    /// Their words say that they are done with it, or have not used it.
    pub(crate) released: Vec<T>,
    /// They are proven dead.
    pub(crate) dead: Vec<T>,
}

impl<T> Borrowers<T> {
    pub(crate) fn new(claims_max: u32) -> Borrowers<T> {
        Borrowers {
            by_client: BTreeMap::new(),
            claims_max,
        }
    }

    pub(crate) fn add(&mut self, client: u64, claimant: Claimant) {
        let borrower = Borrower {
            claimant,
            open: vec![],
            unused: vec![],
            // The first one closes the page.
            next_word: 1,
            values: 0,
        };
        self.by_client.insert(client, borrower);
    }

    /// Opens a claim: its word, and the value that ends it. Gives back what was to be lent if all
    /// words are in use, or the borrower is gone.
    pub(crate) fn claim(&mut self, client: u64, lent: T) -> Result<(u32, u64), T> {
        let Some(borrower) = self.by_client.get_mut(&client) else {
            return Err(lent);
        };
        borrower.claim(self.claims_max, lent)
    }

    /// Undoes [`claim`](Self::claim) before the borrower learns of it. `None` if the claim has
    /// ended meanwhile.
    pub(crate) fn take_back(&mut self, client: u64, (word, value): (u32, u64)) -> Option<T> {
        self.by_client
            .get_mut(&client)?
            .take(|claim| (claim.word, claim.value) == (word, value))
    }

    /// Its session has ended: by the proof of its death, or gracefully; then its words report each
    /// release, unless it dies.
    pub(crate) fn leave(&mut self, client: u64, is_dead: bool) {
        if let Some(borrower) = self.by_client.get_mut(&client) {
            borrower.claimant.leave(is_dead);
        }
    }

    /// Takes what has ended since the last call, and removes borrowers that are gone and have
    /// nothing. What a borrower's words said before its death counts. `claimed` says what a
    /// borrower that leaves, or is dead, has claimed by words.
    pub(crate) fn collect(
        &mut self,
        mut claimed: impl FnMut(&SharedPage, bool) -> Vec<T>,
    ) -> Ended<T> {
        let mut ended = Ended {
            released: vec![],
            dead: vec![],
        };
        self.by_client.retain(|_, borrower| {
            borrower.collect(&mut ended);
            let claimant = &borrower.claimant;
            if !claimant.is_leaving {
                return true;
            }
            let is_gone = claimant.is_gone();
            let by_words = match claimant.claims_by_words {
                true => claimed(&claimant.page, is_gone),
                false => vec![],
            };
            if !is_gone {
                return borrower.has_any() || !by_words.is_empty();
            }
            let left = borrower.open.drain(..).map(|claim| claim.lent);
            ended.dead.extend(left.chain(by_words));
            false
        });
        ended
    }

    /// Whether the borrower has the most claims that it may have, or is not there.
    pub(crate) fn is_full(&self, client: u64) -> bool {
        let borrower = self.by_client.get(&client);
        borrower.is_none_or(|it| it.unused.is_empty() && it.next_word > self.claims_max)
    }

    pub(crate) fn has_any(&self, client: u64) -> bool {
        self.by_client.get(&client).is_some_and(Borrower::has_any)
    }

    /// The page of a borrower that claims by words.
    pub(crate) fn page(&self, client: u64) -> Option<&SharedPage> {
        self.by_client.get(&client)?.claimant.claims()
    }

    /// All those, with their pages.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (u64, &SharedPage)> {
        let borrowers = self.by_client.iter();
        borrowers.filter_map(|(&client, borrower)| Some((client, borrower.claimant.claims()?)))
    }

    /// Borrowers that are connected, or have claims.
    pub(crate) fn len(&self) -> usize {
        self.by_client.len()
    }

    #[cfg(test)]
    pub(crate) fn all(&mut self) -> impl Iterator<Item = &mut Borrower<T>> {
        self.by_client.values_mut()
    }
}

impl<T> Borrower<T> {
    fn claim(&mut self, claims_max: u32, lent: T) -> Result<(u32, u64), T> {
        let word = match self.unused.pop() {
            Some(word) => word,
            None if self.next_word <= claims_max => {
                self.next_word += 1;
                self.next_word - 1
            }
            None => return Err(lent),
        };
        // One counter serves all words, so none has held this value before.
        self.values += 1;
        let value = self.values;
        self.open.push(Claim { lent, word, value });
        Ok((word, value))
    }

    /// Ends the first claim that is so.
    fn take(&mut self, is_it: impl Fn(&Claim<T>) -> bool) -> Option<T> {
        let at = self.open.iter().position(is_it)?;
        let claim = self.open.swap_remove(at);
        self.unused.push(claim.word);
        Some(claim.lent)
    }

    /// What its words say has ended.
    fn collect(&mut self, ended: &mut Ended<T>) {
        let mut at = 0;
        while let Some(claim) = self.open.get(at) {
            let word = self.claimant.page.word(claim.word as usize);
            // Exactly the value: an honest borrower stores it, and random writes hardly ever do.
            if !word.is(claim.value) && !word.is(claim.value | RETURNED) {
                at += 1;
                continue;
            }
            let claim = self.open.swap_remove(at);
            self.unused.push(claim.word);
            ended.released.push(claim.lent);
        }
    }

    fn has_any(&self) -> bool {
        !self.open.is_empty()
    }
}

impl Claimant {
    pub(crate) fn new(
        page: Arc<SharedPage>,
        process: Arc<Process>,
        permit: Option<Arc<QuotaPermit>>,
    ) -> Claimant {
        Claimant {
            page,
            process,
            _permit: permit,
            claims_by_words: false,
            is_leaving: false,
            is_dead: false,
        }
    }

    /// Its session has ended: by the proof of its death, or gracefully; then its words report each
    /// release, unless it dies.
    pub(crate) fn leave(&mut self, is_dead: bool) {
        // It claims nothing any more by words.
        close(&self.page);
        self.is_leaving = true;
        self.is_dead |= is_dead;
    }

    fn claims(&self) -> Option<&SharedPage> {
        self.claims_by_words.then_some(&*self.page)
    }

    /// Whether it is proven dead, also where its server reports nothing of it any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_dead || (self.is_leaving && self.process.shows(DeathEvidence::Proven))
    }
}

#[cfg(test)]
impl<T> Borrower<T> {
    pub(crate) fn page(&self) -> &SharedPage {
        &self.claimant.page
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.claimant.is_leaving
    }

    pub(crate) fn is_of_another_user(&mut self) {
        self.claimant.claims_by_words = false;
    }

    pub(crate) fn leave_as(&mut self, process: Arc<Process>) {
        self.claimant.leave_as(process);
    }
}

#[cfg(test)]
impl Claimant {
    pub(crate) fn leave_as(&mut self, process: Arc<Process>) {
        self.is_leaving = true;
        self.process = process;
    }
}
