//! Allocated blocks and their users.

use super::PoolState;
use crate::backend::Access;
use crate::lend::claims::Ended;
use crate::memory::arena::SlotId;

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

impl PoolState {
    /// Counts one more borrower of the block.
    pub(in crate::pool) fn borrow(&mut self, slot: SlotId) {
        if let Some(block) = self.blocks.get_mut(&slot) {
            block.borrows += 1;
            self.arena.hold(slot);
        }
        self.update_high_water();
    }

    /// Takes back the blocks that peers have released, and returns those of dead ones.
    pub(in crate::pool) fn collect_released(&mut self) -> Vec<SlotId> {
        let Ended {
            released,
            returned,
            dead,
        } = self.borrowers.collect();
        released
            .into_iter()
            .chain(returned)
            .for_each(|slot| self.release_borrower(slot));
        dead
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
