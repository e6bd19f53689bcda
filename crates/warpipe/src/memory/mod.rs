//! Memory: regions, the arena that cuts them into slots, the words, our own or shared, that order its users, and the
//! faces on them that other processes reach by a descriptor or a ticket.

pub(crate) mod arena;
pub(crate) mod board;
mod file;
pub(crate) mod lane;
pub(crate) mod legacy;
pub(crate) mod mapping;
mod owned;
pub(crate) mod page;
mod published;
pub(crate) mod raiser;
pub(crate) mod region;
mod shared;
pub(crate) mod shelf;
#[cfg(test)]
mod tests;
pub(crate) mod ticket;
pub(crate) mod tied;

pub use self::owned::{Export, Memory, MemoryInfo};
pub use self::published::{Publication, Published};
pub use self::shared::SharedMemory;
pub use self::ticket::Ticket;

crate::rendezvous::messages!(published::Reply, published::Request);
