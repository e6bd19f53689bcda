//! Rates: the difference of two looks.

use std::collections::HashMap;

use serde::Serialize;

use super::snapshot::Snapshot;

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
    /// Notes the rates since the last look; none for an endpoint that was not there then.
    pub fn rate(&mut self, now: &mut Snapshot) {
        let seconds = now.taken_ns.saturating_sub(self.last_ns) as f64 / 1e9;
        let mut last = HashMap::new();
        for it in &mut now.endpoints {
            let key: Key = (it.name.clone(), it.pid, it.generation);
            let counts = [it.items, it.bytes, it.timed, it.latency_ns];
            let before = self.last.get(&key).filter(|_| seconds > 0.0);
            it.rate = before.map(|before| {
                // A count that fell is a mistake of that process.
                let since: [u64; 4] =
                    std::array::from_fn(|at| counts[at].saturating_sub(before[at]));
                Rate {
                    items_per_second: since[0] as f64 / seconds,
                    bytes_per_second: since[1] as f64 / seconds,
                    latency_ns: since[3].checked_div(since[2]),
                }
            });
            last.insert(key, counts);
        }
        (self.last, self.last_ns) = (last, now.taken_ns);
    }
}
