//! Stand-in for a pool: the holder of each block, and the user that had its bytes, are the
//! library's.

pub(crate) mod allocator;
pub(crate) use self::allocator::block;
#[path = "../histories/pool.rs"]
pub mod histories;
#[path = "../../../crates/warpipe/src/pool/last_writers.rs"]
pub(crate) mod last_writers;
#[path = "../states/pool.rs"]
pub mod states;

/// Few, so that pairs run out.
const PAIRS_MAX: u32 = 3;

const PAIR_BYTES: usize = 32;

const PAGE_BYTES: usize = PAIRS_MAX as usize * PAIR_BYTES;

fn released_at(pair: u32) -> usize {
    pair as usize * PAIR_BYTES
}

fn cleared_at(pair: u32) -> usize {
    released_at(pair) + 16
}
