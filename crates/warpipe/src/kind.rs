//! The kinds of endpoints, as errors, messages and the domain directory name them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kind of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
    /// Memory, or an endpoint named by tickets.
    Memory,
    /// A timeline.
    Timeline,
    /// Events.
    Events,
    /// A pool of blocks.
    Pool,
    /// A semaphore.
    Semaphore,
    /// A member of the domain.
    Member,
    /// A publisher.
    Publisher,
    /// A queue, or a client's requests.
    Queue,
    /// The results of a queue's worker.
    Results,
    /// Memory that a process exported by a legacy handle. It has no endpoint name.
    LegacyMemory,
    /// The keeper of a name's model weights.
    Weights,
    /// A process that holds model weights.
    WeightsHolder,
    /// Memory that another library has allocated, shared by its process.
    Allocations,
    /// A ring that kernels use from inside.
    KernelRing,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Memory => "memory",
            Kind::Timeline => "timeline",
            Kind::Events => "event",
            Kind::Pool => "pool",
            Kind::Semaphore => "semaphore",
            Kind::Member => "member",
            Kind::Publisher => "publisher",
            Kind::Queue => "queue",
            Kind::Results => "worker's results",
            Kind::LegacyMemory => "legacy memory",
            Kind::Weights => "weights' keeper",
            Kind::WeightsHolder => "holder of weights",
            Kind::Allocations => "shared allocations",
            Kind::KernelRing => "kernel ring",
        })
    }
}
