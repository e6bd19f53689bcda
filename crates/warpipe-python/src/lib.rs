//! The native half of the Python package `warpipe`: the same concepts and names as the Rust library, in Python's manner.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `device`, `domain`, `stream` | where memory lies, where names live, the order of work and who uses what |
//! | `publisher`, `loan`, `subscriber`, `frame` | the channel; `loan` is its `SampleMut`, `frame` its `Sample` with what Python adds |
//! | `tensor` | what frames, loans and views have in common: a tensor in memory that is held, as an array of any framework |
//! | `view`, `owner` | memory of any other kind as a tensor, and when that goes back |
//! | `wrappers`, `ticket`, `pool`, `legacy` | whose memory it is, and the names under which others open it |
//! | `timeline`, `event`, `semaphore` | what streams of one process tell streams of others |
//! | `members` | who is in a domain |
//! | `handle` | handles that Python may close, and the wait for their owners |
//! | `outgoing`, `slot` | a publisher's loan, and what is behind every loan |
//! | `queue`, `job`, `worker`, `lease` | jobs: who submits, what becomes of them, who does them |
//! | `inbox` | what subscribers, workers and servers have in common |
//! | `client`, `server`, `endpoint` | services; `endpoint` is what a queue and a client have in common |
//! | `memory` | what arrays are made of, and when it goes back |
//! | `array`, `dlpack`, `torch` | memory of ours as arrays of others |
//! | `in_place` | tensors of others that are sent where they lie |
//! | `source`, `rows`, `copies`, `dtype`, `metadata` | tensors of others, to be sent |
//! | `errors`, `wait`, `exclusive`, `process` | exceptions; waits that Ctrl-C ends; threads; forks |
//! | `detached` | calls and ends that may be held up, without the interpreter |
//! | `ending`, `parked` | what the end of Python closes, and threads that it meets |
//! | `testing` | private switches of the tests |
//!
//! An object asks which process it is in before it touches a lock (`process`). No wait holds the interpreter. What is
//! dropped by another framework's deleter is dropped without the interpreter, on any thread (`memory`). The classes keep
//! no Python objects, except tensors that are being copied, the streams of others that memory waits for, the callbacks
//! of a watch of members, and what an interrupted wait took, so there are no cycles to collect.
//!
//! A new piece of the library becomes a module here, a line in `register`, its classes in `python/warpipe/__init__.py` and
//! `_warpipe.pyi`.
#![deny(missing_docs)]

mod array;
mod client;
mod copies;
mod detached;
mod device;
mod dlpack;
mod domain;
mod dtype;
mod errors;
mod event;
mod exclusive;
mod frame;
mod handle;
mod in_place;
mod inbox;
mod interpreter_exit;
mod job;
mod job_endpoint;
mod lease;
mod legacy;
mod loan;
mod members;
mod memory;
mod memory_owner;
mod metadata;
mod outgoing;
mod pool;
mod process;
mod publisher;
mod queue;
mod rows;
mod semaphore;
mod server;
mod shared_memory;
mod slot;
mod source;
mod stream;
mod subscriber;
mod tensor;
mod testing;
mod thread_exit;
mod ticket;
mod timeline;
mod torch;
mod view;
mod wait;
mod worker;

use pyo3::prelude::*;

/// The native half of ``warpipe``. Import that.
#[pymodule(gil_used = false)]
fn _warpipe(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add(
        "DTYPES",
        warpipe::DType::ALL
            .iter()
            .map(|dtype| dtype.name())
            .collect::<Vec<_>>(),
    )?;
    interpreter_exit::prepare(module)?;
    register(module)?;
    testing::register(module)
}

fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<device::Device>()?;
    module.add_class::<domain::Domain>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<tensor::Tensor>()?;
    module.add_class::<publisher::Publisher>()?;
    module.add_class::<publisher::SubscriberInfo>()?;
    module.add_class::<loan::Loan>()?;
    module.add_class::<outgoing::Outgoing>()?;
    module.add_class::<subscriber::Subscriber>()?;
    module.add_class::<frame::Frame>()?;
    module.add_class::<frame::Discontinuity>()?;
    module.add_class::<timeline::Timeline>()?;
    module.add_class::<event::Event>()?;
    module.add_class::<event::EventHandle>()?;
    module.add_class::<event::Recording>()?;
    module.add_class::<semaphore::Semaphore>()?;
    module.add_class::<semaphore::Permit>()?;
    module.add_class::<members::Member>()?;
    module.add_class::<members::MemberInfo>()?;
    module.add_class::<members::Change>()?;
    module.add_class::<members::Members>()?;
    module.add_class::<view::View>()?;
    module.add_class::<shared_memory::Memory>()?;
    module.add_class::<shared_memory::Published>()?;
    module.add_class::<shared_memory::SharedMemory>()?;
    module.add_class::<ticket::Ticket>()?;
    module.add_class::<ticket::MemoryInfo>()?;
    module.add_class::<legacy::LegacyHandle>()?;
    module.add_class::<legacy::LegacyMemory>()?;
    module.add_class::<pool::Pool>()?;
    module.add_class::<pool::PoolStats>()?;
    module.add_class::<pool::Buffer>()?;
    module.add_class::<pool::PoolClient>()?;
    module.add_class::<pool::LentBuffer>()?;
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
