//! Allocated blocks and their users: each holds the block's slot in the arena.

use super::PoolState;
use crate::backend::Access;
use crate::lend::claims::Ended;
use crate::memory::arena::{Chunk, Slot, SlotId};

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
            .for_each(|slot| self.arena.release(slot));
        dead
    }

    pub(in crate::pool) fn release_owner(&mut self, slot: SlotId) {
        self.lent_blocks.retain(|_, lend| lend.slot != slot);
        if self.owned.remove(&slot) {
            self.arena.release(slot);
        }
    }

    /// Bytes that are not free: a user has them, or a stream has not completed its work on them.
    pub(in crate::pool) fn used(&self) -> u64 {
        self.arena.chunks().iter().map(Chunk::used).sum()
    }

    /// Bytes of the owner's blocks, and of the peers'. A block that both have counts in both.
    pub(in crate::pool) fn held(&self) -> (u64, u64) {
        let owned = self.owned.iter().map(|&slot| self.arena.slot(slot).bytes());
        let is_lent = |(id, slot): &(SlotId, &Slot)| slot.holders > self.owned.contains(id).into();
        let lent = self.arena.slots().filter(is_lent);
        (owned.sum(), lent.map(|(_, slot)| slot.bytes()).sum())
    }
}
