//! Bad input and hostile peers.
//!
//! Each test checks the type of the error, that nothing was lost or leaked, and that both sides
//! still work.

mod children;
mod descriptors;
mod environment;
mod eviction;
mod fake_publisher;
mod files;
mod fuse;
mod fuzz;
pub(crate) mod holes;
mod in_flight;
mod ipc_server;
mod legacy;
mod limits;
mod lingering;
mod many_deaths;
mod memory_limits;
mod names;
mod namespaces;
mod publisher_handshake;
mod receiver;
mod ring_model;
mod scribbler;
mod sender;
mod shortage;
mod silent;
mod stage;
mod subscriber_handshake;
mod tenants;
mod unread;
mod users;
mod vanished;

pub(crate) use descriptors::{leave_descriptors, raise_descriptor_limit};
pub(crate) use stage::{alone, in_a_forked_child, send_raw, while_locked};
