//! Shared by all endpoints of a process.
//!
//! Threads: the [reactor] and the three others, a thread for an [attempt] to reach a peer, and
//! those of the [closer], which also has the types of sockets and descriptors that a peer may
//! delay. Memory that streams use: [fences](fence) behind streams, [drop_after_fence]. Waits:
//! [epoll], [doorbell], [spin], [timed_lock] and [releasable] (no lock is held across a blocking
//! driver call). Peers that are silent: [heartbeat]. Descriptors kept for messages: [reserve].

pub(crate) mod attempt;
pub(crate) mod closer;
pub(crate) mod doorbell;
pub(crate) mod drop_after_fence;
pub(crate) mod epoll;
pub(crate) mod fence;
pub(crate) mod heartbeat;
pub(crate) mod reactor;
pub(crate) mod releasable;
pub(crate) mod reserve;
pub(crate) mod spin;
pub(crate) mod timed_lock;
