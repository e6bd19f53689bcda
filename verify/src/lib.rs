//! The lock-free parts of the library and its bookkeeping, as they stand in `crates/warpipe/src`,
//! under model checkers.
//!
//! `#[path]` takes the library's own sources in; nothing of them is copied. All that they name and
//! that is no part of what is checked has a stand-in here: a file of this folder with the same path
//! and the few functions that are called. **If this does not compile after a change of the
//! library**, one of those sources names something that has no stand-in yet: add the module or the
//! function here, as small as it can be, or take the new source in by `#[path]`, too.
//!
//! * [`atomic`]: the words themselves, in one of three ways; [`plant`]: faults planted in the
//!   library's source;
//! * [`models`]: two or three threads under loom, which knows weak memory;
//! * [`steps`] and [`states`]: every order of steps of several processes, any of them killed at any
//!   step;
//! * [`histories`]: long rows of acts by chance, with memory in which late writes are seen.
//!
//! Nothing here is compiled as a test: the tests in the library's sources want the whole library.
#![allow(
    dead_code,
    reason = "what the library uses of these sources is more than what is checked here"
)]
#![allow(
    clippy::all,
    clippy::missing_safety_doc,
    reason = "the library's sources are checked where they live"
)]

pub mod atomic;
pub mod plant;
pub mod steps;

mod backend;
mod device;
mod fork;
mod ipc;
mod memory;
mod pubsub;
mod runtime;
mod shm;
mod stream;

mod error;
#[path = "../../crates/warpipe/src/tensor.rs"]
mod tensor;

mod pool;
mod queue;
mod semaphore;

pub mod histories;
#[cfg(not(miri))]
pub mod models;
pub mod states;
