//! A fake CUDA driver for tests: put under the name `libcuda.so.1` on `LD_LIBRARY_PATH`, it answers
//! the calls that warpipe's CUDA backend makes, without a GPU.
//!
//! * Device memory is a memfd; its device address is where it is mapped, its handle for sharing a
//!   duplicate descriptor.
//! * A stream is a thread: what is enqueued happens later, elsewhere.
//! * A kernel is its CPU twin, found by its name in the module's PTX.
//! * A device can be reset: all that was made on it ends, and its context is made anew by who
//!   retains it next.
//! * A stream can be captured: its work becomes a graph, and what other threads must not do
//!   meanwhile invalidates it.
//! * A kernel reaches plain memory of its own device alone; a copy of the driver's reaches that of
//!   all.
//! * What the driver refuses is refused with the same code: a call without a current context, an
//!   address nobody mapped, a handle that is not one, a size that is not the allocation's.
//! * When the process ends, the driver ends first, and takes a moment. Whoever calls it then from
//!   another thread than the one that ends the process ends it by `abort`, and the message names
//!   the call; the driver's answer is a SIGSEGV.
//!
//! It is not the driver: a process has one fault state, not one for each context; the default
//! stream does not wait for others; copies take no time. The environment sets it up, read once:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `FAKE_CUDA_DEVICES` | number of GPUs, 1 to 8, default 1 |
//! | `CUDA_VISIBLE_DEVICES` | as for the driver, plain ordinals only |
//! | `FAKE_CUDA_MEMORY_MB` | memory for each process, default 65536 |
//! | `FAKE_CUDA_NO_PEER` | if set, no GPU reaches another's memory |
//! | `FAKE_CUDA_FAIL` | `function:call:code,...`: that call of that function, from 1, returns that code |
//! | `FAKE_CUDA_DELAY_US` | a stream waits this long before each word it writes |
//!
//! A program can also have any of its own calls hang, fail or be counted while it runs: see
//! `control.rs`.

mod capture;
mod config;
mod control;
mod device;
mod ending;
mod event;
mod gather;
mod host;
mod ipc;
mod kernel;
mod memory;
mod status;
mod stream;
mod work;
