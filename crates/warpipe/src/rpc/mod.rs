//! Requests and replies: any number of [`Client`]s, and of [`Server`]s that share the load.
//!
//! Each client has a queue of its own, `NAME/client-…`, and each server is a worker of every
//! client's queue. A request is a job: a server takes it as a [`Lease`](crate::Lease) and answers
//! it once, and it goes to another server when its server dies. A client without servers waits for
//! one, at most until its deadline.
//!
//! A server meets a client within [`Server::accept`]: the domain rings the server's doorbell when a
//! file appears, `scan_directory` finds the client's name, and `attach` builds a [`Worker`] of the
//! client's queue on a thread of its own ([`Attempt`](crate::runtime::attempt::Attempt)), which
//! rings the doorbell with the result. Then `take_attached` adds the client to those that `poll`
//! leases requests from. A link that ends, or an attempt that fails, is tried again with a later
//! scan, once a second; a name without an owner is removed.
//!
//! [`Worker`]: crate::Worker

mod client;
mod server;
#[cfg(test)]
mod tests;

pub use client::{Client, ClientOptions, Pending};
pub use server::{Server, ServerOptions};

use crate::error::Result;
use crate::ipc::domain::EndpointName;

/// The longest name of a service: the names of its clients' queues are longer by 16 bytes.
const SERVICE_NAME_BYTES_MAX: usize = 40;

/// Checks the name of a service.
fn check_service_name(name: &str) -> Result<EndpointName> {
    let too_long = "it is longer than 40 bytes, the most for a service";
    EndpointName::of_at_most(SERVICE_NAME_BYTES_MAX, name, too_long)
}

/// The prefix of the names of a service's clients.
fn client_prefix(service: &str) -> String {
    format!("{service}/client-")
}
