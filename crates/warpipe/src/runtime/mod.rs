//! Shared by all endpoints of a process: the [reactor] and the other threads of the library,
//! [fences](fence) behind streams, and drops that wait for a fence.

pub(crate) mod attempt;
pub(crate) mod closer;
pub(crate) mod doorbell;
pub(crate) mod drop_after_fence;
pub(crate) mod fence;
pub(crate) mod heartbeat;
pub(crate) mod reactor;
pub(crate) mod releasable;
pub(crate) mod reserve;
pub(crate) mod spin;
pub(crate) mod timed_lock;
