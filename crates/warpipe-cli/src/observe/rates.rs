//! Rates: the difference of two looks.

use std::collections::HashMap;

use serde::Serialize;

use super::snapshot::{EndpointRow, Snapshot};

/// Identifies an endpoint from one look to the next.
type Key = (String, Option<i32>, [u64; 2]);

/// What one endpoint did between two looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Rate {
    pub items_per_second: f64,
    pub bytes_per_second: f64,
    /// The mean time between sending and receiving. None where the publisher does not state when
    /// it sends, or nothing was received.
    pub latency_ns: Option<u64>,
}

/// The counts of the last look.
#[derive(Debug, Default)]
pub struct Meter {
    last: HashMap<Key, [u64; 4]>,
    last_ns: u64,
}

impl Meter {
    /// The rates since the last look, in the order of the endpoints; none for an endpoint that was
    /// not there then.
    pub fn rates(&mut self, now: &Snapshot) -> Vec<Option<Rate>> {
        let seconds = now.taken_ns.saturating_sub(self.last_ns) as f64 / 1e9;
        let rates = now.endpoints.iter().map(|endpoint| {
            let before = self.last.get(&key(endpoint)).filter(|_| seconds > 0.0)?;
            // A count that fell is a mistake of that process.
            let since: [u64; 4] =
                std::array::from_fn(|at| counts(endpoint)[at].saturating_sub(before[at]));
            Some(Rate {
                items_per_second: since[0] as f64 / seconds,
                bytes_per_second: since[1] as f64 / seconds,
                latency_ns: since[3].checked_div(since[2]),
            })
        });
        let rates = rates.collect();
        let counts = now
            .endpoints
            .iter()
            .map(|endpoint| (key(endpoint), counts(endpoint)));
        self.last = counts.collect();
        self.last_ns = now.taken_ns;
        rates
    }
}

fn key(endpoint: &EndpointRow) -> Key {
    (endpoint.name.clone(), endpoint.pid, endpoint.generation)
}

fn counts(endpoint: &EndpointRow) -> [u64; 4] {
    [
        endpoint.items,
        endpoint.bytes,
        endpoint.timed,
        endpoint.latency_ns,
    ]
}
