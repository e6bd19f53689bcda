//! A pool: memory of one process, handed out in blocks to itself and to its peers.
//!
//! The owner allocates ([`Pool`], [`Buffer`]) and lends blocks by ticket; a peer opens a ticket ([`LentBuffer`]) or
//! allocates of the owner's memory itself ([`PoolClient`]). Each peer shares one page of words with the owner, in pairs:
//! its stream (or its CPU) stores into the first when it has let a block go, the owner's into the second when a block has
//! been cleared for it. No message is due to give a block back, and none can be lost.
//!
//! A block is free when its owner and all its borrowers have let it go and the work that they put before that is done:
//! the owner's by a word on a board of its own, a borrower's by its word, a dead one's by the proof of its death and of
//! our own streams. What a peer writes into its page decides about nothing but the blocks that it has itself.

mod allocator;
mod block;
mod buffer;
mod client;
mod last_writers;
mod server;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use self::buffer::{Buffer, Pool, PoolBuilder, PoolStats};
pub use self::client::{LentBuffer, PoolClient};
use crate::backend::{Access, DeviceId, TimelineWord};
use crate::memory::ticket::Incarnation;

crate::ipc::messages!(AllocReply, Hello, HelloReply, AllocRequest);

/// The most blocks that one peer may have at once.
const PAIRS_MAX: u32 = 1024;

/// A pair of words: released, by the borrower; cleared, by the owner.
const PAIR_BYTES: usize = 2 * size_of::<TimelineWord>();

/// A peer's page.
const PAGE_BYTES: usize = PAIRS_MAX as usize * PAIR_BYTES;

/// Where a pair's first word lies in the page: the borrower's.
fn released_at(pair: u32) -> usize {
    pair as usize * PAIR_BYTES
}

/// Where its second word lies: the owner's.
fn cleared_at(pair: u32) -> usize {
    released_at(pair) + size_of::<TimelineWord>()
}

/// A peer's first words.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    incarnation: Option<Incarnation>,
}

/// The owner's answer; with a welcome goes the page.
#[derive(Debug, Serialize, Deserialize)]
enum HelloReply {
    Welcome { owner: DeviceId, page_bytes: u64 },
    Expired,
}

/// What a peer asks for.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum AllocRequest {
    /// The block that was lent under this number.
    Lent(u64),
    /// A block of its own.
    Block { bytes: u64 },
}

/// The owner's answer; with a block goes its region.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum AllocReply {
    Block(BlockGrant),
    /// Taken back, or never lent.
    Returned,
    Full {
        used: u64,
        limit: u64,
    },
    /// This peer has as many blocks as it may.
    TooMany,
}

/// Where a block is, and by which words it is given back.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct BlockGrant {
    region: u32,
    mapped: u64,
    offset: u64,
    bytes: u64,
    access: Access,
    pair: u32,
    /// What both words of the pair come to.
    value: u64,
    /// It may be used when the second word has come to its value.
    is_being_cleared: bool,
}
