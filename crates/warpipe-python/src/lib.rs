//! The native half of the Python package `warpipe`: the same concepts and names as the Rust library, in Python's manner.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `device`, `domain`, `stream` | where memory lies, where names live, the order of work and who uses what |
//! | `publisher`, `loan`, `subscriber`, `frame` | the channel; `loan` is its `SampleMut`, `frame` its `Sample` with what Python adds |
//! | `outgoing`, `slot` | a publisher's loan, and what is behind every loan |
//! | `queue`, `job`, `worker`, `lease` | jobs: who submits, what becomes of them, who does them |
//! | `client`, `server`, `office` | services; `office` is what a queue and a client have in common |
//! | `memory` | what arrays are made of, and when it goes back |
//! | `array`, `dlpack`, `torch` | memory of ours as arrays of others |
//! | `source`, `copies`, `dtype`, `metadata` | tensors of others, to be sent |
//! | `errors`, `wait`, `turn`, `process` | exceptions; waits that Ctrl-C ends; threads; forks |
//! | `testing` | private switches of the tests |
//!
//! An object asks which process it is in before it touches a lock (`process`). No wait holds the interpreter. What is
//! dropped by another framework's deleter is dropped without the interpreter, on any thread (`memory`). The classes keep
//! no Python objects, except tensors that are being copied, so there are no cycles to collect.
//!
//! A new piece of the library becomes a module here, a line in `register`, its classes in `python/warpipe/__init__.py` and
//! `_warpipe.pyi`.
#![deny(missing_docs)]

mod array;
mod client;
mod copies;
mod device;
mod dlpack;
mod domain;
mod dtype;
mod errors;
mod frame;
mod job;
mod lease;
mod loan;
mod memory;
mod metadata;
mod office;
mod outgoing;
mod process;
mod publisher;
mod queue;
mod server;
mod slot;
mod source;
mod stream;
mod subscriber;
mod testing;
mod torch;
mod turn;
mod wait;
mod worker;

use pyo3::prelude::*;

/// The native half of ``warpipe``. Import that.
#[pymodule(gil_used = false)]
fn _warpipe(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("DTYPES", warpipe::DType::ALL.iter().map(|dtype| dtype.name()).collect::<Vec<_>>())?;
    register(module)?;
    testing::register(module)
}

fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<device::Device>()?;
    module.add_class::<domain::Domain>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<publisher::Publisher>()?;
    module.add_class::<publisher::SubscriberInfo>()?;
    module.add_class::<loan::Loan>()?;
    module.add_class::<outgoing::Outgoing>()?;
    module.add_class::<subscriber::Subscriber>()?;
    module.add_class::<frame::Frame>()?;
    module.add_class::<frame::Discontinuity>()?;
    module.add_class::<queue::Queue>()?;
    module.add_class::<queue::QueueState>()?;
    module.add_class::<job::JobHandle>()?;
    module.add_class::<job::Result>()?;
    module.add_class::<job::Results>()?;
    module.add_class::<job::Watch>()?;
    module.add_class::<worker::Worker>()?;
    module.add_class::<lease::Lease>()?;
    module.add_class::<lease::Output>()?;
    module.add_class::<client::Client>()?;
    module.add_class::<client::Pending>()?;
    module.add_class::<server::Server>()?;
    module.add_class::<server::Request>()
}
