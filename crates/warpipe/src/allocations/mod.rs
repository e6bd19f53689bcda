//! Memory that another library of this process has allocated, shared with other processes.
//!
//! PyTorch, CuPy and cudarc allocate by themselves, and their memory is freed and used again when
//! they say so. An [`AllocationServer`] shares a range of such memory under a number and keeps its
//! owner (a tensor, for example) until the receiver has released it, or is proven dead. A receiver
//! opens the number once ([`AllocationClient`]): memory of the virtual memory functions comes as
//! descriptors of its pieces and stays valid after the owner's death; `cudaMalloc` memory comes as
//! a legacy handle.
//!
//! Invariants: an owner is dropped once its share is withdrawn, or its claim has ended, and no
//! living client has a [claim](crate::lend::share_words) on it. One client has a claim at a time,
//! unless another one writes wrong words. A share that its client gives back unused can be opened
//! again.

mod server;
mod session;
mod shares;
#[cfg(test)]
mod tests;

pub use self::server::AllocationServer;
pub use self::session::AllocationClient;
pub use self::shares::AllocationStats;
