//! Allocated blocks, their users, and the peers that borrow them.

use std::sync::Arc;

use super::PoolState;
use crate::backend::{Access, TimelineWord};
use crate::ipc::peer::{DeathEvidence, Process};
use crate::memory::arena::SlotId;
use crate::pool::{PAIRS_MAX, released_at};
use crate::shm::page::SharedPage;

/// The users of an allocated block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::pool) struct BlockUsers {
    is_owned: bool,
    borrows: u32,
}

impl BlockUsers {
    /// A block that the owner has allocated.
    pub(in crate::pool) fn owned() -> BlockUsers {
        BlockUsers {
            is_owned: true,
            borrows: 0,
        }
    }

    /// A block that a peer has allocated.
    pub(in crate::pool) fn borrowed() -> BlockUsers {
        BlockUsers {
            is_owned: false,
            borrows: 1,
        }
    }
}

/// A block that is lent under a number.
#[derive(Debug, Clone, Copy)]
pub(in crate::pool) struct LentBlock {
    pub(in crate::pool) slot: SlotId,
    pub(in crate::pool) bytes: u64,
    pub(in crate::pool) access: Access,
}

/// Counters for [`Pool::stats`](crate::Pool::stats).
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::pool) struct PoolCounts {
    pub(in crate::pool) allocations: u64,
    pub(in crate::pool) waits: u64,
    pub(in crate::pool) high_water: u64,
}

/// A peer and the blocks that it has.
#[derive(Debug)]
pub(in crate::pool) struct Borrower {
    pub(in crate::pool) page: Arc<SharedPage>,
    open: Vec<OpenGrant>,
    unused: Vec<u32>,
    next_pair: u32,
    values: u64,
    /// The proof of the peer's death. It is awaited also after a graceful close: a lying peer may
    /// still use blocks after it.
    process: Arc<Process>,
    /// The peer has closed gracefully.
    pub(in crate::pool) is_leaving: bool,
}

/// A block that a peer has, with the pair of words by which the peer releases it.
#[derive(Debug, Clone, Copy)]
struct OpenGrant {
    slot: SlotId,
    pair: u32,
    value: u64,
}

impl Borrower {
    pub(in crate::pool) fn new(page: SharedPage, process: Arc<Process>) -> Borrower {
        let page = Arc::new(page);
        Borrower {
            page,
            open: vec![],
            unused: vec![],
            next_pair: 0,
            values: 0,
            process,
            is_leaving: false,
        }
    }

    /// Whether the peer has closed and is proven dead: the server reports neither any more.
    pub(in crate::pool) fn has_left_and_died(&self) -> bool {
        self.is_leaving && self.process.shows(DeathEvidence::Proven)
    }

    #[cfg(test)]
    pub(in crate::pool) fn set_process(&mut self, process: Arc<Process>) {
        self.process = process;
    }

    /// Opens a pair of words that is not in use. Returns the pair and the value that marks it
    /// released, or `None` if all pairs are in use.
    pub(in crate::pool) fn open(&mut self, slot: SlotId) -> Option<(u32, u64)> {
        let pair = match self.unused.pop() {
            Some(pair) => pair,
            None if self.next_pair < PAIRS_MAX => {
                self.next_pair += 1;
                self.next_pair - 1
            }
            None => return None,
        };
        // One counter serves all pairs, so no word has held this value before.
        self.values += 1;
        self.open.push(OpenGrant {
            slot,
            pair,
            value: self.values,
        });
        Some((pair, self.values))
    }

    /// Undoes [`open`](Self::open) before the peer learns of the grant. False if the pair has been
    /// released meanwhile.
    pub(in crate::pool) fn close(&mut self, pair: u32) -> bool {
        let before = self.open.len();
        self.open.retain(|open| open.pair != pair);
        let is_closed = self.open.len() < before;
        self.unused.extend(is_closed.then_some(pair));
        is_closed
    }

