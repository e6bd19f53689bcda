//! The C interface's table of objects.

mod atomic {
    pub(super) use crate::atomic::{AtomicPtr, AtomicU32, AtomicU64};
}
#[allow(dead_code, reason = "the C interface uses more of it")]
#[path = "../../crates/warpipe-c/src/handle/table.rs"]
mod table;

pub(crate) use table::Table;
