//! The owner's side of its peers: who is here, what they get, and what comes back when they end.

use std::sync::Arc;

use super::block::{Block, Borrower, Lend};
use super::core::{Core, State, Taken};
use super::{Grant, Hello, Lending, PAGE_BYTES, Reception, Wish, cleared_at};
use crate::backend::Access;
use crate::fork::PrivateFd;
use crate::memory::arena::SlotId;
use crate::memory::page::Page;
use crate::rendezvous::{Answer, Caller, Desk, Ending, Keep, Refusal, decode};

/// A block that a peer has, and has not been told of.
struct Offer {
    answer: Answer,
    /// The peer's, with the pair of words that is the block's.
    page: Arc<Page>,
    pair: u32,
    value: u64,
}

impl Keep for Core {
    fn admit(&self, desk: &Desk, caller: &Caller, body: &[u8]) -> Result<Answer, Refusal> {
        let Hello { incarnation } = decode(body, desk.name())?;
        let owner = self.device.info().id;
        if incarnation.is_some_and(|wanted| wanted != desk.generation()) {
            return Answer::new(&Reception::Expired, vec![]);
        }
        if let Some(device) = caller.device.filter(|device| device.kind != owner.kind) {
            return Err(Refusal(format!("its memory is on {owner}, which {device} cannot reach")));
        }
        let process = desk.process_of(caller.id).ok_or_else(|| Refusal("it is there no more".into()))?;
        let (page, fd) = Page::create(Some(&self.device), PAGE_BYTES)?;
        let welcome = Reception::Welcome { owner, page_bytes: page.bytes() as u64 };
        self.lock().borrowers.insert(caller.id, Borrower::new(page, process));
        Answer::new(&welcome, vec![fd])
    }

    fn answer(&self, desk: &Desk, caller: &Caller, body: &[u8]) -> Result<Answer, Refusal> {
        match decode(body, desk.name())? {
            Wish::Lent(number) => self.hand_lent(caller, number),
            Wish::Block { bytes } => self.hand_new(caller, bytes),
        }
    }

    fn holds(&self, caller: &Caller) -> bool {
        self.lock().borrowers.get(&caller.id).is_some_and(Borrower::has_blocks)
    }

    fn gone(&self, _: &Desk, caller: &Caller, ending: Ending) {
        let mut state = self.lock();
        match ending {
            // What its device was given may still run: its words say when it has let go, and it says goodbye behind them.
            Ending::Left => {
                state.borrowers.get_mut(&caller.id).into_iter().for_each(|borrower| borrower.is_leaving = true);
                self.reclaim(&mut state);
            }
            Ending::Died => {
                self.reclaim(&mut state);
                let borrower = state.borrowers.remove(&caller.id);
                drop(state);
                borrower.into_iter().for_each(|borrower| self.free_soon(borrower));
            }
        }
    }

    /// On the watcher's thread: who has the lock may be in a call of the driver that waits for a stream which the watcher
    /// is to let go. The next tick comes.
    fn tick(&self, _: &Desk, _: u64) {
        if let Some(mut state) = self.try_lock() {
            self.reclaim(&mut state);
            let dead: Vec<Borrower> =
                state.borrowers.extract_if(|_, borrower| borrower.is_dead_and_gone()).map(|(_, dead)| dead).collect();
            drop(state);
            dead.into_iter().for_each(|borrower| self.free_soon(borrower));
        }
    }
}

impl Core {
    fn hand_lent(&self, caller: &Caller, number: u64) -> Result<Answer, Refusal> {
        let mut state = self.lock();
        let Some(&Lend { slot, bytes, access }) = state.lends.get(&number) else {
            return Answer::new(&Grant::Returned, vec![]);
        };
        self.reclaim(&mut state);
        // A refusal, or no room for it, has changed nothing.
        let Some(offer) = self.hand_over(&mut state, caller, slot, bytes, access, false)? else {
            return Answer::new(&Grant::TooMany, vec![]);
        };
        state.borrow(slot);
        if caller.uid != self.uid {
            state.mark_several(slot);
        }
        Ok(offer.answer)
    }

    fn hand_new(&self, caller: &Caller, bytes: u64) -> Result<Answer, Refusal> {
        super::core::check_bytes(bytes)?;
        let mut state = self.lock();
        self.reclaim(&mut state);
        let is_full = state.borrowers.get(&caller.id).is_none_or(Borrower::is_full);
        drop(state);
        if is_full {
            return Answer::new(&Grant::TooMany, vec![]);
        }
        let (slot, is_being_cleared) = match self.take(bytes, caller.uid, Block::borrowed())? {
            Taken::Block { slot, cleared_at } => (slot, cleared_at.is_some()),
            Taken::Full { used, limit } => return Answer::new(&Grant::Full { used, limit }, vec![]),
        };
        let mut state = self.lock();
        let Offer { answer, page, pair, value } =
            match self.hand_over(&mut state, caller, slot, bytes, Access::ReadWrite, is_being_cleared) {
                Ok(Some(offer)) => offer,
                nothing => {
                    state.borrower_lets_go(slot);
                    return nothing.and_then(|_| Answer::new(&Grant::TooMany, vec![]));
                }
            };
        drop(state);
        if is_being_cleared && let Err(error) = self.tell_cleared(&page, cleared_at(pair), value) {
            let mut state = self.lock();
            // Should it have ended meanwhile, what it had comes back by that.
            if state.borrowers.get_mut(&caller.id).is_some_and(|borrower| borrower.close(pair)) {
                state.borrower_lets_go(slot);
            }
            return Err(error.into());
        }
        Ok(answer)
    }

    /// Gives a peer a block, by a pair of words of its own; none if it has all of them in use, or is gone. Where there is
    /// none, and on an error, nothing has changed.
    fn hand_over(
        &self,
        state: &mut State,
        caller: &Caller,
        slot: SlotId,
        bytes: u64,
        access: Access,
        is_being_cleared: bool,
    ) -> Result<Option<Offer>, Refusal> {
        let State { arena, borrowers, .. } = state;
        let place = *arena.slot(slot);
        let chunk = &arena.chunks()[place.region as usize];
        let fd = PrivateFd::duplicate(&chunk.export)?;
        let Some(borrower) = borrowers.get_mut(&caller.id) else { return Ok(None) };
        let Some((pair, value)) = borrower.open(slot) else { return Ok(None) };
        let lending = Lending {
            region: place.region,
            mapped: chunk.region.bytes(),
            offset: place.offset,
            bytes,
            access,
            pair,
            value,
            is_being_cleared,
        };
        let answer = Answer::new(&Grant::Block(lending), vec![fd]).inspect_err(|_| {
            borrower.close(pair);
        })?;
        Ok(Some(Offer { answer, page: borrower.page.clone(), pair, value }))
    }

    /// Frees what a dead peer had once this process's streams are past it, whatever it left in its words.
    fn free_soon(&self, borrower: Borrower) {
        let (page, slots) = borrower.into_slots();
        self.part(page);
        let (core, streams, mut proof) = (self.me.clone(), self.streams().clone(), None);
        self.watcher().retire(move || {
            if !proof.get_or_insert_with(|| streams.mark()).is_passed() {
                return false;
            }
            if let Some(core) = core.upgrade() {
                let mut state = core.lock();
                slots.iter().for_each(|&slot| state.borrower_lets_go(slot));
            }
            true
        });
    }
}
