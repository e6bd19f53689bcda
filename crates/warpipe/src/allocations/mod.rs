//! Memory that another library of this process has allocated, shared with other processes.
//!
//! PyTorch, CuPy and cudarc allocate by themselves, and their memory is freed and used again when
//! they say so. An [`AllocationServer`] shares a range of such memory under a number and keeps its
//! owner (a tensor, for example) until the receiver has released it, or is proven dead. A receiver
//! opens the number once ([`AllocationClient`]): memory of the virtual memory functions comes as
//! descriptors of its pieces and stays valid after the owner's death; `cudaMalloc` memory comes as
//! a legacy handle.
//!
//! Invariants: a share is unclaimed, or one client has it; an owner is dropped once its share is
//! withdrawn, released by a word that only its client writes, or its client is proven dead; a
//! client uses the memory only when the sharing stream's word says that the contents are complete.
//! A reply that its requester does not wait for any more returns the share.

mod claims;
mod server;
mod session;
mod shares;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use self::server::{AllocationServer, AllocationServerBuilder};
pub use self::session::{AllocationClient, OpenAllocation};
pub use self::shares::AllocationStats;
use crate::backend::{Access, DeviceId, TimelineWord};

crate::ipc::messages!(
    HelloReply,
    AllocationRequest,
    AllocationReply,
    AllocationNotice
);

/// The most shares that one client may have open at once.
const CLAIMS_MAX: u32 = 16_384;

/// The length of a client's page of release words.
const CLAIMS_BYTES: usize = CLAIMS_MAX as usize * size_of::<TimelineWord>();

/// The most shares of a server that wait for their streams at once.
const READY_MAX: u32 = 16_384;

/// The length of the server's page of ready words.
const READY_BYTES: usize = READY_MAX as usize * size_of::<TimelineWord>();

/// In a release word: the share goes back to the server, as its requester gave up.
const RETURNED: u64 = 1 << 62;

fn word_at(index: u32) -> usize {
    index as usize * size_of::<TimelineWord>()
}

/// The server's first reply. Two descriptors go with it: the client's page of release words, and
/// the server's page of ready words.
#[derive(Debug, Serialize, Deserialize)]
struct HelloReply {
    owner: DeviceId,
    claims_bytes: u64,
    ready_bytes: u64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum AllocationRequest {
    /// The share of this number, which is this client's from then on.
    Open(u64),
    /// Descriptors of a run's pieces, from this one on: as many as one reply carries.
    Pieces { run: u32, first: u32 },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
enum AllocationReply {
    Opened(Grant),
    /// There is no such share: it was opened, or withdrawn, or never made.
    Gone,
    /// The client has the most shares that it may have.
    TooMany,
    /// The descriptors go with it.
    Pieces,
}

/// A notice to all clients.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum AllocationNotice {
    /// The server holds the run no longer: a mapping of it that nothing uses is to be unmapped.
    RunEnded(u32),
}

/// A share that is open in a client.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Grant {
    /// The client's release word, and the value that it stores there.
    word: u32,
    value: u64,
    bytes: u64,
    place: Place,
    /// The ready word and its value. `None` if the contents are complete.
    ready: Option<(u32, u64)>,
}

/// Where the bytes lie.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Place {
    /// In a run of `pieces` allocations of `piece` bytes each.
    Run {
        run: u32,
        pieces: u32,
        piece: u64,
        offset: u64,
        access: Access,
    },
    /// The bytes of a [`LegacyHandle`](crate::LegacyHandle).
    Legacy(Vec<u8>),
}
