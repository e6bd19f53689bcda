//! Stand-in for the semaphore: the shared words, and all operations on them, are the library's.

#[path = "../../crates/warpipe/src/sync/semaphore/page.rs"]
pub(crate) mod page;

#[cfg(not(miri))]
#[path = "models/room.rs"]
pub mod model;

#[path = "states/semaphore.rs"]
pub mod states;
