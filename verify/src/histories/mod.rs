//! Long histories by chance: blocks of every length are taken, lent, written late and given back,
//! and after each act it is looked whether a block was lent again before its last writer was past
//! it. Found ones are made short by proptest.

pub mod arena;
pub mod entry;
pub mod memory;

pub use crate::pool::histories as pool;

/// An act as chance gives it: which, by or to which, and how large.
pub type Draw = (u8, u8, u8);
