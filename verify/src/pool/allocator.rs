//! Stand-in for a pool's shared part: the bookkeeping only.

#[path = "../../../crates/warpipe/src/pool/allocator/block.rs"]
pub(crate) mod block;

use std::collections::{HashMap, HashSet};

use self::block::{LentBlock, PoolCounts};
use super::last_writers::LastWriters;
use crate::lend::claims::Borrowers;
use crate::memory::arena::{Arena, SlotId};

pub(super) struct PoolState {
    pub(super) arena: Arena,
    pub(super) owned: HashSet<SlotId>,
    pub(super) lent_blocks: HashMap<u64, LentBlock>,
    pub(super) borrowers: Borrowers<SlotId>,
    pub(super) counts: PoolCounts,
    /// By region.
    pub(super) last_writers: Vec<LastWriters>,
}
