//! Stand-in for the channel: the monitor of a publisher's life is the library's.

#[path = "../../../crates/warpipe/src/pubsub/entry.rs"]
pub(crate) mod entry;
pub(crate) mod publisher_link;
#[path = "../../../crates/warpipe/src/pubsub/ring.rs"]
pub(crate) mod ring;
mod work;

pub(crate) use work::{Data, Forwarded, Line, RawSample, Replies, RetainedSlot, SendError};
