//! A fake CUDA driver for tests: put under the name `libcuda.so.1` on `LD_LIBRARY_PATH`, it answers
//! the calls that warpipe's CUDA backend makes, without a GPU.
//!
//! * Device memory is a memfd; its device address is where it is mapped, its handle for sharing a
//!   duplicate descriptor.
//! * A stream is a thread: enqueued work runs later, on that thread.
//! * A kernel is its host version, found by its name in the module's PTX.
//! * A device can be reset: everything made on it is destroyed, and the next retain makes its
//!   context anew.
//! * A stream can be captured: its work becomes a graph, and calls on other threads that are
//!   illegal meanwhile invalidate it.
//! * A kernel reaches plain memory of its own device alone; a copy of the driver's reaches that of
//!   all.
//! * Errors have the driver's codes: a call without a current context, an unmapped address, an
//!   invalid handle, a size that is not the allocation's.
//! * When the process ends, the driver shuts down first, and takes a moment. A later call from
//!   another thread than the exiting one ends the process by `abort`, with the call's name in the
//!   message; the real driver's result is a SIGSEGV.
//!
//! Differences to the driver: a process has one fault state, not one for each context; the default
//! stream does not wait for others; copies take no time. Environment variables configure it, read
//! once:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `FAKE_CUDA_DEVICES` | number of GPUs, 1 to 8, default 1 |
//! | `CUDA_VISIBLE_DEVICES` | as for the driver, plain ordinals only |
//! | `FAKE_CUDA_MEMORY_MB` | memory for each process, default 65536 |
//! | `FAKE_CUDA_NO_PEER` | if set, no GPU reaches another's memory |
//! | `FAKE_CUDA_NO_MPS` | if set, this process is no client of MPS |
//! | `FAKE_CUDA_FAIL` | `function:call:code,...`: that call of that function, from 1, returns that code |
//! | `FAKE_CUDA_DELAY_US` | a stream waits this long before each word it writes |
//! | `FAKE_CUDA_CALL_US` | a call that has a stream wait for words or write them takes this long |
//!
//! A program can also make any of its own calls hang, fail or be counted while it runs: see
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
