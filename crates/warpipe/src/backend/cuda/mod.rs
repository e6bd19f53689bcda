//! The CUDA driver API: `libcuda.so.1`, loaded at run time.
//!
//! `sys` has the driver's header as Rust types, and each function as a checked call of its name;
//! `calls` has functions with Rust's types for some of them; `fault` turns a status into a typed
//! error; [`CudaBackend`] implements the trait. Every call is made inside the gate of
//! `shutdown_gate`.
//!
//! One primary context for each device is retained for the life of the process, the same that the
//! CUDA runtime and PyTorch use, so their streams and pointers may be used here. Every method makes
//! it current and restores the caller's context. A forked child cannot use CUDA at all and gets
//! [`StateFault::Forked`](crate::StateFault::Forked).

mod backend;
mod calls;
mod context;
mod copies;
mod device;
mod fault;
mod foreign;
mod host_copy;
pub(crate) mod shutdown_gate;
mod staging;
mod stream;
mod sys;
#[cfg(test)]
mod tests;
mod waits;

pub use backend::CudaBackend;
pub use device::{device_count, device_uuid};
