//! A pool: memory of one process, handed out in blocks to this process and to its peers.
//!
//! The owner allocates ([`Pool`], [`Buffer`]) and lends blocks by ticket. A peer opens a ticket
//! ([`LentBuffer`]) or allocates from the owner's memory ([`PoolClient`]). Each peer shares one
//! page of two words a block with the owner: the peer's stream or CPU stores into the first to
//! release a block; the owner's stream stores into the second when a block has been cleared for it.
//! A release needs no message, so none can be lost, and a peer's page affects only its own blocks.
//! A block is free when all its users have released it and their work is done: the owner's fence
//! words, a borrower's word, or a dead borrower's proof of death with a fence on the owner's
//! streams show it. Each user has regions of its own, and may have a quota (`users`).

mod allocator;
mod buffer;
mod client;
mod last_writers;
mod server;
mod session;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod users_tests;

use serde::{Deserialize, Serialize};

use self::allocator::users::OverQuota;
pub use self::allocator::users::{PoolUsage, Quota};
pub use self::buffer::{Buffer, Pool, PoolBuilder, PoolStats};
pub use self::client::PoolClient;
pub use self::session::LentBuffer;
use crate::backend::{Access, DeviceId, TimelineWord};
use crate::memory::published_wire::Incarnation;

crate::ipc::messages!(AllocReply, Hello, HelloReply, AllocRequest, PoolNotice);

/// The most blocks that one peer may have at once.
const PAIRS_MAX: u32 = 1024;

/// A pair of words: the borrower writes "released", the owner writes "cleared".
const PAIR_BYTES: usize = 2 * size_of::<TimelineWord>();

/// The length of a peer's page.
const PAGE_BYTES: usize = PAIRS_MAX as usize * PAIR_BYTES;

/// The offset of a pair's first word, which the borrower writes.
fn released_at(pair: u32) -> usize {
    pair as usize * PAIR_BYTES
}

/// The offset of a pair's second word, which the owner writes.
fn cleared_at(pair: u32) -> usize {
    released_at(pair) + size_of::<TimelineWord>()
}

/// A peer's first message.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    incarnation: Option<Incarnation>,
}

/// The owner's answer to it. The page's descriptor goes with a `Welcome`.
#[derive(Debug, Serialize, Deserialize)]
enum HelloReply {
    Welcome { owner: DeviceId, page_bytes: u64 },
    Expired,
}

/// A peer's request.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum AllocRequest {
    /// The block that was lent under this number.
    Lent(u64),
    /// A new block for the peer.
    Block { bytes: u64 },
}

/// The owner's answer. The region's descriptor goes with a block.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum AllocReply {
    Block(BlockGrant),
    /// The owner has released the block, or never lent it.
    Returned,
    Full {
        used: u64,
        limit: u64,
    },
    /// The peer has the most blocks that it may have.
    TooMany,
    /// The peer's user has a quota, which leaves no room.
    OverQuota(OverQuota),
    /// The block was allocated for this other user.
    OtherUser(u32),
}

/// A message to the peers of a pool that is no answer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum PoolNotice {
    /// The pool has released the region of this id, and no longer uses it: it may be unmapped.
    RegionRemoved(u32),
}

/// The place of a block, and the words that release it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct BlockGrant {
    /// The id of its region, which no other region of the pool gets.
    region: u32,
    mapped: u64,
    offset: u64,
    bytes: u64,
    access: Access,
    pair: u32,
    /// The value that both words of the pair reach.
    value: u64,
    /// If set, the block may be used once the second word has reached `value`.
    is_being_cleared: bool,
}
