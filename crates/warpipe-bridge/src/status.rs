//! What a bridge says of itself: notices for people, and a status for `warpipe ls`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The names under which bridges publish their [`Status`], each followed by the process id. They
/// are never exported.
pub const STATUS_PREFIX: &str = "bridge/";

/// The state of a bridge, which it publishes as JSON every second.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// The machine's name.
    pub node: String,
    /// Bridges that can be reached now.
    pub peers: Vec<String>,
    /// The names that it carries.
    pub names: Vec<RemoteName>,
    /// Messages that were not understood, or had no lane.
    pub refused: u64,
}

/// Which way a name goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Direction {
    /// From the other machine.
    From,
    /// To the other machine.
    To,
}

/// A name that a bridge carries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RemoteName {
    /// The name.
    pub name: String,
    /// The other machine.
    pub node: String,
    /// Which way it goes.
    pub direction: Direction,
    /// Whether the other machine can be reached.
    pub reachable: bool,
    /// Tensors of this lane so far.
    pub tensors: u64,
    /// Bytes of this lane so far.
    pub bytes: u64,
    /// Tensors each second, over the last one.
    pub rate: f64,
    /// Parts that may be sent now.
    pub credit: u64,
    /// Samples that the policy left out.
    pub dropped: u64,
    /// Samples that did not come, by the numbers.
    pub missing: u64,
    /// Samples that came a second time, and were not published; results that came late or again.
    pub repeated: u64,
    /// For a queue: the workers on the machine that does its jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
}

/// Something that happened to a bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// A bridge can be reached.
    Reached {
        /// Its machine.
        node: String,
    },
    /// A bridge cannot be reached any more. That proves nothing of its sources.
    Unreachable {
        /// Its machine.
        node: String,
    },
    /// A name is exported from now on.
    Exporting {
        /// The name.
        name: String,
        /// To this machine.
        node: String,
    },
    /// The export of a name has ended.
    ExportEnded {
        /// The name.
        name: String,
        /// The machine.
        node: String,
        /// The reason.
        reason: String,
    },
    /// A name is imported from now on.
    Importing {
        /// The name.
        name: String,
        /// From this machine.
        node: String,
    },
    /// A tensor has waited for device memory here for 5 s: its name stands still meanwhile.
    WaitsForMemory {
        /// The name.
        name: String,
        /// The machine that it comes from.
        node: String,
        /// The bytes of the tensor.
        bytes: u64,
        /// The device memory that the name may have.
        limit: u64,
    },
    /// The import of a name has ended, or waits for its exporter.
    ImportEnded {
        /// The name.
        name: String,
        /// The machine.
        node: String,
        /// The reason.
        reason: String,
        /// Whether the publisher here goes on when the exporter comes back.
        waits: bool,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Reached { node } => write!(f, "{node} can be reached"),
            Notice::Unreachable { node } => write!(f, "{node} is unreachable"),
            Notice::Exporting { name, node } => write!(f, "{name:?} goes to {node}"),
            Notice::ExportEnded { name, node, reason } => {
                write!(f, "{name:?} goes to {node} no more: {reason}")
            }
            Notice::Importing { name, node } => write!(f, "{name:?} comes from {node}"),
            Notice::WaitsForMemory {
                name,
                node,
                bytes,
                limit,
            } => write!(
                f,
                "{name:?} from {node} waits for {bytes} bytes of device memory: its subscribers here \
                 hold too many samples, or its limit of {limit} bytes (`--memory`) is too small"
            ),
            Notice::ImportEnded {
                name,
                node,
                reason,
                waits,
            } => {
                let after = if *waits {
                    "; its publisher here waits"
                } else {
                    ""
                };
                write!(f, "{name:?} comes from {node} no more: {reason}{after}")
            }
        }
    }
}
