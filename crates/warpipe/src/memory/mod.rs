//! Memory: regions, the arena that cuts them into slots, and the public types that give regions to
//! other processes by a descriptor or a ticket.
//!
//! From below: a [`region`] is mapped memory; a [`mapped_region`] also has the streams that work on
//! it, and is unmapped behind them; a [`slice`] is a range, with the streams of one handle. The
//! handles [`Memory`] (of this process) and [`SharedMemory`] (of another one) dereference to a
//! slice. A [`ticket`] names [`published`] memory. [`legacy`] handles name memory of `cudaMalloc`.

pub(crate) mod arena;
mod file;
mod free_ranges;
pub(crate) mod legacy;
pub(crate) mod mapped_region;
mod owned;
pub(crate) mod pieces;
mod published;
pub(crate) mod region;
mod shared;
pub(crate) mod slice;
#[cfg(test)]
mod tests;
pub(crate) mod ticket;
pub(crate) mod weak_cache;

pub use self::owned::{Memory, MemoryInfo};
pub use self::published::{PublishOptions, Published};
pub use self::shared::SharedMemory;
pub use self::slice::DeviceSlice;
pub use self::ticket::{Ticket, TicketInfo};

crate::ipc::messages!(ticket::PublishedReply);
