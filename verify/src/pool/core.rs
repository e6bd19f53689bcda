//! Stands for a pool's shared part: the books alone.

use std::collections::HashMap;

use super::block::{Block, Borrower, Counts, Lend};
use super::marks::Marks;
use crate::memory::arena::{Arena, SlotId};

pub(super) struct State {
    pub(super) arena: Arena,
    pub(super) blocks: HashMap<SlotId, Block>,
    pub(super) lends: HashMap<u64, Lend>,
    pub(super) borrowers: HashMap<u64, Borrower>,
    pub(super) counts: Counts,
    /// By region.
    pub(super) marks: Vec<Marks>,
}
