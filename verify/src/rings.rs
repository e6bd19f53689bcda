//! Stand-in for kernel rings: the protocol on the CPU and its table are the library's.

#[path = "../../crates/warpipe/src/rings/host_ring.rs"]
pub(crate) mod host_ring;
#[path = "../../crates/warpipe/src/rings/layout.rs"]
pub(crate) mod layout;
#[cfg(not(miri))]
#[path = "models/kernel_ring.rs"]
pub mod model;
