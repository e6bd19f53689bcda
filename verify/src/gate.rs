//! The gate in front of the driver: the library's count of the threads inside.

use self::entrances::{Entrance, Entrances};
use crate::atomic::{AtomicBool, AtomicU32};

#[path = "../../crates/warpipe/src/backend/cuda/shutdown_gate/entrances.rs"]
mod entrances;
#[cfg(not(miri))]
#[path = "models/gate.rs"]
pub mod model;

impl<const OWN: usize, const SHARED: usize> Entrances<OWN, SHARED> {
    /// An open gate, with all words made before threads are.
    fn touched() -> Entrances<OWN, SHARED> {
        let entrance = |_| Entrance {
            inside: AtomicU32::default(),
        };
        let gate = Entrances {
            is_closed: AtomicBool::default(),
            own: std::array::from_fn(entrance),
            shared: std::array::from_fn(entrance),
        };
        gate.is_closed.touch();
        let all = gate.own.iter().chain(&gate.shared);
        all.for_each(|entrance| entrance.inside.touch());
        gate
    }
}
