//! Memory: regions, the arena that cuts them into slots, and the words that say when a slot's work is done.

pub(crate) mod arena;
pub(crate) mod board;
pub(crate) mod legacy;
pub(crate) mod region;
