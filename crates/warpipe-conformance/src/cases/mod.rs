//! The cases, by subject.

mod allocations;
mod backend;
mod blocked;
mod blocked_launch_queue;
mod calls;
mod capture;
mod channel;
mod consumers;
mod death;
mod descriptors;
mod event;
mod fault;
mod fork;
mod gather;
mod graceful_close;
mod handles;
mod holes;
mod in_place;
mod kernel_ring;
mod layout;
mod legacy;
mod members;
mod memory;
mod model;
mod names;
mod orphan;
mod owners;
mod policy;
mod pool;
mod publisher_state;
mod queue;
mod refused;
mod reset;
mod reuse;
mod semaphore;
mod service;
mod stall;
mod statistics;
mod storm;
mod streams;
mod timeline;
mod weights;

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::context::Context;
use crate::peer::Item;

/// One behaviour.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The behaviour, as a sentence.
    pub name: &'static str,
    /// Tries it.
    pub run: fn(&Context) -> Result<()>,
    /// How long it may take.
    pub limit: Duration,
    /// How long it may take in the long mode.
    pub limit_long: Duration,
    /// It faults a GPU, or kills a process that uses it: under MPS that is the end of every other
    /// client.
    pub ends_clients: bool,
    /// A stream of its own process is blocked behind work that no other stream of that process
    /// may wait for, so they must not share hardware queues.
    pub needs_queues: bool,
}

impl Case {
    /// A case with a minute of time.
    pub const fn new(name: &'static str, run: fn(&Context) -> Result<()>) -> Case {
        let limit = Duration::from_secs(60);
        Case {
            name,
            run,
            limit,
            limit_long: limit,
            ends_clients: false,
            needs_queues: false,
        }
    }

    /// Not to be tried under MPS.
    pub const fn ends_clients(self) -> Case {
        Case {
            ends_clients: true,
            ..self
        }
    }

    /// With 8 hardware queues, the driver's own number where no MPS daemon runs. An MPS client has
    /// fewer.
    pub const fn needs_queues(self) -> Case {
        Case {
            needs_queues: true,
            ..self
        }
    }

    /// With another limit.
    pub const fn limit(self, seconds: u64) -> Case {
        Case {
            limit: Duration::from_secs(seconds),
            ..self
        }
    }

    /// With another limit in the long mode.
    pub const fn long(self, seconds: u64) -> Case {
        Case {
            limit_long: Duration::from_secs(seconds),
            ..self
        }
    }
}

/// The end of a case that cannot be tried here, for this reason.
#[derive(Debug, Clone, thiserror::Error)]
#[error("skipped: {0}")]
pub struct Skip(pub String);

/// Whether every item came whole; else says which did not.
fn all_whole(items: &[Item], sequences: impl IntoIterator<Item = u64>) -> Result<()> {
    let broken: Vec<_> = items.iter().filter(|item| !item.is_whole()).collect();
    ensure!(broken.is_empty(), "not whole: {broken:?}");
    let (found, due): (Vec<_>, Vec<_>) = (
        items.iter().map(|item| item.sequence).collect(),
        Vec::from_iter(sequences),
    );
    ensure!(found == due, "samples {found:?} where {due:?} are due");
    Ok(())
}

/// Ends a case as skipped.
fn skip<T>(reason: impl Into<String>) -> Result<T> {
    Err(Skip(reason.into()).into())
}

/// Every case, in the order in which they are run.
pub fn all() -> Vec<Case> {
    [
        backend::CASES,
        calls::CASES,
        layout::CASES,
        gather::CASES,
        channel::CASES,
        consumers::CASES,
        streams::CASES,
        capture::CASES,
        reset::CASES,
        memory::CASES,
        handles::CASES,
        pool::CASES,
        legacy::CASES,
        in_place::CASES,
        allocations::CASES,
        policy::CASES,
        semaphore::CASES,
        names::CASES,
        members::CASES,
        death::CASES,
        stall::CASES,
        publisher_state::CASES,
        fork::CASES,
        graceful_close::CASES,
        orphan::CASES,
        fault::CASES,
        statistics::CASES,
        refused::CASES,
        holes::CASES,
        descriptors::CASES,
        blocked_launch_queue::CASES,
        blocked::CASES,
        reuse::CASES,
        model::CASES,
        queue::CASES,
        service::CASES,
        storm::CASES,
        owners::CASES,
        timeline::CASES,
        event::CASES,
        kernel_ring::CASES,
        weights::CASES,
    ]
    .concat()
}
