//! What every backend of warpipe must do, as cases that run the same on the host, over the CUDA
//! driver's test double and on a GPU.
//!
//! * [`cases`] are the behaviours, one function each; read them to learn how the library is used,
//!   and what it promises when processes die.
//! * [`context`] is what a case is given: a device, a domain of its own, peers, chance, a place for
//!   figures.
//! * [`peer`] is a further real process of the same program, which publishes or subscribes as it is
//!   told.
//! * [`payload`] fills and checks tensors by kernels; [`words`] are what lies below a channel;
//!   [`shared`] is memory that nothing orders but what a case tries; [`guard`] sees that nothing is
//!   left behind.
//! * [`fake_driver`] has calls of the fake driver hang or fail.
//! * [`graph`] captures a stream's work, as CUDA graphs do.
//! * [`workload`] is the work of each primitive, with an oracle in every step.
//! * [`plain`] is memory of another allocator, with legacy handles to it.
//! * [`runner`] gives each case a process of its own and a time limit; [`report`] says how it went.
#![deny(missing_docs)]

pub mod cases;
pub mod context;
pub mod device_malloc;
pub mod device_words;
pub mod fake_driver;
pub mod graph;
pub mod guard;
pub mod payload;
pub mod peer;
pub mod process;
pub mod report;
pub mod rng;
pub mod runner;
pub mod shared;
pub mod words;
pub mod workload;

pub use context::{Backend, Context};

/// How long a case waits for something that should come at once; long enough for a loaded machine.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);
