//! Order between processes: timelines, events and semaphores, each over words in shared pages.

pub(crate) mod event;
mod pair;
pub(crate) mod semaphore;
pub(crate) mod timeline;
