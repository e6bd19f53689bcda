//! Requests and replies: any number of [`Client`]s, and of [`Server`]s that share the load.
//!
//! Each client has a queue of its own, `NAME/client-…`, and each server is a worker of every client's: a request is a
//! job, so it is answered once, and goes to another server when the one that has it dies. Servers find new clients by
//! what appears in the domain's directory; a client whose servers have not come yet waits, at most until its deadline.

mod client;
mod server;
#[cfg(test)]
mod tests;

pub use client::{Client, ClientBuilder, Pending};
pub use server::{Request, Server, ServerBuilder};

/// What the names of a service's clients begin with.
fn client_prefix(service: &str) -> String {
    format!("{service}/client-")
}
