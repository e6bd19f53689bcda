//! The machine's atomics. The model checker puts its own in their place.

pub(super) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};
