//! The native half of the Python package `warpipe`: the Rust library's concepts and names, in
//! Python's conventions.
//!
//! | module | contents |
//! | --- | --- |
//! | `device`, `domain`, `stream` | devices, the directory of names, the order of work |
//! | `publisher`, `frame` | the channel |
//! | `loan` | memory on loan: `SampleMut`, queue inputs, outputs |
//! | `tensor` | common to frames, loans and views: held memory as an array of any framework |
//! | `view`, `memory_owner` | other memory as a tensor, and its release |
//! | `shared_memory`, `pool`, `legacy` | owners of memory, and its names |
//! | `allocations` | memory of other libraries, shared: the half of `warpipe.torch` |
//! | `timeline`, `event`, `semaphore` | synchronisation between streams of processes |
//! | `kernel_ring` | items from kernel to kernel |
//! | `members` | the members of a domain |
//! | `handle` | the base of the classes that Python closes, and their handles |
//! | `jobs`, `job` | what queues and clients submit, and results |
//! | `lease` | what workers and servers take |
//! | `future` | `JobHandle` and `Pending`: the outcome of a job or a request |
//! | `receiver` | common to subscribers, workers and servers |
//! | `weights`, `weights_publish` | model weights: read, kept; published |
//! | `memory` | the memory behind arrays, and its release |
//! | `array`, `buffer`, `dlpack`, `torch` | this package's memory as other frameworks' arrays |
//! | `torch_allocator` | this package's memory in PyTorch's caching allocator |
//! | `in_place` | other frameworks' tensors, sent where they lie |
//! | `tuples` | results of several values |
//! | `source`, `copies`, `dtype`, `metadata` | other frameworks' tensors, to be sent |
//! | `errors`, `wait`, `exclusive`, `process` | exceptions, interruptible waits, threads, forks |
//! | `detached` | driver calls and drops that may block, without the interpreter |
//! | `interpreter_exit`, `thread_exit` | the end of the interpreter |
//! | `command` | the command line `warpipe` |
//! | `testing` | private switches of the tests |
//!
//! An object checks its process before it touches a lock (`process`). No wait holds the
//! interpreter. Memory that another framework's deleter drops is dropped without the interpreter,
//! on any thread (`memory`). The classes hold no Python objects except tensors under copy, foreign
//! streams that memory waits for, callbacks of `Members`, and results of interrupted waits. So
//! there are no cycles to collect.
//!
//! Names and texts of queues, clients, workers and servers are in `python/warpipe/_queue.py`, those of
//! subscribers in `_receivers.py`, over `jobs` and `receiver`. What calls Python alone is in Python, too,
//! and set on the classes at import: `_arrays.py`, `_futures.py`, `_members.py`, `_objects.py`,
//! `weights.py`; the watch of weights is `_watch.py`. So are the words for what cannot be sent, and
//! names: `_devices.py`, `_dtypes.py`, `_metadata.py`, `_tensors.py`. Iterations are native, and a
//! method in Python returns at once what a native wait gave it: a signal's handler that runs in between
//! would lose that.
//!
//! A new part of the library becomes a module here, a line in `_warpipe`, and its classes in
//! `python/warpipe/__init__.py` and `stubs/types.pyi`.
#![deny(missing_docs)]
#![allow(
    clippy::too_many_arguments,
    reason = "keyword arguments, each with a default"
)]

mod allocations;
mod array;
mod buffer;
mod command;
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
mod future;
mod handle;
mod in_place;
mod interpreter_exit;
mod job;
mod jobs;
mod kernel_ring;
mod lease;
mod legacy;
mod loan;
mod members;
mod memory;
mod memory_owner;
mod metadata;
mod pool;
mod process;
mod publisher;
mod receiver;
mod semaphore;
mod shared_memory;
mod source;
mod stream;
mod tensor;
mod testing;
mod thread_exit;
mod timeline;
mod torch;
mod torch_allocator;
mod tuples;
mod view;
mod wait;
mod weights;
mod weights_publish;

/// The native half of ``warpipe``. Import ``warpipe`` instead.
#[pyo3::pymodule(gil_used = false)]
mod _warpipe {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::{
        allocations::{AllocationClient, AllocationServer, OpenAllocation},
        command::_run_command,
        device::Device,
        domain::Domain,
        event::{Event, EventHandle, Recording},
        frame::{Frame, FrameParts, Part},
        future::{Future, JobHandle, Pending},
        handle::{Bare, Closeable, Named},
        interpreter_exit::{_call, _end, _has_open, _run},
        job::{Result, Results, Watch},
        jobs::Jobs,
        kernel_ring::KernelRing,
        lease::{Lease, Output},
        legacy::{LegacyHandle, LegacyMemory},
        loan::Loan,
        members::{Member, Members},
        pool::{Buffer, LentBuffer, Pool, PoolClient},
        publisher::{Outgoing, Publisher},
        receiver::Receiver,
        semaphore::{Permit, Semaphore},
        shared_memory::{Memory, Published, SharedMemory, Ticket},
        stream::Stream,
        tensor::{Held, Tensor},
        testing::{_allocate_plain, _pattern, _preload, _skip_waits, _slow_fill, Adder},
        timeline::Timeline,
        view::View,
        wait::_seconds,
        weights::{
            _keep_weights, _open_weights, _verify_weights, _version_after, Keeper,
            PublishedWeights, SharedWeights,
        },
        weights_publish::_publish_weights,
    };

    #[pymodule_init]
    fn fill(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        let dtypes = warpipe::DType::ALL.iter();
        let dtypes = dtypes.map(|dtype| (dtype.name(), dtype.bytes()));
        module.add("_DTYPES", dtypes.collect::<Vec<_>>())?;
        crate::interpreter_exit::prepare(module.py())
    }
}