    /// As [`close`](Self::close), and returns the pair's block.
    pub(in crate::pool) fn take_back(&mut self, pair: u32) -> Option<SlotId> {
        let slot = self.open.iter().find(|open| open.pair == pair)?.slot;
        self.close(pair).then_some(slot)
    }

    pub(in crate::pool) fn is_full(&self) -> bool {
        self.unused.is_empty() && self.next_pair >= PAIRS_MAX
    }

    pub(in crate::pool) fn has_blocks(&self) -> bool {
        !self.open.is_empty()
    }

    /// Whether the peer has closed and has no block.
    pub(in crate::pool) fn is_done(&self) -> bool {
        self.is_leaving && self.open.is_empty()
    }

    /// All blocks that the peer has, whatever its words say.
    pub(in crate::pool) fn into_slots(self) -> (Arc<SharedPage>, Vec<SlotId>) {
        (self.page, self.open.iter().map(|open| open.slot).collect())
    }

    fn take_released(&mut self) -> Vec<SlotId> {
        let page = &self.page;
        // Exactly the value: an honest peer stores it, and random writes hardly ever do.
        let is_released = |open: &mut OpenGrant| {
            page.at::<TimelineWord>(released_at(open.pair))
                .is(open.value)
        };
        let released: Vec<OpenGrant> = self.open.extract_if(.., is_released).collect();
        self.unused.extend(released.iter().map(|open| open.pair));
        released.into_iter().map(|open| open.slot).collect()
    }
}

impl PoolState {
    /// Counts one more borrower of the block.
    pub(in crate::pool) fn borrow(&mut self, slot: SlotId) {
        if let Some(block) = self.blocks.get_mut(&slot) {
            block.borrows += 1;
            self.arena.hold(slot);
        }
        self.update_high_water();
    }

    /// Takes back the blocks that peers have released.
    pub(in crate::pool) fn collect_released(&mut self) {
        let released: Vec<SlotId> = self
            .borrowers
            .values_mut()
            .flat_map(Borrower::take_released)
            .collect();
        released
            .into_iter()
            .for_each(|slot| self.release_borrower(slot));
    }

    pub(in crate::pool) fn release_borrower(&mut self, slot: SlotId) {
        if let Some(block) = self.blocks.get_mut(&slot) {
            block.borrows -= 1;
            self.let_go(slot);
        }
    }

    pub(in crate::pool) fn release_owner(&mut self, slot: SlotId) {
        self.lent_blocks.retain(|_, lend| lend.slot != slot);
        if let Some(block) = self.blocks.get_mut(&slot) {
            block.is_owned = false;
            self.let_go(slot);
        }
    }

    fn let_go(&mut self, slot: SlotId) {
        self.blocks.retain(|&id, block| {
            id != slot
                || *block
                    != BlockUsers {
                        is_owned: false,
                        borrows: 0,
                    }
        });
        self.arena.release(slot);
    }

    /// Bytes that are not free: a user has them, or a stream has not completed its work on them.
    pub(in crate::pool) fn used(&self) -> u64 {
        self.blocks
            .keys()
            .map(|&slot| self.arena.slot(slot).bytes())
            .sum::<u64>()
            + self.arena.waiting_bytes()
    }

    /// Bytes of the owner's blocks, and of the peers'. A block that both have counts in both.
    pub(in crate::pool) fn held(&self) -> (u64, u64) {
        let bytes = |is_so: fn(&BlockUsers) -> bool| {
            let slots = self.blocks.iter().filter(|(_, block)| is_so(block));
            slots.map(|(&slot, _)| self.arena.slot(slot).bytes()).sum()
        };
        (
            bytes(|block| block.is_owned),
            bytes(|block| block.borrows > 0),
        )
    }

    pub(in crate::pool) fn update_high_water(&mut self) {
        self.counts.high_water = self.counts.high_water.max(self.used());
    }
}
