//! The lock-free parts of the library and its bookkeeping, from the sources in
//! `crates/warpipe/src` and the C interface's table of objects, under model checkers.
//!
//! `#[path]` includes the library's own sources; nothing of them is copied. Every name that they
//! use outside the checked sources has a stand-in here: a file with the same path in this folder,
//! with the few functions that are called. **If this does not compile after a change of the
//! library**, one of those sources uses a name without a stand-in: add the module or the function
//! here, as small as it can be, or include the new source by `#[path]`, too.
//!
//! * [`atomic`]: the words, of one of three kinds; [`plant`]: faults planted in the library's
//!   source;
//! * [`models`]: two or three threads under loom, which models weak memory;
//! * [`steps`] and [`states`]: every order of steps of several processes, any of them killed at any
//!   step;
//! * [`histories`]: long random rows of acts, with memory in which late writes are seen.
//!
//! Nothing here is compiled as a test: the tests in the library's sources need the whole library.
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
mod lend;
mod memory;
mod pubsub;
mod runtime;
mod shm;
mod stream;

mod error;
#[path = "../../crates/warpipe/src/tensor.rs"]
mod tensor;

mod gate;
mod handle;
mod pool;
mod queue;
mod rings;
mod semaphore;

pub mod histories;
#[cfg(not(miri))]
pub mod models;
pub mod states;
