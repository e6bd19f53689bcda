//! How the process at the other end is, for people and for policies.

/// The state of the process at the other end, for people and for policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerState {
    /// Its heartbeat is fresh.
    Alive,
    /// It is there, and its heartbeat is not: stopped, hung, or starved of the CPU.
    Stalled,
    /// It takes part no more, but may still hold samples: it said goodbye, or was evicted.
    Leaving,
    /// Its socket has closed without a goodbye: presumed dead, not yet proven.
    Suspect,
    /// Proven dead: its lifeline has ended, and its device is quiet.
    Dead,
}
