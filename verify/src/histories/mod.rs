//! Long random histories: blocks of every length are taken, lent, written late and given back, and
//! after each act a check finds blocks that were lent again before their last writer was past them.
//! proptest shrinks the histories that it finds.

pub mod arena;
pub mod entry;
pub mod memory;
// Where it sees what it checks.
pub use crate::pool::histories as pool;

/// An act as chance gives it: which, by or to which, and how large.
pub type Draw = (u8, u8, u8);
