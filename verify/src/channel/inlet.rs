//! Stands for a link's receiving end, as far as the watch over its publisher's life knows it.

use std::sync::Arc;

use crate::link::watcher::Watcher;

#[path = "../../../crates/warpipe/src/channel/inlet/vigil.rs"]
pub(crate) mod vigil;

#[derive(Debug)]
pub(crate) struct Inlet {
    pub(super) watcher: Arc<Watcher>,
}

impl Inlet {
    fn hear_last_words(&self) -> bool {
        true
    }
}

#[cfg(not(miri))]
#[path = "../models/rescue.rs"]
pub mod model;
