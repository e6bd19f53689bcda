//! Stand-in for a link's receiving end, as far as the monitor of its publisher uses it.

use std::sync::Arc;

use crate::runtime::reactor::Reactor;

#[path = "../../../crates/warpipe/src/pubsub/publisher_link/monitor.rs"]
pub(crate) mod monitor;

#[derive(Debug)]
pub(crate) struct PublisherLink {
    pub(super) reactor: Arc<Reactor>,
}

impl PublisherLink {
    fn on_death(&self) -> bool {
        true
    }
}

#[cfg(not(miri))]
#[path = "../models/rescue.rs"]
pub mod model;
