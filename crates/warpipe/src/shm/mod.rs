//! Memory that several processes map: sealed memfds that hold only atomics, and the words in them.

pub(crate) mod counter;
pub(crate) mod page;
pub(crate) mod seal;
pub(crate) mod segment;
pub(crate) mod signaller;
