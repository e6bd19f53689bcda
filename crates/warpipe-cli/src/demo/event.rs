//! What the demo's processes tell their parent, one JSON object a line.

use serde::{Deserialize, Serialize};

use crate::statistics::Histogram;

/// One line of a child. Times are CLOCK_MONOTONIC nanoseconds, the same in all processes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The publisher, while it publishes and once at its end.
    Published(Published),
    /// A subscriber, while it receives.
    Received(Received),
    /// A subscriber, at its end.
    Finished {
        /// Its last counts.
        counts: Received,
        /// From each send to the check's result.
        latency: Histogram,
    },
}

/// The publisher's counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Published {
    /// Sent so far.
    pub items: u64,
    /// When the first was sent; 0 before.
    pub first_ns: u64,
}

/// A subscriber's counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Received {
    /// Items whose every word was right.
    pub verified: u64,
    /// Items with a wrong word, or out of order.
    pub wrong: u64,
    /// Items that the publisher left this subscriber out of.
    pub dropped: u64,
    /// When the last check ended; 0 before.
    pub last_ns: u64,
}
