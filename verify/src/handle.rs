//! The C interface's table of objects.

mod atomic {
    pub(super) use crate::atomic::{AtomicPtr, AtomicU32, AtomicU64};
}
#[path = "../../crates/warpipe-c/src/handle/table.rs"]
mod table;

pub(crate) use table::Table;
