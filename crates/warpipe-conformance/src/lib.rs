//! The requirements for every backend of warpipe, as cases that run the same on the host, over the
//! fake driver and on a GPU.
//!
//! * [`cases`] are the behaviours, one function each; read them to learn how the library is used,
//!   and what it guarantees when processes die.
//! * [`context`] is a case's arguments: a device, a domain of its own, peers, random numbers,
//!   figures.
//! * [`peer`] is a further real process of the same program, which publishes or subscribes on
//!   order.
//! * [`payload`] fills and checks tensors by kernels; [`words`] are what lies below a channel;
//!   [`shared`] is memory that nothing orders but what a case tries; [`guard`] sees that nothing is
//!   left behind.
//! * [`fake_driver`] makes calls of the fake driver hang or fail.
//! * [`graph`] captures a stream's work, as CUDA graphs do.
//! * [`workload`] is the work of each primitive, with an oracle in every step.
//! * [`device_malloc`] is memory of another allocator, with legacy handles to it.
//! * [`runner`] gives each case a process of its own and a time limit; [`report`] holds the
//!   results.
#![deny(missing_docs)]

pub mod cases;
pub mod context;
pub mod device_malloc;
pub mod device_words;
mod expandable_segment;
pub mod fake_driver;
pub mod graph;
pub mod guard;
pub mod payload;
pub mod peer;
pub mod process;
pub mod report;
pub mod runner;
pub mod shared;
mod shared_allocations;
mod weights_in_place;
pub mod words;
pub mod workload;

pub use context::{Backend, Context};

/// How long a case waits for something that should come at once; long enough for a loaded machine.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);
