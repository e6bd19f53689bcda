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

/// Few, so that words run out.
const CLAIMS_MAX: u32 = 3;

const PAGE_BYTES: usize = CLAIMS_MAX as usize * 16;
