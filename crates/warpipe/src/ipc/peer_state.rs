//! The state of a peer process, as users and policies see it.

/// The state of a peer process, for people and for policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerState {
    /// Its heartbeat is fresh.
    Alive,
    /// The process exists, and its heartbeat is old: it is stopped, hung, or starved of the CPU.
    Stalled,
    /// The peer takes part no more, but may still hold samples: it closed gracefully, or was
    /// evicted.
    Leaving,
    /// The peer's socket has closed without a graceful close: presumed dead, not yet proven.
    Suspect,
    /// Proven dead: the peer's lifeline has ended, and its device is quiet.
    Dead,
}
