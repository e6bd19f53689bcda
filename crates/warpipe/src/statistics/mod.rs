//! The statistics page: counters of this process's endpoints, links and memory, which other
//! processes of the same user read without asking this one.
//!
//! A process has one page, a sealed memfd that is made with its first row (`page`). An observer
//! opens `/proc/PID/fd/N` for reading (`observer`), so it also reads the page of a stopped
//! process. The words are drawn and asserted in `layout`.
//! Endpoints count in `rows`. A process that cannot make the page runs without one.

mod layout;
mod observer;
mod page;
mod rows;
#[cfg(test)]
mod tests;

pub use self::observer::{
    Endpoint, Link, LinkState, Observation, Observer, Process, Region, RegionId, Role, Unreadable,
};
pub(crate) use self::rows::{
    EndpointRow, EndpointWords, LinkRow, LinkWords, NO_FILE, RegionRow, beat, file_of,
    write_slow_paths,
};
pub use crate::slow_path::{SlowPath, SlowPathCount};
