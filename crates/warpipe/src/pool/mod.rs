//! A pool: memory of one process, handed out in blocks to this process and to its peers.
//!
//! The owner allocates ([`Pool`], [`Buffer`]) and lends blocks by ticket. A peer opens a ticket
//! ([`LentBuffer`](crate::LentBuffer)) or allocates from the owner's memory ([`PoolClient`]): both
//! are claims ([`lend`](crate::lend)). One of the owner's user opens a ticket without a request
//! ([`share_words`](crate::lend::share_words)), unless it has that block open. The owner's fence
//! words, which peers can read, say when a block has been cleared. A block is free when all its
//! users have released it and their work is done: the owner's fence words, a borrower's word, or a
//! dead borrower's proof of death with a fence on the owner's streams show it. Each user has
//! regions of its own, and may have a quota (`users`).

mod allocator;
mod buffer;
mod client;
#[cfg(loom)]
#[path = "../../../../verify/src/histories/pool.rs"]
pub mod histories;
mod last_writers;
mod server;
#[cfg(loom)]
#[path = "../../../../verify/src/states/pool.rs"]
pub mod states;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod users_tests;

use serde::{Deserialize, Serialize};

use self::allocator::users::OverQuota;
pub use self::allocator::users::{PoolUsage, Quota};
pub use self::buffer::{Buffer, Pool, PoolOptions, PoolStats};
pub use self::client::PoolClient;
use crate::error::{Error, LimitFault};

crate::ipc::messages!(
    crate::lend::LendRequest<PoolRequest>,
    crate::lend::LendReply<PoolRefusal>,
);

/// The most blocks that one peer may have at once.
const CLAIMS_MAX: u32 = 1024;

/// The words of a peer's page: the first one closes it, then come those of the claims that it asks
/// for, and two for each block that it may claim itself, one for each access.
const WORDS: u32 = 4096;

/// A peer's request.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum PoolRequest {
    /// The block that was lent under this number.
    Lent(u64),
    /// A new block for the peer.
    Block { bytes: u64 },
}

/// Why the peer gets no block.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum PoolRefusal {
    Full {
        used: u64,
        limit: u64,
    },
    /// The peer's user has a quota, which leaves no room.
    OverQuota(OverQuota),
    /// The block was allocated for this other user.
    OtherUser(u32),
}

impl PoolRefusal {
    /// The error of a request for `bytes`. None while its wait goes on: blocks that are released
    /// may make room.
    fn error(self, name: &str, bytes: u64, is_over: bool) -> Option<Error> {
        match self {
            PoolRefusal::Full { used, limit } => (is_over || bytes > limit).then(|| {
                Error::Limit(LimitFault::Memory {
                    name: name.to_string(),
                    bytes,
                    used,
                    limit,
                })
            }),
            PoolRefusal::OverQuota(over) => {
                (is_over || over.is_final(bytes)).then(|| over.error(name, bytes))
            }
            PoolRefusal::OtherUser(uid) => {
                let own = rustix::process::geteuid().as_raw();
                let text = format!(
                    "the block is of user {uid}; its owner makes one for this user by `Pool::allocate_for({own}, ..)`"
                );
                Some(Error::denied(name, text))
            }
        }
    }
}
