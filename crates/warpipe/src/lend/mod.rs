//! Lending memory to other processes: a [pool](crate::pool)'s blocks, and what other libraries
//! [allocate](crate::allocations).
//!
//! A lender answers requests with a *claim* ([`claims`], [`server`]): where the memory lies, the
//! word that says when its contents are complete, and a word of the borrower's own page. The
//! borrower ([`session`]) maps a *run* of pieces once, by descriptors that it asks for, or opens a
//! legacy handle. It stores the claim's value into its word when it is done, from the CPU or behind
//! a stream's work. A release needs no message, so none can be lost.
//!
//! Invariants:
//! * A claim ends by the word, which only its borrower writes, or by the proof of its death.
//! * A borrower gets descriptors of the runs alone that it was lent memory in.
//! * Memory is used when the lender's word, which the borrower cannot write, says that it is ready.
//! * No lock is held across a driver call. What is mapped goes behind the borrower's own streams,
//!   and stays readable after the lender's end.
//! * An answer that its requester does not wait for any more is given back unused.

pub(crate) mod claims;
mod given_runs;
pub(crate) mod server;
pub(crate) mod session;
pub(crate) mod share_words;

use serde::{Deserialize, Serialize};

use crate::backend::{Access, DeviceId};
use crate::device::Device;
use crate::ipc::Kind;
use crate::memory::mapped_region::ImportKey;

crate::ipc::messages!(HelloReply, LendRequest<u64>, LendReply<()>, LendNotice,);

/// What the sessions of one kind of lenders differ in.
#[derive(Debug)]
pub(crate) struct Terms {
    pub(crate) kind: Kind,
    /// What a claim is on, in errors.
    pub(crate) lent: &'static str,
    pub(crate) claims_max: u32,
    /// Of a borrower's page.
    pub(crate) words: u32,
    /// Whether borrowers claim by words alone, one at a time. If not, they ask, too, and their
    /// streams release claims.
    pub(crate) has_shares: bool,
}

impl Terms {
    /// The key of a process's session with a lender of this kind.
    pub(crate) fn key(&self, uid: u32, generation: [u8; 16], device: &Device) -> ImportKey {
        ImportKey::new(uid, generation, self.kind as u64, device)
    }
}

/// In a borrower's word: its requester gave up, and has not used the memory.
pub(crate) const RETURNED: u64 = 1 << 62;

/// The lender's first reply. Two descriptors go with it: the borrower's page of words, and the
/// lender's page of ready words.
#[derive(Debug, Serialize, Deserialize)]
struct HelloReply {
    owner: DeviceId,
    claims_bytes: u64,
    ready_bytes: u64,
}

/// A borrower's request.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum LendRequest<A> {
    /// Descriptors of a run's pieces, from this one on: as many as one reply carries.
    Pieces { run: u32, first: u32 },
    /// Memory, as the lender's kind says.
    Memory(A),
}

/// The lender's answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum LendReply<R> {
    /// The descriptors go with it.
    Pieces,
    Lent(Grant),
    /// There is no such memory, or none any more.
    Gone,
    /// The borrower has the most claims that it may have.
    TooMany,
    /// As the lender's kind says.
    Refused(R),
}

/// A message to borrowers that is no answer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum LendNotice {
    /// The lender holds the run no longer: a mapping of it that nothing uses is to be unmapped.
    RunEnded(u32),
}

/// A claim: memory that its borrower has until its word says otherwise.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Grant {
    /// The borrower's word, and the value that releases the memory.
    word: u32,
    value: u64,
    offer: Offer,
}

/// Memory that is lent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Offer {
    pub(crate) bytes: u64,
    pub(crate) place: OfferPlace,
    /// The ready word and its value. `None` if the contents are complete.
    pub(crate) ready: Option<(u32, u64)>,
}

/// Where the bytes lie.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum OfferPlace {
    /// In a run of `pieces` allocations of `piece` bytes each. No other run of the lender ever has
    /// its number.
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
