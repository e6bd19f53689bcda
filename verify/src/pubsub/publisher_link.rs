//! The monitor of a publisher's life, which is the library's.

#[path = "../../../crates/warpipe/src/pubsub/publisher_link/monitor.rs"]
pub(crate) mod monitor;

#[cfg(not(miri))]
#[path = "../models/rescue.rs"]
pub mod model;
