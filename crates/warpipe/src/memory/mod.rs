//! Memory: regions, the arena that cuts them into slots, and the words, our own or shared, that order its users.

pub(crate) mod arena;
pub(crate) mod board;
pub(crate) mod lane;
pub(crate) mod legacy;
pub(crate) mod page;
pub(crate) mod region;
