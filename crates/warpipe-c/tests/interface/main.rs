//! The C interface, called from Rust.

#[macro_use]
mod common;

mod allocations;
mod channel;
mod dlpack;
mod in_place;
mod many_threads;
mod members;
mod memory;
mod ordering;
mod parts;
mod pool;
mod queue;
mod queue_misuse;
mod service;
mod unloading;
